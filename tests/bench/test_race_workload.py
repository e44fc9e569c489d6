"""The race's heap: what it answers is what the race expects, and its bytes are what the cell says they are."""

import zstandard
from hypothesis import given
from hypothesis import strategies as st

from bench.race_workload import MIB, REGION_MIB, SCATTERED, Contents, Heap, region_pages, right_answer, scattered_pages

HEAP_MIB = REGION_MIB + 2
PAGES_PER_MIB = MIB // 4096


def test_a_heap_answers_what_the_race_expects() -> None:
    heap = Heap("random", HEAP_MIB)
    for request in ("region", "pages 7"):
        assert heap.answer(request) == right_answer("random", HEAP_MIB, request)


@given(mib=st.integers(REGION_MIB, 4096))
def test_the_region_lies_in_the_middle(mib: int) -> None:
    pages = region_pages(mib)
    before, after = pages[0], mib * PAGES_PER_MIB - pages[-1] - 1
    assert len(pages) == REGION_MIB * PAGES_PER_MIB
    assert abs(before - after) <= PAGES_PER_MIB


@given(key=st.integers(), mib=st.integers(1, 4096))
def test_scattered_pages_are_different_ones_and_the_same_every_time(key: int, mib: int) -> None:
    pages = scattered_pages(key, mib)
    assert len(set(pages)) == SCATTERED
    assert all(0 <= page < mib * PAGES_PER_MIB for page in pages)
    assert pages == scattered_pages(key, mib)


def test_a_chunk_of_a_random_heap_does_not_shrink_and_one_of_the_other_halves() -> None:
    for kind, share in (("random", 1.0), ("half", 0.5)):
        chunk = Contents(kind).block(100)[: 256 << 10]
        packed = len(zstandard.ZstdCompressor(level=1).compress(chunk))
        assert abs(packed / len(chunk) - share) < 0.02


def test_no_two_blocks_of_the_largest_heap_are_alike() -> None:
    contents = Contents("random")
    beginnings = {bytes(contents.block(index)[:64]) for index in range(3104)}
    assert len(beginnings) == 3104
