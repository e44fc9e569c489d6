"""How mounts end: asked, by signals, killed, forced, with reads that wait; and that nothing of them stays."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from bench.fault_proxy import FaultProxy, Hang, Rule
from bench.mount_users import GONE
from bench.mounts import LIMIT_S, LiveMount, Mounts
from bench.slot_reader import SLOTS
from streamd.errors import Exit
from streamd.fuse import mountinfo

if TYPE_CHECKING:
    from tests.fuse.conftest import Saved

# What the kernel gives a read whose mount goes away under it: our EIO, or the connection's end.
AT_ONCE_S = 10


def let_it_hang(proxy: FaultProxy) -> None:
    """Let every read of an object hang from now on: once the small files are there, those of pages.img."""
    proxy.add(Rule(Hang(), times=None))


def test_an_unmount_with_128_reads_waiting_is_refused_and_names_who_waits(
    mounts: Mounts, uploaded: "Saved", proxy: FaultProxy, through: dict[str, str]
) -> None:
    with mounts.start(uploaded.url, env=through, options=["--no-cache"]) as mount:
        let_it_hang(proxy)
        reader = mount.reader(uploaded.pages)
        mount.until_waiting(SLOTS)
        for _ in range(2):
            code, message = mounts.refused("umount", mount.mountpoint)
            assert code == Exit.REFUSED
            assert f"(pid {reader.pid}) has pages.img open" in message
            assert "--force" in message
        assert sum(handle["waiting"] for handle in mount.status()["handles"]) == SLOTS
        proxy.clear()
        assert uploaded.is_whole(reader.outcome())
        # Released: now it goes, and the process with it.
        assert mounts.run("umount", mount.mountpoint).returncode == 0
        assert mount.process.poll() == 0
        assert not mount.is_mounted()


def test_a_forced_unmount_ends_128_waiting_reads_with_eio_and_the_process(
    mounts: Mounts, uploaded: "Saved", proxy: FaultProxy, through: dict[str, str], calm: Callable[[LiveMount], None]
) -> None:
    with mounts.start(uploaded.url, env=through, options=["--no-cache"]) as mount:
        let_it_hang(proxy)
        reader = mount.reader(uploaded.pages)
        mount.until_waiting(SLOTS)
        result = mounts.run("umount", mount.mountpoint, "--force")
        assert result.returncode == 0, result.stderr
        assert mount.process.poll() == 0
        assert not mount.is_mounted()
        outcome = reader.outcome()
        assert len(outcome.errors) == SLOTS  # each of them stops at its first
        assert {name for _, name in outcome.errors} == {"EIO"}
        assert outcome.wrong == outcome.short == []
        calm(mount)


@pytest.mark.parametrize("times", [1, 2], ids=["one", "two"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
def test_signals_end_a_mount_within_a_bound_while_the_store_hangs(
    mounts: Mounts,
    uploaded: "Saved",
    proxy: FaultProxy,
    through: dict[str, str],
    calm: Callable[[LiveMount], None],
    number: signal.Signals,
    times: int,
) -> None:
    """One signal waits for open files, here half a second; a second one doesn't: here the first would wait an hour."""
    mounts.configure(umount_wait="500ms" if times == 1 else "1h")
    with mounts.start(uploaded.url, env=through, options=["--no-cache"]) as mount:
        let_it_hang(proxy)
        reader = mount.reader(uploaded.pages)
        mount.until_waiting(SLOTS)
        mount.signal(number)
        if times == 2:
            mount.until(lambda _: any(line.get("event") == "ending on a signal" for line in mount.log()))
            assert mount.is_mounted()
            mount.signal(number)
        code = mount.wait()
        assert code == (0 if number == signal.SIGTERM else Exit.INTERRUPTED)
        assert not mount.is_mounted()
        outcome = reader.outcome()
        assert len(outcome.errors) == SLOTS
        assert {name for _, name in outcome.errors} == {"EIO"}
        calm(mount)


def test_the_first_sigterm_lets_readers_finish(
    mounts: Mounts, uploaded: "Saved", proxy: FaultProxy, through: dict[str, str]
) -> None:
    mounts.configure(umount_wait="1h")
    with mounts.start(uploaded.url, env=through, options=["--no-cache"]) as mount:
        let_it_hang(proxy)
        reader = mount.reader(uploaded.pages)
        mount.until_waiting(SLOTS)
        mount.signal(signal.SIGTERM)
        mount.until(lambda _: any(line.get("event") == "ending on a signal" for line in mount.log()))
        proxy.clear()
        assert uploaded.is_whole(reader.outcome())
        assert mount.wait() == 0
        assert not mount.is_mounted()


def test_a_sigterm_in_the_moment_of_readiness_unmounts(mounts: Mounts, saved: "Saved") -> None:
    for _ in range(3):
        with mounts.start(saved.url) as mount:
            mount.signal(signal.SIGTERM)
            assert mount.wait() == 0
            assert not mount.is_mounted()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
def test_a_signal_before_the_mount_serves_ends_it_and_leaves_nothing_in_the_way(
    mounts: Mounts,
    uploaded: "Saved",
    proxy: FaultProxy,
    through: dict[str, str],
    number: signal.Signals,
) -> None:
    rule = proxy.add(Rule(Hang(), name="*/packs/*", times=None))
    mountpoint = mounts.mountpoint()
    with mounts.start(uploaded.url, env=through, mountpoint=mountpoint, is_ready=False) as mount:
        until(lambda: proxy.hanging)
        mount.process.send_signal(number)
        assert mount.wait() != 0
        assert not mount.is_mounted()
    proxy.remove(rule)
    with mounts.start(uploaded.url, env=through, mountpoint=mountpoint) as mount:
        assert uploaded.is_whole(mount.reader(uploaded.pages).outcome())


def until(condition: Callable[[], object]) -> None:
    """Wait for a condition that no mount can tell. Raises: `TimeoutError`."""
    until_s = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > until_s:
            raise TimeoutError
        time.sleep(0.01)


# kill -9


def test_after_kill_9_the_next_mount_cleans_up_and_fetches_nothing_again(
    mounts: Mounts, saved: "Saved", calm: Callable[[LiveMount], None]
) -> None:
    mountpoint = mounts.mountpoint()
    with mounts.start(saved.url, prefetch="all", mountpoint=mountpoint) as mount:
        chunks = mount.ready["chunks"] - mount.ready["zero_chunks"]
        mount.until(lambda status: status["cached_chunks"] == chunks)
        mount.signal(signal.SIGKILL)
        mount.wait()
        listed = subprocess.run(["ls", mountpoint], capture_output=True, text=True, timeout=AT_ONCE_S)
        assert "not connected" in listed.stderr
        shown = json.loads(mounts.run("status", "--json").stdout)
        assert shown == {"mounts": [], "dead_mountpoints": [str(mountpoint)], "daemon": None}
        with mounts.start(saved.url, mountpoint=mountpoint) as again:
            assert [e.mountpoint for e in mountinfo.read()].count(str(mountpoint)) == 1
            assert saved.is_whole(again.reader(saved.pages).outcome())
            status = again.status()
            assert (status["origin_bytes"], status["cache_verified_chunks"]) == (0, chunks)
            calm(again)


def test_kill_9_in_the_middle_of_a_load_costs_only_what_was_not_there_yet(
    mounts: Mounts, saved: "Saved", calm: Callable[[LiveMount], None]
) -> None:
    mountpoint = mounts.mountpoint()
    with mounts.start(f"{saved.url}?rate=20MB/s", mountpoint=mountpoint) as mount:
        reader = mount.reader(saved.pages)
        seen = mount.until(lambda status: status["cached_chunks"] >= 60)["cached_chunks"]
        mount.signal(signal.SIGKILL)
        outcome = reader.outcome()
        assert {name for _, name in outcome.errors} <= GONE
        assert outcome.wrong == outcome.short == []
    with mounts.start(saved.url, mountpoint=mountpoint) as again:
        kept = again.ready["cached_chunks"]
        assert kept >= seen
        assert saved.is_whole(again.reader(saved.pages).outcome())
        status = again.status()
        assert status["cache_corrupt_chunks"] == 0
        small = saved.pinned().manifest.files[-1].first_chunk
        assert kept + status["fetched_chunks"] == status["chunks"] - status["zero_chunks"], small
        calm(again)


def test_a_dead_mount_is_taken_away_by_umount(mounts: Mounts, saved: "Saved") -> None:
    with mounts.start(saved.url) as mount:
        mount.signal(signal.SIGKILL)
        mount.wait()
        result = mounts.run("umount", mount.mountpoint, "--json")
        assert result.returncode == 0
        assert json.loads(result.stdout)["how"] == "stale"
        assert not mount.is_mounted()
        assert mounts.refused("umount", mount.mountpoint)[0] == Exit.NOT_FOUND


def test_closing_a_file_does_not_wait_for_a_server_that_is_stopped(mounts: Mounts, saved: "Saved") -> None:
    program = (
        "import os, sys\n"
        "path = sys.argv[1]\n"
        "os.close(os.open(path, os.O_RDONLY))\n"  # the one flush that the kernel asks for in a mount's life
        "fd = os.open(path, os.O_RDONLY)\n"
        "print('open', flush=True)\n"
        "sys.stdin.readline()\n"
        "os.close(fd)\n"
        "print('closed', flush=True)\n"
    )
    with mounts.start(saved.url) as mount:
        process = subprocess.Popen(
            [sys.executable, "-c", program, mount.pages], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            assert process.stdout
            assert process.stdin
            assert process.stdout.readline() == "open\n"
            mount.signal(signal.SIGSTOP)
            out, _ = process.communicate("\n", timeout=AT_ONCE_S)
            assert out == "closed\n"
        finally:
            mount.signal(signal.SIGCONT)
            process.kill()
            process.wait(LIMIT_S)


# Who may mount what, where


def test_a_second_mount_of_a_snapshot_on_one_cache_is_refused_and_told_where_the_first_is(
    mounts: Mounts, saved: "Saved"
) -> None:
    with mounts.start(saved.url) as first:
        second = mounts.mountpoint()
        code, message = mounts.refused("mount", "--foreground", saved.url, second)
        assert code == Exit.REFUSED
        assert str(first.mountpoint) in message
        assert mountinfo.topmost(str(second)) is None
        # With a cache of its own it may.
        with mounts.start(saved.url, options=["--cache-dir", mounts.base / "other"]) as other:
            assert saved.is_whole(other.reader(saved.pages).outcome())
        # Nor is a mountpoint taken twice.
        code, message = mounts.refused("mount", "--foreground", "--no-cache", saved.url, first.mountpoint)
        assert code == Exit.REFUSED
        assert "in use" in message
        assert saved.is_whole(first.reader(saved.pages).outcome())


MOUNTPOINTS: dict[str, tuple[Callable[[Path], object], Exit, str]] = {
    "mountpoint missing": (lambda path: None, Exit.NOT_FOUND, "does not exist"),
    "mountpoint a file": (lambda path: path.touch(), Exit.USAGE, "not a directory"),
    "mountpoint not empty": (lambda path: (path / "x").mkdir(parents=True), Exit.REFUSED, "not empty"),
    "mountpoint a link to nothing": (lambda path: path.symlink_to("nowhere"), Exit.NOT_FOUND, "does not exist"),
}


@pytest.mark.parametrize("name", MOUNTPOINTS)
def test_bad_mountpoints_are_refused(mounts: Mounts, saved: "Saved", name: str) -> None:
    prepare, exit_code, text = MOUNTPOINTS[name]
    path = mounts.base / "place"
    prepare(path)
    code, message = mounts.refused("mount", "--foreground", saved.url, path)
    assert (code, text in message) == (exit_code, True), message


def test_mounting_without_root_is_refused(saved: "Saved", tmp_path: Path) -> None:
    program = (
        "import os, sys\n"
        "from streamd import cli\n"
        "import streamd.commands.mount, streamd.daemon.control_client, streamd.fuse.mounting, streamd.store.opening\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "sys.argv = ['streamd', 'mount', '--foreground', '--json', *sys.argv[1:]]\n"
        "cli.main()\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, saved.url, "/mnt"], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert result.returncode == Exit.NOT_PERMITTED, result.stderr
    assert "root" in json.loads(result.stdout)["error"]["message"]


# What stays


def _facts(pid: int) -> dict[str, Any]:
    return {
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": len(os.listdir(f"/proc/{pid}/task")),
    }


def test_opening_reading_and_closing_leaves_no_descriptor_and_no_thread(mounts: Mounts, saved: "Saved") -> None:
    with mounts.start(saved.url, prefetch="all") as mount:
        assert saved.is_whole(mount.reader(saved.pages).outcome())
        mount.until(lambda status: not status["handles"])
        before = _facts(mount.pid)
        for _ in range(10):
            assert saved.is_whole(mount.reader(saved.pages).outcome())
        mount.until(lambda status: not status["handles"])
        after = _facts(mount.pid)
        assert after["descriptors"] <= before["descriptors"] + 1  # the control socket's, while it asks
        assert after["threads"] <= before["threads"] + 2  # Trio keeps idle threads for 10 s


def test_a_mount_whose_socket_is_gone_can_be_taken_away(mounts: Mounts, saved: "Saved") -> None:
    with mounts.start(saved.url) as mount:
        mount.client.path.unlink()
        result = mounts.run("umount", mount.mountpoint, "--json")
        assert result.returncode == 0, result.stdout
        assert json.loads(result.stdout)["how"] == "unasked"
        assert not mount.is_mounted()
        mount.wait()


def test_a_process_that_is_stopped_does_not_outlive_a_forced_unmount(mounts: Mounts, saved: "Saved") -> None:
    with mounts.start(saved.url) as mount:
        mount.signal(signal.SIGSTOP)
        result = mounts.run("umount", mount.mountpoint, "--force", "--json")
        assert result.returncode == 0, result.stdout
        assert mount.wait() == -signal.SIGKILL
        # And so neither its mountpoint nor its cache is taken.
        with mounts.start(saved.url, mountpoint=mount.mountpoint) as again:
            assert again.status()["cached_chunks"] >= 0


def test_a_mount_that_somebody_detached_can_still_be_ended(mounts: Mounts, saved: "Saved") -> None:
    with mounts.start(f"{saved.url}?rate=1MB/s") as mount:
        reader = mount.reader(saved.pages)
        mount.until_waiting(1)
        assert subprocess.run(["umount", "-l", mount.mountpoint], check=False).returncode == 0
        assert mounts.run("umount", "--force", mount.mountpoint).returncode == 0
        mount.wait()
        assert reader.outcome().errors
