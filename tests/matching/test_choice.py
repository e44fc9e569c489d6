"""The verdict: the newest snapshot that every rule lets through, or the reason why none."""

from collections.abc import Iterable
from dataclasses import replace

import pytest

from agent.kube.conditions import Condition, Phase, Status
from agent.kube.meta import ObjectMeta
from agent.kube.objects import PodSnapshot, PodSnapshotPolicy, SnapshotStatus
from agent.kube.origin import Origin
from agent.kube.selectors import LabelSelector
from agent.matching.choice import Verdict, choose
from agent.matching.facts import Architecture, MachineFacts
from agent.matching.index import SnapshotIndex
from agent.matching.pod import PodFacts
from agent.matching.reasons import Decider, Reason
from agent.matching.snapshots import SnapshotFacts, snapshot_facts
from agent.podspec.identity import PodHash
from tests.matching.fleet import GPU_NODE, GPU_POD, HASH, L4, NEEDS, NODE, POD, POLICY, SNAPSHOT

OTHER_HASH = PodHash(1, "1a" * 16, "1b" * 32)


def verdict(
    *snapshots: SnapshotFacts,
    pod: PodFacts = POD,
    here: MachineFacts = NODE,
    policies: Iterable[PodSnapshotPolicy] = (POLICY,),
    explained: int = 10,
) -> Verdict:
    return choose(pod, here, SnapshotIndex(policies, snapshots), explained=explained)


def test_a_snapshot_that_agrees_in_all_is_chosen_and_nothing_else_is_said() -> None:
    assert verdict(SNAPSHOT) == Verdict(chosen=SNAPSHOT)
    assert verdict(SNAPSHOT).deciding is None


def saved_on(**changes: object) -> SnapshotFacts:
    machine = replace(NODE, **changes)  # type: ignore[arg-type]
    return replace(SNAPSHOT, needs=replace(NEEDS, machine=machine))


# One thing is changed: in the pod, the node, the policies, or the snapshot; and the reason that is named.
FLIPS: dict[str, tuple[Reason, dict[str, object]]] = {
    "another namespace": (Reason.NO_POLICY, {"pod": replace(POD, namespace="team-b")}),
    "a label that the selector wants": (Reason.NO_POLICY, {"pod": replace(POD, labels={"tenant": "t1"})}),
    "a grouping label's value": (Reason.NO_SNAPSHOT, {"pod": replace(POD, labels={"app": "web", "tenant": "t2"})}),
    "a grouping label": (Reason.GROUP_LABEL, {"pod": replace(POD, labels={"app": "web"})}),
    "the pod's hash": (Reason.POD_HASH, {"pod": replace(POD, pod_hash=OTHER_HASH)}),
    "SHA-256 alone": (Reason.POD_HASH, {"pod": replace(POD, pod_hash=replace(HASH, sha256="cc" * 32))}),
    "the rules of the hash": (Reason.POD_HASH, {"pod": replace(POD, pod_hash=replace(HASH, version=2))}),
    "a TPU": (Reason.TPU, {"pod": replace(POD, has_tpu=True)}),
    "the FUSE sidecar": (Reason.FUSE_SIDECAR, {"pod": replace(POD, has_fuse_sidecar=True)}),
    "a GPU": (
        Reason.GPU_COUNT,
        {"pod": GPU_POD, "here": GPU_NODE, "snapshot": saved_on(**{"machine_type": "g2-standard-4"})},
    ),
    "the machine series": (Reason.MACHINE_SERIES, {"here": replace(NODE, machine_type="n4-standard-8")}),
    "E2": (Reason.E2_MACHINE, {"here": replace(NODE, machine_type="e2-standard-8")}),
    "the architecture": (Reason.ARCHITECTURE, {"here": replace(NODE, architecture=Architecture.ARM64)}),
    "a CPU feature": (Reason.CPU_FEATURES, {"here": replace(NODE, cpu_features=NODE.cpu_features - {"avx2"})}),
    "the cache line": (Reason.CACHE_LINE, {"here": replace(NODE, cache_line_bytes=128)}),
    "gVisor's version": (Reason.RUNSC_VERSION, {"here": replace(NODE, runsc_version="release-20261123.0")}),
    "runsc's digest": (Reason.RUNSC_DIGEST, {"here": replace(NODE, runsc_sha256="5f" * 32)}),
    "gVisor's platform": (Reason.PLATFORM, {"here": replace(NODE, platform="kvm")}),
    "the host's network": (Reason.NETWORK, {"here": replace(NODE, network="host")}),
    "directfs": (Reason.DIRECTFS, {"here": replace(NODE, directfs=False)}),
    "the overlay": (Reason.OVERLAY, {"here": replace(NODE, overlay="none")}),
    "the policy is gone": (Reason.NO_POLICY, {"policies": ()}),
    "the policy's selector": (
        Reason.NO_POLICY,
        {"policies": (replace(POLICY, selector=LabelSelector((("app", "db"),))),)},
    ),
    "the policy's groups": (Reason.GROUP_LABEL, {"policies": (replace(POLICY, grouping_labels=("shard",)),)}),
    "the snapshot's policy": (Reason.NO_SNAPSHOT, {"snapshot": replace(SNAPSHOT, policy_name="gone")}),
    "the snapshot's group": (Reason.NO_SNAPSHOT, {"snapshot": replace(SNAPSHOT, labels={"tenant": "t2"})}),
    "the snapshot has no group": (Reason.NO_SNAPSHOT, {"snapshot": replace(SNAPSHOT, labels={})}),
    "not ready yet": (
        Reason.NOT_READY,
        {"snapshot": replace(SNAPSHOT, needs=replace(NEEDS, phase=Phase.AWAITING_CHECKPOINT))},
    ),
    "failed": (Reason.FAILED, {"snapshot": replace(SNAPSHOT, needs=replace(NEEDS, phase=Phase.FAILED))}),
    "being deleted": (Reason.DELETING, {"snapshot": replace(SNAPSHOT, needs=replace(NEEDS, phase=Phase.DELETING))}),
    "no record": (Reason.NO_RECORD, {"snapshot": replace(SNAPSHOT, needs=replace(NEEDS, machine=None))}),
    "no hash": (Reason.POD_HASH, {"snapshot": replace(SNAPSHOT, needs=replace(NEEDS, pod_hash=None))}),
    "runsc unknown at save": (Reason.RUNSC_DIGEST, {"snapshot": saved_on(runsc_sha256="")}),
    "runsc unknown on both sides": (
        Reason.RUNSC_DIGEST,
        {"snapshot": saved_on(runsc_sha256=""), "here": replace(NODE, runsc_sha256="")},
    ),
}


@pytest.mark.parametrize(("reason", "change"), FLIPS.values(), ids=FLIPS)
def test_a_single_change_flips_the_verdict_to_its_reason(reason: Reason, change: dict[str, object]) -> None:
    change = dict(change)
    snapshot = change.pop("snapshot", SNAPSHOT)
    assert isinstance(snapshot, SnapshotFacts)
    found = verdict(snapshot, **change)  # type: ignore[arg-type]
    assert found.chosen is None
    assert found.deciding is not None
    assert found.deciding.reason is reason
    assert found.deciding.message


GPU_SNAPSHOT = replace(SNAPSHOT, needs=replace(NEEDS, gpus=1, machine=GPU_NODE))


def test_a_pod_with_a_gpu_is_restored_on_the_same_kind_of_node() -> None:
    assert verdict(GPU_SNAPSHOT, pod=GPU_POD, here=GPU_NODE).chosen == GPU_SNAPSHOT


@pytest.mark.parametrize(
    ("reason", "here"),
    [
        (Reason.GPU_DRIVER, replace(GPU_NODE, gpus=(replace(L4, driver="580.159.03"),))),
        (Reason.GPU_MODEL, replace(GPU_NODE, gpus=(replace(L4, model="Tesla T4"),))),
        (Reason.GPU_MIG, replace(GPU_NODE, gpus=(replace(L4, is_mig=True),))),
        (Reason.GPU_MISSING, replace(GPU_NODE, gpus=())),
    ],
)
def test_gpus_decide_for_pods_that_have_some(reason: Reason, here: MachineFacts) -> None:
    found = verdict(GPU_SNAPSHOT, pod=GPU_POD, here=here).deciding
    assert found is not None
    assert found.reason is reason


def test_every_reason_of_a_snapshot_or_a_pod_is_named_by_some_test() -> None:
    named = {reason for reason, _ in FLIPS.values()} | {
        Reason.GPU_DRIVER,
        Reason.GPU_MODEL,
        Reason.GPU_MIG,
        Reason.GPU_MISSING,
        Reason.PIN_MISSING,
        Reason.POLICY_GONE,
        Reason.POLICY_SELECTOR,
        Reason.RESTING,
    }
    elsewhere = {  # test_gpu, test_machine, cli/test_agent_explain
        Reason.GPU_MIXED,
        Reason.GPU_MACHINE_TYPE,
        Reason.GPU_SEVERAL,
        Reason.GPU_WHOLE_NODE,
        Reason.CPU_VENDOR,
        Reason.CPU_MODEL,
        Reason.PIN_OTHER,
    }
    assert named | elsewhere == set(Reason)


def test_both_values_are_told() -> None:
    found = verdict(saved_on(runsc_version="release-20261102.0")).deciding
    assert found is not None
    assert (found.saved, found.here) == ("release-20261102.0", "release-20261116.0")
    assert found.message == (
        "gVisor version: the snapshot was made with release-20261102.0, here it is release-20261116.0"
    )
    assert found.reason.decider is Decider.GVISOR


def named(name: str, created: str = "2026-11-30T22:00:00Z", **changes: object) -> SnapshotFacts:
    return replace(SNAPSHOT, name=name, created=created, **changes)  # type: ignore[arg-type]


def test_the_newest_is_chosen_and_the_first_by_name_among_those_of_one_second() -> None:
    old, new_b, new_a = (
        named("0", "2026-11-30T21:59:59Z"),
        named("b", "2026-11-30T22:00:00Z"),
        named("a", "2026-11-30T22:00:00Z"),
    )
    assert verdict(old, new_b, new_a).chosen == new_a
    last = named("z", "2027-01-01T00:00:00Z")
    assert verdict(old, new_b, last, new_a).chosen == last
    unready = named("y", "2027-01-02T00:00:00Z", needs=replace(NEEDS, phase=Phase.AWAITING_CHECKPOINT))
    assert verdict(old, unready, last).chosen == last


def test_a_snapshot_that_rests_here_is_passed_over_and_named_where_there_is_no_other() -> None:
    old, new = named("old", "2026-11-30T21:00:00Z"), named("new")
    other = named("other", "2026-12-01T00:00:00Z", needs=replace(NEEDS, machine=replace(NODE, cpu_model="other")))
    index = SnapshotIndex((POLICY,), (old, new, other))
    for pod in (POD, replace(POD, pin="new")):
        assert choose(pod, NODE, index).chosen == (new if pod.pin else other)
    assert choose(POD, NODE, index, resting={"other": "damaged", "new": "damaged"}).chosen == old
    found = choose(POD, NODE, index, resting=dict.fromkeys(("old", "new", "other"), "packs/1 is damaged"))
    assert found.deciding is not None
    assert (found.deciding.reason, "packs/1 is damaged" in found.deciding.message) == (Reason.RESTING, True)
    assert found.counts == ((Reason.RESTING, 3),)
    pinned = choose(replace(POD, pin="new"), NODE, index, resting={"new": "damaged"})
    assert pinned.deciding is not None
    assert pinned.deciding.reason is Reason.RESTING


def test_any_policy_that_selects_the_pod_is_good() -> None:
    second = replace(POLICY, metadata=ObjectMeta(name="second", namespace="team-a"), grouping_labels=())
    newer = named("s2", "2026-12-01T00:00:00Z", policy_name="second", labels={})
    assert verdict(SNAPSHOT, newer, policies=(POLICY, second)).chosen == newer
    assert verdict(SNAPSHOT, newer, policies=(POLICY,)).chosen == SNAPSHOT


def test_tenants_never_see_each_others_snapshots() -> None:
    other = replace(POLICY, metadata=ObjectMeta(name="web", namespace="team-b"))
    found = verdict(SNAPSHOT, pod=replace(POD, namespace="team-b", pin="s1"), policies=(POLICY, other))
    assert found.deciding is not None
    assert found.deciding.reason is Reason.PIN_MISSING
    found = verdict(SNAPSHOT, pod=replace(POD, namespace="team-b"), policies=(POLICY, other))
    assert found.deciding is not None
    assert found.deciding.reason is Reason.NO_SNAPSHOT
    assert not found.candidates
    assert not found.counts
    assert "team-a" not in str(found)


# --- pins

PIN = replace(POD, pin="s1")


def test_a_pin_gets_its_snapshot_though_another_is_newer() -> None:
    newer = named("s2", "2026-12-01T00:00:00Z")
    assert verdict(SNAPSHOT, newer, pod=PIN).chosen == SNAPSHOT


def test_a_pin_needs_no_policy_and_no_group() -> None:
    assert verdict(SNAPSHOT, pod=PIN, policies=()).chosen == SNAPSHOT
    assert verdict(replace(SNAPSHOT, labels={}), pod=PIN).chosen is not None


@pytest.mark.parametrize(
    ("reason", "pinned", "here"),
    [
        (Reason.PIN_MISSING, replace(SNAPSHOT, name="s2"), NODE),
        (Reason.NOT_READY, replace(SNAPSHOT, needs=replace(NEEDS, phase=Phase.AWAITING_CHECKPOINT)), NODE),
        (Reason.POD_HASH, replace(SNAPSHOT, needs=replace(NEEDS, pod_hash=OTHER_HASH)), NODE),
        (Reason.MACHINE_SERIES, SNAPSHOT, replace(NODE, machine_type="c3-standard-4")),
        (Reason.E2_MACHINE, SNAPSHOT, replace(NODE, machine_type="e2-standard-4")),
    ],
)
def test_a_pin_that_cannot_be_kept_falls_back_to_nothing(
    reason: Reason, pinned: SnapshotFacts, here: MachineFacts
) -> None:
    good = named("good")
    found = verdict(pinned, good, pod=PIN, here=here)
    assert found.chosen is None
    assert found.deciding is not None
    assert found.deciding.reason is reason


def test_a_pin_does_not_help_a_pod_that_cannot_be_restored_at_all() -> None:
    found = verdict(SNAPSHOT, pod=replace(PIN, has_fuse_sidecar=True))
    assert found.chosen is None
    assert found.deciding is not None
    assert found.deciding.reason is Reason.FUSE_SIDECAR
    assert [(each.snapshot, each.refusals) for each in found.candidates] == [(SNAPSHOT, ())]


# --- explanations


def test_the_nearest_are_explained_with_all_that_they_fail_and_the_rest_counted() -> None:
    old_runsc = replace(NEEDS, machine=replace(NODE, runsc_version="old", runsc_sha256="00" * 32))
    other = replace(NEEDS, pod_hash=OTHER_HASH, phase=Phase.FAILED)
    snapshots = [
        named("hash-1", "2026-11-01T00:00:00Z", needs=old_runsc),
        named("hash-2", "2026-11-02T00:00:00Z", needs=old_runsc),
        named("group", "2026-11-03T00:00:00Z", needs=other),
        named("policy", "2026-11-04T00:00:00Z", labels={"tenant": "t9"}),
        named("elsewhere", "2026-11-05T00:00:00Z", policy_name="gone"),
    ]
    found = verdict(*snapshots)
    assert [(each.snapshot.name, [refusal.reason for refusal in each.refusals]) for each in found.candidates] == [
        ("hash-2", [Reason.RUNSC_VERSION, Reason.RUNSC_DIGEST]),
        ("hash-1", [Reason.RUNSC_VERSION, Reason.RUNSC_DIGEST]),
        ("group", [Reason.POD_HASH, Reason.FAILED]),
        ("policy", [Reason.GROUP_LABEL]),
        ("elsewhere", [Reason.POLICY_GONE]),
    ]
    assert dict(found.counts) == {
        Reason.RUNSC_VERSION: 2,
        Reason.POD_HASH: 1,
        Reason.GROUP_LABEL: 1,
        Reason.POLICY_GONE: 1,
    }
    assert found.counts[0] == (Reason.RUNSC_VERSION, 2)
    two = verdict(*snapshots, explained=2)
    assert [each.snapshot.name for each in two.candidates] == ["hash-2", "hash-1"]
    assert two.counts == found.counts


def test_a_policy_that_does_not_select_the_pod_is_named_with_what_it_wants() -> None:
    second = replace(
        POLICY, metadata=ObjectMeta(name="db", namespace="team-a"), selector=LabelSelector((("app", "db"),))
    )
    found = verdict(replace(SNAPSHOT, policy_name="db"), policies=(POLICY, second))
    (candidate,) = found.candidates
    assert candidate.refusals[0].reason is Reason.POLICY_SELECTOR
    assert "app=db" in candidate.refusals[0].message


def test_a_pod_that_no_policy_selects_is_told_that_first() -> None:
    found = verdict(SNAPSHOT, pod=replace(POD, labels={}, has_tpu=True))
    assert [refusal.reason for refusal in found.refusals] == [Reason.NO_POLICY, Reason.TPU]


# --- from the API's object


def test_facts_are_taken_from_a_pod_snapshot() -> None:
    meta = ObjectMeta(name="s1", namespace="team-a", labels={"tenant": "t1"}, creation_timestamp="2026-11-30T22:00:00Z")
    ready = Condition("Ready", Status.TRUE, "AllSnapshotsAvailable")
    origin = Origin(pod_name="web-0", pod_uid="u", pod_hash=HASH, node_facts=NODE.to_mapping())
    snapshot = PodSnapshot(meta, "web", SnapshotStatus((ready,), origin=origin))
    assert snapshot_facts(snapshot) == SNAPSHOT
    unreadable = replace(snapshot, status=SnapshotStatus((ready,), origin=replace(origin, node_facts={"cpu": 1})))
    assert snapshot_facts(unreadable).needs == replace(NEEDS, machine=None)
    begun = PodSnapshot(meta, "web")
    assert verdict(snapshot_facts(begun)).candidates[0].refusals[0].reason is Reason.POD_HASH
    going = replace(snapshot, metadata=replace(meta, deletion_timestamp="2026-12-01T00:00:00Z"))
    assert snapshot_facts(going).needs.phase is Phase.DELETING


def test_a_hash_that_was_made_to_collide_is_not_told_before_snapshots_of_the_pod_itself() -> None:
    forged = replace(
        SNAPSHOT,
        name="forged",
        created="2099-01-01T00:00:00Z",
        needs=replace(NEEDS, pod_hash=replace(HASH, sha256="cc" * 32)),
    )
    own = replace(SNAPSHOT, name="own", needs=replace(NEEDS, machine=replace(NODE, runsc_version="old")))
    found = verdict(forged, own)
    assert [each.snapshot.name for each in found.candidates] == ["own", "forged"]
    assert found.deciding is not None
    assert found.deciding.reason is Reason.RUNSC_VERSION
