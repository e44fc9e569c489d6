"""What every keeper of objects promises (`agent.kube.port`), and who follows them under Trio."""

from dataclasses import replace

import pytest
import trio
import trio.testing

from agent.kube.errors import AlreadyExists, Conflict, NotFound
from agent.kube.local import LocalObjects
from agent.kube.meta import ObjectMeta
from agent.kube.objects import (
    Kind,
    PodSnapshot,
    PodSnapshotManualTrigger,
    PodSnapshotPolicy,
    PodSnapshotStorageConfig,
    SnapshotStatus,
    TriggerStatus,
)
from agent.kube.port import Gone, Key, Mended, Objects, Put, Synced, Unreadable
from tests.kube.conftest import Place

SNAPSHOT = PodSnapshot(ObjectMeta(name="id-1", namespace="team-a"), "web")


@pytest.fixture
def objects(place: Place) -> Objects:
    place.write("a.yaml", place.policy("web"), place.storage, place.trigger)
    return LocalObjects(place.open())


async def test_an_object_is_created_changed_and_deleted(objects: Objects) -> None:
    created = await objects.create(SNAPSHOT)
    with pytest.raises(AlreadyExists):
        await objects.create(SNAPSHOT)
    assert await objects.get(PodSnapshot, "id-1", "team-a") == created
    updated = await objects.update_status(
        replace(created, status=SnapshotStatus(last_access_time="2026-01-01T00:00:00Z"))
    )
    with pytest.raises(Conflict):
        await objects.update_status(created)
    with pytest.raises(Conflict):
        await objects.delete(created)
    await objects.delete(updated)
    with pytest.raises(NotFound):
        await objects.get(PodSnapshot, "id-1", "team-a")


async def test_a_listing_is_of_the_kinds_and_the_namespace_that_were_asked_for(objects: Objects) -> None:
    await objects.create(SNAPSHOT)
    await objects.create(replace(SNAPSHOT, metadata=ObjectMeta(name="id-2", namespace="team-b")))
    listing = await objects.list(Kind.SNAPSHOT, Kind.POLICY)
    assert [each.metadata.name for each in listing.items] == ["id-1", "id-2", "web"]
    listing = await objects.list(Kind.SNAPSHOT, Kind.POLICY, namespace="team-b")
    assert [each.metadata.name for each in listing.items] == ["id-2"]


async def test_a_trigger_is_answered_in_its_status(objects: Objects) -> None:
    trigger = await objects.get(PodSnapshotManualTrigger, "now", "team-a")
    await objects.update_status(replace(trigger, status=TriggerStatus(snapshot_created="id-1")))
    again = await objects.get(PodSnapshotManualTrigger, "now", "team-a")
    assert again.status.snapshot_created == "id-1"
    with pytest.raises(Conflict):
        await objects.update_status(trigger)


async def test_of_many_who_change_one_object_at_once_one_wins_and_the_others_are_told(objects: Objects) -> None:
    created = await objects.create(SNAPSHOT)
    outcomes: list[str] = []

    async def change(number: int) -> None:
        try:
            await objects.update_status(replace(created, status=SnapshotStatus(observed_checkpoint_retry_count=number)))
            outcomes.append("won")
        except Conflict:
            outcomes.append("told")

    async with trio.open_nursery() as nursery:
        for number in range(1, 9):
            nursery.start_soon(change, number)
    assert sorted(outcomes) == ["told"] * 7 + ["won"]


async def test_what_is_read_does_not_wait_for_all_that_is_to_be_written(place: Place) -> None:
    place.write("a.yaml", place.storage)
    objects = LocalObjects(place.open())
    written: list[str] = []

    async def write(number: int) -> None:
        metadata = replace(SNAPSHOT.metadata, name=f"id-{number}")
        written.append((await objects.create(replace(SNAPSHOT, metadata=metadata))).metadata.name)

    async with trio.open_nursery() as nursery:
        for number in range(50):
            nursery.start_soon(write, number)
        await trio.testing.wait_all_tasks_blocked()
        await objects.get(PodSnapshotStorageConfig, "bucket")
        # The one under way, the one that waits before us, and the one that may begin before we go on.
        assert len(written) <= 3
    assert len(written) == 50


async def test_a_watch_tells_all_there_is_and_then_each_change_at_once(place: Place) -> None:
    place.write("a.yaml", place.policy("web"))
    objects = LocalObjects(place.open(), look_every_s=3600)
    with trio.fail_after(10):
        async with objects.watch(Kind.POLICY, Kind.SNAPSHOT) as changes:
            first = await anext(changes)
            assert isinstance(first, Put)
            assert isinstance(first.resource, PodSnapshotPolicy)
            assert await anext(changes) == Synced()
            created = await objects.create(SNAPSHOT)
            assert await anext(changes) == Put(created)
            updated = await objects.update_status(replace(created, status=SnapshotStatus(observed_generation=1)))
            assert await anext(changes) == Put(updated)
            await objects.delete(updated)
            assert await anext(changes) == Gone(Key(Kind.SNAPSHOT, "team-a", "id-1"))


async def test_a_watch_finds_what_others_have_written(place: Place) -> None:
    place.write("a.yaml", place.policy("web"))
    objects = LocalObjects(place.open(), look_every_s=0.005)
    with trio.fail_after(10):
        async with objects.watch(Kind.POLICY, Kind.SNAPSHOT) as changes:
            assert [type(await anext(changes)), type(await anext(changes))] == [Put, Synced]
            created = place.open().create(SNAPSHOT)
            assert await anext(changes) == Put(created)
            place.write("a.yaml", place.policy("web").replace("manual", "never"))
            assert await anext(changes) == Gone(Key(Kind.POLICY, "team-a", "web"))
            broken = await anext(changes)
            assert isinstance(broken, Unreadable)
            place.write("a.yaml", place.policy("web"))
            assert {type(await anext(changes)), type(await anext(changes))} == {Put, Mended}


async def test_two_who_watch_are_told_the_same(place: Place) -> None:
    objects = LocalObjects(place.open(), look_every_s=3600)
    with trio.fail_after(10):
        async with objects.watch(Kind.SNAPSHOT) as first, objects.watch(Kind.SNAPSHOT) as second:
            assert [await anext(first), await anext(second)] == [Synced(), Synced()]
            created = await objects.create(SNAPSHOT)
            assert [await anext(first), await anext(second)] == [Put(created), Put(created)]
