"""The index, changed in any way, gives what asking each snapshot by itself gives."""

from collections import Counter
from dataclasses import replace
from typing import TypeVar

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from agent.kube.conditions import Phase
from agent.kube.meta import ObjectMeta
from agent.kube.objects import PodSnapshotPolicy
from agent.kube.selectors import LabelSelector
from agent.matching.choice import Verdict, choose
from agent.matching.facts import MachineFacts
from agent.matching.index import SnapshotIndex
from agent.matching.pod import PodFacts
from agent.matching.reasons import Reason
from agent.matching.snapshots import Needs, SnapshotFacts
from agent.podspec.identity import PodHash
from tests.matching.fleet import HASH, NODE, POD, POLICY

T = TypeVar("T")

HASHES: list[PodHash] = [
    HASH,
    PodHash(1, "1a" * 16, "1b" * 32),
    replace(HASH, sha256="cc" * 32),
    replace(HASH, version=2),
]
NODES = [
    NODE,
    replace(NODE, machine_type="n4-standard-8"),
    replace(NODE, machine_type="e2-standard-8"),
    replace(NODE, runsc_version="next", runsc_sha256="00" * 32),
    replace(NODE, cpu_features=NODE.cpu_features - {"avx512f"}),
]


def mostly(usual: T, *others: T) -> st.SearchStrategy[T]:
    """Give the usual value more often than the others together: a verdict that chooses needs many things to agree."""
    return st.sampled_from([usual] * (2 * len(others)) + list(others))


namespaces = mostly("team-a", "team-b")
policy_names = mostly("web", "api", "batch")
names = st.sampled_from([f"s{number}" for number in range(8)])
labels = st.fixed_dictionaries(
    {"app": mostly("x", "y")}, optional={"tenant": mostly("x", "y"), "shard": mostly("x", "y")}
)
policies = st.builds(
    PodSnapshotPolicy,
    st.builds(ObjectMeta, name=policy_names, namespace=namespaces),
    storage_config_name=st.just("bucket"),
    selector=st.builds(LabelSelector, mostly((("app", "x"),), (), (("tenant", "y"),))),
    trigger_type=st.just(POLICY.trigger_type),
    grouping_labels=mostly((), ("tenant",), ("tenant", "shard")),
)
USUAL = replace(POLICY, selector=LabelSelector((("app", "x"),)), grouping_labels=())
snapshots = st.builds(
    SnapshotFacts,
    namespace=namespaces,
    name=names,
    created=st.integers(0, 3).map(lambda second: f"2026-11-30T22:00:0{second}Z"),
    policy_name=policy_names,
    labels=labels,
    needs=st.builds(
        Needs,
        mostly(Phase.AVAILABLE, Phase.AWAITING_CHECKPOINT),
        mostly(HASHES[0], *HASHES[1:], None),
        st.just(0),
        mostly(NODES[0], *NODES[1:], None),
    ),
)
pods = st.builds(
    PodFacts,
    namespace=namespaces,
    name=st.just("p"),
    labels=labels,
    pod_hash=mostly(*HASHES),
    pin=mostly("", "s0", "s1", "s2"),
)
nodes = mostly(*NODES)
Key = tuple[str, str]


def may_be_restored(
    pod: PodFacts, here: MachineFacts, snapshot: SnapshotFacts, known: dict[Key, PodSnapshotPolicy]
) -> bool:
    """Ask the product's rules, spelt out for the few values that these tests have."""
    needs, policy = snapshot.needs, known.get((snapshot.namespace, snapshot.policy_name))
    if snapshot.namespace != pod.namespace or needs.phase is not Phase.AVAILABLE or here.machine_type[:2] == "e2":
        return False
    if not pod.pin:
        if policy is None or any(pod.labels.get(key) != value for key, value in policy.selector.match_labels):
            return False
        for key in policy.grouping_labels:
            if key not in pod.labels or key not in snapshot.labels or pod.labels[key] != snapshot.labels[key]:
                return False
    elif snapshot.name != pod.pin:
        return False
    saved = needs.machine
    return (
        saved is not None
        and needs.pod_hash == pod.pod_hash
        and saved.machine_type == here.machine_type
        and saved.runsc_version == here.runsc_version
        and saved.runsc_sha256 == here.runsc_sha256
        and saved.cpu_features <= here.cpu_features
    )


def check(
    verdict: Verdict,
    pod: PodFacts,
    here: MachineFacts,
    there: dict[Key, SnapshotFacts],
    known: dict[Key, PodSnapshotPolicy],
    explained: int,
) -> None:
    good = [each for each in there.values() if may_be_restored(pod, here, each, known)]
    # Newest first, then by name: sorting is stable.
    good.sort(key=lambda each: each.name)
    good.sort(key=lambda each: each.created, reverse=True)
    if good:
        assert verdict == Verdict(chosen=good[0])
        return
    assert verdict.chosen is None
    assert verdict.deciding is not None
    if here.machine_type[:2] != "e2":  # then it isn't the pod alone
        assert all(candidate.refusals for candidate in verdict.candidates)
    considered = [each for each in there.values() if each.namespace == pod.namespace and pod.pin in ("", each.name)]
    # Each is explained by itself as it is among all others.
    for candidate in verdict.candidates:
        assert candidate.snapshot in considered
        alone = SnapshotIndex(known.values(), [candidate.snapshot])
        assert choose(pod, here, alone).candidates == (candidate,)
    assert len(verdict.candidates) == min(len(considered), explained)
    assert len({each.snapshot.name for each in verdict.candidates}) == len(verdict.candidates)
    if len(considered) <= explained:
        counts = Counter(each.refusals[0].reason for each in verdict.candidates if each.refusals)
        assert Counter(dict(verdict.counts)) == counts
    # A prefix of the full order.
    everything = choose(pod, here, SnapshotIndex(known.values(), there.values()), explained=100)
    assert everything.candidates[:explained] == verdict.candidates
    assert everything.counts == verdict.counts
    ranks = [rank(each.refusals[0].reason) if each.refusals else 0 for each in everything.candidates]
    assert ranks == sorted(ranks)


def rank(reason: Reason) -> int:
    """Say how near a snapshot is: of the pod's hash, its group, its policy, or none of them."""
    match reason:
        case Reason.POLICY_GONE | Reason.POLICY_SELECTOR:
            return 3
        case Reason.GROUP_LABEL:
            return 2
        case Reason.POD_HASH:
            return 1
        case _:
            return 0


class IndexMachine(RuleBasedStateMachine):
    """Snapshots and policies come, change and go; verdicts are asked for in between."""

    def __init__(self) -> None:
        super().__init__()
        self.index = SnapshotIndex([USUAL])
        self.there: dict[Key, SnapshotFacts] = {}
        self.known = {("team-a", "web"): USUAL}

    @rule(snapshot=snapshots)
    def put(self, snapshot: SnapshotFacts) -> None:
        self.index.put(snapshot)
        self.there[snapshot.namespace, snapshot.name] = snapshot

    @rule(namespace=namespaces, name=names)
    def remove(self, namespace: str, name: str) -> None:
        self.index.remove(namespace, name)
        self.there.pop((namespace, name), None)

    @rule(policy=policies)
    def put_policy(self, policy: PodSnapshotPolicy) -> None:
        self.index.put_policy(policy)
        self.known[policy.metadata.namespace, policy.metadata.name] = policy

    @rule(namespace=namespaces, name=policy_names)
    def remove_policy(self, namespace: str, name: str) -> None:
        self.index.remove_policy(namespace, name)
        self.known.pop((namespace, name), None)

    @rule(pod=pods, here=nodes, explained=st.integers(1, 4))
    def ask(self, pod: PodFacts, here: MachineFacts, explained: int) -> None:
        verdict = choose(pod, here, self.index, explained=explained)
        check(verdict, pod, here, self.there, self.known, explained)

    @invariant()
    def holds_what_is_there_and_nothing_else(self) -> None:
        # Loaded at once, in whichever order: the same.
        assert vars(SnapshotIndex(self.known.values(), self.there.values())) == vars(self.index)


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=60, stateful_step_count=40)


@settings(max_examples=150)
@given(st.lists(snapshots, max_size=8), st.lists(st.just(USUAL) | policies, max_size=3), pods, nodes, st.integers(1, 4))
def test_a_verdict_is_what_asking_each_snapshot_gives(
    many: list[SnapshotFacts], some: list[PodSnapshotPolicy], pod: PodFacts, here: MachineFacts, explained: int
) -> None:
    there = {(each.namespace, each.name): each for each in many}
    known = {(each.metadata.namespace, each.metadata.name): each for each in some}
    index = SnapshotIndex(known.values(), there.values())
    check(choose(pod, here, index, explained=explained), pod, here, there, known, explained)


def test_equal_machines_are_kept_once() -> None:
    index = SnapshotIndex()
    for number in range(3):
        machine = replace(NODE, cpu_features=frozenset(NODE.cpu_features))
        needs = Needs(Phase.AVAILABLE, HASH, 0, machine)
        index.put(SnapshotFacts(namespace="n", name=f"s{number}", created="", policy_name="p", needs=needs))
    machines = {id(each.needs.machine) for each in index.namespace("n").snapshots.values()}
    assert len(machines) == 1


def test_nothing_stays_of_what_has_gone() -> None:
    index = SnapshotIndex([POLICY])
    empty = vars(SnapshotIndex([POLICY]))
    needs = Needs(Phase.AVAILABLE, POD.pod_hash, 0, NODE)
    index.put(SnapshotFacts(namespace="team-a", name="s", created="", policy_name="web", needs=needs))
    index.remove("team-a", "s")
    assert vars(index) == empty
    index.remove_policy("team-a", "web")
    assert vars(index) == vars(SnapshotIndex())
