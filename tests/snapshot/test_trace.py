"""Traces: written and read, refused when hostile, and what many restores together teach."""

import struct
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from streamd.errors import Damaged
from streamd.snapshot import envelope
from streamd.snapshot.trace import (
    HOT_BYTES,
    LIKELY_WEIGHT,
    MAGIC,
    MAX_RANGES,
    MAX_TRACE_BYTES,
    Sample,
    StaleTrace,
    Trace,
    TraceRange,
    UnknownTrace,
    decode,
    encode,
    hot_ranges,
    merge,
)

PAGE = 4096
MIB = 1 << 20
DIGEST = bytes(range(32))
PAGES_BYTES = 1 << 30


def learn(old: Trace | None, *waited: tuple[int, int], passed: tuple[tuple[int, int], ...] = ()) -> Trace:
    """Merge a sample; without `passed`, of a restore whose stream came to everything after all faults."""
    total = sum(end - start for start, end in waited)
    sample = Sample(waited, passed or ((PAGES_BYTES, total),))
    return merge(old, sample, digest=DIGEST, pages_bytes=PAGES_BYTES)


def order(trace: Trace) -> list[tuple[int, int]]:
    return [(row.start, row.end) for row in trace.ranges]


def covered(trace: Trace) -> set[int]:
    return {page for row in trace.ranges for page in range(row.start // PAGE, row.end // PAGE)}


@st.composite
def layouts(draw: st.DrawFn, pages: int = 400, max_size: int = 12) -> list[tuple[int, int]]:
    """Disjoint ranges of an image of that many pages, in any order."""
    bounds = sorted(draw(st.sets(st.integers(0, pages), max_size=2 * max_size)))
    ranges = [(low * PAGE, high * PAGE) for low, high in zip(bounds[::2], bounds[1::2], strict=False)]
    return draw(st.permutations(ranges))


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    ranges = draw(layouts())
    positions = sorted(draw(st.lists(st.integers(0, PAGES_BYTES // 2), min_size=len(ranges), max_size=len(ranges))))
    weights = st.floats(0, 1, exclude_min=True)
    rows = (TraceRange(low, high, draw(weights), at) for (low, high), at in zip(ranges, positions, strict=True))
    return Trace(DIGEST, draw(st.integers(1, 2**32 - 1)), tuple(rows))


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    waited = draw(layouts().filter(bool))
    passed = draw(st.lists(st.tuples(st.integers(0, 400 * PAGE), st.integers(0, 400 * PAGE)), max_size=4))
    return Sample(tuple(waited), tuple(zip(*(sorted(column) for column in zip(*passed, strict=True)), strict=True)))


# The format


@given(trace=traces())
def test_what_is_written_is_read_again(trace: Trace) -> None:
    assert decode(encode(trace), digest=DIGEST, pages_bytes=PAGES_BYTES) == trace


@given(data=st.binary(max_size=200))
def test_any_bytes_are_damaged(data: bytes) -> None:
    with pytest.raises(Damaged):
        decode(data, digest=DIGEST, pages_bytes=PAGES_BYTES)


@given(trace=traces(), data=st.data())
@settings(max_examples=300)
def test_a_trace_with_any_bytes_changed_and_sealed_again_is_read_or_damaged(trace: Trace, data: Any) -> None:
    """What a hostile writer can do, who can compute a SHA-256; what is read can be merged and written again."""
    payload = bytearray(encode(trace)[12:-32])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(payload) - 1))
        payload[at : at + data.draw(st.integers(0, 8))] = data.draw(st.binary(max_size=8))
    with suppress(Damaged):
        read = decode(envelope.seal(MAGIC, 1, (payload,)), digest=DIGEST, pages_bytes=PAGES_BYTES)
        encode(learn(read, (0, PAGE)))


@given(trace=traces(), bit=st.integers(0))
def test_any_flipped_bit_is_seen(trace: Trace, bit: int) -> None:
    data = bytearray(encode(trace))
    bit %= 8 * len(data)
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(Damaged):
        decode(data, digest=DIGEST, pages_bytes=PAGES_BYTES)


def sealed(
    *rows: tuple[int, int, float, int],
    samples: int = 1,
    count: int | None = None,
    digest: bytes = DIGEST,
    version: int = 1,
) -> bytes:
    """Write rows (start, pages, weight, position) as the format says, unchecked."""
    head = struct.pack("<32sII", digest, samples, len(rows) if count is None else count)
    start, pages, weight, position = zip(*rows, strict=True) if rows else ((), (), (), ())
    n = len(rows)
    columns = struct.pack(f"<{n}Q{n}Q{n}d{n}I", *start, *position, *weight, *pages)
    return envelope.seal(MAGIC, version, (head, columns))


GOOD = (0, 2, 0.5, 0)
REFUSED: dict[str, tuple[bytes, type[Exception]]] = {
    "another snapshot's": (sealed(GOOD, digest=bytes(32)), StaleTrace),
    "a later format": (sealed(GOOD, version=2), UnknownTrace),
    "of no sample": (sealed(GOOD, samples=0), Damaged),
    "more ranges than bytes": (sealed(GOOD, count=2**32 - 1), Damaged),
    "fewer ranges than bytes": (sealed(GOOD, count=0), Damaged),
    "too many ranges": (sealed(*((2 * i * PAGE, 1, 0.5, 0) for i in range(MAX_RANGES + 1))), Damaged),
    "too many bytes": (bytes(MAX_TRACE_BYTES + 1), Damaged),
    "no head": (envelope.seal(MAGIC, 1, (b"",)), Damaged),
    "an empty range": (sealed((0, 0, 0.5, 0)), Damaged),
    "a range beyond the image": (sealed((PAGES_BYTES - PAGE, 2, 0.5, 0)), Damaged),
    "a range that wraps around 64 bits": (sealed((2**64 - PAGE, 2, 0.5, 0)), Damaged),
    "a range between pages": (sealed((1, 1, 0.5, 0)), Damaged),
    "overlapping ranges": (sealed((0, 2, 0.5, 0), (PAGE, 2, 0.5, 0)), Damaged),
    "a range twice": (sealed(GOOD, GOOD), Damaged),
    "a weight that is no number": (sealed((0, 1, float("nan"), 0)), Damaged),
    "a weight of nothing": (sealed((0, 1, 0.0, 0)), Damaged),
    "a weight of more than all": (sealed((0, 1, 1.5, 0)), Damaged),
    "an infinite weight": (sealed((0, 1, float("inf"), 0)), Damaged),
    "a position beyond the image": (sealed((0, 1, 0.5, PAGES_BYTES)), Damaged),
    "positions that don't ascend": (sealed((0, 1, 0.5, PAGE), (2 * PAGE, 1, 0.5, 0)), Damaged),
}


@pytest.mark.parametrize(("data", "error"), REFUSED.values(), ids=REFUSED)
def test_what_can_not_be_a_trace_is_refused(data: bytes, error: type[Exception]) -> None:
    with pytest.raises(Damaged) as caught:
        decode(data, digest=DIGEST, pages_bytes=PAGES_BYTES)
    assert type(caught.value) is error


def test_the_format_is_what_its_description_says() -> None:
    trace = Trace(DIGEST, 7, (TraceRange(0, 2 * PAGE, 0.5, 0), TraceRange(8 * PAGE, 9 * PAGE, 1.0, 5)))
    assert encode(trace) == sealed((0, 2, 0.5, 0), (8 * PAGE, 1, 1.0, 5), samples=7)


def test_what_would_be_refused_is_not_written() -> None:
    with pytest.raises(ValueError, match="weight"):
        encode(Trace(DIGEST, 1, (TraceRange(0, PAGE, 2.0, 0),)))


# Learning


@given(old=st.none() | traces(), sample=samples())
@settings(max_examples=200)
def test_what_is_merged_can_be_written_and_holds_the_sample(old: Trace | None, sample: Sample) -> None:
    merged = merge(old, sample, digest=DIGEST, pages_bytes=PAGES_BYTES)
    assert decode(encode(merged), digest=DIGEST, pages_bytes=PAGES_BYTES) == merged
    of_sample = {page for low, high in sample.waited for page in range(low // PAGE, high // PAGE)}
    assert of_sample <= covered(merged) <= of_sample | (covered(old) if old else set())


@given(waited=st.lists(st.integers(0, 100), min_size=1, max_size=20, unique=True), times=st.integers(1, 12))
def test_the_same_restore_again_and_again_keeps_its_order(waited: list[int], times: int) -> None:
    ranges = [(2 * index * MIB, 2 * index * MIB + MIB) for index in waited]
    trace = None
    for _ in range(times):
        trace = learn(trace, *ranges)
    assert trace is not None
    assert order(trace) == ranges
    assert {row.weight for row in trace.ranges} == {1.0}
    assert trace.samples == times


@given(one=layouts().filter(bool), other=layouts().filter(bool))
def test_two_restores_teach_the_same_in_either_order(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    passed = ((PAGES_BYTES, PAGES_BYTES),)
    both = learn(learn(None, *one, passed=passed), *other, passed=passed)
    swapped = learn(learn(None, *other, passed=passed), *one, passed=passed)
    assert both == swapped


def test_a_new_workload_comes_first_after_three_restores_and_the_old_one_is_forgotten_after_nine() -> None:
    old, new = (100 * MIB, 200 * MIB), (500 * MIB, 600 * MIB)
    trace = None
    for _ in range(50):
        trace = learn(trace, old)
    firsts = []
    for _ in range(9):
        trace = learn(trace, new)
        firsts.append(hot_ranges(trace)[0])
    assert firsts == [old] * 2 + [new] * 7
    assert trace is not None
    assert order(trace) == [new]


def test_one_odd_restore_leaves_the_order_as_it_was() -> None:
    usual = [(300 * MIB, 332 * MIB), (100 * MIB, 132 * MIB)]
    trace = None
    for _ in range(10):
        trace = learn(trace, *usual)
    trace = learn(trace, (600 * MIB, 700 * MIB), usual[1])
    assert hot_ranges(trace)[:2] == usual


def test_a_restore_whose_stream_was_ahead_of_the_faults_unlearns_little() -> None:
    """The trace made it fast: the stream ran through what was here already, before anybody touched it."""
    first, second = (400 * MIB, 432 * MIB), (432 * MIB, 464 * MIB)
    trace = learn(None, first, second)
    for _ in range(10):
        trace = learn(trace, first, passed=((500 * MIB, 32 * MIB),))
    assert hot_ranges(trace) == [(400 * MIB, 464 * MIB)]
    assert {row.start: row.weight >= LIKELY_WEIGHT for row in trace.ranges} == {400 * MIB: True, 432 * MIB: True}


def test_what_the_stream_never_came_to_may_have_been_wanted_still() -> None:
    trace = learn(None, (400 * MIB, 432 * MIB), (800 * MIB, 832 * MIB))
    killed_early = learn(trace, (400 * MIB, 432 * MIB), passed=((100 * MIB, 0), (200 * MIB, 32 * MIB)))
    loaded = learn(trace, (400 * MIB, 432 * MIB), passed=((100 * MIB, 0), (PAGES_BYTES, 64 * MIB)))
    killed_within = learn(trace, (400 * MIB, 432 * MIB), passed=((100 * MIB, 0), (816 * MIB, 64 * MIB)))
    assert killed_early.ranges[-1].weight == killed_within.ranges[-1].weight > loaded.ranges[-1].weight == 0.5


def test_a_range_that_restores_wait_for_at_different_times_stands_at_the_mean() -> None:
    config, heap, late = (0, MIB), (100 * MIB, 110 * MIB), (200 * MIB, 202 * MIB)
    trace = learn(learn(None, late, heap, config), heap, late, config)
    assert {row.start: row.position for row in trace.ranges} == {
        100 * MIB: 1 * MIB,
        200 * MIB: 5 * MIB,
        0: 12 * MIB,
    }
    assert order(trace) == [heap, late, config]


def test_the_parts_of_a_window_that_some_restores_waited_for_are_told_apart() -> None:
    trace = learn(learn(None, (0, 32 * MIB)), (8 * MIB, 16 * MIB), (100 * MIB, 200 * MIB))
    assert {(row.start // MIB, row.end // MIB): row.weight for row in trace.ranges} == {
        (0, 8): 0.5,
        (8, 16): 1.0,
        (16, 32): 0.5,
        (100, 200): 0.5,
    }


def test_neighbours_that_restores_cut_differently_become_one_range_again() -> None:
    whole = learn(None, (0, 64 * MIB))
    assert order(learn(whole, (0, 20 * MIB), (20 * MIB, 64 * MIB))) == [(0, 64 * MIB)]


def test_neighbours_that_are_wanted_at_different_times_stay_apart() -> None:
    walk = [(0, 32 * MIB), (500 * MIB, 600 * MIB), (32 * MIB, 64 * MIB)]
    assert order(learn(learn(None, *walk), *walk)) == walk


def test_ranges_that_are_joined_at_the_end_of_the_order_stay_a_trace() -> None:
    last = PAGES_BYTES - MIB
    old = Trace(DIGEST, 1, (TraceRange(0, MIB, 1.0, last - MIB // 2), TraceRange(MIB, 2 * MIB, 1.0, last)))
    merged = learn(old, (4 * MIB, 5 * MIB))
    assert (0, 2 * MIB) in order(merged)
    assert decode(encode(merged), digest=DIGEST, pages_bytes=PAGES_BYTES) == merged


def test_a_trace_is_bounded_and_keeps_what_most_restores_wait_for() -> None:
    scattered = [(2 * index * PAGE, (2 * index + 1) * PAGE) for index in range(MAX_RANGES)]
    usual = [(600 * MIB + low, 600 * MIB + high) for low, high in scattered[:1000]]
    trace = None
    for _ in range(3):
        trace = learn(trace, *usual)
    trace = learn(trace, *usual, *scattered)
    assert len(trace.ranges) == MAX_RANGES
    assert set(usual) <= set(order(trace))
    assert len(encode(trace)) < MAX_TRACE_BYTES


def test_a_sample_of_nothing_is_no_sample() -> None:
    with pytest.raises(ValueError, match="nothing"):
        merge(None, Sample(()), digest=DIGEST, pages_bytes=PAGES_BYTES)


# What is fetched first


@given(trace=traces(), budget_bytes=st.integers(0, 420 * PAGE))
@example(Trace(DIGEST, 1, ()), 0)
def test_what_is_fetched_first_is_of_the_trace_once_in_order_and_within_the_budget(
    trace: Trace, budget_bytes: int
) -> None:
    hot = hot_ranges(trace, budget_bytes)
    pages = [page for low, high in hot for page in range(low // PAGE, high // PAGE)]
    likely = [row for row in trace.ranges if row.weight >= LIKELY_WEIGHT]
    rest = [row for row in trace.ranges if row.weight < LIKELY_WEIGHT]
    wanted = [page for row in (*likely, *rest) for page in range(row.start // PAGE, row.end // PAGE)]
    assert pages == wanted[: budget_bytes // PAGE]


def test_whole_windows_are_fetched_as_one() -> None:
    trace = Trace(DIGEST, 1, (TraceRange(0, 32 * MIB, 1.0, 0), TraceRange(32 * MIB, 64 * MIB, 0.9, 32 * MIB)))
    assert hot_ranges(trace) == [(0, 64 * MIB)]


def test_the_budget_is_that_of_the_largest_workloads_that_were_measured_and_not_the_image() -> None:
    everything = Trace(DIGEST, 1, (TraceRange(0, PAGES_BYTES, 1.0, 0),))
    assert hot_ranges(everything) == [(0, HOT_BYTES)]
