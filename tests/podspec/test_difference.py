"""What is said of two pods that differ."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from agent.podspec.difference import MAX_SHOWN_CHARS, differences
from agent.podspec.distil import distil

POD: dict[str, Any] = {
    "spec": {
        "initContainers": [{"name": "fetch", "image": "curl:8"}],
        "containers": [
            {
                "name": "server",
                "image": "vllm:0.9",
                "args": ["--model=x", "--port", "80", "--api-key", "k1", "--hf_token=t1"],
                "ports": [{"containerPort": 80}],
                "volumeMounts": [{"name": "data", "mountPath": "/data"}],
                "lifecycle": {
                    "postStart": {"httpGet": {"port": 80, "httpHeaders": [{"name": "Authorization", "value": "h1"}]}}
                },
            },
            {"name": "log", "image": "fluent-bit:3"},
        ],
        "volumes": [
            {"name": "data", "emptyDir": {"medium": "Memory"}},
            {"name": "drive", "csi": {"driver": "d", "volumeAttributes": {"clientSecret": "c1", "size": "1"}}},
        ],
    }
}


def _server(pod: dict[str, Any]) -> dict[str, Any]:
    container: dict[str, Any] = pod["spec"]["containers"][0]
    return container


CASES: dict[str, tuple[Callable[[Any], object], list[str]]] = {
    "nothing": (lambda pod: None, []),
    "an argument": (
        lambda pod: _server(pod)["args"].__setitem__(2, "81"),
        ['spec.containers[0 "server"].args[2]: "80" became "81"'],
    ),
    "an argument more, at the beginning": (
        lambda pod: _server(pod)["args"].insert(0, "-v"),
        ['spec.containers[0 "server"].args[0]: "-v" was added'],
    ),
    "two arguments less, in the middle": (
        lambda pod: _server(pod)["args"].__delitem__(slice(1, 3)),
        ['spec.containers[0 "server"].args[1:3]: "--port" "80" was removed'],
    ),
    "one argument for two": (
        lambda pod: _server(pod)["args"].__setitem__(slice(1, 3), ["--port=80"]),
        ['spec.containers[0 "server"].args[1:3]: "--port" "80" became "--port=80"'],
    ),
    "all arguments": (
        lambda pod: _server(pod).pop("args"),
        [
            'spec.containers[0 "server"].args[0:6]: "--model=x" "--port" "80" "--api-key" "(hidden)" '
            '"--hf_token=(hidden)" was removed'
        ],
    ),
    "secrets in arguments": (
        lambda pod: _server(pod)["args"].__setitem__(slice(4, 6), ["k2", "--hf_token=t2"]),
        [
            'spec.containers[0 "server"].args[4]: "(hidden)" became "(hidden)"',
            'spec.containers[0 "server"].args[5]: "--hf_token=(hidden)" became "--hf_token=(hidden)"',
        ],
    ),
    "a secret in a command line that is one text, and what only looks like one": (
        lambda pod: _server(pod).update(
            args=["--model=x"], command=["sh", "-c", "run --tokenizer=t --max-tokens=9 --password hunter2 --port 80"]
        ),
        [
            'spec.containers[0 "server"].command[0:3]: "sh" "-c" '
            '"run --tokenizer=t --max-tokens=9 --password (hidden) --port 80" was added',
            'spec.containers[0 "server"].args[1:6]: "--port" "80" "--api-key" "(hidden)" "--hf_token=(hidden)" '
            "was removed",
        ],
    ),
    "a secret in a header": (
        lambda pod: _server(pod)["lifecycle"]["postStart"]["httpGet"]["httpHeaders"][0].update(value="h2"),
        ['spec.containers[0 "server"].lifecycle.postStart.httpGet.httpHeaders[0].value: "(hidden)" became "(hidden)"'],
    ),
    "a handler, with a secret in it": (
        lambda pod: _server(pod).update(lifecycle={"postStart": {"exec": {"command": ["x"]}}}),
        [
            'spec.containers[0 "server"].lifecycle.postStart.exec: {"command": ["x"]} was added',
            'spec.containers[0 "server"].lifecycle.postStart.httpGet: '
            '{"httpHeaders": [{"name": "Authorization", "value": "(hidden)"}], "port": 80} was removed',
        ],
    ),
    "a driver's attributes": (
        lambda pod: pod["spec"]["volumes"][1]["csi"].update(volumeAttributes={"clientSecret": "c2", "size": "2"}),
        [
            'spec.volumes["drive"].csi.volumeAttributes["clientSecret"]: "(hidden)" became "(hidden)"',
            'spec.volumes["drive"].csi.volumeAttributes["size"]: "1" became "2"',
        ],
    ),
    "an image": (
        lambda pod: _server(pod).update(image="vllm:0.10"),
        ['spec.containers[0 "server"].image: "vllm:0.9" became "vllm:0.10"'],
    ),
    "a container before the others": (
        lambda pod: pod["spec"]["containers"].insert(0, {"name": "proxy", "image": "envoy"}),
        ['spec.containers[0 "proxy"]: a container of image "envoy" was added'],
    ),
    "a container less": (
        lambda pod: pod["spec"]["containers"].pop(),
        ['spec.containers[1 "log"]: a container of image "fluent-bit:3" was removed'],
    ),
    "the init containers": (
        lambda pod: pod["spec"].pop("initContainers"),
        ['spec.initContainers[0 "fetch"]: a container of image "curl:8" was removed'],
    ),
    "containers in another order": (
        lambda pod: pod["spec"]["containers"].reverse(),
        ['spec.containers: the order "server", "log" became "log", "server"'],
    ),
    "a container by another name": (
        lambda pod: pod["spec"]["containers"][1].update(name="logs"),
        ['spec.containers[1 "log"].name: "log" became "logs"'],
    ),
    "another container in its place": (
        lambda pod: pod["spec"]["containers"].__setitem__(1, {"name": "metrics", "image": "prom"}),
        [
            'spec.containers[1 "log"]: a container of image "fluent-bit:3" was removed',
            'spec.containers[1 "metrics"]: a container of image "prom" was added',
        ],
    ),
    "a volume and its mount": (
        lambda pod: (
            pod["spec"]["volumes"].insert(0, {"name": "conf", "configMap": {"name": "web"}}),
            _server(pod)["volumeMounts"].insert(0, {"name": "conf", "mountPath": "/etc/web"}),
        ),
        [
            'spec.volumes["conf"]: a volume: {"configMap": {"name": "web"}} was added',
            'spec.containers[0 "server"].volumeMounts["/etc/web"]: a mount of "conf" was added',
        ],
    ),
    "another kind of volume": (
        lambda pod: pod["spec"]["volumes"].__setitem__(0, {"name": "data", "hostPath": {"path": "/d"}}),
        [
            'spec.volumes["data"].emptyDir: {"medium": "Memory"} was removed',
            'spec.volumes["data"].hostPath: {"path": "/d"} was added',
        ],
    ),
    "another port": (
        lambda pod: _server(pod)["ports"][0].update(containerPort=81),
        [
            'spec.containers[0 "server"].ports[80]: port 80 was removed',
            'spec.containers[0 "server"].ports[81]: port 81 was added',
        ],
    ),
    "a port's name": (
        lambda pod: _server(pod)["ports"][0].update(name="http"),
        ['spec.containers[0 "server"].ports[80].name: "http" was added'],
    ),
    "the same port once more": (
        lambda pod: _server(pod)["ports"].append({"containerPort": 80}),
        ['spec.containers[0 "server"].ports[80]: port 80 was added'],
    ),
    "a default": (
        lambda pod: pod["spec"].update(dnsPolicy="None"),
        ['spec.dnsPolicy: "ClusterFirst" (the default) became "None"'],
    ),
    "a user": (
        lambda pod: pod["spec"].update(securityContext={"runAsUser": 0}),
        ["spec.securityContext.runAsUser: 0 was added"],
    ),
    "an annotation": (
        lambda pod: pod.update(metadata={"annotations": {"dev.gvisor.internal.nvproxy": "true"}}),
        ['metadata.annotations["dev.gvisor.internal.nvproxy"]: "true" was added'],
    ),
}


@pytest.mark.parametrize(("change", "told"), CASES.values(), ids=CASES.keys())
def test_a_difference_is_told_once_and_where_it_is(change: Callable[[Any], object], told: list[str]) -> None:
    pod = copy.deepcopy(POD)
    change(pod)
    assert [str(each) for each in differences(distil(POD), distil(pod))] == told


def test_long_values_are_cut() -> None:
    pod = copy.deepcopy(POD)
    _server(pod)["image"] = "x" * 1000
    [difference] = differences(distil(POD), distil(pod))
    assert difference.new is not None
    assert len(difference.new) == MAX_SHOWN_CHARS
    assert difference.new.endswith("…")


def test_an_argument_without_end_is_not_searched_without_end() -> None:
    pod = copy.deepcopy(POD)
    _server(pod)["args"] = ["secret" * 300_000, "secret=1 " * 100_000]
    [difference] = differences(distil(POD), distil(pod))
    assert difference.new is not None
    assert "=1" not in difference.new
