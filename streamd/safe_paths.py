"""Directories in which only we write, held open, and files in them that are reached without following anything.

Who can write in a directory above ours can put a symlink, or another directory, in the place of one on the way; what
we then write, trust or remove is elsewhere. So a `SafeDirectory` is opened from the root down, one component at a time,
each by the descriptor of the one before, and on the way it is made sure that nobody else can do that:

- a directory on the way belongs to root or to us, and when everybody may write in it, it is sticky (as /tmp is), so
  that what is ours in it stays in its place. (That its group may write is the administrator's word: Ubuntu's /var/log
  belongs to the group syslog. What its members put in our place is theirs, so it is refused.)
- a symlink on the way is followed when it is root's or ours, as links of the administrator's are.
- the directory itself is ours, and nobody else's to write.

A file that we believe what it says (a token), or run, but that needn't lie in a directory of ours, is reached the same
way (`open_trusted`, `stat_trusted`), and stricter: no group's members are let in, since what they can move into its
place may be another file of root's.

From then on its descriptor is what counts, not its path; a name in it is one component, and never followed. Paths of
several components are resolved by openat2(2) with RESOLVE_BENEATH, where the kernel has it (Linux 5.6, and a sandbox
that lets it through), else step by step.

"We" are the effective user, or whom this thread acts as (`acting_as`): root goes into a directory of another user of
ours as that user, so that whatever its owner has put there leads root nowhere where the owner couldn't go.
"""

import ctypes
import errno
import functools
import os
import shutil
import stat
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from streamd.errors import NotPermitted, Refused

_OPENAT2 = 437  # the same number on every architecture (Linux 5.6)
# linux/openat2.h
_RESOLVE_NO_MAGICLINKS, _RESOLVE_NO_SYMLINKS, _RESOLVE_BENEATH = 0x02, 0x04, 0x08
_RESOLVE = _RESOLVE_BENEATH | _RESOLVE_NO_SYMLINKS | _RESOLVE_NO_MAGICLINKS
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LOOK = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_SYMLINKS = 40
# With RESOLVE_BENEATH the kernel gives up (EAGAIN) when something was renamed meanwhile.
_TRIES = 8

_PR_GET_DUMPABLE, _PR_SET_DUMPABLE = 3, 4  # linux/prctl.h

_libc = ctypes.CDLL(None, use_errno=True)
_acting = threading.local()


@contextmanager
def acting_as(uid: int, gid: int) -> Iterator[None]:
    """Have the file accesses of this thread, and of threads that it starts meanwhile, be another user's; for root.

    setfsuid(2): with it go the capabilities that pass over permissions. Supplementary groups stay. What is imported
    meanwhile is looked for with that user's rights, too. Not to be nested. Raises: `NotPermitted` without CAP_SETUID
    and CAP_SETGID.
    """
    try:
        _set_file_ids(uid, gid)
        _acting.uid = uid
        yield
    finally:
        _acting.uid = None
        _set_file_ids(os.geteuid(), os.getegid())


def _set_file_ids(uid: int, gid: int) -> None:
    """Change whose file accesses are made. Neither call tells of a failure, only what was before."""
    dumpable = _libc.prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0)
    for call, number in ((_libc.setfsgid, gid), (_libc.setfsuid, uid)):
        call(ctypes.c_uint(number))
        if call(ctypes.c_uint(-1)) != number:
            raise NotPermitted(f"files of uid {uid} can't be used: CAP_SETUID and CAP_SETGID are needed")
    _libc.prctl(_PR_SET_DUMPABLE, dumpable, 0, 0, 0)  # each change sets it to fs.suid_dumpable


def _us() -> int:
    uid: int | None = getattr(_acting, "uid", None)
    return os.geteuid() if uid is None else uid


class UnsafePath(Refused):
    """Somebody else could change what a path leads to; `path` is the part of it that they can change."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"{path} {message}")
        self.path = path


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def open_beneath(directory_fd: int, path: str, flags: int, mode: int = 0o600) -> int:
    """Open a relative path that stays beneath a directory and has no symlink in it; `flags` as open(2)'s.

    `mode` counts when the file is made. Raises: `OSError`, among them ELOOP or ENOTDIR for a symlink, EXDEV for a path
    that leads out.
    """
    flags |= os.O_CLOEXEC | os.O_NOFOLLOW
    if not _has_openat2():
        return walk_beneath(directory_fd, path, flags, mode)
    for _ in range(_TRIES):
        fd, number = _openat2(directory_fd, path, flags, mode if flags & os.O_CREAT else 0)
        if fd >= 0:
            return fd
        if number not in (errno.EAGAIN, errno.EINTR):
            break
    raise OSError(number, os.strerror(number), path)


def walk_beneath(directory_fd: int, path: str, flags: int, mode: int = 0o600) -> int:
    """Do as `open_beneath` does, without openat2(2); `..` is refused wherever it leads."""
    *parents, name = path.split("/")
    if any(part in ("", "..") for part in (*parents, name)):
        number = errno.EXDEV if path.startswith("/") or ".." in (*parents, name) else errno.ENOENT
        raise OSError(number, os.strerror(number), path)
    fd = os.dup(directory_fd)
    try:
        for parent in parents:
            below = os.open(parent, _DIRECTORY, dir_fd=fd)
            os.close(fd)
            fd = below
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=fd)
    finally:
        os.close(fd)


class NotAFile(OSError):
    """What has a file's name is a link, a directory, a FIFO, a socket or a device: somebody put it there."""

    def __init__(self, name: str) -> None:
        super().__init__(errno.EINVAL, "is not a regular file", name)


def open_regular(directory_fd: int, name: str, flags: int, mode: int = 0o600) -> int:
    """Open a file by its name in a directory that is held open; `flags` as open(2)'s, `mode` for one that is made.

    Nothing is followed, and no other end of a FIFO waited for: whoever owns the directory may put anything there.
    Raises: `NotAFile`; other `OSError`s.
    """
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        fd = os.open(_checked(name), flags, mode, dir_fd=directory_fd)
    except OSError as error:
        # A link; a directory; a socket, or a FIFO that nobody reads; a device without a driver.
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENODEV):
            raise NotAFile(name) from error
        raise
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise NotAFile(name)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_regular(directory_fd: int, name: str, max_bytes: int) -> bytes:
    """Read a file's first `max_bytes` at most. Raises: as `open_regular`."""
    with os.fdopen(open_regular(directory_fd, name, os.O_RDONLY), "rb") as file:
        return file.read(max_bytes)


def _openat2(directory_fd: int, path: str, flags: int, mode: int) -> tuple[int, int]:
    """Make the system call; give the descriptor, or -1 and the error's number."""
    encoded = os.fsencode(path)
    if b"\0" in encoded:
        raise ValueError("embedded null byte")
    how = _OpenHow(flags, mode, _RESOLVE)
    fd = _libc.syscall(
        ctypes.c_long(_OPENAT2),
        ctypes.c_int(directory_fd),
        ctypes.c_char_p(encoded),
        ctypes.byref(how),
        ctypes.c_size_t(ctypes.sizeof(how)),
    )
    return fd, ctypes.get_errno()


@functools.cache
def _has_openat2() -> bool:
    """Try it once: what lacks it answers ENOSYS, and older container sandboxes EPERM."""
    root_fd = os.open("/", _DIRECTORY)
    try:
        fd, _ = _openat2(root_fd, ".", os.O_PATH | os.O_CLOEXEC, 0)
    finally:
        os.close(root_fd)
    if fd >= 0:
        os.close(fd)
    return fd >= 0


def open_trusted(path: str) -> int:
    """Open a file to read, to which nobody but root and we can lead; no symlink itself, and no FIFO is waited for.

    What the file itself is, and whose, is not looked at. Raises: `UnsafePath`; `OSError`.
    """
    directory, name = os.path.split(path)
    directory_fd = _open_way(directory)
    try:
        return os.open(
            name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, dir_fd=directory_fd
        )
    finally:
        os.close(directory_fd)


def stat_trusted(path: str) -> os.stat_result:
    """Describe what a path leads to, by symlinks, too, if nobody but root and we can change that.

    Raises: `UnsafePath`; `OSError`.
    """
    for _ in range(_MAX_SYMLINKS):
        directory, name = os.path.split(path)
        directory_fd = _open_way(directory)
        try:
            info = os.stat(name, dir_fd=directory_fd, follow_symlinks=False)
            if not stat.S_ISLNK(info.st_mode):
                return info
            _check_on_the_way(info, path)
            path = os.path.join(directory, os.readlink(name, dir_fd=directory_fd))
        finally:
            os.close(directory_fd)
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)


def _open_way(directory: str) -> int:
    fd = _walk(directory, make=False, may_group=False)
    try:
        _check_on_the_way(os.fstat(fd), directory, may_group=False)
    except BaseException:
        os.close(fd)
        raise
    return fd


class SafeDirectory:
    """A directory of ours, open; close it, or enter it with `with`. `path` is for messages, and for whom must have one:
    it leads here for as long as nobody but root and we change what is above.

    Names are single components; anything else is a `ValueError`, since names from outside were checked before. What
    `OSError`s the calls raise is the kernel's.
    """

    def __init__(self, path: Path, fd: int) -> None:
        """Take over a descriptor that was checked; `open` is what checks."""
        self.path = path
        self.fd = fd

    @classmethod
    def open(cls, path: Path, *, make: bool = False) -> "SafeDirectory":
        """Open it; with `make`, make what is missing of it, 0700.

        Raises: `UnsafePath`; `FileNotFoundError`, `NotADirectoryError`, other `OSError`s.
        """
        path = path.absolute()
        found_fd = _walk(os.fspath(path), make=make)
        try:
            _check_own(os.fstat(found_fd), os.fspath(path))
            return cls(path, os.open(".", _DIRECTORY, dir_fd=found_fd))
        finally:
            os.close(found_fd)

    def __enter__(self) -> "SafeDirectory":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def open_directory(self, name: str, *, make: bool = False) -> "SafeDirectory":
        """Open a directory in it, which must be ours as this one is. Raises: as `open`."""
        if make:
            self.make_directory(name)
        path = self.path / _checked(name)
        fd = open_beneath(self.fd, name, _DIRECTORY)
        try:
            _check_own(os.fstat(fd), os.fspath(path))
        except BaseException:
            os.close(fd)
            raise
        return SafeDirectory(path, fd)

    def open_file(self, name: str, flags: int, mode: int = 0o600) -> int:
        """Open a file in it; the caller closes the descriptor. A FIFO isn't waited for. Raises: `OSError`."""
        return open_beneath(self.fd, _checked(name), flags | os.O_NONBLOCK, mode)

    def make_directory(self, name: str) -> None:
        """Make a directory in it, 0700, unless something of that name is there."""
        with suppress(FileExistsError):
            os.mkdir(_checked(name), 0o700, dir_fd=self.fd)

    def unlink(self, name: str, *, missing_ok: bool = False) -> None:
        """Remove a name that isn't a directory's."""
        with suppress(*((FileNotFoundError,) if missing_ok else ())):
            os.unlink(_checked(name), dir_fd=self.fd)

    def rename(self, name: str, new: str, *, to: "SafeDirectory | None" = None) -> None:
        """Give something another name, here or in another directory; replaces a file of that name."""
        os.rename(_checked(name), _checked(new), src_dir_fd=self.fd, dst_dir_fd=(to or self).fd)

    def stat(self, name: str) -> os.stat_result:
        """Describe what has that name: a symlink, if it is one."""
        return os.stat(_checked(name), dir_fd=self.fd, follow_symlinks=False)

    def names(self) -> list[str]:
        """List it."""
        return os.listdir(self.fd)

    def scandir(self) -> list[os.DirEntry[str]]:
        """List it with kinds; an entry's `path` is relative to here, and what it looks up takes this to be open."""
        with os.scandir(self.fd) as entries:
            return list(entries)

    def remove_tree(self, name: str) -> None:
        """Remove a directory in it and all that is in there, as far as that goes, following nothing."""
        shutil.rmtree(_checked(name), ignore_errors=True, dir_fd=self.fd)


def _checked(name: str) -> str:
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError(f"{name!r} is not a name")
    return name


def _check_own(info: os.stat_result, path: str) -> None:
    if info.st_uid != _us():
        raise UnsafePath(path, f"must belong to this user; it belongs to uid {info.st_uid}")
    if info.st_mode & 0o022:
        mode = stat.S_IMODE(info.st_mode)
        raise UnsafePath(path, f"must be writable by nobody else; its mode is {mode:04o}")


def _check_on_the_way(info: os.stat_result, path: str, *, may_group: bool = True) -> None:
    if info.st_uid not in (0, _us()):
        raise UnsafePath(path, f"must belong to root or this user; it belongs to uid {info.st_uid}")
    if stat.S_ISLNK(info.st_mode) or info.st_mode & stat.S_ISVTX:
        return
    mode = stat.S_IMODE(info.st_mode)
    if mode & stat.S_IWOTH:
        raise UnsafePath(path, f"is writable by everybody, who could put something else in its place; mode {mode:04o}")
    if mode & stat.S_IWGRP and not may_group and info.st_gid:
        raise UnsafePath(
            path, f"is writable by group {info.st_gid}, which could put something else in its place; mode {mode:04o}"
        )


def _walk(path: str, *, make: bool, may_group: bool = True) -> int:
    """Open a directory (O_PATH), following symlinks that may be trusted, and looking at all that is on the way.

    `may_group`: directories that a group may write in are trusted, too.
    """
    left = deque(_parts(path))
    links = 0
    fd = os.open("/", _DIRECTORY)
    at = "/"  # where that is, for messages
    below = -1
    try:
        while left:
            _check_on_the_way(os.fstat(fd), at, may_group=may_group)
            name = left.popleft()
            here = os.path.normpath(os.path.join(at, name))
            below = _open_step(name, fd, path, make=make)
            info = os.fstat(below)
            if stat.S_ISLNK(info.st_mode):
                _check_on_the_way(info, here)
                links += 1
                if links > _MAX_SYMLINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
                target = os.readlink("", dir_fd=below)
                left.extendleft(reversed(_parts(target)))
                os.close(below)
                if not target.startswith("/"):
                    below = -1
                    continue
                below, here = os.open("/", _DIRECTORY), "/"
            elif not stat.S_ISDIR(info.st_mode):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), here)
            os.close(fd)
            fd, below, at = below, -1, here
    except BaseException:
        os.close(fd)
        if below >= 0:
            os.close(below)
        raise
    return fd


def _open_step(name: str, directory_fd: int, path: str, *, make: bool) -> int:
    try:
        return os.open(name, _LOOK, dir_fd=directory_fd)
    except FileNotFoundError:
        if not make:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from None
    with suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=directory_fd)
    return os.open(name, _LOOK, dir_fd=directory_fd)


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]
