"""A set of byte ranges says of every span what a set of bytes says (test_classify.py counts the steps that takes)."""

import itertools

from hypothesis import example, given
from hypothesis import strategies as st

from streamd.serve.ranges import BLOCK_BYTES, RANGES_MAX, Ranges

PAGE = 4096
# Spans near the borders of blocks, where counting is done in two ways.
bytes_near_blocks = st.builds(
    lambda block, byte: max(0, block * BLOCK_BYTES + byte), st.integers(0, 40), st.integers(-20, 20)
)
added_ranges = st.lists(st.tuples(bytes_near_blocks, st.integers(1, 50)), max_size=30)


def filled(added: list[tuple[int, int]]) -> tuple[Ranges, set[int]]:
    ranges, model = Ranges(), set[int]()
    for start, size in added:
        ranges.add(start, start + size)
        model |= set(range(start, start + size))
    return ranges, model


@given(added_ranges, bytes_near_blocks, st.integers(0, 300))
@example([(0, 5), (5, 5)], 0, 10)
def test_missing_bytes_are_those_that_a_set_of_bytes_lacks(added: list[tuple[int, int]], start: int, size: int) -> None:
    ranges, model = filled(added)
    expected = [byte for byte in range(start, start + size) if byte not in model]
    assert ranges.missing_bytes(start, start + size) == len(expected)
    assert [byte for low, high in ranges.missing(start, start + size) for byte in range(low, high)] == expected


@given(added_ranges, bytes_near_blocks, bytes_near_blocks)
def test_spans_over_many_blocks_are_counted_too(added: list[tuple[int, int]], start: int, end: int) -> None:
    ranges, model = filled(added)
    expected = max(0, end - start) - sum(start <= byte < end for byte in model)
    assert ranges.missing_bytes(start, end) == expected


def test_what_is_far_below_stays_counted_while_the_set_grows() -> None:
    ranges = Ranges()
    for block in range(70):
        ranges.add(block * BLOCK_BYTES, block * BLOCK_BYTES + 1)
        end = (block + 60) * BLOCK_BYTES
        assert ranges.missing_bytes(0, end) == end - block - 1


@given(added_ranges)
def test_neighbours_are_one_range(added: list[tuple[int, int]]) -> None:
    ranges, model = filled(added)
    pairs = ranges.as_pairs()
    assert {byte for low, high in pairs for byte in range(low, high)} == model
    assert all(end < start for (_, end), (start, _) in itertools.pairwise(pairs))


def test_no_reader_can_make_the_set_large_and_the_latest_ranges_stay_exact() -> None:
    ranges = Ranges()
    count = 3 * RANGES_MAX
    for index in range(count):
        ranges.add(2 * index * PAGE, (2 * index + 1) * PAGE)
        assert len(ranges._starts) == len(ranges._ends) <= RANGES_MAX
    pairs = ranges.as_pairs()
    assert pairs[0][0] == 0
    assert pairs[-1] == ((2 * count - 2) * PAGE, (2 * count - 1) * PAGE)
    # Everything below the first gap is taken to be in; from there on every other page is, and counted so.
    taken_end, top = pairs[0][1], 2 * count * PAGE
    assert ranges.missing_bytes(0, taken_end) == 0
    for above in (0, 1, PAGE, BLOCK_BYTES, 33 * PAGE, 10 * BLOCK_BYTES + 5):
        span = (taken_end + above, top)
        by_lists = sum(high - low for low, high in ranges.missing(*span))
        assert ranges.missing_bytes(*span) == by_lists
        assert ranges.missing_bytes(0, span[1]) == sum(high - low for low, high in ranges.missing(0, span[1]))
