"""Mounts of a former life go, those of this one never, whenever they are made. Real mounts, which nobody serves."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamd.daemon.strays import Strays
from streamd.fuse import mount_calls, mount_paths, mountinfo, mounting


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A directory of mountpoints; nothing stays mounted."""
    yield tmp_path
    for entry in mountinfo.read():
        if entry.mountpoint.startswith(f"{tmp_path}/"):
            mount_calls.umount(entry.mountpoint, mount_calls.MNT_FORCE | mount_calls.MNT_DETACH)


def mount(mountpoint: Path) -> int:
    """Mount; give the descriptor of the connection."""
    mountpoint.mkdir()
    with mount_paths.open_mountpoint(str(mountpoint)) as directory:
        return mounting.mount(directory).fd


def mounted(place: Path) -> set[str]:
    return {Path(entry.mountpoint).name for entry in mountinfo.read() if entry.mountpoint.startswith(f"{place}/")}


def test_what_is_not_ours_goes_with_its_directory_unless_it_is_in_use(place: Path) -> None:
    fds = [mount(place / name) for name in ("ours", "stray", "used")]
    held = os.open(place / "used", os.O_PATH)
    strays = Strays(place)
    strays.clean_up(lambda: {str(place / "ours")})
    assert mounted(place) == set(os.listdir(place)) == {"ours", "used"}
    os.close(held)
    strays.clean_up(lambda: {str(place / "ours")})
    assert mounted(place) == {"ours"}
    for fd in fds:
        os.close(fd)


def test_what_is_mounted_while_strays_are_looked_for_stays(place: Path) -> None:
    fds = [mount(place / "ours")]

    def ours() -> set[str]:
        """What is ours now; the next one begins a moment later."""
        fds.append(mount(place / "new"))
        return {str(place / "ours")}

    Strays(place).clean_up(ours)
    assert mounted(place) == {"ours", "new"}
    for fd in fds:
        os.close(fd)
