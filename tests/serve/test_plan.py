"""A GET asks for whole frames that lie back to back, no more than its bounds, and for nothing that isn't wanted."""

import itertools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from streamd.serve.memory import Accountant
from streamd.serve.plan import GetPlan, Layout, joins


def layout_of(saved: Any) -> Layout:
    return Layout(saved.pinned.manifest.table)


@given(data=st.data(), get_kib=st.integers(1, 600), raw_kib=st.integers(1, 600))
def test_a_plan_is_whole_wanted_frames_back_to_back_within_its_bounds(
    saved: Any, data: st.DataObject, get_kib: int, raw_kib: int
) -> None:
    layout = layout_of(saved)
    stored = [c for c in range(len(layout)) if not layout.is_zero(c)]
    first = data.draw(st.sampled_from(stored))
    wanted = data.draw(st.sets(st.sampled_from(stored))) | {first}
    plan = layout.plan(first, wanted=wanted.__contains__, get_bytes=get_kib << 10, raw_bytes=raw_kib << 10)
    chunks = [frame.chunk for frame in plan.frames]
    assert chunks[0] == first
    assert set(chunks) <= wanted
    assert all(layout.pack[chunk] == plan.pack for chunk in chunks)
    ends = [frame.end for frame in plan.frames]
    assert [frame.start for frame in plan.frames] == [plan.start, *ends[:-1]]
    assert ends[-1] == plan.end
    if len(chunks) > 1:
        assert plan.end - plan.start <= get_kib << 10
        assert plan.raw_bytes <= raw_kib << 10
    _assert_maximal(layout, plan, wanted, get_kib << 10, raw_kib << 10)


def _assert_maximal(layout: Layout, plan: GetPlan, wanted: set[int], get_bytes: int, raw_bytes: int) -> None:
    """The next stored chunk is left out for a reason."""
    rest = (c for c in range(plan.frames[-1].chunk + 1, len(layout)) if not layout.is_zero(c))
    following = next(rest, None)
    if following is None or following not in wanted or layout.pack[following] != plan.pack:
        return
    frame = layout.frame(following)
    assert frame.end - plan.start > get_bytes or plan.raw_bytes + frame.length > raw_bytes


@given(start=st.integers(0, 4 << 20), size=st.integers(1, 2 << 20))
def test_the_chunks_of_a_range_are_those_that_share_a_byte_with_it(saved: Any, start: int, size: int) -> None:
    layout = layout_of(saved)
    end = min(start + size, layout.start[-1])
    overlapping = [c for c in range(len(layout)) if layout.start[c] < end and layout.start[c + 1] > start]
    assert list(layout.chunks(start, end)) == overlapping


def test_zero_chunks_have_no_frame_and_do_not_end_a_get(saved: Any) -> None:
    layout = layout_of(saved)
    stored = [c for c in range(len(layout)) if not layout.is_zero(c)]
    gaps = [(b, a) for b, a in itertools.pairwise(stored) if a > b + 1 and layout.pack[b] == layout.pack[a]]
    assert gaps
    for before, after in gaps:
        plan = layout.plan(before, wanted={before, after}.__contains__, get_bytes=1 << 20, raw_bytes=1 << 20)
        assert [frame.chunk for frame in plan.frames] == [before, after]


def test_a_fault_joins_what_comes_within_a_round_trip() -> None:
    assert joins(1_000_000, bytes_per_s=100e6, round_trip_s=0.015)
    assert not joins(2_000_000, bytes_per_s=100e6, round_trip_s=0.015)
    assert joins(100_000, bytes_per_s=0.0, round_trip_s=0.0)
    assert not joins(4 << 20, bytes_per_s=0.0, round_trip_s=0.0)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 400)), max_size=40))
def test_the_accountant_counts_as_a_list_of_holdings_does(steps: list[tuple[bool, int]]) -> None:
    subject, model = Accountant(1000, reserve_bytes=200), list[int]()
    for takes, size in steps:
        assert subject.has_room_ahead(size) == (sum(model) + size <= 800)
        assert subject.has_room_for_demand(size)  # nothing is under way: the only one is always granted
        assert (subject.shortage_for_demand(size) == 0) == (sum(model) + size <= 1000)
        if takes:
            subject.take(size)
            model.append(size)
        elif model:
            subject.give(model.pop())
        assert subject.held_bytes == sum(model)
    subject.start_demand()
    assert subject.has_room_for_demand(1) == (sum(model) + 1 <= 1000)
    subject.end_demand()
    assert subject.has_room_for_demand(1)
