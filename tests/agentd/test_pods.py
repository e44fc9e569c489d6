"""Which pod a container is: from its bundle, and from manifests, whatever lies there."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import trio

from agent.node.node_runtime import SandboxKey
from agent.node.pod_manifests import LocalPods
from agent.node.pods import Pod, PodUnknown, identity, pod_of_bundle
from agent.node.pods_here import BUNDLES_MAX, PodsHere, pod_of
from agent.podspec.distil import distil
from agent.podspec.identity import pod_hash
from agent.runtime.bundle import Container as Bundled
from agent.runtime.bundle import Mount, Rootfs, container_spec
from agent.wrapper.protocol import Container, ContainerKind, Create, PodName
from tests.agentd.conftest import until

REQUEST = Create(Container("c1", "/runsc", "/root"), "/bundle", ContainerKind.SINGLE, "", "c1", PodName())
DEPLOYMENT: dict[str, Any] = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"name": "web", "namespace": "shop"},
    "spec": {
        "template": {
            "metadata": {"labels": {"app": "web"}},
            "spec": {"containers": [{"name": "server", "image": "server:1"}]},
        }
    },
}


def spec(**members: Any) -> dict[str, Any]:
    rootfs = Rootfs(path=Path("/r"), mounts=(Mount("/data", "/srv/data"),))
    return {**container_spec(Bundled(args=("/server", "-v"), rootfs=rootfs)), **members}


def hash_of(spec: dict[str, Any]) -> str:
    return pod_hash(distil(pod_of_bundle(REQUEST, spec))).sha256


def test_two_containers_of_one_kind_are_alike_whatever_is_each_ones_own() -> None:
    own = spec(hostname="other", root={"path": "/elsewhere", "readonly": True})
    own["process"] = {**own["process"], "env": ["A=b"]}
    own["mounts"] = [*own["mounts"], {"destination": "/etc/hosts", "source": "/var/c2/hosts", "type": "bind"}]
    assert hash_of(own) == hash_of(spec())


@pytest.mark.parametrize(
    "change",
    [
        {"args": ["/server"]},
        {"cwd": "/elsewhere"},
        {"user": {"uid": 7, "gid": 0}},
        {"terminal": True},
        {"capabilities": {"bounding": ["CAP_NET_RAW"]}},
        {"noNewPrivileges": False},
    ],
)
def test_what_runs_and_with_what_rights_counts(change: dict[str, Any]) -> None:
    other = spec()
    other["process"] = {**other["process"], **change}
    assert hash_of(other) != hash_of(spec())


def test_what_is_mounted_and_how_counts() -> None:
    other = spec()
    other["mounts"] = [{**m, "options": ["rbind", "rw"]} if m["destination"] == "/data" else m for m in other["mounts"]]
    assert hash_of(other) != hash_of(spec())


def test_a_pod_of_cri_is_the_one_that_it_says_and_another_container_its_own() -> None:
    pod = PodName("shop", "web-1", "uid-1")
    assert str(identity(REQUEST._replace(kind=ContainerKind.FIRST, pod=pod), spec())) == "shop/web-1"
    named = spec(annotations={"podsnapshot.gke.io/pod-name": "web"})
    for alone in (REQUEST, REQUEST._replace(pod=pod), REQUEST._replace(sandbox_id="c2")):
        assert str(identity(alone, named)) == "default/web"
        assert identity(alone, named).uid == "container-c1"


@pytest.mark.parametrize(
    ("pod", "sandbox_id", "why"),
    [
        (PodName(), "c1", "CRI-O is not supported"),
        (PodName("shop"), "c1", "don't name its pod"),
        (PodName("", "web-1", "uid-1"), "c1", "don't name its pod"),
        (PodName("shop", "web-1", "uid-1"), "c2", "another sandbox"),
    ],
)
def test_a_pods_first_container_whose_annotations_are_not_containerds_is_of_no_pod(
    pod: PodName, sandbox_id: str, why: str
) -> None:
    with pytest.raises(PodUnknown, match=why):
        identity(REQUEST._replace(kind=ContainerKind.FIRST, pod=pod, sandbox_id=sandbox_id), spec())


async def test_a_workloads_pods_are_found_by_their_names(tmp_path: Path) -> None:
    (tmp_path / "web.json").write_text(json.dumps(DEPLOYMENT))
    pods = LocalPods(tmp_path)
    request = REQUEST._replace(kind=ContainerKind.FIRST, pod=PodName("shop", "web-5d4f7c9b8-abcde", "uid-1"))
    pod = await pods.find(request, spec())
    metadata = pod["metadata"]
    assert isinstance(metadata, dict)
    assert (metadata["name"], metadata["namespace"], metadata["uid"]) == ("web-5d4f7c9b8-abcde", "shop", "uid-1")
    assert metadata["labels"] == {"app": "web"}
    with pytest.raises(PodUnknown, match="no manifest"):
        await pods.find(request._replace(pod=PodName("other", "web-5d4f7c9b8-abcde", "uid-1")), spec())


async def test_a_file_that_is_none_hinders_no_other_and_a_changed_one_is_read_again(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("{")
    (tmp_path / "link.yaml").symlink_to("/etc/passwd")
    (tmp_path / "web.json").write_text(json.dumps(DEPLOYMENT))
    pods = LocalPods(tmp_path)
    request = REQUEST._replace(kind=ContainerKind.FIRST, pod=PodName("shop", "web-5d4f7c9b8-abcde", "uid-1"))
    first = distil(await pods.find(request, spec()))
    DEPLOYMENT["spec"]["template"]["spec"]["containers"][0]["args"] = ["-v"]
    (tmp_path / "web.json").write_text(json.dumps(DEPLOYMENT))
    assert distil(await pods.find(request, spec())) != first


async def test_a_manifest_that_others_may_have_written_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "web.json"
    path.write_text(json.dumps(DEPLOYMENT))
    request = REQUEST._replace(kind=ContainerKind.FIRST, pod=PodName("shop", "web-5d4f7c9b8-abcde", "uid-1"))
    pods = LocalPods(tmp_path)
    path.chmod(0o666)
    with pytest.raises(PodUnknown, match="no manifest"):
        await pods.find(request, spec())
    path.chmod(0o644)
    assert await pods.find(request, spec())


async def test_of_several_manifests_none_is_taken_at_a_guess(tmp_path: Path) -> None:
    for kind in ("ReplicaSet", "DaemonSet"):
        (tmp_path / f"{kind}.json").write_text(json.dumps({**DEPLOYMENT, "kind": kind}))
    request = REQUEST._replace(kind=ContainerKind.FIRST, pod=PodName("shop", "web-abcde", "uid-1"))
    with pytest.raises(PodUnknown, match="several"):
        await LocalPods(tmp_path).find(request, spec())


async def test_a_few_bundles_at_most_are_held_at_a_time_however_many_pods_begin(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(spec()))
    go = trio.Event()
    held: list[int] = []
    now = 0

    class Slow:
        async def find(self, request: Create, spec: Mapping[str, Any]) -> Pod:
            nonlocal now
            now += 1
            held.append(now)
            await go.wait()
            now -= 1
            return pod_of_bundle(request, spec)

    here = PodsHere()

    async def begin(number: int) -> None:
        name = f"c{number}"
        request = REQUEST._replace(container=Container(name, "/runsc", "/root"), bundle=str(tmp_path))
        pod, _ = await pod_of(request, SandboxKey(Path("/root"), name), Slow(), reading=here.reading)
        here.put(pod)

    async with trio.open_nursery() as nursery:
        for number in range(3 * BUNDLES_MAX):
            nursery.start_soon(begin, number)
        waiting = 2 * BUNDLES_MAX
        await until(
            lambda: (len(held), here.reading.statistics().tasks_waiting) == (BUNDLES_MAX, waiting), "all of them"
        )
        go.set()
    assert max(held) == BUNDLES_MAX
    assert len([*here]) == 3 * BUNDLES_MAX
