"""Which policy saves a pod."""

from dataclasses import replace

import pytest

from agent.kube.meta import ObjectMeta
from agent.kube.objects import PodSnapshotPolicy, TriggerType
from agent.kube.selectors import LabelSelector
from agent.matching.policies import policy_for
from agent.matching.reasons import Reason
from tests.matching.fleet import POD, POLICY


def policy(name: str, trigger: TriggerType = TriggerType.WORKLOAD, namespace: str = "team-a") -> PodSnapshotPolicy:
    meta = ObjectMeta(name=name, namespace=namespace)
    return replace(POLICY, metadata=meta, trigger_type=trigger)


def test_of_several_the_first_by_name_decides_and_the_others_are_reported() -> None:
    choice = policy_for(POD, [policy("c"), policy("a"), policy("b")], TriggerType.WORKLOAD)
    assert choice.policy is not None
    assert choice.policy.metadata.name == "a"
    assert choice.others == ("b", "c")
    assert choice.refusal is None


def test_a_policy_of_another_trigger_or_without_the_pods_labels_does_not_decide() -> None:
    other_group = replace(policy("b"), grouping_labels=("absent",))
    choice = policy_for(POD, [policy("a", TriggerType.MANUAL), other_group, policy("c")], TriggerType.WORKLOAD)
    assert choice.policy is not None
    assert (choice.policy.metadata.name, choice.others) == ("c", ("a", "b"))


@pytest.mark.parametrize(
    ("policies", "reason", "text"),
    [
        ([], Reason.NO_POLICY, "namespace team-a has no PodSnapshotPolicy"),
        ([policy("a", namespace="team-b")], Reason.NO_POLICY, "namespace team-a has no PodSnapshotPolicy"),
        (
            [
                replace(policy("a"), selector=LabelSelector((("app", "db"),))),
                replace(policy("b"), selector=LabelSelector((("x", "y"),))),
            ],
            Reason.NO_POLICY,
            "a wants app=db, and so on for 1 more",
        ),
        ([policy("a", TriggerType.MANUAL)], Reason.NO_POLICY, "those that do: a (manual)"),
        (
            [replace(policy("a"), grouping_labels=("tenant", "shard"))],
            Reason.GROUP_LABEL,
            "policy a groups by shard, which the pod lacks",
        ),
    ],
)
def test_when_there_is_none_the_reason_is_said(policies: list[PodSnapshotPolicy], reason: Reason, text: str) -> None:
    choice = policy_for(POD, policies, TriggerType.WORKLOAD)
    assert choice.policy is None
    assert choice.refusal is not None
    assert choice.refusal.reason is reason
    assert text in choice.refusal.message
