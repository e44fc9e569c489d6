"""The process that workers are forked from, on its bad days."""

import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import structlog.testing

from bench.daemons import Daemon
from bench.event_tape import until
from bench.fault_proxy import FaultProxy, Hang, Rule
from bench.mounts import FaultyDisk
from streamd.daemon.spawning import Spawner
from streamd.daemon.wire import wire_pair

if TYPE_CHECKING:
    from tests.daemon.conftest import Saved


def test_a_spawner_whose_supervisor_dies_before_the_answer_ends_quietly() -> None:
    ours, its = wire_pair()
    ours_of_worker, its_of_worker = wire_pair()
    with its, ours_of_worker, its_of_worker:
        process = subprocess.Popen(
            [sys.executable, "-m", "streamd.daemon.spawner", str(its.fileno())],
            stderr=subprocess.PIPE,
            pass_fds=[its.fileno()],
        )
        socket.send_fds(ours, [b"{}"], [its_of_worker.fileno()])
        ours.close()
    assert process.communicate(timeout=60)[1] == b""
    assert process.returncode == 0


def test_a_spawner_that_hangs_is_replaced_and_the_image_gets_its_worker(
    daemon: Daemon, saved: "Saved", calm: Callable[[Daemon], None]
) -> None:
    image = daemon.image(saved.slow(8))
    reader = image.reader(saved.pages)
    image.until_open(reader)
    hanging = daemon.spawner_pid()
    daemon.send(hanging, signal.SIGSTOP)
    image.kill_worker()
    daemon.tape.until("worker-replaced", image=image.id)
    assert saved.is_whole(reader.outcome())
    assert daemon.spawner_pid() != hanging
    calm(daemon)


def test_a_spawner_that_can_not_be_killed_holds_its_supervisor_up_for_a_second_only(tmp_path: Path) -> None:
    """It waits for a disk. (The deadline is ten times that second.)"""
    backing, mounted = tmp_path / "backing", tmp_path / "disk"
    with FaultyDisk(backing, mounted) as disk:
        (mounted / "file").write_text("x")
        spawner = Spawner()
        with disk.failing("all", "hang"):
            hanging = spawner._process = subprocess.Popen(["cat", mounted / "file"], stdout=subprocess.DEVNULL)
            until(lambda: Path(f"/proc/{hanging.pid}/wchan").read_text() == "request_wait_answer", "its wait")
            for _ in range(2):  # once it has done what it is told after it, the disk has read the request
                disk.set("write", "ok")
            with structlog.testing.capture_logs() as logged:
                ending = threading.Thread(target=spawner.end, daemon=True)
                ending.start()
                ending.join(10)
                assert not ending.is_alive(), "it waits for what doesn't end"
            assert hanging.poll() is None
            assert [line["event"] for line in logged] == ["the spawner doesn't end, and is left to itself"]
        hanging.wait(60)


@pytest.mark.parametrize("user", ["", "65533:65533"], ids=["root", "a user of its own"])
def test_a_worker_that_hangs_before_it_has_a_mount_dies_with_its_supervisor(
    uploaded: "Saved", proxy: FaultProxy, user: str
) -> None:
    """It is stopped here: whatever it would have to do itself, it can't."""
    hang = proxy.add(Rule(Hang(), times=None, reads_only=False))
    with Daemon(f'[daemon]\nworker_user = "{user}"', env={"STORAGE_EMULATOR_HOST": proxy.address}) as daemon:
        image = daemon.request(uploaded.url)
        until(lambda: hang.fired, "its question to the store")
        pid = image.worker_pid()
        daemon.send(pid, signal.SIGSTOP)
        daemon.stop(signal.SIGKILL)
        until(lambda: pid not in daemon.process_ids(), "its end")
