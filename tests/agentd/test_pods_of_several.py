"""Pods of several containers: what is restored, answered for, refused and waited for, of which containers."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import trio

from agent.config import Deadlines
from agent.node.course import Found
from agent.node.events import What
from agent.node.pods_here import State
from agent.runtime.bundle import CONTAINER_NAME, CONTAINER_TYPE, SANDBOX_ID
from agent.wrapper.protocol import ContainerKind, Create, Finished, Join, Plain, PodName, Refused, Report, Restore
from bench.pods import Image
from streamd.snapshot.names import CHECKPOINT
from tests.agentd.conftest import Node, make_node, until
from tests.node.conftest import with_containers

DEPLOYMENT = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"name": "shop", "namespace": "default"},
    "spec": {
        "template": {
            "metadata": {"labels": {"app": "web"}},
            "spec": {
                "initContainers": [{"name": "setup", "image": "x"}],
                "containers": [{"name": "web", "image": "x"}, {"name": "side", "image": "x"}],
            },
        }
    },
}
ORIGIN, COPY = "shop-7d9f8b6c5-abcde", "shop-7d9f8b6c5-fghij"


@pytest.fixture
def node(small_image: Image, tmp_path: Path) -> Node:
    """Give a node whose sandboxes save an image of three containers, and of one that was removed before."""
    image = shutil.copytree(small_image.directory, tmp_path / "image")
    (image / CHECKPOINT).write_bytes(
        with_containers((small_image.directory / CHECKPOINT).read_bytes(), 3, "setup", "web", "side")
    )
    node = make_node(dataclasses.replace(small_image, directory=image), tmp_path)
    # Short: how long a report may take is not to be how long a container may.
    node.config = dataclasses.replace(node.config, deadlines=Deadlines(image_s=5.0, report_s=0.05))
    node.write("pods/shop.json", json.dumps(DEPLOYMENT))
    node.write_policy("workload")
    return node


def first(node: Node, pod: str) -> Create:
    return _asked(node, pod, pod, "sandbox")._replace(kind=ContainerKind.FIRST)


def further(node: Node, pod: str, name: str) -> Create:
    asked = _asked(node, f"{name}-of-{pod}", pod, "container", **{CONTAINER_NAME: name})
    return asked._replace(kind=ContainerKind.FURTHER, name=name, sandbox_id=pod)


def _asked(node: Node, container_id: str, pod: str, kind: str, **more: str) -> Create:
    annotations = {
        CONTAINER_TYPE: kind,
        SANDBOX_ID: pod,
        "io.kubernetes.cri.sandbox-namespace": "default",
        "io.kubernetes.cri.sandbox-name": pod,
        "io.kubernetes.cri.sandbox-uid": f"uid-{pod}",
        **more,
    }
    asked = node.create(container_id, annotations=annotations)
    return asked._replace(pod=PodName("default", pod, f"uid-{pod}"))


async def begun(node: Node) -> None:
    """Save a pod, and begin the restore of its copy."""
    assert node.agent is not None
    decisions = node.agent.decisions
    await decisions.create(first(node, ORIGIN))
    assert await decisions.start(node.start(ORIGIN)) == Plain()
    for name in ("setup", "web", "side"):
        assert isinstance(await decisions.create(further(node, ORIGIN, name)), Plain)
        assert await decisions.start(node.start(f"{name}-of-{ORIGIN}")) == Plain()
    node.runtime.asked.setdefault(ORIGIN, trio.Event()).set()
    await node.event(What.SNAPSHOT_READY)
    known = node.agent.known
    await until(lambda: known.index.namespace("default").snapshots, "the index")
    await decisions.create(first(node, COPY))
    assert isinstance(await decisions.start(node.start(COPY)), Restore)
    await decisions.report(Report(node.container(COPY), 0, ""))


async def joined(node: Node, name: str) -> None:
    """Create and start a container of the copy, which is part of the restore."""
    assert node.agent is not None
    assert await node.agent.decisions.create(further(node, COPY, name)) == Plain()
    assert await node.agent.decisions.start(node.start(f"{name}-of-{COPY}")) == Join()
    await node.agent.decisions.report(Report(node.container(f"{name}-of-{COPY}"), 0, ""))


async def test_a_pod_whose_init_container_was_removed_before_the_save_is_restored_without_it(node: Node) -> None:
    async with node.running() as agent:
        await begun(node)
        assert await agent.decisions.create(further(node, COPY, "setup")) == Finished()
        refused = await agent.decisions.create(further(node, COPY, "debugger"))
        assert isinstance(refused, Refused)
        assert "no container debugger" in refused.message
        await joined(node, "web")
        assert node.events(What.RESTORED) == []
        await joined(node, "side")
        assert (await node.event(What.RESTORED)).pod == f"default/{COPY}"


async def test_a_container_whose_start_takes_longer_than_a_report_is_waited_for(node: Node) -> None:
    # As while its container image is pulled; nothing of the pod runs before, and all of it is of the restore.
    async with node.running() as agent:
        await begun(node)
        (pod,) = agent.restoring.plans
        looks = node.runtime.looks
        await until(lambda: node.runtime.looks >= looks + 2, "a second look whether its sandbox lives")
        assert pod.state is State.RESTORING
        assert "side, web were not started yet" in pod.reason
        assert node.images.leases[-1].is_held
        assert await agent.decisions.create(further(node, COPY, "setup")) == Finished()
        await joined(node, "web")
        await joined(node, "side")
        await node.event(What.RESTORED)
        assert pod.reason == ""


async def test_the_next_life_of_the_agent_goes_on_with_the_containers_that_are_still_to_come(node: Node) -> None:
    async with node.running():
        await begun(node)
    async with node.running() as agent:
        await until(lambda: agent.restoring.plans, "the restore that a former life has begun")
        assert await agent.decisions.create(further(node, COPY, "setup")) == Finished()
        await joined(node, "web")
        assert node.events(What.RESTORED) == []
        await joined(node, "side")
        assert (await node.event(What.RESTORED)).pod == f"default/{COPY}"


async def test_a_pod_that_ends_before_all_its_containers_were_started_lets_its_image_go(node: Node) -> None:
    async with node.running() as agent:
        await begun(node)
        await node.runtime.pod(COPY).end()
        await until(lambda: not agent.restoring.plans, "the plan's end")
        assert not node.images.leases[-1].is_held


async def test_a_further_container_whose_start_fails_ends_the_whole_sandbox(node: Node) -> None:
    async with node.running() as agent:
        await begun(node)
        await joined(node, "web")
        await agent.decisions.create(further(node, COPY, "side"))
        assert await agent.decisions.start(node.start(f"side-of-{COPY}")) == Join()
        await agent.decisions.report(Report(node.container(f"side-of-{COPY}"), 128, "Args does not match"))
        assert "Args" in (await node.event(What.RESTORE_FAILED)).message
        await until(lambda: node.runtime.pod(COPY).now is Found.GONE, "the sandbox's end")
