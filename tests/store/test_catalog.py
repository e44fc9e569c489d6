"""Which snapshots there are, and what opening one checks."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.faults import Fail, Fault, FaultyStore
from streamd.errors import Damaged, NotFound, Refused, StoreError, StoreErrorKind
from streamd.snapshot import names
from streamd.snapshot.manifest import (
    MAX_MANIFEST_BYTES,
    ChunkTable,
    GvisorInfo,
    ImageFile,
    Manifest,
    MemoryFile,
    Pack,
    PageRange,
    Tombstone,
    encode,
    encode_tombstone,
    manifest_digest,
)
from streamd.store.catalog import BeingRemoved, State, list_snapshots, open_snapshot
from streamd.store.checksum import crc32c
from streamd.store.directory import DirectoryStore
from streamd.store.opening import open_store
from streamd.store.port import Condition, ObjectInfo, Store

PACKS = (bytes(range(256)) * 16, b"\7" * 4096)


def manifest_of(snapshot_id: str, push_id: str) -> Manifest:
    """A snapshot of three raw chunks, of which the last is alone in the second pack."""
    table = ChunkTable(
        length=np.array([100, 200, 4096], np.uint32),
        codec=np.ones(3, np.uint8),
        pack=np.array([0, 0, 1], np.uint32),
        offset=np.array([0, 100, 0], np.uint32),
        frame_bytes=np.array([100, 200, 4096], np.uint32),
        digest=np.ones((3, 16), np.uint8),
    )
    return Manifest(
        snapshot_id=snapshot_id,
        push_id=push_id,
        created_s=1e9,
        chunk_bytes=262144,
        files=(
            ImageFile(names.CHECKPOINT, 100, 0, 1),
            ImageFile(names.PAGES_META, 200, 1, 1),
            ImageFile(names.PAGES, 4096, 2, 1),
        ),
        packs=tuple(Pack(size=len(data), crc32c=crc32c(data), sha256=bytes(32)) for data in PACKS),
        table=table,
        gvisor=GvisorInfo(
            runsc_version="release-1",
            network="none",
            container_names=("app",),
            memory_files=(MemoryFile(False, (PageRange(0, 4096, 0),)),),
        ),
    )


def push(store: Store, snapshot_id: str, push_id: str = "p") -> ObjectInfo:
    """Write a snapshot whole; give its manifest's version."""
    for index, data in enumerate(PACKS):
        store.put(names.pack_key(snapshot_id, push_id, index), data, condition=Condition.ABSENT)
    return store.put(
        names.manifest_key(snapshot_id), encode(manifest_of(snapshot_id, push_id)), condition=Condition.ABSENT
    )


def test_an_opened_snapshot_has_its_manifest_and_the_versions_of_its_packs(store: Store) -> None:
    info = push(store, "web-1")
    pinned = open_snapshot(store, "web-1")
    assert pinned.manifest.push_id == "p"
    assert pinned.data == encode(manifest_of("web-1", "p"))
    assert pinned.digest == manifest_digest(encode(manifest_of("web-1", "p")))
    assert pinned.manifest_info == info
    assert pinned.packs == tuple(store.head(names.pack_key("web-1", "p", index)) for index in range(2))


@pytest.fixture
def directory(directory_root: Path) -> DirectoryStore:
    return DirectoryStore(str(directory_root))


@pytest.fixture
def directory_root(tmp_path: Path) -> Path:
    return tmp_path / "store"


def test_opening_lists_once_and_reads_the_manifest_once(directory: DirectoryStore) -> None:
    faulty = FaultyStore(directory)
    push(directory, "web-1")
    open_snapshot(faulty, "web-1")
    assert [(request.operation, request.key) for request in faulty.requests] == [
        ("list", "web-1/"),
        ("read", "web-1/manifest"),
    ]


def test_only_a_manifest_makes_a_snapshot(directory: DirectoryStore) -> None:
    push(directory, "web-10")
    with pytest.raises(NotFound, match=r"has no snapshot web-1$"):
        open_snapshot(directory, "web-1")
    directory.put(names.pack_key("web-1", "p", 0), b"", condition=Condition.ABSENT)
    with pytest.raises(NotFound, match="1 objects of an unfinished or removed push"):
        open_snapshot(directory, "web-1")


def test_an_id_that_is_none_is_refused(directory: DirectoryStore) -> None:
    with pytest.raises(Refused):
        open_snapshot(directory, "../etc")


def test_a_tombstone_says_that_the_snapshot_is_being_removed(directory: DirectoryStore) -> None:
    info = push(directory, "web-1")
    directory.put(info.key, encode_tombstone(Tombstone("rm", "p")), condition=info.generation)
    with pytest.raises(BeingRemoved, match="web-1 is being removed"):
        open_snapshot(directory, "web-1")


KEY = names.pack_key("web-1", "p", 1)


def without_pack(store: Store) -> None:
    store.delete(KEY, generation=store.head(KEY).generation)


def shorter_pack(store: Store) -> None:
    store.put(KEY, PACKS[1][:-1], condition=Condition.ANY)


def flipped_manifest(store: Store) -> None:
    data = bytearray(encode(manifest_of("web-1", "p")))
    data[len(data) // 2] ^= 1
    store.put("web-1/manifest", data, condition=Condition.ANY)


def another_manifest(store: Store) -> None:
    store.put("web-1/manifest", encode(manifest_of("web-2", "p")), condition=Condition.ANY)


def empty_manifest(store: Store) -> None:
    store.put("web-1/manifest", b"", condition=Condition.ANY)


DAMAGE: dict[str, tuple[Callable[[Store], None], str]] = {
    "pack missing": (without_pack, f"{KEY}: .*isn't there"),
    "pack shorter": (shorter_pack, f"{KEY}: has 4095 bytes where the manifest says 4096"),
    "manifest flipped": (flipped_manifest, "manifest"),
    "manifest of another": (another_manifest, "web-1/manifest: it is the manifest of web-2"),
    "manifest empty": (empty_manifest, "manifest"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_does_not_add_up_is_damaged_by_name_and_hides_no_other_snapshot(
    directory: DirectoryStore, damage: str
) -> None:
    do, message = DAMAGE[damage]
    push(directory, "web-0")
    push(directory, "web-1")
    push(directory, "web-2")
    do(directory)
    with pytest.raises(Damaged, match=message):
        open_snapshot(directory, "web-1")
    assert [(entry.snapshot_id, entry.state) for entry in list_snapshots(directory)] == [
        ("web-0", State.OK),
        ("web-1", State.DAMAGED),
        ("web-2", State.OK),
    ]


def test_a_pack_with_other_bytes_is_damaged_where_the_store_knows_the_checksum(google_store: Store) -> None:
    push(google_store, "web-1")
    google_store.put(KEY, b"\6" * 4096, condition=Condition.ANY)
    with pytest.raises(Damaged, match=f"{KEY}: has crc32c"):
        open_snapshot(google_store, "web-1")


def test_an_absurdly_large_manifest_is_not_read(directory: DirectoryStore, directory_root: Path) -> None:
    push(directory, "web-1")
    with open(directory_root / "web-1/manifest", "r+b") as file:
        file.truncate(MAX_MANIFEST_BYTES + 1)
    faulty = FaultyStore(directory)
    with pytest.raises(Damaged, match="too many for a manifest"):
        open_snapshot(faulty, "web-1")
    assert [request.operation for request in faulty.requests] == ["list"]


def test_packs_of_another_snapshot_are_refused(directory: DirectoryStore) -> None:
    manifest = manifest_of("web-1", "p")
    packs = (manifest.packs[0], replace(manifest.packs[1], snapshot="web-0"))
    try:
        data = encode(replace(manifest, packs=packs, requires=("packs-of-others",)))
    except Refused:
        return  # no such manifest can be written, nor read
    directory.put("web-1/manifest", data, condition=Condition.ABSENT)
    with pytest.raises(Refused):
        open_snapshot(directory, "web-1")


def test_a_listing_shows_each_manifest_with_its_state_and_nothing_else(store: Store) -> None:
    info = push(store, "c-removing")
    store.put(info.key, encode_tombstone(Tombstone("rm", "p")), condition=info.generation)
    push(store, "b")
    push(store, "a-b")
    push(store, "a")
    store.put(names.pack_key("unfinished", "p", 0), b"", condition=Condition.ABSENT)
    store.put("Not-an-id/manifest", b"", condition=Condition.ABSENT)
    store.put("d/lease/manifest", b"", condition=Condition.ABSENT)
    store.now_s()
    entries = {entry.snapshot_id: entry for entry in list_snapshots(store)}
    assert {key: entry.state for key, entry in entries.items()} == {
        "a": State.OK,
        "a-b": State.OK,
        "b": State.OK,
        "c-removing": State.REMOVING,
    }
    manifest = entries["a-b"].manifest
    assert manifest is not None
    assert manifest.snapshot_id == "a-b"
    assert (entries["c-removing"].manifest, entries["c-removing"].reason) == (None, "rm")


def test_a_snapshot_that_is_removed_under_a_listing_is_left_out(directory: DirectoryStore) -> None:
    push(directory, "a")
    push(directory, "b")
    faulty = FaultyStore(directory)
    faulty.add(Fault(Fail(StoreErrorKind.GONE), key="a/manifest"))
    assert [entry.snapshot_id for entry in list_snapshots(faulty)] == ["b"]
    faulty.add(Fault(Fail(StoreErrorKind.GONE), key="a/manifest"))
    with pytest.raises(NotFound, match="removed a moment ago"):
        open_snapshot(faulty, "a")


def test_a_store_that_fails_is_no_damaged_snapshot(directory: DirectoryStore) -> None:
    push(directory, "a")
    faulty = FaultyStore(directory)
    faulty.add(Fault(Fail(StoreErrorKind.TRANSIENT), times=2))
    for call in (lambda: open_snapshot(faulty, "a"), lambda: list(list_snapshots(faulty))):
        with pytest.raises(StoreError) as caught:
            call()
        assert caught.value.store_kind is StoreErrorKind.TRANSIENT


@pytest.mark.parametrize("kind", [StoreErrorKind.FORBIDDEN, StoreErrorKind.CORRUPT])
def test_a_manifest_that_the_store_will_not_give_hides_no_other_snapshot(
    directory: DirectoryStore, kind: StoreErrorKind
) -> None:
    for snapshot_id in ("a", "b", "c"):
        push(directory, snapshot_id)
    faulty = FaultyStore(directory)
    faulty.add(Fault(Fail(kind), key="b/manifest"))
    entries = list(list_snapshots(faulty))
    assert [(entry.snapshot_id, entry.state) for entry in entries] == [
        ("a", State.OK),
        ("b", State.DAMAGED),
        ("c", State.OK),
    ]
    assert "can't be read: b/manifest" in entries[1].reason


def test_whoever_forgets_the_id_is_told_that_this_is_a_store(tmp_path: Path) -> None:
    push(DirectoryStore(str(tmp_path / "store")), "web-1")
    for query in ("", "?latency=0ms"):
        above = open_store(f"file://{tmp_path}{query}")
        with pytest.raises(NotFound, match=r"/store\S* is a store, not a snapshot; name a snapshot in it") as caught:
            open_snapshot(above, "store")
        assert f"`streamd ls file://{tmp_path}/store{query}`" in str(caught.value)


def test_a_lease_of_a_node_called_manifest_makes_no_store(directory: DirectoryStore) -> None:
    directory.put("web-1/lease/manifest", b"", condition=Condition.ABSENT)
    with pytest.raises(NotFound, match="1 objects of an unfinished"):
        open_snapshot(directory, "web-1")


def test_whoever_lists_a_snapshot_is_told_so(directory: DirectoryStore, directory_root: Path) -> None:
    push(directory, "web-1")
    with pytest.raises(NotFound, match=r"/web-1 is a snapshot, not a store"):
        list(list_snapshots(DirectoryStore(str(directory_root / "web-1"))))
    directory.put("manifest", b"someone's", condition=Condition.ABSENT)
    assert [entry.snapshot_id for entry in list_snapshots(directory)] == ["web-1"]


def test_a_snapshot_of_endless_objects_is_refused(directory: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamd.store.catalog.OBJECTS_MAX", 3)
    for number in range(5):
        directory.put(f"web/lease/{number}", b"", condition=Condition.ANY)
    with pytest.raises(Refused, match="more than 3 objects"):
        open_snapshot(directory, "web")
