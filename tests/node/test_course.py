"""The course of a save: every failure at every step, and an agent that dies at each, against a model of the pod."""

import itertools
from dataclasses import dataclass

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agent.node.course import (
    FINAL,
    PLANS,
    RETRIED,
    Course,
    Ending,
    Failure,
    Found,
    Origin,
    Phase,
    Reason,
    Step,
    Written,
    after,
    begin,
    resumed,
)

PAIRS = list(itertools.product(Origin, Ending))


@dataclass
class World:
    """What there is outside: a pod, an image, a note, a store. Steps change it as the real ones do."""

    pod: Found = Found.RUNNING
    image: Written = Written.NOTHING
    note: Phase | None = None
    in_store: bool = False

    def do(self, step: Step) -> None:
        match step:
            case Step.PREPARE:
                self.note = Phase.BEGUN
            case Step.PAUSE if self.pod is Found.RUNNING:
                self.pod = Found.PAUSED
            case Step.SAVE:
                self.image = Written.CLOSED
            case Step.COMMIT:
                self.note = Phase.COMMITTED
            case Step.END:
                self.pod = Found.GONE
            case Step.PUSH:
                self.in_store = True
            case Step.RESUME if self.pod is Found.PAUSED:
                self.pod = Found.RUNNING
            case Step.CLEAR | Step.DISCARD:
                self.image, self.note = Written.NOTHING, None

    def check(self, course: Course) -> None:
        """Check what must hold wherever a job has come to rest."""
        if course.step is not Step.PENDING:
            assert self.note is None
            assert self.image is Written.NOTHING
            assert self.pod is not Found.PAUSED
        if course.step is Step.PENDING:
            assert self.note is not None, "a next round would not know of it"
        if course.step is Step.DONE and course.failure is None:
            assert self.in_store or course.origin is Origin.WORKLOAD
        if course.ending is Ending.STOP and self.in_store:
            assert self.pod is Found.GONE, "it runs on after its snapshot"
        if course.ending is Ending.STOP and self.pod is Found.GONE:
            assert self.in_store or self.note is Phase.COMMITTED, "the pod was ended and its image lost"
        if course.ending is Ending.RESUME:
            assert self.pod is Found.RUNNING


def start(origin: Origin) -> World:
    if origin is Origin.WORKLOAD:
        return World(image=Written.CLOSED, note=Phase.ARMED)
    return World()


def walk(world: World, course: Course, fail_at: Step | None, reason: Reason, *, took_effect: bool) -> Course:
    steps = 0
    while course.step not in FINAL:
        steps += 1
        assert steps < 20
        fails = course.step is fail_at
        if not fails or took_effect:
            world.do(course.step)
        course = after(course, Failure(reason, "told to", course.step) if fails else None)
    return course


@pytest.mark.parametrize(("origin", "ending"), PAIRS)
def test_without_a_failure_the_snapshot_is_in_the_store_and_nothing_is_left(origin: Origin, ending: Ending) -> None:
    world = start(origin)
    course = walk(world, begin(origin, ending), None, Reason.SAVE_FAILED, took_effect=True)
    assert course.step is Step.DONE
    assert world.in_store
    assert world.pod is (Found.GONE if ending is Ending.STOP else Found.RUNNING)
    world.check(course)


@pytest.mark.parametrize("took_effect", [False, True], ids=["undone", "done-nevertheless"])
@pytest.mark.parametrize("reason", Reason)
@pytest.mark.parametrize("fail_at", [step for step in Step if step not in FINAL])
@pytest.mark.parametrize(("origin", "ending"), PAIRS)
def test_whatever_fails_the_pod_is_not_left_paused_and_no_image_is_lost_or_left(
    origin: Origin, ending: Ending, fail_at: Step, reason: Reason, took_effect: bool
) -> None:
    if fail_at is Step.CLEAR and not took_effect:
        return  # what could not be removed is what is left
    world = start(origin)
    course = walk(world, begin(origin, ending), fail_at, reason, took_effect=took_effect)
    world.check(course)
    if course.failure is not None:
        assert (course.failure.reason, course.failure.at) == (reason, fail_at)


@given(
    st.sampled_from(PAIRS), st.sampled_from([step for step in Step if step not in FINAL]), st.sampled_from(list(Reason))
)
@example((Origin.MANUAL, Ending.STOP), Step.RESUME, Reason.SAVE_FAILED)
def test_a_way_out_that_fails_too_keeps_the_note_for_the_next_round(
    pair: tuple[Origin, Ending], fail_at: Step, reason: Reason
) -> None:
    world, course = start(pair[0]), begin(*pair)
    while course.step not in FINAL:
        fails = course.step is fail_at or course.step in (Step.RESUME, Step.DISCARD)
        if not fails:
            world.do(course.step)
        course = after(course, Failure(reason, "told to", course.step) if fails else None)
    if course.step is Step.PENDING:
        assert world.note is not None or fail_at in (Step.PREPARE,)
    assert world.pod is not Found.PAUSED or world.note is not None


def die(world: World, course: Course, at: Step, *, fail_at: Step | None, after_it: bool) -> None:
    """Walk until the step `at`, which may be done, and leave everything as it is."""
    while course.step not in FINAL and course.step is not at:
        fails = course.step is fail_at
        world.do(course.step)
        course = after(course, Failure(Reason.SAVE_FAILED, "told to", course.step) if fails else None)
    if course.step is at and after_it:
        world.do(at)


@pytest.mark.parametrize("after_it", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("origin", "ending", "fail_at", "at"),
    [(*pair, None, step) for pair in PAIRS for step in PLANS[pair]]
    + [(*pair, fail_at, at) for pair in PAIRS for fail_at in PLANS[pair] for at in (Step.RESUME, Step.DISCARD)],
)
def test_an_agent_that_dies_at_any_step_is_finished_or_undone_by_the_next_one(
    origin: Origin, ending: Ending, fail_at: Step | None, at: Step, after_it: bool
) -> None:
    world = start(origin)
    die(world, begin(origin, ending), at, fail_at=fail_at, after_it=after_it)
    if world.note is None:
        world.check(Course(origin, ending, Step.FAILED))
        return
    again = resumed(origin, ending, world.note, world.pod, world.image)
    assert again is not None
    world.check(walk(world, again, None, Reason.SAVE_FAILED, took_effect=True))


@pytest.mark.parametrize("phase", [Phase.ARMED, Phase.BEGUN])
def test_a_triggered_image_is_not_lost_with_the_agent_nor_with_the_pod(phase: Phase) -> None:
    for pod in (Found.RUNNING, Found.GONE):
        world = World(pod, Written.CLOSED, phase)
        again = resumed(Origin.WORKLOAD, Ending.RESUME, phase, pod, Written.CLOSED)
        assert again is not None
        walk(world, again, None, Reason.SAVE_FAILED, took_effect=True)
        assert world.in_store


@pytest.mark.parametrize("pod", Found)
@pytest.mark.parametrize("ending", Ending)
def test_an_armed_pod_that_asked_for_nothing_is_waited_for_and_its_end_is_no_failure(
    ending: Ending, pod: Found
) -> None:
    course = resumed(Origin.WORKLOAD, ending, Phase.ARMED, pod, Written.NOTHING)
    if pod is not Found.GONE:
        assert course is None
        return
    assert course is not None
    assert (course.step, course.failure) == (Step.DISCARD, None)
    assert after(course).step is Step.DONE


def test_a_save_is_tried_again_only_for_what_may_pass_and_when_nothing_is_left() -> None:
    for reason, step in itertools.product(Reason, FINAL):
        course = Course(Origin.MANUAL, Ending.STOP, step, Failure(reason, "", Step.SAVE))
        assert course.may_be_retried == (step is Step.FAILED and reason in RETRIED)


def test_a_stop_pauses_before_it_saves_and_ends_the_pod_only_after_the_commit() -> None:
    plan = PLANS[Origin.MANUAL, Ending.STOP]
    order = [Step.PAUSE, Step.SAVE, Step.VERIFY, Step.COMMIT, Step.END, Step.PUSH]
    assert [step for step in plan if step in order] == order
