"""One image in the node cache: its directory, with the image's own files, sparse, and a bitmap of what is in them.

    DIR/images/<key>/head       JSON: format, chunk count, bytes, files; unknown or different = all here is discarded.
                                   Its modification time is when the image was used last
                        manifest   the snapshot's manifest, so that `cache verify` needs no store
                        files/     checkpoint.img, pages_meta.img, pages.img: 0600, sparse, byte k of each where it is
                                   in the image; nothing else is in here, so that the directory can be mounted
                        resident   one bit a chunk, set after the chunk was written
                        sealed     the files are whole and verified (`sealing.py`); goes before any byte of them changes
                        lock       flocked by the process that owns the directory; its text says who that is
                        promised   bytes that its owner may write, so that all stay within the limit together

Chunks are numbered by the files one after another, so offsets here are in that concatenation; a chunk never spans two
files, and no read or write here does. Rules. One process owns an image's directory. Files are written by `pwrite` only
(a store through a mapping into a full disk is SIGBUS) and never shortened; an image leaves by rename, then unlink
(`cache_directory.py`). A set bit is a hint, not a promise: after a crash of the machine the data may not have reached
the disk, so whoever reads a chunk for the first time in its life verifies it. A chunk leaves bit first, bytes after.
Every call here may block or fail; callers run them in threads and go on without the cache.

The directory is its owner's, a worker's user, and a worker that was broken into may have put anything in the place of
any file. So files are opened by name in a directory that is held open, nothing is followed or waited for, and an image
with something else in a file's place is damaged (`has_only_files`): it is begun anew, or leaves.
"""

import ctypes
import errno
import fcntl
import json
import os
import shutil
import stat
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from streamd.config import size_text
from streamd.errors import Refused, StreamdError
from streamd.safe_paths import NotAFile, SafeDirectory, UnsafePath, open_regular, read_regular
from streamd.snapshot.names import IMAGE_FILES

if TYPE_CHECKING:  # the daemon's supervisor imports this, and does without numpy
    from streamd.serve.plan import Layout
    from streamd.snapshot.manifest import ImageFile

CACHE_FORMAT = 2
FILES = "files"
SEALED = "sealed"
SEALED_MODE = 0o400
FULL = (errno.ENOSPC, errno.EDQUOT)
_HEAD_MAX_BYTES = 64 << 10
_LOCK_TRIES = 6
_LOCK_PAUSE_S = 0.02
# Unlinking a file of 100 GB takes a second or two; below the time after which a write counts as stalled.
_FREEING_TIMEOUT_S = 5.0


_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate64.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 1, 2  # linux/falloc.h


class CacheUnusable(StreamdError):
    """The cache directory can't be used; the mount serves from memory instead."""


def opened(path: Path, *, make: bool = False) -> SafeDirectory:
    """Open a directory of the cache, in which only we write. Raises: `CacheUnusable` for another; `OSError`."""
    try:
        return SafeDirectory.open(path, make=make)
    except UnsafePath as error:
        raise CacheUnusable(f"cache directory {error}") from error


def opened_image(path: Path, *, make: bool = False) -> SafeDirectory:
    """Open an image's directory, which is no link. Raises: as `opened`."""
    with opened(path.parent) as images:
        try:
            return images.open_directory(path.name, make=make)
        except UnsafePath as error:
            raise CacheUnusable(f"cache directory {error}") from error


_OTHER_WAYS = "mount it with --no-cache, or use the daemon's image of it (streamd image ls)"


class NodeCache:
    """One image's directory, owned by this process until `close`.

    `has` tells the bitmap as found at the start, and as changed since. `write` and `confirm` may be called from one
    thread only, reads from any. `room_bytes` is what the image may take up in all, `reserve_bytes` what its disk must
    have free for more to be written; `make_room` has other images leave a disk that is full, and says whether one did.
    """

    def __init__(
        self,
        path: Path,
        *,
        directory_fd: int,
        lock_fd: int,
        file_fds: Sequence[int],
        sizes: Sequence[int],
        resident_fd: int,
        bits: bytearray,
    ) -> None:
        self.path = path
        self.room_bytes = 0
        self.reserve_bytes = 0
        self.make_room: Callable[[], bool] = lambda: False
        self.freeing: threading.Thread | None = None  # gives the disk back what left for this image
        self._directory_fd = directory_fd
        self._lock_fd = lock_fd
        self._file_fds = tuple(file_fds)
        self._read_only = {fd for fd in file_fds if _is_read_only(fd)}  # the writing thread's, too
        self._bases = list(accumulate(sizes[:-1], initial=0))  # each file's first byte in the image
        self._resident_fd = resident_fd
        self._bits = bits
        self._bits_lock = threading.Lock()
        self._unsynced: set[int] = set()  # descriptors; the writing thread's

    def has(self, chunk: int) -> bool:
        """Whether the chunk's bit is set."""
        return bool(self._bits[chunk >> 3] & (1 << (chunk & 7)))

    def bits(self) -> bytes:
        """Give all bits as they are now, eight chunks a byte, the lowest the first."""
        return bytes(self._bits)

    def read_nowait(self, view: memoryview, offset: int) -> int:
        """Fill `view` from the page cache only; give the bytes read, 0 when a disk would have to be waited for."""
        fd, at = self._locate(offset)
        try:
            return os.preadv(fd, [view], at, os.RWF_NOWAIT)
        except (BlockingIOError, OSError):
            return 0

    def read(self, size: int, offset: int) -> bytearray:
        """Read `size` bytes of one file, waiting for the disk. Raises: OSError, also when the file is too short."""
        fd, at = self._locate(offset)
        data = bytearray(size)
        view = memoryview(data)
        done = 0
        while done < size:
            got = os.preadv(fd, [view[done:]], at + done)
            if got == 0:
                raise OSError(f"{self.path}: a file ends at byte {offset + done} of the image")
            done += got
        return data

    def write(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        """Write a verified chunk; it counts once `confirm` has returned. Raises: OSError."""
        if not self._unsynced:
            self.unseal()
        fd, at = self._locate(offset)
        if fd in self._read_only:
            _make_writable(fd)
            self._read_only.remove(fd)
        self._unsynced.add(fd)
        view = memoryview(data)
        done = 0
        while done < len(view):
            done += os.pwrite(fd, view[done:], at + done)

    def confirm(self, chunks: Sequence[int]) -> None:
        """Wait until what was written is on the disk, then set the bits of those chunks. Raises: OSError.

        The kernel reports a write-back that failed to the next sync of the descriptor, and only there (fsync(2)).
        """
        for fd in self._unsynced:
            os.fdatasync(fd)
        self._unsynced.clear()
        self._set_bits(chunks, True)

    def forget(self, chunk: int) -> None:
        """Clear a chunk's bit: what is in the file is not what it should be. Raises: OSError."""
        try:
            self._set_bits([chunk], False)
        finally:
            self.unseal()  # after the bit: whoever seals looks at the bits once more when the seal is in place

    def evict(self, chunk: int, offset: int, size: int) -> None:
        """Clear a chunk's bit, then give its bytes back to the disk: they read as zeros from now on.

        Only the writing thread may call it, and only for what nobody reads any more. Raises: OSError, also when the
        file system can't punch holes, and ENOSPC for a file that was sealed once (0400): a sandbox may have it open
        natively, without any lock, and would read the hole.
        """
        fd, at = self._locate(offset)
        if not os.fstat(fd).st_mode & stat.S_IWUSR:
            raise OSError(errno.ENOSPC, "no room, and nothing may leave: the files may be open in a sandbox")
        self._set_bits([chunk], False)
        self.unseal()
        # fallocate(2); Python has only posix_fallocate(3). The last page of a file may be a part of one: it is zeroed.
        if _libc.fallocate64(fd, _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE, at, size):
            number = ctypes.get_errno()
            raise OSError(number, f"can't punch a hole: {os.strerror(number)}")

    def check_reserve(self) -> None:
        """Raise OSError (ENOSPC) when the disk has less than the reserve free, whoever filled it."""
        if self._has_reserve():
            return
        if self.freeing is not None:
            self.freeing.join(_FREEING_TIMEOUT_S)
        if not self._has_reserve():
            raise OSError(errno.ENOSPC, f"the disk has less than its reserve of {size_text(self.reserve_bytes)} free")

    def _has_reserve(self) -> bool:
        try:
            info = os.fstatvfs(self._resident_fd)
        except OSError:  # not every file system tells; a write will
            return True
        return not info.f_blocks or info.f_bavail * info.f_frsize >= self.reserve_bytes

    def unseal(self) -> None:
        """Let nobody mount the files as they are, from before the first of them changes. Raises: OSError."""
        with suppress(FileNotFoundError):
            os.unlink(SEALED, dir_fd=self._directory_fd)

    def _locate(self, offset: int) -> tuple[int, int]:
        """Say which file holds byte `offset` of the image (its descriptor), and where."""
        index = bisect_right(self._bases, offset) - 1
        return self._file_fds[index], offset - self._bases[index]

    def _set_bits(self, chunks: Sequence[int], value: bool) -> None:
        """Change the bits of some chunks, which are near each other, as a load's are: one write takes all of them."""
        with self._bits_lock:
            for chunk in chunks:
                index, mask = chunk >> 3, 1 << (chunk & 7)
                self._bits[index] = self._bits[index] | mask if value else self._bits[index] & ~mask
            low, high = min(chunks) >> 3, (max(chunks) >> 3) + 1
            os.pwrite(self._resident_fd, self._bits[low:high], low)

    def promise(self) -> None:
        """Write down `room_bytes`, for the mounts that count what is left of the limit. Raises: OSError."""
        fd = open_regular(self._directory_fd, "promised", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        with os.fdopen(fd, "wb") as file:
            file.write(str(self.room_bytes).encode())

    def note_used(self) -> None:
        """Count the image as used now. Raises: OSError."""
        os.utime("head", dir_fd=self._directory_fd, follow_symlinks=False)

    @property
    def first_pages_byte(self) -> int:
        """First byte of pages.img in the image."""
        return self._bases[-1]

    def close(self) -> None:
        """Let go of the directory; what is cached stays."""
        for fd in (*self._file_fds, self._resident_fd, self._lock_fd, self._directory_fd):
            with suppress(OSError):
                os.close(fd)


def open_image(path: Path, manifest: bytes, files: "Sequence[ImageFile]", layout: "Layout", owner: str) -> NodeCache:
    """Open, or begin, an image's directory as its one owner; `manifest` is the encoded one, `files` are its files.

    Raises: `Refused` when another process owns it; `CacheUnusable`, `OSError`.
    """
    image_fd = opened_image(path, make=True).fd
    fds = [image_fd]
    is_new = False
    try:
        lock_fd = lock_image(path, image_fd, owner)
        fds.append(lock_fd)
        sizes = {file.name: file.size for file in files}
        assert tuple(sizes) == IMAGE_FILES  # `decode` saw to it: they become paths here
        head = {"format": CACHE_FORMAT, "chunks": len(layout), "bytes": layout.start[-1], "files": sizes}
        is_new = not _is_ours(image_fd, head, manifest)
        if is_new:
            _clear(image_fd)
            _write_new(image_fd, "manifest", manifest)
        flags = os.O_RDWR | os.O_CREAT
        with suppress(FileExistsError):
            os.mkdir(FILES, 0o700, dir_fd=image_fd)
        directory_fd = open_files(image_fd)
        try:
            for name, size in sizes.items():
                fd = _open_file(name, flags, directory_fd)
                fds.append(fd)
                if os.fstat(fd).st_size != size:
                    if _is_read_only(fd):
                        _make_writable(fd)
                    os.ftruncate(fd, size)
        finally:
            os.close(directory_fd)
        resident_fd = open_regular(image_fd, "resident", flags)
        fds.append(resident_fd)
        bitmap_bytes = (len(layout) + 7) // 8
        os.posix_fallocate(resident_fd, 0, max(bitmap_bytes, 1))  # the disk may be full when its bits are to be set
        bits = bytearray(os.pread(resident_fd, bitmap_bytes, 0))
        bits.extend(bytes(bitmap_bytes - len(bits)))
        if is_new:
            _write_new(image_fd, "head", json.dumps(head).encode())  # last: what has none was never begun
    except BaseException:
        if is_new:
            with suppress(OSError):  # it says nothing, but takes room of a disk that may be full
                _clear(image_fd)
        for fd in fds:
            os.close(fd)
        raise
    return NodeCache(
        path,
        directory_fd=image_fd,
        lock_fd=lock_fd,
        file_fds=fds[2:-1],
        sizes=list(sizes.values()),
        resident_fd=resident_fd,
        bits=bits,
    )


def _open_file(name: str, flags: int, directory_fd: int) -> int:
    """Open a file of ours to write; one that was sealed once, by an owner without capabilities, only to read.

    (`NodeCache.write` has it written, if need be: opening alone must not break a seal.)
    """
    try:
        return open_regular(directory_fd, name, flags)
    except PermissionError:
        return open_regular(directory_fd, name, os.O_RDONLY)


def open_files(image_fd: int) -> int:
    """Open the directory of an image's files. Raises: `OSError`, also for what is no directory."""
    return os.open(FILES, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=image_fd)


def _is_read_only(fd: int) -> bool:
    return fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY


def _make_writable(fd: int) -> None:
    """Have a descriptor of a file that was sealed once write, too; this breaks the seal. It stays 0400 (`evict`)."""
    mode = stat.S_IMODE(os.fstat(fd).st_mode)
    os.fchmod(fd, mode | stat.S_IWUSR)
    try:
        writable_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    finally:
        os.fchmod(fd, mode)
    os.dup2(writable_fd, fd, inheritable=False)
    os.close(writable_fd)


def is_begun(image_fd: int) -> bool:
    """Whether a directory was begun in this format. Raises: OSError (but a missing head is an answer)."""
    try:
        head = json.loads(read_regular(image_fd, "head", _HEAD_MAX_BYTES))
    except (FileNotFoundError, NotAFile, ValueError, RecursionError):
        return False
    return isinstance(head, dict) and head.get("format") == CACHE_FORMAT


def has_only_files(image_fd: int) -> bool:
    """Whether all that an image has is regular files, here and in `files`. Raises: OSError."""
    with os.scandir(image_fd) as entries:
        is_file = {entry.name: entry.is_file(follow_symlinks=False) for entry in entries}
    if is_file.pop(FILES, None) is not None:
        try:
            files_fd = open_files(image_fd)
        except NotADirectoryError:  # the kernel says this of a link, too
            return False
        try:
            with os.scandir(files_fd) as entries:
                is_file |= {f"{FILES}/{entry.name}": entry.is_file(follow_symlinks=False) for entry in entries}
        finally:
            os.close(files_fd)
    return all(is_file.values())


def is_lock_misplaced(image_fd: int) -> bool:
    """Whether the lock is something that can't be locked, so that nobody owns the image. Raises: OSError."""
    try:
        return not stat.S_ISREG(os.stat("lock", dir_fd=image_fd, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


def _is_ours(image_fd: int, head: dict[str, object], manifest: bytes) -> bool:
    try:
        return bool(
            json.loads(read_regular(image_fd, "head", _HEAD_MAX_BYTES)) == head
            and read_regular(image_fd, "manifest", len(manifest) + 1) == manifest
            and has_only_files(image_fd)
        )
    except (OSError, ValueError, RecursionError):
        return False


def _clear(image_fd: int) -> None:
    """Remove all that an image's directory has, but its lock, under which this is done. Raises: OSError."""
    with os.scandir(image_fd) as entries:
        names = {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries if entry.name != "lock"}
    for name, is_directory in names.items():
        if is_directory:
            shutil.rmtree(name, dir_fd=image_fd)
        else:
            os.unlink(name, dir_fd=image_fd)


def _write_new(image_fd: int, name: str, content: bytes) -> None:
    fd = open_regular(image_fd, name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(fd, view) :]
    finally:
        os.close(fd)


def lock_image(path: Path, image_fd: int, owner: str | None) -> int:
    """Take an image's lock, and say in it who has it (`owner` None: for a moment only, by nobody worth naming).

    `image_fd` is its directory, open. The lock lives as long as the descriptor that is given.
    Raises: `Refused`, `CacheUnusable`, `OSError`.
    """
    fd = open_regular(image_fd, "lock", os.O_RDWR | os.O_CREAT)
    for attempt in range(_LOCK_TRIES):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            # Whoever lists the cache holds the lock, shared, for an instant.
            if attempt < _LOCK_TRIES - 1:
                time.sleep(_LOCK_PAUSE_S)
                continue
            holder = os.pread(fd, 4096, 0).decode(errors="replace") or "another process"
            os.close(fd)
            raise Refused(f"this snapshot is in use with this cache already, by {holder}; {_OTHER_WAYS}") from None
    if not (
        _is_at(image_fd, path) and _is_at(fd, "lock", image_fd)
    ):  # the directory was removed between our open and our lock
        os.close(fd)
        raise CacheUnusable(f"{path} was removed while it was being opened")
    if owner is not None:
        with suppress(OSError):  # a full disk has no room for names
            os.ftruncate(fd, 0)
            os.pwrite(fd, owner.encode(errors="replace"), 0)
    return fd


def _is_at(fd: int, path: str | Path, directory_fd: int | None = None) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, dir_fd=directory_fd, follow_symlinks=False))
    except FileNotFoundError:
        return False


def are_files_held(files: str | Path, image_fd: int | None = None) -> bool:
    """Whether a process holds a `files` directory, since it is mounted (flock). Waits for the disk. Raises: OSError.

    Its path is absolute, or one from `image_fd`.
    """
    fd = os.open(files, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=image_fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def owner_of(image_fd: int) -> str | None:
    """Say who owns an image's directory, None for nobody. Raises: `OSError`."""
    try:
        fd = open_regular(image_fd, "lock", os.O_RDWR)
    except (FileNotFoundError, NotAFile):
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.pread(fd, 4096, 0).decode(errors="replace") or "another process"
    finally:
        os.close(fd)
    return None
