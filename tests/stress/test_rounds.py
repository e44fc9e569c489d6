"""Mount, read, unmount, again and again, in the background and by commands, as an operator would: nothing stays."""

import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from bench.mounts import LIMIT_S, Mounts
from streamd.fuse import mountinfo

if TYPE_CHECKING:
    from tests.stress.conftest import Snapshot


def test_rounds_of_mount_and_umount_leave_nothing(mounts: Mounts, snapshot: "Snapshot", is_full: bool) -> None:
    mountpoint = mounts.mountpoint()
    before = _host_facts(mounts)
    for _ in range(30 if is_full else 2):
        result = mounts.run("mount", snapshot.file_url, mountpoint, "--json")
        assert result.returncode == 0, result.stderr
        facts = json.loads(result.stdout)
        assert Path(facts["log"]).stat().st_mode & 0o777 == 0o600
        compared = subprocess.run(["cmp", mountpoint / "pages.img", snapshot.pages], timeout=LIMIT_S)
        assert compared.returncode == 0
        assert mounts.run("umount", mountpoint).returncode == 0
        assert not _is_running(facts["pid"])
        assert _host_facts(mounts) == before
    assert os.listdir(mountpoint) == []
    # One log for a mountpoint, not for a mount; of records, one a mount.
    assert set(os.listdir(mounts.base / "log")) == {Path(facts["log"]).name, "records"}


def _is_running(pid: int) -> bool:
    """Whether a process runs; one that has ended may wait for PID 1 to notice."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def _host_facts(mounts: Mounts) -> dict[str, object]:
    run = mounts.run_directory / "mounts"
    return {
        "mounts": [entry.mountpoint for entry in mountinfo.read() if entry.mountpoint.startswith(str(mounts.base))],
        "sockets": os.listdir(run) if run.exists() else [],
    }
