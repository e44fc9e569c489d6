"""The whole node, real: agent, streamd, wrapper, runsc and a store, from an application's word to a restored copy.

**End to end**: the one place where nothing is a fake. What each part does in bad cases, the other tests say.
"""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.runtime import bundle
from bench.agent_node import ASKING_SERVER, LABELS, AgentNode, Running
from bench.server import NoAnswer

READY_S = 120.0


@pytest.fixture
def node() -> Iterator[AgentNode]:
    with AgentNode() as node:
        yield node


def server_bundle(node: AgentNode, name: str, *arguments: str) -> Path:
    """Make a bundle of the server; the same arguments give the same spec."""
    rootfs = bundle.make_rootfs(node.directory / "rootfs")
    args = (str(bundle.python_interpreter()), "-IS", "-u", "-c", ASKING_SERVER, "16", *arguments)
    return bundle.write_bundle(
        node.directory / f"bundle-{name}", bundle.Container(args=args, rootfs=rootfs, annotations=LABELS)
    )


def ready(running: Running) -> str:
    """Wait for a server that was started cold; give its token."""
    word, _, token = running.server.receive(timeout_s=READY_S).partition(" ")
    assert word == "ready"
    return token


def test_an_application_that_asks_is_saved_and_its_replica_is_restored_and_another_starts_cold(node: AgentNode) -> None:
    node.write_policy("workload")
    first = node.run("web-1", server_bundle(node, "web-1"))
    token = ready(first)
    assert node.events("cold start")[0]["reason"] == "no-snapshot"
    assert first.server.request("save", timeout_s=READY_S) == "resume"
    answer = first.server.request("memory", timeout_s=READY_S)
    assert answer.startswith(f"{token} ")
    event = node.until_event("snapshot ready")
    assert event["pod"] == "default/web-1"

    second = node.run("web-2", server_bundle(node, "web-2"))
    # It was in the middle of its request, and says at once what it has become.
    assert second.server.receive(timeout_s=READY_S) == "was restore"
    assert second.server.request("memory", timeout_s=READY_S) == answer
    restored = node.until_event("restored")
    assert (restored["pod"], restored["snapshot"]) == ("default/web-2", event["snapshot"])
    assert first.server.request("memory") == answer

    third = node.run("web-3", server_bundle(node, "web-3", "--verbose"))
    assert ready(third) != token
    cold = node.events("cold start")[-1]
    assert (cold["pod"], cold["reason"]) == ("default/web-3", "pod-hash")
    assert "command" in cold["message"]
    assert "--verbose" in cold["message"]
    fourth = node.run("web-4", server_bundle(node, "web-4"))
    assert fourth.server.receive(timeout_s=READY_S) == "was restore"
    node.until_event("restored", count=2)
    states = {pod["name"]: pod["state"] for pod in node.status()["pods"]}
    assert states == {"web-1": "started cold", "web-2": "restored", "web-3": "started cold", "web-4": "restored"}


def test_a_pod_is_saved_by_a_command_and_ends_and_its_replica_goes_on_after_the_agent_was_killed(
    node: AgentNode,
) -> None:
    node.write_policy("manual")
    first = node.run("web-1", server_bundle(node, "web-1"))
    ready(first)
    answer = first.server.request("memory", timeout_s=READY_S)
    node.kill_agent()
    node.start_agent()
    done = node.snapagent("snapshot", "web-1", "--stop", "--json")
    assert done.returncode == 0, done.stdout + node.tail()
    with pytest.raises(NoAnswer, match="ended"):
        first.server.receive(timeout_s=READY_S)
    second = node.run("web-2", server_bundle(node, "web-2"))
    assert second.server.request("memory", timeout_s=READY_S) == answer
    node.until_event("restored")
    assert node.kill_agent(signal.SIGTERM) == 0
    assert second.server.request("memory") == answer
    # Without an agent a pod starts as with runsc.
    third = node.run("web-3", server_bundle(node, "web-3"))
    assert ready(third) not in answer
