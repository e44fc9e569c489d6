"""A mount from its command to its end, in the background and in the foreground, with real processes."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from streamd.daemon.background import ReadyPipe, log_path, start
from streamd.errors import Exit, StreamdError
from streamd.fuse import mountinfo

if TYPE_CHECKING:
    from tests.cli.conftest import Streamd

LIMIT_S = 120.0


def until(condition: Callable[[], bool]) -> None:
    """Wait for what another process does; a hang is a failure."""
    end_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.fixture
def mountpoint(streamd: "Streamd") -> Path:
    directory = streamd.base / "mnt"
    directory.mkdir()
    return directory


def test_mount_returns_when_it_serves_and_umount_when_it_is_gone(
    streamd: "Streamd", snapshot: str, image: Path, mountpoint: Path
) -> None:
    mounted = streamd.ok("mount", snapshot, mountpoint)
    assert mounted["mountpoint"] == str(mountpoint)
    assert {file.name: file.read_bytes() for file in mountpoint.iterdir()} == {
        file.name: file.read_bytes() for file in image.iterdir()
    }
    log = Path(mounted["log"])
    assert log.stat().st_mode & 0o777 == 0o600
    assert "serving" in [json.loads(line)["event"] for line in log.read_text().splitlines()]

    [status] = streamd.ok("status")["mounts"]
    assert (status["mountpoint"], status["pid"]) == (str(mountpoint), mounted["pid"])
    assert streamd.ok("status", mountpoint)["snapshot"] == "web-1"
    assert str(mountpoint) in streamd.run("status").stdout
    assert "image_bytes" in streamd.run("status", mountpoint).stdout
    [cached] = streamd.ok("cache", "ls")["images"]
    assert str(mounted["pid"]) in cached["owner"]
    assert streamd.refused("cache", "clear", "--image", cached["key"])["exit_code"] == Exit.REFUSED

    assert streamd.ok("umount", mountpoint) == {"mountpoint": str(mountpoint), "how": "asked"}
    # No waiting: the mount, the process and its hold on the cache are gone already.
    assert mountinfo.topmost(str(mountpoint)) is None
    assert not is_running(mounted["pid"])
    assert streamd.ok("status")["mounts"] == []
    assert streamd.ok("cache", "verify")["images"][0]["bad_chunks"] == []
    assert [image["key"] for image in streamd.ok("cache", "clear")["removed"]] == [cached["key"]]
    assert streamd.ok("cache", "ls")["images"] == []


def test_umount_names_who_has_a_file_open_and_force_does_not_ask(
    streamd: "Streamd", snapshot: str, mountpoint: Path
) -> None:
    streamd.ok("mount", snapshot, mountpoint)
    with closing(os.fdopen(os.open(mountpoint / "pages.img", os.O_RDONLY), "rb")):
        error = streamd.refused("umount", mountpoint)
        assert (error["exit_code"], error["openers"][0]["pid"]) == (Exit.REFUSED, os.getpid())
        assert error["openers"][0]["file"] == "pages.img"
        handle = error["openers"][0]["handle"]
        assert streamd.refused("fail", mountpoint, "--handle", str(handle + 512))["exit_code"] == Exit.NOT_FOUND
        assert streamd.ok("fail", mountpoint, "--handle", str(handle))["failed_handles"] == 1
        streamd.ok("umount", "--force", mountpoint)
    assert mountinfo.topmost(str(mountpoint)) is None


def test_a_mount_whose_process_was_killed_is_seen_taken_away_and_made_again(
    streamd: "Streamd", snapshot: str, mountpoint: Path
) -> None:
    def kill(pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        until(lambda: not is_running(pid))

    kill(streamd.ok("mount", snapshot, mountpoint)["pid"])
    status = streamd.ok("status")
    assert status["mounts"] == []
    assert str(mountpoint) in status["dead_mountpoints"]
    dead = f"{mountpoint}: its process is dead (streamd umount {mountpoint})"
    assert dead in streamd.run("status").stdout
    for command in ("status", "fail"):
        error = streamd.refused(command, mountpoint)
        assert (error["exit_code"], error["message"]) == (Exit.NOT_FOUND, dead)
    kill(streamd.ok("mount", snapshot, mountpoint)["pid"])  # with no manual step
    assert streamd.ok("umount", mountpoint)["how"] == "stale"
    assert mountinfo.topmost(str(mountpoint)) is None


def test_a_second_mount_on_the_mountpoint_or_the_cache_is_refused(
    streamd: "Streamd", snapshot: str, mountpoint: Path
) -> None:
    streamd.ok("mount", snapshot, mountpoint)
    assert "in use" in streamd.refused("mount", snapshot, mountpoint)["message"]
    (streamd.base / "other").mkdir()
    error = streamd.refused("mount", snapshot, streamd.base / "other")
    assert error["exit_code"] == Exit.REFUSED
    assert str(mountpoint) in error["message"]
    streamd.ok("mount", snapshot, streamd.base / "other", "--no-cache")
    assert len(streamd.ok("status")["mounts"]) == 2


def test_a_stopped_process_does_not_hang_the_commands_and_force_unmounts_without_it(
    streamd: "Streamd", snapshot: str, mountpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from streamd.daemon import control_client, unmounting

    pid = streamd.ok("mount", snapshot, mountpoint)["pid"]
    monkeypatch.setattr(control_client, "UMOUNT_WAIT_S", 0.2)
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(control_client.NoAnswer, match="--force unmounts without it"):
            unmounting.unmount(str(mountpoint), run_directory=streamd.base / "run", force=False)
        assert mountinfo.topmost(str(mountpoint)) is not None
        unmounting.unmount(str(mountpoint), run_directory=streamd.base / "run", force=True)
        assert mountinfo.topmost(str(mountpoint)) is None
    finally:
        os.kill(pid, signal.SIGCONT)
    until(lambda: not is_running(pid))


def test_a_directory_that_is_held_without_a_file_does_not_keep_a_mount(
    streamd: "Streamd", snapshot: str, mountpoint: Path
) -> None:
    mounted = streamd.ok("mount", snapshot, mountpoint)
    held = os.open(mountpoint, os.O_PATH)
    try:
        assert streamd.ok("umount", mountpoint)["how"] == "asked"
    finally:
        os.close(held)
    assert mountinfo.topmost(str(mountpoint)) is None
    assert not is_running(mounted["pid"])


def test_a_mountpoint_that_is_replaced_while_the_mount_starts_is_not_followed(
    streamd: "Streamd", snapshot: str, mountpoint: Path
) -> None:
    # So slow a store that the directory is replaced after it was checked, and before the mount is made.
    command = streamd.arguments("mount", f"{snapshot}?latency=500ms", mountpoint, "--no-cache")
    (streamd.base / "victim").mkdir()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        sockets = streamd.base / "run" / "mounts"
        until(lambda: sockets.is_dir() and any(sockets.glob("*.sock")))
        mountpoint.rmdir()
        mountpoint.symlink_to("victim")
        _, stderr = process.communicate(timeout=LIMIT_S)
    assert process.returncode == Exit.FAILED
    assert stderr == f"error: mounting on {mountpoint} failed: No such file or directory\n"
    assert mountinfo.topmost(str(streamd.base / "victim")) is None


@pytest.mark.parametrize("foreground", [False, True], ids=["background", "foreground"])
def test_a_mount_without_the_cache_that_it_was_to_have_says_so(
    streamd: "Streamd", snapshot: str, mountpoint: Path, foreground: bool
) -> None:
    command = streamd.arguments("mount", snapshot, mountpoint, "--cache-dir", "/etc/passwd")
    # Not waited for in the foreground, and in the background the mount has none of these pipes.
    command += ["--foreground", "--json"] * foreground
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        if foreground:
            assert process.stdout is not None
            process.stdout.readline()
            process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=LIMIT_S)
    [warning] = [line for line in stderr.splitlines() if line.startswith("warning: ")]
    assert "the mount serves from memory: cache directory /etc/passwd" in warning
    assert process.returncode == Exit.DONE


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_mount_in_the_foreground_ends_on_a_signal(
    streamd: "Streamd", snapshot: str, mountpoint: Path, number: signal.Signals
) -> None:
    command = streamd.arguments("mount", snapshot, mountpoint, "--foreground", "--json")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["pid"] == process.pid
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=LIMIT_S)
    assert stdout == ""
    assert "Traceback" not in stderr
    assert mountinfo.topmost(str(mountpoint)) is None


def test_an_interrupted_mount_command_takes_its_process_with_it(
    streamd: "Streamd", snapshot: str, mountpoint: Path
) -> None:
    # So slow a store that the mount can't serve before the signal comes.
    command = streamd.arguments("mount", f"{snapshot}?latency=60s", mountpoint, "--no-cache")
    log = log_path(streamd.base / "log", str(mountpoint))
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        sockets = streamd.base / "run" / "mounts"
        until(lambda: sockets.is_dir() and any(sockets.glob("*.sock")))
        [child] = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=LIMIT_S)
    assert process.returncode == Exit.INTERRUPTED
    assert not is_running(child)
    assert mountinfo.topmost(str(mountpoint)) is None
    assert log.exists()


def forked(log: Path, act: Callable[[ReadyPipe], None], *, wait_s: float = LIMIT_S) -> None:
    """Go to the background, there to do `act`; here to wait for it."""
    started = start(log=log, wait_s=wait_s)
    if isinstance(started, ReadyPipe):
        try:
            act(started)
        finally:
            os._exit(2)


def test_a_process_that_ends_without_a_word_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text("of a former life\n")
    with pytest.raises(StreamdError, match=r"ended with exit code 2 before it served(.|\n)*no more") as dead:
        forked(log, lambda _: print("no more", file=sys.__stderr__, flush=True))
    assert "former life" not in str(dead.value)


def test_a_process_that_is_killed_is_reported(tmp_path: Path) -> None:
    with pytest.raises(StreamdError, match="was killed by signal 9 before it served"):
        forked(tmp_path / "x.log", lambda _: os.kill(os.getpid(), signal.SIGKILL))


def test_a_process_that_does_not_serve_in_time_is_ended(tmp_path: Path) -> None:
    def never_serve(_: ReadyPipe) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pause()

    before = children()
    with pytest.raises(StreamdError, match=r"did not serve within 0\.1 s"):
        forked(tmp_path / "x.log", never_serve, wait_s=0.1)
    assert children() == before


def children() -> list[str]:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


def test_the_process_keeps_nothing_open_that_the_command_was_given(
    streamd: "Streamd", snapshot: str, mountpoint: Path
) -> None:
    ours, theirs = os.pipe()
    subprocess.run(
        streamd.arguments("mount", snapshot, mountpoint),
        pass_fds=[theirs],
        check=True,
        capture_output=True,
        timeout=LIMIT_S,
    )
    os.close(theirs)
    with open(ours, "rb") as pipe:
        assert pipe.read() == b""  # its end: nobody else could write to it


def test_the_processs_own_error_is_the_commands_error(streamd: "Streamd", mountpoint: Path, snapshot: str) -> None:
    process = streamd.run("mount", snapshot.replace("web-1", "web-9"), mountpoint)
    assert process.returncode == Exit.NOT_FOUND
    assert "no snapshot web-9" in process.stderr


@pytest.mark.parametrize(
    ("one", "other"),
    [("/a/b", "/a-b"), ("/a b", "/a/b"), ("/ä", "/ö"), ("/" + "x" * 200, "/" + "x" * 201), ("/", "/.")],
)
def test_logs_of_different_mountpoints_are_different_files_of_one_directory(one: str, other: str) -> None:
    logs = {log_path(Path("/log"), mountpoint) for mountpoint in (one, other)}
    assert len(logs) == 2
    for log in logs:
        assert log.parent == Path("/log")
        assert len(log.name) < 128
        assert log.name.isascii()
