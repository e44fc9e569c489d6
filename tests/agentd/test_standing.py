"""How storage configs and policies stand: in their conditions, in status, in metrics, as events; and what mends it."""

import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.kube.codec import parse
from agent.kube.conditions import Condition, ConditionType, Reason, Status, condition
from agent.kube.directory import ObjectDirectory
from agent.kube.objects import PodSnapshotPolicy, PodSnapshotStorageConfig
from agent.matching.pod import PodFacts
from agent.node.events import What
from agent.node.images import StreamdImages
from agent.node.standing import Standings, of_store, overlaps
from agent.node.store_access import NotADirectory
from agent.podspec.identity import PodHash
from bench.emulator import Emulator
from streamd.daemon.sockets import api_socket_path
from streamd.errors import NotFound, NotPermitted, StoreError, StoreErrorKind, StreamdError, Unreachable
from tests.agentd.conftest import Node, until

STORE = "gs://bucket/snapshots"
ANSWERS: dict[str, tuple[StreamdError | OSError | None, Reason, str]] = {
    "taken": (None, Reason.STORE_AVAILABLE, "can be written"),
    "no such bucket": (NotFound("no bucket"), Reason.STORE_NOT_FOUND, "name another"),
    "forbidden": (StoreError(StoreErrorKind.FORBIDDEN, "k", "403"), Reason.STORE_NOT_PERMITTED, "must be allowed"),
    "no credentials": (StoreError(StoreErrorKind.CREDENTIALS, "", "401"), Reason.STORE_NOT_PERMITTED, "401"),
    "not allowed": (NotPermitted("no"), Reason.STORE_NOT_PERMITTED, "must be allowed"),
    "away": (Unreachable("no route"), Reason.STORE_UNREACHABLE, "until it is back"),
    "busy": (StoreError(StoreErrorKind.THROTTLED, "", "429"), Reason.STORE_UNREACHABLE, "429"),
    "damaged": (StoreError(StoreErrorKind.CORRUPT, "k", "bad"), Reason.STORE_FAILED, "until that is mended"),
    "a file": (NotADirectory("/x is no directory"), Reason.STORE_NOT_FOUND, "or name another"),
    "a disk": (OSError(5, "I/O error"), Reason.STORE_FAILED, "I/O error"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_whatever_a_store_says_has_a_reason_and_advice(name: str) -> None:
    answer, reason, said = ANSWERS[name]
    found = of_store(STORE, answer)
    assert (found.reason, found.status) == (reason, Status.TRUE if answer is None else Status.FALSE)
    assert STORE in found.message
    assert said in found.message


def policy(name: str, *, trigger: str = "workload", selector: str = "app", namespace: str = "default") -> object:
    return {
        "apiVersion": "podsnapshot.gke.io/v1",
        "kind": "PodSnapshotPolicy",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "storageConfigName": "here",
            "selector": {"matchExpressions": [{"key": selector, "operator": "Exists"}]},
            "triggerConfig": {"type": trigger},
        },
    }


def read(*documents: object) -> list[PodSnapshotPolicy]:
    found = [parse(each, where="test") for each in documents]
    return [each for each in found if isinstance(each, PodSnapshotPolicy)]


OVERLAPS = {
    "one policy": ([policy("a")], set()),
    "two with one trigger": ([policy("a"), policy("b")], {"a", "b"}),
    "two with a trigger each": ([policy("a"), policy("b", trigger="manual")], set()),
    "two that select other pods": ([policy("a"), policy("b", selector="other")], set()),
    "two of two namespaces": ([policy("a"), policy("b", namespace="shop")], set()),
    "three of which two do": ([policy("a"), policy("b", selector="other"), policy("c")], {"a", "c"}),
}


@pytest.mark.parametrize("name", OVERLAPS)
def test_policies_overlap_when_a_pod_here_has_several_with_one_trigger(name: str) -> None:
    documents, expected = OVERLAPS[name]
    pod = PodFacts(namespace="default", name="web-1", labels={"app": "web"}, pod_hash=PodHash(1, "0" * 32, "0" * 64))
    found = overlaps(read(*documents), [pod])
    assert {policy for (_, policy), each in found.items() if each.status is Status.TRUE} == expected
    for (_, name), each in found.items():
        if each.status is Status.TRUE:
            assert "web-1" in each.message
            assert f"{min(expected)} decides" in each.message
            assert name not in each.message.partition(" select")[0]


def conditions(
    node: Node, kind: type[PodSnapshotPolicy] | type[PodSnapshotStorageConfig], name: str
) -> list[Condition]:
    """Read an object's conditions as they are on disk."""
    directory = ObjectDirectory(node.config.objects_directory, node.config.state_directory)
    namespace = "" if kind is PodSnapshotStorageConfig else "default"
    return list(directory.get(kind, name, namespace).status.conditions)


def reason(node: Node, kind: type[PodSnapshotPolicy] | type[PodSnapshotStorageConfig], name: str, type_: str) -> str:
    found = condition(conditions(node, kind, name), type_)
    return "" if found is None else found.reason


def ready(node: Node) -> str:
    """Give the reason of Ready of the policy that `Node.write_policy` writes."""
    return reason(node, PodSnapshotPolicy, "workload", ConditionType.READY)


async def test_a_policy_in_force_says_so_of_its_present_generation(node: Node) -> None:
    node.write_policy("workload")
    async with node.running():
        await until(lambda: ready(node) == "InForce", "the policy's condition")
        assert reason(node, PodSnapshotStorageConfig, "here", ConditionType.READY) == "StoreAvailable"
        assert reason(node, PodSnapshotPolicy, "workload", ConditionType.OVERLAPPING) == "NoPodsInCommon"
        node.write_policy("workload", "stop")
        await until(
            lambda: [each.observed_generation for each in conditions(node, PodSnapshotPolicy, "workload")] == [2, 2],
            "the next generation's conditions",
        )
        since = {each.last_transition_time for each in conditions(node, PodSnapshotPolicy, "workload")}
        assert all(since)


def _no_config(node: Node) -> None:
    node.write("policy.yaml", json.dumps(policy("workload")))


def _no_directory(node: Node) -> None:
    node.write_policy("workload")
    shutil.rmtree(node.directory / "store")
    (node.directory / "store").write_text("a file in its place")


def _mend_config(node: Node) -> None:
    node.write_policy("workload")


def _mend_directory(node: Node) -> None:
    (node.directory / "store").unlink()
    (node.directory / "store2").mkdir()
    node.write("policy.yaml", (node.config.objects_directory / "policy.yaml").read_text().replace("/store", "/store2"))


MENDED: dict[str, tuple[Callable[[Node], None], str, Callable[[Node], None]]] = {
    "no storage config": (_no_config, "StorageConfigNotFound", _mend_config),
    "a store that can't be used": (_no_directory, "StorageConfigNotReady", _mend_directory),
}


@pytest.mark.parametrize("name", MENDED)
async def test_what_is_wrong_is_said_everywhere_and_cleared_when_it_is_mended(name: str, node: Node) -> None:
    spoil, expected, mend = MENDED[name]
    spoil(node)
    async with node.running() as agent:
        await until(lambda: ready(node) == expected, "the policy's condition")
        await until(lambda: [e for e in node.events(What.NOT_READY) if e.reason == expected], "the event")
        await until(lambda: 'not_ready{kind="PodSnapshotPolicy"} 1\n' in agent.metrics(), "the metric")
        assert expected in json.dumps((await agent.status())["policies"])
        mend(node)
        await until(lambda: ready(node) == "InForce", "the mended policy's condition")
        await until(lambda: 'not_ready{kind="PodSnapshotPolicy"} 0\n' in agent.metrics(), "the metric")
        await until(lambda: [e for e in node.events(What.READY) if e.reason == "InForce"], "the event of the mending")
        assert len(node.events(What.NOT_READY)) == len({(e.reason, e.message) for e in node.events(What.NOT_READY)})
    looks = len(node.images.probed)
    async with node.running():  # nothing is told anew by the next life
        await until(lambda: len(node.images.probed) > looks, "its look at the store")
        _no_config(node)
        await node.event(What.NOT_READY)
        assert node.events(What.READY) == []


async def test_a_store_that_comes_back_is_found_without_an_edit(node: Node) -> None:
    node.write_policy("workload")
    store, now_s = node.directory / "store", 0.0
    store.rmdir()
    store.write_text("a file in its place")
    async with node.running() as agent:
        await until(lambda: ready(node) == "StorageConfigNotReady", "the policy's condition")
        standings = Standings(
            agent.known, agent.here, node.images, agent.writer, agent.events, look_every_s=0.02, clock=lambda: now_s
        )
        agent.spawn("standings", standings.run)
        await until(lambda: len(node.images.probed) >= 2, "a look at the store that fails")
        store.unlink()
        store.mkdir()
        now_s = 31.0
        await until(lambda: ready(node) == "InForce", "the policy's condition")


async def test_two_policies_for_one_pod_say_so_until_one_of_them_goes(node: Node) -> None:
    node.write_policy("workload")
    async with node.running() as agent:
        await agent.decisions.create(node.create("web"))
        node.write("second.yaml", json.dumps(policy("another")))
        for name in ("workload", "another"):
            await until(
                lambda: reason(node, PodSnapshotPolicy, name, "Overlapping") == "PodsInCommon",  # noqa: B023
                "the condition",
            )
        assert len(overlap_messages(node)) == 2
        (node.config.objects_directory / "second.yaml").unlink()
        await until(lambda: reason(node, PodSnapshotPolicy, "workload", "Overlapping") == "NoPodsInCommon", "its end")


def overlap_messages(node: Node) -> list[str]:
    return [each.message for each in node.events(What.OVERLAP)]


async def test_a_policy_that_goes_before_its_snapshots_is_told_of_and_they_stay(node: Node) -> None:
    snapshot = await node.saved()
    async with node.running() as agent:
        (node.config.objects_directory / "policy.yaml").unlink()
        event = await node.event(What.POLICY_GONE)
        assert "its 1 snapshots stay" in event.message
        assert "snapagent_snapshots_without_policy 1\n" in agent.metrics()
        assert (await agent.status())["without_policy"] == [
            {"namespace": "default", "policy": "workload", "snapshots": 1}
        ]
        await agent.keeping.look()
        assert [each.metadata.name for each in node.snapshots()] == [snapshot]
        node.write_policy("workload")
        await until(lambda: "without_policy 0\n" in agent.metrics(), "the policy's return")


async def test_a_bucket_is_asked_again_and_again_and_one_that_is_not_there_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = StreamdImages(tmp_path)
    with Emulator() as emulator:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", emulator.address)
        for _ in range(2):  # the second time the object is there
            await images.probe(f"gs://{emulator.bucket}/some/prefix")
        with pytest.raises(StoreError) as caught:
            await images.probe("gs://another-bucket/some/prefix")
    assert of_store("gs://another-bucket", caught.value).reason == "StoreNotFound"


async def test_a_streamd_that_hangs_is_told_of_after_a_moment(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(api_socket_path(tmp_path)))
        listener.listen()
        assert "did not answer within 2 s" in await StreamdImages(tmp_path).unavailable()
