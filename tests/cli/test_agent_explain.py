"""`snapagent explain`: what decides, and which field differs, for what happens to people."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.kube.conditions import Step
from agent.matching.facts import Architecture, Gpus, MachineFacts
from tests.cli.agent_places import DEPLOYMENT, GPU_NODE, NODE, Place, deployment


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path).prepare()


def _server(pod: Any) -> Any:
    return pod["spec"]["containers"][0]


# What people change, and the one line that tells it.
CHANGES: dict[str, tuple[Callable[[Any], object], list[str]]] = {
    "a flag's value": (
        lambda pod: _server(pod)["args"].__setitem__(2, "--threads=8"),
        ['spec.containers[0 "server"].args[2]: "--threads=4" became "--threads=8"'],
    ),
    "one flag more": (
        lambda pod: _server(pod)["args"].insert(0, "--verbose"),
        ['spec.containers[0 "server"].args[0]: "--verbose" was added'],
    ),
    "a new image": (
        lambda pod: _server(pod).update(image="example.com/web:2"),
        ['spec.containers[0 "server"].image: "example.com/web:1" became "example.com/web:2"'],
    ),
    "a config map mounted": (
        lambda pod: (
            pod["spec"]["volumes"].insert(0, {"name": "conf", "configMap": {"name": "web"}}),
            _server(pod)["volumeMounts"].insert(0, {"name": "conf", "mountPath": "/etc/web"}),
        ),
        [
            'spec.volumes["conf"]: a volume: {"configMap": {"name": "web"}} was added',
            'spec.containers[0 "server"].volumeMounts["/etc/web"]: a mount of "conf" was added',
        ],
    ),
    "a sidecar injected before the server": (
        lambda pod: pod["spec"]["containers"].insert(0, {"name": "proxy", "image": "mesh:1"}),
        ['spec.containers[0 "proxy"]: a container of image "mesh:1" was added'],
    ),
    "hardening": (
        lambda pod: _server(pod).update(securityContext={"readOnlyRootFilesystem": True, "runAsUser": 1000}),
        [
            'spec.containers[0 "server"].securityContext.readOnlyRootFilesystem: true was added',
            'spec.containers[0 "server"].securityContext.runAsUser: 1000 was added',
        ],
    ),
    "another runtime class": (
        lambda pod: pod["spec"].update(runtimeClassName="gvisor-debug"),
        ['spec.runtimeClassName: "gvisor" became "gvisor-debug"'],
    ),
    "the cache kept on a claim": (
        lambda pod: pod["spec"]["volumes"].__setitem__(
            0, {"name": "cache", "persistentVolumeClaim": {"claimName": "cache"}}
        ),
        [
            'spec.volumes["cache"].emptyDir: {} was removed',
            'spec.volumes["cache"].persistentVolumeClaim: {"claimName": "cache"} was added',
        ],
    ),
    "a preStop hook": (
        lambda pod: _server(pod).update(lifecycle={"preStop": {"exec": {"command": ["sleep", "5"]}}}),
        ['spec.containers[0 "server"].lifecycle.preStop.exec: {"command": ["sleep", "5"]} was added'],
    ),
    "DNS of its own": (
        lambda pod: pod["spec"].update(dnsPolicy="None", dnsConfig={"nameservers": ["1.1.1.1"]}),
        [
            'spec.dnsConfig.nameservers[0]: "1.1.1.1" was added',
            'spec.dnsPolicy: "ClusterFirst" (the default) became "None"',
        ],
    ),
}


@pytest.mark.parametrize(("change", "told"), CHANGES.values(), ids=CHANGES.keys())
def test_a_realistic_change_is_told_field_by_field(
    place: Place, change: Callable[[Any], object], told: list[str]
) -> None:
    name = place.snapshot("one")
    ended = place.explain(deployment(change), "--against", name)
    assert ended.code == 7
    assert (ended.json["would_be_restored"], ended.json["decided_by"]) == (False, "hash")
    [compared] = ended.json["compared"]
    assert compared["name"] == "one"
    told_to_people = place.run(
        "explain", str(place.base / "pod.yaml"), "--against", "one",
        *("--files", str(place.files), "--snapshots", str(place.state)),
    ).out.splitlines()  # fmt: skip
    assert told_to_people[0] == "Deployment default/web would start cold; what decides: hash"
    assert told_to_people[2:] == [f"    hash: {line}" for line in told]


UNCHANGED: dict[str, Callable[[Any], object]] = {
    "nothing": lambda pod: None,
    "its environment": lambda pod: _server(pod).update(env=[{"name": "LEVEL", "value": "debug"}]),
    "its resources": lambda pod: _server(pod).update(resources={"limits": {"memory": "8Gi"}}),
    "its probes": lambda pod: _server(pod).update(readinessProbe={"tcpSocket": {"port": 80}}),
    "where it runs": lambda pod: pod["spec"].update(nodeSelector={"pool": "b"}),
}


@pytest.mark.parametrize("change", UNCHANGED.values(), ids=UNCHANGED.keys())
def test_what_does_not_count_is_restored(place: Place, change: Callable[[Any], object]) -> None:
    ended = place.explain(deployment(change), "--against", place.snapshot("one"))
    assert (ended.code, ended.json["from"], ended.json["decided_by"]) == (0, "one", None)


# Another node than the snapshot's, and what decides then.
NODES: dict[str, tuple[MachineFacts, str, str]] = {
    "an ARM machine": (replace(NODE, architecture=Architecture.ARM64), "hardware", "architecture"),
    "another series": (replace(NODE, machine_type="c3-standard-4"), "hardware", "machine-series"),
    "an older CPU": (replace(NODE, cpu_features=frozenset({"fpu"})), "hardware", "cpu-features"),
    "an E2 machine": (replace(NODE, machine_type="e2-standard-4"), "hardware", "e2-machine"),
    "an update of gVisor": (replace(NODE, runsc_version="release-20260201.0"), "gvisor", "runsc-version"),
    "another build of gVisor": (replace(NODE, runsc_sha256="b" * 64), "gvisor", "runsc-digest"),
}


@pytest.mark.parametrize(("node", "decider", "reason"), NODES.values(), ids=NODES.keys())
def test_another_node_decides_by_what_is_other_there(
    place: Place, node: MachineFacts, decider: str, reason: str
) -> None:
    ended = place.explain(deployment(), "--against", place.snapshot("one"), "--node", place.write_node(node))
    assert (ended.code, ended.json["decided_by"], ended.json["reason"]) == (7, decider, reason)


def test_another_gpu_driver_decides(place: Place) -> None:
    manifest = deployment(lambda pod: _server(pod).update(resources={"limits": {"nvidia.com/gpu": 1}}))
    name = place.snapshot("one", node=GPU_NODE, gpus=1)
    same = place.explain(manifest, "--against", name, "--node", place.write_node(GPU_NODE))
    assert same.code == 0
    other = replace(GPU_NODE, gpus=(Gpus("NVIDIA L4", 1, "590.48.01"),))
    ended = place.explain(manifest, "--against", name, "--node", place.write_node(other))
    assert (ended.code, ended.json["decided_by"], ended.json["reason"]) == (7, "gpu", "gpu-driver")


def test_a_pod_that_no_policy_selects_is_decided_by_policy(place: Place) -> None:
    manifest = deployment(lambda pod: pod["metadata"]["labels"].update(app="api"))
    ended = place.explain(manifest, "--against", place.snapshot("one"))
    assert (ended.code, ended.json["decided_by"], ended.json["reason"]) == (7, "policy", "policy-selector")


def test_a_pod_that_asks_for_its_snapshot_by_name_needs_no_policy(place: Place) -> None:
    def pinned(pod: Any) -> None:
        pod["metadata"] = {"labels": {"app": "api"}, "annotations": {"podsnapshot.gke.io/ps-name": "one"}}

    assert place.explain(deployment(pinned), "--against", place.snapshot("one")).code == 0


def test_a_pod_that_asks_for_another_snapshot_is_decided_by_that(place: Place) -> None:
    def pinned(pod: Any) -> None:
        pod["metadata"]["annotations"] = {"podsnapshot.gke.io/ps-name": "one"}
        _server(pod).update(image="example.com/web:2")

    place.snapshot("one")
    ended = place.explain(deployment(pinned), "--against", place.snapshot("two"))
    assert (ended.code, ended.json["decided_by"], ended.json["reason"]) == (7, "snapshot", "pin-other")
    [compared] = ended.json["compared"]
    told, others = compared["refusals"][0], compared["refusals"][1:]
    assert told["message"] == "podsnapshot.gke.io/ps-name names 'one', and no other is taken"
    assert (told["saved"], told["here"]) == ("two", "one")
    assert [each["reason"] for each in others] == ["pod-hash"]  # all that keeps it from this one is told
    assert ended.err == ""


def test_a_snapshot_that_is_not_ready_decides(place: Place) -> None:
    ended = place.explain(deployment(), "--against", place.snapshot("one", steps=(Step.BEGUN,)))
    assert (ended.code, ended.json["decided_by"], ended.json["reason"]) == (7, "snapshot", "not-ready")


def test_without_a_snapshot_to_compare_with_all_are_asked_as_when_the_pod_starts(place: Place) -> None:
    node = place.write_node(NODE)
    place.snapshot("one")
    place.snapshot("two", deployment(lambda pod: _server(pod).update(args=["--port", "81"]))["spec"]["template"])
    assert place.explain(deployment(), "--node", node).json["from"] == "one"
    changed = deployment(lambda pod: _server(pod).update(args=["--port", "82"]))
    ended = place.explain(changed, "--node", node)
    assert (ended.code, ended.json["decided_by"]) == (7, "hash")
    assert {each["name"]: each["differences"] for each in ended.json["compared"]} == {
        "one": [
            {"path": 'spec.containers[0 "server"].args[1:3]', "old": '"80" "--threads=4"', "new": '"82"'},
        ],
        "two": [{"path": 'spec.containers[0 "server"].args[1]', "old": '"81"', "new": '"82"'}],
    }
    assert ended.json["others"] == {"pod-hash": 2}


def test_two_manifests_are_compared_by_what_counts(place: Place) -> None:
    old = place.write("old.yaml", DEPLOYMENT)
    assert place.explain(deployment(UNCHANGED["its environment"]), "--against", old).code == 0
    ended = place.explain(deployment(CHANGES["a new image"][0]), "--against", old)
    assert (ended.code, ended.json["decided_by"]) == (7, "hash")
    assert len(ended.json["compared"][0]["differences"]) == 1


def test_secrets_in_arguments_are_not_shown(place: Place) -> None:
    old = place.write("old.yaml", deployment(lambda pod: _server(pod)["args"].append("--api-token=one")))
    ended = place.explain(deployment(lambda pod: _server(pod)["args"].append("--api-token=two")), "--against", old)
    assert ended.code == 7
    assert "(hidden)" in ended.out
    assert "one" not in ended.out
    assert "two" not in ended.out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "--node is needed"),
        (("--against", "nothing"), 3, "isn't there"),
        (
            ("--against", "one", "--snapshots", "/nothing"),
            3,
            "/nothing: no such directory (that is the agent's, on its node); --snapshots names",
        ),
        (
            ("--against", "one", "--files", "/nothing"),
            3,
            "/nothing: no such directory (that is the agent's, on its node); --files names",
        ),
        (("--against", "nothing.yaml"), 3, "No such file"),
        (("--against", "pod.yaml", "--node", "node.json"), 2, "only the hash is asked"),
        (("--against", "one", "--node", "pod.yaml"), 2, "no JSON object"),
    ],
)
def test_what_can_not_be_asked_is_told(
    place: Place, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], code: int, message: str
) -> None:
    monkeypatch.chdir(place.base)
    place.snapshot("one")
    place.write_node(NODE)
    ended = place.explain(deployment(), *arguments)
    assert ended.code == code
    assert message in ended.json["error"]["message"]
