"""Which snapshots go, and that nothing else does: by last access, by number in a group, by a begun deletion."""

from dataclasses import replace

import pytest
import trio

from agent.kube.codec import parse
from agent.kube.conditions import Phase, Step, after_step, epoch_s
from agent.kube.directory import ObjectDirectory
from agent.kube.meta import ObjectMeta
from agent.kube.objects import PodSnapshot, PodSnapshotPolicy, SnapshotStatus
from agent.node.events import What
from agent.node.keeping import UNUSED, due
from agent.node.restore import NotRestored, Stage
from agent.runtime.failures import FailureKind, RuntimeFailure
from agent.wrapper.protocol import Report
from streamd.store.catalog import BeingRemoved, open_snapshot
from streamd.store.opening import open_store
from tests.agentd.conftest import Node, until

NOW = "2026-06-01T12:00:00Z"


def policy(*, timeout: str = "", most: int = 0, labels: tuple[str, ...] = ()) -> PodSnapshotPolicy:
    spec: dict[str, object] = {"storageConfigName": "here", "selector": {}, "triggerConfig": {"type": "workload"}}
    if timeout:
        spec["retentionConfig"] = {"lastAccessTimeout": timeout}
    if labels:
        by_label: dict[str, object] = {"labels": list(labels)}
        if most:
            by_label["groupRetentionPolicy"] = {"maxSnapshotCountPerGroup": most}
        spec["snapshotGroupingRules"] = {"groupByLabelValue": by_label}
    spec["selector"] = {"matchLabels": {"app": "web"}}
    document = {
        "apiVersion": "podsnapshot.gke.io/v1",
        "kind": "PodSnapshotPolicy",
        "metadata": {"name": "web", "namespace": "default"},
        "spec": spec,
    }
    found = parse(document, where="test")
    assert isinstance(found, PodSnapshotPolicy)
    return found


def snapshot(
    name: str, created: str, *, access: str = "", ready: bool = True, labels: dict[str, str] | None = None
) -> PodSnapshot:
    conditions = after_step((), Step.BEGUN, now=created)
    if ready:
        for step in (Step.CHECKPOINTED, Step.REPLICATED):
            conditions = after_step(conditions, step, now=created)
    meta = ObjectMeta(name=name, namespace="default", creation_timestamp=created, labels=labels or {})
    return PodSnapshot(meta, "web", SnapshotStatus(conditions=conditions, last_access_time=access))


def names(snapshots: list[PodSnapshot], of: PodSnapshotPolicy | None, used: frozenset[str] = frozenset()) -> list[str]:
    policies = {} if of is None else {("default", "web"): of}
    return sorted(each.metadata.name for each, _ in due(snapshots, policies, now_s=epoch_s(NOW), used=used))


def test_what_was_not_used_for_the_timeout_goes_by_its_last_access() -> None:
    old, used, young = (
        snapshot("old", "2026-05-01T00:00:00Z"),
        snapshot("used", "2026-05-01T00:00:00Z", access="2026-05-31T00:00:00Z"),
        snapshot("young", "2026-05-31T00:00:00Z"),
    )
    assert names([old, used, young], policy(timeout="7d")) == ["old"]
    assert names([old, used, young], policy()) == []
    assert names([old, used, young], policy(timeout="7d"), frozenset({"old"})) == []
    assert names([old, used, young], None) == []


def test_of_a_group_the_newest_stay_whatever_others_have() -> None:
    mine = [snapshot(f"a{day}", f"2026-05-0{day}T00:00:00Z", labels={"team": "a"}) for day in range(1, 6)]
    theirs = [snapshot("b1", "2026-05-01T00:00:00Z", labels={"team": "b"})]
    pending = [snapshot("p", "2026-05-01T00:00:00Z", labels={"team": "a"}, ready=False)]
    grouped = policy(most=2, labels=("team",))
    assert names([*mine, *theirs, *pending], grouped) == ["a1", "a2", "a3"]


def test_a_deletion_that_was_begun_is_gone_on_with_also_without_its_policy() -> None:
    found = snapshot("x", "2026-05-31T00:00:00Z")
    conditions = after_step(found.status.conditions, Step.DELETION_BEGUN, now=NOW)
    found = replace(found, status=replace(found.status, conditions=conditions))
    assert found.phase is Phase.DELETING
    assert names([found], None) == ["x"]


async def test_what_is_due_goes_data_first_and_the_object_after_it(node: Node) -> None:
    grouping = """
  snapshotGroupingRules: {groupByLabelValue: {labels: [app], groupRetentionPolicy: {maxSnapshotCountPerGroup: 1}}}
"""
    node.write_policy("workload", more=grouping)
    async with node.running() as agent:
        for name in ("web-1", "web-2"):
            await agent.decisions.create(node.create(name))
            await agent.decisions.start(node.start(name))
        ready: list[str] = []
        for name in ("web-1", "web-2"):
            node.runtime.asked.setdefault(name, trio.Event()).set()
            ready.append((await node.event(What.SNAPSHOT_READY, count=len(ready) + 1)).snapshot)
        event = await node.event(What.SNAPSHOT_DELETED)
        assert event.snapshot == ready[0]
        await until(lambda: [each.metadata.name for each in node.snapshots()] == [ready[1]], "one object")
        assert node.images.removed == [(f"{node.store_url}/{ready[0]}", "default")]
    store = open_store(node.store_url)
    try:
        open_snapshot(store, ready[1])
        with pytest.raises(BeingRemoved):
            open_snapshot(store, ready[0])
    finally:
        store.close()


async def test_a_snapshot_that_a_pod_is_being_restored_from_stays_as_long_as_that_lasts(node: Node) -> None:
    snapshot = await node.saved()
    node.runtime.loads = trio.Event()
    node.runtime.outcome = NotRestored(Stage.RUNNING, RuntimeFailure(FailureKind.SANDBOX_GONE, "it is gone"))
    async with node.running() as agent:
        await agent.decisions.create(node.create("copy"))
        await agent.decisions.start(node.start("copy"))
        await agent.decisions.report(Report(node.container("copy"), 0, ""))
        directory = ObjectDirectory(node.config.objects_directory, node.config.state_directory)
        found = directory.get(PodSnapshot, snapshot, "default")
        directory.update_status(replace(found, status=replace(found.status, last_access_time="2020-01-01T00:00:00Z")))
        node.write_policy("workload", more="  retentionConfig: {lastAccessTimeout: 30d}\n")
        await until(lambda: agent.known.policies["default", "workload"].last_access_timeout, "the policy")
        for _ in range(2):
            await agent.keeping.look()
        assert [each.metadata.name for each in node.snapshots()] == [snapshot]
        node.runtime.loads.set()
        assert (await node.event(What.SNAPSHOT_DELETED)).reason == UNUSED
