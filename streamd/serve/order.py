"""Why a chunk is wanted, and what is fetched next: one function from a want to its sort key, one queue. Pure.

A want whose class is raised is pushed again; the stale entry is recognised by its key when it comes up.
"""

import heapq
from enum import IntEnum
from typing import NamedTuple


class Want(IntEnum):
    """Why a chunk is wanted; lower is more urgent."""

    FAULT = 0  # a thread of the sandbox is stopped until it is here
    WINDOW = 1  # the rest of the memory that such a thread will turn out to wait for (serve/windows.py)
    HOT = 2  # the learned order says that a thread will soon want it
    STREAM = 3  # one of gVisor's 128 slots waits for it
    AHEAD = 4  # nobody has asked yet


WANTS = tuple(Want)


class Key(NamedTuple):
    """Sort key of a want: class first, then `rank` (arrival number; for HOT the position in the learned order)."""

    want: Want
    rank: int


class WantQueue:
    """The wants that no fetch has taken yet, most urgent first; a heap for each class, since one can be held back."""

    def __init__(self) -> None:
        self._heaps: dict[Want, list[tuple[int, int]]] = {want: [] for want in WANTS}
        self._key: dict[int, Key] = {}
        self._asked: dict[int, int] = {}  # chunk → rank of the first read that waits for it

    def __len__(self) -> int:
        return len(self._key)

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._key

    def key(self, chunk: int) -> Key | None:
        """Give the key under which a chunk waits, None when it doesn't."""
        return self._key.get(chunk)

    def push(self, chunk: int, key: Key) -> None:
        """Want a chunk; a chunk that waits already is only ever raised."""
        waiting = self._key.get(chunk)
        if waiting is None or key < waiting:
            self._key[chunk] = key
            heapq.heappush(self._heaps[key.want], (key.rank, chunk))

    def ask(self, chunk: int, rank: int) -> None:
        """Let a chunk that waits under another class be found among STREAM's as well, since a read waits for it.

        Whoever may not fetch ahead (memory is full, and can only be read empty) must still fetch what is read.
        """
        key = self._key.get(chunk)
        if key is not None and key.want in (Want.WINDOW, Want.HOT, Want.AHEAD) and chunk not in self._asked:
            self._asked[chunk] = rank
            heapq.heappush(self._heaps[Want.STREAM], (rank, chunk))

    def remove(self, chunk: int) -> None:
        """Forget a want; fine when there is none."""
        self._key.pop(chunk, None)
        self._asked.pop(chunk, None)

    def first(self, want: Want) -> int | None:
        """Give the chunk of that class that is next, without taking it; None when there is none.

        STREAM has those that were asked for, too, under whatever class they wait.
        """
        heap = self._heaps[want]
        while heap:
            rank, chunk = heap[0]
            if self._key.get(chunk) == (want, rank) or (want == Want.STREAM and self._asked.get(chunk) == rank):
                return chunk
            heapq.heappop(heap)
        return None
