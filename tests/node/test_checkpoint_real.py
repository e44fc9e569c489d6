"""Saves of real sandboxes: what the application sees, what is left, and what a restored copy goes on with."""

import os
import threading
from pathlib import Path

import pytest
import trio

from agent.node.checkpoint import Saver, StoreUploader
from agent.node.course import Ending, Reason, Step
from agent.node.jobs import JobDirectory
from agent.node.sandbox import RunscSandbox
from agent.runtime.runsc import Runsc
from bench.server import NoAnswer
from streamd.save.pull import pull
from streamd.store.catalog import open_snapshot
from streamd.store.opening import open_store
from tests.node.conftest import NewJob, Pod, Programs, small_disk

# Counts, and says every number. A heap makes its save last.
TICKER = """
import time
heap = [bytes([1 + n % 255]) * (1 << 20) for n in range({mib})]
n = 0
while True:
    print(n)
    n += 1
    time.sleep(0.005)
"""


def ticks_to_the_end(pod: Pod) -> list[int]:
    """Give all numbers that a sandbox that has ended said and nobody has read yet."""
    numbers = []
    while True:
        try:
            numbers.append(int(pod.server.receive(timeout_s=60)))
        except NoAnswer:
            return numbers


@pytest.fixture
def jobs(tmp_path: Path) -> JobDirectory:
    return JobDirectory(tmp_path / "jobs")


def saver(jobs: JobDirectory, runsc: Runsc) -> Saver:
    return Saver(jobs, StoreUploader(open_store, deadline_s=5), has_whole_state=runsc.has_whole_state)


async def test_a_pod_that_is_saved_goes_on_and_its_snapshot_is_in_the_store(
    programs: Programs, runsc: Runsc, jobs: JobDirectory, new_job: NewJob
) -> None:
    pod = programs.start(programs.container(TICKER.format(mib=1)))
    assert pod.server.receive(timeout_s=60) == "0"
    job = new_job(pod.sandbox_id)
    outcome = await saver(jobs, runsc).save(job, RunscSandbox(runsc, pod.sandbox_id))
    assert (outcome.course.step, outcome.course.failure) == (Step.DONE, None)
    assert runsc.state(pod.sandbox_id).status == "running"
    for expected in range(1, 400):
        assert int(pod.server.receive(timeout_s=60)) == expected
    store = open_store(job.store_url)
    assert open_snapshot(store, job.snapshot_id).manifest.metadata == job.metadata
    store.close()
    assert list(jobs.path.iterdir()) == []


async def test_nothing_of_a_stopped_pod_runs_twice_nor_is_left_out_and_it_ends_well(
    programs: Programs, runsc: Runsc, jobs: JobDirectory, new_job: NewJob, tmp_path: Path
) -> None:
    container = programs.container(TICKER.format(mib=32))
    pod = programs.start(container)
    assert pod.server.receive(timeout_s=60) == "0"
    with runsc.waiter(pod.sandbox_id) as waiter:
        job = new_job(pod.sandbox_id, ending=Ending.STOP)
        outcome = await saver(jobs, runsc).save(job, RunscSandbox(runsc, pod.sandbox_id))
        assert (outcome.course.step, outcome.course.failure) == (Step.DONE, None)
        # The pod "completes": what its containers' shims see is the end of a program that did its work.
        assert waiter.result(timeout_s=60) == 0
    first_life = ticks_to_the_end(pod)
    store = open_store(job.store_url)
    pull(store, job.snapshot_id, tmp_path / "pulled")
    store.close()
    copy = programs.restore(container, tmp_path / "pulled")
    second_life = [int(copy.server.receive(timeout_s=60)) for _ in range(50)]
    numbers = [0, *first_life, *second_life]
    assert numbers == list(range(len(numbers)))
    assert list(jobs.path.iterdir()) == []


@pytest.mark.parametrize("ending", Ending)
async def test_a_full_disk_fails_the_save_and_the_pod_goes_on(
    ending: Ending, programs: Programs, runsc: Runsc, new_job: NewJob, tmp_path: Path
) -> None:
    pod = programs.start(programs.container(TICKER.format(mib=16)))
    assert pod.server.receive(timeout_s=60) == "0"
    with small_disk(tmp_path / "small", 4 << 20) as disk:
        jobs = JobDirectory(disk / "jobs")
        job = new_job(pod.sandbox_id, ending=ending)
        outcome = await saver(jobs, runsc).save(job, RunscSandbox(runsc, pod.sandbox_id))
        assert outcome.course.failure is not None
        assert (outcome.course.step, outcome.course.failure.reason) == (Step.FAILED, Reason.DISK_FULL)
        assert list(jobs.path.iterdir()) == []
    assert runsc.state(pod.sandbox_id).status == "running"
    for expected in range(1, 400):
        assert int(pod.server.receive(timeout_s=60)) == expected


def when_it_saves(jobs: JobDirectory, act: threading.Event) -> threading.Thread:
    """Set the event when a save has begun to write."""

    def watch() -> None:
        for _ in range(60_000):
            if any(path.stat().st_size for path in jobs.path.glob("*/image/pages.img")):
                break
            threading.Event().wait(0.001)
        act.set()

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


async def test_a_sandbox_that_dies_while_it_is_saved_is_reported_as_ended(
    programs: Programs, runsc: Runsc, jobs: JobDirectory, new_job: NewJob
) -> None:
    pod = programs.start(programs.container(TICKER.format(mib=128)))
    assert pod.server.receive(timeout_s=60) == "0"
    pid, begun = runsc.state(pod.sandbox_id).pid, threading.Event()
    watcher = when_it_saves(jobs, begun)

    def kill() -> None:
        begun.wait()
        os.kill(pid, 9)

    killer = threading.Thread(target=kill)
    killer.start()
    job = new_job(pod.sandbox_id, ending=Ending.STOP)
    outcome = await saver(jobs, runsc).save(job, RunscSandbox(runsc, pod.sandbox_id))
    watcher.join()
    killer.join()
    assert outcome.course.failure is not None
    assert (outcome.course.step, outcome.course.failure.reason) == (Step.FAILED, Reason.POD_ENDED)
    assert outcome.job.attempt == 0
    assert list(jobs.path.iterdir()) == []


@pytest.mark.parametrize("ending", Ending)
async def test_a_save_that_is_cancelled_leaves_a_pod_that_runs_and_no_image(
    ending: Ending, programs: Programs, runsc: Runsc, jobs: JobDirectory, new_job: NewJob
) -> None:
    pod = programs.start(programs.container(TICKER.format(mib=128)))
    assert pod.server.receive(timeout_s=60) == "0"
    begun = threading.Event()
    watcher = when_it_saves(jobs, begun)
    job = new_job(pod.sandbox_id, ending=ending)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(saver(jobs, runsc).save, job, RunscSandbox(runsc, pod.sandbox_id))
        await trio.to_thread.run_sync(begun.wait)
        nursery.cancel_scope.cancel()
    watcher.join()
    assert list(jobs.path.iterdir()) == []
    assert runsc.state(pod.sandbox_id).status == "running"
    for expected in range(1, 400):
        assert int(pod.server.receive(timeout_s=60)) == expected


async def test_a_pod_that_somebody_has_paused_is_not_saved_and_stays_paused(
    programs: Programs, runsc: Runsc, jobs: JobDirectory, new_job: NewJob
) -> None:
    pod = programs.start(programs.container(TICKER.format(mib=1)))
    assert pod.server.receive(timeout_s=60) == "0"
    runsc.pause(pod.sandbox_id)
    outcome = await saver(jobs, runsc).save(new_job(pod.sandbox_id), RunscSandbox(runsc, pod.sandbox_id))
    assert outcome.course.failure is not None
    assert outcome.course.failure.reason is Reason.NOT_RUNNING
    assert runsc.state(pod.sandbox_id).status == "paused"
