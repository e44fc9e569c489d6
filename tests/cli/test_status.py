"""`streamd status` where a daemon runs, where none does, and where one doesn't answer."""

import json
import os
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING

import pytest

from streamd.commands.image_facts import facts_of, status_row
from streamd.daemon.api.models import ErrorFacts, FaultWaits, ImageStateName, Lease, Progress, StoreAway
from streamd.errors import Exit
from streamd.fuse import mounting
from tests.daemon.api.fake_node import LIMIT_S, URL, Running

if TYPE_CHECKING:
    from tests.cli.conftest import Streamd

ONE = f"{1:032x}"


@pytest.fixture
def mountpoint(streamd: "Streamd") -> str:
    """A directory that an image says that it is mounted on."""
    path = streamd.base / "images"
    path.mkdir()
    return str(path)


def load(daemon: Running, **fields: object) -> None:
    """Have an image that loads."""
    lease = Lease(id="7", owner="pod web-1", purpose="restore", since_s=1.0, pid=16)
    known: dict[str, object] = {
        "state": ImageStateName.SERVING,
        "progress": Progress(resident_bytes=1, total_bytes=4),
        "fault_waits": FaultWaits(count=12, p50_ms=0.42, p99_ms=250.0),
        "stalls": 3,
        "restarts": 2,
        "worker_pid": 5,
        "leases": [lease],
        "bytes_by_tier": {"origin": 1 << 30, "read_fault": 1 << 20, "read_stream": 3 << 20},
    }
    daemon.call(partial(daemon.node.add, URL, **known | fields))


def test_without_a_daemon_there_are_mounts_only(streamd: "Streamd") -> None:
    assert streamd.ok("status").keys() == {"mounts", "dead_mountpoints", "daemon"}
    assert streamd.ok("status")["daemon"] is None
    result = streamd.run("status")
    assert (result.returncode, result.stdout, result.stderr) == (
        Exit.DONE,
        "",
        f"no mounts\nno daemon answers at {streamd.base}/run/api.sock\n",
    )


def test_only_images_that_serve_are_counted_as_served(streamd: "Streamd", daemon: Running) -> None:
    load(daemon)
    daemon.call(partial(daemon.node.add, f"{URL}b", state=ImageStateName.FAILED))
    assert "serves 1 image" in streamd.run("status").stdout.splitlines()[0]


def test_a_daemons_images_are_shown_with_who_serves_them(streamd: "Streamd", daemon: Running) -> None:
    daemon.node.warnings.append("the unit has no fd store")
    daemon.node.fetch_max_bytes_per_s = 12_500_000
    load(daemon)
    daemon.call(partial(daemon.node.add, f"{URL}b", state=ImageStateName.GONE))
    daemon.call(daemon.node.drain)
    status = streamd.ok("status")
    assert [image["id"] for image in status["images"]] == [ONE, f"{2:032x}"]
    assert status["images"][0]["fault_waits"]["p99_ms"] == 250.0
    assert (status["daemon"]["socket"], status["daemon"]["pid"]) == (str(daemon.path), 1)
    assert status["daemon"]["warnings"] == ["the unit has no fd store"]
    assert status["daemon"]["is_draining"]

    who, warning, _, row = streamd.run("status").stdout.splitlines()
    assert (
        who == "daemon test (pid 1) serves 1 image, at most 12.5 MB/s from the store; draining: it takes no new images"
    )
    assert warning == "warning: the unit has no fd store"
    cells = re.split("  +", row)
    assert cells[:6] == [ONE[:12], "web-1", "serving", "25.0 %", "0", "1"]
    assert cells[6:] == ["12 (0.4 ms, 250 ms)", "3", "1.0 GiB", "4.0 MiB", "2", "–"]


def test_what_is_wrong_with_an_image_is_told(streamd: "Streamd", daemon: Running) -> None:
    facts = ErrorFacts(kind="worker-lost", message="bad\x1b[2J", exit_code=1, at_s=1.0)
    away = StoreAway(since_s=1700000000.0, reason="transient: no route")
    load(daemon, last_error=facts, cache_problem="disk full", store_away=away)
    shown = streamd.run("status").stdout
    waits = "waits for the store since 2023-11-14 22:13:20Z: transient: no route"
    assert rf"worker-lost: bad\x1b[2J; {waits}; served from memory: disk full" in shown
    assert "\x1b" not in shown


def test_an_image_is_found_by_its_mountpoint(streamd: "Streamd", daemon: Running, mountpoint: str) -> None:
    load(daemon, mountpoint=mountpoint)
    assert streamd.ok("status", mountpoint)["id"] == ONE
    assert re.search(rf"^snapshot_url +{URL}$", streamd.run("status", mountpoint).stdout, re.MULTILINE)
    assert streamd.refused("status", str(streamd.base))["exit_code"] == Exit.NOT_FOUND


def test_an_image_whose_mount_is_dead_is_the_daemons_to_mend(
    streamd: "Streamd", daemon: Running, mountpoint: str
) -> None:
    with mounting.check(mountpoint, server_lives=lambda _: False) as directory:
        os.close(mounting.mount(directory).fd)
    assert streamd.ok("status")["dead_mountpoints"] == [mountpoint]
    load(daemon, mountpoint=mountpoint)
    assert streamd.ok("status")["dead_mountpoints"] == []


@pytest.fixture
def hung_up(streamd: "Streamd") -> Iterator[str]:
    """A daemon that takes connections and answers nothing."""
    path = streamd.base / "run" / "api.sock"
    path.parent.mkdir(mode=0o700)
    with closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind(os.fspath(path))
        listener.listen()

        def answer() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        yield str(path)
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(LIMIT_S)


def test_a_daemon_that_gives_no_answer_hides_no_mounts(streamd: "Streamd", hung_up: str) -> None:
    result = streamd.run("status", "--json")
    status = json.loads(result.stdout)
    assert (status["mounts"], status["images"], status["daemon"]["socket"]) == ([], [], hung_up)
    assert "broke off" in status["daemon"]["error"]
    result = streamd.run("status")
    assert result.returncode == Exit.FAILED
    assert "the daemon broke off its answer" in result.stderr


def test_a_socket_that_nobody_listens_at_tells_of_a_daemon_that_was_killed(streamd: "Streamd") -> None:
    path = streamd.base / "run" / "api.sock"
    path.parent.mkdir(mode=0o700)
    with closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind(os.fspath(path))
    result = streamd.run("status", "--json")
    assert (result.returncode, json.loads(result.stdout)["daemon"]) == (Exit.NOT_FOUND, None)
    assert f"no daemon answers at {path}: the last one was killed" in result.stderr


def test_an_answer_of_another_version_is_shown_as_far_as_it_goes() -> None:
    facts = facts_of({"id": "x", "openers": 3, "progress": [], "last_error": "?", "bytes_by_tier": {"origin": None}})
    assert status_row(facts, now_s=1.0) == ["x", "", "", "-", 0, 0, "0", 0, "0 B", "0 B", 0, "–", ""]
    facts = facts_of({"worker_started_s": 100.0, "fault_waits": {"count": 1, "p50_ms": 9.96, "p99_ms": 12345}})
    assert (facts.worker_age(7300.0), facts.waits) == ("2 h", "1 (10.0 ms, 12 s)")
