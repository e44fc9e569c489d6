"""Removal and collection, case by case; test_model.py has what happens when they run at the same time as pushes."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.faults import Fail, Fault, FaultyStore
from bench.memory_store import MemoryStore
from streamd.errors import Exit, NotFound, StoreError, StoreErrorKind
from streamd.save.commit import SnapshotWriter
from streamd.save.lifecycle import collect, remove
from streamd.snapshot import envelope
from streamd.snapshot.manifest import MAX_MANIFEST_BYTES
from streamd.snapshot.names import manifest_key
from streamd.snapshot.tombstone import Tombstone, decode_tombstone
from streamd.store.directory import DirectoryStore
from streamd.store.port import Condition

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S
SmallMaker = Callable[[str, str], Any]


def pushed(store: MemoryStore, small: SmallMaker, snapshot_id: str = "snap", push_id: str = "a") -> None:
    snapshot = small(snapshot_id, push_id)
    writer = SnapshotWriter(store, snapshot_id=snapshot_id, push_id=push_id)
    packs = tuple(writer.put_pack(index, data)[0] for index, data in enumerate(snapshot.packs))
    writer.commit(snapshot.manifest(packs))


def put(store: MemoryStore, key: str, data: bytes = b"x") -> None:
    store.put(key, data, condition=Condition.ANY)


def keys(store: MemoryStore) -> set[str]:
    return set(store.objects)


def test_gc_leaves_a_whole_snapshot_alone_however_old(small: SmallMaker) -> None:
    store = MemoryStore()
    pushed(store, small)
    before = dict(store.objects)
    store.clock_s += 1000 * DAY_S
    result = collect(store, grace_s=0)
    assert store.objects == before
    assert (result.objects_deleted, result.ids_claimed, result.kept) == (0, [], {})


def test_gc_leaves_what_it_does_not_know(small: SmallMaker) -> None:
    store = MemoryStore()
    foreign = {"README", "Dir/packs/a/00000000", "snap/notes", "other/packs/a/no-pack", "other/packs/UP/00000000"}
    for key in foreign:
        put(store, key)
    put(store, "later/manifest", b"PODSNAPM of a later version")
    put(store, "later/packs/a/00000000")
    before = dict(store.objects)
    store.clock_s += 1000 * DAY_S
    result = collect(store, grace_s=0)
    assert store.objects == before
    assert "can't be read" in result.kept["later"]


def test_packs_of_losing_pushes_beside_a_snapshot_go_after_the_grace(small: SmallMaker) -> None:
    store = MemoryStore()
    pushed(store, small)
    whole = keys(store)
    put(store, "snap/packs/b/00000000")
    put(store, "snap/lease/node-1")
    store.clock_s += DAY_S - 1
    collect(store, grace_s=DAY_S)
    assert "snap/packs/b/00000000" in store.objects
    store.clock_s += 1
    assert collect(store, grace_s=DAY_S).objects_deleted == 1
    assert keys(store) == whole | {"snap/lease/node-1"}


def test_an_unfinished_push_stays_while_any_pack_of_it_is_young() -> None:
    store = MemoryStore()
    put(store, "snap/packs/a/00000000")
    store.clock_s += DAY_S - 1
    put(store, "snap/packs/a/00000001")
    store.clock_s += DAY_S - 1
    result = collect(store, grace_s=DAY_S)
    assert keys(store) == {"snap/packs/a/00000000", "snap/packs/a/00000001"}
    assert "younger" in result.kept["snap"]


def test_rm_hides_at_once_and_the_packs_follow_an_hour_later(small: SmallMaker) -> None:
    store = MemoryStore()
    pushed(store, small)
    pushed(store, small, "other")
    others = {key for key in store.objects if key.startswith("other/")}
    put(store, "snap/trace")
    result = remove(store, "snap")
    assert (result.leases, result.packs_deleted) == ((), 0)
    assert decode_tombstone(store.objects[manifest_key("snap")][1]) == Tombstone("rm", "a")
    store.clock_s += HOUR_S - 1
    assert collect(store, grace_s=0).objects_deleted == 0
    store.clock_s += 1
    assert collect(store, grace_s=0).objects_deleted == 3
    assert keys(store) == others | {manifest_key("snap")}
    store.clock_s += HOUR_S
    assert collect(store, grace_s=0).ids_finished == ["snap"]
    assert keys(store) == others


def test_a_fresh_lease_keeps_the_packs_of_a_removed_snapshot(small: SmallMaker) -> None:
    store = MemoryStore()
    pushed(store, small)
    put(store, "snap/lease/node-1")
    assert remove(store, "snap").leases == ("node-1",)
    for _ in range(5):
        store.clock_s += HOUR_S - 1
        assert collect(store, grace_s=0).objects_deleted == 0
        put(store, "snap/lease/node-1")
    store.clock_s += HOUR_S
    assert collect(store, grace_s=0).objects_deleted == 3  # the lease, too


def test_rm_now_deletes_at_once_and_says_whose_restores_it_kills(small: SmallMaker) -> None:
    store = MemoryStore()
    pushed(store, small)
    put(store, "snap/lease/stale")
    store.clock_s += HOUR_S
    put(store, "snap/lease/node-1")
    result = remove(store, "snap", now=True)
    assert (result.leases, result.packs_deleted, result.bytes_deleted) == (("node-1",), 2, 4 * 4096)
    assert not any("/packs/" in key for key in store.objects)


def test_rm_again_does_the_same_again_and_now_is_possible_later(small: SmallMaker) -> None:
    store = MemoryStore()
    pushed(store, small)
    remove(store, "snap")
    assert remove(store, "snap").packs_deleted == 0
    assert remove(store, "snap", now=True).packs_deleted == 2
    assert remove(store, "snap", now=True).packs_deleted == 0


def test_rm_of_what_never_was_a_snapshot_says_so() -> None:
    store = MemoryStore()
    with pytest.raises(NotFound, match="no snapshot snap"):
        remove(store, "snap")
    put(store, "snap/packs/a/00000000")
    with pytest.raises(NotFound):
        remove(store, "snap")
    store.clock_s += DAY_S
    collect(store)
    assert manifest_key("snap") in store.objects
    with pytest.raises(NotFound):
        remove(store, "snap")


def test_a_snapshot_whose_manifest_cannot_be_read_can_be_removed(small: SmallMaker) -> None:
    store = MemoryStore()
    pushed(store, small)
    put(store, manifest_key("snap"), b"flipped bits")
    remove(store, "snap", now=True)
    for _ in range(3):
        store.clock_s += DAY_S
        collect(store)
    assert not store.objects


def poisoned(store: MemoryStore) -> None:
    """Put a manifest whose head has more names than any reader takes."""
    head = b'{"metadata":{' + b",".join(b'"%d":0' % number for number in range(100_000)) + b"}}"
    payload = len(head).to_bytes(4, "little") + bytes(8) + head
    put(store, manifest_key("snap"), envelope.seal(b"PODSNAPM", 1, (payload,)))


@pytest.mark.parametrize(
    "spoil",
    [
        poisoned,
        lambda store: put(store, manifest_key("snap"), bytes(MAX_MANIFEST_BYTES + 1)),
    ],
    ids=["poisoned", "too large"],
)
def test_a_snapshot_whose_manifest_is_absurd_is_kept_by_gc_and_removed_by_rm(
    spoil: Callable[[MemoryStore], None], small: SmallMaker
) -> None:
    store = MemoryStore()
    pushed(store, small)
    spoil(store)
    put(store, "snap/packs/b/00000000")  # so that gc has to look
    store.clock_s += DAY_S
    assert "can't be read" in collect(store).kept["snap"]
    remove(store, "snap", now=True)
    for _ in range(3):
        store.clock_s += DAY_S
        collect(store)
    assert not store.objects


def refusing(store: MemoryStore, operation: str, key: str) -> None:
    """Have a store refuse one operation on one object from now on, as it does with an object under a hold."""

    def refuse(what: str, which: str) -> None:
        if (what, which) == (operation, key):
            raise StoreError(StoreErrorKind.FORBIDDEN, key, "403 Forbidden: under a hold")

    store.before = refuse


@pytest.mark.parametrize("threads", [1, 8])
def test_an_object_that_the_store_will_not_delete_stops_nothing_else(threads: int, small: SmallMaker) -> None:
    store = MemoryStore()
    for snapshot_id in ("a", "b", "c"):
        put(store, f"{snapshot_id}/packs/p/00000000")
        put(store, f"{snapshot_id}/packs/p/00000001")
    refusing(store, "delete", "b/packs/p/00000000")
    store.clock_s += DAY_S
    result = collect(store, threads=threads)
    assert {key for key in store.objects if "/packs/" in key} == {"b/packs/p/00000000"}
    assert result.objects_deleted == 5
    assert result.kept["b"] == "b/packs/p/00000000: 403 Forbidden: under a hold"
    refusing(store, "none", "")
    store.clock_s += DAY_S
    collect(store, threads=threads)
    assert not any("/packs/" in key for key in store.objects)


@pytest.mark.parametrize(
    ("operation", "key"), [("read", "b/manifest"), ("put", "b/manifest"), ("list", "b/")], ids=["read", "put", "list"]
)
def test_an_id_that_the_store_lets_nobody_touch_is_kept_and_told(operation: str, key: str, small: SmallMaker) -> None:
    store = MemoryStore()
    for snapshot_id in ("a", "b", "c"):
        put(store, f"{snapshot_id}/packs/p/00000000")
    if operation == "read":
        pushed(store, small, "b", "q")
    refusing(store, operation, key)
    store.clock_s += DAY_S
    result = collect(store)
    assert {key for key in store.objects if "/packs/p/" in key} == {"b/packs/p/00000000"}
    assert "403 Forbidden" in result.kept["b"]


@pytest.mark.parametrize("kind", [StoreErrorKind.FORBIDDEN, StoreErrorKind.CORRUPT])
def test_rm_removes_a_snapshot_whose_manifest_the_store_will_not_give(kind: StoreErrorKind, small: SmallMaker) -> None:
    store = MemoryStore()
    pushed(store, small)
    faulty = FaultyStore(store)
    faulty.add(Fault(Fail(kind), key=manifest_key("snap"), operation="read"))
    remove(faulty, "snap")
    assert decode_tombstone(store.objects[manifest_key("snap")][1]) == Tombstone("rm")


def test_rm_now_tries_all_packs_and_then_says_which_the_store_will_not_delete(small: SmallMaker) -> None:
    store = MemoryStore()
    pushed(store, small)
    refusing(store, "delete", "snap/packs/a/00000000")
    with pytest.raises(StoreError, match="snap/packs/a/00000000: 403 Forbidden"):
        remove(store, "snap", now=True)
    assert keys(store) == {manifest_key("snap"), "snap/packs/a/00000000"}


def test_gc_of_a_store_that_is_not_there_says_so_and_makes_nothing(tmp_path: Path) -> None:
    with pytest.raises(StoreError) as caught:
        collect(DirectoryStore(str(tmp_path / "store")))
    assert caught.value.exit_code is Exit.NOT_FOUND
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("start", ["unfinished", "removed", "removed now"])
def test_gc_and_rm_that_die_at_any_call_are_finished_by_the_next(start: str, small: SmallMaker) -> None:
    def world() -> MemoryStore:
        store = MemoryStore()
        if start == "unfinished":
            put(store, "snap/packs/a/00000000")
            put(store, "snap/packs/a/00000001")
        else:
            pushed(store, small)
        return store

    def run(store: MemoryStore) -> None:
        if start != "unfinished" and manifest_key("snap") in store.objects:
            remove(store, "snap", now=start == "removed now", threads=1)
        for _ in range(2):
            store.clock_s += DAY_S
            collect(store, threads=1)

    calls = 0

    def count(operation: str, key: str) -> None:
        nonlocal calls
        calls += 1

    counted = world()
    counted.before = count
    run(counted)
    assert not counted.objects
    for dies_at in range(calls):
        for hook in ("before", "after"):
            store = world()
            left = dies_at

            def die(operation: str, key: str) -> None:
                nonlocal left
                left -= 1
                if left < 0:
                    raise StoreError(StoreErrorKind.TRANSIENT, key, "the process dies here")

            setattr(store, hook, die)
            with contextlib.suppress(StoreError):
                run(store)
            setattr(store, hook, None)
            run(store)
            store.clock_s += DAY_S
            collect(store)
            assert not store.objects
