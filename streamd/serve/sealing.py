"""Sealing: the record that an image's files are whole and right, so that they may be read without a server.

    DIR/images/<key>/sealed   JSON: format, boot id, and of each of the three files: size, mode, ctime, inode

A mount that serves verifies what it serves; a sandbox that reads the files themselves (`daemon/warm.py`) verifies
nothing. So sealing reads every chunk back and checks it, although each was verified before it was written: a disk that
lost or bent a write shows here, or in a sandbox (`read_back.py`). That costs one sequential read of the disk per image
and boot, at the lowest priority.

The record proves itself: whoever opens it compares it with the files as they are. Any write, hole, link or chmod
changes a file's ctime, which nobody can set; a machine that went down has another boot id, and its disk may have lost
what the page cache had. So no lock protects the record, and it needs no sync: in another boot it is worth nothing.
A mount that serves takes the seal away when it begins, and seals again: what it finds damaged is under no seal.

Files that were sealed once stay 0400, also when the seal is gone: somebody may have them open natively, without any
lock. They may be overwritten with right bytes, but no hole is ever punched into them; they leave by unlink.
Everything here blocks.
"""

import errno
import json
import os
import stat
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from streamd.errors import StreamdError
from streamd.safe_paths import NotAFile, open_regular, read_regular
from streamd.serve.node_cache import FILES, SEALED, SEALED_MODE, CacheUnusable, NodeCache, open_files, opened_image
from streamd.serve.plan import Layout
from streamd.serve.read_back import damaged_chunks
from streamd.snapshot.manifest import ImageFile

SEAL_FORMAT = 1
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SEAL_MAX_BYTES = 4096
# The kernel stamps files with a clock that ticks at least every 10 ms (CONFIG_HZ=100); a write within the tick of the
# one before it may leave ctime as it was, until kernel 6.13.
_CLOCK_TICK_NS = 20_000_000
_LOWEST_PRIORITY = 19


class NotSealed(StreamdError):
    """The files can't be read without a server; `bad_chunks` are those that a read-back found damaged."""

    def __init__(self, message: str, bad_chunks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.bad_chunks = tuple(bad_chunks)


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What can't be changed without being noticed: `mode` is the permission bits, `ctime_ns` since the epoch."""

    size: int
    mode: int
    ctime_ns: int
    inode: int


@dataclass(frozen=True, slots=True)
class Seal:
    """What is written down of the files of an image, by name, and the boot it is good for."""

    boot_id: str
    files: dict[str, FileFacts]


def encode(seal: Seal) -> bytes:
    """Write a seal down."""
    files = {name: asdict(facts) for name, facts in seal.files.items()}
    return json.dumps({"format": SEAL_FORMAT, "boot_id": seal.boot_id, "files": files}).encode()


def decode(data: bytes) -> Seal:
    """Read what `encode` wrote. Raises: ValueError for anything else."""
    try:
        match json.loads(data):
            case {"format": int(number), "boot_id": str(boot_id), "files": dict(files)} if number == SEAL_FORMAT:
                return Seal(boot_id, {name: FileFacts(**facts) for name, facts in files.items()})
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"not a seal: {error}") from error
    raise ValueError(f"not a seal of format {SEAL_FORMAT}")


def broken_by(seal: Seal, now: Seal) -> str | None:
    """Say what makes a seal worthless, given how things are now; None when it is good."""
    if seal.boot_id != now.boot_id:
        return "the machine was started anew since"
    if seal.files.keys() != now.files.keys():
        return f"the files are {', '.join(sorted(now.files))}"
    for name, facts in now.files.items():
        if facts.mode != SEALED_MODE:
            return f"{name} has the mode {facts.mode:04o}"
        if facts != seal.files[name]:
            return f"{name} was changed since"
    return None


def is_sealed(cache: NodeCache, files: Sequence[ImageFile]) -> bool:
    """Whether the files may be read without a server, as they are now; never by its own mistake."""
    try:
        os.close(open_sealed(cache, files))
    except (NotSealed, OSError):
        return False
    return True


def open_sealed(cache: NodeCache, files: Sequence[ImageFile]) -> int:
    """Give the directory of the sealed files, open; the caller, who owns the image until then, closes it.

    `files` are the manifest's. Raises: `NotSealed`, which says why; `OSError`.
    """
    try:
        with opened_image(cache.path) as image:
            seal = decode(read_regular(image.fd, SEALED, _SEAL_MAX_BYTES))
            directory_fd = open_files(image.fd)
    except FileNotFoundError:
        raise NotSealed("the image is not sealed") from None
    except (ValueError, NotAFile, CacheUnusable) as error:
        raise NotSealed(f"the seal can't be read: {error}") from error
    try:
        now = _look(directory_fd, files)
        reason = broken_by(seal, now)
        if reason is not None:
            raise NotSealed(f"the seal is broken: {reason}")
    except BaseException:
        os.close(directory_fd)
        raise
    return directory_fd


def seal(cache: NodeCache, files: Sequence[ImageFile], layout: Layout) -> None:
    """Read the whole image back from the disk, and write down that it is right.

    For an image whose chunks are all cached, and that this process owns. Chunks that turn out damaged are forgotten.
    It takes as long as the disk needs; when the image is let go of meanwhile, the seal is good or none all the same.
    Raises: `NotSealed` when a chunk is missing, is damaged or was changed meanwhile; `OSError`.
    """
    _check_whole(cache, layout)
    with opened_image(cache.path) as image:  # not by the cache's descriptor: that is closed when it is let go of
        _seal(cache, image.fd, files, layout)


def _seal(cache: NodeCache, image_fd: int, files: Sequence[ImageFile], layout: Layout) -> None:
    directory_fd = open_files(image_fd)
    try:
        modes = {name: facts.mode for name, facts in _look(directory_fd, files).files.items()}
        try:
            _seal_modes(directory_fd, files)
            before = _look(directory_fd, files)
            bad_chunks = _at_lowest_priority(lambda: damaged_chunks(directory_fd, files, layout))
            for chunk in bad_chunks:
                cache.forget(chunk)
            if bad_chunks:
                raise NotSealed(f"the disk does not give {len(bad_chunks)} chunks as they were written", bad_chunks)
            if _look(directory_fd, files) != before:
                raise NotSealed("the files were changed while they were read back")
            _write_seal(image_fd, before)
            # Whoever forgets a chunk clears its bit, then takes the seal away: so one of the two sees the other.
            try:
                _check_whole(cache, layout)
            except NotSealed:
                cache.unseal()
                raise
        except BaseException:
            for name, mode in modes.items():
                with suppress(NotAFile):  # it was put there meanwhile
                    _change_mode(directory_fd, name, mode)
            raise
    finally:
        os.close(directory_fd)


def _check_whole(cache: NodeCache, layout: Layout) -> None:
    missing = len(layout) - layout.zero_chunks - int(np.count_nonzero(layout.cached(cache.bits())))
    if missing:
        raise NotSealed(f"{missing} chunks are not in the cache")


def _change_mode(directory_fd: int, name: str, mode: int) -> None:
    fd = open_regular(directory_fd, name, os.O_RDONLY)
    try:
        os.fchmod(fd, mode)
    finally:
        os.close(fd)


def _look(directory_fd: int, files: Sequence[ImageFile]) -> Seal:
    """Describe the files as they are. Raises: `NotSealed` when they aren't the manifest's, or not alone; `OSError`."""
    infos = {name: os.stat(name, dir_fd=directory_fd, follow_symlinks=False) for name in os.listdir(directory_fd)}
    if {name: info.st_size for name, info in infos.items()} != {file.name: file.size for file in files}:
        raise NotSealed(f"{FILES} has not the manifest's files, or more than those")
    if not all(stat.S_ISREG(info.st_mode) for info in infos.values()):
        raise NotSealed(f"{FILES} has something that is not a file")
    facts = {
        name: FileFacts(info.st_size, stat.S_IMODE(info.st_mode), info.st_ctime_ns, info.st_ino)
        for name, info in infos.items()
    }
    return Seal(_BOOT_ID.read_bytes().decode("ascii").strip(), facts)


def _seal_modes(directory_fd: int, files: Sequence[ImageFile]) -> None:
    """Give the files their sealed mode, and bring them to the disk.

    Returns when the clock has gone on: whatever is written from now on changes a ctime.
    """
    changed_ns = 0
    for file in files:
        fd = open_regular(directory_fd, file.name, os.O_RDONLY)
        try:
            os.fchmod(fd, SEALED_MODE)
            os.fsync(fd)
            changed_ns = max(changed_ns, os.fstat(fd).st_ctime_ns)
        finally:
            os.close(fd)
    # A clock that was set back must not hold this up.
    time.sleep(min(max(0, changed_ns + _CLOCK_TICK_NS - time.time_ns()), _CLOCK_TICK_NS) / 1e9)


def _write_seal(image_fd: int, facts: Seal) -> None:
    """Put the record in place, whole."""
    new = f"{SEALED}.new"
    fd = open_regular(image_fd, new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        data = encode(facts)
        if os.write(fd, data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), new)
    finally:
        os.close(fd)
    os.rename(new, SEALED, src_dir_fd=image_fd, dst_dir_fd=image_fd)


def _at_lowest_priority(read_back: Callable[[], list[int]]) -> list[int]:
    """Let everything else on the machine go first, on the CPU and (by that, ioprio_set(2)) at the disk.

    In a thread of its own, since Linux keeps niceness per thread, and to raise it again takes a capability. Nobody
    waits for it when the process ends.
    """
    answers: list[list[int]] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            os.setpriority(os.PRIO_PROCESS, 0, _LOWEST_PRIORITY)
            answers.append(read_back())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="read-back", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return answers[0]
