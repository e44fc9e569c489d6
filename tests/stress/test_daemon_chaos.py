"""Chaos on a node: workers, spawner, supervisor and store fail at random under three real sandboxes that restore.

Three sandboxes live one life after another (`sandbox_lives.py`), while a schedule that follows from a seed kills, stops
and restarts the daemon's processes, makes the store fail on the wire, asks for other images and takes them away, and
clears and verifies the cache. Systemd's part, keeping descriptors, is a stand-in's (`bench/service_manager.py`). All of
it stays within what the policy puts up with: so no sandbox may be lost, every byte of memory is right, and nothing
grows. At the end there is nothing left but a supervisor and its spawner.

Minutes: STREAMD_DAEMON_CHAOS_S (seconds), else sixty with STREAMD_STRESS=full, five where CI is set, else one and a
half. The seed is in the output, and STREAMD_DAEMON_CHAOS_SEED repeats the schedule, as far as processes let it.
"""

import contextlib
import os
import random
import signal
import sys
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bench.daemons import Daemon
from bench.emulator import Emulator
from bench.event_tape import until
from bench.fault_proxy import FaultProxy
from bench.pods import Shape, checkpoint, runsc_below
from bench.server import Heap
from streamd.fuse import mountinfo
from streamd.save.push import PushOptions, push
from streamd.store.gcs import GoogleStore
from streamd.store.shaped import Link
from tests.stress.misfortune import BYTES_PER_S, CHURNS, MEMORY_BYTES, MIB, Churn, Schedule
from tests.stress.process_facts import Facts
from tests.stress.sandbox_lives import LIMIT_S, Lives, Saved, Tally

_HEAPS_MIB = (64, 96, 128)
_SANDBOXES = 3
# All images together have twice as much: loads go to the store again, and take seconds.
_CACHE_BYTES = 144 * MIB
# So short that images go and come; longer than a holder needs to take its lease again.
_GRACE = "5s"
_LOG_LINES = 2000


@pytest.fixture
def seed() -> int:
    """Choose a seed, or take the one that is to be repeated."""
    return int(os.environ.get("STREAMD_DAEMON_CHAOS_SEED") or random.SystemRandom().randrange(1 << 32))


@pytest.fixture
def duration_s(is_full: bool) -> float:
    """Say how long to go on."""
    default_s = 3600 if is_full else 300 if os.environ.get("CI") == "true" else 90
    return float(os.environ.get("STREAMD_DAEMON_CHAOS_S") or default_s)


@pytest.fixture(scope="module")
def saved(emulator: Emulator, tmp_path_factory: pytest.TempPathFactory) -> list[Saved]:
    """Checkpoint three servers and push them to the emulator."""
    found = []
    with contextlib.closing(GoogleStore(emulator.bucket, "chaos", emulator_host=emulator.address)) as store:
        for number, blocks in enumerate(_HEAPS_MIB):
            directory = tmp_path_factory.mktemp(f"server-{number}")
            runsc = runsc_below(directory)
            try:
                image = checkpoint(runsc, directory, Shape((Heap(100 + number, blocks),), readonly=True))
            finally:
                runsc.remove_root()
            options = PushOptions(chunk_bytes=256 << 10, pack_bytes=8 * MIB)
            push(image.directory, store, snapshot_id=f"server-{number}", push_id="p", options=options)
            found.append(Saved(f"{store.url}/server-{number}", image))
    return found


def test_no_sandbox_is_lost_whatever_dies_under_it(
    saved: list[Saved], emulator: Emulator, proxy: FaultProxy, tmp_path: Path, seed: int, duration_s: float
) -> None:
    print(f"STREAMD_DAEMON_CHAOS_SEED={seed}, {duration_s:g} s")
    tally, over = Tally(), threading.Event()
    settings = f'memory_max_bytes = {MEMORY_BYTES}\n[daemon]\ngrace_s = "{_GRACE}"'
    with (
        # What waits in a thread ends with the daemon's mounts, at the latest.
        ThreadPoolExecutor(_SANDBOXES + CHURNS) as threads,
        Daemon(
            settings,
            cache=f"max_bytes = {_CACHE_BYTES}",
            has_manager=True,
            env={"STORAGE_EMULATOR_HOST": proxy.address},
        ) as daemon,
    ):
        proxy.link = Link(BYTES_PER_S)
        lives = [Lives(daemon, saved, tmp_path / f"sandbox-{n}", tally, seed=f"{seed} {n}") for n in range(_SANDBOXES)]
        churn = Churn(daemon, emulator, tmp_path / "churn")
        schedule = Schedule(random.Random(seed), daemon, proxy, churn, threads)
        try:
            working = [threads.submit(life.run, over) for life in lives]
            schedule.run(duration_s, working)
            over.set()
            for future in [*working, *schedule.working]:
                future.result(LIMIT_S)
            print(f"{tally.restored} restores, {tally.deleted_while_loading} deleted while they loaded")
            print(f"the longest life took {tally.longest_s:.0f} s; {schedule.counts()}")
            assert tally.restored >= _SANDBOXES
            _is_clean(daemon)
        except BaseException:
            over.set()
            traceback.print_exc(file=sys.stdout)
            print("\n".join([*(life.stage for life in lives), *schedule.lines, "events:"]))
            print(
                "\n".join(map(str, daemon.tape.all())),
                *daemon.log_path.read_text(errors="replace").splitlines()[-_LOG_LINES:],
                sep="\n",
            )
            raise


def _is_clean(daemon: Daemon) -> None:
    """Have all images go; then nothing must be left of them, in the daemon, the kernel or the fd store."""

    def is_quiet() -> bool:
        with contextlib.suppress(LookupError):  # a spawner that was killed is back in a moment
            return set(daemon.process_ids()) == {daemon.pid, daemon.spawner_pid()}
        return False

    assert daemon.manager is not None
    assert daemon.complaints() == []
    assert daemon.tape.of("image-failed") == []
    until(lambda: not daemon.client.health()["images"], "the end of all images")
    until(is_quiet, "the end of all workers")
    assert [entry for entry in mountinfo.read() if entry.mountpoint.startswith(f"{daemon.base}/")] == []
    assert os.listdir(daemon.run_directory / "images") == []
    assert [name for name, _ in daemon.manager.stored()] == ["node.notes"]
    verified = daemon.streamd("cache", "verify").result()
    assert verified.returncode == 0, verified.stderr
    assert daemon.streamd("cache", "clear").result().returncode == 0
    used = Facts.of(daemon.pid)
    daemon.stop(signal.SIGTERM)
    daemon.start()
    fresh = Facts.of(daemon.pid)
    assert used.descriptors <= fresh.descriptors + 5, (used, fresh)
    assert used.threads <= fresh.threads + 16, (used, fresh)
    assert used.anonymous_bytes <= fresh.anonymous_bytes + 24 * MIB, (used, fresh)
    print(f"the supervisor at its end {used}, a new one {fresh}")
