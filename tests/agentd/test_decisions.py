"""What the wrapper is answered: every path of a verdict, and that nothing but a sound restore is anything but plain."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
import trio
import trio.testing

from agent.errors import AgentError
from agent.kube.objects import Kind, PodSnapshot, R
from agent.kube.port import Change, Objects, Synced
from agent.node.decisions import Ending
from agent.node.events import What
from agent.node.pods_here import State
from agent.node.restore import NotRestored, Stage
from agent.node.workload_trigger import PREFIX
from agent.runtime.failures import FailureKind, RuntimeFailure
from agent.wrapper.protocol import Container, ContainerKind, Create, Plain, PodName, Report, Restore
from streamd.errors import Exit
from tests.agentd.conftest import Node, until


async def test_without_a_policy_a_pod_starts_cold_and_the_reason_says_so(node: Node) -> None:
    async with node.running() as agent:
        assert await agent.decisions.create(node.create("web")) == Plain()
        assert await agent.decisions.start(node.start("web")) == Plain()
        assert [(event.pod, event.reason) for event in node.events(What.COLD_START)] == [("default/web", "no-policy")]


async def test_a_workload_policy_arms_a_pod_and_its_save_becomes_a_snapshot_that_is_ready(node: Node) -> None:
    node.write_policy("workload")
    async with node.running() as agent:
        answer = await agent.decisions.create(node.create("web"))
        assert isinstance(answer, Plain)
        (job,) = node.jobs()
        assert answer.annotations[f"{PREFIX}path"] == str(job / "image")
        assert answer.annotations[f"{PREFIX}enable"] == "true"
        assert node.snapshots() == []
        assert await agent.decisions.start(node.start("web")) == Plain()
        node.runtime.asked.setdefault("web", trio.Event()).set()
        await node.event(What.SNAPSHOT_READY)
        (snapshot,) = node.snapshots()
        reasons = {each.type: (each.status.value, each.reason) for each in snapshot.status.conditions}
        assert reasons == {
            "Checkpoint": ("True", "Succeeded"),
            "StorageReplicated": ("True", "Succeeded"),
            "Ready": ("True", "AllSnapshotsAvailable"),
        }
        assert snapshot.status.snapshot_url == f"{node.store_url}/{snapshot.metadata.name}"
        assert node.jobs() == []


async def test_a_replica_is_restored_and_counts_only_when_it_is_proven(node: Node) -> None:
    snapshot = await node.saved()
    node.runtime.loads = trio.Event()
    async with node.running() as agent:
        assert await agent.decisions.create(node.create("copy")) == Plain()
        assert await agent.decisions.start(node.start("copy")) == Restore(str(node.images.directory))
        assert [record.pod_uid for record in agent.restoring.records.all()] == ["container-copy"]
        await agent.decisions.report(Report(node.container("copy"), 0, ""))
        await until(lambda: "copy" in node.runtime.observed, "the look at it")
        assert node.events(What.RESTORED) == []
        assert [lease.is_held for lease in node.images.leases] == [True]
        node.runtime.loads.set()
        event = await node.event(What.RESTORED)
        assert (event.pod, event.snapshot) == ("default/copy", snapshot)
        await until(lambda: not node.images.leases[0].is_held, "the lease's end")
        await until(lambda: node.snapshots()[0].status.last_access_time, "the time of access")
        assert agent.restoring.records.all() == ()


async def test_a_wrapper_that_waits_no_longer_is_told_of_with_its_pod_or_else_its_container(node: Node) -> None:
    snapshot = await node.saved()
    node.images.may = trio.Event()
    async with node.running() as agent:
        await until(lambda: agent.known.snapshot("default", snapshot), "the snapshot")
        create = node.create("copy")
        await agent.decisions.create(create)
        agent.decisions.given_up(node.start("copy"))
        agent.decisions.given_up(node.create("unheard-of"))
        agent.decisions.given_up(Report(node.container("copy"), 0, ""))
        (fallback,) = node.events(What.FALLBACK)
        assert (fallback.pod, fallback.reason, fallback.snapshot) == ("default/copy", "GivenUp", snapshot)
        (cold,) = node.events(What.COLD_START)
        assert (cold.pod, cold.reason) == ("", "GivenUp")
        assert "unheard-of" in cold.message
        pod = agent.here.named("default", "copy")
        assert pod is not None
        assert pod.state is State.COLD


class Unreadable:
    """Objects of which no snapshot can be read any more: whoever wants to, waits."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self.is_stuck = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objects, name)

    async def get(self, kind: type[R], name: str, namespace: str = "") -> R:
        if self.is_stuck and issubclass(kind, PodSnapshot):
            await trio.sleep_forever()
        return await self._objects.get(kind, name, namespace)


async def test_no_pod_waits_for_the_objects_to_be_read(node: Node) -> None:
    snapshot = await node.saved()
    opened: list[Unreadable] = []

    def wrap(objects: Objects) -> Objects:
        opened.append(Unreadable(objects))
        return cast(Objects, opened[-1])

    node.wrap = wrap
    async with node.running() as agent:
        await until(lambda: agent.known.snapshot("default", snapshot), "the snapshot")
        opened[0].is_stuck = True
        with trio.fail_after(60):
            await agent.decisions.create(node.create("copy"))
            assert isinstance(await agent.decisions.start(node.start("copy")), Restore)
            other = node.create("other", process={**node.spec["process"], "cwd": "/elsewhere"})
            await agent.decisions.create(other)
        (event,) = node.events(What.COLD_START)
        assert event.reason == "pod-hash"
        assert "it differs from" not in event.message


async def test_the_reason_names_the_argument_that_differs(node: Node) -> None:
    snapshot = await node.saved()
    async with node.running() as agent:
        process = {**node.spec["process"], "args": [*node.spec["process"]["args"], "--verbose"]}
        answer = await agent.decisions.create(node.create("other", process=process))
        assert isinstance(answer, Plain)
        (event,) = node.events(What.COLD_START)
        assert event.reason == "pod-hash"
        assert snapshot in event.message
        assert "--verbose" in event.message


def unavailable(node: Node) -> None:
    node.images.problem = "the store is away"


def late(node: Node) -> None:
    node.images.may = trio.Event()


def other_spec(node: Node) -> None:
    # Counts for gVisor, and not for the hash.
    node.spec["process"] = {**node.spec["process"], "rlimits": [{"type": "RLIMIT_NOFILE", "hard": 7, "soft": 7}]}


def other_build(node: Node) -> None:
    node.images.directory = node.directory / "damaged"
    node.images.directory.mkdir()
    for path in node.runtime.image.directory.iterdir():
        (node.images.directory / path.name).write_bytes(path.read_bytes())
    (node.images.directory / "pages.img").write_bytes(b"short")


DOUBTS: dict[str, tuple[Callable[[Node], None], str]] = {
    "the image can't be served": (unavailable, "ImageUnavailable"),
    "the image is late": (late, "ImageUnavailable"),
    "gVisor would refuse the spec": (other_spec, "SpecMismatch"),
    "the image's files differ": (other_build, "ImageFilesDiffer"),
}


@pytest.mark.parametrize("is_known", [False, True], ids=["that shows at start", "that is known at start"])
@pytest.mark.parametrize("name", DOUBTS)
async def test_any_doubt_before_the_restore_is_a_cold_start_with_its_reason(
    name: str, is_known: bool, node: Node
) -> None:
    spoil, reason = DOUBTS[name]
    await node.saved()
    spoil(node)
    async with node.running() as agent:
        await agent.decisions.create(node.create("copy"))
        if is_known:
            await trio.testing.wait_all_tasks_blocked()
        assert await agent.decisions.start(node.start("copy")) == Plain()
        (event,) = node.events(What.FALLBACK)
        assert (event.reason, event.pod) == (reason, "default/copy")
        assert agent.restoring.records.all() == ()
        node.images.may.set()
        await until(lambda: not any(lease.is_held for lease in node.images.leases), "the end of leases")
        await until(lambda: not agent.restoring.plans, "the end of the plan")


async def test_an_image_that_fails_long_before_the_start_is_a_reason_too(node: Node) -> None:
    await node.saved()
    unavailable(node)
    async with node.running() as agent:
        await agent.decisions.create(node.create("copy"))
        (plan,) = agent.restoring.plans.values()
        await plan.held.wait()
        await trio.testing.wait_all_tasks_blocked()
        assert await agent.decisions.start(node.start("copy")) == Plain()
        (event,) = node.events(What.FALLBACK)
        assert (event.reason, event.message) == ("ImageUnavailable", "the store is away")
        await until(lambda: not agent.restoring.plans, "the end of the plan")


async def test_a_pod_whose_restore_has_failed_starts_cold_the_next_time(node: Node) -> None:
    await node.saved()
    async with node.running() as agent:
        await agent.decisions.create(node.create("copy"))
        assert isinstance(await agent.decisions.start(node.start("copy")), Restore)
        await agent.decisions.report(Report(node.container("copy"), 128, "incompatible FeatureSet"))
        event = await node.event(What.RESTORE_FAILED)
        assert "FeatureSet" in event.message
    node.runtime.pods.clear()
    (node.directory / "pod-copy").unlink()
    async with node.running() as agent:
        await agent.decisions.create(node.create("copy"))
        assert await agent.decisions.start(node.start("copy")) == Plain()
        assert "FeatureSet" in node.events(What.FALLBACK)[0].message


async def test_a_snapshot_whose_restores_fail_costs_two_pods_and_not_each_new_one(node: Node) -> None:
    snapshot = await node.saved()
    async with node.running() as agent:
        for count, name in enumerate(("one", "two"), start=1):
            await agent.decisions.create(node.create(name))
            assert isinstance(await agent.decisions.start(node.start(name)), Restore)
            await agent.decisions.report(Report(node.container(name), 128, "bad magic header"))
            await node.event(What.RESTORE_FAILED, count=count)
    async with node.running() as agent:  # and another life of the agent knows of it
        await agent.decisions.create(node.create("three"))
        assert await agent.decisions.start(node.start("three")) == Plain()
        (event,) = node.events(What.FALLBACK)
        assert (event.reason, event.snapshot) == ("SnapshotFailedBefore", snapshot)
        assert "bad magic header" in event.message


async def older_and_newer(node: Node) -> tuple[str, str]:
    """Have two snapshots of one group made."""
    older = await node.saved("first")
    async with node.running() as agent:
        other = node.create("second", annotations={"podsnapshot.gke.io/ps-name": "none"})
        await agent.decisions.create(other)
        await agent.decisions.start(node.start("second"))
        node.runtime.asked.setdefault("second", trio.Event()).set()
        newer = (await node.event(What.SNAPSHOT_READY)).snapshot
        await until(lambda: len(agent.known.index.namespace("default").snapshots) == 2, "the index")
    node.runtime.asked.clear()
    return older, newer


def damaged(node: Node) -> None:
    node.images.problem, node.images.problem_is = "packs/1 is damaged", Exit.DAMAGED


def missing(node: Node) -> None:
    node.images.problem, node.images.problem_is = "there is no manifest", Exit.NOT_FOUND


def away(node: Node) -> None:
    node.images.problem, node.images.problem_is = "no route", Exit.UNREACHABLE


# What keeps the newest snapshot's image away; whether older ones are tried while it rests.
RESTS: dict[str, tuple[Callable[[Node], None], bool]] = {
    "damaged": (damaged, True),
    "missing": (missing, True),
    "its files differ": (other_build, True),
    "the store is away": (away, False),
    "streamd can't say": (unavailable, False),
    "the image is late": (late, False),
    "gVisor would refuse the spec": (other_spec, False),
}


@pytest.mark.parametrize("name", RESTS)
async def test_a_snapshot_whose_data_is_no_good_rests_and_the_next_pod_gets_the_one_before(
    name: str, node: Node
) -> None:
    spoil, is_passed_over = RESTS[name]
    older, newer = await older_and_newer(node)
    spoil(node)
    async with node.running() as agent:
        for count, snapshot in enumerate((newer, older if is_passed_over else newer), start=1):
            await agent.decisions.create(node.create(f"copy-{count}"))
            assert await agent.decisions.start(node.start(f"copy-{count}")) == Plain()
            assert (await node.event(What.FALLBACK, count=count)).snapshot == snapshot
        node.images.may.set()


@pytest.mark.parametrize(("is_left", "problems"), [(False, []), (True, ["sandbox not ended"])])
async def test_a_sandbox_that_can_not_be_removed_is_a_problem_only_if_something_is_left_of_it(
    node: Node, is_left: bool, problems: list[str]
) -> None:
    await node.saved()
    async with node.running() as agent:
        await agent.decisions.create(node.create("copy"))
        await agent.decisions.start(node.start("copy"))
        node.runtime.pod("copy").fails["remove"] = [FailureKind.UNKNOWN]
        if not is_left:
            await node.runtime.pod("copy").end()  # as when the wrapper was faster
        await agent.decisions.report(Report(node.container("copy"), 128, "bad magic header"))
        await node.event(What.RESTORE_FAILED)
        await until(lambda: not agent.restoring.plans, "the end of the plan")
        assert [event.reason for event in node.events(What.PROBLEM)] == problems


async def test_a_restore_that_dies_while_it_loads_is_noted_and_never_counted(node: Node) -> None:
    await node.saved()
    gone = RuntimeFailure(FailureKind.SANDBOX_GONE, "it is gone")
    node.runtime.outcome = NotRestored(Stage.RUNNING, gone)
    async with node.running() as agent:
        await agent.decisions.create(node.create("copy"))
        await agent.decisions.start(node.start("copy"))
        await agent.decisions.report(Report(node.container("copy"), 0, ""))
        await node.event(What.RESTORE_FAILED)
        assert node.events(What.RESTORED) == []
        assert [record.failure for record in agent.restoring.records.all()] == ["it is gone"]


async def test_a_wrapper_that_never_heard_the_answer_has_started_a_pod_that_goes_on(node: Node) -> None:
    await node.saved()
    node.runtime.outcome = NotRestored(Stage.RUNNING, RuntimeFailure(FailureKind.NOT_RESTORING, "not restored"))
    async with node.running() as agent:
        await agent.decisions.create(node.create("copy"))
        await agent.decisions.start(node.start("copy"))
        await agent.decisions.report(Report(node.container("copy"), 0, ""))
        assert (await node.event(What.FALLBACK)).reason == "NotTried"
        assert agent.restoring.records.all() == ()
        assert node.runtime.pod("copy").now == "running"


async def test_two_hundred_creates_at_once_are_all_answered(node: Node) -> None:
    await node.saved()
    async with node.running() as agent:
        answers: list[object] = []

        async def one(name: str) -> None:
            await agent.decisions.create(node.create(name))
            answers.append(await agent.decisions.start(node.start(name)))
            await agent.decisions.report(Report(node.container(name), 0, ""))

        agent.restoring._image_s = 60.0
        async with trio.open_nursery() as nursery:
            for index in range(200):
                nursery.start_soon(one, f"copy-{index}")
        assert answers == [Restore(str(node.images.directory))] * 200
        await until(lambda: len(node.events(What.RESTORED)) == 200, "all restores")
        await until(lambda: not any(lease.is_held for lease in node.images.leases), "the end of leases")


def no_spec(node: Node) -> Create:
    request = node.create("web")
    (node.runtime.bundles["web"] / "config.json").unlink()
    return request


def a_link(node: Node) -> Create:
    request = node.create("web")
    path = node.runtime.bundles["web"] / "config.json"
    path.rename(path.with_name("other.json"))
    path.symlink_to("other.json")
    return request


def another_root(node: Node) -> Create:
    request = node.create("web")
    return request._replace(container=Container("web", request.container.runsc, "/somewhere/else"))


def another_runsc(node: Node) -> Create:
    request = node.create("web")
    return request._replace(container=Container("web", "/other/runsc", request.container.runsc_root))


def other_flags(node: Node) -> Create:
    request = node.create("web")
    return request._replace(container=request.container._replace(flags={"network": "host"}))


HOSTILE: dict[str, tuple[Callable[[Node], Create], str]] = {
    "no spec": (no_spec, "BadBundle"),
    "a link in its place": (a_link, "BadBundle"),
    "a root that isn't cared for": (another_root, "UnknownRoot"),
    "another runsc": (another_runsc, "AnotherRunsc"),
    "other flags": (other_flags, "OtherFlags"),
    "labels that are none": (
        lambda node: node.create("web", annotations={"podsnapshot.gke.io/pod-labels": "no label"}),
        "PodUnknown",
    ),
    "a name that is a path": (
        lambda node: node.create("web", annotations={"podsnapshot.gke.io/pod-name": "../../x"}),
        "PodUnknown",
    ),
    "a namespace that is a path": (
        lambda node: node.create("web")._replace(kind=ContainerKind.FIRST, pod=PodName("../other", "web", "uid")),
        "PodUnknown",
    ),
    "arguments that are no list": (lambda node: node.create("web", process={"args": "sh -c"}), "PodUnknown"),
    "mounts without end": (lambda node: node.create("web", mounts=[{}] * 2000), "PodUnknown"),
    "several containers that nobody has described": (
        lambda node: node.create("web")._replace(kind=ContainerKind.FIRST),
        "PodUnknown",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_what_cannot_be_understood_starts_as_runsc_would_with_a_reason(name: str, node: Node) -> None:
    make, reason = HOSTILE[name]
    node.write_policy("workload")
    async with node.running() as agent:
        assert await agent.decisions.create(make(node)) == Plain()
        assert [event.reason for event in node.events(What.COLD_START)] == [reason]
        assert node.jobs() == []


async def test_a_snapshot_of_another_tenant_is_out_of_reach_by_name_too(node: Node) -> None:
    snapshot = await node.saved()
    pod = {"name": "evil", "namespace": "other", "annotations": {"podsnapshot.gke.io/ps-name": snapshot}}
    manifest = {"kind": "Pod", "metadata": pod, "spec": {"containers": [{"name": "main", "image": "x"}]}}
    node.write("pods/evil.json", json.dumps({"apiVersion": "v1", **manifest}))
    async with node.running() as agent:
        asked = node.create("evil")._replace(kind=ContainerKind.FIRST, pod=PodName("other", "evil", "uid-1"))
        await agent.decisions.create(asked)
        assert [event.reason for event in node.events(What.COLD_START)] == ["pin-missing"]
        assert node.images.asked == []


async def test_a_pod_that_names_its_snapshot_gets_that_one(node: Node) -> None:
    snapshot = await node.saved()
    async with node.running() as agent:
        for name, pin in (("one", snapshot), ("two", "00000000-0000-4000-8000-000000000000")):
            await agent.decisions.create(node.create(name, annotations={"podsnapshot.gke.io/ps-name": pin}))
        assert isinstance(await agent.decisions.start(node.start("one")), Restore)
        assert await agent.decisions.start(node.start("two")) == Plain()


class Untold:
    """Objects of which nothing is told."""

    def __init__(self, inner: Objects) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @asynccontextmanager
    async def watch(self, *_: Kind) -> AsyncIterator[AsyncIterator[Change]]:
        async def nothing() -> AsyncIterator[Change]:
            while True:
                await trio.sleep(3600)
                yield Synced()

        yield nothing()


async def test_an_agent_that_has_not_read_its_objects_yet_restores_nothing_and_says_why(node: Node) -> None:
    node.wrap = Untold
    async with node.running(synced=False) as agent:
        assert await agent.decisions.create(node.create("web")) == Plain()
        assert node.events(What.COLD_START)[0].reason == "NotReady"


async def test_an_agent_that_ends_decides_nothing(node: Node) -> None:
    async with node.running() as agent:
        await agent.end()
        with pytest.raises(Ending):
            await agent.decisions.create(node.create("web"))
        with pytest.raises(AgentError):
            await agent.decisions.start(node.start("web"))


async def test_a_container_that_the_snapshot_lacks_is_refused_by_name_and_a_finished_one_is_answered_for(
    node: Node,
) -> None:
    # The small image has one container, which stands for the pod's first here, and its only one.
    manifest = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "shop", "labels": {"app": "web"}},
        "spec": {"initContainers": [{"name": "setup"}], "containers": [{"name": "__no_name_0", "image": "x"}]},
    }
    node.write_policy("workload")
    node.write("pods/shop.json", json.dumps(manifest))
    async with node.running() as agent:
        named = node.create("shop-1")._replace(kind=ContainerKind.FIRST, pod=PodName("default", "shop", "u1"))
        await agent.decisions.create(named)
        await agent.decisions.start(node.start("shop-1"))
        node.runtime.asked.setdefault("shop-1", trio.Event()).set()
        await node.event(What.SNAPSHOT_READY)
        await until(lambda: agent.known.index.namespace("default").snapshots, "the index")
        again = node.create("shop-2")._replace(kind=ContainerKind.FIRST, pod=PodName("default", "shop", "u2"))
        await agent.decisions.create(again)
        assert isinstance(await agent.decisions.start(node.start("shop-2")), Restore)
        answers = {}
        for name in ("setup", "debugger"):
            request = node.create(name)._replace(
                kind=ContainerKind.FURTHER, name=name, sandbox_id="shop-2", pod=PodName("default", "shop", "u2")
            )
            answers[name] = await agent.decisions.create(request)
        assert type(answers["setup"]).__name__ == "Finished"
        assert "debugger" in str(answers["debugger"])
        assert node.events(What.REFUSED)[0].reason == "ContainersMismatch"
