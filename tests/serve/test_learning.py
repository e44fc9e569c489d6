"""What a handle's reads teach: faults, in the order of their windows, and nothing of the stream's."""

import itertools
import random
from collections.abc import Iterable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from streamd.serve.classify import MISSING_BYTES_MAX, READ_BYTES, ReadClassifier
from streamd.serve.learning import APART_BYTES, DOUBT_BYTES, READS_MAX, WINDOW_BYTES, Confidence, Sampler, Trust
from streamd.serve.order import Want
from streamd.snapshot.trace import Sample
from tests.serve.test_classify import MIB, PAGE, Loader

# Below this the stream is still to come when the faults of a test ask for something, far above.
STREAM_BYTES = MISSING_BYTES_MAX + PAGE
FAR = 1 << 30


def sampled(*faults: tuple[int, int]) -> Sample:
    """Give what these faults teach, in a file that begins at `FAR` for them; the stream comes later."""
    sampler = Sampler()
    for start, end in faults:
        sampler.note(FAR + start, FAR + end, is_fault=True)
    sampler.note(0, STREAM_BYTES, is_fault=False)
    sample = sampler.take()
    assert sample is not None
    return Sample(tuple((start - FAR, end - FAR) for start, end in sample.waited), sample.passed)


def reads(start: int, end: int) -> list[tuple[int, int]]:
    return [(low, min(low + READ_BYTES, end)) for low in range(start, end, READ_BYTES)]


class Handle:
    """A handle as a mount serves it: classifier and sampler see the same reads."""

    def __init__(self) -> None:
        self.classifier = ReadClassifier()
        self.sampler = Sampler()

    def read(self, start: int, end: int) -> Want:
        want = self.classifier.classify(start, end)
        self.sampler.note(start, end, is_fault=want is Want.FAULT)
        return want


@given(seed=st.integers(0, 2**32), windows=st.permutations([100, 180, 260, 340]))
@settings(max_examples=20, deadline=None)
def test_scrambled_reads_are_put_together_to_windows_in_the_order_of_the_faults(seed: int, windows: list[int]) -> None:
    rng = random.Random(seed)
    arriving = []
    for start in windows:
        window = reads(start * MIB, start * MIB + WINDOW_BYTES)
        rng.shuffle(window)
        arriving += window
    assert sampled(*arriving).waited == tuple((start * MIB, start * MIB + WINDOW_BYTES) for start in windows)


def test_an_array_that_is_walked_through_is_one_range() -> None:
    assert sampled(*reads(100 * MIB, 228 * MIB)).waited == ((100 * MIB, 228 * MIB),)


def test_windows_that_are_walked_through_downwards_stay_in_their_order() -> None:
    windows = [(start * MIB, (start + 32) * MIB) for start in (196, 164, 132, 100)]
    assert sampled(*(read for window in windows for read in reads(*window))).waited == tuple(windows)


def test_neighbours_that_were_wanted_at_different_times_have_places_of_their_own() -> None:
    between = reads(500 * MIB, 500 * MIB + APART_BYTES)
    sample = sampled((0, READ_BYTES), *between, (READ_BYTES, 2 * READ_BYTES))
    assert sample.waited == ((0, READ_BYTES), (between[0][0], between[-1][1]), (READ_BYTES, 2 * READ_BYTES))


def test_only_the_first_touch_of_a_byte_counts() -> None:
    sample = sampled((80 * PAGE, 81 * PAGE), (0, 2 * PAGE), (PAGE, 3 * PAGE), (79 * PAGE, 82 * PAGE), (0, 3 * PAGE))
    assert sample.waited == ((79 * PAGE, 82 * PAGE), (0, 3 * PAGE))
    assert sampled((0, 64 * PAGE), (0, 64 * PAGE)).waited == ((0, 64 * PAGE),)


def test_ranges_begin_and_end_at_pages() -> None:
    assert sampled((PAGE + 1, PAGE + 2)).waited == ((PAGE, 2 * PAGE),)


faults = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 40)), min_size=1, max_size=40)


@given(faults)
def test_a_sample_holds_each_byte_of_the_faults_once(pages: list[tuple[int, int]]) -> None:
    sample = sampled(*((low * PAGE, (low + count) * PAGE) for low, count in pages))
    found = [page for low, high in sample.waited for page in range(low // PAGE, high // PAGE)]
    assert len(found) == len(set(found))
    assert set(found) == {page for low, count in pages for page in range(low, low + count)}


def test_a_sample_is_given_once_and_not_without_faults() -> None:
    sampler = Sampler()
    sampler.note(0, PAGE, is_fault=False)
    assert sampler.take() is None
    sampler.note(FAR, FAR + PAGE, is_fault=True)
    sampler.note(PAGE, PAGE + STREAM_BYTES, is_fault=False)
    assert sampler.take() is not None
    assert sampler.take() is None


def test_it_is_known_how_far_the_stream_was_when_something_was_waited_for() -> None:
    sampler = Sampler()
    stream, fault = False, True
    order = [(0, stream), (2, stream), (1, stream), (900, fault), (3, stream), (800, fault), (801, fault), (4, stream)]
    for at, is_fault in order:
        sampler.note(at * MIB, (at + 1) * MIB, is_fault=is_fault)
    sampler.note(5 * MIB, 50 * MIB, is_fault=False)
    sample = sampler.take()
    assert sample is not None
    assert sample.passed == ((3 * MIB, 0), (4 * MIB, MIB), (50 * MIB, 3 * MIB))


def test_a_reader_that_reads_all_over_makes_no_sampler_large() -> None:
    sampler = Sampler()
    for index in range(2 * READS_MAX):
        sampler.note(2 * index * PAGE, (2 * index + 1) * PAGE, is_fault=index % 2 == 1)
        sampler.note((2 * index + 1) * PAGE, (2 * index + 2) * PAGE, is_fault=False)
    assert len(sampler._faults) == READS_MAX
    assert len(sampler._passed) <= READS_MAX + 1


def pages_of(ranges: Iterable[tuple[int, int]]) -> set[int]:
    return {page for low, high in ranges for page in range(low // PAGE, high // PAGE)}


@given(
    seed=st.integers(0, 2**32),
    size_mib=st.integers(60, 300),
    freed=st.lists(st.tuples(st.floats(0, 1), st.integers(1, 120)), max_size=3),
    hot=st.lists(st.floats(0, 1), max_size=8),
    pause=st.integers(20, 300),
)
@settings(max_examples=20, deadline=None)
@example(seed=0, size_mib=80, freed=[], hot=[0.95, 0.7], pause=20)
@example(seed=0, size_mib=500, freed=[], hot=[0.6, 0.664, 0.728, 0.792], pause=200)
def test_a_restore_teaches_what_was_called_its_faults_and_was_and_nothing_of_its_stream(
    seed: int, size_mib: int, freed: list[tuple[float, int]], hot: list[float], pause: int
) -> None:
    """Near the stream and far from it, in windows side by side, above memory that was freed."""
    loader = Loader(size_mib * MIB, random.Random(seed), fair=True)
    handle = Handle()
    for at, mib in freed:
        start = int(at * size_mib) * MIB
        loader.free(start, min(start + mib * MIB, loader.size))
    asked: list[tuple[int, int]] = []
    due = list(hot)
    count = 0
    while (read := loader.next_read()) is not None:
        start, end, is_fault = read
        want = handle.read(start, end)
        if is_fault and want is Want.FAULT:
            asked.append((start, end))
        count += 1
        if due and count % pause == 0:
            loader.fault(int(due.pop(0) * size_mib) * MIB, WINDOW_BYTES)
    sample = handle.sampler.take()
    learned = pages_of(sample.waited) if sample else set()
    assert learned <= pages_of(asked)
    if not freed:  # else a fault above freed memory may be taken for the stream's
        assert learned == pages_of(asked)


def test_reads_of_the_stream_behind_freed_memory_teach_nothing() -> None:
    loader = Loader(400 * MIB, random.Random(1), fair=True)
    handle = Handle()
    loader.free(40 * MIB, 150 * MIB)
    called_faults = 0
    for count in itertools.count():
        if count == 20:
            loader.fault(320 * MIB, WINDOW_BYTES)
        read = loader.next_read()
        if read is None:
            break
        called_faults += handle.read(*read[:2]) is Want.FAULT
    sample = handle.sampler.take()
    assert sample is not None
    assert called_faults > 200  # the window's 128, and many of the stream's
    assert sample.waited == ((320 * MIB, 352 * MIB),)


def test_a_load_that_was_ended_has_taught_the_faults_after_which_the_stream_went_on_for_long() -> None:
    handle = Handle()
    late = reads(500 * MIB, 510 * MIB)
    for read in (*reads(0, 8 * MIB), *reads(300 * MIB, 310 * MIB), *reads(8 * MIB, 48 * MIB), *late):
        handle.read(*read)
    sample = handle.sampler.take()
    assert sample is not None
    assert sample.waited == ((300 * MIB, 310 * MIB),)


def test_a_fault_inside_a_run_that_is_the_streams_stays_when_it_came_before_it() -> None:
    handle = Handle()
    handle.read(0, READ_BYTES)
    hot = reads(300 * MIB, 310 * MIB)
    for read in hot:
        assert handle.read(*read) is Want.FAULT
    # The application has freed everything below 200 MiB: the stream goes on there, and comes to the window at last.
    stream = [read for read in reads(200 * MIB, 400 * MIB) if read not in hot]
    for read in stream:
        handle.read(*read)
    sample = handle.sampler.take()
    assert sample is not None
    assert sample.waited == ((300 * MIB, 310 * MIB),)
    assert sample.passed[-1][0] == 400 * MIB


# Confidence


def test_a_trace_that_fits_is_trusted_however_much_is_read() -> None:
    confidence = Confidence([(0, 64 * MIB), (128 * MIB, 256 * MIB)])
    for read in (*reads(0, 64 * MIB), *reads(100 * MIB, 256 * MIB)):
        confidence.note(*read)
        assert confidence.holds


@pytest.mark.parametrize("hot", [[], [(512 * MIB, 1024 * MIB)]])
def test_a_trace_of_something_else_is_trusted_for_one_window_only(hot: list[tuple[int, int]]) -> None:
    confidence = Confidence(hot)
    for read in reads(0, WINDOW_BYTES):
        confidence.note(*read)
        assert confidence.holds
    confidence.note(WINDOW_BYTES, WINDOW_BYTES + PAGE)
    assert not confidence.holds


def test_a_trace_is_tried_before_it_is_trusted_and_unknown_faults_raise_doubt_that_known_ones_dispel() -> None:
    confidence = Confidence([(0, 64 * MIB)])
    trusted = [confidence.trust]
    for read in (*reads(512 * MIB, 512 * MIB + DOUBT_BYTES + READ_BYTES), (0, READ_BYTES)):
        confidence.note(*read)
        trusted.append(confidence.trust)
    assert trusted[-2:] == [Trust.IN_DOUBT, Trust.PROVEN]
    assert set(trusted[:-2]) == {Trust.UNTRIED}


def test_a_trace_that_fits_by_more_than_half_is_trusted() -> None:
    confidence = Confidence([(low, low + READ_BYTES) for low in range(0, 512 * MIB, 2 * READ_BYTES)])
    for read in reads(0, 512 * MIB):
        confidence.note(*read)
        assert confidence.holds
