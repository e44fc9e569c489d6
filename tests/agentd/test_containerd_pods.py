"""Pods of several containers under a real containerd, as its CRI plugin annotates them; everything else real, too.

Each has a sandbox's container, an init container that ends, and two servers. The runc shim watches the sandbox's
process, which all containers have: it can't see one of them end. So what CRI does when an init container has ended
(`delete`) is done here by hand.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from agent.runtime.bundle import CONTAINER_NAME, CONTAINER_TYPE, SANDBOX_ID, python_interpreter
from bench.agent_node import ASKING_SERVER, AgentNode
from bench.containerd import NAMESPACE, Containerd, Task
from bench.server import Heap
from tests.agentd.test_pods_of_several import DEPLOYMENT
from tests.wrapper.conftest import wait_until

READY_S = 120.0
_ANY = Heap(1, 1)


@dataclass(slots=True)
class Pod:
    """A pod of the Deployment `shop`, made in the kubelet's order; or another attempt at it, with a sandbox anew."""

    name: str
    containerd: Containerd
    attempt: int = 0
    tasks: dict[str, Task] = field(default_factory=dict)

    @property
    def sandbox_id(self) -> str:
        return self._id("sandbox")

    def _id(self, name: str) -> str:
        return f"{self.name}-{name}-{self.attempt}"

    def run(self, name: str, *command: str) -> Task:
        """Run a container of it, the sandbox's own with the name ""."""
        annotations = {
            CONTAINER_TYPE: "container" if name else "sandbox",
            SANDBOX_ID: self.sandbox_id,
            "io.kubernetes.cri.sandbox-namespace": "default",
            "io.kubernetes.cri.sandbox-name": self.name,
            "io.kubernetes.cri.sandbox-uid": f"uid-{self.name}",
        }
        annotations |= {CONTAINER_NAME: name} if name else {}  # as CRI does: a sandbox's own has none
        task_id = self._id(name or "sandbox")
        self.tasks[name] = self.containerd.run(task_id, _ANY, annotations=annotations, command=command)
        return self.tasks[name]

    def sandbox(self) -> None:
        """Start the sandbox's container, and wait until containerd says that it runs."""
        self.run("", "/bin/sleep", "100000")
        wait_until(lambda: self.containerd.status(self.sandbox_id) == "RUNNING")

    def init(self) -> Task:
        return self.run("setup", "/bin/sh", "-c", "echo set up")

    def server(self, name: str, *more: str) -> Task:
        return self.run(name, str(python_interpreter()), "-IS", "-u", "-c", ASKING_SERVER, "16", name, *more)

    def cold(self, *, is_removed: bool = True) -> dict[str, str]:
        """Start all of it as a first pod; give what each server's memory holds."""
        self.sandbox()
        assert self.init().server.receive(timeout_s=READY_S) == "set up"
        if is_removed:
            self.containerd.runsc.delete(self.tasks["setup"].task_id, force=True)
        for name in ("web", "side"):
            assert self.server(name).server.receive(timeout_s=READY_S).startswith("ready ")
        return self.memories()

    def memories(self) -> dict[str, str]:
        return {name: self.tasks[name].server.request("memory", timeout_s=READY_S) for name in ("web", "side")}


@pytest.fixture
def node() -> Iterator[AgentNode]:
    with AgentNode(network="sandbox", root_below=f"containerd/runsc/{NAMESPACE}") as node:
        (node.objects / "pods").mkdir()
        (node.objects / "pods" / "shop.json").write_text(json.dumps(DEPLOYMENT))
        yield node


@pytest.fixture
def containerd(node: AgentNode) -> Iterator[Containerd]:
    with Containerd(node.directory / "containerd", node.wrapper) as containerd:
        yield containerd


def saved(node: AgentNode, containerd: Containerd, *, is_removed: bool = True) -> dict[str, str]:
    """Have a first pod saved by its own word; give its memories."""
    node.write_policy("workload")
    first = Pod("shop-7d9f8b6c5-aaaaa", containerd)
    memories = first.cold(is_removed=is_removed)
    assert first.tasks["web"].server.request("save", timeout_s=READY_S) == "resume"
    node.until_event("snapshot ready")
    assert first.memories() == memories
    return memories


def test_a_pod_is_restored_with_all_its_containers_and_can_be_saved_and_restored_again(
    node: AgentNode, containerd: Containerd
) -> None:
    memories = saved(node, containerd)
    second = Pod("shop-7d9f8b6c5-bbbbb", containerd)
    second.sandbox()
    init = second.init()
    assert (init.exit_code(), init.output()) == (0, ([], ""))  # it didn't run again, and containerd saw it end well
    web, side = second.server("web"), second.server("side")
    # web was in the middle of its request for the save; each says it where containerd expects its output.
    assert web.server.receive(timeout_s=READY_S) == "was restore"
    assert second.memories() == memories
    restored = node.until_event("restored")
    assert (restored["pod"], restored["reason"]) == (f"default/{second.name}", "proven")
    assert containerd.ctr("tasks", "exec", "--exec-id=look", side.task_id, "/bin/echo", "in", "here") == "in here\n"

    node.write_policy("manual")
    done = node.snapagent("snapshot", second.name, "--json")
    assert done.returncode == 0, done.stdout + node.tail()
    third = Pod("shop-7d9f8b6c5-ccccc", containerd)
    third.sandbox()
    assert third.init().exit_code() == 0
    third.server("web")
    third.server("side")
    assert third.memories() == memories
    assert node.until_event("restored", count=2)["snapshot"] == json.loads(done.stdout)["snapshot"]

    states = {state.container_id: state.status for state in containerd.runsc.list()}
    for task in (web, side):
        assert states[task.task_id] == "running"
        containerd.kill(task)
        wait_until(lambda task=task: _status(containerd, task.task_id) == "stopped")  # type: ignore[misc]
    assert second.tasks[""].client.poll() is None
    containerd.kill(second.tasks[""])
    wait_until(lambda: _status(containerd, second.sandbox_id) != "running")


def _status(containerd: Containerd, container_id: str) -> str:
    found = [state.status for state in containerd.runsc.list() if state.container_id == container_id]
    return found[0] if found else ""


def test_a_pod_whose_further_container_can_not_be_restored_is_ended_and_starts_cold_the_next_time(
    node: AgentNode, containerd: Containerd
) -> None:
    saved(node, containerd)
    pod = Pod("shop-7d9f8b6c5-bbbbb", containerd)
    pod.sandbox()
    assert pod.init().exit_code() == 0
    web = pod.server("web")
    wait_until(lambda: containerd.status(web.task_id) == "RUNNING")
    process = Path(f"/proc/{containerd.runsc.state(pod.sandbox_id).pid}")
    # gVisor looks at each container's spec when the last one starts; of these the agent has seen the first one's only.
    side = pod.server("side", "--another")
    assert side.exit_code() == 1
    assert "Args" in side.output()[1]
    failed = node.until_event("restore failed")
    assert (failed["pod"], failed["reason"]) == (f"default/{pod.name}", "spec-mismatch")
    assert "Args" in failed["message"]
    wait_until(lambda: not process.exists())
    # It was the process of all of them. This shim tells the end of one, whichever it finds first; runsc knows.
    for task in (pod.tasks[""], web):
        wait_until(lambda task=task: _status(containerd, task.task_id) != "running")  # type: ignore[misc]

    again = Pod(pod.name, containerd, attempt=1)
    again.sandbox()
    fallback = node.until_event("fallback to a cold start")
    assert fallback["reason"] == "RestoreFailedBefore"
    assert "Args" in fallback["message"]


def test_a_pod_starts_cold_when_the_snapshot_still_holds_an_init_container(
    node: AgentNode, containerd: Containerd
) -> None:
    # The kubelet would wait for its end before it makes the servers, and gVisor for them before anything runs.
    saved(node, containerd, is_removed=False)
    Pod("shop-7d9f8b6c5-bbbbb", containerd).sandbox()
    fallback = node.until_event("fallback to a cold start")
    assert fallback["reason"] == "ContainersMismatch"
    assert "still holds setup" in fallback["message"]
