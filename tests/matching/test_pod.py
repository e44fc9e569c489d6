"""What matching takes from a Pod, and what keeps a pod from being saved at all."""

from dataclasses import replace
from typing import Any

import pytest

from agent.kube.errors import InvalidObject
from agent.matching.facts import MachineFacts
from agent.matching.pod import PodFacts, limits, pod_facts
from agent.matching.reasons import Reason
from tests.matching.fleet import GPU_NODE, GPU_POD, HASH, NODE, POD


def gpu(count: object, **more: object) -> dict[str, Any]:
    return {"name": "c", "resources": {"limits": {"nvidia.com/gpu": count, "cpu": "500m"}}} | more


PODS: dict[str, tuple[dict[str, Any], dict[str, object]]] = {
    "an empty one": ({}, {"namespace": "default", "name": "", "gpus": 0}),
    "a plain one": (
        {"metadata": {"name": "web-0", "namespace": "a", "labels": {"app": "web"}}},
        {"namespace": "a", "name": "web-0", "labels": {"app": "web"}, "pin": ""},
    ),
    "a pinned one": ({"metadata": {"annotations": {"podsnapshot.gke.io/ps-name": "id-1"}}}, {"pin": "id-1"}),
    "GPUs of containers add up": ({"spec": {"containers": [gpu(1), gpu("2")]}}, {"gpus": 3}),
    "an init container's are its own": ({"spec": {"containers": [gpu(1)], "initContainers": [gpu(4)]}}, {"gpus": 4}),
    "a sidecar's add up": (
        {"spec": {"containers": [gpu(1)], "initContainers": [gpu(1, restartPolicy="Always")]}},
        {"gpus": 2},
    ),
    "TPUs": (
        {"spec": {"containers": [{"name": "c", "resources": {"limits": {"google.com/tpu": "4"}}}]}},
        {"has_tpu": True, "gpus": 0},
    ),
    "the FUSE sidecar by annotation": (
        {"metadata": {"annotations": {"gke-gcsfuse/volumes": "true"}}},
        {"has_fuse_sidecar": True},
    ),
    "the FUSE sidecar by its container": (
        {"spec": {"initContainers": [{"name": "gke-gcsfuse-sidecar", "restartPolicy": "Always"}]}},
        {"has_fuse_sidecar": True},
    ),
    "the FUSE sidecar by its volume": (
        {"spec": {"volumes": [{"name": "v", "csi": {"driver": "gcsfuse.csi.storage.gke.io"}}]}},
        {"has_fuse_sidecar": True},
    ),
    "other volumes": ({"spec": {"volumes": [{"name": "v", "emptyDir": {}}]}}, {"has_fuse_sidecar": False}),
}


@pytest.mark.parametrize(("pod", "expected"), PODS.values(), ids=PODS)
def test_facts_are_taken_from_a_pod(pod: dict[str, Any], expected: dict[str, object]) -> None:
    facts = pod_facts(pod, HASH)
    assert {name: getattr(facts, name) for name in expected} == expected
    assert facts.pod_hash is HASH


@pytest.mark.parametrize(
    "pod",
    [
        {"metadata": []},
        {"metadata": {"labels": {"a": 1}}},
        {"spec": {"containers": {}}},
        {"spec": {"containers": [gpu("1.5")]}},
        {"spec": {"containers": [gpu(-1)]}},
        {"spec": {"containers": [gpu(True)]}},
        {"spec": {"containers": [gpu("9" * 9)]}},
    ],
)
def test_a_pod_that_is_none_is_refused(pod: dict[str, Any]) -> None:
    with pytest.raises(InvalidObject):
        pod_facts(pod, HASH)


LIMITS: dict[str, tuple[PodFacts, MachineFacts, list[Reason]]] = {
    "nothing": (POD, NODE, []),
    "E2": (POD, replace(NODE, machine_type="e2-standard-4"), [Reason.E2_MACHINE]),
    "a custom E2": (POD, replace(NODE, machine_type="e2-custom-4-8192"), [Reason.E2_MACHINE]),
    "TPUs": (replace(POD, has_tpu=True), NODE, [Reason.TPU]),
    "a TPU machine": (POD, replace(NODE, machine_type="ct5lp-hightpu-4t"), [Reason.TPU]),
    "the FUSE sidecar": (replace(POD, has_fuse_sidecar=True), NODE, [Reason.FUSE_SIDECAR]),
    "a GPU": (GPU_POD, GPU_NODE, []),
    "a GPU that isn't there": (GPU_POD, NODE, [Reason.GPU_MISSING, Reason.GPU_MACHINE_TYPE]),
}


@pytest.mark.parametrize(("pod", "here", "reasons"), LIMITS.values(), ids=LIMITS)
def test_each_limit_has_its_reason(pod: PodFacts, here: MachineFacts, reasons: list[Reason]) -> None:
    assert [refusal.reason for refusal in limits(pod, here)] == reasons
