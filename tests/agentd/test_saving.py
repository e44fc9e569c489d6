"""Saves by triggers and by applications: which are acted on, in which order things are written, what failures leave."""

import json
from collections import Counter

import pytest
import trio

from agent.kube.conditions import Phase
from agent.kube.objects import Kind
from agent.node.course import Found
from agent.node.events import What
from agent.node.jobs import Job
from agent.node.known_objects import is_pending
from agent.node.triggers import POST_CHECKPOINT
from agent.runtime.failures import FailureKind
from agent.wrapper.protocol import Plain, Report, Restore
from streamd.errors import StoreError, StoreErrorKind
from streamd.save.push import PushResult
from tests.agentd.conftest import Node, until


async def started(node: Node, name: str = "web") -> None:
    """Start a pod cold."""
    assert node.agent is not None
    await node.agent.decisions.create(node.create(name))
    await node.agent.decisions.start(node.start(name))


async def over(node: Node, trigger: str) -> tuple[str, str, str]:
    """Wait for a trigger's end, and give it."""
    await until(lambda: node.triggered(trigger)[0] in ("True", "False"), f"the end of {trigger}")
    return node.triggered(trigger)


async def test_a_trigger_saves_its_pod_and_is_complete_only_once_the_snapshot_is_ready(node: Node) -> None:
    node.write_policy("manual")
    async with node.running() as agent:
        await started(node)
        node.write_trigger("now", "web")
        assert (await over(node, "now"))[:2] == ("True", "Complete")
        (snapshot,) = node.snapshots()
        assert snapshot.phase is Phase.AVAILABLE
        assert {each.observed_generation for each in snapshot.status.conditions} == {1}
        assert snapshot.status.observed_generation == 1
        assert snapshot.metadata.labels == {"gke-pod-snapshot-triggered-by": "now"}
        assert snapshot.metadata.annotations["podsnapshot.gke.io/origin-pod"] == "web"
        assert agent.triggered("default", "now")["snapshot"] == snapshot.metadata.name
        assert node.runtime.pod("web").now is Found.RUNNING


async def test_a_second_trigger_for_a_pod_is_refused_while_the_first_is_not_completed(node: Node) -> None:
    node.write_policy("manual")
    gate = trio.Event()
    uploader = node.uploader

    class Waiting:
        async def push(self, job: Job, image: object) -> PushResult:
            await gate.wait()
            return await uploader.push(job, image)  # type: ignore[arg-type]

    node.uploader = Waiting()
    async with node.running() as agent:
        await started(node)
        node.write_trigger("first", "web")
        await until(lambda: agent.triggered("default", "first")["snapshot"], "the first one's snapshot")
        node.write_trigger("second", "web")
        status, reason, message = await over(node, "second")
        assert (status, reason) == ("False", "Failed")
        assert "Another PodSnapshotManualTrigger first is already targeting Pod web" in message
        assert "not yet completed" in message
        assert node.triggered("first")[0] == ""
        gate.set()
        assert (await over(node, "first"))[0] == "True"
        node.write_trigger("third", "web")
        assert (await over(node, "third"))[0] == "True"


UNTRIGGERED = {
    "no such pod": ("manual", "nobody", "no pod nobody"),
    "no policy with that trigger": ("workload", "web", "no policy with the trigger manual"),
}


@pytest.mark.parametrize("name", UNTRIGGERED)
async def test_a_trigger_that_can_not_be_acted_on_fails_with_its_reason(name: str, node: Node) -> None:
    policy, pod, said = UNTRIGGERED[name]
    node.write_policy(policy)
    async with node.running():
        await started(node)
        node.write_trigger("now", pod)
        status, reason, message = await over(node, "now")
        assert (status, reason) == ("False", "Failed")
        assert said in message
        assert node.snapshots() == []


async def test_a_flood_of_triggers_is_refused_each_once_and_keeps_nobody_elses_waiting(node: Node) -> None:
    node.write_policy("manual")
    count = 200
    flood = [
        {
            "apiVersion": "podsnapshot.gke.io/v1",
            "kind": Kind.TRIGGER.value,
            "metadata": {"name": f"t{number}", "namespace": "aaa"},
            "spec": {"targetPod": f"pod-{number // 2}"},
        }
        for number in range(count)
    ]
    async with node.running() as agent:
        await started(node)
        node.write("flood.yaml", json.dumps({"kind": "List", "items": flood}))
        await node.event(What.TRIGGER_FAILED)
        node.write_trigger("now", "web")
        await node.event(What.SNAPSHOT_BEGUN)
        assert agent.events.counts[What.TRIGGER_FAILED, "Failed"] < count
        await until(lambda: all(not is_pending(each) for each in agent.known.triggers.values()), "the end of all")
        assert agent.events.counts[What.TRIGGER_FAILED, "Failed"] == count


async def test_a_trigger_may_say_that_the_pod_is_to_stop(node: Node) -> None:
    node.write_policy("manual")
    async with node.running():
        await started(node)
        node.write_trigger("now", "web", **{POST_CHECKPOINT: "stop"})
        assert (await over(node, "now"))[0] == "True"
        assert node.runtime.pod("web").now is Found.GONE


async def test_a_policy_that_stops_pods_ends_them_after_their_snapshot(node: Node) -> None:
    node.write_policy("workload", "stop")
    async with node.running():
        await started(node)
        node.runtime.asked.setdefault("web", trio.Event()).set()
        await node.event(What.SNAPSHOT_READY)
        assert node.runtime.pod("web").now is Found.GONE


FAILURES = {
    "a full disk": ([FailureKind.NO_SPACE], "DiskFull", False),
    "a pod that dies": ([FailureKind.SANDBOX_GONE], "PodEnded", False),
    "a save that fails each time": ([FailureKind.UNKNOWN] * 3, "SaveFailed", False),
    "a save that fails once": ([FailureKind.UNKNOWN], "", True),
}


@pytest.mark.parametrize("name", FAILURES)
async def test_a_save_that_fails_says_why_in_the_condition_and_leaves_nothing(name: str, node: Node) -> None:
    failures, reason, is_saved = FAILURES[name]
    node.write_policy("manual")
    async with node.running():
        await started(node)
        node.runtime.pod("web").fails["save"] = list(failures)
        node.write_trigger("now", "web")
        status, _, said = await over(node, "now")
        assert (status == "True") is is_saved
        assert reason in said
        (snapshot,) = node.snapshots()
        assert snapshot.phase is (Phase.AVAILABLE if is_saved else Phase.FAILED)
        assert {each.message.partition(":")[0] for each in snapshot.status.conditions} == {reason}
        assert snapshot.status.observed_checkpoint_retry_count == len(failures) - (not is_saved)
        await until(lambda: node.jobs() == [], "the end of the job")


async def test_a_store_that_is_down_delays_a_snapshot_which_a_next_round_brings_in(node: Node) -> None:
    node.write_policy("manual")
    uploader = node.uploader
    downs = [StoreError(StoreErrorKind.TRANSIENT, "manifest", "away")]

    class Down:
        async def push(self, job: Job, image: object) -> PushResult:
            if downs:
                raise downs.pop()
            return await uploader.push(job, image)  # type: ignore[arg-type]

    node.uploader = Down()
    async with node.running() as agent:
        await started(node)
        node.write_trigger("now", "web")
        event = await node.event(What.SNAPSHOT_DELAYED)
        assert event.reason == "StoreUnavailable"
        assert node.triggered("now")[0] == ""
        assert len(node.jobs()) == 1
        await agent.recovery.look()
        assert (await over(node, "now"))[0] == "True"
        await until(lambda: node.jobs() == [], "the end of the job")


async def test_no_two_snapshots_of_a_group_are_created_within_one_second(node: Node) -> None:
    node.write_policy("workload")
    async with node.running():
        for index in range(3):
            await started(node, f"web-{index}")
            node.runtime.asked.setdefault(f"web-{index}", trio.Event()).set()
        await node.event(What.SNAPSHOT_READY, count=3)
        times = Counter(each.metadata.creation_timestamp for each in node.snapshots())
        assert sorted(times.values()) == [1, 1, 1]


async def test_a_pod_that_ends_without_having_asked_leaves_no_job_and_no_snapshot(node: Node) -> None:
    node.write_policy("workload")
    async with node.running():
        await started(node)
        assert len(node.jobs()) == 1
        await node.runtime.pod("web").end()
        node.runtime.asked.setdefault("web", trio.Event()).set()
        await until(lambda: node.jobs() == [], "the end of the job")
        assert node.snapshots() == []


async def test_an_application_is_saved_once_in_its_pods_life_and_a_restored_one_is_not_asked_again(node: Node) -> None:
    snapshot = await node.saved("web")
    async with node.running() as agent:
        node.runtime.asked.setdefault("web", trio.Event()).set()  # whoever waited would have an image at once
        for _ in range(2):
            await agent.recovery.look()
        assert agent.saving.busy == {}
        assert await agent.decisions.create(node.create("copy")) == Plain()
        assert isinstance(await agent.decisions.start(node.start("copy")), Restore)
        await agent.decisions.report(Report(node.container("copy"), 0, ""))
        assert (await node.event(What.RESTORED)).snapshot == snapshot
        assert (agent.saving.armed, agent.saving.followed) == ({}, set())
        assert node.jobs() == []
        assert [each.metadata.name for each in node.snapshots()] == [snapshot]


async def test_an_armed_pod_is_waited_for_by_the_next_life_of_the_agent(node: Node) -> None:
    node.write_policy("workload")
    async with node.running():
        await started(node)
    assert len(node.jobs()) == 1
    async with node.running():
        await until(lambda: "web" in node.runtime.asked, "somebody who waits")
        node.runtime.asked["web"].set()
        await node.event(What.SNAPSHOT_READY)
    (snapshot,) = node.snapshots()
    assert snapshot.phase is Phase.AVAILABLE


async def test_a_restore_is_followed_by_the_next_life_with_its_lease_taken_again(node: Node) -> None:
    snapshot = await node.saved()
    node.runtime.loads = trio.Event()
    async with node.running() as agent:
        await started(node, "copy")
        await agent.decisions.report(Report(node.container("copy"), 0, ""))
        await until(lambda: "copy" in node.runtime.observed, "the look at it")
    assert [lease.is_held for lease in node.images.leases] == [False]
    node.runtime.observed.clear()
    async with node.running() as agent:
        await until(lambda: "copy" in node.runtime.observed, "the next life's look at it")
        assert [lease.is_held for lease in node.images.leases] == [False, True]
        node.runtime.loads.set()
        assert (await node.event(What.RESTORED)).snapshot == snapshot
        assert agent.restoring.records.all() == ()


async def test_a_pod_that_runs_since_before_the_agent_can_be_saved(node: Node) -> None:
    node.write_policy("manual")
    node.create("web")
    async with node.running():
        node.write_trigger("now", "web")
        assert (await over(node, "now"))[0] == "True"


async def test_saves_under_way_are_waited_for_when_the_agent_ends_and_undone_when_they_take_too_long(
    node: Node,
) -> None:
    node.write_policy("manual", "stop")

    class Hanging:
        async def push(self, job: Job, image: object) -> PushResult:
            await trio.sleep_forever()
            raise AssertionError

    node.uploader = Hanging()
    async with node.running() as agent:
        await started(node)
        node.write_trigger("now", "web")
        await until(lambda: agent.saving.is_saving, "the save")
        await agent.end()
        assert agent.saving.is_saving
    assert node.runtime.pod("web").now in (Found.RUNNING, Found.GONE)
    assert node.runtime.pod("web").now is (Found.GONE if node.jobs() else Found.RUNNING)


async def test_what_a_former_life_had_only_begun_to_note_is_removed(node: Node) -> None:
    jobs = node.config.state_directory / "jobs"
    (jobs / ".11111111-1111-4111-8111-111111111111" / "image").mkdir(parents=True)
    async with node.running():
        assert node.jobs() == []
