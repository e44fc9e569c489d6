"""The directory of jobs: what a list says in the middle of what others do to it, and what a life leaves to the next."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from agent.node.course import Ending, Origin, Phase
from agent.node.jobs import IMAGE, NOTE, Job, JobDirectory

_IDS = [f"{n:08x}-1111-4111-8111-111111111111" for n in range(3)]
# What asks the disk for anything (docs.python.org/3/library/audit_events.html).
_CALLS = ("open", "os.", "shutil.")
_hook: Callable[[str], None] | None = None


def _audit(event: str, _: tuple[object, ...]) -> None:
    if _hook is not None and event.startswith(_CALLS):
        _hook(event)


sys.addaudithook(_audit)  # for good: it can't be taken away again, and is nothing without `_hook`


@contextmanager
def at_each_call(look: Callable[[], None]) -> Iterator[list[str]]:
    """Call `look` before each call to the disk, as a thread that runs just then would; gives these calls."""
    calls: list[str] = []

    def hook(event: str) -> None:
        global _hook
        _hook = None
        calls.append(event)
        look()
        _hook = hook

    global _hook
    _hook = hook
    try:
        yield calls
    finally:
        _hook = None


def job(number: int, phase: Phase = Phase.BEGUN) -> Job:
    return Job(
        job_id=_IDS[number],
        sandbox_id="sandbox",
        origin=Origin.WORKLOAD if phase is Phase.ARMED else Origin.MANUAL,
        ending=Ending.RESUME,
        store_url="file:///store",
        snapshot_id=_IDS[number],
        push_id=_IDS[number],
        phase=phase,
    )


@pytest.fixture
def jobs(tmp_path: Path) -> JobDirectory:
    found = JobDirectory(tmp_path / "jobs")
    found.write(job(0))
    return found


COMMITTED = replace(job(1), phase=Phase.COMMITTED)
STEPS: dict[str, tuple[Callable[[JobDirectory], object], Callable[[JobDirectory], object], list[Job], list[Job]]] = {
    "begun": (lambda _: None, lambda jobs: jobs.write(job(1)), [], [job(1)]),
    "armed": (lambda _: None, lambda jobs: jobs.arm(job(1, Phase.ARMED)), [], [job(1, Phase.ARMED)]),
    "noted again": (lambda jobs: jobs.write(job(1)), lambda jobs: jobs.write(COMMITTED), [job(1)], [COMMITTED]),
    "discarded": (lambda jobs: jobs.write(job(1)), lambda jobs: jobs.discard(job(1)), [job(1)], []),
    "an image discarded": (
        lambda jobs: (jobs.arm(job(1, Phase.ARMED)) / "pages.img").write_text("x"),
        lambda jobs: jobs.discard(job(1)),
        [job(1, Phase.ARMED)],
        [],
    ),
}


@pytest.mark.parametrize("step", STEPS)
def test_whoever_lists_the_jobs_sees_each_as_it_is_or_not_at_all(jobs: JobDirectory, step: str) -> None:
    prepare, act, before, after = STEPS[step]
    prepare(jobs)
    seen = []

    def look() -> None:
        found, problems = jobs.jobs()
        assert problems == ()
        assert found[0] == job(0)
        assert [each for each in found[1:] if each.phase is Phase.ARMED and not jobs.image(each).is_dir()] == []
        seen.append(list(found[1:]))

    with at_each_call(look) as calls:
        act(jobs)
    look()
    assert len(calls) >= 3
    turn = seen.index(after)
    assert seen[:turn] == [before] * turn
    assert seen[turn:] == [after] * (len(seen) - turn)


@pytest.mark.parametrize("step", STEPS)
def test_so_does_whoever_is_in_the_middle_of_it(tmp_path: Path, step: str) -> None:
    prepare, act, before, after = STEPS[step]
    moment, has_come = 0, True
    while has_come:
        jobs = JobDirectory(tmp_path / str(moment))
        jobs.write(job(0))
        prepare(jobs)
        come = iter([False] * moment + [True])

        def meanwhile(jobs: JobDirectory = jobs, come: Iterator[bool] = come) -> None:
            if next(come, False):
                act(jobs)

        with at_each_call(meanwhile):
            found, problems = jobs.jobs()
        has_come = next(come, None) is None
        assert problems == ()
        assert list(found) in ([job(0), *before], [job(0), *after])
        moment += 1
    assert moment > 2


@pytest.mark.parametrize("step", STEPS)
def test_a_life_that_ends_at_any_call_leaves_the_next_one_a_job_or_none(tmp_path: Path, step: str) -> None:
    prepare, act, before, after = STEPS[step]

    class Killed(BaseException):
        pass

    dies_at = 0
    is_killed = True
    while is_killed:
        jobs = JobDirectory(tmp_path / str(dies_at))
        jobs.write(job(0))
        prepare(jobs)
        left = dies_at

        def die() -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed

        is_killed = False
        try:
            with at_each_call(die):
                act(jobs)
        except Killed:
            is_killed = True
        jobs.sweep()
        found, problems = jobs.jobs()
        assert problems == ()
        assert list(found) in ([job(0), *before], [job(0), *after])
        assert sorted(path.name for path in jobs.path.iterdir()) == sorted(each.job_id for each in found)
        dies_at += 1
    assert dies_at >= 3


def test_a_view_has_its_own_job_and_no_other(jobs: JobDirectory) -> None:
    jobs.write(job(1))
    assert jobs.alone(job(1)).jobs() == ((job(1),), ())
    assert jobs.jobs() == ((job(0), job(1)), ())


def test_what_is_no_job_is_told_of_or_left_alone(jobs: JobDirectory) -> None:
    (jobs.path / _IDS[1] / IMAGE).mkdir(parents=True)
    jobs.write(job(2))
    (jobs.path / _IDS[2] / NOTE).write_text("{")
    for name in (".", "..", ".hidden", "lost+found"):
        (jobs.path / name).mkdir(exist_ok=True)
    jobs.sweep()
    found, problems = jobs.jobs()
    assert found == (job(0),)
    assert [problem.path for problem in problems] == [jobs.path / _IDS[n] / NOTE for n in (1, 2)]
    assert {".hidden", "lost+found"} < {path.name for path in jobs.path.iterdir()}
