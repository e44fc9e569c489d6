"""The mount of an image as the supervisor handles it: made, begun, told to give out requests again, taken away.

Nothing here opens or stats what is on a mount: it may hang.
"""

import errno
import os
import struct
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TypeVar

import trio

from streamd.errors import NotFound, Refused, StreamdError
from streamd.fuse import binding, mount_paths, mountinfo, mounting
from streamd.fuse.binding import BindMount
from streamd.fuse.mount_paths import Mountpoint
from streamd.fuse.mounting import FuseMount
from streamd.safe_paths import SafeDirectory

_MOUNTPOINTS_MAX = 8
_INIT_S = 10.0
_INIT_BYTES = (1 << 20) + 8192
# linux/fuse.h: struct fuse_out_header of a notification: len, code, no unique.
_RESEND = struct.pack("<IiQ", 16, 7, 0)
AnyMount = TypeVar("AnyMount", FuseMount, BindMount)


class WorkerLost(StreamdError):
    """An image has no worker and gets none; the message says why."""

    kind = "worker-lost"


def make_mount(base: str, mount: Callable[[Mountpoint], AnyMount], say_where: Callable[[str], None]) -> AnyMount:
    """Mount on a directory of ours, `base` or one beside it. Raises: `StreamdError`, `OSError`.

    It says where before it mounts: what is in the kernel's table and is no image's is taken for a stray (`strays.py`).

    A mount of a former life may be there that its worker still serves: it goes if nobody uses it, else it is left
    alone. It is not looked at, since it may hang.
    """
    for number in range(_MOUNTPOINTS_MAX):
        mountpoint = f"{base}.{number}" if number else base
        with SafeDirectory.open(Path(mountpoint).parent, make=True) as above, suppress(FileExistsError):
            os.mkdir(os.path.basename(mountpoint), 0o700, dir_fd=above.fd)
        with suppress(Refused, NotFound):
            mounting.unmount(mountpoint)
        if mountinfo.topmost(mountpoint) is None:
            say_where(mountpoint)
            with mounting.check(mount_paths.resolve(mountpoint), server_lives=lambda _: False) as directory:
                return mount(directory)
    raise Refused(f"{base} and all places beside it are used by workers of former lives")


def is_mounted(mount: FuseMount | BindMount) -> bool:
    """Whether it is in the kernel's table."""
    if isinstance(mount, BindMount):
        return binding.is_there(mount)
    return any(entry.device == mount.device for entry in mountinfo.read())


async def first_request(device_fd: int) -> bytes:
    """Read the kernel's INIT, which comes once. Raises: `StreamdError`."""
    os.set_blocking(device_fd, False)
    with trio.move_on_after(_INIT_S):
        while True:
            await trio.lowlevel.wait_readable(device_fd)
            try:
                return os.read(device_fd, _INIT_BYTES)
            except BlockingIOError:
                continue
    raise StreamdError("the kernel says nothing on a new mount")


def have_sent_again(device_fd: int) -> None:
    """Have the kernel give out again what a dead worker was asked. Raises: `WorkerLost`."""
    try:
        os.write(device_fd, _RESEND)
    except OSError as error:
        if error.errno in (errno.ENODEV, errno.ECONNABORTED, errno.EPERM):  # unmounted; aborted
            raise WorkerLost("its connection has ended") from error
        raise WorkerLost(
            "its worker died, and this kernel can't give out again what it was asked (Linux 6.9)"
        ) from error


def take_away(mount: FuseMount | BindMount) -> None:
    """Unmount if the kernel agrees, and end the connection. Raises: `Refused`, `StreamdError`, `OSError`."""
    ending = mounting.ending_connection(mount) if isinstance(mount, FuseMount) else nullcontext()
    with ending, suppress(NotFound):  # somebody else has taken it away
        mounting.unmount(mount.mountpoint, mount.device)
