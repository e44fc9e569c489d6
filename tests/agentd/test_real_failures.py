"""Restores that can't be, each kind, with everything real: before the RPC a cold start that says why, after it an end.

One node, and one snapshot that is spoiled and mended again: so each case also shows that the one before left nothing.
"""

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from bench.agent_node import AgentNode, Running
from bench.server import NoAnswer
from tests.agentd.test_real import READY_S, ready, server_bundle


@pytest.fixture
def node() -> Iterator[AgentNode]:
    with AgentNode() as node:
        yield node


def saved(node: AgentNode) -> Path:
    """Have a pod saved by its own word; give its snapshot's place in the store."""
    node.write_policy("workload")
    first = node.run("web-0", server_bundle(node, "web-0"))
    ready(first)
    assert first.server.request("save", timeout_s=READY_S) == "resume"
    return node.store / str(node.until_event("snapshot ready")["snapshot"])


def packs(snapshot: Path) -> list[Path]:
    return sorted(path for path in (snapshot / "packs").rglob("*") if path.is_file())


@contextlib.contextmanager
def overwritten(path: Path, data: bytes, offset: int) -> Iterator[None]:
    """Change bytes of a file so that a store takes it for the same object."""
    times = path.stat()

    def write(content: bytes) -> bytes:
        with path.open("r+b") as file:
            file.seek(offset)
            former = file.read(len(content))
            file.seek(offset)
            file.write(content)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        return former

    former = write(data)
    yield
    write(former)


@contextlib.contextmanager
def cut(path: Path) -> Iterator[None]:
    content, times = path.read_bytes(), path.stat()
    os.truncate(path, len(content) - 1)
    yield
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@contextlib.contextmanager
def moved_away(path: Path) -> Iterator[None]:
    path.rename(path.with_name("elsewhere"))
    yield
    path.with_name("elsewhere").rename(path)


@contextlib.contextmanager
def without_streamd(node: AgentNode) -> Iterator[None]:
    node.streamd.stop(signal.SIGTERM)
    yield
    node.streamd.start()


@contextlib.contextmanager
def other_limits(node: AgentNode, name: str) -> Iterator[None]:
    """Give a bundle what counts for gVisor, and not for the pod's hash."""
    path = server_bundle(node, name) / "config.json"
    spec = json.loads(path.read_text())
    spec["process"]["rlimits"] = [{"type": "RLIMIT_NOFILE", "hard": 512, "soft": 512}]
    path.write_text(json.dumps(spec))
    yield


Spoil = Callable[[AgentNode, Path, str], AbstractContextManager[None]]

# What is spoiled; the event's reason, and words of its message. In this order: what was fetched once is cached.
BEFORE: dict[str, tuple[Spoil, str, str]] = {
    "a damaged checkpoint.img": (
        lambda node, snapshot, name: overwritten(packs(snapshot)[0], b"gVisorXX" * 64, 0),
        "ImageUnavailable",
        "packs/",
    ),
    "a pages file cut short": (
        lambda node, snapshot, name: cut(packs(snapshot)[-1]),
        "ImageUnavailable",
        "bytes where the manifest says",
    ),
    "a damaged manifest": (
        lambda node, snapshot, name: overwritten(snapshot / "manifest", b"?" * 64, 64),
        "ImageUnavailable",
        "manifest",
    ),
    "a store that is gone": (
        lambda node, snapshot, name: moved_away(node.store),
        "ImageUnavailable",
        "streamd status",  # a store that is away may be back in a moment, and is waited for
    ),
    "streamd is down": (
        lambda node, snapshot, name: without_streamd(node),
        "ImageUnavailable",
        "no streamd daemon",
    ),
    "gVisor would refuse the spec": (
        lambda node, snapshot, name: other_limits(node, name),
        "SpecMismatch",
        "Rlimits",
    ),
}


def records(node: AgentNode) -> list[dict[str, Any]]:
    path = node.directory / "state" / "restores.json"
    return list(json.loads(path.read_text())["records"]) if path.exists() else []


def replica(node: AgentNode, name: str) -> Running:
    """Run a pod of the same spec; a bundle that is there already is taken as it is."""
    path = node.directory / f"bundle-{name}"
    return node.run(name, path if path.exists() else server_bundle(node, name))


def listen(pod: Running) -> None:
    """Receive what a pod says, until it has ended."""
    while True:
        pod.server.receive(timeout_s=READY_S)


def test_what_shows_before_the_rpc_is_a_cold_start_with_its_reason_and_the_next_pod_is_restored(
    node: AgentNode,
) -> None:
    snapshot = saved(node)
    for number, (case, (spoil, reason, words)) in enumerate(BEFORE.items(), start=1):
        name = f"web-{number}"
        with spoil(node, snapshot, name):
            pod = replica(node, name)
            ready(pod)
            event = node.until_event("fallback to a cold start")
        assert (event["pod"], event["reason"]) == (f"default/{name}", reason), (case, event)
        assert words in event["message"], (case, event)
        assert event["snapshot"] == snapshot.name
        assert records(node) == []
        node.delete(pod)
        node.kill_agent(signal.SIGTERM)
        node.start_agent()  # which doesn't let the snapshot rest any more
    last = replica(node, "web-last")
    assert last.server.receive(timeout_s=READY_S) == "was restore"
    node.until_event("restored")


def test_an_agent_that_hangs_keeps_no_pod_from_starting(node: AgentNode) -> None:
    saved(node)
    text = node.wrapper_config.read_text()
    node.wrapper_config.write_text(text.replace("deadline_ms = 30000", "deadline_ms = 300"))
    os.kill(node.agent_pid, signal.SIGSTOP)
    try:
        ready(replica(node, "web-1"))
    finally:
        os.kill(node.agent_pid, signal.SIGCONT)
    node.wrapper_config.write_text(text)
    assert replica(node, "web-2").server.receive(timeout_s=READY_S) == "was restore"
    node.until_event("restored")
    assert [event["pod"] for event in node.events("restored")] == ["default/web-2"]


def test_pages_that_can_not_be_read_end_the_pod_and_after_two_the_next_ones_start_cold(node: AgentNode) -> None:
    snapshot = saved(node)
    pages = packs(snapshot)[-1]
    with overwritten(pages, b"\xff" * 65536, pages.stat().st_size // 2):
        for count, name in enumerate(("web-1", "web-2"), start=1):
            pod = replica(node, name)
            with pytest.raises(NoAnswer, match="ended"):
                listen(pod)
            event = node.until_event("restore failed", count=count)
            assert (event["pod"], event["snapshot"]) == (f"default/{name}", snapshot.name)
            node.delete(pod)
        # containerd makes the pod's container again: no restore of this pod any more, and then of no pod.
        for count, (name, reason) in enumerate(
            (("web-1", "RestoreFailedBefore"), ("web-3", "SnapshotFailedBefore")), start=1
        ):
            ready(replica(node, name))
            event = node.until_event("fallback to a cold start", count=count)
            assert (event["pod"], event["reason"]) == (f"default/{name}", reason)
