"""Workers of the real daemon, under the shipped unit and a real systemd: they become their user there, too."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.images import make_image
from streamd.save.push import push
from streamd.store.opening import open_store
from tests.systemd.conftest import ROOT, UNIT, UNIT_FILE
from tests.systemd.machine import Machine, wait_until

UID, GID = 64123, 64124
_STATUS = [f"Uid: {UID} {UID} {UID} {UID}", f"Gid: {GID} {GID} {GID} {GID}", "CapEff: 0000000000000000", "Seccomp: 2"]


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that workers reach, with a short path for a socket."""
    path = Path(tempfile.mkdtemp(prefix="streamd-unit-"))
    path.chmod(0o711)
    yield path
    shutil.rmtree(path)


def test_a_worker_becomes_its_user_and_so_does_the_next_one_in_the_next_life(place: Path) -> None:
    make_image(place / "image", 4 << 20, zero=0.1)
    push(place / "image", open_store(f"file://{place}/store"), snapshot_id="small", push_id="p")
    subprocess.run(["chmod", "-R", "a+rX", place / "store"], check=True)
    digest = hashlib.sha256((place / "image" / "pages.img").read_bytes()).hexdigest()
    config = place / "streamd.toml"
    config.write_text(
        f'run_directory = "{place}/run"\nlog_directory = "{place}/logs"\n[cache]\ndirectory = "{place}/cache"\n'
        f'[daemon]\nworker_user = "{UID}:{GID}"\n'
    )
    streamd = ["env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "streamd.cli", "--config", str(config)]
    with Machine(place) as machine:
        machine.copy(UNIT_FILE)
        lines = ["[Service]", "ExecStart=", f"ExecStart=/usr/bin/{' '.join(streamd)} daemon"]
        machine.write(f"{UNIT}.d/10-daemon.conf", "\n".join([*lines, f"StandardError=append:{place}/errors"]) + "\n")
        machine.systemctl("daemon-reload")
        machine.systemctl("start", UNIT)

        def shown() -> dict[str, Any]:
            state: dict[str, Any] = json.loads(machine.run(*streamd, "image", "show", image["id"], "--json"))
            return state

        def serves_as_its_user() -> int:
            pid = int(shown()["worker_pid"])
            status = machine.run("grep", "-E", "^(Uid|Gid|CapEff|Seccomp):", f"/proc/{pid}/status")
            assert [" ".join(line.split()) for line in status.splitlines()] == _STATUS
            assert machine.run("sha256sum", f"{image['mountpoint']}/pages.img").split()[0] == digest
            return pid

        image = json.loads(machine.run(*streamd, "image", "request", f"file://{place}/store/small", "--json"))
        wait_until(lambda: shown()["state"] == "serving", "the image")
        image = shown()
        pid = serves_as_its_user()
        machine.systemctl("restart", UNIT)
        assert serves_as_its_user() == pid
        machine.run("kill", "-KILL", str(pid))
        wait_until(lambda: shown()["worker_pid"] not in (None, pid), "the next worker")
        wait_until(lambda: bool(shown()["restarts"]), "its first beat")
        assert serves_as_its_user() != pid
        assert (place / "cache").stat().st_uid == UID
        assert shown()["cache_problem"] is None
        assert "can't use" not in (place / "errors").read_text()
    assert os.stat(place / "run").st_uid == 0
