"""The record of one mount's life: every read, GET and chunk release, with times, offsets, sizes and class names. Pure.

It answers, long after a restore, what was read, from where it came, how long it waited and what failed. `streamd
report` draws it, and it can be replayed without runsc. It never holds a byte of memory, a container's name or a spec.

Noting costs one `struct.pack` into a growing buffer, about a microsecond, since it happens for every read. Rows are
plain structs, so numpy reads the same buffer without another copy of the model. Rows have named bounds: what comes
beyond them is dropped and counted, never sampled: a restore is the beginning of a mount's life, and a replay of a
sampled restore would be of nothing that ever happened.

Times are microseconds since the mount began to be (`origin_s` of a `Recorder`, Trio's clock); a wait of more than
71 minutes is told as 71 minutes. All methods of `Recorder` belong to the Trio thread and none of them awaits.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from streamd.errors import StoreErrorKind
from streamd.serve.order import Want

Rows: TypeAlias = NDArray[Any]

# 80 GiB in reads of 256 KiB are 327 680; 14 MiB of memory at most.
READS_MAX = 1 << 19
GETS_MAX = 1 << 17
RELEASES_MAX = 1 << 19
HANDLES_MAX = 4096
EVENTS_MAX = 1000
FACTS_MAX = 64
TEXT_CHARS_MAX = 200
# Of a read that no open file of the kernel's made: the mount's own, or of a handle beyond `HANDLES_MAX`.
NO_HANDLE = 0xFFFF

READ_ROW = np.dtype(
    [
        ("began_us", "<u8"),
        ("start", "<u8"),
        ("size", "<u4"),
        ("wait_us", "<u4"),
        ("handle", "<u2"),
        ("want", "u1"),
        ("tier", "u1"),
    ]
)
GET_ROW = np.dtype(
    [
        ("began_us", "<u8"),
        ("first_byte_us", "<u4"),
        ("took_us", "<u4"),
        ("pack", "<u4"),
        ("start", "<u4"),
        ("end", "<u4"),
        ("origin_bytes", "<u4"),
        ("requests", "<u2"),
        ("want", "u1"),
        ("error", "u1"),
    ]
)
RELEASE_ROW = np.dtype([("at_us", "<u8"), ("size", "<u4")])
_READ, _GET, _RELEASE = struct.Struct("<QQIIHBB"), struct.Struct("<QIIIIIIHBB"), struct.Struct("<QI")
_READS_FULL, _GETS_FULL, _RELEASES_FULL = READS_MAX * _READ.size, GETS_MAX * _GET.size, RELEASES_MAX * _RELEASE.size
_U32, _U16 = 0xFFFFFFFF, 0xFFFF

# What a GET's `error` says: 0 nothing, else 1 + the place here.
ERRORS = tuple(StoreErrorKind)


class Tier(IntEnum):
    """Where the slowest byte of a reply came from; a reply of several chunks has the largest of their tiers."""

    ZERO = 0  # the chunk table says so
    MEMORY = 1  # this process's
    CACHE = 2  # the cache file, in the kernel's page cache
    DISK = 3  # the cache file, read or verified by a thread
    STORE = 4  # waited for a fetch
    FAILED = 5  # the read failed


@dataclass(frozen=True, slots=True)
class RecordedFile:
    """A file of the image; `base` is its first byte in the concatenation of the files."""

    name: str
    size: int
    base: int


@dataclass(frozen=True, slots=True)
class RecordHead:
    """What a mount was of. `started_s` is seconds since the epoch, `digest` the snapshot's, in hexadecimal."""

    snapshot: str
    digest: str
    snapshot_url: str
    mountpoint: str
    pid: int
    started_s: float
    chunk_bytes: int
    stored_bytes: int
    files: tuple[RecordedFile, ...]
    facts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RecordedHandle:
    """One open file: its name, and when it was opened and closed; None: it still is open."""

    file_name: str
    opened_us: int
    closed_us: int | None


@dataclass(frozen=True, slots=True)
class RecordedEvent:
    """Something that happened once: a kebab-case kind and a few words."""

    at_us: int
    kind: str
    detail: str


@dataclass(frozen=True, slots=True)
class Dropped:
    """What came after the bounds were reached."""

    reads: int = 0
    gets: int = 0
    releases: int = 0
    events: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """A record as it is read: rows of `READ_ROW`, `GET_ROW` by `began_us` and of `RELEASE_ROW` by `at_us`.

    A recorder's copy of itself has the rows in the order in which they were noted; `ordered` gives them as above.
    A read's `start` is in its handle's file, `handle` is an index of `handles` or `NO_HANDLE`. `first_byte_us` and
    `took_us` of a GET are since its beginning; 0 when no byte came.
    """

    head: RecordHead
    lasted_us: int
    handles: tuple[RecordedHandle, ...]
    events: tuple[RecordedEvent, ...]
    reads: Rows
    gets: Rows
    releases: Rows
    dropped: Dropped

    def reads_of(self, file_name: str) -> Rows:
        """Give the reads that the kernel made of a file, in the order in which they came."""
        wanted = [index for index, handle in enumerate(self.handles) if handle.file_name == file_name]
        return self.reads[np.isin(self.reads["handle"], wanted)]

    def ordered(self) -> "Record":
        """Give this record with its rows in order."""
        reads, gets = (rows[np.argsort(rows["began_us"], kind="stable")] for rows in (self.reads, self.gets))
        return replace(self, reads=reads, gets=gets)


class Recorder:
    """Takes note for one mount's life."""

    def __init__(self, head: RecordHead, *, origin_s: float) -> None:
        self._head = head
        self._facts = {_text(name): _text(value) for name, value in head.facts.items()}
        self._origin_s = origin_s
        self._reads = bytearray()
        self._gets = bytearray()
        self._releases = bytearray()
        self._handles: list[RecordedHandle] = []
        self._index: dict[int, int] = {}
        self._events: list[RecordedEvent] = []
        self._dropped_reads = self._dropped_gets = self._dropped_releases = self._dropped_events = 0
        self._changes = 0

    @property
    def changes(self) -> int:
        """A number that grows with everything that is noted."""
        dropped = self._dropped_reads + self._dropped_gets + self._dropped_releases + self._dropped_events
        return len(self._reads) + len(self._gets) + len(self._releases) + dropped + self._changes

    def read(
        self, handle_number: int, want: Want, tier: Tier, *, start: int, size: int, began_s: float, wait_s: float
    ) -> None:
        """Note a read of [start, start + size) of the handle's file that was answered or failed just now.

        `began_s` is when it came, `wait_s` how long it waited, 0 when its bytes were here.
        """
        if len(self._reads) >= _READS_FULL:
            self._dropped_reads += 1
            return
        began_us = int((began_s - self._origin_s) * 1e6)
        wait_us = int(wait_s * 1e6)
        self._reads += _READ.pack(
            began_us if began_us > 0 else 0,
            start,
            size,
            wait_us if wait_us < _U32 else _U32,
            self._index.get(handle_number, NO_HANDLE),
            want,
            tier,
        )

    def get(
        self,
        pack: int,
        want: Want,
        error: StoreErrorKind | None,
        *,
        start: int,
        end: int,
        began_s: float,
        first_byte_s: float,
        took_s: float,
        requests: int,
        origin_bytes: int,
    ) -> None:
        """Note a GET of [start, end) of a pack that is over; `want` is the class that made it.

        `began_s` is a moment, `first_byte_s` and `took_s` are seconds since then. `requests` are its tries,
        `origin_bytes` what the store sent for it.
        """
        if len(self._gets) >= _GETS_FULL:
            self._dropped_gets += 1
            return
        self._gets += _GET.pack(
            self._us(began_s),
            min(int(first_byte_s * 1e6), _U32),
            min(int(took_s * 1e6), _U32),
            pack,
            start,
            end,
            min(origin_bytes, _U32),
            min(requests, _U16),
            want,
            0 if error is None else 1 + ERRORS.index(error),
        )

    def released(self, at_s: float, size: int) -> None:
        """Note that a chunk of `size` bytes, decoded, came from the store and is verified."""
        if len(self._releases) >= _RELEASES_FULL:
            self._dropped_releases += 1
            return
        self._releases += _RELEASE.pack(self._us(at_s), size)

    def opened(self, handle_number: int, file_name: str, at_s: float) -> None:
        """Note that a file was opened."""
        self._changes += 1
        if len(self._handles) < HANDLES_MAX:
            self._index[handle_number] = len(self._handles)
            self._handles.append(RecordedHandle(file_name, self._us(at_s), None))

    def closed(self, handle_number: int, at_s: float) -> None:
        """Note that a file was closed; its reads that come to an end after this are nobody's."""
        self._changes += 1
        index = self._index.pop(handle_number, None)
        if index is not None:
            handle = self._handles[index]
            self._handles[index] = RecordedHandle(handle.file_name, handle.opened_us, self._us(at_s))

    def event(self, at_s: float, kind: str, detail: str = "") -> None:
        """Note something that happens seldom: `kind` in kebab-case, `detail` is cut at `TEXT_CHARS_MAX`."""
        if len(self._events) >= EVENTS_MAX:
            self._dropped_events += 1
            return
        self._events.append(RecordedEvent(self._us(at_s), _text(kind), _text(detail)))
        self._changes += 1

    def fact(self, name: str, value: object) -> None:
        """Set a fact of the head; beyond `FACTS_MAX`, only those that are there already."""
        if name in self._facts or len(self._facts) < FACTS_MAX:
            self._facts[_text(name)] = _text(value)
            self._changes += 1

    def record(self, now_s: float) -> Record:
        """Give a copy of what was noted so far: some ms for the most there can be."""
        return Record(
            head=replace(
                self._head,
                snapshot=_text(self._head.snapshot),
                snapshot_url=_text(self._head.snapshot_url),
                mountpoint=_text(self._head.mountpoint),
                facts=dict(self._facts),
            ),
            lasted_us=self._us(now_s),
            handles=tuple(self._handles),
            events=tuple(self._events),
            reads=np.frombuffer(bytes(self._reads), READ_ROW),
            gets=np.frombuffer(bytes(self._gets), GET_ROW),
            releases=np.frombuffer(bytes(self._releases), RELEASE_ROW),
            dropped=Dropped(self._dropped_reads, self._dropped_gets, self._dropped_releases, self._dropped_events),
        )

    def _us(self, at_s: float) -> int:
        return max(0, int((at_s - self._origin_s) * 1e6))


def _text(value: object) -> str:
    """Make anything fit for a record: printable, and short."""
    text = str(value)[:TEXT_CHARS_MAX]
    return "".join(char if char.isprintable() else "?" for char in text)
