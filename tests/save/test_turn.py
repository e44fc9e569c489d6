"""Who makes the pass where many find it due, and that nothing is written where nothing is kept."""

import pytest

from bench.faults import Fail, Fault, FaultyStore
from bench.memory_store import MemoryStore
from streamd.errors import StoreError, StoreErrorKind
from streamd.save.lifecycle import CollectResult
from streamd.save.turn import TURN_KEY, collect_in_turn
from streamd.store.port import Condition

HOUR_S = 3600.0
LEFT = "snap/packs/a/00000000"


@pytest.fixture
def store() -> MemoryStore:
    found = MemoryStore()
    found.put(LEFT, b"x", condition=Condition.ANY)
    return found


def collected(store: MemoryStore, every_s: float = HOUR_S) -> CollectResult | None:
    return collect_in_turn(store, every_s=every_s, grace_s=0)


def test_one_pass_is_made_within_the_time_whoever_asks(store: MemoryStore) -> None:
    first = collected(store)
    assert first is not None
    assert first.objects_deleted == 1
    store.clock_s += HOUR_S - 1
    assert collected(store) is None
    store.clock_s += 2
    assert collected(store) is not None


def test_of_two_that_find_it_due_at_once_one_makes_it(store: MemoryStore) -> None:
    collected(store)
    store.clock_s += 2 * HOUR_S
    results: list[CollectResult | None] = []

    def other_is_faster(operation: str, key: str) -> None:
        if (operation, key) == ("put", TURN_KEY):
            store.before = None
            results.append(collected(store))

    store.before = other_is_faster
    results.append(collected(store))
    assert [result is not None for result in results] == [True, False]


def test_a_pass_that_failed_is_made_again_when_the_time_is_over(store: MemoryStore) -> None:
    faulty = FaultyStore(store)
    faulty.add(Fault(Fail(StoreErrorKind.TRANSIENT), key=LEFT, operation="delete"))
    with pytest.raises(StoreError):
        collect_in_turn(faulty, every_s=HOUR_S, grace_s=0)
    assert collected(store) is None
    store.clock_s += 2 * HOUR_S
    assert collected(store) is not None
    assert LEFT not in store.objects


def test_nothing_is_written_where_no_snapshot_ever_was() -> None:
    store = MemoryStore()
    assert collected(store) == CollectResult()
    assert not store.objects
