"""Records of mounts on disk: where they are, when they are written, how many are kept.

One file a mount life, in a directory of root's, or of the user that workers run as (0700): it says which parts of a
snapshot an application touches. A checkpoint replaces the whole file: a restore of a GB makes some 4000 reads, 30 KB
and 2 ms of a thread, and even the 327 680 reads of 80 GiB cost a tenth of a second of each ten. So a process that is
killed loses its last ten seconds, and what is there is always whole; a file that is appended to would lose as much in
its buffers and need repair.

Nothing here may hurt a mount: a disk that is full or hangs costs the record, with one line in the log.
"""

import os
import re
import stat
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

import structlog
import trio

from streamd.daemon.options import MountOptions
from streamd.errors import NotFound, NotPermitted, Refused, StreamdError
from streamd.safe_paths import NotAFile, SafeDirectory, open_regular
from streamd.serve.record import Record, RecordedFile, Recorder, RecordHead
from streamd.serve.record_file import RECORD_BYTES_MAX, decode, encode
from streamd.serve.scheduler import RunBlocking
from streamd.store.catalog import Pinned

log = structlog.get_logger()

SUFFIX = ".record"
CHECKPOINT_S = 10.0
# A write takes milliseconds. An unmount doesn't wait longer for a disk than this, and nothing is written after it.
WRITE_TIMEOUT_S = 2.0
# A month of a busy node, or some sixty restores of the largest images.
KEPT_FILES = 256
KEPT_BYTES = 64 << 20
_UNSAFE = re.compile(r"[^A-Za-z0-9-]")


def record_head(options: MountOptions, pinned: Pinned, *, facts: Mapping[str, str]) -> RecordHead:
    """Say whose record it is: of a mount that begins now, in this process. `facts` are shown as they are."""
    manifest = pinned.manifest
    base = 0
    files = []
    for file in manifest.files:
        files.append(RecordedFile(file.name, file.size, base))
        base += file.size
    return RecordHead(
        snapshot=manifest.snapshot_id,
        digest=pinned.digest.hex(),
        snapshot_url=options.snapshot_url,
        mountpoint=options.mountpoint,
        pid=os.getpid(),
        started_s=time.time(),
        chunk_bytes=manifest.chunk_bytes,
        stored_bytes=int(manifest.table.frame_bytes.sum()),
        files=tuple(files),
        facts=facts,
    )


class RecordKeeper:
    """Writes what a recorder notes, now and then and at the end; state of the Trio thread."""

    def __init__(
        self,
        recorder: Recorder,
        *,
        directory: Path,
        as_owner: Callable[[], AbstractContextManager[None]] = nullcontext,
        run_blocking: RunBlocking = trio.to_thread.run_sync,
    ) -> None:
        """Write to a file in `directory`, which is made when it isn't there; in `as_owner`, in a thread."""
        self._recorder = recorder
        self._as_owner = as_owner
        self._run_blocking = run_blocking
        self._limiter = trio.CapacityLimiter(1)
        head = recorder.record(trio.current_time()).head
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(head.started_s))
        self.path = directory / f"{stamp}-{_UNSAFE.sub('_', head.snapshot)[:63]}-{head.pid}{SUFFIX}"
        self._written_changes = -1
        self._wake = trio.Event()
        self._is_broken = False

    def write_soon(self) -> None:
        """Write at once instead of at the next checkpoint: a load has ended."""
        self._wake.set()

    async def run(self) -> None:
        """Write checkpoints until cancelled, and then the last one."""
        try:
            while True:
                with trio.move_on_after(CHECKPOINT_S):
                    await self._wake.wait()
                self._wake = trio.Event()
                await self._write()
        finally:
            await self._write()

    async def _write(self) -> None:
        changes = self._recorder.changes
        if self._is_broken or changes == self._written_changes:
            return
        record = self._recorder.record(trio.current_time())
        problem = f"the disk did not take it within {WRITE_TIMEOUT_S:g} s"
        with trio.move_on_after(WRITE_TIMEOUT_S, shield=True):
            try:
                await self._run_blocking(self._put, record, abandon_on_cancel=True, limiter=self._limiter)
                self._written_changes = changes
                return
            except (OSError, StreamdError) as error:
                problem = str(error)
        self._is_broken = True
        log.warning("the record of this mount is not kept any more", path=str(self.path), reason=problem)

    def _put(self, record: Record) -> None:
        with self._as_owner():
            write_record(self.path, record)


def write_record(path: Path, record: Record, *, kept_files: int = KEPT_FILES, kept_bytes: int = KEPT_BYTES) -> None:
    """Put a record in the place of the file at `path`; remove the oldest beyond the bounds.

    Raises: `OSError`; `UnsafePath` for a directory that others can change.
    """
    with SafeDirectory.open(path.parent, make=True) as directory:
        partial = f"{path.name}.partial"
        fd = open_regular(directory.fd, partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        with os.fdopen(fd, "wb") as file:
            file.write(encode(record))
        directory.rename(partial, path.name)
        total_bytes = 0
        newest_first = sorted(_sizes(directory).items(), reverse=True)
        for place, (other, size) in enumerate(newest_first):
            total_bytes += size
            if (place >= kept_files or total_bytes > kept_bytes) and other != path.name:
                directory.unlink(other, missing_ok=True)


def _sizes(directory: SafeDirectory) -> dict[str, int]:
    """Give the records of a directory, half written ones too, and their sizes. By name they are sorted by age.

    What isn't a file is none: whoever put it there must not keep others from writing theirs.
    """
    sizes = {}
    for name in directory.names():
        if SUFFIX in name and not name.startswith("."):
            with suppress(FileNotFoundError):  # another mount removed it in this moment
                info = directory.stat(name)
                if stat.S_ISREG(info.st_mode):
                    sizes[name] = info.st_size
    return sizes


def read_record(path: Path) -> Record:
    """Read a record. Its directory is the workers', who may put there what they like: nothing is followed.

    Raises: `NotFound`, `NotPermitted`, `Damaged`, `Refused` (also for a link, and what else isn't a file),
    `StreamdError`.
    """
    try:
        directory_fd = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fd = open_regular(directory_fd, path.name, os.O_RDONLY)
        finally:
            os.close(directory_fd)
        with os.fdopen(fd, "rb") as file:
            data = file.read(RECORD_BYTES_MAX + 1)
    except NotAFile as error:
        raise Refused(f"{path} is not a regular file") from error
    except FileNotFoundError as error:
        raise NotFound(f"{path}: no such file") from error
    except PermissionError as error:
        raise NotPermitted(f"{path}: {error.strerror}") from error
    except OSError as error:
        raise StreamdError(f"{path}: {error.strerror}") from error
    return decode(data)


def latest_record(directory: Path, mountpoint: str | None = None) -> Path:
    """Give the newest record of a directory, or the newest of a mountpoint. Raises: `NotFound`, `NotPermitted`."""
    for path in sorted(_files(directory), key=lambda path: path.name, reverse=True):
        if mountpoint is None:
            return path
        with suppress(StreamdError):  # one that can't be read is nobody's
            if read_record(path).head.mountpoint == mountpoint:
                return path
    whose = f" of a mount at {mountpoint}" if mountpoint else ""
    raise NotFound(f"{directory}: no record{whose}")


def _files(directory: Path) -> list[Path]:
    try:
        with os.scandir(directory) as entries:
            found = [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
    except FileNotFoundError:
        return []
    except PermissionError as error:
        raise NotPermitted(f"{directory}: {error.strerror}; run it with sudo") from error
    except OSError as error:
        raise StreamdError(f"{directory}: {error.strerror}") from error
    return [directory / name for name in found if name.endswith(SUFFIX)]
