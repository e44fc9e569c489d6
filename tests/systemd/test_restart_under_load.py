"""The shipped unit with the real daemon, under a real systemd: restarted, killed and upgraded while sandboxes load.

Readers run inside the machine, as units: what the daemon mounts is seen there and nowhere else.
"""

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bench.emulator import Emulator
from bench.event_tape import Tape
from bench.fault_proxy import FaultProxy
from bench.images import make_image
from bench.slot_reader import Outcome
from streamd.daemon.client import DaemonClient, NoAnswer, NoDaemon
from streamd.daemon.relay import RelayedError
from streamd.errors import StreamdError
from streamd.fuse import mountinfo, mounting
from streamd.fuse.mountinfo import MountEntry
from streamd.save.push import PushOptions, push
from streamd.store.gcs import GoogleStore
from streamd.store.opening import open_store
from tests.systemd.machine import Machine, wait_until

ROOT = Path(__file__).resolve().parents[2]
_UNIT_FILE = ROOT / "systemd" / "streamd.service"
_READER = ROOT / "bench" / "slot_reader.py"
_UNIT = "streamd.service"
_TENANTS = ("one", "two", "three")
_PAGES_BYTES = 24 << 20
# Some 18 MB are stored, for each tenant: they load for longer than two restarts take.
_SLOW = "?rate=3MB/s"
_LIMIT_S = 60.0
_BUCKET = "bucket"
_PUSH = PushOptions(chunk_bytes=64 << 10, pack_bytes=4 << 20)


@dataclass(frozen=True, slots=True)
class _Loading:
    """One tenant's image and who reads it."""

    image_id: str
    reader: str

    @property
    def result(self) -> str:
        return f"{self.reader}.out"


class Node:
    """A machine with the shipped unit, whose program is the daemon of this checkout; a snapshot, and who reads it."""

    def __init__(self, machine: Machine, pages: Path, url: str, *settings: str, slow: str = _SLOW) -> None:
        self.machine = machine
        self._settings = settings
        self._pages = pages
        self.url = url
        self._slow = slow
        # Short names: the socket's path is bounded.
        self._run_directory = machine.place / "r"
        self.client = DaemonClient(self._run_directory)
        self._program = f"{sys.executable} -m streamd.cli --config {machine.place}/streamd.toml daemon"
        (machine.place / "streamd.toml").write_text(
            f'run_directory = "{self._run_directory}"\nlog_directory = "{machine.place}/l"\n'
            f'[cache]\ndirectory = "{machine.place}/c"\n'
        )
        machine.copy(_UNIT_FILE)
        self._install()

    def _install(self, *search: Path) -> None:
        paths = ":".join(map(str, [*search, ROOT]))
        lines = ["[Service]", "ExecStart=", f"ExecStart={self._program}", f"Environment=PYTHONPATH={paths}"]
        lines += [f"StandardError=append:{self.machine.place}/errors", "Environment=PYTHONDONTWRITEBYTECODE=1"]
        lines += self._settings
        self.machine.write(f"{_UNIT}.d/10-program.conf", "\n".join(lines) + "\n")
        self.machine.systemctl("daemon-reload")

    # What may happen to it

    def start(self) -> None:
        """Start it."""
        answer = self.machine.systemctl("start", _UNIT, check=False)
        assert self.machine.show(_UNIT, "ActiveState") == "active", f"{answer}\n{self.log()}\n{self.machine.log()}"

    def restart(self) -> None:
        """Restart the unit, as an operator does."""
        self.machine.systemctl("restart", _UNIT)

    def kill(self) -> None:
        """Kill the supervisor; systemd starts the next one."""
        self.machine.systemctl("kill", "--kill-who=main", "--signal=KILL", _UNIT)

    def kill_all(self) -> None:
        """Kill the supervisor and all workers at once: nobody has the connections any more but the fd store."""
        self.machine.systemctl("kill", "--signal=KILL", _UNIT)

    def upgrade(self) -> None:
        """Install another version, as a package manager does, and restart."""
        facts = self.machine.place / f"new-{time.monotonic_ns()}" / "podsnap-99.0.dist-info"
        facts.mkdir(parents=True)
        (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: podsnap\nVersion: 99.{time.monotonic_ns()}\n")
        self._install(facts.parent)
        self.restart()

    def set_clocks(self, ahead_s: int) -> None:
        """Let the next lives have other clocks than workers of this one: all but the time of day, by so many seconds.

        What it takes to begin with other clocks isn't what the unit may do.
        """
        ahead = f"unshare --time --monotonic {ahead_s} --boottime {ahead_s} {self._program}"
        lines = ["[Service]", "ExecStart=", f"ExecStart=/usr/bin/{ahead}", "RestrictNamespaces=no"]
        lines += ["ProtectClock=no", "CapabilityBoundingSet=CAP_SYS_TIME"]
        self.machine.write(f"{_UNIT}.d/20-clocks.conf", "\n".join(lines) + "\n")
        self.machine.systemctl("daemon-reload")

    def clocks(self) -> str:
        """Give what the supervisor's clocks are ahead by (time_namespaces(7))."""
        return self.machine.run("cat", f"/proc/{self.machine.show(_UNIT, 'MainPID')}/timens_offsets")

    def next_life(self, last_started_s: float) -> dict[str, Any]:
        """Wait for an answer of a supervisor that was started later than that."""
        found: list[dict[str, Any]] = []

        def answers() -> bool:
            try:
                found[:] = [self.client.health()]
            except (NoDaemon, NoAnswer):
                return False
            return bool(found[0]["started_s"] > last_started_s)

        wait_until(answers, f"the next supervisor: {self.log()}\n{self.machine.log()}", _LIMIT_S)
        return found[0]

    # Its images

    def serve(self, tenant: str) -> dict[str, Any]:
        """Have the snapshot served to a tenant."""
        image_id = str(self.client.request_image(self.url + self._slow, tenant=tenant, prefetch="none")["id"])
        state: dict[str, Any] = self.client.image(image_id, wait_s=_LIMIT_S)
        assert state["state"] == "serving", f"{state}\n{self.log()}"
        return state

    def load(self, tenant: str) -> _Loading:
        """Have it served, and start to read it."""
        state = self.serve(tenant)
        name = f"reader-{tenant}"
        command = f"{sys.executable} -S {_READER} {state['mountpoint']}/pages.img {self._pages} --slots 32"
        lines = ["[Service]", f"ExecStart={command}", f"StandardOutput=append:{self.machine.place}/{name}.out"]
        lines += [f"StandardError=append:{self.machine.place}/errors"]
        self.machine.write(f"{name}.service", "\n".join(["[Unit]", "DefaultDependencies=no", *lines]) + "\n")
        self.machine.systemctl("daemon-reload")
        self.machine.systemctl("start", f"{name}.service")
        loading = _Loading(state["id"], name)
        wait_until(lambda: len(self._said(loading)) >= 1, f"{name} has pages.img open: {self.log()}")
        return loading

    def request(self, tenant: str, request_id: str) -> str:
        """Ask for the snapshot under a request id; give the image."""
        answer = self.client.request_image(self.url + self._slow, tenant=tenant, prefetch="none", request_id=request_id)
        return str(answer["id"])

    def _said(self, loading: _Loading) -> list[dict[str, Any]]:
        path = self.machine.place / loading.result
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def is_loading(self, loading: _Loading) -> bool:
        """Whether its reader still reads."""
        return len(self._said(loading)) == 1

    def outcome(self, loading: _Loading) -> Outcome:
        """Wait for what a reader got."""

        def is_over() -> bool:
            state = self.machine.show(f"{loading.reader}.service", "ActiveState")
            assert len(self._said(loading)) == 2 or state == "active", f"{loading.reader}: {state}\n{self.log()}"
            return len(self._said(loading)) == 2

        wait_until(is_over, f"the end of {loading.reader}: {self.log()}", _LIMIT_S)
        return Outcome(**self._said(loading)[1])

    def is_whole(self, outcome: Outcome) -> bool:
        """Whether a reader got every byte, and every byte right."""
        return outcome.is_clean and outcome.right_bytes == self._pages.stat().st_size

    def image(self, image_id: str) -> dict[str, Any]:
        """Ask the daemon for an image. Raises: `AssertionError` with its log when there is none."""
        try:
            return self.client.image(image_id)
        except StreamdError as error:
            raise AssertionError(f"{error}\n{self.log()}") from error

    def workers(self, loadings: list[_Loading]) -> list[int | None]:
        """Give the images' workers, numbered as the machine does."""
        return [self.image(loading.image_id)["worker_pid"] for loading in loadings]

    def next_workers(self, loadings: list[_Loading], former: list[int | None]) -> list[int | None]:
        """Wait until each image has a worker that none of them had before, and give them."""

        def are_there() -> bool:
            return all(pid not in (None, *former) for pid in self.workers(loadings))

        wait_until(are_there, f"the next workers: {self.log()}", _LIMIT_S)
        return self.workers(loadings)

    def warm(self) -> str:
        """Have the snapshot brought to the node as a whole, and bound; give the image's id."""
        first = str(self.client.request_image(self.url, prefetch="all")["id"])
        assert self.client.image(first, wait_s=_LIMIT_S)["state"] == "serving", self.log()
        wait_until(
            lambda: bool(list(self.machine.place.glob("c/images/*/sealed"))), f"the seal: {self.log()}", _LIMIT_S
        )
        self.client.release(first)
        wait_until(lambda: self.image(first)["state"] == "gone", f"its end: {self.log()}")
        self.client.request_image(self.url)
        assert self.client.image(first, wait_s=_LIMIT_S)["state"] == "warm", self.log()
        return first

    def reads_right(self, image_id: str) -> bool:
        """Whether pages.img of an image has the right bytes, inside the machine."""
        return self.machine.run("cmp", f"{self.image(image_id)['mountpoint']}/pages.img", str(self._pages)) == ""

    def release(self, loading: _Loading) -> None:
        """Release an image that nobody has open any more."""
        wait_until(lambda: not self.image(loading.image_id)["openers"], f"no opener: {self.log()}")
        self.client.release(loading.image_id)

    def mounts(self) -> list[MountEntry]:
        """Give our mounts as the machine's PID 1 sees them; what else is mounted here when it was started is none."""
        table = self.machine.run("cat", "/proc/1/mountinfo").splitlines(keepends=True)
        below = f"{self.machine.place}/"
        return [e for e in mountinfo.parse(table) if mounting.is_own(e) and e.mountpoint.startswith(below)]

    def log(self) -> str:
        """Give the end of what the daemon and its readers wrote."""
        path = self.machine.place / "errors"
        return path.read_text(errors="replace")[-6000:] if path.exists() else ""


@pytest.fixture
def node(machine: Machine) -> Node:
    """Start the daemon, and save a snapshot that its tenants restore."""
    image, store = machine.place / "image", open_store(f"file://{machine.place}/s")
    make_image(image, _PAGES_BYTES, zero=0.1)
    push(image, store, snapshot_id="small", push_id="p", options=_PUSH)
    installed = Node(machine, image / "pages.img", f"{store.url}/small")
    installed.start()
    return installed


@pytest.fixture
def proxy() -> Iterator[FaultProxy]:
    """Start a Google Cloud Storage of our own, and a proxy before it."""
    with Emulator(_BUCKET) as emulator, FaultProxy(emulator.port) as running:
        yield running


@pytest.mark.parametrize(
    ("happen", "keeps_workers"),
    [(Node.restart, True), (Node.kill, True), (Node.upgrade, False), (Node.kill_all, False)],
    ids=["restart", "kill", "upgrade", "kill-all"],
)
def test_readers_notice_nothing_of_what_happens_to_the_supervisor(
    node: Node, happen: Callable[[Node], None], keeps_workers: bool
) -> None:
    loadings = [node.load(tenant) for tenant in _TENANTS]
    mounts, workers = node.mounts(), node.workers(loadings)
    assert len(mounts) == len(set(workers)) == len(_TENANTS)
    started_s = node.next_life(0.0)["started_s"]
    for _ in range(2):
        assert all(node.is_loading(loading) for loading in loadings)
        happen(node)
        started_s = node.next_life(started_s)["started_s"]
        assert node.mounts() == mounts, node.log()
        assert [node.image(loading.image_id)["state"] for loading in loadings] == ["serving"] * len(_TENANTS)
        if keeps_workers:
            assert node.workers(loadings) == workers
        else:
            workers = node.next_workers(loadings, workers)
    assert all(node.is_whole(node.outcome(loading)) for loading in loadings), node.log()
    assert "Traceback" not in node.log()
    for loading in loadings:  # all is as if nothing had happened
        node.release(loading)
    wait_until(lambda: not node.mounts(), f"the end of the mounts: {node.log()}")
    # Nothing is kept but what isn't an image's.
    wait_until(lambda: node.machine.show(_UNIT, "NFileDescriptorStore") == "1", "a store with nothing but notes")


@pytest.mark.parametrize(
    ("happen", "keeps_worker"),
    [(Node.restart, True), (Node.kill, True), (Node.upgrade, False), (Node.kill_all, False)],
    ids=["restart", "kill", "upgrade", "kill-all"],
)
def test_a_warm_image_outlives_what_happens_to_the_supervisor(
    node: Node, happen: Callable[[Node], None], keeps_worker: bool
) -> None:
    image_id = node.warm()
    mounts, workers = node.mounts(), [node.image(image_id)["worker_pid"]]
    assert [mount.filesystem == mounting.FILESYSTEM for mount in mounts] == [False]
    started_s = node.next_life(0.0)["started_s"]

    def is_held() -> bool:
        worker = node.image(image_id)["worker_pid"]
        return worker == workers[-1] if keeps_worker else worker not in (None, *workers)

    for _ in range(2):
        happen(node)
        started_s = node.next_life(started_s)["started_s"]
        assert node.mounts() == mounts, node.log()
        assert node.reads_right(image_id)
        assert node.image(image_id)["state"] == "warm"
        wait_until(is_held, f"its worker: {node.log()}")
        workers.append(node.image(image_id)["worker_pid"])
    assert "Traceback" not in node.log()
    node.client.release(image_id)
    wait_until(lambda: not node.mounts(), f"the end of the mount: {node.log()}")
    wait_until(lambda: node.machine.show(_UNIT, "NFileDescriptorStore") == "1", "a store with nothing but notes")
    # It was never let go of while it was bound: it is whole, and sealed.
    node.client.request_image(node.url)
    assert node.client.image(image_id, wait_s=_LIMIT_S)["state"] == "warm", node.log()


def test_a_restart_of_the_same_version_after_an_upgrade_replaces_nobody(node: Node) -> None:
    loading = node.load("one")
    [before] = node.workers([loading])
    started_s = node.next_life(0.0)["started_s"]
    node.upgrade()
    started_s = node.next_life(started_s)["started_s"]
    tape = Tape(node.client)
    tape.follow()
    tape.until("worker-replaced", image=loading.image_id)  # before that it is the former version's still
    [after] = node.workers([loading])
    assert after not in (None, before)
    node.restart()
    node.next_life(started_s)
    tape.join()
    assert node.is_whole(node.outcome(loading)), node.log()
    assert node.workers([loading]) == [after]


def test_a_lease_ends_with_the_supervisor_and_can_be_taken_again(node: Node) -> None:
    loading = node.load("one")
    started_s = node.next_life(0.0)["started_s"]
    lease = node.client.take_lease(loading.image_id, owner="pod/a", purpose="restore")
    assert lease.is_held()
    node.restart()
    node.next_life(started_s)
    wait_until(lambda: not lease.is_held(), "the lease's end")
    lease.close()
    with node.client.lease(loading.image_id, owner="pod/a", purpose="restore") as again:
        assert again.is_held()
    assert node.is_whole(node.outcome(loading)), node.log()


def test_a_drain_outlives_the_supervisor_until_it_is_ended_or_the_daemon_is_stopped(node: Node) -> None:
    loading = node.load("one")
    started_s = node.next_life(0.0)["started_s"]
    node.client.drain()
    for happen in (Node.kill, Node.restart):
        happen(node)
        health = node.next_life(started_s)
        started_s = health["started_s"]
        assert health["is_draining"], node.log()
        with pytest.raises(RelayedError, match="draining"):
            node.request("two", "new")
        assert node.request("one", "again") == loading.image_id  # it is here
    node.client.end_drain()
    node.kill()
    started_s = node.next_life(started_s)["started_s"]
    node.request("two", "new")
    node.client.drain()
    assert node.is_whole(node.outcome(loading)), node.log()
    node.machine.systemctl("stop", _UNIT)
    node.start()
    assert not node.next_life(started_s)["is_draining"]


def test_a_request_that_is_sent_again_to_the_next_supervisor_is_the_same_request(node: Node) -> None:
    loading = node.load("one")
    started_s = node.next_life(0.0)["started_s"]
    assert node.request("one", "mine") == loading.image_id
    for happen in (Node.kill, Node.restart):
        happen(node)
        started_s = node.next_life(started_s)["started_s"]
        assert node.request("one", "mine") == loading.image_id
        with pytest.raises(RelayedError, match="was used for another request"):
            node.request("two", "mine")
    assert node.is_whole(node.outcome(loading)), node.log()
    assert [image["id"] for image in node.client.images()] == [loading.image_id]


def test_an_image_that_was_going_when_the_supervisor_ended_is_prepared_anew_for_who_asks(node: Node) -> None:
    image_id = node.request("one", "first")
    tape = Tape(node.client)
    tape.follow()
    tape.until("image-serving", image=image_id)
    state = node.image(image_id)
    started_s = node.next_life(0.0)["started_s"]
    node.machine.run("kill", "-STOP", str(state["worker_pid"]))  # it can't say that its connection has ended
    node.client.release(image_id)
    wait_until(lambda: not node.mounts(), f"the end of the mount: {node.log()}")
    node.kill()
    node.next_life(started_s)
    tape.join()
    assert node.request("one", "second") == image_id
    assert node.image(image_id)["state"] == "preparing"
    state = node.client.image(image_id, wait_s=_LIMIT_S)
    assert state["state"] == "serving", f"{state}\n{node.log()}"
    assert [entry.mountpoint for entry in node.mounts()] == [state["mountpoint"]]
    assert node.is_whole(node.outcome(node.load("one"))), node.log()
    assert "image failed" not in node.log()


def test_a_restart_with_the_store_down_costs_no_read(machine: Machine, proxy: FaultProxy) -> None:
    """Of the supervisor, and then of all: what the next workers need of the snapshot isn't in the store only."""
    image = machine.place / "image"
    make_image(image, _PAGES_BYTES, zero=0.1)
    with contextlib.closing(GoogleStore(_BUCKET, "p", emulator_host=proxy.address)) as store:
        push(image, store, snapshot_id="small", push_id="p", options=_PUSH)
        url = f"{store.url}/small"
    node = Node(machine, image / "pages.img", url, f"Environment=STORAGE_EMULATOR_HOST={proxy.address}", slow="")
    node.start()
    started_s = node.next_life(0.0)["started_s"]
    node.serve("one")
    proxy.refuse()
    loading = node.load("one")
    mounts, [worker] = node.mounts(), node.workers([loading])
    node.restart()
    started_s = node.next_life(started_s)["started_s"]
    assert node.workers([loading]) == [worker]
    node.kill_all()
    node.next_life(started_s)
    tape = Tape(node.client)
    tape.follow()
    tape.until("worker-replaced", image=loading.image_id)  # it serves, as far as it can
    assert node.mounts() == mounts
    assert node.is_loading(loading)
    proxy.accept()
    assert node.is_whole(node.outcome(loading)), node.log()
    node.machine.systemctl("stop", _UNIT)
    tape.join()
    assert "Traceback" not in node.log()


def test_a_supervisor_whose_clocks_are_others_takes_workers_over_as_they_are(node: Node) -> None:
    loadings = [node.load(tenant) for tenant in _TENANTS[:2]]
    mounts, workers = node.mounts(), node.workers(loadings)
    started_s = node.next_life(0.0)["started_s"]
    for ahead_s, is_killed in ((10_000_000, True), (-1000, False)):
        node.set_clocks(ahead_s)
        node.restart()
        started_s = node.next_life(started_s)["started_s"]
        assert str(ahead_s) in node.clocks()
        assert node.workers(loadings) == workers
        if is_killed:
            node.machine.run("kill", "-KILL", str(workers[0]))
            workers[:1] = node.next_workers(loadings[:1], workers)
    assert node.mounts() == mounts
    assert all(node.is_whole(node.outcome(loading)) for loading in loadings), node.log()
    assert node.workers(loadings) == workers
    assert "Traceback" not in node.log()
