"""mount(2) and umount2(2), called by ourselves: no pyfuse3, no fusermount.

The mount exists before a FUSE library is loaded: `mount` opens /dev/fuse and mounts it, whoever serves gets the
descriptor (design §5: a server may be replaced under a living mount). What is under a mount is never stat'ed here: a
server that doesn't answer would hang the caller, in a way that no signal ends. So all questions about a mountpoint go
to the kernel's table first, and a path is resolved without looking at what is mounted on its last component.

Unmounting has two strengths. `unmount` gives up when a file is open. `abort` ends the connection: every waiting read
fails, then the mount is detached. Only mounts of our own type are ever taken away.
"""

import ctypes
import errno
import os
import stat
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from streamd.errors import Exit, NotFound, NotPermitted, Refused, StreamdError
from streamd.fuse import mountinfo
from streamd.fuse.mountinfo import MountEntry

DEVICE = "/dev/fuse"
FILESYSTEM = "fuse.streamd"  # type and subtype, as mountinfo and mount(8) show it
SOURCE = "streamd"

# sys/mount.h
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 1, 2, 4, 8
_MNT_FORCE, _MNT_DETACH, _UMOUNT_NOFOLLOW = 1, 2, 8
_FLAGS = _MS_RDONLY | _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
# 40000 is S_IFDIR in octal: the root's type before the server was asked. `allow_other`: runsc may run as another user.
_DATA = "fd={fd},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions"
_EXPECTED_OPTIONS = frozenset({"ro", "nosuid", "nodev", "noexec"})
_EXPECTED_SUPER_OPTIONS = frozenset({"user_id=0", "group_id=0", "allow_other", "default_permissions"})

_CONNECTIONS = Path("/sys/fs/fuse/connections")
# A dead connection answers at once; a living server of ours answers statfs from memory.
_PROBE_S = 2.0
_MAX_SYMLINKS = 40

_libc = ctypes.CDLL(None, use_errno=True)


class NotADirectory(StreamdError):
    """The mountpoint is a file."""

    exit_code, kind = Exit.USAGE, "usage"


@dataclass(frozen=True, slots=True)
class FuseMount:
    """A mount of ours. `fd` is the open /dev/fuse, owned by whoever holds this value."""

    fd: int
    mountpoint: str
    device: tuple[int, int]

    @property
    def connection_id(self) -> int:
        """Number of the connection under /sys/fs/fuse/connections: the minor number of the device."""
        return self.device[1]


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
            raise _path_error(path, error) from error
        if mountinfo.topmost(candidate, entries):
            return candidate
        try:
            current = os.path.join(os.path.dirname(candidate), os.readlink(candidate))
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.ENOENT):  # not a symlink, or not there: `check` says which
                return candidate
            raise _path_error(path, error) from error
    raise Refused(f"mountpoint {path}: too many levels of symbolic links")


def require_root() -> None:
    """Raise `NotPermitted` when this process can't mount."""
    if os.geteuid() != 0:
        raise NotPermitted("mount needs root: run it with sudo")


def own_mountpoints() -> list[str]:
    """Give where mounts of ours are, whether somebody serves them or not."""
    return [entry.mountpoint for entry in mountinfo.read() if entry.filesystem == FILESYSTEM]


def check(mountpoint: str, *, server_lives: Callable[[str], bool]) -> None:
    """Refuse a mountpoint that can't or shouldn't be mounted on; clean up a mount of ours whose server is dead.

    `mountpoint` is resolved; `server_lives` says whether a streamd process answers for it. Raises: `NotPermitted`,
    `NotFound`, `NotADirectory`, `Refused`.
    """
    require_root()
    if not os.path.exists(DEVICE):
        raise StreamdError(
            f"{DEVICE} is not there: load the fuse module (modprobe fuse), or give the container the device"
        )
    clean_stale(mountpoint, server_lives=server_lives)
    try:
        found = os.lstat(mountpoint)
        if not stat.S_ISDIR(found.st_mode):
            raise NotADirectory(f"mountpoint {mountpoint} is not a directory")
        with os.scandir(mountpoint) as listing:
            if next(listing, None) is not None:
                raise Refused(
                    f"mountpoint {mountpoint} is not empty: what is in it would be hidden; use an empty directory"
                )
    except OSError as error:
        raise _path_error(mountpoint, error) from error


def is_dead(mountpoint: str) -> bool:
    """Ask a mount of ours whether its server is gone, in a thread that may be left behind; silence is no yes.

    statfs is the call that FUSE never answers from its own memory (stat would, while attributes are valid).
    """
    answer: list[int] = []

    def probe() -> None:
        try:
            os.statvfs(mountpoint)
        except OSError as error:
            answer.append(error.errno or 0)
        else:
            answer.append(0)

    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    thread.join(_PROBE_S)
    return answer in ([errno.ENOTCONN], [errno.ECONNABORTED])


def clean_stale(mountpoint: str, *, server_lives: Callable[[str], bool]) -> bool:
    """Take away mounts of ours that no server answers for; true if there was one.

    Raises: `Refused` when a living server has the mountpoint.
    """
    cleaned = False
    # Each round takes one mount away. More than a handful on one mountpoint is not our doing.
    for _ in range(8):
        top = mountinfo.topmost(mountpoint)
        if top is None or top.filesystem != FILESYSTEM:
            return cleaned
        if server_lives(mountpoint) or not is_dead(mountpoint):
            raise Refused(
                f"mountpoint {mountpoint} is in use: a streamd mount is served there (streamd umount {mountpoint})"
            )
        abort(mountpoint, top.device)
        cleaned = True
    raise Refused(f"mountpoint {mountpoint}: too many dead mounts on top of each other")


def mount(mountpoint: str) -> FuseMount:
    """Mount a new, still unanswered FUSE connection. The caller checked the mountpoint, and closes `fd`.

    Raises: `NotPermitted`, `StreamdError`.
    """
    try:
        fd = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise StreamdError(f"{DEVICE} can't be opened: {error.strerror}") from error
    try:
        _call_mount(SOURCE, mountpoint, FILESYSTEM, _FLAGS, _DATA.format(fd=fd))
    except OSError as error:
        os.close(fd)
        if error.errno in (errno.EPERM, errno.EACCES):
            raise NotPermitted(f"mounting on {mountpoint} is not permitted here: CAP_SYS_ADMIN is needed") from error
        raise StreamdError(f"mounting on {mountpoint} failed: {error.strerror}") from error
    entry = mountinfo.topmost(mountpoint)
    mismatch = "it is not in the mount table" if entry is None else _mismatch(entry)
    if entry is None or mismatch:
        # Without `nosuid`, `allow_other` and the rest the files would be open to the wrong ones: better none.
        if entry is not None and entry.filesystem == FILESYSTEM:
            _call_umount(mountpoint, _MNT_DETACH)
        os.close(fd)
        raise StreamdError(f"mounting on {mountpoint} gave another mount than asked for: {mismatch}")
    return FuseMount(fd=fd, mountpoint=mountpoint, device=entry.device)


def unmount(mountpoint: str, device: tuple[int, int] | None = None) -> None:
    """Unmount unless something is open under it; never waits for the server.

    With `device`, only that mount is meant. Raises: `NotFound` when no mount of ours is there, `Refused` when busy.
    """
    if not _is_ours(mountpoint, device):
        raise NotFound(f"no streamd mount at {mountpoint}")
    try:
        _call_umount(mountpoint, 0)
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise Refused(f"{mountpoint} is in use: a file or directory in it is open") from error
        raise _unmount_error(mountpoint, error) from error


def abort(mountpoint: str, device: tuple[int, int]) -> None:
    """End the connection of that mount, whatever waits for it, and take the mount away; done when it is gone already.

    MNT_FORCE aborts the connection; it answers EBUSY when files are still open, with every waiting process freed all
    the same (tried). Only when the kernel refuses it is the abort file asked. Raises: `NotPermitted`, `StreamdError`.
    """
    if not _is_ours(mountpoint, device):
        return
    try:
        _call_umount(mountpoint, _MNT_FORCE)
    except OSError as error:
        if error.errno != errno.EBUSY:
            abort_connection(device[1])
    if _is_ours(mountpoint, device):
        try:
            _call_umount(mountpoint, _MNT_DETACH)
        except OSError as error:
            raise _unmount_error(mountpoint, error) from error


def abort_connection(connection_id: int) -> bool:
    """Abort a connection by fusectl, which is mounted in a private place if it is missing; false if it isn't there.

    Raises: `NotPermitted`, `StreamdError`.
    """
    if any(entry.filesystem == "fusectl" and entry.mountpoint == str(_CONNECTIONS) for entry in mountinfo.read()):
        return _write_abort(_CONNECTIONS, connection_id)
    with tempfile.TemporaryDirectory(prefix="streamd-fusectl-") as place:
        try:
            _call_mount("fusectl", place, "fusectl", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, "")
        except OSError as error:
            raise StreamdError(f"fusectl can't be mounted: {error.strerror}") from error
        try:
            return _write_abort(Path(place), connection_id)
        finally:
            _call_umount(place, _MNT_DETACH)


def _write_abort(connections: Path, connection_id: int) -> bool:
    try:
        (connections / str(connection_id) / "abort").write_text("1")
    except FileNotFoundError:
        return False
    except OSError as error:
        raise StreamdError(f"FUSE connection {connection_id} can't be aborted: {error.strerror}") from error
    return True


def _is_ours(mountpoint: str, device: tuple[int, int] | None) -> bool:
    top = mountinfo.topmost(mountpoint)
    return top is not None and top.filesystem == FILESYSTEM and device in (None, top.device)


def _mismatch(entry: MountEntry) -> str:
    """Say in which way a mount is not what `mount` asked for; empty when it is."""
    if entry.filesystem != FILESYSTEM:
        return f"its type is {entry.filesystem}"
    missing = sorted(_EXPECTED_OPTIONS - entry.options) + sorted(_EXPECTED_SUPER_OPTIONS - entry.super_options)
    return f"without {', '.join(missing)}" if missing else ""


def _path_error(path: str, error: OSError) -> StreamdError:
    if isinstance(error, FileNotFoundError):
        return NotFound(f"mountpoint {path} does not exist: create the directory first")
    if isinstance(error, NotADirectoryError):
        return NotADirectory(f"mountpoint {path}: a part of the path is not a directory")
    if error.errno in (errno.EACCES, errno.EPERM):
        return NotPermitted(f"mountpoint {path}: {error.strerror}")
    if error.errno == errno.ENOTCONN:
        return Refused(f"mountpoint {path} is a dead FUSE mount of another program: unmount it first (umount {path})")
    return StreamdError(f"mountpoint {path}: {error.strerror}")


def _unmount_error(mountpoint: str, error: OSError) -> StreamdError:
    if error.errno == errno.EPERM:
        return NotPermitted(f"unmounting {mountpoint} is not permitted: run it with sudo")
    return StreamdError(f"unmounting {mountpoint} failed: {error.strerror}")


def _call_mount(source: str, target: str, filesystem: str, flags: int, data: str) -> None:
    result = _libc.mount(
        source.encode(), os.fsencode(target), filesystem.encode(), ctypes.c_ulong(flags), data.encode()
    )
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), target)


def _call_umount(target: str, flags: int) -> None:
    if _libc.umount2(os.fsencode(target), ctypes.c_int(flags | _UMOUNT_NOFOLLOW)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), target)
