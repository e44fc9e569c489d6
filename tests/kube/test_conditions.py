"""Conditions tell what has happened, and since when."""

import itertools

import pytest

from agent.kube.conditions import (
    Condition,
    Conditions,
    Phase,
    Status,
    Step,
    after_step,
    condition,
    last_step,
    phase,
    with_condition,
)

PATHS = {
    (): Phase.AWAITING_CHECKPOINT,
    (Step.BEGUN,): Phase.AWAITING_CHECKPOINT,
    (Step.BEGUN, Step.CHECKPOINTED): Phase.AWAITING_CHECKPOINT,
    (Step.BEGUN, Step.CHECKPOINTED, Step.REPLICATED): Phase.AVAILABLE,
    (Step.BEGUN, Step.CHECKPOINT_FAILED): Phase.FAILED,
    (Step.CHECKPOINT_FAILED,): Phase.FAILED,
    (Step.BEGUN, Step.CHECKPOINTED, Step.REPLICATION_FAILED): Phase.FAILED,
    (Step.DELETION_BEGUN,): Phase.DELETING,
    (Step.BEGUN, Step.CHECKPOINTED, Step.REPLICATED, Step.DELETION_BEGUN): Phase.DELETING,
    (Step.BEGUN, Step.CHECKPOINTED, Step.REPLICATION_FAILED, Step.DELETION_BEGUN): Phase.DELETING,
}


def walked(*steps: Step) -> Conditions:
    conditions: Conditions = ()
    for index, step in enumerate(steps):
        conditions = after_step(conditions, step, now=f"t{index}")
    return conditions


@pytest.mark.parametrize(("steps", "expected"), PATHS.items(), ids=lambda value: str(value))
def test_the_phase_is_where_the_steps_lead(steps: tuple[Step, ...], expected: Phase) -> None:
    conditions = walked(*steps)
    assert phase(conditions) is expected
    assert last_step(conditions) is (steps[-1] if steps else None)
    if steps:
        ready = condition(conditions, "Ready")
        assert ready is not None
        assert ready.reason == expected
        assert (ready.status is Status.TRUE) is (expected is Phase.AVAILABLE)


def test_whatever_steps_are_tried_a_snapshot_that_failed_or_goes_is_never_ready_again() -> None:
    final = {Step.CHECKPOINT_FAILED, Step.REPLICATION_FAILED, Step.DELETION_BEGUN}
    for steps in itertools.product(Step, repeat=4):
        conditions: Conditions = ()
        made: list[Step] = []
        for step in steps:
            try:
                conditions = after_step(conditions, step, now="t")
            except ValueError:
                continue
            made.append(step)
            assert last_step(conditions) is step
        if final & set(made):
            assert phase(conditions) in (Phase.FAILED, Phase.DELETING), steps
        if phase(conditions) is Phase.AVAILABLE:
            assert list(dict.fromkeys(made)) == [Step.BEGUN, Step.CHECKPOINTED, Step.REPLICATED]


def test_what_a_failure_says_is_what_clients_wait_for() -> None:
    conditions = after_step(walked(Step.BEGUN), Step.CHECKPOINT_FAILED, now="t1", message="disk full")
    assert [(each.type, each.status, each.reason, each.message) for each in conditions] == [
        ("Checkpoint", Status.FALSE, "Failed", "disk full"),
        ("StorageReplicated", Status.FALSE, "Failed", "disk full"),
        ("Ready", Status.FALSE, "Failed", "disk full"),
    ]


def test_the_transition_time_changes_with_the_status_only() -> None:
    old = with_condition((), Condition("Ready", Status.FALSE, "AwaitingCheckpoint", "1"), now="t1")
    same = with_condition(old, Condition("Ready", Status.FALSE, "Failed", "2"), now="t2")
    assert same == (Condition("Ready", Status.FALSE, "Failed", "2", "t1"),)
    other = with_condition(same, Condition("Ready", Status.TRUE, "AllSnapshotsAvailable"), now="t3")
    assert other == (Condition("Ready", Status.TRUE, "AllSnapshotsAvailable", "", "t3"),)


def test_a_condition_keeps_its_place_and_others_stay_as_they_are() -> None:
    foreign = Condition("Audited", Status.TRUE, "ByHand", "", "t0")
    before = (Condition("Ready", Status.FALSE, "x", "", "t0"), foreign)
    after = with_condition(before, Condition("Ready", Status.TRUE, "y"), now="t1")
    assert [each.type for each in after] == ["Ready", "Audited"]
    assert after[1] is foreign


def test_a_message_is_cut_to_what_a_status_should_hold() -> None:
    (entry,) = with_condition((), Condition("Ready", Status.FALSE, "Failed", "x" * 5000), now="t")
    assert len(entry.message) == 1024
    assert entry.message.endswith("…")
