"""For all tests: patience with property tests on small, shared machines, and no file of tests leaves a mount behind."""

from collections.abc import Iterator

import pytest
from hypothesis import settings

from streamd.fuse import mountinfo, mounting
from streamd.fuse.mountinfo import MountEntry

# No example fails for how long it takes.
settings.register_profile("patient", parent=settings.default, deadline=None)
settings.load_profile("patient")


@pytest.fixture(scope="module", autouse=True)
def no_mount_is_left() -> Iterator[None]:
    """Fail the file that leaves a mount of ours, and take it away: other tests ask what is mounted on the machine."""
    before = {entry.mount_id for entry in _own_mounts()}
    yield
    left = [entry for entry in _own_mounts() if entry.mount_id not in before]
    for entry in reversed(left):
        mounting.abort(entry.mountpoint, entry.device)
    assert not left, f"left mounted: {[entry.mountpoint for entry in left]}"


def _own_mounts() -> list[MountEntry]:
    return [entry for entry in mountinfo.read() if mounting.is_own(entry)]
