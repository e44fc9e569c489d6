"""Mounts outlive their servers: workers killed, stopped and dying in every moment, under readers like runsc's.

What a reader may notice is a pause. Real daemons, real mounts; `tests/stress/test_kill_matrix.py` does it many times.
"""

import random
import signal
import subprocess
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from bench.daemons import Daemon, ServedImage
from bench.event_tape import until
from bench.fault_proxy import FaultProxy, Hang, Rule
from bench.mount_users import GONE, FileHolder
from streamd.daemon.images import DEATHS_MAX

if TYPE_CHECKING:
    from tests.daemon.conftest import Saved

Calm = Callable[[Daemon], None]

MIB = 1 << 20
# Some 28 MB are stored: a reader needs seconds, and every kill below finds its reads in flight.
SLOW_MB_PER_S = 8
# Nothing here takes a tenth of it.
AT_ONCE_S = 10.0


def let_it_hang(proxy: FaultProxy, *, reads_only: bool = True) -> Rule:
    """Let every request to the store hang from now on."""
    return proxy.add(Rule(Hang(), times=None, reads_only=reads_only))


def warnings(daemon: Daemon) -> list[str]:
    """Give what the daemon says that it can't do."""
    found = daemon.client.health()["warnings"]
    assert isinstance(found, list)
    return found


def kill_every_worker(image: ServedImage) -> list[int]:
    """Kill each worker as soon as it is known, until the image has failed; give their pids."""
    killed: list[int] = []

    def has_failed() -> bool:
        state = image.state()
        pid = state["worker_pid"]
        if pid not in (None, *killed):
            killed.append(pid)
            image.daemon.send(pid, signal.SIGKILL)
        assert len(killed) <= 4 * DEATHS_MAX, "it goes on and on"
        return bool(state["state"] == "failed")

    until(has_failed, "the end of a crash loop")
    return killed


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_worker_killed_at_random_moments_is_replaced_and_readers_notice_a_pause(
    daemon: Daemon, saved: "Saved", calm: Calm, seed: int
) -> None:
    dice = random.Random(seed)
    image = daemon.image(saved.slow(SLOW_MB_PER_S))
    before = image.mounts()
    reader = image.reader(saved.pages)
    image.until_open(reader)
    for number in range(1, 4):
        time.sleep(dice.uniform(0.0, 0.5))
        assert not reader.is_done()
        image.kill_worker()
        daemon.tape.until("worker-replaced", image=image.id, count=number)
    assert saved.is_whole(reader.outcome())
    assert image.mounts() == before
    assert len(before) == 1
    assert image.state()["restarts"] == 3
    assert [event["facts"]["how"] for event in daemon.tape.of("worker-lost", image=image.id)] == ["died"] * 3
    assert len({event["facts"]["pid"] for event in daemon.tape.of("worker-replaced", image=image.id)}) == 3
    calm(daemon)


def test_what_was_cached_is_not_fetched_again_by_the_next_worker(
    behind_proxy: Daemon, uploaded: "Saved", proxy: FaultProxy, calm: Calm
) -> None:
    image = behind_proxy.image(uploaded.url)
    half = uploaded.pages.stat().st_size // 2
    for _ in range(2):
        assert image.reader(uploaded.pages, end=half).outcome().is_clean
        image.until_cached(uploaded.resident_bytes(half))
        image.until_replaced(image.kill_worker())
    # The next worker has the snapshot from the last one, too: all that is asked for is what is missing.
    assert uploaded.is_whole(image.reader(uploaded.pages).outcome())
    assert proxy.read_bytes <= 1.02 * uploaded.stored_bytes
    image.until(lambda state: state["bytes_by_tier"]["origin"] > 0.95 * uploaded.stored_bytes, "the sum over workers")
    assert image.state()["bytes_by_tier"]["origin"] <= 1.02 * uploaded.stored_bytes
    calm(behind_proxy)


def test_a_configuration_that_was_broken_since_keeps_no_worker_from_taking_over(
    daemon: Daemon, saved: "Saved", calm: Calm
) -> None:
    image = daemon.image(saved.url)
    daemon.config.write_text("this is no TOML")
    image.until_replaced(image.kill_worker())
    assert saved.is_whole(image.reader(saved.pages).outcome())
    assert image.state()["restarts"] == 1
    calm(daemon)


def test_a_worker_that_stops_answering_is_noticed_and_replaced(daemon: Daemon, saved: "Saved", calm: Calm) -> None:
    image = daemon.image(saved.slow(SLOW_MB_PER_S))
    reader = image.reader(saved.pages)
    image.until_open(reader)
    image.kill_worker(signal.SIGSTOP)
    # Not in the kernel's memory, so a worker has to answer: `ls` of what was never listed, statfs always.
    asked = [daemon.run("ls", "-la", image.mountpoint), daemon.run("stat", "-f", image.mountpoint)]
    [lost] = daemon.tape.until("worker-lost", image=image.id)
    assert lost["facts"]["how"] == "hung"
    for command in asked:
        result = command.result()
        assert (result.returncode, result.stderr) == (0, "")
    assert saved.is_whole(reader.outcome())
    assert image.state()["restarts"] == 1
    calm(daemon)


def test_ls_and_stat_wait_while_nobody_serves_and_are_answered_then(daemon: Daemon, saved: "Saved") -> None:
    image = daemon.image(saved.url)
    assert daemon.run("stat", "-f", image.mountpoint).result().returncode == 0
    pid = image.kill_worker(signal.SIGSTOP)
    asked = [daemon.run("ls", "-la", image.mountpoint), daemon.run("stat", "-f", image.mountpoint)]
    for command in asked:
        until(command.waits_for_a_mount, "a question to the worker", limit_s=AT_ONCE_S)
    daemon.send(pid, signal.SIGKILL)
    listed, status = (command.result() for command in asked)
    assert (listed.returncode, status.returncode) == (0, 0), (listed, status)
    assert "pages.img" in listed.stdout
    [lost] = daemon.tape.until("worker-lost", image=image.id)
    assert lost["facts"]["how"] in ("died", "hung")


def test_a_worker_killed_while_it_prepares_is_replaced(
    behind_proxy: Daemon, uploaded: "Saved", proxy: FaultProxy, calm: Calm
) -> None:
    hang = let_it_hang(proxy, reads_only=False)
    image = behind_proxy.request(uploaded.url)
    for _ in range(2):
        until(lambda: proxy.hanging, "a worker that asks the store")
        assert image.state()["state"] == "preparing"
        image.until_replaced(image.kill_worker())
    proxy.remove(hang)
    image.until_served()
    assert uploaded.is_whole(image.reader(uploaded.pages).outcome())
    calm(behind_proxy)


@pytest.mark.parametrize("is_stopped", [False, True], ids=["killed", "stopped"])
def test_a_worker_may_die_before_its_first_answer(daemon: Daemon, saved: "Saved", calm: Calm, is_stopped: bool) -> None:
    """The mount is there, and the kernel's first request may have been answered or not."""
    image = daemon.request(saved.url)
    until(image.mounts, "the mount")
    image.kill_worker(signal.SIGSTOP if is_stopped else signal.SIGKILL)
    assert saved.is_whole(image.reader(saved.pages).outcome())
    assert image.state()["state"] == "serving"
    calm(daemon)


def test_workers_that_die_one_after_another_while_they_prepare_end_the_image(
    behind_proxy: Daemon, uploaded: "Saved", proxy: FaultProxy, calm: Calm
) -> None:
    let_it_hang(proxy, reads_only=False)
    image = behind_proxy.request(uploaded.url)
    killed = kill_every_worker(image)
    assert len(killed) <= 2 * DEATHS_MAX
    assert set(behind_proxy.process_ids()).isdisjoint(killed)
    assert image.mounts() == []
    proxy.clear()
    behind_proxy.image(uploaded.url)  # tried again when it is asked for
    calm(behind_proxy)


def test_the_next_worker_may_die_in_the_middle_of_the_takeover(daemon: Daemon, saved: "Saved", calm: Calm) -> None:
    image = daemon.image(saved.slow(SLOW_MB_PER_S))
    before = image.mounts()
    reader = image.reader(saved.pages)
    image.until_open(reader)
    pid = image.kill_worker()
    for _ in range(3):
        pid = image.until_replaced(pid)
        daemon.send(pid, signal.SIGKILL)
    assert saved.is_whole(reader.outcome())
    assert image.mounts() == before
    [replaced, *_] = daemon.tape.until("worker-replaced", image=image.id)
    assert replaced["facts"]["restarts"] >= 1
    calm(daemon)


def test_workers_that_die_one_after_another_end_the_image_and_its_reads(
    daemon: Daemon, saved: "Saved", calm: Calm
) -> None:
    image = daemon.image(saved.slow(1))
    reader = image.reader(saved.pages)
    image.until_open(reader)
    killed = kill_every_worker(image)
    assert len(killed) <= DEATHS_MAX + 1
    outcome = reader.outcome()
    assert {name for _, name in outcome.errors} <= GONE
    assert outcome.errors
    assert outcome.wrong == outcome.short == []
    assert image.mounts() == []
    state = image.state()
    assert state["last_error"]["kind"] == "worker-lost"
    assert state["worker_pid"] is None
    assert set(daemon.process_ids()) == {daemon.pid, daemon.spawner_pid()}
    assert any(image.id in warning for warning in warnings(daemon))
    [failed] = daemon.tape.until("image-failed", image=image.id)
    assert failed["facts"]["reason"] == state["last_error"]["message"]
    # Not for ever: whoever asks again gets a new one.
    assert daemon.image(saved.slow(1)).id == image.id
    calm(daemon)


@pytest.mark.parametrize("outage", ["refused", "hang"])
def test_a_takeover_needs_no_store_and_serves_what_is_cached(
    behind_proxy: Daemon, uploaded: "Saved", proxy: FaultProxy, calm: Calm, outage: str
) -> None:
    image = behind_proxy.image(uploaded.url)
    half = uploaded.pages.stat().st_size // 2
    assert image.reader(uploaded.pages, end=half).outcome().is_clean
    image.until_cached(uploaded.resident_bytes(half))
    if outage == "refused":
        proxy.refuse()
    else:
        let_it_hang(proxy, reads_only=False)
    waiting = image.reader(uploaded.pages, start=half)
    image.until_open(waiting)
    image.kill_worker()
    cached = image.reader(uploaded.pages, end=half).outcome(AT_ONCE_S)
    assert cached.is_clean
    assert cached.right_bytes == half
    listed = behind_proxy.run("ls", "-la", image.mountpoint).result(AT_ONCE_S)
    assert listed.returncode == 0
    assert not waiting.is_done()
    proxy.clear()
    proxy.accept()
    rest = waiting.outcome()
    assert rest.is_clean
    assert rest.right_bytes == uploaded.pages.stat().st_size - half
    calm(behind_proxy)


def test_a_file_that_was_open_before_is_read_closed_and_opened_again_after(daemon: Daemon, saved: "Saved") -> None:
    image = daemon.image(saved.url)
    holder, other = image.holder(), image.holder()
    assert [holder.open(), other.open()] == ["done"] * 2
    places = [0, 3 * MIB + 5, saved.pages.stat().st_size - MIB]
    right = [FileHolder.digest(saved.pages, offset, MIB) for offset in places]
    assert holder.read(places[0], MIB) == right[0]
    image.until(lambda state: len(state["openers"]) == 2, "two openers")
    before = {opener["handle"]: opener["pid"] for opener in image.state()["openers"]}
    image.until_replaced(image.kill_worker())
    assert [holder.read(offset, MIB) for offset in places] == right
    assert [other.read(offset, MIB) for offset in places] == right
    # The next worker was told who has which file open.
    after = image.until(lambda state: len(state["openers"]) == 2, "the same two openers")
    assert {opener["handle"]: opener["pid"] for opener in after["openers"]} == before
    assert [holder.close(), holder.open()] == ["done"] * 2
    assert [holder.read(offset, MIB) for offset in places] == right
    assert [holder.close(), other.close()] == ["done"] * 2
    image.until(lambda state: not state["openers"], "no opener")


def test_workers_serve_on_when_the_supervisor_is_killed_and_end_when_nobody_uses_them(
    daemon: Daemon, saved: "Saved", sixteen: list["Saved"]
) -> None:
    image = daemon.image(saved.slow(4))
    before = image.mounts()
    reader = image.reader(saved.pages)
    image.until_open(reader)
    pid = image.worker_pid()
    daemon.stop(signal.SIGKILL)
    daemon.start()
    assert not reader.is_done()
    assert image.mounts() == before
    other = daemon.image(sixteen[0].url)
    assert sixteen[0].is_whole(other.reader(sixteen[0].pages, slots=8).outcome())
    assert [state["id"] for state in daemon.client.images()] == [other.id]
    assert saved.is_whole(reader.outcome())
    image.until_unmounted()
    until(lambda: pid not in daemon.process_ids(), "the end of the worker")
    assert saved.is_whole(daemon.image(saved.slow(100)).reader(saved.pages).outcome())


@pytest.mark.parametrize("is_used", [True, False], ids=["used", "unused"])
def test_an_orphan_that_hangs_hangs_nobody_else(daemon: Daemon, saved: "Saved", is_used: bool) -> None:
    """The next supervisor stats no mount of a former life: it would wait for its worker, for ever."""
    orphan = daemon.image(saved.url)
    holder = orphan.holder()
    if is_used:
        assert holder.open() == "done"
    pid = orphan.worker_pid()
    daemon.stop(signal.SIGKILL)
    daemon.send(pid, signal.SIGSTOP)
    daemon.start()
    again = daemon.image(saved.url)
    assert (again.mountpoint == orphan.mountpoint) is not is_used
    assert len(orphan.mounts()) == len(again.mounts()) == 1
    assert saved.is_whole(again.reader(saved.pages).outcome())
    daemon.send(pid, signal.SIGCONT)
    if is_used:
        assert holder.read(0, MIB) == FileHolder.digest(saved.pages, 0, MIB)
        assert holder.close() == "done"
        orphan.until_unmounted()
    until(lambda: pid not in daemon.process_ids(), "the end of the orphan")


def test_who_asks_for_what_an_orphan_serves_is_served_without_the_cache_and_who_comes_later_with_it(
    daemon: Daemon, saved: "Saved", calm: Calm
) -> None:
    """The orphan has the snapshot's place in the cache, as long as its sandboxes load."""
    orphan = daemon.image(saved.slow(4))
    reader = orphan.reader(saved.pages)
    orphan.until_open(reader)
    pid = orphan.worker_pid()
    daemon.stop(signal.SIGKILL)
    daemon.start()
    again = daemon.image(saved.slow(100))
    assert saved.is_whole(again.reader(saved.pages).outcome())
    state = again.until(lambda state: state["cache_problem"], "a word about the cache")
    assert f"{orphan.mountpoint} (pid {pid})" in state["cache_problem"]
    again.until_replaced(again.kill_worker())  # the next worker does as the last one did
    assert saved.is_whole(again.reader(saved.pages).outcome())
    assert saved.is_whole(reader.outcome())
    until(lambda: pid not in daemon.process_ids(), "the end of the orphan")
    again.until(lambda state: not state["openers"], "no opener")
    daemon.client.release(again.id)
    again.until_unmounted()
    daemon.tape.until("image-gone", image=again.id)
    later = daemon.image(saved.slow(100))
    assert saved.is_whole(later.reader(saved.pages).outcome())
    later.until_cached(saved.resident_bytes(saved.pages.stat().st_size))
    assert later.state()["cache_problem"] is None
    calm(daemon)


def test_a_worker_killed_when_there_is_no_supervisor_fails_its_reads_and_the_mount_is_cleaned_up(
    daemon: Daemon, saved: "Saved"
) -> None:
    """What an fd store is for: without one, nobody has the connection any more."""
    image = daemon.image(saved.slow(1))
    reader = image.reader(saved.pages)
    image.until_open(reader)
    pid = image.worker_pid()
    daemon.stop(signal.SIGKILL)
    daemon.send(pid, signal.SIGKILL)
    outcome = reader.outcome()
    assert {name for _, name in outcome.errors} <= GONE
    assert outcome.errors
    assert outcome.wrong == outcome.short == []
    daemon.start()
    image.until_unmounted()
    assert saved.is_whole(daemon.image(saved.slow(100)).reader(saved.pages).outcome())


def test_no_worker_stays_that_nobody_knows(behind_proxy: Daemon, uploaded: "Saved", proxy: FaultProxy) -> None:
    """One that prepares when its supervisor is killed has no mount that could end it."""
    let_it_hang(proxy, reads_only=False)
    image = behind_proxy.request(uploaded.url)
    image.worker_pid()
    until(lambda: proxy.hanging, "a worker that asks the store")
    behind_proxy.stop(signal.SIGKILL)
    until(lambda: not behind_proxy.process_ids(), "the end of all processes", limit_s=AT_ONCE_S)


def test_the_spawner_may_die(daemon: Daemon, saved: "Saved", sixteen: list["Saved"], calm: Calm) -> None:
    image = daemon.image(saved.slow(SLOW_MB_PER_S))
    reader = image.reader(saved.pages)
    image.until_open(reader)
    daemon.send(daemon.spawner_pid(), signal.SIGKILL)
    image.kill_worker()
    daemon.tape.until("worker-replaced", image=image.id)
    assert saved.is_whole(reader.outcome())
    small = daemon.image(sixteen[0].url)
    assert sixteen[0].is_whole(small.reader(sixteen[0].pages, slots=8).outcome())
    calm(daemon)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_daemon_without_a_manager_ends_its_images_with_itself(
    daemon: Daemon, saved: "Saved", sixteen: list["Saved"], number: signal.Signals, calm: Calm
) -> None:
    """As `streamd mount` does: it waits for open files for a while (here 1 s), then their reads fail."""
    used, unused = daemon.image(saved.slow(1)), daemon.image(sixteen[0].url)
    reader = used.reader(saved.pages)
    used.until_open(reader)
    assert daemon.stop(number) == 0
    outcome = reader.outcome()
    assert {name for _, name in outcome.errors} <= GONE
    assert outcome.errors
    assert used.mounts() == unused.mounts() == []
    until(lambda: not daemon.process_ids(), "the end of all processes")
    calm(daemon)


def test_a_reader_that_is_killed_while_a_worker_is_replaced_holds_nothing(daemon: Daemon, saved: "Saved") -> None:
    image = daemon.image(saved.slow(SLOW_MB_PER_S))
    reader = image.reader(saved.pages)
    image.until_open(reader)
    pid = image.kill_worker()
    subprocess.run(["kill", "-KILL", str(reader.pid)], check=True)
    image.until_replaced(pid)
    until(reader.is_done, "the reader's end")
    image.until(lambda state: not state["openers"], "no opener")
