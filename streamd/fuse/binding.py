"""Read-only binds of sealed image files: a mount whose reads are the disk's own, with no server in the way.

A bind has no type and no source of its own, so it is known by what it shows: the `files` directory of an image in a
node cache, mounted with exactly our options. Its process holds that directory's lock (flock, shared) for as long as it
lives; whoever can take the lock for itself looks at a mount that was left behind. So a bind of a living process is
respected whatever run directory that process has, and mounts of others are never taken for ours.
"""

import errno
import fcntl
import os
import re
from dataclasses import dataclass

from streamd.errors import NotPermitted, StreamdError
from streamd.fuse import mount_calls, mountinfo
from streamd.fuse.mount_paths import Mountpoint
from streamd.fuse.mountinfo import MountEntry
from streamd.serve import node_cache

_ATTRIBUTES = (
    mount_calls.MOUNT_ATTR_RDONLY
    | mount_calls.MOUNT_ATTR_NOSUID
    | mount_calls.MOUNT_ATTR_NODEV
    | mount_calls.MOUNT_ATTR_NOEXEC
)
_OPTIONS = frozenset({"ro", "nosuid", "nodev", "noexec"})
# The image may have been taken out of the cache since (moved to the trash, then unlinked: proc_pid_mountinfo(5)).
_ROOT = re.compile(r"(/images/[0-9a-f]{64}|/trash-[0-9a-f]{32})/files(//deleted)?$")


@dataclass(frozen=True, slots=True)
class BindMount:
    """A bind of ours. `fd` is what it shows, locked; whoever holds this value closes it, after the unmount."""

    fd: int
    mountpoint: str
    device: tuple[int, int]
    mount_id: int


def is_bind(entry: MountEntry) -> bool:
    """Whether a mount is a bind of ours, served or left behind."""
    return _ROOT.search(entry.root) is not None and entry.options >= _OPTIONS


def is_there(bind: BindMount) -> bool:
    """Whether it is in the kernel's table: numbers of mounts are used again, at once, by whoever mounts next."""
    entry = mountinfo.with_id(bind.mount_id)
    return entry is not None and entry.device == bind.device and is_bind(entry)


def hold(files_fd: int) -> None:
    """Take the lock that tells a living process's bind from one left behind; it goes with the descriptor.

    Waits for whoever looks at such a bind in this moment. Raises: OSError.
    """
    fcntl.flock(files_fd, fcntl.LOCK_SH)


def bind(files_fd: int, directory: Mountpoint) -> BindMount:
    """Show an open directory that is held (`hold`), read-only, at a mountpoint that was checked.

    It takes over `files_fd` when it returns.

    Raises: `NotPermitted`; `StreamdError`, also when the kernel can't (before 5.12), or when the mountpoint was moved
    or removed since: then nothing is mounted.
    """
    try:
        mount_fd = mount_calls.clone_mount(files_fd)
        try:
            mount_calls.set_attributes(mount_fd, _ATTRIBUTES)
            mount_calls.forbid_symlinks(mount_fd)
            mount_calls.move_mount(mount_fd, directory.fd)
            try:
                entry = mountinfo.with_id(mountinfo.id_of(mount_fd))
                if entry is None or entry.mountpoint != directory.path or not is_bind(entry):
                    raise StreamdError(f"mounting on {directory.path} gave another mount than asked for: {entry}")
            except BaseException:
                mount_calls.detach(mount_fd)
                raise
            return BindMount(files_fd, entry.mountpoint, entry.device, entry.mount_id)
        finally:
            os.close(mount_fd)
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EACCES):
            raise NotPermitted(
                f"mounting on {directory.path} is not permitted here: CAP_SYS_ADMIN is needed"
            ) from error
        raise StreamdError(f"mounting on {directory.path} failed: {error.strerror}") from error


def is_left_behind(mountpoint: str) -> bool:
    """Whether nobody holds what a bind of ours shows. It waits for the disk. Raises: OSError."""
    return not node_cache.are_files_held(mountpoint)
