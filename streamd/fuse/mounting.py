"""mount(2) and umount2(2), called by ourselves: no pyfuse3, no fusermount.

The mount exists before a FUSE library is loaded: `mount` opens /dev/fuse and mounts it, whoever serves gets the
descriptor (design §5: a server may be replaced under a living mount). What is under a mount is never stat'ed here: a
server that doesn't answer would hang the caller, in a way that no signal ends. So all questions about a mountpoint go
to the kernel's table first, and paths are resolved by `mount_paths`.

Who owns a directory above a mountpoint may swap it at any time, and must not lead us elsewhere: `check` opens the
directory, `mount` puts the mount on what was opened and undoes it when that is not at the path any more; an unmount
opens the directory above, and looks whether the mount in it is the one that is meant. (They can still move a mount.)

Unmounting has two strengths. `unmount` gives up when a file is open. `abort` ends the connection: every waiting read
fails, then the mount is detached. Only mounts of our own type, and binds of ours (`binding`), are ever taken away; who
has a file of a bind open when it is detached reads on, since no server is needed.
"""

import errno
import os
import select
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

from streamd.errors import NotFound, NotPermitted, Refused, StreamdError
from streamd.fuse import binding, mount_calls, mountinfo
from streamd.fuse.mount_paths import Mountpoint, open_mountpoint, path_error
from streamd.fuse.mountinfo import MountEntry

log = structlog.get_logger()

DEVICE = "/dev/fuse"
FILESYSTEM = "fuse.streamd"  # type and subtype, as mountinfo and mount(8) show it
SOURCE = "streamd"

_TYPE, _SUBTYPE = FILESYSTEM.split(".")
_ATTRIBUTES = (
    mount_calls.MOUNT_ATTR_RDONLY
    | mount_calls.MOUNT_ATTR_NOSUID
    | mount_calls.MOUNT_ATTR_NODEV
    | mount_calls.MOUNT_ATTR_NOEXEC
)
# 40000 is S_IFDIR in octal: the root's type before the server was asked. `allow_other`: runsc may run as another user.
_OPTIONS = {
    "source": SOURCE,
    "subtype": _SUBTYPE,
    "ro": None,
    "rootmode": "40000",
    "user_id": "0",
    "group_id": "0",
    "allow_other": None,
    "default_permissions": None,
}
_EXPECTED_OPTIONS = frozenset({"ro", "nosuid", "nodev", "noexec"})
_EXPECTED_SUPER_OPTIONS = frozenset({"user_id=0", "group_id=0", "allow_other", "default_permissions"})

_SYSCTLS = Path("/proc/sys/fs/fuse")
_LEAST_REQUEST_TIMEOUT_S = 15.0  # FUSE_TIMEOUT_TIMER_FREQ: how often the kernel looks
# A dead connection answers at once; a living server of ours answers statfs from memory.
_PROBE_S = 2.0


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


def request_timeout_s() -> float | None:
    """Give how long the kernel lets a request of a new mount wait before it ends that mount; None: for ever.

    Linux 6.15 and later, for servers that ask for nothing themselves (fs/fuse/inode.c, `init_server_timeout`).
    """
    limits = []
    for name in ("default_request_timeout", "max_request_timeout"):
        with suppress(OSError, ValueError):
            limits.append(int((_SYSCTLS / name).read_text()))
    limits = [limit for limit in limits if limit]
    return max(_LEAST_REQUEST_TIMEOUT_S, min(limits)) if limits else None


def require_root() -> None:
    """Raise `NotPermitted` when this process can't mount."""
    if os.geteuid() != 0:
        raise NotPermitted("mount needs root: run it with sudo")


def is_own(entry: MountEntry) -> bool:
    """Whether a mount is one of ours: a FUSE mount, or a bind of sealed files."""
    return entry.filesystem == FILESYSTEM or binding.is_bind(entry)


def own_mountpoints() -> list[str]:
    """Give where mounts of ours are, whether somebody serves them or not."""
    return [entry.mountpoint for entry in mountinfo.read() if is_own(entry)]


def check(mountpoint: str, *, server_lives: Callable[[str], bool]) -> Mountpoint:
    """Refuse a mountpoint that can't or shouldn't be mounted on; clean up a mount of ours whose server is dead.

    `mountpoint` is resolved; `server_lives` says whether a streamd process answers for it. Gives the directory that was
    checked, open; the caller closes it. Raises: `NotPermitted`, `NotFound`, `NotADirectory`, `Refused`.
    """
    require_root()
    if not os.path.exists(DEVICE):
        raise StreamdError(
            f"{DEVICE} is not there: load the fuse module (modprobe fuse), or give the container the device"
        )
    clean_stale(mountpoint, server_lives=server_lives)
    directory = open_mountpoint(mountpoint)
    try:
        listing_fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory.fd)
        try:
            if os.listdir(listing_fd):
                raise Refused(
                    f"mountpoint {mountpoint} is not empty: what is in it would be hidden; use an empty directory"
                )
        finally:
            os.close(listing_fd)
    except OSError as error:
        os.close(directory.fd)
        raise path_error(mountpoint, error) from error
    except BaseException:
        os.close(directory.fd)
        raise
    return directory


def is_dead(mountpoint: str) -> bool:
    """Ask a mount of ours whether its process is gone, in a thread that may be left behind; silence is no yes."""
    top = mountinfo.topmost(mountpoint)
    is_gone = binding.is_left_behind if top is not None and binding.is_bind(top) else _is_disconnected
    answer: list[bool] = []

    def probe() -> None:
        with suppress(OSError):
            answer.append(is_gone(mountpoint))

    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    thread.join(_PROBE_S)
    return answer == [True]


def _is_disconnected(mountpoint: str) -> bool:
    """Whether a FUSE mount has no server; statfs is the call that FUSE never answers from its own memory.

    (stat would be, while attributes are valid.) Raises: OSError.
    """
    try:
        os.statvfs(mountpoint)
    except OSError as error:
        if error.errno in (errno.ENOTCONN, errno.ECONNABORTED):
            return True
        raise
    return False


def clean_stale(mountpoint: str, *, server_lives: Callable[[str], bool]) -> bool:
    """Take away mounts of ours that no server answers for; true if there was one.

    Raises: `Refused` when a living server has the mountpoint.
    """
    cleaned = False
    # Each round takes one mount away. More than a handful on one mountpoint is not our doing.
    for _ in range(8):
        top = mountinfo.topmost(mountpoint)
        if top is None or not is_own(top):
            return cleaned
        if server_lives(mountpoint) or not is_dead(mountpoint):
            raise Refused(
                f"mountpoint {mountpoint} is in use: a streamd mount is served there (streamd umount {mountpoint})"
            )
        abort(mountpoint, top.device)
        cleaned = True
    raise Refused(f"mountpoint {mountpoint}: too many dead mounts on top of each other")


def mount(directory: Mountpoint) -> FuseMount:
    """Mount a new, still unanswered FUSE connection on a directory that was checked. The caller closes both.

    Raises: `NotPermitted`; `StreamdError`, also when the directory was moved or removed since: then nothing is mounted.
    """
    mountpoint = directory.path
    try:
        fd = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise StreamdError(f"{DEVICE} can't be opened: {error.strerror}") from error
    try:
        return FuseMount(fd=fd, mountpoint=mountpoint, device=_mount_device(fd, directory))
    except BaseException as error:
        os.close(fd)
        if not isinstance(error, OSError):
            raise
        if error.errno in (errno.EPERM, errno.EACCES):
            raise NotPermitted(f"mounting on {mountpoint} is not permitted here: CAP_SYS_ADMIN is needed") from error
        raise StreamdError(f"mounting on {mountpoint} failed: {error.strerror}") from error


def _mount_device(fd: int, directory: Mountpoint) -> tuple[int, int]:
    """Mount an open /dev/fuse on a directory; give the mount's device. Raises: `OSError`, `StreamdError`."""
    mount_fd = mount_calls.new_mount(_TYPE, _OPTIONS | {"fd": str(fd)}, _ATTRIBUTES)
    try:
        mount_calls.forbid_symlinks(mount_fd)
        mount_calls.move_mount(mount_fd, directory.fd)
        try:
            entry = mountinfo.with_id(mountinfo.id_of(mount_fd))
            mismatch = _mismatch(entry, directory.path)
            if entry is None or mismatch:
                raise StreamdError(f"mounting on {directory.path} gave another mount than asked for: {mismatch}")
        except BaseException:
            mount_calls.detach(mount_fd)
            raise
        return entry.device
    finally:
        os.close(mount_fd)


def unmount(mountpoint: str, device: tuple[int, int] | None = None) -> None:
    """Unmount unless something is open under it; never waits for the server.

    With `device`, only that mount is meant. Raises: `NotFound` when no mount of ours is there, `Refused` when busy.
    """
    with _found(mountpoint, device) as target:
        if target is None:
            raise NotFound(f"no streamd mount at {mountpoint}")
        try:
            mount_calls.umount(target, 0)
        except OSError as error:
            if error.errno == errno.EBUSY:
                raise Refused(f"{mountpoint} is in use: a file or directory in it is open") from error
            raise _unmount_error(mountpoint, error) from error


def abort(mountpoint: str, device: tuple[int, int]) -> None:
    """End the connection of that mount, whatever waits for it, and take the mount away; done when it is gone already.

    MNT_FORCE aborts the connection; it answers EBUSY when files are still open, with every waiting process freed all
    the same (tried). Only when the kernel refuses it is the abort file asked. A bind is detached, nothing else: forced,
    the disk's own file system could lose its connection (NFS). Raises: `NotPermitted`, `StreamdError`.
    """
    top = mountinfo.topmost(mountpoint)
    if top is not None and top.filesystem == FILESYSTEM:
        with _found(mountpoint, device) as target:
            if target is None:
                return
            try:
                mount_calls.umount(target, mount_calls.MNT_FORCE)
            except OSError as error:
                if error.errno != errno.EBUSY:
                    abort_connection(device[1])
    with _found(mountpoint, device) as target:
        if target is None:
            return
        try:
            mount_calls.umount(target, mount_calls.MNT_DETACH)
        except OSError as error:
            raise _unmount_error(mountpoint, error) from error


def abort_connection(connection_id: int) -> bool:
    """Abort a connection of that number, whosever it is now; false if there is none. Raises: as `_abort_file`."""
    fd = _abort_file(connection_id)
    if fd is None:
        return False
    with open(fd, "wb", buffering=0) as file:
        file.write(b"1")
    return True


@contextmanager
def ending_connection(mount: FuseMount) -> Iterator[None]:
    """End the connection of a mount that is taken away in here, also where other mount namespaces have copies of it.

    What does that is opened before: the number of a connection that has ended may be another's a moment later, and
    what was opened for ours has no effect on that one then. An error, logged, leaves the copies.
    """
    fd: int | None = None
    try:
        fd = _abort_file(mount.connection_id)
    except StreamdError as error:
        log.warning("copies of a mount in other mount namespaces would live on", reason=str(error))
    try:
        ended = select.poll()
        ended.register(mount.fd, 0)
        is_ours = not ended.poll(0)  # POLLERR, which is always told: it has ended, before or while that was opened
        yield
        if fd is not None and is_ours:
            os.write(fd, b"1")
    finally:
        if fd is not None:
            os.close(fd)


def _abort_file(connection_id: int) -> int | None:
    """Open what aborts a connection, in fusectl, which is mounted for that in no place; None when there is none.

    Raises: `NotPermitted`, `StreamdError`.
    """
    try:
        connections = mount_calls.new_mount("fusectl", {}, _ATTRIBUTES & ~mount_calls.MOUNT_ATTR_RDONLY)
        try:
            return os.open(f"{connection_id}/abort", os.O_WRONLY | os.O_CLOEXEC, dir_fd=connections)
        finally:
            os.close(connections)
    except FileNotFoundError:
        return None
    except PermissionError as error:
        raise NotPermitted(f"FUSE connection {connection_id} can't be aborted: {error.strerror}") from error
    except OSError as error:
        raise StreamdError(f"FUSE connection {connection_id} can't be aborted: {error.strerror}") from error


@contextmanager
def _found(mountpoint: str, device: tuple[int, int] | None) -> Iterator[str | None]:
    """Give a path of exactly that mount for umount2, whatever is done to the directories above; None: it isn't there.

    The directory above is held; the name in it is a mountpoint, which nobody can rename or remove. The mount itself
    can't be held: it would be busy.
    """
    top = mountinfo.topmost(mountpoint)
    if top is None or not is_own(top) or device not in (None, top.device):
        yield None
        return
    above, name = os.path.split(mountpoint)
    try:
        above_fd = os.open(above, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise _unmount_error(mountpoint, error) from error
    try:
        yield f"/proc/self/fd/{above_fd}/{name}" if _mount_id(above_fd, name) == top.mount_id else None
    finally:
        os.close(above_fd)


def _mount_id(directory_fd: int, name: str) -> int | None:
    """Give the id of the mount on a name, None when the name is not there; its file system isn't asked."""
    try:
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory_fd)
    except FileNotFoundError:
        return None
    try:
        return mountinfo.id_of(fd)
    finally:
        os.close(fd)


def _mismatch(entry: MountEntry | None, mountpoint: str) -> str:
    """Say in which way a mount is not what `mount` asked for; empty when it is."""
    if entry is None:
        return "it is not in the mount table"
    if entry.mountpoint != mountpoint:
        return "the directory was moved meanwhile"
    if entry.filesystem != FILESYSTEM:
        return f"its type is {entry.filesystem}"
    # Without `nosuid`, `allow_other` and the rest the files would be open to the wrong ones: better none.
    missing = sorted(_EXPECTED_OPTIONS - entry.options) + sorted(_EXPECTED_SUPER_OPTIONS - entry.super_options)
    return f"without {', '.join(missing)}" if missing else ""


def _unmount_error(mountpoint: str, error: OSError) -> StreamdError:
    if error.errno == errno.EPERM:
        return NotPermitted(f"unmounting {mountpoint} is not permitted: run it with sudo")
    return StreamdError(f"unmounting {mountpoint} failed: {error.strerror}")
