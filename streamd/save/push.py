"""Push: an image directory becomes a snapshot in the store, in one pass over its bytes.

    the caller's thread        cuts the files into batches, takes them back in order, fills packs, commits
    encoders, one a core       read a batch, checksum and compress its chunks
    uploaders                  checksum a full pack and put it

Memory, whatever the image's size (tests/save/test_memory.py): `_ahead` batches, each a read buffer and at most as
much in frames; `uploads + 1` pack buffers, which are used again; what the store's put copies of each pack; 33 bytes a
chunk. Measured peaks of RssAnon, all in: 102 MiB to a directory and 174 MiB to Google's client with 2 encoders, 133
and 199 MiB with 16, which is the most.

Nothing is visible before the manifest is put, from the caller's thread. An error or Ctrl-C before that leaves packs
that the next run with the same ids skips, and that `gc` removes otherwise.
"""

import os
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from streamd.errors import Exit, Refused, StoreError, StreamdError
from streamd.save.commit import Commit, SnapshotWriter
from streamd.save.encoding import Batch, BatchEncoder, EncodedBatch, EncodedChunk, batches
from streamd.save.image_dir import OpenImage, open_image_dir
from streamd.save.workers import Workers
from streamd.snapshot.chunks import MAX_CHUNKS
from streamd.snapshot.frames import DEFAULT_LEVEL
from streamd.snapshot.head import MAX_HEAD_BYTES, MAX_PACK_ENTRY_BYTES, MAX_PACKS, read_head, write_head
from streamd.snapshot.manifest import ChunkTable, Codec, ImageFile, Manifest, Pack
from streamd.snapshot.memory import PAGE_BYTES
from streamd.snapshot.names import IMAGE_FILES
from streamd.store.port import Store

T = TypeVar("T")

# All batches together (twice that if chunks are very large); each is 1 to 4 MiB of it (measured with 2 encoders: 4
# MiB take 5 to 10 % less CPU than 1 MiB).
_BATCHES_BYTES = 24 << 20
_MAX_ENCODERS = 16  # what memory allows: each has a batch and 1 MiB of zstd context; 5 GB/s, beyond most networks
# How often a wait looks whether it was cancelled; Ctrl-C needs no looking.
_POLL_S = 0.1
# What ends promptly does so within this; a put that hangs is left to its daemon thread.
_STOP_S = 3.0


@dataclass(frozen=True, slots=True)
class PushOptions:
    """How to push, and what to write into the manifest beside the image's own facts.

    `chunk_bytes` is a multiple of 4096 and at most `pack_bytes`; `uploads` packs are under way at once. (12 MiB:
    Google's client holds an upload of up to 8 MiB three times, a larger one and 8 MiB of it; and the last packs'
    fsync is waited for with nothing else to do.) `encoders` is by default the number of cores. `created_s` is seconds
    since the epoch, by default the pusher's clock.
    """

    chunk_bytes: int = 256 << 10
    pack_bytes: int = 12 << 20
    uploads: int = 4
    encoders: int | None = None
    level: int = DEFAULT_LEVEL
    created_s: float | None = None
    runsc_sha256: str | None = None
    cpu_features: tuple[str, ...] | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.chunk_bytes % PAGE_BYTES or not PAGE_BYTES <= self.chunk_bytes <= self.pack_bytes:
            raise ValueError(f"chunk_bytes={self.chunk_bytes} with pack_bytes={self.pack_bytes}")


@dataclass(frozen=True, slots=True)
class PushProgress:
    """How far a push is: image bytes encoded of all, what they became, packs in the store and those that were there."""

    done_bytes: int
    total_bytes: int
    stored_bytes: int
    packs: int
    skipped_packs: int


@dataclass(frozen=True, slots=True)
class PushResult:
    """A snapshot that exists. `was_there`: by this push id already, from a former run or before an answer got lost."""

    snapshot_id: str
    push_id: str
    image_bytes: int
    stored_bytes: int
    zero_bytes: int
    chunks: int
    packs: int
    skipped_packs: int
    was_there: bool


class PushFailed(StreamdError):
    """A push that can be resumed: the exit code and kind of what went wrong, which is its cause, and what to do."""

    def __init__(self, cause: BaseException, *, snapshot_id: str, push_id: str, committing: bool) -> None:
        what = str(cause) if isinstance(cause, StreamdError) else "interrupted" if _interrupt(cause) else repr(cause)
        state = (
            "the snapshot may be complete or not: run it again to find out"
            if committing
            else "no snapshot was made; to go on where it stopped, run it again"
        )
        super().__init__(
            f"push: {what}; {state} with --id {snapshot_id} --push-id {push_id},"
            " or let `streamd gc` remove what is left"
        )
        self.snapshot_id = snapshot_id
        self.push_id = push_id
        if isinstance(cause, StreamdError):
            self.exit_code, self.kind = cause.exit_code, cause.kind
        elif _interrupt(cause):
            self.exit_code, self.kind = Exit.INTERRUPTED, "interrupted"


class _Cancelled(Exception):
    """The caller's cancel event was set."""


def _interrupt(cause: BaseException) -> bool:
    return isinstance(cause, KeyboardInterrupt | _Cancelled)


def push(
    directory: Path,
    store: Store,
    *,
    snapshot_id: str,
    push_id: str,
    options: PushOptions | None = None,
    progress: Callable[[PushProgress], None] | None = None,
    on_checked: Callable[[], None] | None = None,
    cancel: threading.Event | None = None,
) -> PushResult:
    """Save an image directory as a snapshot. `progress` is called in this thread, about once a MiB.

    `on_checked` is called once, when the directory was found to be in order and the store was not asked anything yet:
    from then on there is something to resume, so a command prints the ids there.

    Raises: `Refused`: not an image directory, it changes meanwhile, the id is taken or being removed. `Damaged`: the
        image's numbers don't add up. `NotFound`. `PushFailed`: the store or the disk failed, or the push was
        interrupted (by Ctrl-C or `cancel`); the message says how to resume.
    """
    options = options or PushOptions()
    with open_image_dir(directory) as image:
        running = _Push(
            image,
            SnapshotWriter(store, snapshot_id=snapshot_id, push_id=push_id),
            snapshot_id=snapshot_id,
            push_id=push_id,
            options=options,
            progress=progress,
            cancel=cancel,
        )
        try:
            running.check()
            if on_checked:
                on_checked()
            return running.run()
        except (StoreError, OSError, KeyboardInterrupt, _Cancelled) as error:
            raise PushFailed(error, snapshot_id=snapshot_id, push_id=push_id, committing=running.committing) from error
        finally:
            running.stop()


class _Push:
    """One push under way. All state belongs to the caller's thread; the others get values and give values back."""

    def __init__(
        self,
        image: OpenImage,
        writer: SnapshotWriter,
        *,
        snapshot_id: str,
        push_id: str,
        options: PushOptions,
        progress: Callable[[PushProgress], None] | None,
        cancel: threading.Event | None,
    ) -> None:
        self._image = image
        self._writer = writer
        self._snapshot_id = snapshot_id
        self._push_id = push_id
        self._options = options
        self._progress = progress
        self._cancel = cancel
        self.committing = False

        encoders = min(options.encoders or len(os.sched_getaffinity(0)), _MAX_ENCODERS)
        ahead = encoders + encoders // 2 + 2
        batch_bytes = min(max(_BATCHES_BYTES // ahead, 1 << 20), 4 << 20)
        self._batch_bytes = max(batch_bytes // options.chunk_bytes, 1) * options.chunk_bytes
        self._ahead = min(ahead, max(2 * _BATCHES_BYTES // self._batch_bytes, 2))
        self._encoder = BatchEncoder(
            chunk_bytes=options.chunk_bytes, batch_bytes=self._batch_bytes, level=options.level
        )
        self._encoders = Workers("encode", encoders)
        self._uploaders = Workers("upload", options.uploads)
        self._uploading: dict[Future[tuple[Pack, bool]], tuple[int, bytearray]] = {}
        self._free: list[bytearray] = [bytearray(options.pack_bytes) for _ in range(options.uploads + 1)]

        self._pack = self._free.pop()
        self._filled = 0
        self._packs: dict[int, Pack] = {}
        self._pack_count = 0  # packs that were begun to upload; the index of the one being filled
        self._skipped = 0
        self._done_bytes = 0
        self._stored_bytes = 0
        self._table = _TableBuilder()

    def check(self) -> None:
        """Check, before anything of pages.img is read, whatever would be refused in the manifest at the end.

        Raises: `Refused`, `Damaged`.
        """
        trial = self._manifest()  # without packs and chunks
        chunks = sum(file.chunk_count for file in trial.files)
        if chunks > MAX_CHUNKS:
            raise Refused(
                f"{self._image.directory}: {chunks} chunks of {self._options.chunk_bytes} bytes are more than the"
                f" {MAX_CHUNKS} of a snapshot; push with larger chunks (--chunk-size)"
            )
        head = write_head(trial)
        read_head(head)
        room = MAX_HEAD_BYTES - MAX_PACKS * MAX_PACK_ENTRY_BYTES
        if len(head) > room:
            raise Refused(
                f"{self._image.directory}: the names of its containers, the CPU features and the metadata together take"
                f" {len(head)} bytes, more than {room}"
            )

    def run(self) -> PushResult:
        """Do it all."""
        self._writer.begin()
        pending: deque[Future[EncodedBatch]] = deque()
        for batch in self._batches():
            if len(pending) >= self._ahead:
                self._take(self._result(pending.popleft()))
            pending.append(self._encoders.submit(self._encoder.encode, batch))
        while pending:
            self._take(self._result(pending.popleft()))
        if self._filled:
            self._upload()
        while self._uploading:
            self._reap()
        self._free.clear()  # a large table's encoding needs the room
        self._pack = bytearray()
        self._image.check_unchanged()
        manifest = self._manifest()
        self._look_cancelled()
        self.committing = True
        outcome = self._writer.commit(manifest)
        zero = manifest.table.codec == Codec.ZERO
        return PushResult(
            snapshot_id=self._snapshot_id,
            push_id=self._push_id,
            image_bytes=self._done_bytes,
            stored_bytes=self._stored_bytes,
            zero_bytes=int(manifest.table.length[zero].sum(dtype=np.uint64)),
            chunks=len(manifest.table),
            packs=self._pack_count,
            skipped_packs=self._skipped,
            was_there=outcome is Commit.WAS_THERE,
        )

    def stop(self) -> None:
        """Let the threads end; those that hang are left, they are daemons."""
        self._encoders.stop(timeout_s=_STOP_S)
        self._uploaders.stop(timeout_s=_STOP_S)

    def _batches(self) -> Iterator[Batch]:
        for name in IMAGE_FILES:
            yield from batches(self._image.fds[name], name, self._image.sizes[name], batch_bytes=self._batch_bytes)

    def _take(self, encoded: EncodedBatch) -> None:
        """Put a batch's frames into packs, in order."""
        for chunk, frame in zip(encoded.chunks, encoded.frames, strict=True):
            if self._filled + chunk.frame_bytes > self._options.pack_bytes:
                self._upload()
            self._table.add(chunk, pack=self._pack_count, offset=self._filled)
            self._pack[self._filled : self._filled + chunk.frame_bytes] = frame
            self._filled += chunk.frame_bytes
            self._stored_bytes += chunk.frame_bytes
        self._done_bytes += encoded.length
        self._encoder.release(encoded)
        while any(future.done() for future in self._uploading):  # failures are to end the push soon
            self._reap()
        self._report()

    def _upload(self) -> None:
        """Hand the full pack over, and take an empty buffer, if need be after waiting for one."""
        if self._pack_count >= MAX_PACKS:
            raise Refused(f"{self._image.directory}: it fills more than {MAX_PACKS} packs, the most of a snapshot")
        view = memoryview(self._pack)[: self._filled]
        future = self._uploaders.submit(self._writer.put_pack, self._pack_count, view)
        self._uploading[future] = (self._pack_count, self._pack)
        self._pack_count += 1
        self._filled = 0
        while not self._free:
            self._reap()
        self._pack = self._free.pop()

    def _reap(self) -> None:
        """Wait until at least one upload is done, and take its buffer back."""
        done: set[Future[tuple[Pack, bool]]] = set()
        while not done:
            self._look_cancelled()
            done, _ = wait(self._uploading, timeout=_POLL_S, return_when=FIRST_COMPLETED)
        for future in done:
            index, buffer = self._uploading.pop(future)
            self._packs[index], was_there = future.result()
            self._skipped += was_there
            self._free.append(buffer)
        self._report()

    def _result(self, future: Future[T]) -> T:
        while not future.done():
            self._look_cancelled()
            wait((future,), timeout=_POLL_S)
        self._look_cancelled()
        return future.result()

    def _look_cancelled(self) -> None:
        if self._cancel is not None and self._cancel.is_set():
            raise _Cancelled

    def _report(self) -> None:
        if self._progress:
            total_bytes = sum(self._image.sizes.values())
            self._progress(
                PushProgress(self._done_bytes, total_bytes, self._stored_bytes, len(self._packs), self._skipped)
            )

    def _manifest(self) -> Manifest:
        options = self._options
        files, first = [], 0
        for name in IMAGE_FILES:
            size = self._image.sizes[name]
            count = -(-size // options.chunk_bytes)
            files.append(ImageFile(name, size, first_chunk=first, chunk_count=count))
            first += count
        return Manifest(
            snapshot_id=self._snapshot_id,
            push_id=self._push_id,
            created_s=time.time() if options.created_s is None else options.created_s,
            chunk_bytes=options.chunk_bytes,
            files=tuple(files),
            packs=tuple(self._packs[index] for index in range(self._pack_count)),
            table=self._table.table(),
            gvisor=replace(self._image.gvisor, runsc_sha256=options.runsc_sha256, cpu_features=options.cpu_features),
            metadata=dict(options.metadata),
        )


class _TableBuilder:
    """The chunk table as it grows: 33 bytes a chunk, where lists of Python's integers would take 200."""

    def __init__(self) -> None:
        self._length, self._pack, self._offset, self._frame_bytes = (array("I") for _ in range(4))
        self._codec = bytearray()
        self._digest = bytearray()

    def add(self, chunk: EncodedChunk, *, pack: int, offset: int) -> None:
        """Add a row; a chunk of zeros has no place."""
        stored = chunk.codec is not Codec.ZERO
        self._length.append(chunk.length)
        self._codec.append(chunk.codec)
        self._pack.append(pack if stored else 0)
        self._offset.append(offset if stored else 0)
        self._frame_bytes.append(chunk.frame_bytes)
        self._digest += chunk.digest

    def table(self) -> ChunkTable:
        """Give the rows as columns."""

        def column(values: "array[int]") -> np.ndarray[Any, np.dtype[np.uint32]]:
            return np.frombuffer(values, np.uintc).astype(np.uint32, copy=False)

        return ChunkTable(
            length=column(self._length),
            codec=np.frombuffer(self._codec, np.uint8),
            pack=column(self._pack),
            offset=column(self._offset),
            frame_bytes=column(self._frame_bytes),
            digest=np.frombuffer(self._digest, np.uint8).reshape(-1, 16),
        )
