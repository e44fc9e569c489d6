"""The learned order in a store: many nodes add to it, and nothing that is wrong with it stops anybody."""

import threading

import numpy as np
import pytest
import structlog

from bench.faults import Corrupt, Fail, Fault, FaultyStore, Operation
from streamd.errors import Damaged, NotFound, StoreError, StoreErrorKind
from streamd.save.lifecycle import collect, remove
from streamd.snapshot import envelope, names
from streamd.snapshot.manifest import (
    ChunkTable,
    Codec,
    GvisorInfo,
    ImageFile,
    Manifest,
    MemoryFile,
    Pack,
    PageRange,
    encode,
)
from streamd.snapshot.trace import MAGIC, MAX_TRACE_BYTES, Sample, hot_ranges
from streamd.store.catalog import Pinned, list_snapshots, open_snapshot
from streamd.store.port import Condition, ObjectInfo, Store
from streamd.store.traces import TRIES_MAX, LearnedOrder, drop_trace, read_trace

MIB = 1 << 20
PAGES_BYTES = 256 * MIB
KEY = names.trace_key("web-1")
PACK = bytes(range(200))


def push(store: Store, push_id: str = "p") -> None:
    """Write snapshot web-1: two small files, and a pages.img of 16 zero chunks."""
    table = ChunkTable(
        length=np.array([100, 100] + [16 * MIB] * 16, np.uint32),
        codec=np.array([Codec.RAW] * 2 + [Codec.ZERO] * 16, np.uint8),
        pack=np.zeros(18, np.uint32),
        offset=np.array([0, 100] + [0] * 16, np.uint32),
        frame_bytes=np.array([100, 100] + [0] * 16, np.uint32),
        digest=np.array([[1] * 16] * 2 + [[0] * 16] * 16, np.uint8),
    )
    pack = store.put(names.pack_key("web-1", push_id, 0), PACK, condition=Condition.ABSENT)
    manifest = Manifest(
        snapshot_id="web-1",
        push_id=push_id,
        created_s=1e9,
        chunk_bytes=16 * MIB,
        files=(
            ImageFile(names.CHECKPOINT, 100, 0, 1),
            ImageFile(names.PAGES_META, 100, 1, 1),
            ImageFile(names.PAGES, PAGES_BYTES, 2, 16),
        ),
        packs=(Pack(len(PACK), store.crc32c(pack), bytes(32)),),
        table=table,
        gvisor=GvisorInfo("v", "none", ("app",), (MemoryFile(False, (PageRange(0, PAGES_BYTES, 1),)),)),
    )
    store.put(names.manifest_key("web-1"), encode(manifest), condition=Condition.ANY)


def sample(*at_mib: int) -> Sample:
    """A restore that waited for one MiB at each place, and then was loaded."""
    waited = tuple((at * MIB, (at + 1) * MIB) for at in at_mib)
    return Sample(waited, passed=((PAGES_BYTES, len(waited) * MIB),))


def put_trace(store: Store, data: bytes) -> ObjectInfo:
    return store.put(KEY, data, condition=Condition.ANY)


@pytest.fixture
def pinned(store: Store) -> Pinned:
    push(store)
    return open_snapshot(store, "web-1")


def test_what_one_restore_has_learned_the_next_mount_loads(store: Store, pinned: Pinned) -> None:
    assert LearnedOrder(store, pinned).load() is None
    saved = LearnedOrder(store, pinned).save(sample(30, 10))
    assert saved is not None
    again = open_snapshot(store, "web-1")
    assert LearnedOrder(store, again).load() == saved
    assert hot_ranges(saved) == [(30 * MIB, 31 * MIB), (10 * MIB, 11 * MIB)]
    second = LearnedOrder(store, again).save(sample(30, 20))
    assert second is not None
    assert second.samples == 2
    assert {row.start // MIB for row in second.ranges} == {10, 20, 30}


def test_nodes_that_save_at_the_same_time_all_count(store: Store, pinned: Pinned) -> None:
    nodes = 4  # one of those that try succeeds each time
    start = threading.Barrier(nodes)

    def restore(number: int) -> None:
        start.wait(10)
        LearnedOrder(store, pinned).save(sample(10 * number))

    threads = [threading.Thread(target=restore, args=(number,)) for number in range(nodes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    trace = read_trace(store, pinned, store.head(KEY))
    assert trace.samples == nodes
    assert {row.start // MIB for row in trace.ranges} == {0, 10, 20, 30}


def test_a_trace_is_dropped_once_and_learning_begins_anew(store: Store, pinned: Pinned) -> None:
    assert not drop_trace(store, "web-1")
    order = LearnedOrder(store, pinned)
    order.save(sample(1))
    assert drop_trace(store, "web-1")
    assert not drop_trace(store, "web-1")
    begun = order.save(sample(2))
    assert begun is not None
    assert begun.samples == 1


UNUSABLE = {
    "no trace at all": b"hello",
    "nothing": b"",
    "another snapshot's": envelope.seal(MAGIC, 1, (bytes(32) + b"\1\0\0\0\0\0\0\0",)),
    "absurdly large": bytes(MAX_TRACE_BYTES + 1),
}


@pytest.fixture
def plain(google_store: Store) -> Store:
    push(google_store)
    return google_store


@pytest.mark.parametrize("data", UNUSABLE.values(), ids=UNUSABLE)
def test_what_is_no_trace_of_this_snapshot_is_as_if_absent_and_replaced(plain: Store, data: bytes) -> None:
    info = put_trace(plain, data)
    pinned = open_snapshot(plain, "web-1")
    with pytest.raises(Damaged):
        read_trace(plain, pinned, info)
    with structlog.testing.capture_logs() as logs:
        assert LearnedOrder(plain, pinned).load() is None
    assert [entry["event"] for entry in logs] == ["the learned order can't be used"]
    saved = LearnedOrder(plain, pinned).save(sample(5))
    assert saved is not None
    assert saved.samples == 1
    assert read_trace(plain, pinned, plain.head(KEY)) == saved


def test_what_a_later_version_wrote_is_left_alone(plain: Store) -> None:
    info = put_trace(plain, envelope.seal(MAGIC, 2, (b"who knows",)))
    order = LearnedOrder(plain, open_snapshot(plain, "web-1"))
    assert order.load() is None
    assert order.save(sample(5)) is None
    assert plain.head(KEY) == info


def test_one_that_was_replaced_since_the_mount_looked_is_loaded_as_it_is_now(plain: Store) -> None:
    before = open_snapshot(plain, "web-1")
    LearnedOrder(plain, before).save(sample(1))
    listed = open_snapshot(plain, "web-1")
    latest = LearnedOrder(plain, before).save(sample(2))
    assert LearnedOrder(plain, listed).load() == latest
    drop_trace(plain, "web-1")
    assert LearnedOrder(plain, listed).load() is None


def test_a_mount_looks_for_it_without_asking_the_store_again_and_reads_it_by_one_request(plain: Store) -> None:
    faulty = FaultyStore(plain)
    LearnedOrder(faulty, open_snapshot(plain, "web-1")).load()
    assert faulty.requests == []
    LearnedOrder(plain, open_snapshot(plain, "web-1")).save(sample(1))
    LearnedOrder(faulty, open_snapshot(plain, "web-1")).load()
    assert [(request.operation, request.key) for request in faulty.requests] == [("read", KEY)]


@pytest.mark.parametrize("kind", list(StoreErrorKind))
@pytest.mark.parametrize("operation", ["read", "head", "put"])
def test_a_store_that_fails_fails_nothing_else(plain: Store, kind: StoreErrorKind, operation: Operation) -> None:
    LearnedOrder(plain, open_snapshot(plain, "web-1")).save(sample(1))
    faulty = FaultyStore(plain)
    faulty.add(Fault(Fail(kind), operation=operation, times=None))
    order = LearnedOrder(faulty, open_snapshot(plain, "web-1"))
    assert (order.load() is None) == (operation == "read")
    assert order.save(sample(2)) is None


def test_damage_on_the_way_is_no_trace(plain: Store) -> None:
    LearnedOrder(plain, open_snapshot(plain, "web-1")).save(sample(1))
    faulty = FaultyStore(plain)
    faulty.add(Fault(Corrupt(at_byte=50), key=KEY))
    assert LearnedOrder(faulty, open_snapshot(plain, "web-1")).load() is None


def test_a_conflict_is_tried_again_and_a_lasting_one_given_up(plain: Store) -> None:
    faulty = FaultyStore(plain)
    order = LearnedOrder(faulty, open_snapshot(plain, "web-1"))
    faulty.add(Fault(Fail(StoreErrorKind.CHANGED), operation="put", times=TRIES_MAX - 1))
    assert order.save(sample(1)) is not None
    faulty.add(Fault(Fail(StoreErrorKind.CHANGED), operation="put", times=TRIES_MAX))
    assert order.save(sample(2)) is None
    faulty.add(Fault(Fail(StoreErrorKind.CHANGED), operation="delete", times=TRIES_MAX))
    with pytest.raises(StoreError):
        drop_trace(faulty, "web-1")


def test_a_store_that_forbids_writing_is_told_of_once_and_asked_once(plain: Store) -> None:
    faulty = FaultyStore(plain)
    faulty.add(Fault(Fail(StoreErrorKind.FORBIDDEN), operation="put"))
    order = LearnedOrder(faulty, open_snapshot(plain, "web-1"))
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            assert order.save(sample(1)) is None
    assert [entry["event"] for entry in logs] == ["the learned order can't be kept"]
    assert [request.operation for request in faulty.requests].count("put") == 1


def test_of_a_snapshot_that_was_removed_nothing_is_written(plain: Store) -> None:
    order = LearnedOrder(plain, open_snapshot(plain, "web-1"))
    remove(plain, "web-1", now=True)
    assert order.save(sample(1)) is None
    assert KEY not in {info.key for info in plain.list("")}


def test_a_mount_of_the_old_snapshot_writes_nothing_over_the_trace_of_the_new_one_under_its_id(plain: Store) -> None:
    old = LearnedOrder(plain, open_snapshot(plain, "web-1"))
    push(plain, "another-push")
    saved = LearnedOrder(plain, open_snapshot(plain, "web-1")).save(sample(1))
    assert saved is not None
    assert old.save(sample(2)) is None
    assert LearnedOrder(plain, open_snapshot(plain, "web-1")).load() == saved


def test_a_trace_is_part_of_its_snapshot_for_ls_rm_and_gc(plain: Store) -> None:
    LearnedOrder(plain, open_snapshot(plain, "web-1")).save(sample(1))
    assert [entry.state.value for entry in list_snapshots(plain)] == ["ok"]
    collect(plain, grace_s=0)
    assert open_snapshot(plain, "web-1").trace is not None
    # What a late save leaves where there is no snapshot any more goes like any leftover.
    plain.delete(names.manifest_key("web-1"), generation=plain.head(names.manifest_key("web-1")).generation)
    assert collect(plain, grace_s=0).objects_deleted == 2
    with pytest.raises(NotFound):
        open_snapshot(plain, "web-2")
