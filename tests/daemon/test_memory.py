"""What a daemon takes of a node's memory, and what happens where that is limited: a cgroup of its own, version 1 or 2.

"Anonymous" is RssAnon: heap, stacks, image bytes that aren't on the disk. Pages that forks share count in each of them.
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bench.daemons import Daemon
from bench.event_tape import until
from bench.images import make_image, zeros_manifest
from bench.report import PeakAnonymous, anonymous_bytes
from streamd.errors import Exit
from streamd.snapshot.manifest import encode
from streamd.store.opening import open_store
from streamd.store.port import Condition

if TYPE_CHECKING:
    from tests.daemon.conftest import Saved

Calm = Callable[[Daemon], None]

MIB = 1 << 20
# What the node plans with: supervisor and spawner together; a worker beside its stated cap.
IDLE_MAX_BYTES = 60 * MIB
WORKER_MAX_BYTES = 100 * MIB
_CAP_MIB = 32
# Its modules are compiled; where they are not, the first start does that. And what the unit sets.
_INSTALLED = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONNODEBUGRANGES": "1"}
# A cgroup counts what the kernel needs for its processes as well, and pages of the cache that the disk has yet to take.
_KERNEL_BYTES = 48 * MIB
_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
_JOIN = 'echo 0 >"$1"; shift; exec "$@"'


class MemoryCgroup:
    """A cgroup with a limit of memory, in whichever version the machine has that."""

    def __init__(self, name: str, max_bytes: int) -> None:
        if (_V1 / "memory.limit_in_bytes").exists():
            self._path, limit, self._counts = _V1 / name, "memory.limit_in_bytes", "memory.oom_control"
        elif (_V2 / "cgroup.subtree_control").exists() and "memory" in (_V2 / "cgroup.subtree_control").read_text():
            self._path, limit, self._counts = _V2 / name, "memory.max", "memory.events"
        else:
            pytest.skip("no memory controller of cgroups, in neither version")
        try:
            self._path.mkdir()
        except OSError as error:
            pytest.skip(f"cgroups can't be made here: {error.strerror}")
        (self._path / limit).write_text(str(max_bytes))

    @property
    def wrapper(self) -> list[str | Path]:
        """What starts a command in it."""
        return ["sh", "-ec", _JOIN, "sh", self._path / "cgroup.procs"]

    def take(self, pid: int) -> None:
        """Move a process into it; what it has allocated before stays the former one's."""
        (self._path / "cgroup.procs").write_text(str(pid))

    def kills(self) -> int:
        """How many of its processes the kernel has killed since they had no memory."""
        counts = dict(line.split() for line in (self._path / self._counts).read_text().splitlines())
        return int(counts["oom_kill"])

    def remove(self) -> None:
        """Remove it, once its processes have ended."""

        def is_removed() -> bool:
            try:
                self._path.rmdir()
            except OSError:
                return False
            return True

        until(is_removed, "an empty cgroup")


@contextmanager
def memory_cgroup(max_bytes: int) -> Iterator[MemoryCgroup]:
    """Make one, and remove it."""
    group = MemoryCgroup(f"streamd-test-{os.getpid()}-{max_bytes >> 20}", max_bytes)
    try:
        yield group
    finally:
        group.remove()


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory, save: Callable[[Path, Path, str], "Saved"]) -> "Saved":
    """Push an image of 256 MiB: more than everything here may use."""
    place = tmp_path_factory.mktemp("large")
    make_image(place / "image", 256 * MIB, zero=0.1)
    return save(place / "image", place / "store", "large")


def idle_bytes(daemon: Daemon) -> tuple[int, int]:
    """Give the anonymous memory of supervisor and spawner, once that has imported all (then it has its name)."""
    found: list[int] = []

    def is_ready() -> bool:
        with suppress(LookupError):
            found.append(daemon.spawner_pid())
        return bool(found)

    until(is_ready, "the spawner")
    return anonymous_bytes(daemon.pid), anonymous_bytes(found[0])


def test_the_daemon_and_its_workers_take_no_more_than_a_node_plans_with(large: "Saved", calm: Calm) -> None:
    with Daemon(f'memory_max_bytes = "{_CAP_MIB}MiB"', env=_INSTALLED) as daemon:
        idle_bytes(daemon)
        daemon.stop(signal.SIGTERM)
        daemon.start()
        idle = idle_bytes(daemon)
        image = daemon.image(large.url, prefetch="all")
        with PeakAnonymous(image.worker_pid()) as worker:
            assert large.is_whole(image.reader(large.pages).outcome())
        sizes = [round(size / MIB, 1) for size in (*idle, worker.peak_bytes)]
        print("MiB: supervisor {}, spawner {}, worker at most {}".format(*sizes))
        assert sum(idle) <= IDLE_MAX_BYTES
        assert worker.peak_bytes <= WORKER_MAX_BYTES + _CAP_MIB * MIB
        calm(daemon)


@pytest.mark.parametrize("has_cache", [True, False], ids=["cache", "no cache"])
def test_a_limit_that_the_stated_caps_fit_in_kills_nobody(large: "Saved", calm: Calm, has_cache: bool) -> None:
    """The cache's pages count as well, but the kernel can take them back."""
    with (
        memory_cgroup(IDLE_MAX_BYTES + WORKER_MAX_BYTES + _CAP_MIB * MIB + _KERNEL_BYTES) as group,
        Daemon(
            f'memory_max_bytes = "{_CAP_MIB}MiB"', has_cache=has_cache, wrapper=group.wrapper, env=_INSTALLED
        ) as daemon,
    ):
        image = daemon.image(large.url, prefetch="all")
        readers = [image.reader(large.pages, passes=2) for _ in range(2)]
        for reader in readers:
            outcome = reader.outcome()
            assert outcome.is_clean
            assert outcome.right_bytes == 2 * large.pages.stat().st_size
        assert group.kills() == 0
        assert daemon.tape.of("worker-lost") == []
        assert daemon.client.health()["pid"] == daemon.pid
        calm(daemon)


def test_a_worker_that_the_kernel_kills_for_memory_is_replaced_under_its_reader(saved: "Saved", calm: Calm) -> None:
    with memory_cgroup(1 * MIB) as narrow, Daemon() as daemon:
        image = daemon.image(saved.slow(8))
        reader = image.reader(saved.pages)
        image.until_open(reader)
        narrow.take(image.worker_pid())
        [lost] = daemon.tape.until("worker-lost", image=image.id)
        assert lost["facts"]["how"] == "died"
        assert narrow.kills() == 1
        daemon.tape.until("worker-replaced", image=image.id)
        assert saved.is_whole(reader.outcome())
        assert image.state()["restarts"] == 1
        calm(daemon)


def test_a_limit_that_the_caps_do_not_fit_in_costs_workers_and_no_reader(large: "Saved", calm: Calm) -> None:
    """The cap is 256 MiB here, and without a disk all of the image is kept: the largest process has to go."""
    with memory_cgroup(190 * MIB) as group, Daemon(has_cache=False, wrapper=group.wrapper) as daemon:
        image = daemon.image(large.slow(100), prefetch="all")
        assert large.is_whole(image.reader(large.pages).outcome())
        assert group.kills() > 0
        daemon.tape.until("worker-replaced", image=image.id, count=group.kills())
        assert daemon.client.health()["pid"] == daemon.pid
        assert image.state()["state"] == "serving"
        calm(daemon)


def test_a_few_kb_that_say_millions_of_chunks_are_refused_and_cost_the_others_nothing(
    saved: "Saved", tmp_path: Path, calm: Calm
) -> None:
    """Each takes 86 MB of memory, of which there are 32 MiB beside the caps."""
    data = encode(zeros_manifest("zeros", 2_000_000))
    assert len(data) < 16 << 10
    store = open_store(f"file://{tmp_path}")
    store.put("zeros/manifest", data, condition=Condition.ABSENT)
    with Daemon('memory_max_bytes = "32MiB"\n[daemon]\nmemory_max_bytes = "64MiB"') as daemon:
        reader = daemon.image(saved.slow(8)).reader(saved.pages)
        image = daemon.request(f"{store.url}/zeros")
        state = image.until(lambda state: state["state"] == "failed", "a refusal")
        assert state["last_error"]["exit_code"] == Exit.REFUSED
        assert "2000000 chunks" in state["last_error"]["message"]
        assert "daemon.memory_max_bytes" in state["last_error"]["message"]
        assert saved.is_whole(reader.outcome())
        calm(daemon)


def test_an_image_of_millions_of_chunks_is_served_where_there_is_memory_for_its_tables(
    tmp_path: Path, calm: Calm
) -> None:
    store = open_store(f"file://{tmp_path}")
    data = encode(zeros_manifest("zeros", 4 << 20, pages=64))  # 1 TiB
    store.put("zeros/manifest", data, condition=Condition.ABSENT)
    with Daemon('memory_max_bytes = "32MiB"\n[daemon]\nmemory_max_bytes = "256MiB"') as daemon:
        image = daemon.image(f"{store.url}/zeros", prefetch="all")
        assert image.state()["state"] == "serving"
        small = daemon.request(f"{store.url}/zeros", tenant="two")
        assert small.until(lambda state: state["state"] == "failed", "a refusal")["last_error"]["exit_code"] == 7
        image.until_replaced(image.kill_worker())
        daemon.tape.until("worker-replaced", image=image.id)
        calm(daemon)
