"""Records of mounts: written while a mount lives, kept within bounds, shown by `streamd report`."""

import os
import socket
import subprocess
import sys
import xml.etree.ElementTree as ElementTree  # of what was written here
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio
from structlog.testing import capture_logs

from streamd.daemon.node_disk import newest_records
from streamd.daemon.records import CHECKPOINT_S, RecordKeeper, latest_record, read_record, write_record
from streamd.errors import Exit, NotFound
from streamd.serve.order import Want
from streamd.serve.record import RecordedFile, Recorder, RecordHead, Tier

if TYPE_CHECKING:
    from tests.cli.conftest import Streamd

RECORDING = Path(__file__).parents[1] / "serve" / "recordings" / "region.record"


def recorder(*, mountpoint: str = "/mnt/web-1", started_s: float = 1.7e9, pid: int = 42) -> Recorder:
    files = (RecordedFile("pages.img", 1 << 20, 0),)
    head = RecordHead("web-1", "ab" * 32, "file:///store/web-1", mountpoint, pid, started_s, 1 << 18, 1 << 19, files)
    return Recorder(head, origin_s=0.0)


def note(to: Recorder) -> None:
    to.read(0, Want.STREAM, Tier.STORE, start=0, size=4096, began_s=1.0, wait_s=0.5)


async def run_here(call: Callable[..., Any], *args: Any, abandon_on_cancel: bool, limiter: trio.CapacityLimiter) -> Any:
    """Make a blocking call in place: virtual time doesn't know of threads."""
    return call(*args)


async def hang(*_: object, **__: object) -> object:
    return await trio.sleep_forever()


async def test_a_mount_that_is_killed_loses_no_more_than_the_time_between_two_checkpoints(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    subject = recorder()
    keeper = RecordKeeper(subject, directory=tmp_path / "log" / "records", run_blocking=run_here)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keeper.run)
        note(subject)
        await trio.sleep(CHECKPOINT_S + 1)
        assert len(read_record(keeper.path).reads) == 1
        assert keeper.path.parent.stat().st_mode & 0o777 == 0o700
        assert keeper.path.stat().st_mode & 0o777 == 0o600
        note(subject)
        await trio.sleep(CHECKPOINT_S)
        assert len(read_record(keeper.path).reads) == 2
        nursery.cancel_scope.cancel()


async def test_a_load_that_ends_is_written_at_once_and_the_end_of_the_mount_too(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    subject = recorder()
    keeper = RecordKeeper(subject, directory=tmp_path, run_blocking=run_here)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keeper.run)
        note(subject)
        keeper.write_soon()
        await trio.sleep(0.001)
        assert len(read_record(keeper.path).reads) == 1
        note(subject)
        nursery.cancel_scope.cancel()
    assert len(read_record(keeper.path).reads) == 2
    assert [path.name for path in tmp_path.iterdir()] == [keeper.path.name]


async def test_nothing_is_written_while_nothing_happens(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    subject = recorder()
    keeper = RecordKeeper(subject, directory=tmp_path, run_blocking=run_here)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keeper.run)
        note(subject)
        await trio.sleep(CHECKPOINT_S + 1)
        keeper.path.unlink()
        await trio.sleep(10 * CHECKPOINT_S)
        nursery.cancel_scope.cancel()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("problem", ["hangs", "is full", "is another user's"])
async def test_a_disk_that_fails_costs_the_record_and_holds_nobody_up(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, problem: str
) -> None:
    blocked = tmp_path / "file"
    if problem == "is another user's":
        blocked.mkdir()
        os.chown(blocked, 65534, 65534)
    else:
        blocked.write_bytes(b"")
    subject = recorder()
    run_blocking = hang if problem == "hangs" else run_here
    with capture_logs() as logs:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(RecordKeeper(subject, directory=blocked / "no", run_blocking=run_blocking).run)
            for _ in range(5):
                note(subject)
                await trio.sleep(CHECKPOINT_S)
            began_s = trio.current_time()
            nursery.cancel_scope.cancel()
        assert trio.current_time() - began_s == 0
    assert [line["event"] for line in logs] == ["the record of this mount is not kept any more"]


def test_old_records_leave_by_number_and_by_size_and_never_the_newest(tmp_path: Path) -> None:
    def write(day: int, **bounds: int) -> list[str]:
        write_record(tmp_path / f"2026010{day}T000000Z-web-1-1.record", recorder().record(1.0), **bounds)
        return [path.name[7:8] for path in sorted(tmp_path.glob("*.record"))]

    (tmp_path / "foreign.txt").write_text("stays")
    assert [write(day, kept_files=3) for day in range(5)][-1] == ["2", "3", "4"]
    size = (tmp_path / "20260104T000000Z-web-1-1.record").stat().st_size
    assert write(5, kept_bytes=3 * size) == ["3", "4", "5"]
    assert write(6, kept_bytes=2 * size - 1) == ["6"]
    assert write(7, kept_bytes=0) == ["7"]
    assert (tmp_path / "foreign.txt").exists()


async def test_the_newest_record_of_a_mountpoint_is_found(tmp_path: Path) -> None:
    for mountpoint, started_s in (("/mnt/a", 1e9), ("/mnt/b", 1.1e9), ("/mnt/a", 1.2e9), ("/mnt/b", 1.3e9)):
        made = recorder(mountpoint=mountpoint, started_s=started_s)
        write_record(RecordKeeper(made, directory=tmp_path).path, made.record(1.0))
    (tmp_path / "29990101T000000Z-torn-1.record").write_bytes(b"half")
    assert read_record(latest_record(tmp_path, "/mnt/a")).head.started_s == 1.2e9
    assert latest_record(tmp_path).name.startswith("2999")
    with pytest.raises(NotFound):
        latest_record(tmp_path, "/mnt/c")
    with pytest.raises(NotFound):
        latest_record(tmp_path / "nowhere")


@pytest.mark.parametrize("kind", ["fifo", "link", "directory", "socket"])
def test_what_is_put_among_the_records_is_no_record_and_holds_nobody_up(
    kind: str, streamd: "Streamd", monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = streamd.base / "log" / "records"
    written = directory / "20260101T000000Z-web-1-1.record"
    write_record(written, recorder().record(1.0))
    secret = streamd.base / "secret"
    secret.write_bytes(b"root:*:2" * 100)
    monkeypatch.chdir(directory)  # a socket's path must be short
    for name in ("29990101T000000Z-web-1-1.record", "19990101T000000Z-web-1-1.record", f"{written.name}.partial"):
        match kind:
            case "fifo":
                os.mkfifo(name)
            case "link":
                os.symlink(secret, name)
            case "directory":
                os.mkdir(name)
            case "socket":
                with socket.socket(socket.AF_UNIX) as made:
                    made.bind(name)
    assert streamd.ok("report")["record"] == str(written)
    told = streamd.refused("report", directory / "29990101T000000Z-web-1-1.record")
    assert told["kind"] == "refused"
    assert "root:" not in str(told)
    write_record(directory / "20260102T000000Z-web-1-1.record", recorder().record(1.0), kept_files=1)
    assert [record.name for record in newest_records(directory, 9)] == ["20260102T000000Z-web-1-1.record"]
    with pytest.raises(OSError, match="not a regular file"):
        write_record(written, recorder().record(1.0))
    assert secret.read_bytes() == b"root:*:2" * 100


def test_a_record_is_told_in_text_in_numbers_and_in_pictures(streamd: "Streamd", tmp_path: Path) -> None:
    page, picture = tmp_path / "page.html", tmp_path / "picture.svg"
    told = streamd.run("report", RECORDING, "--html", page, "--svg", picture)
    assert told.returncode == 0, told.stderr
    assert "loaded 518.0 MiB in 11.84 s" in told.stdout
    assert "fault" in told.stdout
    ElementTree.fromstring(picture.read_text())
    assert picture.read_text().strip() in page.read_text()
    numbers = streamd.ok("report", RECORDING)
    assert numbers["loading"]["asked_bytes"] == 543113216
    assert sum(reads["bytes"] for reads in numbers["reads"].values()) == 543113216
    assert 0 < numbers["release_gap_p50_s"] < numbers["release_gap_p99_s"] < 1


def test_what_is_no_record_is_refused_with_the_right_exit_code(streamd: "Streamd", tmp_path: Path) -> None:
    junk = tmp_path / "junk.record"
    junk.write_bytes(b"junk" * 100)
    told = streamd.refused("report", junk)
    assert told["kind"] == "damaged"
    assert "junk" not in str(told).replace("junk.record", "")  # it may be a file that whoever asks mustn't read
    assert streamd.refused("report", tmp_path / "none.record")["kind"] == "not-found"
    assert streamd.refused("report")["kind"] == "not-found"
    assert streamd.refused("report", tmp_path)["kind"] == "not-found"
    assert streamd.run("report", RECORDING, "--svg", tmp_path / "no" / "x.svg").returncode == 2


def test_a_mount_leaves_a_record_of_who_read_what(streamd: "Streamd", snapshot: str) -> None:
    mountpoint = streamd.base / "mnt"
    mountpoint.mkdir()
    streamd.ok("mount", snapshot, mountpoint)
    size = len((mountpoint / "pages.img").read_bytes())
    streamd.ok("umount", mountpoint)
    told = streamd.ok("report", mountpoint)
    assert told["record"].startswith(str(streamd.base / "log" / "records"))
    assert told["loading"]["asked_bytes"] == size
    assert told["loading"]["is_over"]
    assert sum(gets["origin_bytes"] for gets in told["gets"].values()) == told["stored_bytes"]
    assert told["released_chunks"] > 0
    assert streamd.ok("report")["record"] == told["record"]


def test_records_that_may_not_be_looked_at_are_not_called_missing(tmp_path: Path) -> None:
    directory = tmp_path / "records"
    directory.mkdir()
    script = (
        "import os, sys, pathlib; from streamd.daemon.records import latest_record; from streamd.errors import *\n"
        f"fd = os.open({str(tmp_path)!r}, os.O_RDONLY); os.fchmod(fd, 0o711); os.chmod({str(directory)!r}, 0o700)\n"
        "os.fchdir(fd); os.setuid(65534)\n"
        "try: latest_record(pathlib.Path('records'))\n"
        "except StreamdError as error: sys.exit(int(error.exit_code))\n"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == Exit.NOT_PERMITTED
