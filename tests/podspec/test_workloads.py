"""Pods as their controllers make them."""

from typing import Any

import pytest

from agent.podspec.distil import distil
from agent.podspec.identity import pod_hash
from agent.podspec.shapes import PodSpecError
from agent.podspec.workloads import Workload, workload_of

TEMPLATE: dict[str, Any] = {
    "metadata": {"labels": {"app": "web"}},
    "spec": {"containers": [{"name": "web", "image": "nginx"}], "volumes": [{"name": "tmp"}]},
}
POD = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "web"}, **{"spec": TEMPLATE["spec"]}}


def made(version: str, kind: str, spec: dict[str, Any], name: str = "web") -> Workload:
    found = workload_of({"apiVersion": version, "kind": kind, "metadata": {"name": name}, "spec": spec}, "f")
    assert found is not None
    return found


WORKLOADS = {
    "Pod": made("v1", "Pod", TEMPLATE["spec"]),
    "ReplicationController": made("v1", "ReplicationController", {"template": TEMPLATE}),
    "DaemonSet": made("apps/v1", "DaemonSet", {"template": TEMPLATE}),
    "Deployment": made("apps/v1", "Deployment", {"template": TEMPLATE}),
    "ReplicaSet": made("apps/v1", "ReplicaSet", {"template": TEMPLATE}),
    "StatefulSet": made("apps/v1", "StatefulSet", {"template": TEMPLATE}),
    "Job": made("batch/v1", "Job", {"template": TEMPLATE}),
    "CronJob": made("batch/v1", "CronJob", {"jobTemplate": {"spec": {"template": TEMPLATE}}}),
}


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS.keys())
def test_every_workload_makes_the_pod_of_its_template(workload: Workload) -> None:
    assert pod_hash(distil(workload.pod())) == pod_hash(distil(TEMPLATE))
    assert not workload.differs_by_index
    assert str(workload) == f"{workload.kind} default/web"


def test_a_pod_template_is_its_own() -> None:
    found = workload_of({"apiVersion": "v1", "kind": "PodTemplate", "template": TEMPLATE}, "f")
    assert found is not None
    assert distil(found.pod()) == distil(TEMPLATE)


def test_each_replica_of_a_stateful_set_has_claims_of_its_own() -> None:
    claims = [{"metadata": {"name": "data"}}, {"metadata": {"name": "tmp"}}]
    spec = {"template": TEMPLATE, "volumeClaimTemplates": claims, "ordinals": {"start": 3}}
    workload = made("apps/v1", "StatefulSet", spec, name="db")
    assert workload.differs_by_index
    # A volume of the template by a claim's name gives way to the claim.
    volumes = [
        {"name": "data", "persistentVolumeClaim": {"claimName": "data-db-3"}},
        {"name": "tmp", "persistentVolumeClaim": {"claimName": "tmp-db-3"}},
    ]
    expected = {"spec": {**TEMPLATE["spec"], "volumes": volumes}}
    assert distil(workload.pod()) == distil(workload.pod(3)) == distil(expected)
    assert len({pod_hash(distil(workload.pod(index))) for index in range(5)}) == 5


@pytest.mark.parametrize(
    "workload",
    [
        made("batch/v1", "Job", {"template": TEMPLATE, "completionMode": "Indexed"}),
        made("batch/v1", "CronJob", {"jobTemplate": {"spec": {"template": TEMPLATE, "completionMode": "Indexed"}}}),
    ],
)
def test_each_pod_of_an_indexed_job_has_its_index(workload: Workload) -> None:
    assert workload.differs_by_index
    assert distil(workload.pod(2))["metadata"] == {"labels": {"batch.kubernetes.io/job-completion-index": "2"}}


@pytest.mark.parametrize(
    ("kind", "pod_name", "index"),
    [
        ("Pod", "web", 0),
        ("Deployment", "web-6d4b75cb6d-x7k2p", 0),
        ("ReplicaSet", "web-x7k2p", 0),
        ("DaemonSet", "web-x7k2p", 0),
        ("StatefulSet", "web-12", 12),
        ("Job", "web-x7k2p", 0),
        ("Job", "web-7-x7k2p", 7),
        ("CronJob", "web-29401440-x7k2p", 0),
        ("CronJob", "web-29401440-3-x7k2p", 3),
    ],
)
def test_a_pod_is_known_as_one_of_its_workload_by_its_name(kind: str, pod_name: str, index: int) -> None:
    assert WORKLOADS[kind].makes(pod_name)
    assert WORKLOADS[kind].index_of(pod_name) == index


def test_a_pod_is_known_by_its_name_where_that_was_cut_to_63_characters() -> None:
    for name in ("w" * 50, "w" * 58, "w" * 63):
        workload = made("apps/v1", "Deployment", {"template": TEMPLATE}, name=name)
        assert workload.makes(f"{name}-6d4b75cb6d-"[:58] + "x7k2p")
        assert not workload.makes(f"v{name}-6d4b75cb6d-"[:58] + "x7k2p")
    assert not made("apps/v1", "StatefulSet", {"template": TEMPLATE}).makes("web-" + "1" * 59)


@pytest.mark.parametrize(
    ("kind", "pod_name"),
    [
        ("Pod", "web-1"),
        ("Deployment", "web"),
        ("Deployment", "web-api-6d4b75cb6d-x7k2p"),
        ("Deployment", "other-6d4b75cb6d-x7k2p"),
        ("StatefulSet", "web-x7k2p"),
        ("StatefulSet", "web-1-2"),
        ("Job", "web-7"),
    ],
)
def test_a_pod_of_another_workload_is_not_taken_for_one_of_its_own(kind: str, pod_name: str) -> None:
    assert not WORKLOADS[kind].makes(pod_name)


def test_kinds_that_make_no_pods_are_passed_over() -> None:
    assert workload_of({"apiVersion": "v1", "kind": "Service"}, "f") is None
    assert workload_of({"apiVersion": "example.com/v1", "kind": "Deployment"}, "f") is None


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        ({"spec": {}}, "f: kind and apiVersion are missing"),
        ({"apiVersion": "v1", "kind": "Pod", "metadata": 1}, "f: metadata: must be an object"),
        ({"apiVersion": "apps/v1", "kind": "Deployment", "spec": {"template": []}}, "f: spec"),
        ({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": 1}}, "name and namespace must be text"),
        ({"apiVersion": "apps/v1", "kind": "StatefulSet", "spec": {"volumeClaimTemplates": {}}}, "must be a list"),
        ({"apiVersion": "apps/v1", "kind": "StatefulSet", "spec": {"volumeClaimTemplates": [{}]}}, "one has no name"),
    ],
)
def test_what_is_no_object_of_its_kind_is_refused(manifest: dict[str, Any], message: str) -> None:
    with pytest.raises(PodSpecError) as caught:
        workload_of(manifest, "f")
    assert message in str(caught.value)
