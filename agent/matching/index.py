"""Snapshots and policies, kept so that a verdict needs to look at few of them. Pure: one thread, no I/O.

    namespace → policy → group (the values of the policy's grouping labels) → hash of the pod → needs → snapshots

Each level also has its snapshots in order, newest first, as a list that `bisect` searches: to put or remove one of
100 000 moves some hundred kilobytes, which takes microseconds. At the lowest level are the snapshots that rules can't
tell apart: they are asked once for all of them. A namespace is a tenant: nothing leads from one to another.

Groups follow the policy as it is now: when its grouping labels change, its snapshots are grouped anew. A snapshot whose
policy isn't there is in one group with the others of that policy.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from agent.kube.conditions import Phase
from agent.kube.objects import PodSnapshotPolicy
from agent.matching.facts import MachineFacts
from agent.matching.snapshots import Needs, Order, SnapshotFacts
from agent.podspec.identity import PodHash

# xxh3 finds the hash; SHA-256, in `Needs`, tells whether it is the same.
HashKey = tuple[int, str]
GroupKey = tuple[str | None, ...]  # None: the snapshot lacks that label


def hash_key(pod_hash: PodHash | None) -> HashKey:
    """Give what a hash is looked up by."""
    return (-1, "") if pod_hash is None else (pod_hash.version, pod_hash.xxh3_128)


@dataclass(slots=True)
class Group:
    """The snapshots of one policy with the same values of its grouping labels."""

    ordered: list[Order] = field(default_factory=list)
    by_hash: dict[HashKey, dict[Needs, list[Order]]] = field(default_factory=dict)


@dataclass(slots=True)
class OfPolicy:
    """The snapshots of one policy; `labels`: those by which they are grouped."""

    labels: tuple[str, ...] = ()
    ordered: list[Order] = field(default_factory=list)
    groups: dict[GroupKey, Group] = field(default_factory=dict)

    def group_key(self, labels: Mapping[str, str]) -> GroupKey:
        """Give the group that labels belong to."""
        return tuple(labels.get(key) for key in self.labels)


@dataclass(slots=True)
class Namespace:
    """One tenant's snapshots and policies."""

    policies: dict[str, PodSnapshotPolicy] = field(default_factory=dict)
    snapshots: dict[str, SnapshotFacts] = field(default_factory=dict)
    ordered: list[Order] = field(default_factory=list)
    by_policy: dict[str, OfPolicy] = field(default_factory=dict)


class SnapshotIndex:
    """All snapshots and policies; `choice` looks into it, and changes nothing."""

    def __init__(self, policies: Iterable[PodSnapshotPolicy] = (), snapshots: Iterable[SnapshotFacts] = ()) -> None:
        self._namespaces: dict[str, Namespace] = {}
        # A fleet has few kinds of machines, and each one's CPU features take 10 KB: equal ones are kept once.
        self._machines: dict[MachineFacts, tuple[MachineFacts, int]] = {}
        self._stores: Counter[str] = Counter()  # snapshots whose data is there
        for policy in policies:
            self.put_policy(policy)
        for snapshot in sorted(snapshots, key=lambda each: each.order):  # so that each is put at an end
            self.put(snapshot)

    def namespace(self, name: str) -> Namespace:
        """Give a namespace, to look at; an empty one if nothing is there."""
        return self._namespaces.get(name) or Namespace()

    def has_store(self, store_url: str) -> bool:
        """Say whether data of snapshots is in a store. Any thread may ask."""
        return self._stores[store_url.rstrip("/")] > 0

    def put(self, snapshot: SnapshotFacts) -> None:
        """Take a snapshot in, in the place of what was there by its name."""
        # First, so that a thread that asks sees no store without the snapshot that is replaced.
        self._stores[snapshot.store_url] += snapshot.needs.phase is Phase.AVAILABLE
        self.remove(snapshot.namespace, snapshot.name)
        snapshot = replace(snapshot, needs=self._shared(snapshot.needs))
        there = self._namespaces.setdefault(snapshot.namespace, Namespace())
        there.snapshots[snapshot.name] = snapshot
        insort(there.ordered, snapshot.order)
        self._put_below(there, snapshot)

    def remove(self, namespace: str, name: str) -> None:
        """Forget a snapshot, if it is there."""
        there = self.namespace(namespace)
        snapshot = there.snapshots.pop(name, None)
        if snapshot is None:
            return
        self._stores[snapshot.store_url] -= snapshot.needs.phase is Phase.AVAILABLE
        _remove(there.ordered, snapshot.order)
        of_policy = there.by_policy[snapshot.policy_name]
        _remove(of_policy.ordered, snapshot.order)
        group_key, key = of_policy.group_key(snapshot.labels), hash_key(snapshot.needs.pod_hash)
        group = of_policy.groups[group_key]
        _remove(group.ordered, snapshot.order)
        of_hash = group.by_hash[key]
        _remove(of_hash[snapshot.needs], snapshot.order)
        # Nothing empty stays, whatever comes and goes.
        if not of_hash[snapshot.needs]:
            del of_hash[snapshot.needs]
        if not of_hash:
            del group.by_hash[key]
        if not group.ordered:
            del of_policy.groups[group_key]
        if not of_policy.ordered:
            del there.by_policy[snapshot.policy_name]
        self._release(snapshot.needs.machine)
        self._drop_if_empty(namespace)

    def put_policy(self, policy: PodSnapshotPolicy) -> None:
        """Take a policy in, in the place of what was there by its name."""
        there = self._namespaces.setdefault(policy.metadata.namespace, Namespace())
        there.policies[policy.metadata.name] = policy
        self._regroup(there, policy.metadata.name)

    def remove_policy(self, namespace: str, name: str) -> None:
        """Forget a policy, if it is there; its snapshots stay, and are nobody's."""
        there = self.namespace(namespace)
        if there.policies.pop(name, None) is not None:
            self._regroup(there, name)
            self._drop_if_empty(namespace)

    def without_policy(self) -> dict[tuple[str, str], int]:
        """Give namespace and name of the policies that aren't there, and how many snapshots each has."""
        return {
            (namespace, name): len(of_policy.ordered)
            for namespace, there in sorted(self._namespaces.items())
            for name, of_policy in sorted(there.by_policy.items())
            if name not in there.policies
        }

    def _put_below(self, there: Namespace, snapshot: SnapshotFacts) -> None:
        of_policy = there.by_policy.get(snapshot.policy_name)
        if of_policy is None:
            of_policy = there.by_policy[snapshot.policy_name] = OfPolicy(_labels(there, snapshot.policy_name))
        insort(of_policy.ordered, snapshot.order)
        group = of_policy.groups.setdefault(of_policy.group_key(snapshot.labels), Group())
        insort(group.ordered, snapshot.order)
        of_hash = group.by_hash.setdefault(hash_key(snapshot.needs.pod_hash), {})
        insort(of_hash.setdefault(snapshot.needs, []), snapshot.order)

    def _regroup(self, there: Namespace, policy_name: str) -> None:
        of_policy = there.by_policy.get(policy_name)
        if of_policy is None or of_policy.labels == _labels(there, policy_name):
            return
        del there.by_policy[policy_name]
        for _, name in of_policy.ordered:
            self._put_below(there, there.snapshots[name])

    def _shared(self, needs: Needs) -> Needs:
        if needs.machine is None:
            return needs
        machine, count = self._machines.get(needs.machine, (needs.machine, 0))
        self._machines[machine] = (machine, count + 1)
        return replace(needs, machine=machine)

    def _release(self, machine: MachineFacts | None) -> None:
        if machine is None:
            return
        kept, count = self._machines.pop(machine)
        if count > 1:
            self._machines[kept] = (kept, count - 1)

    def _drop_if_empty(self, name: str) -> None:
        there = self._namespaces[name]
        if not there.snapshots and not there.policies:
            del self._namespaces[name]


def _labels(there: Namespace, policy_name: str) -> tuple[str, ...]:
    policy = there.policies.get(policy_name)
    return () if policy is None else policy.grouping_labels


def _remove(ordered: list[Order], order: Order) -> None:
    index = bisect_left(ordered, order)
    assert ordered[index] == order
    del ordered[index]
