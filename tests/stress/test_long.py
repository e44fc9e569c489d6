"""Bad days that take their time: a minute of silence, time-outs of commands."""

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

from bench.fault_proxy import Cut, Delay, FaultProxy, Hang, Rule, Status
from bench.mounts import Mounts
from streamd.errors import Exit

if TYPE_CHECKING:
    from tests.stress.conftest import Snapshot


def test_a_store_that_hangs_for_a_minute_is_waited_for(mounts: Mounts, snapshot: "Snapshot", proxy: FaultProxy) -> None:
    environment = {"STORAGE_EMULATOR_HOST": proxy.address}
    with mounts.start(snapshot.gs_url, env=environment, prefetch="all", options=["--no-cache"]) as mount:
        rule = proxy.add(Rule(Hang(), times=None))
        reader = mount.reader(snapshot.pages)
        over_s = time.monotonic() + 60
        while time.monotonic() < over_s:
            assert not reader.is_done()
            listed = subprocess.run(["ls", "-la", mount.mountpoint], capture_output=True, timeout=10)
            assert listed.returncode == 0
            assert mounts.refused("umount", mount.mountpoint)[0] == Exit.REFUSED
            time.sleep(1)
        assert any(line.get("event") == "reads wait for the store" for line in mount.log())
        proxy.remove(rule)
        outcome = reader.outcome()
        assert outcome.is_clean
        assert outcome.right_bytes == snapshot.pages.stat().st_size
        assert mount.complaints() == []


def test_a_store_that_hangs_at_the_mount_is_exit_code_6_within_its_time_out(
    mounts: Mounts, snapshot: "Snapshot", proxy: FaultProxy
) -> None:
    proxy.add(Rule(Hang(), times=None, reads_only=False))
    environment = {"STORAGE_EMULATOR_HOST": proxy.address}
    words = ("mount", "--store-timeout", "15s", snapshot.gs_url, mounts.mountpoint())
    began_s = time.monotonic()
    assert mounts.refused(*words, env=environment)[0] == Exit.UNREACHABLE
    # One request is given up after 10 s of silence; the last one may begin just before the time-out.
    assert time.monotonic() - began_s < 55


def test_a_mount_whose_process_is_stopped_is_unmounted_by_force(mounts: Mounts, snapshot: "Snapshot") -> None:
    with mounts.start(f"{snapshot.file_url}?rate=1MB/s") as mount:
        reader = mount.reader(snapshot.pages)
        mount.until_waiting(100)
        mount.signal(signal.SIGSTOP)
        result = mounts.run("umount", mount.mountpoint, limit_s=60)
        assert result.returncode == Exit.FAILED
        assert "--force" in result.stderr
        assert mounts.run("umount", mount.mountpoint, "--force", limit_s=60).returncode == 0
        assert not mount.is_mounted()
        outcome = reader.outcome()
        assert {name for _, name in outcome.errors} <= {"ECONNABORTED", "ENOTCONN"}
        assert outcome.errors
        assert outcome.wrong == outcome.short == []
        mount.signal(signal.SIGCONT)
        mount.wait()  # the process notices that its connection is gone


def test_a_mount_that_serves_many_loads_on_bad_days_grows_by_nothing(
    mounts: Mounts, snapshot: "Snapshot", proxy: FaultProxy
) -> None:
    """The cache holds a part of the image, so that each load goes to the store again; each meets some faults there."""
    loads = 40
    mounts.configure('memory_max_bytes = "32MiB"')
    environment = {"STORAGE_EMULATOR_HOST": proxy.address}
    seen: list[tuple[int, int, int]] = []
    with mounts.start(snapshot.gs_url, env=environment, prefetch="all", options=["--cache-max", "8MiB"]) as mount:
        for load in range(loads):
            actions = (Status(503), Status(429), Status(403), Cut(0), Cut(100_000), Cut(-1), Delay(0.2, at_byte=5000))
            proxy.add(Rule(actions[load % len(actions)], nth=load % 5, times=2))
            readers = [mount.reader(snapshot.pages) for _ in range(2)]
            assert all(reader.outcome().is_clean for reader in readers)
            proxy.clear()
            mount.until(lambda status: not status["handles"])
            process = Path(f"/proc/{mount.pid}")
            [line] = [line for line in (process / "status").read_text().splitlines() if line.startswith("RssAnon")]
            seen.append(
                (len(os.listdir(process / "fd")), len(os.listdir(process / "task")), int(line.split()[1]) << 10)
            )
        assert mount.complaints() == []
    early, late = seen[loads // 4 : loads // 2], seen[-loads // 4 :]
    for name, slack, first, last in zip(
        ("descriptors", "threads", "anonymous bytes"),
        (8, 8, 16 << 20),
        zip(*early, strict=True),
        zip(*late, strict=True),
        strict=True,
    ):
        assert max(last) <= max(first) + slack, (name, seen)
