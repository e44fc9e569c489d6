"""A store behind an artificial link, so that a laptop shows what a lazy restore gains: a latency and a rate.

Every request waits `latency_s` before anything happens. All bodies together, read or put, move at `bytes_per_s`: they
share one link, in the order in which their steps ask for it, so that two readers get half each.
"""

import threading
import time
from collections.abc import Callable, Iterator

from streamd.store.port import Buffer, Condition, ObjectInfo, Store

# Small steps make a smooth link: 64 KiB are 0.6 ms at 100 MB/s.
_STEP_BYTES = 64 << 10
# A sleep ends late by 0.1 ms or so. What was lost that way may be caught up with, up to this much: without it a single
# reader at 1 GB/s got 40 % of the rate.
_CREDIT_S = 0.005


class Link:
    """A link of a given rate, shared by threads: `pass_bytes` returns when the last of the bytes would have arrived."""

    def __init__(
        self,
        bytes_per_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free_s = clock() - _CREDIT_S  # when the link has passed all that was given to it

    def pass_bytes(self, count: int) -> None:
        """Wait for one's turn and for the bytes to pass."""
        with self._lock:
            now_s = self._clock()
            self._free_s = max(self._free_s, now_s - _CREDIT_S) + count / self._bytes_per_s
            wait_s = self._free_s - now_s
        if wait_s > 0:
            self._sleep(wait_s)


class ShapedStore:
    """`store` behind a link. `bytes_per_s` None is no limit; `url` is the address that asked for this, if any."""

    def __init__(
        self,
        store: Store,
        *,
        latency_s: float = 0.0,
        bytes_per_s: float | None = None,
        url: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store = store
        self.latency_s = latency_s
        self.bytes_per_s = bytes_per_s
        self._url = url or store.url
        self._sleep = sleep
        self._link = Link(bytes_per_s, clock=clock, sleep=sleep) if bytes_per_s else None

    def _ask(self) -> None:
        if self.latency_s:
            self._sleep(self.latency_s)

    @property
    def url(self) -> str:
        return self._url

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self._ask()
        yield from self._store.list(prefix)

    def head(self, key: str) -> ObjectInfo:
        self._ask()
        return self._store.head(key)

    def read(self, key: str, *, generation: str, start: int, end: int) -> Iterator[Buffer]:
        if start < end:
            self._ask()
        for piece in self._store.read(key, generation=generation, start=start, end=end):
            if self._link is None:
                yield piece
                continue
            view = memoryview(piece)
            for at in range(0, len(view), _STEP_BYTES):
                step = view[at : at + _STEP_BYTES]
                self._link.pass_bytes(len(step))
                yield step

    def put(self, key: str, data: Buffer, *, condition: str | Condition) -> ObjectInfo:
        self._ask()
        if self._link is not None:
            size = memoryview(data).nbytes
            for at in range(0, size, _STEP_BYTES):
                self._link.pass_bytes(min(_STEP_BYTES, size - at))
        return self._store.put(key, data, condition=condition)

    def delete(self, key: str, *, generation: str) -> None:
        self._ask()
        self._store.delete(key, generation=generation)

    def crc32c(self, info: ObjectInfo) -> int:
        self._ask()
        return self._store.crc32c(info)

    def now_s(self) -> float:
        self._ask()
        return self._store.now_s()

    def close(self) -> None:
        self._store.close()
