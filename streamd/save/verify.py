"""Verify: read every pack of a snapshot and check all that the manifest says; what is wrong is counted, to the end.

Memory, whatever the snapshot: the manifest's, and for each thread a piece of a body, a frame and a chunk.
"""

import hashlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from streamd.errors import NotFound, StoreError, StoreErrorKind
from streamd.save.existing import Unreadable, read_existing
from streamd.save.reading import cut, place, rows_of_packs
from streamd.save.workers import Workers
from streamd.snapshot.frames import Decoder, FrameCorrupt
from streamd.snapshot.manifest import Manifest
from streamd.snapshot.names import pack_key, packs_prefix
from streamd.snapshot.tombstone import Tombstone
from streamd.store.catalog import BeingRemoved
from streamd.store.port import Buffer, ObjectInfo, Store

_THREADS = 8
_STOP_S = 3.0
MAX_LISTED = 1000  # damaged chunks; a snapshot may have 4 million
# What makes a chunk damaged; other failures of the store say nothing about the snapshot.
_DAMAGE = (StoreErrorKind.GONE, StoreErrorKind.CHANGED, StoreErrorKind.CORRUPT)


@dataclass(frozen=True, slots=True)
class DamagedChunk:
    """Bytes [offset, offset + length) of an image file that the store can't give back; `pack` is the pack's key."""

    file: str
    offset: int
    length: int
    pack: str
    reason: str


@dataclass(frozen=True, slots=True)
class VerifyProgress:
    """Bytes of packs that were read, of all."""

    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """What was found; chunks of zeros need no store.

    `damaged` are the first `MAX_LISTED` of `damaged_count` chunks; `pack_problems` are whole packs', as "KEY: what".
    """

    snapshot_id: str
    chunks: int
    packs: int
    stored_bytes: int
    damaged: tuple[DamagedChunk, ...]
    damaged_count: int
    pack_problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.damaged_count and not self.pack_problems


def verify(store: Store, snapshot_id: str, *, progress: Callable[[VerifyProgress], None] | None = None) -> VerifyResult:
    """Check every chunk of a snapshot, and each pack's presence, size and SHA-256.

    Raises: `NotFound`; `BeingRemoved`; `Damaged`, `Refused`: the manifest can't be read; `StoreError`: the store
        fails in a way that says nothing about the snapshot.
    """
    existing = read_existing(store, snapshot_id)
    match existing and existing.content:
        case None:
            raise NotFound(f"{store.url} has no snapshot {snapshot_id}")
        case Tombstone(reason=reason):
            raise BeingRemoved(snapshot_id, reason)
        case Unreadable(error):
            raise error
        case Manifest() as manifest:
            pass
    listed = {info.key: info for info in store.list(packs_prefix(snapshot_id))}
    return _Verify(store, manifest, listed, progress).run()


class _Damage:
    """Damaged chunks: all are counted, the first `MAX_LISTED` kept."""

    def __init__(self) -> None:
        self.listed: list[DamagedChunk] = []
        self.count = 0

    def add(self, chunks: list[DamagedChunk], count: int | None = None) -> None:
        """Add chunks, or the first of `count`."""
        self.listed += chunks[: MAX_LISTED - len(self.listed)]
        self.count += len(chunks) if count is None else count


# Of one pack: its bytes by the manifest, its damaged chunks, what is wrong with it as a whole.
_Found: TypeAlias = tuple[int, _Damage, list[str]]


class _Verify:
    """One verification. The lists are the caller's thread's; the others give values back."""

    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        listed: dict[str, ObjectInfo],
        progress: Callable[[VerifyProgress], None] | None,
    ) -> None:
        self._store = store
        self._manifest = manifest
        self._listed = listed
        self._progress = progress
        self._local = threading.local()
        self._stopping = threading.Event()
        self._damaged = _Damage()
        self._problems: list[str] = []
        self._done_bytes = 0

    def run(self) -> VerifyResult:
        """Read all packs."""
        manifest = self._manifest
        rows = rows_of_packs(manifest.table, len(manifest.packs))
        workers = Workers("verify", _THREADS)
        running: deque[Future[_Found]] = deque()
        try:
            for index in range(len(manifest.packs)):
                if len(running) >= 2 * _THREADS:
                    self._reap(running)
                running.append(workers.submit(self._pack, index, rows[index]))
            while running:
                self._reap(running)
        finally:
            self._stopping.set()
            workers.stop(timeout_s=_STOP_S)
        return VerifyResult(
            snapshot_id=manifest.snapshot_id,
            chunks=len(manifest.table),
            packs=len(manifest.packs),
            stored_bytes=sum(pack.size for pack in manifest.packs),
            damaged=tuple(self._damaged.listed),
            damaged_count=self._damaged.count,
            pack_problems=tuple(self._problems),
        )

    def _reap(self, running: "deque[Future[_Found]]") -> None:
        size, damaged, problems = running.popleft().result()
        self._done_bytes += size
        self._damaged.add(damaged.listed, damaged.count)
        self._problems += problems
        if self._progress:
            self._progress(VerifyProgress(self._done_bytes, sum(pack.size for pack in self._manifest.packs)))

    def _pack(self, index: int, rows: NDArray[np.intp]) -> "_Found":
        """Read a pack and check its frames. A frame can be good in a pack that is damaged elsewhere."""
        pack = self._manifest.packs[index]
        key = pack_key(pack.snapshot or self._manifest.snapshot_id, self._manifest.push_id, index)
        info = self._listed.get(key)
        if info is None:
            return pack.size, self._all_bad(rows, key, "the pack is missing"), [f"{key}: missing"]
        problems = []
        if info.size != pack.size:
            problems.append(f"{key}: {info.size} bytes instead of {pack.size}")
        damaged = _Damage()
        size = min(info.size, pack.size)  # whatever else stands there, it isn't read for that
        ends = self._manifest.table.offset[rows].astype(np.uint64) + self._manifest.table.frame_bytes[rows]
        whole = int(np.searchsorted(ends, size, side="right"))
        checked = 0
        sha256 = hashlib.sha256()
        body = _hashed(self._store.read(key, generation=info.generation, start=0, end=size), sha256.update)
        try:
            for row, reason in self._frames(body, rows[:whole], key):
                checked += 1
                if reason:
                    damaged.add([self._bad(row, key, reason)])
            for _ in body:  # what lies behind the last frame
                pass
        except StoreError as error:
            if error.store_kind not in _DAMAGE:
                raise
            problems.append(str(error))
        if not problems and sha256.digest() != pack.sha256:
            problems.append(f"{key}: its SHA-256 is not the manifest's")
        missing = self._all_bad(rows[checked:], key, "not in the pack")
        damaged.add(missing.listed, missing.count)
        return pack.size, damaged, problems

    def _frames(self, body: Iterator[Buffer], rows: NDArray[np.intp], key: str) -> Iterator[tuple[int, str]]:
        """Check frames, which ascend and lie in the body whole; give each row with what is wrong, "" for nothing."""
        if not hasattr(self._local, "decoder"):
            self._local.decoder = Decoder()
        table = self._manifest.table
        offsets, lengths = table.offset[rows].astype(np.int64), table.frame_bytes[rows].astype(np.int64)
        gaps = offsets.copy()
        gaps[1:] -= offsets[:-1] + lengths[:-1]
        parts = ((int(gap), int(length)) for gap, length in zip(gaps, lengths, strict=True))
        for index, frame in zip(rows, cut(body, parts, key), strict=True):
            if self._stopping.is_set():
                return
            row, reason = int(index), ""
            try:
                self._local.decoder.decode(
                    frame,
                    codec=int(table.codec[row]),
                    length=int(table.length[row]),
                    digest=table.digest[row].tobytes(),
                )
            except FrameCorrupt as error:
                reason = str(error)
            yield row, reason

    def _all_bad(self, rows: NDArray[np.intp], key: str, reason: str) -> "_Damage":
        found = _Damage()
        found.add([self._bad(int(row), key, reason) for row in rows[:MAX_LISTED]], len(rows))
        return found

    def _bad(self, row: int, key: str, reason: str) -> DamagedChunk:
        index, offset = place(self._manifest, row)
        return DamagedChunk(
            self._manifest.files[index].name, offset, int(self._manifest.table.length[row]), key, reason
        )


def _hashed(pieces: Iterator[Buffer], update: Callable[[Buffer], None]) -> Iterator[Buffer]:
    for piece in pieces:
        update(piece)
        yield piece
