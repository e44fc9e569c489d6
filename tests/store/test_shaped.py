"""An artificial link keeps to its rate and its latency; in virtual time."""

import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamd.store.directory import DirectoryStore
from streamd.store.port import Condition
from streamd.store.shaped import Link, ShapedStore


class Time:
    """A clock that moves when someone sleeps; a sleep ends late by `late_s`."""

    def __init__(self, late_s: float = 0.0) -> None:
        self.now_s = 0.0
        self.late_s = late_s
        self.sleeps: list[float] = []

    def clock(self) -> float:
        return self.now_s

    def sleep(self, delay_s: float) -> None:
        assert delay_s > 0
        self.sleeps.append(delay_s)
        self.now_s += delay_s + self.late_s


@given(st.lists(st.integers(1, 65536), min_size=1, max_size=200), st.sampled_from([0.0, 0.0001, 0.001]))
def test_a_link_passes_no_more_than_its_rate_and_makes_up_for_sleeps_that_end_late(
    counts: list[int], late_s: float
) -> None:
    time = Time(late_s)
    link = Link(1e6, clock=time.clock, sleep=time.sleep)
    for count in counts:
        link.pass_bytes(count)
    right_s = sum(counts) / 1e6
    assert right_s - 0.005 - 1e-9 <= time.now_s <= right_s + late_s + 1e-9


def test_a_link_that_was_idle_has_not_saved_up() -> None:
    time = Time()
    link = Link(1e6, clock=time.clock, sleep=time.sleep)
    time.now_s = 1000.0
    link.pass_bytes(1_000_000)
    assert time.now_s == pytest.approx(1001.0, abs=0.006)


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def store(tmp_path: Path, time: Time) -> ShapedStore:
    inner = DirectoryStore(str(tmp_path / "store"))
    return ShapedStore(inner, latency_s=0.25, bytes_per_s=1e6, clock=time.clock, sleep=time.sleep)


def test_each_request_waits_the_latency_once(store: ShapedStore, time: Time) -> None:
    info = store.put("k", b"x", condition=Condition.ABSENT)
    for call in (
        lambda: store.put("l", b"", condition=Condition.ABSENT),
        lambda: list(store.list("")),
        lambda: store.head("k"),
        lambda: store.delete("k", generation=info.generation),
    ):
        before_s = time.now_s
        call()
        assert time.now_s - before_s == pytest.approx(0.25, abs=0.001)


def test_a_body_comes_in_steps_each_at_its_time(store: ShapedStore, time: Time) -> None:
    info = store.put("k", bytes(1_000_000), condition=Condition.ABSENT)
    time.now_s = 100.0
    got = 0
    for piece in store.read("k", generation=info.generation, start=0, end=info.size):
        got += len(piece)
        assert len(piece) <= 65536
        assert time.now_s == pytest.approx(100.25 + got / 1e6, abs=0.006)
    assert got == 1_000_000


def test_a_put_takes_the_time_of_its_bytes(store: ShapedStore, time: Time) -> None:
    store.put("k", bytes(500_000), condition=Condition.ABSENT)
    assert time.now_s == pytest.approx(0.75, abs=0.006)


def test_two_readers_share_the_link(tmp_path: Path) -> None:
    inner = DirectoryStore(str(tmp_path / "store"))
    info = inner.put("k", bytes(4 << 20), condition=Condition.ABSENT)
    # The clock stands still, so how long each sleep is says how far the one link has come, whoever asks.
    delays: list[float] = []
    store = ShapedStore(inner, bytes_per_s=1e6, clock=lambda: 0.0, sleep=delays.append)
    threads = [
        threading.Thread(target=lambda: list(store.read("k", generation=info.generation, start=0, end=info.size)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(delays) == pytest.approx(2 * info.size / 1e6, abs=0.006)
    assert len(set(delays)) == len(delays)


def test_without_a_rate_pieces_pass_as_they_are(tmp_path: Path, time: Time) -> None:
    inner = DirectoryStore(str(tmp_path / "store"))
    info = inner.put("k", bytes(1 << 20), condition=Condition.ABSENT)
    store = ShapedStore(inner, clock=time.clock, sleep=time.sleep)
    pieces = list(store.read("k", generation=info.generation, start=0, end=info.size))
    assert pieces == list(inner.read("k", generation=info.generation, start=0, end=info.size))
    assert time.sleeps == []
