"""The thread that writes verified chunks to the cache, behind the readers.

A chunk is offered after its readers were woken, and counts as cached only once the disk has confirmed it: what the
kernel has only taken can still be lost when its write-back fails (a full thin volume, a faulty disk), and is then read
as zeros, silently. So chunks are written, synced a few megabytes at a time, and then reported. The queue is bounded in
bytes; what doesn't fit is refused. The first error ends writing for good, and readers never hear of it. So does a disk
that is full, or that others fill up to the cache's reserve, unless images that nobody uses can leave it.

Chunks that leave the file pass through the same queue: whatever is written into their room comes after them.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from streamd.serve.node_cache import FULL, NodeCache
from streamd.store.port import Buffer

# Enough for a disk to hiccup for a second at link speed, small against the memory cap.
QUEUE_BYTES_MAX = 64 << 20
# Synced at once: large enough that a sync's own cost (milliseconds) doesn't count, a quarter of the queue.
_SYNC_BYTES = 16 << 20
# And at the latest so long after the last chunk came.
_SYNC_WAIT_S = 0.2
# Chunks that come within this time cost one wake-up of the thread. The queue takes what 5 GB/s bring meanwhile.
_GATHER_S = 0.01


class _Item(NamedTuple):
    chunk: int
    data: Buffer
    offset: int


class Leaving(NamedTuple):
    """A chunk that leaves the file: its first byte in the image, and how many it has."""

    chunk: int
    offset: int
    size: int


class WriteBehind:
    """Writes chunks in the order offered. `offer`, `settled` and `pending_bytes` belong to one (the Trio) thread.

    `written(chunks, error)` is called from the writer's thread: `error` None when they are on the disk. An error ends
    the thread; the chunks may be none then.
    """

    def __init__(self, cache: NodeCache, written: Callable[[Sequence[int], OSError | None], None]) -> None:
        self._cache = cache
        self._written = written
        self._queue: queue.SimpleQueue[_Item | Leaving | None] = queue.SimpleQueue()
        self._busy_since_s: float | None = None
        self.pending_bytes = 0
        self._stop = False
        self._has_made_room = False
        self._thread = threading.Thread(target=self._run, name="cache-writer", daemon=True)
        self._thread.start()

    def offer(self, chunk: int, data: Buffer, offset: int) -> bool:
        """Queue a chunk for writing; False when the queue is full. `settled` must follow each `written`."""
        if not self.has_room(len(data)):
            return False
        self.pending_bytes += len(data)
        self._queue.put(_Item(chunk, data, offset))
        return True

    def has_room(self, size: int) -> bool:
        """Whether a chunk of that size would be taken now."""
        return self.pending_bytes + size <= QUEUE_BYTES_MAX

    def evict(self, leaving: Sequence[Leaving]) -> None:
        """Queue chunks that nobody reads from the file any more; what is offered after them may use their room."""
        for chunk in leaving:
            self._queue.put(chunk)

    def settled(self, size: int) -> None:
        """Note that a chunk of that size left the queue."""
        self.pending_bytes -= size

    def stalled_s(self) -> float:
        """How long the write or sync under way has taken so far, 0 when there is none."""
        since_s = self._busy_since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    def stop(self) -> None:
        """Write nothing more; the write under way, if any, is not waited for."""
        self._stop = True
        self._queue.put(None)

    def finish(self, timeout_s: float) -> None:
        """Write what is queued, then stop; give up after `timeout_s`."""
        self._queue.put(None)
        self._thread.join(timeout_s)
        self._stop = True

    def _run(self) -> None:
        batch: list[int] = []
        batch_bytes = 0
        while not self._stop:
            try:
                item = self._next(_SYNC_WAIT_S if batch else None)
                is_last = item is None
            except queue.Empty:
                item, is_last = None, False
            failure = None
            if isinstance(item, Leaving):
                failure = self._attempt(self._cache.evict, item.chunk, item.offset, item.size)
            elif item is not None:
                failure = self._store(item, is_first=not batch)
                if failure is not None and failure.errno in FULL and self._make_room():
                    failure = self._store(item, is_first=True)
                if failure is None:
                    batch.append(item.chunk)
                    batch_bytes += len(item.data)
            # Also when the disk is full: what it took before it was may be there.
            if batch and (item is None or failure is not None or batch_bytes >= _SYNC_BYTES):
                unconfirmed = self._attempt(self._cache.confirm, batch)
                self._written(batch, unconfirmed)
                batch, batch_bytes = [], 0
                failure = unconfirmed or failure
            if failure is not None:
                self._written([item.chunk] if isinstance(item, _Item) else [], failure)
            if failure is not None or is_last:
                return

    def _store(self, item: _Item, *, is_first: bool) -> OSError | None:
        """Write a chunk; the disk is looked at before the `is_first` of those that are synced at once."""
        failure = self._attempt(self._cache.check_reserve) if is_first else None
        return failure or self._attempt(self._cache.write, item.data, item.offset)

    def _make_room(self) -> bool:
        """Have other images leave a disk that is full: once, so that two of them don't do so in turns."""
        if self._has_made_room:
            return False
        self._has_made_room = True
        return self._cache.make_room()

    def _next(self, timeout_s: float | None) -> _Item | Leaving | None:
        """Give the first of the queue. Raises: queue.Empty when nothing comes in time."""
        with contextlib.suppress(queue.Empty):
            return self._queue.get_nowait()
        item = self._queue.get(timeout=timeout_s)
        if item is not None:
            time.sleep(_GATHER_S)
        return item

    def _attempt(self, call: Callable[..., None], *args: object) -> OSError | None:
        self._busy_since_s = time.monotonic()
        try:
            call(*args)
        except OSError as error:
            return error
        finally:
            self._busy_since_s = None
        return None
