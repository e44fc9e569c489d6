"""Which policy a pod is saved by. Pure.

A pod may match several. One of them decides: the first by name, of those whose trigger it is; the others are reported.
(Names are the same wherever objects are kept; times of creation aren't, as with files.) For a restore, any policy that
matches the pod is good: `choice`.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from agent.kube.objects import PodSnapshotPolicy, TriggerType
from agent.matching.pod import PodFacts
from agent.matching.reasons import Reason, Refusal


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """`policy`: by which the pod is saved; `others`: those that match, too; `refusal`: why there is none."""

    policy: PodSnapshotPolicy | None
    others: tuple[str, ...] = ()
    refusal: Refusal | None = None


def policy_for(pod: PodFacts, policies: Iterable[PodSnapshotPolicy], trigger: TriggerType) -> PolicyChoice:
    """Decide by which policy a pod is saved when `trigger` asks for it. Policies of other namespaces don't count."""
    of_namespace = sorted(
        (each for each in policies if each.metadata.namespace == pod.namespace), key=lambda each: each.metadata.name
    )
    matching = [each for each in of_namespace if each.selector.matches(pod.labels)]
    triggered = [each for each in matching if each.trigger_type is trigger]
    usable = [each for each in triggered if not missing_labels(pod, each)]
    if usable:
        return PolicyChoice(usable[0], tuple(each.metadata.name for each in matching if each is not usable[0]))
    if triggered:
        return PolicyChoice(None, refusal=lacks_labels(triggered[0], missing_labels(pod, triggered[0])))
    if matching:
        names = ", ".join(f"{each.metadata.name} ({each.trigger_type})" for each in matching)
        message = f"no policy with the trigger {trigger} matches the pod; those that do: {names}"
        return PolicyChoice(None, refusal=Refusal(Reason.NO_POLICY, message))
    return PolicyChoice(None, refusal=no_policy(pod, of_namespace))


def missing_labels(pod: PodFacts, policy: PodSnapshotPolicy) -> tuple[str, ...]:
    """Give the labels by which a policy groups and which a pod lacks."""
    return tuple(key for key in policy.grouping_labels if key not in pod.labels)


def lacks_labels(policy: PodSnapshotPolicy, keys: tuple[str, ...]) -> Refusal:
    """Say that a pod lacks labels by which a policy groups."""
    return Refusal(
        Reason.GROUP_LABEL, f"policy {policy.metadata.name} groups by {', '.join(keys)}, which the pod lacks"
    )


def no_policy(pod: PodFacts, of_namespace: Iterable[PodSnapshotPolicy]) -> Refusal:
    """Say that no policy of the pod's namespace matches it, and what the first of them misses."""
    names = sorted(of_namespace, key=lambda each: each.metadata.name)
    if not names:
        return Refusal(Reason.NO_POLICY, f"namespace {pod.namespace} has no PodSnapshotPolicy")
    unmet = f"{names[0].metadata.name} wants {names[0].selector.unmet(pod.labels)}"
    more = f", and so on for {len(names) - 1} more" if len(names) > 1 else ""
    return Refusal(
        Reason.NO_POLICY, f"no PodSnapshotPolicy of namespace {pod.namespace} matches the pod: {unmet}{more}"
    )
