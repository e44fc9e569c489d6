"""Pull: a snapshot becomes an image directory again, every chunk verified on its way. (`verify` is its twin.)

Files are written under temporary names, made durable, and then named, checkpoint.img last: without it the directory is
no image, to us and to runsc. Chunks of zeros stay holes. Memory: for each thread a piece of a body, a frame and a
chunk.
"""

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from streamd.errors import Damaged, NotPermitted, Refused, StreamdError
from streamd.save.reading import Span, place, read_frames, spans
from streamd.save.verify import VerifyResult, verify
from streamd.save.workers import Workers
from streamd.snapshot.frames import Decoder, FrameCorrupt
from streamd.snapshot.manifest import Codec
from streamd.snapshot.names import IMAGE_FILES
from streamd.store.catalog import Pinned, open_snapshot
from streamd.store.port import Buffer, Store

__all__ = ["PullProgress", "PullResult", "VerifyResult", "pull", "verify"]

_SPAN_BYTES = 4 << 20  # long enough that a request's latency matters little, short enough that all threads have some
_THREADS = 8
_STOP_S = 3.0


@dataclass(frozen=True, slots=True)
class PullProgress:
    """Image bytes that are in place, of all."""

    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class PullResult:
    """A copy that is complete and durable. `stored_bytes` were read from packs."""

    snapshot_id: str
    directory: Path
    image_bytes: int
    stored_bytes: int
    zero_bytes: int


def pull(
    store: Store, snapshot_id: str, directory: Path, *, progress: Callable[[PullProgress], None] | None = None
) -> PullResult:
    """Copy a snapshot into `directory`, which is made, or exists and is empty. On failure nothing is left in it.

    Raises: what `open_snapshot` does. `Refused`: the directory is not empty, or a link, or a file. `Damaged`: a chunk
        is not what the manifest says. `StoreError`. `StreamdError`: the disk failed.
    """
    pinned = open_snapshot(store, snapshot_id)
    with _disk(directory), _new_files(directory, pinned) as fds:
        return _copy(store, pinned, directory, fds, progress)


@contextlib.contextmanager
def _disk(directory: Path) -> Iterator[None]:
    """Turn what the disk answers into our errors."""
    try:
        yield
    except PermissionError as error:
        raise NotPermitted(f"{directory}: {error.strerror}") from error
    except OSError as error:
        raise StreamdError(f"{directory}: {error.strerror}") from error


@contextlib.contextmanager
def _new_files(directory: Path, pinned: Pinned) -> Iterator[tuple[int, ...]]:
    """Make the files under temporary names, each of its full size and empty; name them in the end, or remove them."""
    made = False
    with contextlib.suppress(FileExistsError):
        os.mkdir(directory, 0o700)  # it holds a process's memory
        made = True
    try:
        directory_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (NotADirectoryError, FileNotFoundError):
        if directory.is_symlink():
            raise Refused(f"{directory} is a symbolic link; name the directory itself") from None
        raise Refused(f"{directory} exists and is not a directory") from None
    try:
        if os.listdir(directory_fd):
            raise Refused(f"{directory} is not empty")
        with _files_in(directory_fd, pinned) as fds:
            yield fds
        if made:
            _sync(directory.parent)
    finally:
        os.close(directory_fd)
        if made:
            with contextlib.suppress(OSError):  # it has files when all went well
                directory.rmdir()


@contextlib.contextmanager
def _files_in(directory_fd: int, pinned: Pinned) -> Iterator[tuple[int, ...]]:
    names = [file.name for file in pinned.manifest.files]
    assert all(name in IMAGE_FILES for name in names)  # decode() saw to it: they become paths here
    temporary = {name: f".{name}.part" for name in names}
    fds: list[int] = []
    done = False
    try:
        for file in pinned.manifest.files:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            fds.append(os.open(temporary[file.name], flags, 0o600, dir_fd=directory_fd))
            os.ftruncate(fds[-1], file.size)
        yield tuple(fds)
        for fd in fds:
            os.fsync(fd)
        for name in reversed(names):
            os.rename(temporary[name], name, src_dir_fd=directory_fd, dst_dir_fd=directory_fd)
            done = True  # from here on the files are good, and only a crash can leave some of them unnamed
        os.fsync(directory_fd)
    finally:
        for fd in fds:
            os.close(fd)
        if not done:
            for name in temporary.values():
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=directory_fd)


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _copy(
    store: Store,
    pinned: Pinned,
    directory: Path,
    fds: tuple[int, ...],
    progress: Callable[[PullProgress], None] | None,
) -> PullResult:
    """Fetch, verify and write all chunks."""
    manifest = pinned.manifest
    table = manifest.table
    local = threading.local()
    stopping = threading.Event()

    def write(span: Span) -> int:
        """Bring one span's chunks into place; give the image bytes that it had."""
        if not hasattr(local, "decoder"):
            local.decoder = Decoder()
        done = 0
        for row, frame in read_frames(store, pinned.packs[span.pack], table, span):
            if stopping.is_set():
                break
            index, offset = place(manifest, row)
            try:
                chunk = local.decoder.decode(
                    frame,
                    codec=int(table.codec[row]),
                    length=int(table.length[row]),
                    digest=table.digest[row].tobytes(),
                )
            except FrameCorrupt as error:
                name = manifest.files[index].name
                raise Damaged(
                    f"snapshot {manifest.snapshot_id}: {name}, chunk at byte {offset},"
                    f" in {pinned.packs[span.pack].key}: {error}"
                ) from error
            _write(fds[index], chunk, offset)
            done += len(chunk)
        return done

    zero = table.codec == Codec.ZERO
    zero_bytes = int(table.length[zero].sum(dtype=np.uint64))
    image_bytes = sum(file.size for file in manifest.files)
    done_bytes = zero_bytes
    workers = Workers("pull", _THREADS)
    running: deque[Future[int]] = deque()

    def reap() -> None:
        nonlocal done_bytes
        done_bytes += running.popleft().result()
        if progress:
            progress(PullProgress(done_bytes, image_bytes))

    try:
        for span in spans(table, span_bytes=_SPAN_BYTES):
            if len(running) >= 2 * _THREADS:
                reap()
            running.append(workers.submit(write, span))
        while running:
            reap()
    finally:
        stopping.set()  # also for a read that hangs and comes back later: it must not write any more
        workers.stop(timeout_s=_STOP_S)
    assert done_bytes == image_bytes
    return PullResult(
        manifest.snapshot_id, directory, image_bytes, int(table.frame_bytes.sum(dtype=np.uint64)), zero_bytes
    )


def _write(fd: int, chunk: Buffer, offset: int) -> None:
    view = memoryview(chunk)
    while view:
        count = os.pwrite(fd, view, offset)
        view = view[count:]
        offset += count
