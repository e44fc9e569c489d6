"""What `umount` does: ask the mount's process; without one, or by force, take the mount away ourselves."""

from enum import Enum
from pathlib import Path

from streamd.daemon.client import DaemonClient
from streamd.daemon.control_client import MountClient, NoAnswer, NoServer
from streamd.errors import NotFound, Refused
from streamd.fuse import mount_paths, mountinfo, mounting


class How(Enum):
    """How a mount went away."""

    ASKED = "asked"
    STALE = "stale"  # its process had died before
    ABORTED = "aborted"  # its process did not answer, and was ended
    UNASKED = "unasked"  # its process could not be found

    @property
    def remark(self) -> str:
        """What to tell people beyond the fact."""
        match self:
            case How.ASKED:
                return ""
            case How.STALE:
                return " (its process was dead)"
            case How.ABORTED:
                return " (its process did not answer; the connection was aborted, the process ended)"
            case How.UNASKED:
                return " (its process was not asked: there is no control socket for it in the run directory)"


def unmount(path: str, *, run_directory: Path, force: bool) -> tuple[str, How]:
    """Unmount what is mounted at `path`; give the resolved path.

    Bounded by the control client's time-outs. Raises: `NotFound` without a mount of ours, `Refused` with open files and
    without force, and for a daemon's image, `NoAnswer` when the process hangs and force wasn't asked for.
    """
    mountpoint = mount_paths.resolve(path)
    client = MountClient(run_directory, mountpoint)
    top = mountinfo.topmost(mountpoint)
    is_ours = top is not None and mounting.is_own(top)
    try:
        client.umount(force=force)
    except NoServer:
        if top is None or not is_ours:
            raise NotFound(f"no streamd mount at {mountpoint}") from None
        if mounting.is_dead(mountpoint):
            mounting.clean_stale(mountpoint, server_lives=lambda _: False)
            return mountpoint, How.STALE
        image = DaemonClient(run_directory).image_at(mountpoint)
        if image is not None:  # pods may hold leases, and come for its files
            name = image.get("id")
            raise Refused(
                f"{mountpoint} is the daemon's image {name}: `streamd image release {name}` ends it"
            ) from None
        # It lives, and its socket isn't where we look: the kernel is asked, and says no while a file is open.
        if force:
            mounting.abort(mountpoint, top.device)
        else:
            mounting.unmount(mountpoint, top.device)
        return mountpoint, How.UNASKED
    except NoAnswer as error:
        if not force or top is None or not is_ours:
            raise NoAnswer(f"{error}; --force unmounts without it") from error
        mounting.abort(mountpoint, top.device)
        client.end_server()
        return mountpoint, How.ABORTED
    return mountpoint, How.ASKED
