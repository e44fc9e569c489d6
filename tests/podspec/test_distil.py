"""What is kept of a pod and what isn't, case by case, and what can't be read."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from agent.podspec.difference import differences
from agent.podspec.distil import distil
from agent.podspec.identity import MAX_BYTES, pod_hash
from agent.podspec.shapes import MAX_LIST_ITEMS, PodSpecError
from streamd.errors import Exit
from tests.calls import calls_of
from tests.podspec.server import TOKEN_PATH, stored, token_volume

POD: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "web", "labels": {"app": "web"}, "annotations": {"dev.gvisor.spec.mount.data.type": "bind"}},
    "spec": {
        "containers": [
            {
                "name": "web",
                "image": "nginx:1.27",
                "args": ["--port", "80"],
                "ports": [{"containerPort": 80}, {"containerPort": 53, "protocol": "UDP"}],
                "volumeMounts": [{"name": "data", "mountPath": "/data"}, {"name": "tmp", "mountPath": "/tmp"}],
            },
            {"name": "log", "image": "fluent-bit:3"},
        ],
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "web"}}, {"name": "tmp", "emptyDir": {}}],
    },
}


def changed(change: Any) -> dict[str, Any]:
    """Give the pod after `change` was done to it."""
    pod = copy.deepcopy(POD)
    change(pod)
    return pod


def first(pod: dict[str, Any]) -> dict[str, Any]:
    container: dict[str, Any] = pod["spec"]["containers"][0]
    return container


def has_same_hash(pod: dict[str, Any]) -> bool:
    return pod_hash(distil(pod)) == pod_hash(distil(POD))


ALIKE = {
    "env": lambda pod: first(pod).update(env=[{"name": "A", "value": "1"}], envFrom=[{"secretRef": {"name": "s"}}]),
    "resources": lambda pod: first(pod).update(resources={"limits": {"memory": "1Gi"}}),
    "probes": lambda pod: first(pod).update(readinessProbe={"httpGet": {"port": 80}}),
    "image pull policy": lambda pod: first(pod).update(imagePullPolicy="Always"),
    "where it runs": lambda pod: pod["spec"].update(
        nodeName="n", nodeSelector={"a": "b"}, tolerations=[{}], affinity={}
    ),
    "labels": lambda pod: pod["metadata"]["labels"].update(app="other", version="2"),
    "other annotations": lambda pod: pod["metadata"]["annotations"].update({"x/y": "z", "dev.gvisorx": "1"}),
    "what the node injects": lambda pod: pod["metadata"]["annotations"].update(
        {"dev.gvisor.internal.checkpoint.path": "/x", "dev.gvisor.internal.checkpoint.enable": "true"}
    ),
    "host ports": lambda pod: first(pod)["ports"][0].update(hostPort=80, hostIP="127.0.0.1"),
    "a debug container": lambda pod: pod["spec"].update(ephemeralContainers=[{"name": "debug", "image": "x"}]),
    "order of volumes": lambda pod: pod["spec"]["volumes"].reverse(),
    "order of mounts": lambda pod: first(pod)["volumeMounts"].reverse(),
    "order of ports": lambda pod: first(pod)["ports"].reverse(),
    "an empty security context": lambda pod: first(pod).update(securityContext={"capabilities": {}}),
    "empty lists": lambda pod: first(pod).update(command=[], volumeDevices=[]),
    "a zero that is no value": lambda pod: pod["spec"].update(hostNetwork=False, hostPID=False),
}
DIFFERENT = {
    "order of containers": lambda pod: pod["spec"]["containers"].reverse(),
    "order of arguments": lambda pod: first(pod)["args"].reverse(),
    "no arguments": lambda pod: first(pod).update(args=None),
    "a command that is one empty text": lambda pod: first(pod).update(command=[""]),
    "a gVisor annotation": lambda pod: pod["metadata"]["annotations"].update({"dev.gvisor.internal.nvproxy": "true"}),
    "a gVisor annotation that is empty": lambda pod: pod["metadata"]["annotations"].update({"dev.gvisor.x": ""}),
    "the index of a job": lambda pod: pod["metadata"]["labels"].update(
        {"batch.kubernetes.io/job-completion-index": "0"}
    ),
    "user 0": lambda pod: pod["spec"].update(securityContext={"runAsUser": 0}),
    "not privileged, said so": lambda pod: first(pod).update(securityContext={"privileged": False}),
    "the name of a claim": lambda pod: pod["spec"]["volumes"][0]["persistentVolumeClaim"].update(claimName="web-1"),
    "another kind of volume": lambda pod: pod["spec"]["volumes"].__setitem__(1, {"name": "tmp", "hostPath": {}}),
    "a size limit of nothing": lambda pod: pod["spec"]["volumes"][1]["emptyDir"].update(sizeLimit=0),
    "a mode of nothing": lambda pod: pod["spec"]["volumes"].append(
        {"name": "c", "configMap": {"name": "c", "defaultMode": 0}}
    ),
    "a volume without a mount": lambda pod: pod["spec"]["volumes"].append({"name": "more"}),
    "a container as an init container": lambda pod: pod["spec"].update(
        initContainers=[pod["spec"]["containers"].pop()]
    ),
}


@pytest.mark.parametrize("change", ALIKE.values(), ids=ALIKE.keys())
def test_what_does_not_count_changes_nothing(change: Any) -> None:
    assert has_same_hash(changed(change))


@pytest.mark.parametrize("change", DIFFERENT.values(), ids=DIFFERENT.keys())
def test_what_counts_changes_the_hash(change: Any) -> None:
    assert not has_same_hash(changed(change))


def test_amounts_are_equal_however_they_are_written() -> None:
    def limited(size: object) -> dict[str, Any]:
        return changed(lambda pod: pod["spec"]["volumes"][1]["emptyDir"].update(sizeLimit=size))

    equal: tuple[object, ...] = ("1Gi", "1024Mi", 2**30, str(2**30), "1073741824000m", "1.0Gi", "1.073741824e9")
    for size in equal:
        assert distil(limited(size))["spec"] == distil(limited("1Gi"))["spec"]
    assert distil(limited("1G")) != distil(limited("1Gi"))
    nonsense: tuple[object, ...] = ("", "1GB", "1e999", "x", "9" * 65, "9" * 60 + "E", "1 Gi", float("inf"), True, "١")
    for size in nonsense:
        with pytest.raises(PodSpecError, match="sizeLimit"):
            distil(limited(size))


def test_null_among_texts_is_an_empty_one_as_an_api_server_reads_it() -> None:
    def given(value: object) -> dict[str, Any]:
        return changed(
            lambda pod: (
                first(pod).update(args=[value]),
                pod["metadata"]["annotations"].update({"dev.gvisor.x": value}),
            )
        )

    assert distil(given(None)) == distil(given(""))


@pytest.mark.parametrize(
    ("reference", "default"),
    [
        ("model", "Always"),
        ("model:latest", "Always"),
        ("registry:5000/team/model", "Always"),
        ("registry:5000/team/model:1", "IfNotPresent"),
        ("model@sha256:0123", "IfNotPresent"),
        ("model:latest@sha256:0123", "Always"),
    ],
)
def test_an_images_pull_policy_is_left_out_when_it_is_the_default_of_its_tag(reference: str, default: str) -> None:
    def volume(**policy: str) -> dict[str, Any]:
        image = {"reference": reference, **policy}
        return distil(changed(lambda pod: pod["spec"]["volumes"].append({"name": "model", "image": image})))

    other = ({"Always", "IfNotPresent"} - {default}).pop()
    assert volume(pullPolicy=default) == volume() != volume(pullPolicy=other)


def test_two_replicas_as_they_run_have_the_hash_of_their_template() -> None:
    one, other = (stored(POD, seed, name="web-6d4b75cb6d") for seed in (1, 2))
    assert one["spec"]["volumes"][-1]["name"] != other["spec"]["volumes"][-1]["name"]
    assert has_same_hash(one)
    assert has_same_hash(other)


def _with_token(volume: dict[str, Any], **mount: object) -> dict[str, Any]:
    def add(pod: dict[str, Any]) -> None:
        pod["spec"]["volumes"].append(volume)
        for container in pod["spec"]["containers"]:
            given = {"mountPath": TOKEN_PATH, "name": volume["name"], "readOnly": True} | mount
            container["volumeMounts"] = [*container.get("volumeMounts", []), given]

    return changed(add)


def test_the_volume_of_the_service_account_is_dropped_whatever_its_token_is_valid_for() -> None:
    assert has_same_hash(_with_token(token_volume("kube-api-access-x7k2p")))
    assert has_same_hash(_with_token(token_volume("kube-api-access-x7k2p", valid_s=3600)))


_OTHER_CONTENTS: tuple[Callable[[Any], object], ...] = (
    lambda sources: sources.pop(),
    lambda sources: sources.append({"secret": {"name": "mine"}}),
    lambda sources: sources[0]["serviceAccountToken"].update(audience="vault"),
    lambda sources: sources[0].update(secret={"name": "mine"}),
    lambda sources: sources[1]["configMap"].update(name="mine"),
    lambda sources: sources[2]["downwardAPI"]["items"][0].update(path="other"),
)


def test_a_volume_that_only_has_the_name_or_only_the_contents_counts() -> None:
    name = "kube-api-access-x7k2p"
    assert not has_same_hash(_with_token({"name": name, "emptyDir": {}}))
    assert not has_same_hash(_with_token(token_volume("my-token")))
    assert not has_same_hash(_with_token(token_volume(name), mountPath="/token"))
    assert not has_same_hash(_with_token(token_volume(name), readOnly=False))
    assert not has_same_hash(_with_token(token_volume(name), subPath="token"))
    for change in _OTHER_CONTENTS:
        volume = token_volume(name)
        change(volume["projected"]["sources"])
        assert not has_same_hash(_with_token(volume))


def test_two_versions_of_the_rules_could_not_give_one_hash() -> None:
    found = pod_hash(distil(POD))
    assert str(found) == f"v1-{found.xxh3_128}"
    assert (len(found.xxh3_128), len(found.sha256)) == (32, 64)


UNREADABLE: dict[str, tuple[Any, str]] = {
    "no spec": (lambda pod: pod.pop("spec"), "spec.containers: missing"),
    "spec is a text": (lambda pod: pod.update(spec="x"), "spec: must be an object, not text"),
    "no container": (lambda pod: pod["spec"].update(containers=[]), "spec.containers: missing"),
    "containers by name": (
        lambda pod: pod["spec"].update(containers={"web": {}}),
        "spec.containers: must be a list, not an object",
    ),
    "a null container": (lambda pod: pod["spec"]["containers"].append(None), "spec.containers[2].name: missing"),
    "one name twice": (
        lambda pod: pod["spec"]["containers"][1].update(name="web"),
        "spec.containers[1].name: 'web' is there twice",
    ),
    "two volumes of one name": (
        lambda pod: pod["spec"]["volumes"][1].update(name="data"),
        "spec.volumes[1].name: 'data' is there twice",
    ),
    "a number as an argument": (
        lambda pod: first(pod)["args"].append(8080),
        "spec.containers[0].args[2]: must be text, not a number (quote it to make it text)",
    ),
    "a boolean as an annotation": (
        lambda pod: pod["metadata"]["annotations"].update({"dev.gvisor.x": True}),
        "metadata.annotations['dev.gvisor.x']: must be text, not the boolean true (quote it to make it text)",
    ),
    "a boolean as a port": (
        lambda pod: first(pod)["ports"][0].update(containerPort=True),
        "spec.containers[0].ports[0].containerPort: must be a whole number",
    ),
    "a key that is no text": (
        lambda pod: pod["spec"]["containers"].__setitem__(0, {1: 2}),
        "spec.containers[0]: a key must be text, not a number",
    ),
    "half a surrogate pair": (lambda pod: first(pod).update(image="\ud800"), "image: holds half of a surrogate pair"),
    "a number beyond 64 bits": (
        lambda pod: pod["spec"].update(securityContext={"runAsUser": 2**63}),
        "spec.securityContext.runAsUser: does not fit 64 bits",
    ),
    "a list without end": (
        lambda pod: first(pod).update(args=[""] * (MAX_LIST_ITEMS + 1)),
        f"spec.containers[0].args: {MAX_LIST_ITEMS + 1} items, more than {MAX_LIST_ITEMS}",
    ),
    "a volume of a newer kind": (
        lambda pod: pod["spec"]["volumes"].append({"name": "new", "cloudDrive": {"id": "1"}}),
        "spec.volumes[2]: of a kind that isn't known here: cloudDrive",
    ),
    "metadata is a list": (lambda pod: pod.update(metadata=[1]), "metadata: must be an object, not a list"),
}


@pytest.mark.parametrize(("change", "message"), UNREADABLE.values(), ids=UNREADABLE.keys())
def test_what_can_not_be_read_is_refused_with_the_field_named(change: Any, message: str) -> None:
    with pytest.raises(PodSpecError) as caught:
        distil(changed(change))
    assert message in str(caught.value)
    assert (caught.value.kind, caught.value.ends_with) == ("pod-spec", Exit.DAMAGED)


def test_a_pod_larger_than_the_api_keeps_is_not_hashed() -> None:
    distilled = distil(changed(lambda pod: first(pod).update(image="x" * MAX_BYTES)))
    with pytest.raises(PodSpecError, match="more than"):
        pod_hash(distilled)


def test_depth_without_end_is_passed_over_where_nothing_counts() -> None:
    deep: dict[str, Any] = {}
    deep["deep"] = deep
    assert has_same_hash(changed(lambda pod: pod["spec"].update(affinity=deep)))


def crowded(count: int) -> dict[str, Any]:
    """Give a pod that has many of everything, tokens of its service account among them."""
    names = [f"kube-api-access-{number:05}" for number in range(count)]
    mounts = [{"name": name, "mountPath": TOKEN_PATH, "readOnly": True} for name in names]
    container = {"image": "x", "volumeMounts": mounts, "ports": [{"containerPort": n + 1} for n in range(count)]}
    containers = [{**container, "name": f"c{number}"} for number in range(2)]
    volumes = [*map(token_volume, names), *({"name": f"v{number}"} for number in range(count))]
    return {"metadata": {"name": "web"}, "spec": {"containers": containers, "volumes": volumes}}


def test_a_pod_with_twice_as_much_in_it_takes_twice_the_work() -> None:
    few, many = crowded(200), crowded(400)
    assert calls_of(lambda: distil(many)) < 2.5 * calls_of(lambda: distil(few))
    read = [distil(crowded(count)) for count in (199, 200, 399, 400)]
    assert calls_of(lambda: differences(read[2], read[3])) < 2.5 * calls_of(lambda: differences(read[0], read[1]))
