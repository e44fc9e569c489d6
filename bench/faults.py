"""A store that misbehaves on demand: it wraps any store and fails, cuts, delays, corrupts or hangs calls by rule.

    faulty = FaultyStore(store)
    faulty.add(Fault(Fail(StoreErrorKind.TRANSIENT), key="*/packs/*", nth=2))    # the third read of any pack
    faulty.add(Fault(Cut(at_byte=1), times=3))                                   # the next three reads
    faulty.add(Fault(Fail(StoreErrorKind.TRANSIENT, after=True), operation="put"))   # done, but the answer is lost
    hang = faulty.add(Fault(Hang(at_byte=4096)));  …;  faulty.remove(hang)       # frees whoever hangs by it
    faulty.counts["ID/packs/P/00000000"].bytes_read

Rules may be added and removed from any thread at any time. A call obeys the first rule that matches it and still has
`times` left. What was asked is in `requests` (in the order of arrival) and `counts` (by key).

It waits as it is told to: in virtual time, if `clock` and `wait` are those of `bench/virtual_time.py`. Like a client of
a real store, it gives a call up that heard nothing for `silence_s`.
"""

import contextlib
import fnmatch
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from streamd.errors import StoreError, StoreErrorKind
from streamd.store.port import Buffer, Condition, ObjectInfo, Store

Operation: TypeAlias = Literal["list", "head", "read", "put", "delete", "crc32c", "now_s"]

# A forgotten hang ends a test run with an error, not never.
_SILENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class Fail:
    """Answer with an error; `after`: once the call has taken effect (a lost answer)."""

    kind: StoreErrorKind = StoreErrorKind.TRANSIENT
    after: bool = False


@dataclass(frozen=True, slots=True)
class Cut:
    """Give the body's first `at_byte` bytes, then fail. A negative count is from the end: -1 is all but one byte."""

    at_byte: int
    kind: StoreErrorKind = StoreErrorKind.TRANSIENT


@dataclass(frozen=True, slots=True)
class Delay:
    """Wait at that byte of the body, or before any other call."""

    seconds: float
    at_byte: int = 0


@dataclass(frozen=True, slots=True)
class Hang:
    """Give the body's first `at_byte` bytes, then nothing until the fault is removed; then go on."""

    at_byte: int = 0


@dataclass(frozen=True, slots=True)
class Corrupt:
    """Flip every bit of one byte of the body; negative counts are from its end."""

    at_byte: int = 0


@dataclass(slots=True, eq=False)
class Throttle:
    """Answer THROTTLED to calls beyond `calls_per_s`; a tenth of a second's worth may come at once.

    Only what is served counts, as with a store whose quota is kept that way. One object serves one rule.
    """

    calls_per_s: float
    _saved: float = 0.0
    _at_s: float = -math.inf

    def admits(self, now_s: float) -> bool:
        """Take one call's share, if it is there."""
        burst = max(1.0, self.calls_per_s / 10)
        self._saved = min(burst, self._saved + (now_s - self._at_s) * self.calls_per_s)
        self._at_s = now_s
        if self._saved < 1:
            return False
        self._saved -= 1
        return True


Action: TypeAlias = Fail | Cut | Delay | Hang | Corrupt | Throttle


@dataclass(slots=True, eq=False)
class Fault:
    """A rule: `action` for calls of `operation` whose key matches the shell pattern `key`.

    It starts with the `nth` such call (0 is the next one) and is used up after `times` (None: never). `skipped` and
    `fired` count, and belong to the store that the rule was added to.
    """

    action: Action
    operation: Operation | None = "read"
    key: str = "*"
    nth: int = 0
    times: int | None = 1
    skipped: int = 0
    fired: int = 0
    removed: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True, slots=True)
class Request:
    """One call; `start` and `end` are a read's range, else 0."""

    operation: Operation
    key: str
    start: int = 0
    end: int = 0


@dataclass(slots=True)
class Count:
    """What was asked of one key: calls of any kind, reads, bytes that reads asked for, bytes that they got."""

    requests: int = 0
    reads: int = 0
    bytes_asked: int = 0
    bytes_read: int = 0


class FaultyStore:
    """`store`, obeying the rules that were added; see the module's text."""

    def __init__(
        self,
        store: Store,
        *,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[threading.Event, float], bool] = threading.Event.wait,
        silence_s: float = _SILENCE_S,
    ) -> None:
        self._store = store
        self._clock = clock
        self._wait_for = wait
        self._silence_s = silence_s
        self._lock = threading.Lock()
        self._faults: list[Fault] = []
        self.requests: list[Request] = []
        self.counts: dict[str, Count] = {}
        self.hanging = 0  # calls that hang right now

    def add(self, fault: Fault) -> Fault:
        """Add a rule, after those that are there, and give it back for `remove`."""
        with self._lock:
            self._faults.append(fault)
        return fault

    def remove(self, fault: Fault) -> None:
        """Take a rule away (it may be gone already) and free the calls that hang or wait by it."""
        with self._lock:
            if fault in self._faults:
                self._faults.remove(fault)
        fault.removed.set()

    def clear(self) -> None:
        """Remove all rules."""
        for fault in tuple(self._faults):
            self.remove(fault)

    @property
    def bytes_read(self) -> int:
        """Bytes that all reads got."""
        with self._lock:
            return sum(count.bytes_read for count in self.counts.values())

    def _note(self, request: Request) -> Fault | None:
        """Count a call and find its rule."""
        with self._lock:
            self.requests.append(request)
            count = self.counts.setdefault(request.key, Count())
            count.requests += 1
            if request.operation == "read":
                count.reads += 1
                count.bytes_asked += request.end - request.start
            for fault in self._faults:
                if fault.operation not in (None, request.operation) or not fnmatch.fnmatchcase(request.key, fault.key):
                    continue
                if fault.skipped < fault.nth:
                    fault.skipped += 1
                elif fault.times is None or fault.fired < fault.times:
                    if isinstance(fault.action, Throttle) and fault.action.admits(self._clock()):
                        continue
                    fault.fired += 1
                    return fault
        return None

    def _wait(self, fault: Fault, key: str) -> None:
        """Do what `Delay` and `Hang` say."""
        wait_s = fault.action.seconds if isinstance(fault.action, Delay) else math.inf
        with self._lock:
            self.hanging += isinstance(fault.action, Hang)
        try:
            is_removed = self._wait_for(fault.removed, min(wait_s, self._silence_s))
            if not is_removed and wait_s > self._silence_s:
                raise StoreError(StoreErrorKind.TRANSIENT, key, f"nothing came for {self._silence_s:g} s")
        finally:
            with self._lock:
                self.hanging -= isinstance(fault.action, Hang)

    @contextlib.contextmanager
    def _call(self, operation: Operation, key: str) -> Iterator[None]:
        """Obey the rule of a call that has no body."""
        fault = self._note(Request(operation, key))
        match fault and fault.action:
            case Fail(kind, after=False):
                raise StoreError(kind, key, "injected")
            case Throttle():
                raise StoreError(StoreErrorKind.THROTTLED, key, "injected")
            case Delay() | Hang():
                assert fault
                self._wait(fault, key)
        yield
        match fault and fault.action:
            case Fail(kind, after=True):
                raise StoreError(kind, key, "injected after the call took effect")

    @property
    def url(self) -> str:
        return self._store.url

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        with self._call("list", prefix):
            yield from self._store.list(prefix)

    def head(self, key: str) -> ObjectInfo:
        with self._call("head", key):
            return self._store.head(key)

    def put(self, key: str, data: Buffer, *, condition: str | Condition) -> ObjectInfo:
        with self._call("put", key):
            return self._store.put(key, data, condition=condition)

    def delete(self, key: str, *, generation: str) -> None:
        with self._call("delete", key):
            self._store.delete(key, generation=generation)

    def crc32c(self, info: ObjectInfo) -> int:
        with self._call("crc32c", info.key):
            return self._store.crc32c(info)

    def now_s(self) -> float:
        with self._call("now_s", ""):
            return self._store.now_s()

    def close(self) -> None:
        self.clear()
        self._store.close()

    def read(self, key: str, *, generation: str, start: int, end: int) -> Iterator[Buffer]:
        fault = self._note(Request("read", key, start, end))
        action = fault.action if fault else None
        if isinstance(action, Throttle):
            raise StoreError(StoreErrorKind.THROTTLED, key, "injected")
        if isinstance(action, Fail):
            if not action.after:
                raise StoreError(action.kind, key, "injected")
            action = Cut(end - start, action.kind)  # the whole body, then the error
        at = -1 if action is None else action.at_byte
        if action is not None and at < 0:
            at += end - start
        given = 0
        for part in _split(self._store.read(key, generation=generation, start=start, end=end), at):
            if given == at:
                match action:
                    case Cut(_, kind):
                        raise StoreError(kind, key, f"injected after {given} bytes")
                    case Delay() | Hang():
                        assert fault
                        self._wait(fault, key)
                    case Corrupt() if part:
                        part = bytes([part[0] ^ 0xFF]) + part[1:]
            if part:
                given += len(part)
                with self._lock:
                    self.counts[key].bytes_read += len(part)
                yield part


def _split(pieces: Iterator[Buffer], at: int) -> Iterator[bytes]:
    """Give the pieces, one of them split so that a part begins at byte `at`, and an empty part for the end."""
    given = 0
    for piece in pieces:
        cut = min(max(at - given, 0), len(piece))
        given += len(piece)
        yield from (bytes(part) for part in (memoryview(piece)[:cut], memoryview(piece)[cut:]) if part)
    yield b""
