"""Paths of mountpoints, and directories to mount on that are held open.

Who owns a directory above a mountpoint may put another directory or a symlink in its place at any time. So a path is
resolved once, without looking at what is mounted on its last component (a server that doesn't answer would hang us),
then opened without following anything, and from then on the descriptor is what counts.
"""

import errno
import os
import stat
from dataclasses import dataclass
from types import TracebackType

from streamd.errors import Exit, NotFound, NotPermitted, Refused, StreamdError
from streamd.fuse import mountinfo

_MAX_SYMLINKS = 40


class NotADirectory(StreamdError):
    """The mountpoint is a file."""

    exit_code, kind = Exit.USAGE, "usage"


@dataclass(frozen=True, slots=True)
class Mountpoint:
    """A directory to mount on: `path` is where it was when it was opened. Close it, or enter it with `with`."""

    path: str
    fd: int

    def __enter__(self) -> "Mountpoint":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self.fd)


def open_mountpoint(path: str) -> Mountpoint:
    """Open a resolved path. Raises: `NotFound`, `NotADirectory`, `NotPermitted`, `Refused` for a path with symlinks."""
    try:
        fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise path_error(path, error) from error
    try:
        mode = os.fstat(fd).st_mode
        # `resolve` has followed the links; one that is there now was put there since, and leads elsewhere.
        if stat.S_ISLNK(mode) or os.readlink(f"/proc/self/fd/{fd}") != path:
            raise Refused(f"mountpoint {path} was replaced while it was being looked at: who else can write above it?")
        if not stat.S_ISDIR(mode):
            raise NotADirectory(f"mountpoint {path} is not a directory")
    except OSError as error:
        os.close(fd)
        raise path_error(path, error) from error
    except BaseException:
        os.close(fd)
        raise
    return Mountpoint(path, fd)


def resolve(path: str) -> str:
    """Give the absolute path of a mountpoint with all symlinks followed, without touching what is mounted there.

    The last component is looked at only when nothing is mounted on it. Raises: `NotFound` for a parent that isn't
    there, `Refused` for a loop of symlinks.
    """
    if "\0" in path or not path:
        raise NotFound(f"mountpoint {path!r}: not a path")
    entries = mountinfo.read()
    current = os.path.join(os.getcwd(), path)
    for _ in range(_MAX_SYMLINKS):
        parent, name = os.path.split(current.rstrip("/"))
        if name in ("", ".", ".."):
            parent, name = os.path.split(os.path.realpath(current))
        try:
            candidate = os.path.join(os.path.realpath(parent or "/", strict=True), name)
        except OSError as error:
            raise path_error(path, error) from error
        if mountinfo.topmost(candidate, entries):
            return candidate
        try:
            current = os.path.join(os.path.dirname(candidate), os.readlink(candidate))
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.ENOENT):  # not a symlink, or not there: `check` says which
                return candidate
            raise path_error(path, error) from error
    raise Refused(f"mountpoint {path}: too many levels of symbolic links")


def path_error(path: str, error: OSError) -> StreamdError:
    """Make the error that says what is wrong with a mountpoint."""
    if isinstance(error, FileNotFoundError):
        return NotFound(f"mountpoint {path} does not exist: create the directory first")
    if isinstance(error, NotADirectoryError):
        return NotADirectory(f"mountpoint {path}: a part of the path is not a directory")
    if error.errno in (errno.EACCES, errno.EPERM):
        return NotPermitted(f"mountpoint {path}: {error.strerror}")
    if error.errno == errno.ENOTCONN:
        return Refused(f"mountpoint {path} is a dead FUSE mount of another program: unmount it first (umount {path})")
    return StreamdError(f"mountpoint {path}: {error.strerror}")
