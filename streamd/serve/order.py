"""Why a chunk is wanted, and what is fetched next: one function from a want to its sort key, one heap.

Pure. A want whose class is raised is pushed again; the stale entry is recognised by its key when it comes up.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum


class Want(IntEnum):
    """Why a chunk is wanted; lower is more urgent."""

    FAULT = 0  # a thread of the sandbox is stopped until it is here
    HOT = 1  # the learned order says that a thread will soon want it
    STREAM = 2  # one of gVisor's 128 slots waits for it
    AHEAD = 3  # nobody has asked yet


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """Sort key of a want: class first, then `rank` (arrival number; for HOT and AHEAD the position in their order)."""

    want: Want
    rank: int


class WantQueue:
    """The wants that no fetch has taken yet, most urgent first."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int]] = []
        self._key: dict[int, Key] = {}

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
            heapq.heappush(self._heap, (key.want, key.rank, chunk))

    def remove(self, chunk: int) -> None:
        """Forget a want; fine when there is none."""
        self._key.pop(chunk, None)

    def first(self, allowed: Callable[[Want], bool]) -> tuple[int, Key] | None:
        """Give the most urgent want, without taking it, if its class is allowed now; None otherwise.

        A class that isn't allowed never lets a less urgent one pass it, except FAULT, whose capacity is its own.
        """
        self._drop_stale()
        if not self._heap:
            return None
        want, rank, chunk = self._heap[0]
        if allowed(Want(want)):
            return chunk, Key(Want(want), rank)
        if want == Want.FAULT:
            return self._first_past_faults(allowed)
        return None

    def _first_past_faults(self, allowed: Callable[[Want], bool]) -> tuple[int, Key] | None:
        rest = [e for e in self._heap if e[0] != Want.FAULT and self._is_current(e)]
        if not rest:
            return None
        want, rank, chunk = min(rest)
        return (chunk, Key(Want(want), rank)) if allowed(Want(want)) else None

    def _is_current(self, entry: tuple[int, int, int]) -> bool:
        key = self._key.get(entry[2])
        return key is not None and (key.want, key.rank) == entry[:2]

    def _drop_stale(self) -> None:
        while self._heap and not self._is_current(self._heap[0]):
            heapq.heappop(self._heap)
