"""The store that misbehaves on demand does what its rules say, and nothing else."""

import threading
from pathlib import Path

import pytest

from bench.faults import Corrupt, Cut, Delay, Fail, Fault, FaultyStore, Hang
from streamd.errors import StoreError, StoreErrorKind
from streamd.store.directory import DirectoryStore
from streamd.store.port import Condition, ObjectInfo

DATA = bytes(range(200)) * 5


@pytest.fixture
def faulty(tmp_path: Path) -> FaultyStore:
    return FaultyStore(DirectoryStore(str(tmp_path / "store")))


@pytest.fixture
def info(faulty: FaultyStore) -> ObjectInfo:
    return faulty.put("k", DATA, condition=Condition.ABSENT)


def read(store: FaultyStore, info: ObjectInfo, got: bytearray | None = None) -> bytes:
    got = bytearray() if got is None else got
    for piece in store.read(info.key, generation=info.generation, start=0, end=info.size):
        got += piece
    return bytes(got)


def test_without_rules_it_is_the_store_it_wraps(faulty: FaultyStore, info: ObjectInfo) -> None:
    assert read(faulty, info) == DATA
    assert (faulty.counts["k"].reads, faulty.counts["k"].bytes_asked, faulty.bytes_read) == (1, 1000, 1000)


def test_the_nth_matching_call_is_hit_and_then_as_many_as_it_says(faulty: FaultyStore, info: ObjectInfo) -> None:
    faulty.add(Fault(Fail(StoreErrorKind.GONE), key="k*", nth=2, times=2))
    results: list[object] = []
    for _ in range(6):
        try:
            results.append(read(faulty, info) == DATA)
        except StoreError as error:
            results.append(error.store_kind)
    assert results == [True, True, StoreErrorKind.GONE, StoreErrorKind.GONE, True, True]


@pytest.mark.parametrize(("at_byte", "given"), [(0, 0), (1, 1), (-1, 999), (1000, 1000)])
def test_a_cut_gives_what_lies_below_it(faulty: FaultyStore, info: ObjectInfo, at_byte: int, given: int) -> None:
    faulty.add(Fault(Cut(at_byte)))
    got = bytearray()
    with pytest.raises(StoreError):
        read(faulty, info, got)
    assert got == DATA[:given]
    assert faulty.bytes_read == given


@pytest.mark.parametrize("at_byte", [0, 500, -1])
def test_corruption_changes_one_byte(faulty: FaultyStore, info: ObjectInfo, at_byte: int) -> None:
    faulty.add(Fault(Corrupt(at_byte)))
    damaged = read(faulty, info)
    assert [i for i in range(1000) if damaged[i] != DATA[i]] == [at_byte % 1000]
    assert read(faulty, info) == DATA


@pytest.mark.parametrize("at_byte", [0, 123, 1000])
def test_a_hang_gives_what_lies_below_it_and_goes_on_when_it_is_removed(
    faulty: FaultyStore, info: ObjectInfo, at_byte: int
) -> None:
    fault = faulty.add(Fault(Hang(at_byte)))
    got = bytearray()
    below = threading.Event()

    def reader() -> None:
        for piece in faulty.read("k", generation=info.generation, start=0, end=1000):
            got.extend(piece)
            if len(got) == at_byte:
                below.set()

    thread = threading.Thread(target=reader)
    thread.start()
    assert at_byte == 0 or below.wait(30)
    assert thread.is_alive()
    assert len(got) == at_byte
    faulty.remove(fault)
    thread.join(30)
    assert got == DATA


def test_clearing_the_rules_frees_who_waits(faulty: FaultyStore, info: ObjectInfo) -> None:
    faulty.add(Fault(Delay(1e6), operation="head"))
    thread = threading.Thread(target=lambda: faulty.head("k"))
    thread.start()
    while not any(request.operation == "head" for request in faulty.requests):
        pass
    faulty.clear()
    thread.join(30)
    assert not thread.is_alive()


def test_a_lost_answer_is_an_error_after_the_effect(faulty: FaultyStore) -> None:
    faulty.add(Fault(Fail(after=True), operation="put"))
    with pytest.raises(StoreError):
        faulty.put("l", b"x", condition=Condition.ABSENT)
    assert faulty.head("l").size == 1
