"""The API's socket under a real daemon: it comes back when it was removed, and `status` tells who is missing."""

import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bench.daemons import Daemon
from bench.event_tape import until
from streamd.daemon.sockets import api_socket_path, lock_holder, lock_path
from streamd.errors import Exit

if TYPE_CHECKING:
    from tests.daemon.conftest import Saved


def removed(path: Path) -> None:
    """Remove the socket alone."""
    path.unlink()


def replaced(path: Path) -> None:
    """Put another socket in its place, at which nobody listens."""
    path.unlink()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(os.fspath(path))


def replaced_by_a_file(path: Path) -> None:
    """Put a file in its place."""
    path.unlink()
    path.touch()


def removed_with_the_lock(path: Path) -> None:
    """Remove both, as who clears the directory does."""
    path.unlink()
    lock_path(path.parent).unlink()


@pytest.mark.parametrize("lose", [removed, replaced, replaced_by_a_file, removed_with_the_lock])
def test_a_socket_that_has_gone_is_bound_anew_and_no_lease_ends(
    hasty: Daemon, saved: "Saved", calm: Callable[[Daemon], None], lose: Callable[[Path], None]
) -> None:
    image = hasty.image(saved.url)
    lease = hasty.client.take_lease(image.id, owner="test", purpose="restore")
    path = api_socket_path(hasty.run_directory)
    before = path.stat().st_ino
    lose(path)
    hasty.tape.until("api-restored")
    assert path.is_socket()
    assert path.stat().st_ino != before
    assert path.stat().st_mode & 0o777 == 0o600
    assert hasty.client.health()["pid"] == lock_holder(hasty.run_directory) == hasty.pid
    assert lease.is_held()
    assert [known["id"] for known in image.state()["leases"]] == [lease.id]
    lease.close()
    image.until(lambda state: state["state"] == "gone", "its end")
    assert len(hasty.tape.of("api-restored")) == 1
    calm(hasty)


def test_a_second_daemon_does_not_begin_while_the_socket_of_the_first_is_away(daemon: Daemon, saved: "Saved") -> None:
    daemon.image(saved.url)
    daemon.tape.until("image-requested")  # it listens: what is missing can't be connected to
    api_socket_path(daemon.run_directory).unlink()
    second = daemon.streamd("daemon").result()
    assert second.returncode == Exit.REFUSED
    assert "another streamd daemon runs here" in second.stderr
    daemon.tape.until("api-restored")
    assert daemon.client.health()["pid"] == daemon.pid


def status(daemon: Daemon) -> "subprocess.CompletedProcess[str]":
    """Run `streamd status`."""
    return daemon.streamd("status").result()


def test_a_daemon_that_hangs_is_told_of_within_a_bound(daemon: Daemon, saved: "Saved") -> None:
    daemon.image(saved.url)
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        found = daemon.streamd("status", "--json").result()
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    assert found.returncode == Exit.FAILED
    assert "did not answer within 10 s" in found.stderr
    assert "did not answer within 10 s" in json.loads(found.stdout)["daemon"]["error"]


def test_a_daemon_that_should_be_there_is_missed(daemon: Daemon, saved: "Saved") -> None:
    image = daemon.image(saved.url)
    holder = image.holder()
    assert holder.open() == "done"
    daemon.stop(signal.SIGKILL)
    found = status(daemon)
    assert found.returncode == Exit.NOT_FOUND
    assert "and 1 mount of its images are left" in found.stderr


def test_a_daemon_without_its_socket_is_not_taken_for_none(daemon: Daemon) -> None:
    path = api_socket_path(daemon.run_directory)
    os.kill(daemon.pid, signal.SIGSTOP)  # so that it can't mend it before it is looked at
    try:
        path.unlink()
        found = status(daemon)
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    assert found.returncode == Exit.FAILED
    assert f"the daemon (pid {daemon.pid}) has no socket at {path} now" in found.stderr
    until(path.exists, "the socket")


def test_a_daemon_that_was_ended_is_missed_by_nobody(daemon: Daemon) -> None:
    daemon.stop(signal.SIGTERM)
    assert status(daemon).returncode == Exit.DONE
    shutil.rmtree(daemon.run_directory)
    assert status(daemon).returncode == Exit.DONE
