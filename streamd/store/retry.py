"""Trying again: the schedule (pure), and the one wrapper that retries for commands.

What is retried: TRANSIENT and THROTTLED, until a call has made no progress for `deadline_s`; CREDENTIALS once a call,
for a store that drops its token on a 401. Everything else is an answer, and asking again changes nothing.

A request whose answer was lost may have been carried out. So, after such a failure, a later refusal is looked at twice:
- `put` and CHANGED: if what is there now is what we meant to write (the same bytes, or, of a large object, size and
  crc32c), it is taken for our own. Callers put something of their own into whatever must be told apart from another's.
- `delete` and GONE: it is gone, as was asked.
"""

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from streamd.errors import StoreError, StoreErrorKind
from streamd.store.checksum import crc32c
from streamd.store.port import Buffer, Condition, ObjectInfo, Store

_T = TypeVar("_T")

_RETRIED = (StoreErrorKind.TRANSIENT, StoreErrorKind.THROTTLED)
# Up to this size an object is read and compared: manifests of small snapshots, tombstones, traces.
_COMPARED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential back-off with jitter.

    The first delay is short, because most failures are one cut connection; the last is what a store that is down for
    minutes should see of each client. Jitter takes away up to `jitter` of a delay, so that clients that failed together
    don't come back together.
    """

    first_s: float = 0.1
    factor: float = 2.0
    limit_s: float = 10.0
    jitter: float = 0.5

    def delay_s(self, attempt: int, random: float) -> float:
        """Give the wait after failed attempt number `attempt` (0, 1, …); `random` is in [0, 1)."""
        # The exponent is bounded: a read that waits for days must not overflow.
        delay_s = min(self.first_s * self.factor ** min(attempt, 64), self.limit_s)
        return delay_s * (1 - self.jitter * random)


def retrying(
    store: Store,
    *,
    deadline_s: float,
    backoff: Backoff = Backoff(),
    on_retry: Callable[[StoreError, float], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
    wait: Callable[[float], object] | None = None,
    jitter: Callable[[], float] = random.random,
) -> Store:
    """Wrap a store so that its calls are tried again, each until it made no progress for `deadline_s`.

    `on_retry(error, delay_s)` hears of every failure that is tried again, in the calling thread. `close()` ends all
    waits: the calls under way then raise their last error. (`clock`, `wait` and `jitter` are for tests.)
    """
    return _RetryingStore(store, deadline_s, backoff, on_retry, clock, wait, jitter)


class _Patience:
    """One call's attempts: counts them, waits between them, and gives up."""

    def __init__(self, owner: "_RetryingStore") -> None:
        self._owner = owner
        self.attempt = 0
        self._credentials_left = 1
        self._since_s = owner.clock()
        self.answer_lost = False

    def progress(self) -> None:
        """Start over: bytes have arrived."""
        self.attempt = 0
        self._credentials_left = 1
        self._since_s = self._owner.clock()

    def after(self, error: StoreError) -> None:
        """Wait, if there is to be another attempt. Raises: the error, when there isn't."""
        owner = self._owner
        if error.store_kind is StoreErrorKind.CREDENTIALS and self._credentials_left:
            self._credentials_left -= 1
        elif error.store_kind not in _RETRIED:
            raise error
        self.answer_lost = True
        delay_s = owner.backoff.delay_s(self.attempt, owner.jitter())
        self.attempt += 1
        waited_s = owner.clock() - self._since_s
        if waited_s + delay_s > owner.deadline_s:
            raise _given_up(error, self.attempt, waited_s) from error
        if owner.on_retry is not None:
            owner.on_retry(error, delay_s)
        owner.wait(delay_s)
        if owner.closed.is_set():
            raise _given_up(error, self.attempt, waited_s) from error


def _given_up(error: StoreError, attempts: int, waited_s: float) -> StoreError:
    times = "once" if attempts == 1 else f"{attempts} times in {waited_s:.0f} s"
    result = StoreError(error.store_kind, "", f"{error} (tried {times})")
    result.key = error.key
    return result


class _RetryingStore:
    """See `retrying`. It has no state but its settings; the state of a call is its `_Patience`."""

    def __init__(
        self,
        store: Store,
        deadline_s: float,
        backoff: Backoff,
        on_retry: Callable[[StoreError, float], None] | None,
        clock: Callable[[], float],
        wait: Callable[[float], object] | None,
        jitter: Callable[[], float],
    ) -> None:
        self._store = store
        self.deadline_s = deadline_s
        self.backoff = backoff
        self.on_retry = on_retry
        self.clock = clock
        self.jitter = jitter
        self.closed = threading.Event()
        self.wait = wait or self.closed.wait

    def _try(self, call: Callable[[_Patience], _T]) -> _T:
        patience = _Patience(self)
        while True:
            try:
                return call(patience)
            except StoreError as error:
                patience.after(error)

    @property
    def url(self) -> str:
        return self._store.url

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        # A listing that fails half way is asked for again from its start; what was given out already is skipped.
        patience = _Patience(self)
        last = ""
        while True:
            try:
                for info in self._store.list(prefix):
                    if info.key > last:
                        yield info
                        last = info.key
                        patience.progress()
                return
            except StoreError as error:
                patience.after(error)

    def head(self, key: str) -> ObjectInfo:
        return self._try(lambda _: self._store.head(key))

    def read(self, key: str, *, generation: str, start: int, end: int) -> Iterator[Buffer]:
        patience = _Patience(self)
        while start < end:
            try:
                for piece in self._store.read(key, generation=generation, start=start, end=end):
                    start += len(piece)
                    yield piece
                    patience.progress()
                if start < end:
                    raise StoreError(StoreErrorKind.TRANSIENT, key, f"body ended at byte {start}, before {end}")
            except StoreError as error:
                patience.after(error)

    def put(self, key: str, data: Buffer, *, condition: str | Condition) -> ObjectInfo:
        def attempt(patience: _Patience) -> ObjectInfo:
            try:
                return self._store.put(key, data, condition=condition)
            except StoreError as error:
                if error.store_kind is StoreErrorKind.CHANGED and patience.answer_lost:
                    own = self._same(key, data)
                    if own is not None:
                        return own
                raise

        return self._try(attempt)

    def _same(self, key: str, data: Buffer) -> ObjectInfo | None:
        """Describe the object at `key` if it is what we meant to write."""
        view = memoryview(data).cast("B")
        try:
            info = self._store.head(key)
            if info.size != len(view):
                return None
            if info.size <= _COMPARED_BYTES:
                there = b"".join(self._store.read(key, generation=info.generation, start=0, end=info.size))
                same = there == view
            else:
                same = self._store.crc32c(info) == crc32c(view)
        except StoreError as error:
            if error.store_kind in (StoreErrorKind.GONE, StoreErrorKind.CHANGED):
                return None  # another's, and replaced again
            raise
        return info if same else None

    def delete(self, key: str, *, generation: str) -> None:
        def attempt(patience: _Patience) -> None:
            try:
                self._store.delete(key, generation=generation)
            except StoreError as error:
                if error.store_kind is not StoreErrorKind.GONE or not patience.answer_lost:
                    raise

        self._try(attempt)

    def crc32c(self, info: ObjectInfo) -> int:
        return self._try(lambda _: self._store.crc32c(info))

    def now_s(self) -> float:
        return self._try(lambda _: self._store.now_s())

    def close(self) -> None:
        self.closed.set()
        self._store.close()
