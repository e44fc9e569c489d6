"""Bad days of a node under a real daemon: what goes wrong with one image, a disk or descriptors costs nobody else.

Right bytes, or what the policy says, with an event and a status that say so; and the control API answers meanwhile.
"""

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bench.daemons import Daemon, ServedImage
from bench.event_tape import until
from bench.images import make_image
from bench.mount_users import FileHolder
from bench.mounts import FaultyDisk
from streamd.daemon.api.limits import Limits
from streamd.daemon.images import DEATHS_MAX
from streamd.daemon.relay import RelayedError
from streamd.daemon.sockets import api_socket_path
from streamd.errors import Exit, StreamdError
from streamd.fuse import mountinfo

if TYPE_CHECKING:
    from tests.daemon.conftest import Saved

Calm = Callable[[Daemon], None]

MIB = 1 << 20
# What the kernel gives a read whose connection is ended under it.
GONE = {"EIO", "ECONNABORTED", "ENOTCONN"}
_MANY = 50
_SLOW_MB_PER_S = 8


def answers(daemon: Daemon) -> bool:
    """Whether the control API answers; it must, whatever happens."""
    return daemon.client.health()["pid"] == daemon.pid


# One of several


def test_an_image_whose_workers_die_one_after_another_takes_none_of_the_others_with_it(
    daemon: Daemon, saved: "Saved", calm: Calm
) -> None:
    images = [daemon.image(saved.slow(_SLOW_MB_PER_S), tenant=tenant) for tenant in ("one", "two", "three")]
    readers = [image.reader(saved.pages) for image in images]
    for image, reader in zip(images, readers, strict=True):
        image.until_open(reader)
    bad, others = images[1], [images[0], images[2]]
    workers = [image.worker_pid() for image in others]
    killed: set[int] = set()

    def has_failed() -> bool:
        state = bad.state()
        if (pid := state["worker_pid"]) is not None and pid not in killed:
            killed.add(pid)
            daemon.send(pid, signal.SIGKILL)
        assert len(killed) <= 2 * DEATHS_MAX
        return bool(state["state"] == "failed")

    until(has_failed, "the end of the bad one")
    assert saved.is_whole(readers[0].outcome())
    assert saved.is_whole(readers[2].outcome())
    outcome = readers[1].outcome()
    assert outcome.wrong == outcome.short == []
    assert {name for _, name in outcome.errors} <= GONE
    assert [image.worker_pid() for image in others] == workers
    assert {event["image"] for event in daemon.tape.of("worker-lost")} == {bad.id}
    assert [event["image"] for event in daemon.tape.of("image-failed")] == [bad.id]
    warned = str(daemon.client.health()["warnings"])
    assert [image.id in warned for image in images] == [False, True, False]
    calm(daemon)


def test_a_worker_that_is_killed_while_nobody_reads_is_missed_by_nobody(
    daemon: Daemon, saved: "Saved", calm: Calm
) -> None:
    image = daemon.image(saved.url)
    holder, before = image.holder(), image.mounts()
    assert holder.open() == "done"
    for number in range(1, 4):
        daemon.send(image.worker_pid(), signal.SIGKILL)
        daemon.tape.until("worker-replaced", image=image.id, count=number)
        assert holder.read((number - 1) * MIB, MIB) == FileHolder.digest(saved.pages, (number - 1) * MIB, MIB)
    assert image.mounts() == before
    assert image.state()["restarts"] == 3
    calm(daemon)


# Many at once


@pytest.fixture(scope="module")
def fifty(tmp_path_factory: pytest.TempPathFactory, save: Callable[[Path, Path, str], "Saved"]) -> list["Saved"]:
    """Push fifty images of 1 MiB, no two alike."""
    place = tmp_path_factory.mktemp("fifty")
    found = []
    for number in range(_MANY):
        make_image(place / f"image-{number}", MIB, seed=number + 1, zero=0.1)
        found.append(save(place / f"image-{number}", place / "store", f"small-{number}"))
    return found


def test_fifty_images_that_are_asked_for_at_once_are_served_and_go_again(fifty: list["Saved"], calm: Calm) -> None:
    with Daemon('memory_max_bytes = "32MiB"\n[daemon]\nmemory_max_bytes = "4GiB"') as daemon:
        with ThreadPoolExecutor(_MANY) as threads:
            images = list(threads.map(lambda saved: daemon.image(saved.url), fifty))
        assert len({image.worker_pid() for image in images}) == _MANY
        readers = [image.reader(saved.pages, slots=4) for image, saved in zip(images, fifty, strict=True)]
        assert all(saved.is_whole(reader.outcome()) for reader, saved in zip(readers, fifty, strict=True))
        assert answers(daemon)
        for image in images:
            image.until(lambda state: not state["openers"], "no opener")
            daemon.client.release(image.id)
        for image in images:
            daemon.tape.until("image-gone", image=image.id)
        until(lambda: set(daemon.process_ids()) == {daemon.pid, daemon.spawner_pid()}, "the end of all workers")
        assert daemon.tape.of("worker-lost") == daemon.tape.of("image-failed") == []
        calm(daemon)


# Descriptors


def test_what_descriptors_do_not_reach_for_is_refused_and_what_is_there_goes_on(
    saved: "Saved", sixteen: list["Saved"], calm: Calm
) -> None:
    """Every descriptor that clients may have is taken while workers are replaced, who need some as well."""
    most = Limits().connections + 64 + 2 * 10
    with Daemon(wrapper=["prlimit", f"--nofile={most}:{most}"]) as daemon, ExitStack() as clients:
        images = [daemon.image(saved.slow(_SLOW_MB_PER_S), tenant=tenant) for tenant in ("one", "two")]
        with pytest.raises(RelayedError, match=f"the {most} open files") as refused:
            daemon.request(sixteen[0].url)
        assert refused.value.exit_code == Exit.REFUSED
        readers = [image.reader(saved.pages) for image in images]
        for image, reader in zip(images, readers, strict=True):
            image.until_open(reader)
        pids = [image.worker_pid() for image in images]
        for _ in range(2 * Limits().connections):  # those beyond are turned away
            client = clients.enter_context(closing(socket.socket(socket.AF_UNIX)))
            client.connect(os.fspath(api_socket_path(daemon.run_directory)))
        for pid in pids:
            daemon.send(pid, signal.SIGKILL)
        for image in images:
            daemon.tape.until("worker-replaced", image=image.id)
        clients.close()
        assert all(saved.is_whole(reader.outcome()) for reader in readers)
        until(lambda: answers(daemon), "an answer")
        daemon.client.release(images[0].id, force=True)
        images[0].until(lambda state: state["state"] == "gone", "its end")
        other = daemon.image(sixteen[0].url)
        assert sixteen[0].is_whole(other.reader(sixteen[0].pages, slots=8).outcome())
        assert daemon.tape.of("image-failed") == []
        calm(daemon)


# The cache's disk


@pytest.fixture
def on_disk(tmp_path: Path) -> Iterator[tuple[Daemon, FaultyDisk]]:
    """Start a daemon whose cache is on a disk that fails on demand."""
    daemon = Daemon()
    with FaultyDisk(tmp_path / "backing", daemon.cache_directory) as disk, daemon:
        yield daemon, disk
    shutil.rmtree(daemon.base)  # the disk was in it until now


def says_that_the_cache_is_lost(image: ServedImage, reason: str) -> bool:
    """Whether event and status of an image say why it does without the cache."""
    [lost] = image.daemon.tape.until("cache-lost", image=image.id)
    assert reason in lost["facts"]["reason"]
    image.until(lambda state: state["cache_problem"], "a status that says so")
    return True


@contextmanager
def _mounted(place: Path, options: str) -> Iterator[None]:
    """Have a disk in memory at a place, and take it away again."""
    place.mkdir(mode=0o700)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"mode=0700,{options}", "tmpfs", place], check=True)
    try:
        yield
    finally:
        while mountinfo.topmost(str(place)) is not None:
            subprocess.run(["umount", "--lazy", place], check=True)


@contextmanager
def _read_only(place: Path) -> Iterator[None]:
    with _mounted(place, "size=64m,ro"):
        yield


@contextmanager
def _full(place: Path) -> Iterator[None]:
    with _mounted(place, "size=1m"):
        (place / "of others").write_bytes(bytes(MIB))
        yield


@contextmanager
def _below_the_reserve(place: Path) -> Iterator[None]:
    with _mounted(place, "size=64m"):
        (place / "of others").write_bytes(bytes(60 * MIB))  # a tenth is to stay free
        yield


@contextmanager
def _of_another_user(place: Path) -> Iterator[None]:
    place.mkdir(mode=0o700)
    os.chown(place, 65534, 65534)
    yield


@contextmanager
def _a_file(place: Path) -> Iterator[None]:
    place.touch()
    yield


@contextmanager
def _with_errors(place: Path) -> Iterator[None]:
    with FaultyDisk(place.with_name("backing"), place) as disk, disk.failing("all", "eio"):
        yield


UNUSABLE: dict[str, tuple[Callable[[Path], AbstractContextManager[None]], str]] = {
    "read-only": (_read_only, "Read-only file system"),
    "full": (_full, "No space left on device"),
    "below the reserve": (_below_the_reserve, "has no room for it"),
    "of another user": (_of_another_user, ""),
    "a file": (_a_file, "Not a directory"),
    "with errors": (_with_errors, "Input/output error"),
}


@pytest.mark.parametrize(("have", "reason"), UNUSABLE.values(), ids=UNUSABLE)
def test_a_cache_that_can_not_be_used_is_told_of_by_the_image_its_status_and_the_nodes_health(
    saved: "Saved", calm: Calm, have: Callable[[Path], AbstractContextManager[None]], reason: str
) -> None:
    daemon = Daemon()
    with have(daemon.cache_directory), daemon:
        image = daemon.image(saved.url)
        assert saved.is_whole(image.reader(saved.pages).outcome())
        assert says_that_the_cache_is_lost(image, reason)
        problem = image.state()["cache_problem"]
        warnings = daemon.client.health()["warnings"]
        assert isinstance(warnings, list)
        assert f"1 image is served from memory: {problem}" in warnings
        shown = daemon.streamd("status").result().stdout
        assert f"  served from memory: {problem}" in shown
        calm(daemon)
    shutil.rmtree(daemon.base, ignore_errors=True)


@pytest.mark.parametrize(("operation", "answer"), [("write", "eio"), ("all", "hang")])
def test_a_disk_that_stops_answering_ends_caching_and_hurts_no_reader(
    on_disk: tuple[Daemon, FaultyDisk], saved: "Saved", calm: Calm, operation: str, answer: str
) -> None:
    daemon, disk = on_disk
    image = daemon.image(saved.url)
    pid = image.worker_pid()
    with disk.failing(operation, answer):
        assert saved.is_whole(image.reader(saved.pages).outcome())
        assert says_that_the_cache_is_lost(image, "")
        assert saved.is_whole(image.reader(saved.pages).outcome())
        assert image.worker_pid() == pid
        assert answers(daemon)
        calm(daemon)


def test_a_worker_that_its_disk_does_not_let_die_ends_its_image_and_the_next_one_is_served(
    on_disk: tuple[Daemon, FaultyDisk], saved: "Saved", sixteen: list["Saved"], calm: Calm
) -> None:
    daemon, disk = on_disk
    image, other = daemon.image(saved.url), daemon.image(sixteen[0].url)
    with disk.failing("all", "hang"):
        assert image.reader(saved.pages, end=8 * MIB).outcome().is_clean
        daemon.tape.until("cache-lost", image=image.id)  # a thread of it is in a write that doesn't end
        holder = image.holder()
        assert holder.open() == "done"
        image.kill_worker()
        [lost] = daemon.tape.until("worker-lost", image=image.id)
        assert lost["facts"]["how"] == "unreaped"
        daemon.tape.until("image-failed", image=image.id)
        assert "can't be killed" in image.state()["last_error"]["message"]
        assert holder.read(16 * MIB, MIB) in GONE
        assert answers(daemon)
        assert sixteen[0].is_whole(other.reader(sixteen[0].pages, slots=8).outcome())
        again = daemon.image(saved.url)
        assert saved.is_whole(again.reader(saved.pages).outcome())
        assert "did not answer" in again.until(lambda state: state["cache_problem"], "its problem")["cache_problem"]
        calm(daemon)


def test_questions_about_a_disk_that_hangs_keep_nobody_from_being_served(
    on_disk: tuple[Daemon, FaultyDisk], saved: "Saved", calm: Calm
) -> None:
    daemon, disk = on_disk

    def ask(_: int) -> bool:
        try:
            daemon.client.cache()
        except StreamdError:
            return False
        return True

    with disk.failing("all", "hang"), ThreadPoolExecutor(60) as threads:
        asked = [threads.submit(ask, number) for number in range(60)]  # more than Trio has threads by default
        until(lambda: any(question.done() for question in asked), "the first to be told that it takes too long")
        image = daemon.image(saved.url)
        assert saved.is_whole(image.reader(saved.pages).outcome())
        assert not any(question.result() for question in asked)
        daemon.client.release(image.id, force=True)
        image.until(lambda state: state["state"] == "gone", "its end")
    until(lambda: ask(0), "an answer of the disk")
    calm(daemon)


def test_a_disk_that_runs_full_ends_caching_and_nothing_else(saved: "Saved", calm: Calm) -> None:
    daemon = Daemon(cache='max_bytes = "1GiB"')
    place = daemon.cache_directory
    place.mkdir(mode=0o700)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m,mode=0700", "tmpfs", place], check=True)
    try:
        with daemon:
            image = daemon.image(saved.url)
            free = os.statvfs(place)
            (place / "of others").write_bytes(bytes(free.f_bavail * free.f_frsize - 8 * MIB))
            assert saved.is_whole(image.reader(saved.pages).outcome())
            assert says_that_the_cache_is_lost(image, "No space")
            image.until_replaced(image.kill_worker())  # the next one begins anew with what is there
            assert saved.is_whole(image.reader(saved.pages).outcome())
            assert answers(daemon)
            calm(daemon)
    finally:
        while mountinfo.topmost(str(place)) is not None:
            subprocess.run(["umount", "--lazy", place], check=True)
        shutil.rmtree(daemon.base)
