"""The rate bounds what nobody is stopped for, never what somebody is, and nothing is lost on the way."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamd.serve.rate import BURST_BYTES_MIN, YIELDS, FetchRate

KIB, MIB = 1 << 10, 1 << 20
RATE = 8 * MIB


def greedy(
    rate: FetchRate, size: int, until_s: float, faults: list[tuple[float, int]], *, now_s: float = 0.0
) -> list[tuple[float, int]]:
    """Have background GETs ask as soon as they may, and faults come when they do; what the former got, and when."""
    granted: list[tuple[float, int]] = []
    due = sorted(faults, reverse=True)
    while now_s < until_s:
        while due and due[-1][0] <= now_s:
            rate.charge(due.pop()[1], now_s, is_urgent=True)
        delay_s = rate.delay_s(size, now_s)
        if delay_s:
            now_s = min(now_s + delay_s, due[-1][0] if due else until_s)
            continue
        rate.charge(size, now_s, is_urgent=False)
        granted.append((now_s, size))
    return granted


faults = st.lists(st.tuples(st.floats(0, 10), st.integers(1, 40 * MIB)), max_size=12)


@given(st.integers(64 * KIB, 1 << 30), st.floats(0.05, 1), faults)
@settings(deadline=None)
def test_background_takes_the_rate_and_one_bucket_at_most_in_any_time(
    bytes_per_s: int, part: float, faults: list[tuple[float, int]]
) -> None:
    rate = FetchRate(bytes_per_s)
    rate.charge(1, 0.0, is_urgent=False)
    granted = greedy(rate, max(1, int(part * rate.burst_bytes)), 10.0, faults, now_s=2.0)
    taken, least = 0.0, math.inf
    for at_s, size in granted:
        least = min(least, taken - bytes_per_s * at_s)  # of all times that could begin here or before
        taken += size
        # A byte each time, which is the arithmetic's.
        assert taken - bytes_per_s * at_s - least <= rate.burst_bytes + len(granted)


@given(st.integers(64 * KIB, 1 << 30), st.integers(0, 1 << 32), st.floats(1, 30))
@settings(max_examples=100, deadline=None)
def test_background_gets_all_that_faults_leave_of_the_rate_and_never_less_than_a_part(
    bytes_per_s: int, fault_bytes: int, until_s: float
) -> None:
    rate = FetchRate(bytes_per_s)
    size = rate.burst_bytes // 2
    granted = sum(size for _, size in greedy(rate, size, until_s, [(0.0, fault_bytes)]))
    earned = bytes_per_s * until_s
    right = earned - min(fault_bytes, YIELDS * earned)
    assert right - rate.burst_bytes <= granted <= right + rate.burst_bytes + 1
    assert granted >= earned / 4 - rate.burst_bytes


@given(st.integers(64 * KIB, 1 << 30), st.integers(0, 8 * MIB), st.integers(0, 8 * MIB), st.integers(1, 4 * MIB))
def test_the_wait_that_is_given_is_the_shortest_that_is_enough(
    bytes_per_s: int, taken: int, owed: int, size: int
) -> None:
    rate = FetchRate(bytes_per_s)
    rate.charge(taken, 0.0, is_urgent=False)
    rate.charge(owed, 0.0, is_urgent=True)
    now_s, waits = 0.0, 0
    while delay_s := rate.delay_s(size, now_s):
        assert delay_s <= 1.0
        if delay_s > 0.01:  # none of it is for nothing
            assert rate.delay_s(size, now_s + delay_s - 0.005) > 0
        now_s, waits = now_s + delay_s, waits + 1
        assert waits < 1000
        if delay_s < 1.0:
            assert rate.delay_s(size, now_s) == 0


def test_a_get_that_is_larger_than_the_bucket_goes_and_is_paid_for_afterwards() -> None:
    rate = FetchRate(64 * KIB)
    assert rate.delay_s(4 * MIB, 0.0) == 0
    rate.charge(4 * MIB, 0.0, is_urgent=False)
    assert len(greedy(rate, BURST_BYTES_MIN, 60.0, [])) == 0
    assert len(greedy(rate, BURST_BYTES_MIN, 65.0, [])) == 1


def test_without_a_limit_nothing_waits_and_nothing_is_owed_once_there_is_one() -> None:
    rate = FetchRate(0)
    for step in range(100):
        rate.charge(100 * MIB, step * 1e-3, is_urgent=bool(step % 2))
        assert rate.delay_s(100 * MIB, step * 1e-3) == 0
        assert not rate.is_held_back(step * 1e-3)
    rate.set(RATE, 0.1)
    assert rate.delay_s(rate.burst_bytes, 0.1) == 0
    assert rate.burst_bytes == RATE // 4


def test_what_was_asked_for_and_did_not_come_is_given_back() -> None:
    rate = FetchRate(RATE)
    for is_urgent in (False, True):
        rate.charge(rate.burst_bytes, 0.0, is_urgent=is_urgent)
        rate.charge(-rate.burst_bytes, 0.0, is_urgent=is_urgent)
    rate.charge(rate.burst_bytes, 0.0, is_urgent=False)
    assert rate.delay_s(rate.burst_bytes, 0.0) == pytest.approx(0.25)
    # And no more than that: what is given back twice fills no second bucket.
    for _ in range(10):
        rate.charge(-rate.burst_bytes, 0.0, is_urgent=False)
        rate.charge(-rate.burst_bytes, 0.0, is_urgent=True)
    rate.charge(rate.burst_bytes, 0.0, is_urgent=False)
    assert rate.delay_s(rate.burst_bytes, 0.0) == pytest.approx(0.25)


@pytest.mark.parametrize(("bytes_per_s", "delay_s"), [(RATE // 2, 0.25), (2 * RATE, 0.25), (RATE, 0.25), (0, 0.0)])
def test_another_rate_holds_from_now_on(bytes_per_s: int, delay_s: float) -> None:
    rate = FetchRate(RATE)
    rate.charge(rate.burst_bytes, 0.0, is_urgent=False)
    rate.set(bytes_per_s, 0.0)
    assert rate.delay_s(rate.burst_bytes, 0.0) == pytest.approx(delay_s)


def test_a_rate_that_is_lowered_leaves_no_more_in_the_bucket_than_that_has() -> None:
    rate = FetchRate(RATE)
    rate.set(64 * KIB, 0.0)
    assert sum(size for _, size in greedy(rate, 64 * KIB, 0.5, [])) == rate.burst_bytes == BURST_BYTES_MIN


def test_what_was_owed_is_forgotten_where_there_is_no_limit_any_more() -> None:
    rate = FetchRate(RATE)
    rate.charge(100 * MIB, 0.0, is_urgent=True)
    rate.charge(100 * MIB, 0.0, is_urgent=False)
    rate.set(0, 0.0)
    rate.set(RATE, 0.0)
    assert rate.delay_s(rate.burst_bytes, 0.0) == 0
    rate.charge(rate.burst_bytes, 0.0, is_urgent=False)
    assert rate.delay_s(rate.burst_bytes, 0.0) == pytest.approx(0.25)


def test_it_tells_what_is_taken_and_whether_more_would_have_been() -> None:
    rate = FetchRate(RATE)
    half, end_s = RATE // 20, 10.0
    for step in range(100):
        rate.charge(half, step / 10, is_urgent=False)
        assert rate.delay_s(half, step / 10) == 0
    assert rate.used_per_s(end_s) == pytest.approx(RATE / 2, rel=0.1)
    assert not rate.is_held_back(end_s)
    granted = sum(size for _, size in greedy(rate, half, 10.0, []))
    assert granted > 0
    assert rate.is_held_back(11.0)
    assert not rate.is_held_back(12.5)
    assert rate.used_per_s(100.0) == pytest.approx(0, abs=1)
