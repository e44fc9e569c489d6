"""Verify: read every pack of a snapshot and check all that the manifest says; what is wrong is listed, to the end."""

import hashlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass

from streamd.errors import NotFound, StoreError, StoreErrorKind
from streamd.save.existing import Unreadable, read_existing
from streamd.save.reading import cut, place, spans
from streamd.save.workers import Workers
from streamd.snapshot.frames import Decoder, FrameCorrupt
from streamd.snapshot.manifest import Manifest, decode
from streamd.snapshot.names import pack_key, packs_prefix
from streamd.snapshot.tombstone import Tombstone
from streamd.store.catalog import BeingRemoved
from streamd.store.port import Buffer, ObjectInfo, Store

_THREADS = 8
_STOP_S = 3.0
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
    """What was found. `pack_problems` are those of whole packs, as "KEY: what"; chunks of zeros need no store."""

    snapshot_id: str
    chunks: int
    packs: int
    stored_bytes: int
    damaged: tuple[DamagedChunk, ...]
    pack_problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.damaged and not self.pack_problems


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
        case Unreadable():
            assert existing
            manifest = decode(existing.data)  # raises what it has against it
        case Manifest() as manifest:
            pass
    listed = {info.key: info for info in store.list(packs_prefix(snapshot_id))}
    return _Verify(store, manifest, listed, progress).run()


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
        self._damaged: list[DamagedChunk] = []
        self._problems: list[str] = []
        self._done_bytes = 0

    def run(self) -> VerifyResult:
        """Read all packs."""
        manifest = self._manifest
        rows: dict[int, list[int]] = {index: [] for index in range(len(manifest.packs))}
        for span in spans(manifest.table):
            rows[span.pack] += span.rows.tolist()
        workers = Workers("verify", _THREADS)
        running: deque[Future[tuple[int, list[DamagedChunk], list[str]]]] = deque()
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
            damaged=tuple(self._damaged),
            pack_problems=tuple(self._problems),
        )

    def _reap(self, running: "deque[Future[tuple[int, list[DamagedChunk], list[str]]]]") -> None:
        size, damaged, problems = running.popleft().result()
        self._done_bytes += size
        self._damaged += damaged
        self._problems += problems
        if self._progress:
            self._progress(VerifyProgress(self._done_bytes, sum(pack.size for pack in self._manifest.packs)))

    def _pack(self, index: int, rows: list[int]) -> tuple[int, list[DamagedChunk], list[str]]:
        """Read a pack and check its frames. A frame can be good in a pack that is damaged elsewhere."""
        pack = self._manifest.packs[index]
        key = pack_key(pack.snapshot or self._manifest.snapshot_id, self._manifest.push_id, index)
        info = self._listed.get(key)
        if info is None:
            return pack.size, [self._bad(row, key, "the pack is missing") for row in rows], [f"{key}: missing"]
        problems = []
        if info.size != pack.size:
            problems.append(f"{key}: {info.size} bytes instead of {pack.size}")
        damaged: list[DamagedChunk] = []
        left = deque(rows)
        sha256 = hashlib.sha256()
        body = _hashed(self._store.read(key, generation=info.generation, start=0, end=info.size), sha256.update)
        try:
            self._frames(body, left, info.size, key, damaged)
            for _ in body:  # what lies behind the last frame
                pass
        except StoreError as error:
            if error.store_kind not in _DAMAGE:
                raise
            problems.append(str(error))
        if not problems and sha256.digest() != pack.sha256:
            problems.append(f"{key}: its SHA-256 is not the manifest's")
        return pack.size, damaged + [self._bad(row, key, "not in the pack") for row in left], problems

    def _frames(
        self, body: Iterator[Buffer], left: "deque[int]", size: int, key: str, damaged: list[DamagedChunk]
    ) -> None:
        """Check frames in order, taking each from `left`, as far as a pack of `size` bytes has them whole."""
        if not hasattr(self._local, "decoder"):
            self._local.decoder = Decoder()
        table = self._manifest.table
        sizes, position = [], 0
        for row in left:
            offset, length = int(table.offset[row]), int(table.frame_bytes[row])
            if offset + length > size:
                break
            sizes += [offset - position, length]
            position = offset + length
        parts = cut(body, sizes, key)
        for _gap, frame in zip(parts, parts, strict=True):
            if self._stopping.is_set():
                return
            row = left.popleft()
            try:
                self._local.decoder.decode(
                    frame,
                    codec=int(table.codec[row]),
                    length=int(table.length[row]),
                    digest=table.digest[row].tobytes(),
                )
            except FrameCorrupt as error:
                damaged.append(self._bad(row, key, str(error)))

    def _bad(self, row: int, key: str, reason: str) -> DamagedChunk:
        index, offset = place(self._manifest, row)
        return DamagedChunk(
            self._manifest.files[index].name, offset, int(self._manifest.table.length[row]), key, reason
        )


def _hashed(pieces: Iterator[Buffer], update: Callable[[Buffer], None]) -> Iterator[Buffer]:
    for piece in pieces:
        update(piece)
        yield piece
