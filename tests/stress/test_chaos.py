"""Chaos: a store and a cache disk that fail at random under two readers like runsc, in little room, mount after mount.

Only right bytes, or what the policy says: a round whose faults all pass is read to the end without an error; a round
whose faults may not pass may fail reads with EIO; a round that takes the mount away by force, or kills it, may fail
them with what the kernel says then. Never a wrong byte, never a read that stays, never an exception in a log, and
nothing that grows: when the weather has cleared, a mount has the descriptors, threads and memory that it may have, and
the cache is never larger than its limit and can be emptied at the end, and nothing is mounted any more.

Minutes: STREAMD_CHAOS_S (seconds), else ten with STREAMD_STRESS=full, else one. The seed is in the output, and
STREAMD_CHAOS_SEED repeats it, as far as threads let it.
"""

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from bench.fault_proxy import Action, Cut, Delay, Extra, FaultProxy, Flip, Hang, Rule, Status
from bench.mounts import FaultyDisk, LiveMount, Mounts, Reader
from streamd.errors import Exit
from streamd.fuse import mountinfo
from tests.stress.process_facts import Facts

if TYPE_CHECKING:
    from tests.stress.conftest import Snapshot

MIB = 1 << 20
# Waits of the policy, short, so that a round with faults that don't pass ends in seconds.
_POLICY = 'hold_s = "1s"\ncredentials_wait_s = "2s"'
# After the last fault everything is answered within the longest back-off (5 s) and a silent connection's 10 s.
_SETTLE_LIMIT_S = 90.0
PREFETCHES = ["none", "hot", "all", "all"]
CACHE_SIZES = ["1GiB", "1GiB", "16MiB"]  # the image has 40 MiB
CACHE_BYTES_MAX = 41 * MIB  # the image, and what describes it
# The default, and the least that may be set: two readers' windows of 32 MiB don't fit into it.
MEMORY_MAX_MIB = [256, 32]
# What a mount may have when all is calm. Descriptors: connections that are kept for the next request, the cache's
# files, libraries. Threads: 16 fetches for faults, 16 others, 32 for the disk, the clients' own; idle ones end.
_DESCRIPTORS_MAX = 150
_THREADS_MAX = 110
# Anonymous memory beside image bytes: 60 MiB after the start (imports, tables), stacks, replies under way.
_OWN_MEMORY_BYTES = 160 * MIB


class Kind(Enum):
    """What a round does, and so what its readers may see."""

    PASSING = "faults that pass"
    LASTING = "faults that may outlast the policy"
    FORCE = "umount, refused, and umount --force"
    KILL = "kill -9"


ALLOWED = {
    Kind.PASSING: set[str](),
    Kind.LASTING: {"EIO"},
    Kind.FORCE: {"EIO", "ECONNABORTED", "ENOTCONN"},
    Kind.KILL: {"EIO", "ECONNABORTED", "ENOTCONN"},
}


class Weather:
    """Makes faults at random, on the wire and on the cache's disk, and takes them away again."""

    def __init__(self, dice: random.Random, proxy: FaultProxy, disk: FaultyDisk, kind: Kind) -> None:
        self._dice = dice
        self._proxy = proxy
        self._disk = disk
        self._kind = kind
        self._rules: list[tuple[float, Rule]] = []
        self._refusing_until_s = 0.0
        self._disk_until_s = 0.0
        self._flips_left = 1

    def change(self, now_s: float) -> None:
        """Take away what has lasted, and add something now and then."""
        for until_s, rule in tuple(self._rules):
            if now_s >= until_s:
                self._proxy.remove(rule)
                self._rules.remove((until_s, rule))
        if self._refusing_until_s and now_s >= self._refusing_until_s:
            self._proxy.accept()
            self._refusing_until_s = 0.0
        if self._disk_until_s and now_s >= self._disk_until_s:
            self._disk_is_well()
        match self._dice.random():
            case x if x < 0.05 and not self._refusing_until_s:
                self._proxy.refuse()
                self._refusing_until_s = now_s + self._dice.uniform(0.05, 1.0)
            case x if x < 0.10 and not self._disk_until_s:
                self._disk.set(self._dice.choice(["read", "write"]), self._dice.choice(["eio", "hang"]))
                self._disk_until_s = now_s + self._dice.uniform(0.1, 4.0)
            case x if x < 0.5:
                rule = Rule(self._action(), times=self._dice.randint(1, 6))
                if isinstance(rule.action, Flip):
                    rule.times = 1
                self._rules.append((now_s + self._dice.uniform(0.1, 2.0), self._proxy.add(rule)))

    def clear(self) -> None:
        """Let everything be well."""
        self._proxy.clear()
        self._proxy.accept()
        self._rules.clear()
        self._refusing_until_s = 0.0
        self._disk_is_well()

    def _disk_is_well(self) -> None:
        for operation in ("read", "write"):
            self._disk.set(operation, "ok")
        self._disk_until_s = 0.0

    def _action(self) -> Action:
        dice = self._dice
        at = dice.choice([0, 1, -1, dice.randrange(1, 4 * MIB)])
        passing: list[Action] = [
            Status(dice.choice([500, 502, 503, 504, 429, 408])),
            Cut(at),
            Extra(dice.randint(1, 100_000)),
            Hang(max(0, at)),
            Delay(dice.uniform(0.01, 0.5), max(0, at)),
        ]
        if self._kind is Kind.LASTING:
            passing += [Status(dice.choice([401, 403, 404])), Flip(max(0, at)), Flip(max(0, at))]
        elif self._flips_left and dice.random() < 0.1:  # once a round: the policy refetches a chunk once
            self._flips_left -= 1
            return Flip(max(0, at))
        return dice.choice(passing)


@pytest.fixture
def seed() -> int:
    """Choose a seed, or take the one that is to be repeated."""
    return int(os.environ.get("STREAMD_CHAOS_SEED") or random.SystemRandom().randrange(1 << 32))


@pytest.fixture
def mounts() -> Iterator[Mounts]:
    """Give what starts mounts, with the policy's short waits."""
    with Mounts() as starting:
        starting.configure(policy=_POLICY)
        yield starting


def test_chaos_gives_right_bytes_or_what_the_policy_says(
    mounts: Mounts, snapshot: "Snapshot", proxy: FaultProxy, seed: int, tmp_path: Path, is_full: bool
) -> None:
    duration_s = float(os.environ.get("STREAMD_CHAOS_S") or (600 if is_full else 60))
    print(f"STREAMD_CHAOS_SEED={seed}, {duration_s:g} s")
    dice = random.Random(seed)
    rounds = dict.fromkeys(Kind, 0)
    (mounts.base / "mnt").mkdir()
    with FaultyDisk(tmp_path / "backing", mounts.cache_directory) as disk:
        ends_s = time.monotonic() + duration_s
        while time.monotonic() < ends_s:
            kind = dice.choices(list(Kind), [6, 3, 2, 2])[0]
            _round(dice, kind, mounts, snapshot, proxy, disk)
            _rot(dice, tmp_path / "backing")
            rounds[kind] += 1
            assert _disk_bytes(tmp_path / "backing") <= CACHE_BYTES_MAX
        cleared = mounts.run("cache", "clear")
        assert cleared.returncode == 0, cleared.stderr
        assert _disk_bytes(tmp_path / "backing") <= MIB
    print({kind.value: count for kind, count in rounds.items()}, f"{proxy.reads} reads of the store")
    assert sum(rounds.values()) > 1
    assert not [entry for entry in mountinfo.read() if entry.mountpoint.startswith(str(mounts.base))]


def _round(
    dice: random.Random, kind: Kind, mounts: Mounts, snapshot: "Snapshot", proxy: FaultProxy, disk: FaultyDisk
) -> None:
    """Mount, let two readers read everything in bad weather, let it clear up, and look at what they got."""
    weather = Weather(dice, proxy, disk, kind)
    environment = {"STORAGE_EMULATOR_HOST": proxy.address}
    cache_max, memory_max_mib = dice.choice(CACHE_SIZES), dice.choice(MEMORY_MAX_MIB)
    prefetch = dice.choice(PREFETCHES)
    context = f"{kind.value}, prefetch {prefetch}, cache {cache_max}, memory {memory_max_mib} MiB"
    mounts.configure(f'memory_max_bytes = "{memory_max_mib}MiB"', policy=_POLICY)
    with mounts.start(
        snapshot.gs_url,
        env=environment,
        prefetch=prefetch,
        options=["--no-warm", "--cache-max", cache_max],  # a bind would hand the disk's errors on
        mountpoint=mounts.base / "mnt",
    ) as mount:
        try:
            weather.change(time.monotonic())
            readers = [mount.reader(snapshot.pages, go_on=kind is Kind.LASTING) for _ in range(2)]
            mount.until(lambda status: _have_opened(readers, status))
            _bad_weather(dice, weather, readers, end=_END[kind](mounts, mount))
        finally:
            weather.clear()
        for reader in readers:
            outcome = reader.outcome(_SETTLE_LIMIT_S)
            names = {name for _, name in outcome.errors}
            assert outcome.wrong == outcome.short == [], context
            assert names <= ALLOWED[kind], context
            assert names or outcome.right_bytes == snapshot.pages.stat().st_size, context
        assert mount.complaints() == [], context
        if _END[kind] is _go_on:
            _is_calm_again(mounts, mount, snapshot.pages, memory_max_bytes=memory_max_mib * MIB)
        else:
            mount.wait()


def _have_opened(readers: list[Reader], status: dict[str, Any]) -> bool:
    pids = {handle["pid"] for handle in status["handles"]}
    return all(reader.pid in pids or reader.is_done() for reader in readers)


def _bad_weather(
    dice: random.Random, weather: Weather, readers: list[Reader], *, end: Callable[[], object] | None
) -> None:
    """Change the weather until the readers are done, or for a few seconds; `end` takes the mount away meanwhile."""
    ends_s = time.monotonic() + dice.uniform(1.0, 6.0)
    end_at_s = time.monotonic() + dice.uniform(0.05, 1.0)
    while (now_s := time.monotonic()) < ends_s and not all(reader.is_done() for reader in readers):
        weather.change(now_s)
        if end is not None and now_s >= end_at_s:
            break
        time.sleep(dice.uniform(0.0, 0.1))
    if end is not None:
        end()


# How a round takes its mount away while it is read


def _go_on(_: Mounts, __: LiveMount) -> None:
    return None


def _kill(_: Mounts, mount: LiveMount) -> Callable[[], object]:
    return lambda: mount.signal(signal.SIGKILL)


def _force(mounts: Mounts, mount: LiveMount) -> Callable[[], object]:
    def end() -> None:
        asked = mounts.run("umount", mount.mountpoint)
        assert asked.returncode in (0, Exit.REFUSED), asked.stderr  # 0: the readers are done
        if asked.returncode:
            forced = mounts.run("umount", mount.mountpoint, "--force")
            assert forced.returncode == 0, forced.stderr
        assert not mount.is_mounted()

    return end


_END: dict[Kind, Callable[[Mounts, LiveMount], Callable[[], object] | None]] = {
    Kind.PASSING: _go_on,
    Kind.LASTING: _go_on,
    Kind.FORCE: _force,
    Kind.KILL: _kill,
}


def _is_calm_again(mounts: Mounts, mount: LiveMount, pages: Path, *, memory_max_bytes: int) -> None:
    """Read everything without weather, look at what the process has, and unmount."""
    outcome = mount.reader(pages).outcome(_SETTLE_LIMIT_S)
    assert outcome.is_clean
    assert outcome.right_bytes == pages.stat().st_size
    status = mount.until(lambda status: not status["handles"])
    assert status["waiting_chunks"] == 0
    assert status["memory_peak_bytes"] <= memory_max_bytes + 8 * MIB  # one demand fetch is always granted
    facts = Facts.of(mount.pid)
    facts.check((_DESCRIPTORS_MAX, _THREADS_MAX, _OWN_MEMORY_BYTES + memory_max_bytes), "the mount's process")
    result = mounts.run("umount", mount.mountpoint)
    assert result.returncode == 0, result.stderr
    assert mount.wait() == 0, mount.log()[-5:]
    assert mount.complaints() == []


def _disk_bytes(directory: Path) -> int:
    """Give what the files below a directory take up."""
    return sum(512 * path.stat().st_blocks for path in directory.rglob("*") if path.is_file())


def _rot(dice: random.Random, backing: Path) -> None:
    """Flip some bits in what is cached, or forget what there is; no mount has it open now."""
    for data in backing.rglob("files/*.img"):
        if dice.random() < 0.1:
            os.truncate(data.parent.with_name("resident"), 0)
        with data.open("r+b") as file:
            for _ in range(dice.randint(0, 5)):
                at = dice.randrange(data.stat().st_size)
                file.seek(at)
                byte = (file.read(1) or b"\0")[0]
                file.seek(at)
                file.write(bytes([byte ^ 1 << dice.randrange(8)]))
