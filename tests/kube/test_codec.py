"""Objects are read as GKE's API has them, problems are reported all at once, and what is written can be read."""

import copy
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.kube.codec import parse, to_mapping
from agent.kube.conditions import Condition, Status
from agent.kube.errors import InvalidObject
from agent.kube.meta import ObjectMeta
from agent.kube.objects import (
    FileLocation,
    GcsLocation,
    PodSnapshot,
    PodSnapshotManualTrigger,
    PodSnapshotPolicy,
    PodSnapshotStorageConfig,
    PostCheckpoint,
    Resource,
    SnapshotStatus,
    TokenSource,
    TriggerStatus,
    TriggerType,
    new_snapshot,
)
from agent.kube.origin import Origin
from agent.kube.selectors import LabelSelector, Operator, Requirement
from agent.podspec.identity import PodHash

POLICY: dict[str, Any] = {
    "apiVersion": "podsnapshot.gke.io/v1",
    "kind": "PodSnapshotPolicy",
    "metadata": {"name": "web", "namespace": "team-a"},
    "spec": {
        "storageConfigName": "bucket",
        "selector": {"matchLabels": {"app": "web"}},
        "triggerConfig": {"type": "workload"},
    },
}
STORAGE: dict[str, Any] = {
    "apiVersion": "podsnapshot.gke.io/v1",
    "kind": "PodSnapshotStorageConfig",
    "metadata": {"name": "bucket"},
    "spec": {"snapshotStorageConfig": {"gcs": {"bucket": "my-snapshots"}}},
}
TRIGGER: dict[str, Any] = {
    "apiVersion": "podsnapshot.gke.io/v1",
    "kind": "PodSnapshotManualTrigger",
    "metadata": {"name": "now", "namespace": "team-a"},
    "spec": {"targetPod": "web-0"},
}
SNAPSHOT: dict[str, Any] = {
    "apiVersion": "podsnapshot.gke.io/v1",
    "kind": "PodSnapshot",
    "metadata": {"name": "5f2f6f5e-0000-4000-8000-000000000000", "namespace": "team-a"},
    "spec": {"policyName": "web"},
}
_DELETED = object()


def changed(document: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    """Give a copy with the member at a dotted path set, or taken out."""
    document = copy.deepcopy(document)
    *parents, last = path.split(".")
    inner = document
    for parent in parents:
        inner = inner.setdefault(parent, {})
    if value is _DELETED:
        del inner[last]
    else:
        inner[last] = value
    return document


def test_a_policy_is_read_with_the_defaults_of_the_api() -> None:
    assert parse(POLICY, where="x") == PodSnapshotPolicy(
        ObjectMeta(name="web", namespace="team-a"),
        storage_config_name="bucket",
        selector=LabelSelector((("app", "web"),)),
        trigger_type=TriggerType.WORKLOAD,
        post_checkpoint=PostCheckpoint.RESUME,
        last_access_timeout="",
        grouping_labels=(),
        max_snapshots_per_group=0,
    )


def test_all_of_a_policy_is_read() -> None:
    text = """
        apiVersion: podsnapshot.gke.io/v1
        kind: PodSnapshotPolicy
        metadata: {name: fleet, namespace: agents}
        spec:
          storageConfigName: bucket
          selector:
            matchLabels: {app: sandbox}
            matchExpressions:
            - {key: tier, operator: In, values: [free, paid]}
            - {key: canary, operator: DoesNotExist}
          snapshotScope: whole-pod
          triggerConfig: {type: manual, postCheckpoint: stop}
          retentionConfig: {lastAccessTimeout: 1mo15d}
          snapshotGroupingRules:
            groupByLabelValue:
              labels: [agents.x-k8s.io/sandbox-name-hash]
              groupRetentionPolicy: {maxSnapshotCountPerGroup: 3}
    """
    policy = parse(yaml.safe_load(text), where="x", is_from_person=True)
    assert isinstance(policy, PodSnapshotPolicy)
    assert policy.selector.match_expressions == (
        Requirement("tier", Operator.IN, ("free", "paid")),
        Requirement("canary", Operator.DOES_NOT_EXIST),
    )
    assert (policy.trigger_type, policy.post_checkpoint) == (TriggerType.MANUAL, PostCheckpoint.STOP)
    assert policy.last_access_timeout_s == 45 * 86400
    assert policy.grouping_labels == ("agents.x-k8s.io/sandbox-name-hash",)
    assert policy.max_snapshots_per_group == 3


@pytest.mark.parametrize(
    ("config", "location", "url"),
    [
        ({"gcs": {"bucket": "b-1"}}, GcsLocation("b-1"), "gs://b-1"),
        (
            {"gcs": {"bucket": "b-1", "path": "/a/b/", "tokenSource": "federatedP4SA"}},
            GcsLocation("b-1", "a/b", TokenSource.FEDERATED_P4SA),
            "gs://b-1/a/b",
        ),
        ({"gcs": {"bucket": "b-1", "path": "a b"}}, GcsLocation("b-1", "a b"), "gs://b-1/a%20b"),
        ({"file": {"directory": "/srv/snap#1/"}}, FileLocation("/srv/snap#1"), "file:///srv/snap%231"),
    ],
)
def test_a_storage_config_names_a_bucket_or_a_directory(
    config: dict[str, object], location: GcsLocation | FileLocation, url: str
) -> None:
    parsed = parse(changed(STORAGE, "spec.snapshotStorageConfig", config), where="x", is_from_person=True)
    assert isinstance(parsed, PodSnapshotStorageConfig)
    assert parsed.location == location
    assert parsed.location.store_url == url
    assert parse(to_mapping(parsed), where="x") == parsed


REFUSED = {
    "no kind": (changed(POLICY, "kind", _DELETED), "kind: must be one of PodSnapshotStorageConfig, "),
    "another version": (
        changed(POLICY, "apiVersion", "podsnapshot.gke.io/v1alpha1"),
        "apiVersion: must be podsnapshot",
    ),
    "no name": (changed(POLICY, "metadata.name", _DELETED), "metadata.name: is required"),
    "a name that leads elsewhere": (changed(POLICY, "metadata.name", "../x"), "metadata.name: must be a name"),
    "a name with a slash": (changed(POLICY, "metadata.name", "a/b"), "metadata.name: must be a name"),
    "a name that is too long": (changed(POLICY, "metadata.name", "a" * 254), "metadata.name: must be a name"),
    "a namespace with a dot": (changed(POLICY, "metadata.namespace", "a.b"), "metadata.namespace: must be the name"),
    "a namespace for the cluster's": (changed(STORAGE, "metadata.namespace", "a"), "belongs to the whole cluster"),
    "a generated name": (changed(POLICY, "metadata.generateName", "web-"), "metadata.generateName: can't be used"),
    "a typo in the metadata": (
        changed(POLICY, "metadata.lables", {}),
        "lables: is not a known field; did you mean labels?",
    ),
    "a typo at the top": (changed(POLICY, "Spec", {}), "Spec: is not a known field; did you mean spec?"),
    "a typo in the spec": (
        changed(POLICY, "spec.retention", {}),
        "spec.retention: is not a known field; did you mean retentionConfig?",
    ),
    "a field of nothing": (changed(POLICY, "spec.zzz", {}), "spec.zzz: is not a known field"),
    "a label that is none": (
        changed(POLICY, "metadata.labels", {"a b": "c"}),
        "metadata.labels: 'a b': 'c' is no label",
    ),
    "a label that is a number": (changed(POLICY, "metadata.labels", {"a": 1}), "metadata.labels.a: must be a text"),
    "no spec": (changed(POLICY, "spec", _DELETED), "spec: is required"),
    "no storage config": (changed(POLICY, "spec.storageConfigName", _DELETED), "spec.storageConfigName: is required"),
    "no selector": (changed(POLICY, "spec.selector", _DELETED), "spec.selector: is required"),
    "no selector but null": (changed(POLICY, "spec.selector", None), "spec.selector: is required"),
    "no trigger": (changed(POLICY, "spec.triggerConfig", _DELETED), "spec.triggerConfig: is required"),
    "a trigger of GKE's own tools": (
        changed(POLICY, "spec.triggerConfig.type", "onDelete"),
        "spec.triggerConfig.type: must be workload or manual, not 'onDelete'",
    ),
    "an unknown end": (
        changed(POLICY, "spec.triggerConfig.postCheckpoint", "kill"),
        "spec.triggerConfig.postCheckpoint: must be resume or stop, not 'kill'",
    ),
    "the rootfs only": (
        changed(POLICY, "spec.snapshotScope", "rootfs-only"),
        "spec.snapshotScope: rootfs-only is not supported yet",
    ),
    "an unknown scope": (changed(POLICY, "spec.snapshotScope", "all"), "spec.snapshotScope: must be whole-pod"),
    "a retention without a time": (changed(POLICY, "spec.retentionConfig", {}), "lastAccessTimeout: is required"),
    "a retention in weeks": (
        changed(POLICY, "spec.retentionConfig", {"lastAccessTimeout": "2w"}),
        "spec.retentionConfig.lastAccessTimeout: '2w' is not a duration",
    ),
    "groups by nothing": (
        changed(POLICY, "spec.snapshotGroupingRules.groupByLabelValue.labels", []),
        "spec.snapshotGroupingRules.groupByLabelValue.labels: must name a label",
    ),
    "groups twice by the same": (
        changed(POLICY, "spec.snapshotGroupingRules.groupByLabelValue.labels", ["a", "a"]),
        "names a label twice",
    ),
    "rules without a rule": (changed(POLICY, "spec.snapshotGroupingRules", {}), "groupByLabelValue: is required"),
    "a negative count": (
        changed(
            POLICY,
            "spec.snapshotGroupingRules.groupByLabelValue",
            {"labels": ["a"], "groupRetentionPolicy": {"maxSnapshotCountPerGroup": -1}},
        ),
        "maxSnapshotCountPerGroup: must be a whole number",
    ),
    "an operator without values": (
        changed(POLICY, "spec.selector.matchExpressions", [{"key": "a", "operator": "In"}]),
        "spec.selector.matchExpressions[0].values: must have a value for In",
    ),
    "an operator with values": (
        changed(POLICY, "spec.selector.matchExpressions", [{"key": "a", "operator": "Exists", "values": ["b"]}]),
        "spec.selector.matchExpressions[0].values: must be empty for Exists",
    ),
    "an unknown operator": (
        changed(POLICY, "spec.selector.matchExpressions", [{"key": "a", "operator": "Gt", "values": ["1"]}]),
        "spec.selector.matchExpressions[0].operator: must be In, NotIn, Exists or DoesNotExist",
    ),
    "both stores": (
        changed(STORAGE, "spec.snapshotStorageConfig.file", {"directory": "/srv"}),
        "spec.snapshotStorageConfig.gcs: exactly one of gcs and file",
    ),
    "no store": (changed(STORAGE, "spec.snapshotStorageConfig", {}), "exactly one of gcs and file"),
    "a bucket that is none": (
        changed(STORAGE, "spec.snapshotStorageConfig.gcs.bucket", "gs://x"),
        "spec.snapshotStorageConfig.gcs.bucket: must be the name of a bucket",
    ),
    "a path that leads out": (
        changed(STORAGE, "spec.snapshotStorageConfig.gcs.path", "a/../b"),
        "spec.snapshotStorageConfig.gcs.path: must not have . or ..",
    ),
    "a directory that leads out": (
        changed(STORAGE, "spec.snapshotStorageConfig", {"file": {"directory": "/srv/../etc"}}),
        "spec.snapshotStorageConfig.file.directory: must not have . or ..",
    ),
    "a relative directory": (
        changed(STORAGE, "spec.snapshotStorageConfig", {"file": {"directory": "srv"}}),
        "spec.snapshotStorageConfig.file.directory: must be an absolute path",
    ),
    "an unknown token": (
        changed(STORAGE, "spec.snapshotStorageConfig.gcs.tokenSource", "me"),
        "tokenSource: must be podKSA or federatedP4SA",
    ),
    "no target": (changed(TRIGGER, "spec.targetPod", _DELETED), "spec.targetPod: is required"),
    "a target that is no pod": (changed(TRIGGER, "spec.targetPod", "a b"), "spec.targetPod: must be the name of a pod"),
}


@pytest.mark.parametrize(("document", "problem"), REFUSED.values(), ids=REFUSED)
def test_a_persons_mistake_is_refused_with_the_fields_path(document: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidObject) as caught:
        parse(document, where="policies.yaml", is_from_person=True)
    assert any(problem in each for each in caught.value.problems), caught.value.problems
    assert str(caught.value).startswith("policies.yaml: ")


def test_all_problems_are_reported_at_once() -> None:
    document = changed(changed(POLICY, "spec.triggerConfig.type", "later"), "spec.storageConfigName", 7)
    document = changed(document, "spec.retention", {})
    with pytest.raises(InvalidObject) as caught:
        parse(document, where="x", is_from_person=True)
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "spec.storageConfigName",
        "spec.triggerConfig.type",
        "spec.retention",
    ]


def test_what_kubectl_gives_can_be_written_into_a_file() -> None:
    exported = changed(POLICY, "metadata.managedFields", [{"manager": "kubectl"}])
    exported["metadata"] |= {
        "uid": "u",
        "resourceVersion": "77",
        "generation": 3,
        "creationTimestamp": "2026-01-01T00:00:00Z",
    }
    exported["status"] = {"conditions": [{"type": "?", "nonsense": []}]}
    assert isinstance(parse(exported, where="x", is_from_person=True), PodSnapshotPolicy)


def test_fields_of_a_newer_api_are_passed_over_where_a_server_has_checked_them() -> None:
    newer = changed(changed(POLICY, "spec.encryption", {"kms": "x"}), "status.shards", 3)
    assert parse(newer, where="x") == parse(POLICY, where="x")


@pytest.mark.parametrize(
    "document",
    [None, [], "text", 7, {}, {"kind": []}, {1: 2}, {"apiVersion": "podsnapshot.gke.io/v1", "kind": "PodSnapshot"}],
)
def test_anything_else_is_refused_not_raised(document: object) -> None:
    with pytest.raises(InvalidObject):
        parse(document, where="x")


def test_a_hostile_object_gets_a_bounded_answer() -> None:
    document = changed(POLICY, "metadata.labels", {"k" * 500 + str(i): "v" for i in range(250)})
    with pytest.raises(InvalidObject) as caught:
        parse(document, where="x", is_from_person=True)
    assert len(str(caught.value)) < 20_000


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=12,
)


@st.composite
def mangled(draw: st.DrawFn) -> dict[str, Any]:
    """Give a good object with something replaced somewhere."""
    document: dict[str, Any] = copy.deepcopy(draw(st.sampled_from([POLICY, STORAGE, TRIGGER, SNAPSHOT])))
    inner = document
    while True:
        key = draw(st.sampled_from(sorted(inner)))
        if not isinstance(inner[key], dict) or not inner[key] or draw(st.booleans()):
            inner[key] = draw(json_values)
            return document
        inner = inner[key]


@settings(max_examples=200)
@given(mangled(), st.booleans())
def test_whatever_is_given_it_is_read_or_refused(document: dict[str, Any], is_from_person: bool) -> None:
    try:
        resource = parse(document, where="x", is_from_person=is_from_person)
    except InvalidObject:
        return
    assert parse(to_mapping(resource), where="x") == resource


names = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,10}[a-z0-9])?", fullmatch=True)
label_keys = st.from_regex(r"([a-z]{1,5}\.io/)?[A-Za-z]([A-Za-z0-9._-]{0,10}[A-Za-z0-9])?", fullmatch=True)
label_values = st.from_regex(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,10}[A-Za-z0-9])?)?", fullmatch=True)
labels = st.dictionaries(label_keys, label_values, max_size=3)
times = st.just("2026-11-30T22:53:28Z")
printable = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), max_size=20)
metas = st.builds(
    ObjectMeta,
    name=names,
    namespace=names,
    uid=names,
    labels=labels,
    annotations=st.dictionaries(label_keys, st.text(st.characters(codec="utf-8"), max_size=20), max_size=3),
    resource_version=st.just("") | st.just("12"),
    generation=st.integers(0, 9),
    creation_timestamp=st.just("") | times,
    deletion_timestamp=st.just("") | times,
)
conditions = st.lists(
    st.builds(Condition, names, st.sampled_from(Status), names, printable, times, st.integers(0, 9)), max_size=3
).map(tuple)
requirements = st.builds(
    Requirement,
    label_keys,
    st.sampled_from([Operator.IN, Operator.NOT_IN]),
    st.lists(label_values, min_size=1).map(tuple),
) | st.builds(Requirement, label_keys, st.sampled_from([Operator.EXISTS, Operator.DOES_NOT_EXIST]))
hashes = st.builds(
    PodHash,
    st.integers(0, 9),
    st.from_regex(r"[0-9a-f]{32}", fullmatch=True),
    st.from_regex(r"[0-9a-f]{64}", fullmatch=True),
)
origins = st.builds(
    Origin,
    pod_name=names,
    pod_uid=names,
    pod_hash=hashes,
    distilled=st.dictionaries(names, json_values, max_size=3),
    containers=st.lists(names, max_size=3).map(tuple),
    gpus=st.integers(0, 8),
    node_name=names,
    node_facts=st.dictionaries(names, json_values, max_size=3),
)
snapshots = st.builds(
    PodSnapshot,
    metas,
    names,
    st.builds(
        SnapshotStatus,
        conditions,
        st.integers(0, 9),
        st.just("") | times,
        st.integers(0, 9),
        st.sampled_from(["", "gs://b/x/id", "file:///srv/id"]),
        st.none() | origins,
    ),
)
triggers = st.builds(
    PodSnapshotManualTrigger, metas, names, st.builds(TriggerStatus, conditions, st.integers(0, 9), names | st.just(""))
)
policies = st.builds(
    PodSnapshotPolicy,
    metas,
    storage_config_name=names,
    selector=st.builds(
        LabelSelector, labels.map(lambda found: tuple(found.items())), st.lists(requirements, max_size=3).map(tuple)
    ),
    trigger_type=st.sampled_from(TriggerType),
    post_checkpoint=st.sampled_from(PostCheckpoint),
    last_access_timeout=st.sampled_from(["", "30d", "1y6mo"]),
    grouping_labels=st.lists(label_keys, unique=True, max_size=3).map(tuple),
)


@settings(max_examples=150)
@given(snapshots | triggers | policies)
def test_what_is_written_is_read_back(resource: Resource) -> None:
    assert parse(to_mapping(resource), where="x") == resource


def test_a_snapshot_is_written_as_clients_read_it() -> None:
    policy = parse(changed(POLICY, "spec.snapshotGroupingRules.groupByLabelValue.labels", ["app"]), where="x")
    assert isinstance(policy, PodSnapshotPolicy)
    snapshot = new_snapshot(
        "id-1", policy, pod_name="web-0", pod_labels={"app": "web", "other": "x"}, node_name="node-7", trigger="now"
    )
    status = SnapshotStatus(
        (Condition("Ready", Status.TRUE, "AllSnapshotsAvailable", "", "2026-11-30T22:53:28Z"),),
        snapshot_url="gs://b/x/id-1",
        last_access_time="2026-12-01T00:00:00Z",
    )
    assert to_mapping(PodSnapshot(snapshot.metadata, snapshot.policy_name, status)) == {
        "apiVersion": "podsnapshot.gke.io/v1",
        "kind": "PodSnapshot",
        "metadata": {
            "name": "id-1",
            "namespace": "team-a",
            "labels": {"app": "web", "gke-pod-snapshot-triggered-by": "now"},
            "annotations": {
                "podsnapshot.gke.io/origin-pod": "web-0",
                "podsnapshot.gke.io/origin-node": "node-7",
            },
        },
        "spec": {"policyName": "web"},
        "status": {
            "conditions": [
                {
                    "type": "Ready",
                    "status": "True",
                    "reason": "AllSnapshotsAvailable",
                    "message": "",
                    "lastTransitionTime": "2026-11-30T22:53:28Z",
                }
            ],
            "lastAccessTime": "2026-12-01T00:00:00Z",
            "storageStatus": {"gcs": {"observedGCSPath": "gs://b/x/id-1"}, "snapshotURL": "gs://b/x/id-1"},
        },
    }


def test_a_triggers_snapshot_is_an_object_with_a_name() -> None:
    trigger = PodSnapshotManualTrigger(ObjectMeta(name="t", namespace="n"), "p", TriggerStatus(snapshot_created="id-1"))
    assert to_mapping(trigger)["status"] == {"snapshotCreated": {"name": "id-1"}}
