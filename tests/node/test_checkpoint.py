"""A save whose steps fail: what is reported, what becomes of the pod, what is left on the disk."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.node.checkpoint import MAX_ATTEMPTS, REASONS, Outcome, PreflightFailed, Saver, StoreUploader
from agent.node.course import Ending, Found, Origin, Phase, Reason, Step
from agent.node.jobs import JobDirectory
from agent.runtime.failures import FailureKind
from bench.faults import Fail, Fault, FaultyStore
from bench.pods import Image
from streamd.errors import StoreErrorKind
from streamd.store.opening import open_store
from streamd.store.port import Store
from tests.node.conftest import NewJob, copy_image
from tests.node.fake_pod import FakePod

# A step of the pod's that fails once and for all, what of, and what that is called.
BAD_DAYS: dict[str, tuple[str, FailureKind, Reason]] = {
    "the pod ends before": ("await_loaded", FailureKind.SANDBOX_GONE, Reason.POD_ENDED),
    "the pod ends half-way": ("save-half", FailureKind.SANDBOX_GONE, Reason.POD_ENDED),
    "the disk is full": ("save-half", FailureKind.NO_SPACE, Reason.DISK_FULL),
    "the disk is broken": ("save-half", FailureKind.IO, Reason.DISK),
    "the GPU's tool fails": ("save", FailureKind.GPU_TOOL, Reason.GPU_TOOL),
    "gVisor fails": ("save", FailureKind.UNKNOWN, Reason.SAVE_FAILED),
    "a file is in the way": ("save", FailureKind.FILE_EXISTS, Reason.SAVE_FAILED),
}


@pytest.fixture
def jobs(tmp_path: Path) -> JobDirectory:
    return JobDirectory(tmp_path / "jobs")


@pytest.fixture
def pod(tmp_path: Path, small_image: Image) -> FakePod:
    return FakePod(tmp_path / "pod", small_image.directory)


def saver(jobs: JobDirectory, opened: Callable[[str], Store] = open_store, *, whole: bool = True) -> Saver:
    return Saver(jobs, StoreUploader(opened, deadline_s=0.2), has_whole_state=lambda _: whole)


def reason(outcome: Outcome) -> Reason | None:
    return None if outcome.course.failure is None else outcome.course.failure.reason


@pytest.mark.parametrize("ending", Ending)
@pytest.mark.parametrize("day", BAD_DAYS)
async def test_a_bad_day_is_told_by_its_reason_and_leaves_nothing(
    day: str, ending: Ending, pod: FakePod, jobs: JobDirectory, new_job: NewJob
) -> None:
    at, kind, expected = BAD_DAYS[day]
    pod.fails[at] = [kind] * MAX_ATTEMPTS
    outcome = await saver(jobs).save(new_job(ending=ending), pod)
    assert (outcome.course.step, reason(outcome)) == (Step.FAILED, expected)
    assert pod.now is (Found.GONE if kind is FailureKind.SANDBOX_GONE else Found.RUNNING)
    assert not jobs.path.exists() or list(jobs.path.iterdir()) == []


async def test_a_pause_that_fails_after_it_took_effect_is_undone(
    pod: FakePod, jobs: JobDirectory, new_job: NewJob
) -> None:
    pod.fails["pause!"] = [FailureKind.UNKNOWN] * MAX_ATTEMPTS
    outcome = await saver(jobs).save(new_job(ending=Ending.STOP), pod)
    assert reason(outcome) is Reason.SAVE_FAILED
    assert pod.now is Found.RUNNING


async def test_what_may_pass_is_tried_again_and_counted(pod: FakePod, jobs: JobDirectory, new_job: NewJob) -> None:
    pod.fails["save-half"] = [FailureKind.UNKNOWN] * (MAX_ATTEMPTS - 1)
    outcome = await saver(jobs).save(new_job(ending=Ending.STOP), pod)
    assert (outcome.course.step, outcome.job.attempt) == (Step.DONE, MAX_ATTEMPTS - 1)
    pod.fails["save-half"] = [FailureKind.UNKNOWN] * (MAX_ATTEMPTS + 1)
    pod.state.write_text(Found.RUNNING)
    outcome = await saver(jobs).save(new_job(ending=Ending.STOP), pod)
    assert (outcome.course.step, outcome.job.attempt) == (Step.FAILED, MAX_ATTEMPTS - 1)


async def test_a_pod_that_is_not_fit_to_be_saved_is_not_touched(
    pod: FakePod, jobs: JobDirectory, new_job: NewJob
) -> None:
    async def refuse() -> None:
        raise PreflightFailed("needs 90 GiB, may use 64")

    outcome = await saver(jobs).save(new_job(), pod, preflight=refuse)
    assert outcome.course.failure is not None
    assert (outcome.course.failure.reason, outcome.course.failure.message) == (
        Reason.PREFLIGHT,
        "needs 90 GiB, may use 64",
    )
    assert not jobs.path.exists()


@pytest.mark.parametrize("harm", ["cut pages", "cut graph", "no pages"])
async def test_an_image_that_is_not_whole_ends_no_pod(
    harm: str, pod: FakePod, jobs: JobDirectory, new_job: NewJob, image_copy: Path
) -> None:
    pod.image = image_copy
    match harm:
        case "cut pages":
            os.truncate(image_copy / "pages.img", (image_copy / "pages.img").stat().st_size - 4096)
        case "no pages":
            (image_copy / "pages_meta.img").unlink()
    outcome = await saver(jobs, whole=harm != "cut graph").save(new_job(ending=Ending.STOP), pod)
    assert (outcome.course.step, reason(outcome)) == (Step.FAILED, Reason.VERIFICATION)
    assert pod.now is Found.RUNNING
    assert list(jobs.path.iterdir()) == []


async def test_a_pod_that_somebody_resumed_during_its_save_is_not_ended(
    pod: FakePod, jobs: JobDirectory, new_job: NewJob
) -> None:
    def resume_meanwhile(_: Path) -> bool:
        pod.state.write_text(Found.RUNNING)
        return True

    meddled = Saver(jobs, StoreUploader(open_store), has_whole_state=resume_meanwhile)
    outcome = await meddled.save(new_job(ending=Ending.STOP), pod)
    assert reason(outcome) is Reason.NOT_RUNNING
    assert pod.now is Found.RUNNING


@pytest.mark.parametrize("kind", [StoreErrorKind.TRANSIENT, StoreErrorKind.CREDENTIALS])
@pytest.mark.parametrize("ending", Ending)
async def test_while_the_store_is_down_or_there_is_no_token_the_image_is_kept_and_a_later_round_pushes_it(
    ending: Ending, kind: StoreErrorKind, pod: FakePod, jobs: JobDirectory, new_job: NewJob
) -> None:
    job = new_job(ending=ending)
    faulty = FaultyStore(open_store(job.store_url))
    down = faulty.add(Fault(Fail(kind), operation="put", times=None))
    outcome = await saver(jobs, lambda _: faulty).save(job, pod)
    assert (outcome.course.step, reason(outcome)) == (Step.PENDING, Reason.STORE_UNAVAILABLE)
    assert pod.now is (Found.GONE if ending is Ending.STOP else Found.RUNNING)
    faulty.remove(down)
    (again,) = await saver(jobs).recover(lambda _: pod)
    assert (again.course.step, again.pushed is not None) == (Step.DONE, True)
    assert list(jobs.path.iterdir()) == []


async def test_a_store_that_refuses_costs_a_stopped_pod_nothing_and_a_running_one_its_image_only(
    pod: FakePod, jobs: JobDirectory, new_job: NewJob
) -> None:
    for ending, step in ((Ending.RESUME, Step.FAILED), (Ending.STOP, Step.PENDING)):
        pod.state.write_text(Found.RUNNING)
        job = new_job(ending=ending)
        faulty = FaultyStore(open_store(job.store_url))
        faulty.add(Fault(Fail(StoreErrorKind.FORBIDDEN), operation="put", times=None))
        outcome = await saver(jobs, lambda _, store=faulty: store).save(job, pod)  # type: ignore[misc]
        assert (outcome.course.step, reason(outcome)) == (step, Reason.STORE_REFUSED)
        assert jobs.image(job).exists() == (ending is Ending.STOP)


async def test_an_image_that_its_sandbox_wrote_is_pushed(pod: FakePod, jobs: JobDirectory, new_job: NewJob) -> None:
    for ending in Ending:
        job = new_job(ending=ending, origin=Origin.WORKLOAD, phase=Phase.ARMED)
        copy_image(pod.image, jobs.arm(job))
        outcome = await saver(jobs).save(job, pod)
        assert (outcome.course.step, outcome.job.attempt) == (Step.DONE, 0)
    assert pod.now is Found.GONE


async def test_a_round_leaves_alone_what_is_under_way_or_waited_for(
    pod: FakePod, jobs: JobDirectory, new_job: NewJob
) -> None:
    rounds: list[tuple[Outcome, ...]] = []
    armed = new_job(origin=Origin.WORKLOAD, phase=Phase.ARMED)
    copy_image(pod.image, jobs.arm(armed))

    class Looking(FakePod):
        async def pause(self) -> None:
            await FakePod.pause(self)
            rounds.append(await saving.recover(lambda _: pod, waited_for={armed.job_id}))

    saving = saver(jobs)
    outcome = await saving.save(new_job(ending=Ending.STOP), Looking(pod.state, pod.image))
    assert outcome.course.step is Step.DONE
    assert rounds == [()]
    assert [job.job_id for job in jobs.jobs()[0]] == [armed.job_id]


async def test_a_note_that_can_not_be_read_is_left_and_hides_no_other(
    pod: FakePod, jobs: JobDirectory, new_job: NewJob
) -> None:
    broken, strange, good = new_job(), new_job(), new_job(ending=Ending.STOP)
    for job in (broken, strange, good):
        jobs.write(job)
    (jobs.path / broken.job_id / "job.json").write_text('{"version": 1, "job_id"')
    note = jobs.path / strange.job_id / "job.json"
    note.write_text(json.dumps(json.loads(note.read_text()) | {"job_id": "../../etc"}))
    (jobs.path / "lost+found").mkdir()
    pod.state.write_text(Found.PAUSED)
    (outcome,) = await saver(jobs).recover(lambda _: pod)
    assert (outcome.job.job_id, pod.now) == (good.job_id, Found.RUNNING)
    left = {path.name for path in jobs.path.iterdir()}
    assert left == {broken.job_id, strange.job_id, "lost+found"}
    found, problems = jobs.jobs()
    assert (found, len(problems)) == ((), 2)


def test_every_failure_of_a_sandbox_has_a_name_in_conditions() -> None:
    assert set(REASONS) <= set(FailureKind)
    assert {reason for _, _, reason in BAD_DAYS.values()} >= set(REASONS.values()) - {Reason.NOT_RUNNING}
