"""Containers that a real containerd runs through the wrapper: plainly, restored, and pods of several.

The server's memory tells what was restored: once it has freed blocks, no new one hashes the same.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent.runtime.bundle import Pod
from bench.containerd import Containerd, ContainerdError, Task
from bench.server import Heap
from bench.workload import heap_hash
from tests.containerd.conftest import Node
from tests.wrapper.conftest import wait_until

_READY_S = 120.0
_HEAP = Heap(1, 16)
_OTHER = Heap(2, 16)


def _ready(task: Task) -> str:
    return task.server.receive(timeout_s=_READY_S)


def _saved(containerd: Containerd, task: Task) -> Path:
    """Checkpoint a task's sandbox."""
    image = containerd.directory / "image-of-the-pod"
    containerd.runsc.checkpoint(task.task_id, image)
    return image


def _by_verb(**answers: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Answer each kind of question with the same."""
    return lambda question: answers[question["request"]]


def test_without_an_answer_a_container_runs_as_with_runsc(node: Node) -> None:
    with node.containerd as containerd:
        task = containerd.run("web", _HEAP)
        assert _ready(task) == "ready 16"
        assert task.server.request("hash") == heap_hash(1, 16)
        assert containerd.status("web") == "RUNNING"
        task.server.send("exit 3")
        assert (task.exit_code(), task.output()) == (3, ([], "bye\n"))
        assert [question["request"] for question in node.questions] == ["create", "start"]
        assert Path(node.questions[0]["bundle"]).is_relative_to(containerd.directory)
    assert sorted(path.name for path in containerd.directory.iterdir() if path.is_dir()) == []


def test_a_container_is_restored_and_goes_on_from_memory(node: Node) -> None:
    with node.containerd as containerd:
        original = containerd.run("web-1", _HEAP)
        _ready(original)
        original.server.request("free")
        freed = original.server.request("hash")
        image = _saved(containerd, original)
        containerd.kill(original)
        assert original.exit_code() == 137

        node.answer = _by_verb(
            create={"answer": "plain", "annotations": {}},
            start={"answer": "restore", "image": str(image)},
            report={"answer": "noted"},
        )
        restored = containerd.run("web-2", _HEAP)
        # It says nothing first: it was ready before it was saved.
        assert restored.server.request("hash", timeout_s=_READY_S) == freed != heap_hash(1, 16)
        assert containerd.status("web-2") == "RUNNING"
        assert node.reports() == [("web-2", 0)]
        restored.server.send("exit 4")
        assert (restored.exit_code(), restored.output()) == (4, ([], "bye\n"))


def test_a_restore_that_fails_ends_the_container_with_runscs_reason_and_the_next_one_can_start(node: Node) -> None:
    with node.containerd as containerd:
        original = containerd.run("web-1", _HEAP)
        _ready(original)
        image = _saved(containerd, original)
        node.answer = _by_verb(
            create={"answer": "plain", "annotations": {}},
            start={"answer": "restore", "image": str(image)},
            report={"answer": "noted"},
        )
        # Another argument: gVisor compares the spec with the image's.
        failed = containerd.run("web-2", Heap(1, 15))
        assert failed.exit_code() == 1
        _, errors = failed.output()
        assert "args" in errors.lower()
        assert containerd.status("web-2") is None
        assert [state.container_id for state in containerd.runsc.list()] == ["web-1"]
        ((name, exit_code),) = node.reports()
        assert (name, exit_code) == ("web-2", 128)
        assert "args" in node.questions[-1]["message"].lower()

        node.answer = None
        again = containerd.run("web-2", Heap(1, 15))
        assert _ready(again) == "ready 15"


def test_annotations_of_the_agent_reach_gvisor(node: Node) -> None:
    with node.containerd as containerd:
        node.answer = _by_verb(
            create={"answer": "plain", "annotations": {"dev.gvisor.internal.checkpoint.enable": "true"}},
            start={"answer": "plain", "annotations": {}},
        )
        task = containerd.run("web", _HEAP)
        _ready(task)
        mode = containerd.runsc.exec("web", ["/usr/bin/stat", "-c", "%a", "/proc/gvisor/checkpoint"]).stdout
        assert mode == b"666\n"  # 444 without


def test_a_container_that_the_agent_refuses_does_not_start_and_containerd_says_why(node: Node) -> None:
    with node.containerd as containerd:
        reason = "the snapshot web-1 has no container named debugger"
        node.answer = _by_verb(create={"answer": "refused", "message": reason})
        task = containerd.run("debugger", _HEAP)
        assert task.exit_code() == 1
        assert reason in task.output()[1]
        with pytest.raises(ContainerdError):
            containerd.kill(task)


def _first(pod: str) -> Pod:
    return Pod(sandbox_id=pod, name="server", first=True)


def _further(pod: str, name: str) -> Pod:
    return Pod(sandbox_id=pod, name=name, first=False)


def test_each_container_of_a_pod_has_its_own_output_without_an_agent_too(node: Node) -> None:
    with node.containerd as containerd:
        first = containerd.run("first", _HEAP, pod=_first("first"))
        _ready(first)
        other = containerd.run("other", _OTHER, pod=_further("first", "other"))
        assert _ready(other) == "ready 16"
        assert other.server.request("hash") == heap_hash(2, 16)
        assert first.server.request("hash") == heap_hash(1, 16)


def _saved_pod(node: Node, containerd: Containerd) -> tuple[Path, tuple[str, str]]:
    """Save a pod of two and end it; give the image, and what its memories hashed to."""
    first = containerd.run("first-1", _HEAP, pod=_first("first-1"))
    _ready(first)
    other = containerd.run("other-1", _OTHER, pod=_further("first-1", "other"))
    _ready(other)
    first.server.request("free")
    other.server.request("free")
    hashes = (first.server.request("hash"), other.server.request("hash"))
    image = _saved(containerd, first)
    # All containers of a sandbox have its process, so this shim tells the end of any one of them only.
    containerd.kill(first)
    wait_until(lambda: not {"RUNNING"} >= {containerd.status("first-1"), containerd.status("other-1")})

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        match question["request"], question["container"]["container_id"]:
            case "create", "init-2":
                return {"answer": "finished"}
            case "create", _:
                return {"answer": "plain", "annotations": {}}
            case "start", "first-2":
                return {"answer": "restore", "image": str(image)}
            case "start", _:
                return {"answer": "join"}
            case _:
                return {"answer": "noted"}

    node.answer = answer
    return image, hashes


def test_a_pod_of_two_with_a_finished_init_container_is_restored_each_with_its_own_output(node: Node) -> None:
    with node.containerd as containerd:
        _, hashes = _saved_pod(node, containerd)
        first = containerd.run("first-2", _HEAP, pod=_first("first-2"))
        wait_until(lambda: containerd.status("first-2") == "RUNNING")
        init = containerd.run("init-2", _HEAP, pod=_further("first-2", "init"), command=["/bin/sh", "-c", "exit 9"])
        assert (init.exit_code(), init.output()) == (0, ([], ""))
        other = containerd.run("other-2", _OTHER, pod=_further("first-2", "other"))
        assert other.server.request("hash", timeout_s=_READY_S) == hashes[1]
        assert first.server.request("hash", timeout_s=_READY_S) == hashes[0]
        wait_until(lambda: len(node.reports()) == 2)  # the pod runs before the command that let it has ended
        assert node.reports() == [("first-2", 0), ("other-2", 0)]


def test_a_pod_whose_restore_fails_with_its_last_container_is_reported_so_that_the_agent_can_end_it(node: Node) -> None:
    with node.containerd as containerd:
        _saved_pod(node, containerd)
        answered = node.answer

        def answer(question: dict[str, Any]) -> dict[str, Any]:
            assert answered is not None
            if question.get("exit_code"):
                # gVisor leaves the sandbox's process there, and containerd thinks that the first container runs.
                containerd.runsc.delete("first-2", force=True)
            return answered(question)

        node.answer = answer
        containerd.run("first-2", _HEAP, pod=_first("first-2"))
        wait_until(lambda: containerd.status("first-2") == "RUNNING")
        (sandbox,) = [state.pid for state in containerd.runsc.list() if state.container_id == "first-2"]
        other = containerd.run("other-2", Heap(2, 15), pod=_further("first-2", "other"))
        assert other.exit_code() == 1
        assert "Args" in other.output()[1]
        assert node.reports() == [("first-2", 0), ("other-2", 128)]
        wait_until(lambda: not Path(f"/proc/{sandbox}").exists())
        assert {state.container_id for state in containerd.runsc.list()} <= {"first-1", "other-1"}
