"""What comes back of an image after a restart: parts, several versions of one, and what makes no sense.

The store is a stand-in that keeps duplicates by name, as systemd's does (tests/systemd has the real one).
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from streamd.config import Prefetch
from streamd.daemon.adoption import FdKeeper
from streamd.daemon.images import Image
from streamd.daemon.memfds import bytes_of, memfd_of
from streamd.daemon.notes import Noted
from streamd.daemon.spawning import WorkerProcess
from streamd.daemon.wire import Wire, wire_pair
from streamd.fuse.binding import BindMount
from streamd.fuse.mounting import FuseMount

ID = "0123456789abcdef" * 2


class Store:
    """Keeps duplicates of descriptors by name, and hands out new ones; an open file under a second name is dropped."""

    def __init__(self) -> None:
        self.kept: dict[str, list[int]] = {}
        self.is_there = True

    def store(self, name: str, fds: Sequence[int]) -> bool:
        there = {os.fstat(fd).st_ino for kept in self.kept.values() for fd in kept}
        new = [os.dup(fd) for fd in fds if os.fstat(fd).st_ino not in there]
        if new:
            self.kept.setdefault(name, []).extend(new)
        return True

    def remove(self, name: str) -> None:
        for fd in self.kept.pop(name, []):
            os.close(fd)

    def take(self) -> dict[str, list[int]]:
        return {name: [os.dup(fd) for fd in fds] for name, fds in self.kept.items()}

    def close(self) -> None:
        for name in list(self.kept):
            self.remove(name)


class Life:
    """What is kept of a life, and no more."""

    def __init__(self) -> None:
        self.image = Image(
            id=ID,
            snapshot_url="gs://bucket/snap",
            tenant="blue",
            prefetch=Prefetch.HOT,
            credentials={"token_file": "/var/run/token"},
            mountpoint="/run/streamd/images/x",
            created_s=12.5,
            restarts=3,
        )
        self.mount: FuseMount | BindMount | None = FuseMount(
            os.open("/dev/null", os.O_RDWR), "/run/streamd/images/x", (0, 77)
        )
        self.init = b"\0init\xff"
        self.keepsake_fd = memfd_of(b"pinned")
        self.worker: WorkerProcess | None = None

    def start_worker(self) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"])
        ours, its = wire_pair()
        its.close()
        self.worker = WorkerProcess(process.pid, os.pidfd_open(process.pid), Wire(ours))
        return process

    def close(self) -> None:
        assert self.mount is not None
        os.close(self.mount.fd)
        os.close(self.keepsake_fd)
        if self.worker is not None:
            os.close(self.worker.process_fd)
            self.worker.wire.close()


@pytest.fixture
def store() -> Iterator[Store]:
    made = Store()
    before = len(os.listdir("/proc/self/fd"))
    yield made
    made.close()
    assert len(os.listdir("/proc/self/fd")) <= before  # nothing that came back was lost


@pytest.fixture
def life(store: Store) -> Iterator[Any]:
    made = Life()
    yield made
    made.close()


def keeper(store: Any) -> FdKeeper:
    return FdKeeper(store, version="1")


def close(kept: Any) -> None:
    os.close(kept.device_fd)
    os.close(kept.keepsake_fd)
    if kept.worker is not None:
        os.close(kept.worker.process_fd)
        kept.worker.wire.close()


def test_a_mount_and_its_living_worker_come_back(store: Store, life: Any) -> None:
    process = life.start_worker()
    try:
        first = keeper(store)
        first.keep_mount(life)
        first.keep_worker(life)
        [kept] = keeper(store).take()
        state = kept.state
        assert (kept.image_id, state.snapshot_url, state.tenant, state.prefetch) == (
            ID,
            "gs://bucket/snap",
            "blue",
            "hot",
        )
        assert (state.credentials, state.device, state.restarts) == ({"token_file": "/var/run/token"}, (0, 77), 3)
        assert state.first_request() == b"\0init\xff"
        assert kept.mount() == FuseMount(kept.device_fd, "/run/streamd/images/x", (0, 77))
        assert bytes_of(kept.keepsake_fd) == b"pinned"
        assert kept.worker is not None
        assert kept.worker.pid == process.pid
        close(kept)
    finally:
        process.kill()
        process.wait()


def test_a_bind_comes_back_with_what_it_shows(store: Store, life: Any) -> None:
    os.close(life.mount.fd)
    life.mount = BindMount(os.open("/", os.O_RDONLY), "/run/streamd/images/x", (8, 1), 4711)
    life.init = b""
    keeper(store).keep_mount(life)
    [kept] = keeper(store).take()
    mount = kept.mount()
    assert isinstance(mount, BindMount)
    assert (mount.mountpoint, mount.device, mount.mount_id) == ("/run/streamd/images/x", (8, 1), 4711)
    assert os.path.samestat(os.fstat(mount.fd), os.stat("/"))
    assert kept.state.first_request() == b""
    close(kept)


def test_a_worker_that_has_died_meanwhile_does_not_come_back_and_its_mount_does(store: Store, life: Any) -> None:
    process = life.start_worker()
    first = keeper(store)
    first.keep_mount(life)
    first.keep_worker(life)
    process.send_signal(signal.SIGKILL)
    process.wait()
    [kept] = keeper(store).take()
    assert kept.worker is None
    close(kept)


def test_a_worker_that_can_not_be_spoken_to_is_ended_before_another_one_reads(store: Store, life: Any) -> None:
    process = life.start_worker()
    try:
        first = keeper(store)
        first.keep_mount(life)
        first.keep_worker(life)
        store.remove(f"{ID}.wire.2")
        [kept] = keeper(store).take()
        assert kept.worker is None
        assert process.wait(10) == -signal.SIGKILL
        close(kept)
    finally:
        process.kill()
        process.wait()


def test_the_latest_of_each_part_counts_and_the_others_are_removed(store: Store, life: Any) -> None:
    first = keeper(store)
    first.keep_mount(life)
    state_fd = memfd_of(bytes_of(store.kept[f"{ID}.state.1"][0]).replace(b'"restarts": 3', b'"restarts": 4'))
    store.store(f"{ID}.state.9", [state_fd])  # it died between the store and the removal
    os.close(state_fd)
    second = keeper(store)
    [kept] = second.take()
    assert kept.state.restarts == 4
    assert sorted(store.kept) == [f"{ID}.device.1", f"{ID}.snapshot.1", f"{ID}.state.9"]
    close(kept)
    second.keep_mount(life)
    assert sorted(store.kept) == [f"{ID}.device.1", f"{ID}.snapshot.1", f"{ID}.state.10"]
    second.forget(life)
    assert store.kept == {}


def test_notes_lie_in_the_store_once_and_come_back(store: Store) -> None:
    first = keeper(store)
    assert first.take() == []
    notes = first.open_notes()
    assert notes is not None
    [kept] = store.kept["node.notes"]
    notes.write(Noted(is_draining=True))  # after it was stored
    os.close(notes.fd)
    second = keeper(store)
    assert second.take() == []
    again = second.open_notes()
    assert again is not None
    assert again.read().is_draining
    assert store.kept == {"node.notes": [kept]}
    os.close(again.fd)


def test_notes_that_are_none_are_replaced(store: Store) -> None:
    fd = memfd_of(b"x")
    store.store("node.notes", [fd])
    os.close(fd)
    taking = keeper(store)
    assert taking.take() == []
    notes = taking.open_notes()
    assert notes is not None
    assert notes.read() == Noted()
    assert [os.fstat(kept).st_ino for kept in store.kept["node.notes"]] == [os.fstat(notes.fd).st_ino]
    os.close(notes.fd)


def test_without_a_store_there_are_no_notes(store: Store) -> None:
    store.is_there = False
    assert keeper(store).open_notes() is None


def test_what_makes_no_sense_is_removed(store: Store) -> None:
    fds = [memfd_of(str(number).encode()) for number in range(7)]
    store.store("stored", fds[:1])
    store.store(f"{ID}.device.1", fds[1:2])
    store.store(f"{ID}.state.1", fds[2:3])
    store.store(f"{ID}.snapshot.1", fds[3:4])
    store.store(f"{'f' * 32}.wire.1", fds[4:5])
    store.store(f"{'e' * 32}.device.1", fds[5:7])
    for fd in fds:
        os.close(fd)
    assert keeper(store).take() == []
    assert store.kept == {}
