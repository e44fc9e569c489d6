"""The verdict: which snapshot a pod is restored from here, or why from none. Pure.

Rules, in this order; of several that fail, the first is said to decide:
1. a policy of the pod's namespace selects the pod;
2. the pod can be restored on this node at all (`pod.limits`);
3. of the snapshots of that namespace (others are not even counted: a namespace is a tenant): its policy is there and
   selects the pod, and the policy's grouping labels have the same values on both, none missing;
4. it was made of a pod with the same hash (SHA-256; xxh3 only finds it);
5. it is Ready, and doesn't rest here;
6. hardware, gVisor and GPUs agree (`machine`, `gvisor`, `gpu`).
Of those that pass, the newest; of one second, the first by name.

A pod that names its snapshot (`podsnapshot.gke.io/ps-name`) gets that one or none. It has chosen by itself, so policies
aren't asked (1, 3); all other rules are, as GKE has it: "must be Ready and spec must match".

When there is none, every snapshot of the namespace is counted by its deciding reason, and the nearest are explained
with all that they fail: first those with the pod's hash, then those of its policy and group, then those of its policy,
then the rest; the newest first among each. The work follows the number of *different* snapshots with the pod's hash
and group (kinds of nodes that they were made on), and that of policies; never how many snapshots there are.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from heapq import nsmallest
from itertools import chain, islice
from types import MappingProxyType

from agent.kube.conditions import Phase
from agent.kube.objects import PIN, PodSnapshotPolicy
from agent.matching.facts import MachineFacts
from agent.matching.gpu import gpu_differences
from agent.matching.gvisor import gvisor_differences
from agent.matching.index import Group, Namespace, SnapshotIndex, hash_key
from agent.matching.machine import hardware_differences
from agent.matching.pod import PodFacts, limits
from agent.matching.policies import lacks_labels, missing_labels, no_policy
from agent.matching.reasons import Reason, Refusal, differing
from agent.matching.snapshots import Needs, Order, SnapshotFacts

EXPLAINED = 10
NONE_RESTS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Candidate:
    """A snapshot that was considered, and every rule that it fails, the deciding one first.

    None: it is only the pod itself that can't be restored.
    """

    snapshot: SnapshotFacts
    refusals: tuple[Refusal, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`chosen`, or the reasons why not.

    `refusals`: of the pod and the node, whatever the snapshot; `candidates`: the nearest, at most as many as were asked
    for; `counts`: how many snapshots each reason decided for, the most frequent first. All empty when one is chosen.
    """

    chosen: SnapshotFacts | None
    refusals: tuple[Refusal, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    counts: tuple[tuple[Reason, int], ...] = ()

    @property
    def deciding(self) -> Refusal | None:
        """The refusal that decided: of the pod, else of the nearest candidate. None when a snapshot is chosen."""
        if self.chosen is not None:
            return None
        return self.refusals[0] if self.refusals else self.candidates[0].refusals[0]


def choose(
    pod: PodFacts,
    here: MachineFacts,
    index: SnapshotIndex,
    *,
    resting: Mapping[str, str] = NONE_RESTS,
    explained: int = EXPLAINED,
) -> Verdict:
    """Give the verdict on a pod that is about to start on a node.

    `resting`: snapshots of the pod's namespace that the node leaves alone for now, and why; they are few.
    """
    assert explained > 0
    there = index.namespace(pod.namespace)
    of_node = tuple(limits(pod, here))
    if pod.pin:
        return _choose_pinned(pod, here, there, of_node, resting)
    return _Search(pod, here, there, explained, resting).verdict(of_node)


def needs_unmet(needs: Needs, pod: PodFacts, here: MachineFacts) -> Iterator[Refusal]:
    """Say which of the rules about one snapshot (4 to 6) it fails."""
    if needs.pod_hash is None:
        yield Refusal(Reason.POD_HASH, "the snapshot's pod isn't known yet")
    elif needs.pod_hash.version != pod.pod_hash.version:
        saved, wanted = needs.pod_hash.version, pod.pod_hash.version
        message = f"the snapshot's pod was hashed by version {saved} of the rules, and this one by version {wanted}"
        yield Refusal(Reason.POD_HASH, message, str(needs.pod_hash), str(pod.pod_hash))
    elif needs.pod_hash.sha256 != pod.pod_hash.sha256:
        yield differing(Reason.POD_HASH, "pod spec (hash of what counts)", needs.pod_hash, pod.pod_hash)
    match needs.phase:
        case Phase.AVAILABLE:
            pass
        case Phase.AWAITING_CHECKPOINT:
            yield Refusal(Reason.NOT_READY, "the snapshot isn't Ready yet")
        case Phase.FAILED:
            yield Refusal(Reason.FAILED, "the snapshot has failed")
        case Phase.DELETING:
            yield Refusal(Reason.DELETING, "the snapshot is being deleted")
    if needs.machine is None:
        yield Refusal(Reason.NO_RECORD, "the snapshot doesn't say what it was made on, or not so that it can be read")
        return
    yield from hardware_differences(needs.machine, here)
    yield from gvisor_differences(needs.machine, here)
    yield from gpu_differences(needs.gpus, needs.machine, pod.gpus, here)


def rest_unmet(name: str, resting: Mapping[str, str]) -> Iterator[Refusal]:
    """Say whether a snapshot rests on this node."""
    if name in resting:
        yield Refusal(Reason.RESTING, f"the snapshot rests on this node for some minutes: {resting[name]}")


def policy_unmet(snapshot: SnapshotFacts, pod: PodFacts, policy: PodSnapshotPolicy | None) -> Iterator[Refusal]:
    """Say what of the third rule a snapshot fails; `policy` is the one that it names, if it is there."""
    if policy is None:
        yield Refusal(Reason.POLICY_GONE, f"its policy {snapshot.policy_name} isn't there any more")
        return
    unmet = policy.selector.unmet(pod.labels)
    if unmet:
        yield Refusal(Reason.POLICY_SELECTOR, f"its policy {snapshot.policy_name} doesn't select the pod: {unmet}")
    for key in policy.grouping_labels:
        saved, wanted = snapshot.labels.get(key), pod.labels.get(key)
        if saved is None or wanted is None or saved != wanted:
            texts = ["absent" if value is None else repr(value) for value in (saved, wanted)]
            yield differing(Reason.GROUP_LABEL, f"label {key}, by which {snapshot.policy_name} groups", *texts)


def _choose_pinned(
    pod: PodFacts, here: MachineFacts, there: Namespace, of_node: tuple[Refusal, ...], resting: Mapping[str, str]
) -> Verdict:
    snapshot = there.snapshots.get(pod.pin)
    if snapshot is None:
        message = f"{PIN} names {pod.pin[:80]!r}, and namespace {pod.namespace} has no such PodSnapshot"
        return Verdict(chosen=None, refusals=(*of_node, Refusal(Reason.PIN_MISSING, message)))
    unmet = (*needs_unmet(snapshot.needs, pod, here), *rest_unmet(snapshot.name, resting))
    if not of_node and not unmet:
        return Verdict(chosen=snapshot)
    counts = ((unmet[0].reason, 1),) if unmet else ()
    return Verdict(chosen=None, refusals=of_node, candidates=(Candidate(snapshot, unmet),), counts=counts)


class _Search:
    """One look through a namespace for one pod on one node."""

    def __init__(
        self, pod: PodFacts, here: MachineFacts, there: Namespace, explained: int, resting: Mapping[str, str]
    ) -> None:
        self._pod = pod
        self._here = here
        self._there = there
        self._explained = explained
        self._resting = resting
        self._hash_key = hash_key(pod.pod_hash)
        self._matching = {
            name: policy for name, policy in there.policies.items() if policy.selector.matches(pod.labels)
        }
        # The pod's group in each of these policies, where it has snapshots.
        self._groups: dict[str, Group] = {}
        for name, policy in self._matching.items():
            of_policy = there.by_policy.get(name)
            if of_policy is not None and not missing_labels(pod, policy):
                group = of_policy.groups.get(of_policy.group_key(pod.labels))
                if group is not None:
                    self._groups[name] = group
        # Kinds of snapshots in these groups, with the pod's hash; each with the first rule that it fails, if any.
        self._kinds = [
            (ordered, next(needs_unmet(needs, pod, here), None))
            for group in self._groups.values()
            for needs, ordered in group.by_hash.get(self._hash_key, {}).items()
        ]

    def verdict(self, of_node: tuple[Refusal, ...]) -> Verdict:
        """Choose, or explain."""
        if not of_node:
            newest = (self._first_awake(ordered) for ordered, refusal in self._kinds if refusal is None)
            passing = [order for order in newest if order is not None]
            if passing:
                return Verdict(chosen=self._there.snapshots[min(passing)[1]])
        of_policies = self._without_policy_or_snapshot()
        is_policy = any(refusal.reason is Reason.NO_POLICY for refusal in of_policies)
        return Verdict(
            chosen=None,
            refusals=(*of_policies, *of_node) if is_policy else (*of_node, *of_policies),
            candidates=tuple(self._candidate(order[1]) for order in self._nearest()),
            counts=tuple(sorted(self._counts().items(), key=lambda entry: (-entry[1], entry[0]))),
        )

    def _first_awake(self, ordered: list[Order]) -> Order | None:
        return next((order for order in ordered if order[1] not in self._resting), None)

    def _without_policy_or_snapshot(self) -> list[Refusal]:
        """Say why no snapshot comes into question, if none does."""
        if not self._matching:
            return [no_policy(self._pod, self._there.policies.values())]
        if self._groups:
            return []
        lacking = {name: missing_labels(self._pod, policy) for name, policy in self._matching.items()}
        usable = sorted(name for name, keys in lacking.items() if not keys)
        if not usable:
            name = min(lacking)
            return [lacks_labels(self._matching[name], lacking[name])]
        keys = sorted({key for name in usable for key in self._matching[name].grouping_labels})
        group = "".join(f", {key}={self._pod.labels[key]}" for key in keys)
        message = f"there is no PodSnapshot of policy {', '.join(usable)} in namespace {self._pod.namespace}{group}"
        return [Refusal(Reason.NO_SNAPSHOT, message)]

    def _candidate(self, name: str) -> Candidate:
        snapshot = self._there.snapshots[name]
        policy = self._there.policies.get(snapshot.policy_name)
        unmet = chain(
            policy_unmet(snapshot, self._pod, policy),
            needs_unmet(snapshot.needs, self._pod, self._here),
            rest_unmet(name, self._resting),
        )
        return Candidate(snapshot, tuple(unmet))

    def _nearest(self) -> list[Order]:
        """Give the nearest snapshots, in the order of the module's text.

        Each step passes over what the steps before have given, of which there are fewer than are wanted.
        """
        found: list[Order] = []
        of_policies = [self._there.by_policy[name] for name in self._matching if name in self._there.by_policy]
        for lists in (
            # Without those that xxh3 alone has found: a collision can be made, and is another pod's.
            [ordered for ordered, unmet in self._kinds if unmet is None or unmet.reason is not Reason.POD_HASH],
            [group.ordered for group in self._groups.values()],
            [of_policy.ordered for of_policy in of_policies],
            [self._there.ordered],
        ):
            known = set(found)
            left = self._explained - len(found)
            new = ((order for order in ordered if order not in known) for ordered in lists)
            found += nsmallest(left, (order for orders in new for order in islice(orders, left)))
            if len(found) == self._explained:
                break
        return found

    def _counts(self) -> Counter[Reason]:
        """Count the namespace's snapshots by deciding reason; those that pass, where the pod doesn't, by none."""
        counts: Counter[Reason] = Counter()
        for name, of_policy in self._there.by_policy.items():
            count = len(of_policy.ordered)
            if name not in self._matching:
                is_gone = name not in self._there.policies
                counts[Reason.POLICY_GONE if is_gone else Reason.POLICY_SELECTOR] += count
                continue
            in_group = len(self._groups[name].ordered) if name in self._groups else 0
            counts[Reason.GROUP_LABEL] += count - in_group
            counts[Reason.POD_HASH] += in_group
        for ordered, refusal in self._kinds:
            counts[Reason.POD_HASH] -= len(ordered)
            if refusal is not None:
                counts[refusal.reason] += len(ordered)
            elif self._resting:
                counts[Reason.RESTING] += sum(order[1] in self._resting for order in ordered)
        return +counts
