"""A store in memory, for tests that need many stores, a clock of their own, or a say before every call.

It keeps the port's contract (strongly consistent, atomic, conditions, generations). `before` is called with the
operation and the key before each call takes effect, in the calling thread: it may raise, wait, or move the clock.
`after` is called when a put, a delete or a listing has taken effect and its answer is under way: if it raises, it got
lost.
"""

import threading
from collections.abc import Callable, Iterator

from streamd.errors import StoreError, StoreErrorKind
from streamd.store.checksum import crc32c
from streamd.store.port import Buffer, Condition, ObjectInfo

Before = Callable[[str, str], None]


class MemoryStore:
    """See the module's text. `clock_s` is the store's clock; whoever has the store moves it."""

    def __init__(
        self, *, clock_s: float = 1_800_000_000.0, before: Before | None = None, after: Before | None = None
    ) -> None:
        self.clock_s = clock_s
        self.before = before
        self.after = after
        self.objects: dict[str, tuple[ObjectInfo, bytes]] = {}
        self._lock = threading.Lock()
        self._written = 0

    @property
    def url(self) -> str:
        return "memory:"

    def _step(self, operation: str, key: str) -> None:
        if self.before is not None:
            self.before(operation, key)

    def _done(self, operation: str, key: str) -> None:
        if self.after is not None:
            self.after(operation, key)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self._step("list", prefix)
        with self._lock:
            infos = [info for key, (info, _) in self.objects.items() if key.startswith(prefix)]
        self._done("list", prefix)
        yield from sorted(infos, key=lambda info: info.key)

    def head(self, key: str) -> ObjectInfo:
        self._step("head", key)
        with self._lock:
            return self._there(key)[0]

    def read(self, key: str, *, generation: str, start: int, end: int) -> Iterator[Buffer]:
        self._step("read", key)
        with self._lock:
            data = self._there(key, generation)[1]
        if start < end:
            yield data[start:end]

    def put(self, key: str, data: Buffer, *, condition: str | Condition) -> ObjectInfo:
        self._step("put", key)
        with self._lock:
            if condition is Condition.ABSENT and key in self.objects:
                raise StoreError(StoreErrorKind.CHANGED, key, "it exists")
            if isinstance(condition, str):
                self._there(key, condition)
            info = self._write(key, bytes(data))
        self._done("put", key)
        return info

    def delete(self, key: str, *, generation: str) -> None:
        self._step("delete", key)
        with self._lock:
            self._there(key, generation)
            del self.objects[key]
        self._done("delete", key)

    def crc32c(self, info: ObjectInfo) -> int:
        self._step("crc32c", info.key)
        with self._lock:
            return crc32c(self._there(info.key, info.generation)[1])

    def now_s(self) -> float:
        self._step("now_s", "")
        return self.clock_s

    def close(self) -> None:
        """Nothing to give up."""

    def _there(self, key: str, generation: str | None = None) -> tuple[ObjectInfo, bytes]:
        if key not in self.objects:
            raise StoreError(StoreErrorKind.GONE, key, "it isn't there")
        if generation is not None and self.objects[key][0].generation != generation:
            raise StoreError(StoreErrorKind.CHANGED, key, "another generation is there")
        return self.objects[key]

    def _write(self, key: str, data: bytes) -> ObjectInfo:
        self._written += 1
        info = ObjectInfo(key, len(data), str(self._written), None, self.clock_s)
        self.objects[key] = (info, data)
        return info
