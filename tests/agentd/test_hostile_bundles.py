"""Bundles whose author is after other tenants' snapshots, or the agent: each starts cold, with its reason told.

That what an author wrote of saves never reaches runsc is `streamd-runsc`'s (tests/wrapper/test_reserved_annotations.py,
tests/containerd/test_hostile_annotations.py), and whose token reads what, streamd's (test_real_bucket.py).
"""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.kube.directory import ObjectDirectory
from agent.kube.objects import PIN, PodSnapshot
from agent.node.events import What
from agent.podspec.identity import MAX_BYTES
from agent.wrapper.bundle import place, read_spec
from agent.wrapper.protocol import ContainerKind, Create, Plain, PodName, Restore
from bench.agent_node import POLICY
from tests.agentd.conftest import Node, until

OTHERS = "somebody-elses"


async def with_others(node: Node) -> str:
    """Have a snapshot in the pods' namespace, and one of the same pod in another; give the first one's name."""
    mine = await node.saved()
    objects = ObjectDirectory(node.config.objects_directory, node.config.state_directory)
    found = objects.get(PodSnapshot, mine, "default")
    meta = replace(found.metadata, name=OTHERS, namespace="bank", resource_version="")
    copy = objects.create(replace(found, metadata=meta))
    objects.update_status(replace(copy, status=found.status))
    return mine


def annotated(annotations: dict[str, str]) -> Callable[[Node], Create]:
    return lambda node: node.create("thief", annotations=annotations)


def of_pod(namespace: str, name: str = "thief", uid: str = "u") -> Callable[[Node], Create]:
    return lambda node: node.create("thief")._replace(kind=ContainerKind.FIRST, pod=PodName(namespace, name, uid))


def with_process(**members: Any) -> Callable[[Node], Create]:
    return lambda node: node.create("thief", process={**node.spec["process"], **members})


def instead(act: Callable[[Path], object]) -> Callable[[Node], Create]:
    def made(node: Node) -> Create:
        request = node.create("thief")
        act(Path(request.bundle) / "config.json")
        return request

    return made


def _link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/passwd")


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


# What the bundle is, and what the event says of it.
HOSTILE: dict[str, tuple[Callable[[Node], Create], str]] = {
    "pins another namespace's snapshot": (annotated({PIN: OTHERS}), "default has no such PodSnapshot"),
    "pins it by a path": (annotated({PIN: f"../bank/{OTHERS}"}), "has no such PodSnapshot"),
    "pins a file": (annotated({PIN: "../../../../etc/passwd"}), "has no such PodSnapshot"),
    "pins something endless": (annotated({PIN: "x" * (1 << 20)}), "has no such PodSnapshot"),
    "is named by a path": (annotated({"podsnapshot.gke.io/pod-name": "../x"}), "can't be"),
    "has labels that are none": (annotated({"podsnapshot.gke.io/pod-labels": "a=../b"}), "is no label"),
    "is of a namespace that is a path": (of_pod("../bank"), "can't be a pod's namespace"),
    "is of a pod that nobody has described": (of_pod("bank"), "no manifest of pod bank/thief"),
    "says only half of its pod": (of_pod("bank", name=""), "don't name its pod"),
    "counts for more than there is room": (with_process(args=["x" * MAX_BYTES]), f"more than {MAX_BYTES}"),
    "has no arguments": (with_process(args={"a": "b"}), "no list of texts"),
    "has a million mounts": (
        lambda node: node.create("thief", mounts=[{"destination": f"/{n}"} for n in range(10_000)]),
        "more than 1000",
    ),
    "is a link": (instead(_link), "Too many levels"),
    "is a pipe": (instead(_pipe), "no regular file"),
    "is huge": (instead(lambda path: os.truncate(path, 1 << 30)), "bytes"),
    "is deep": (instead(lambda path: path.write_text('{"a":' * 100_000)), "no JSON"),
}


@pytest.mark.parametrize("case", HOSTILE)
async def test_it_starts_cold_with_its_reason_and_no_image_is_asked_for(case: str, node: Node) -> None:
    make, reason = HOSTILE[case]
    mine = await with_others(node)
    node.images.asked.clear()
    before = sorted(path for path in node.config.state_directory.rglob("*") if "jobs" not in path.parts)
    async with node.running() as agent:
        await until(lambda: mine in agent.known.index.namespace("default").snapshots, "the snapshot")
        answer = await agent.decisions.create(make(node))
        assert isinstance(answer, Plain)
        assert not any("bank" in text for text in answer.annotations.values())
        (event,) = node.events(What.COLD_START)
        assert reason in event.message
        assert len(event.message) <= 2000
        assert await agent.decisions.start(node.start("thief")) == Plain()
    assert node.images.asked == []
    assert sorted(path for path in node.config.state_directory.rglob("*") if "jobs" not in path.parts) == before
    assert "root:" not in json.dumps([event.message])


CLAIM = {
    "io.kubernetes.cri.sandbox-namespace": "bank",
    "io.kubernetes.cri.sandbox-name": "victim",
    "io.kubernetes.cri.sandbox-uid": "uid-of-victim",
    "io.kubernetes.cri.sandbox-id": "victim",
}


async def test_a_lone_container_is_of_no_other_namespace_and_takes_no_other_sandboxes_place(node: Node) -> None:
    mine = await with_others(node)
    objects = ObjectDirectory(node.config.objects_directory, node.config.state_directory)
    objects.delete(objects.get(PodSnapshot, mine, "default"))
    node.write_policy("workload", more=POLICY.format(trigger="workload", post_checkpoint="resume", namespace="bank"))
    async with node.running() as agent:
        await until(lambda: ("bank", "workload") in agent.known.policies, "the policy")
        await agent.decisions.create(node.create("victim"))
        asked = node.create("thief", annotations=CLAIM)
        spec, _ = read_spec(asked.bundle)
        claimed = PodName("bank", "victim", "uid-of-victim")
        for request in (asked._replace(pod=place(spec).pod), asked._replace(pod=claimed, sandbox_id="victim")):
            await agent.decisions.create(request)
            assert not isinstance(await agent.decisions.start(node.start("thief")), Restore)
        assert {pod.key.sandbox_id: str(pod.who) for pod in agent.here} == {
            "origin": "default/origin",
            "victim": "default/victim",
            "thief": "default/thief",
        }
    assert node.images.asked == []
