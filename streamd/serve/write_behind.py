"""The thread that writes verified chunks to the cache, behind the readers.

A chunk is offered after its readers were woken. The queue is bounded in bytes; what doesn't fit is refused and the
caller counts it. The first error ends writing for good: the disk is full or faulty, and readers never hear of it.
"""

import queue
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from streamd.serve.node_cache import NodeCache
from streamd.store.port import Buffer

# Enough for a disk to hiccup for a second at link speed, small against the memory cap.
QUEUE_BYTES_MAX = 64 << 20


class _Item(NamedTuple):
    chunk: int
    data: Buffer
    offset: int


class WriteBehind:
    """Writes chunks in the order offered. `offer`, `pending_bytes` and `stalled_s` belong to one (the Trio) thread.

    `written(chunk, error)` is called from the writer's thread, once a chunk, `error` None when it is in the file.
    """

    def __init__(self, cache: NodeCache, written: Callable[[int, OSError | None], None]) -> None:
        self._cache = cache
        self._written = written
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._busy_since_s: float | None = None
        self.pending_bytes = 0
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="cache-writer", daemon=True)
        self._thread.start()

    def offer(self, chunk: int, data: Buffer, offset: int) -> bool:
        """Queue a chunk for writing; False when the queue is full. `settled` must follow each `written`."""
        if self.pending_bytes + len(data) > QUEUE_BYTES_MAX:
            return False
        self.pending_bytes += len(data)
        self._queue.put(_Item(chunk, data, offset))
        return True

    def settled(self, size: int) -> None:
        """Note that a chunk of that size left the queue."""
        self.pending_bytes -= size

    def stalled_s(self) -> float:
        """How long the write under way has taken so far, 0 when there is none."""
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
        while (item := self._queue.get()) is not None:
            if self._stop:
                return
            self._busy_since_s = time.monotonic()
            try:
                self._cache.write(item.chunk, item.data, item.offset)
            except OSError as error:
                self._written(item.chunk, error)
                return
            finally:
                self._busy_since_s = None
            self._written(item.chunk, None)
