"""Clocks that jump and machines that stand still end no image: nothing that counts goes by the time of day.

A machine's time of day can't be set for one process, so a library does it that is loaded first (`wall_clock.c`). A
supervisor whose other clocks begin anew is tests/systemd/test_restart_under_load.py's.
"""

import signal
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bench.daemons import Daemon
from streamd.daemon import life

if TYPE_CHECKING:
    from tests.daemon.conftest import Saved

Calm = Callable[[Daemon], None]

_SOURCE = Path(__file__).with_name("wall_clock.c")
_YEAR_S = 365 * 86400
_SLOW_MB_PER_S = 8


class WallClock:
    """The time of day of processes that are started with `env`."""

    def __init__(self, place: Path) -> None:
        library = place / "wall_clock.so"
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, _SOURCE, "-ldl"], check=True)
        self._path = place / "ahead"
        self.set_ahead(0)
        self.env = {"LD_PRELOAD": str(library), "STREAMD_TEST_CLOCK": str(self._path)}

    def set_ahead(self, seconds: int) -> None:
        """Let it be so many seconds more than it is."""
        with self._path.open("r+b" if self._path.exists() else "wb") as file:
            file.write(struct.pack("q", seconds))


@pytest.fixture
def clock(tmp_path: Path) -> WallClock:
    """Compile it."""
    return WallClock(tmp_path)


@pytest.fixture
def clocked(clock: WallClock) -> Iterator[Daemon]:
    """Start a daemon by that clock."""
    with Daemon(env=clock.env) as running:
        yield running


def test_a_time_of_day_that_jumps_ends_nothing(
    clocked: Daemon, clock: WallClock, saved: "Saved", sixteen: list["Saved"], calm: Calm
) -> None:
    others = [clocked.image(sixteen[0].url)]
    image = clocked.image(saved.slow(_SLOW_MB_PER_S))
    pid = image.worker_pid()
    with clocked.client.lease(image.id, owner="pod/a", purpose="restore") as lease:
        reader = image.reader(saved.pages)
        image.until_open(reader)
        for years in (20, -20):
            clock.set_ahead(years * _YEAR_S)
            others.append(clocked.image(sixteen[len(others)].url))
            ahead_s = others[-1].state()["created_s"] - time.time()
            assert abs(ahead_s - years * _YEAR_S) < 3600, "the clock has jumped"
        assert not reader.is_done()
        assert image.worker_pid() == pid
        clock.set_ahead(0)
        image.until_replaced(image.kill_worker())
        assert saved.is_whole(reader.outcome())
        assert lease.is_held()
    for other, right in zip(others, sixteen, strict=False):
        assert other.state()["state"] == "serving"
        assert right.is_whole(other.reader(right.pages, slots=8).outcome())
    assert [event["image"] for event in clocked.tape.of("worker-lost")] == [image.id]
    assert clocked.tape.of("image-gone") == clocked.tape.of("image-failed") == []
    calm(clocked)


def test_who_stood_still_with_its_workers_takes_none_of_them_for_one_that_hangs(
    daemon: Daemon, saved: "Saved", calm: Calm
) -> None:
    """As a machine that is suspended, or a virtual one that is moved."""
    image = daemon.image(saved.slow(_SLOW_MB_PER_S))
    reader = image.reader(saved.pages)
    image.until_open(reader)
    pid = image.kill_worker(signal.SIGSTOP)
    daemon.send(daemon.pid, signal.SIGSTOP)
    time.sleep(life.HANG_S + 2.0)  # this is how long they stand still
    daemon.send(daemon.pid, signal.SIGCONT)
    assert daemon.client.health()["pid"] == daemon.pid  # it has seen by now how late it is
    daemon.send(pid, signal.SIGCONT)
    assert saved.is_whole(reader.outcome())
    assert daemon.tape.of("worker-lost") == []
    assert image.worker_pid() == pid
    calm(daemon)
