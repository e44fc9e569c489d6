"""Reads of a model of gVisor's loader are told apart as the loader means them."""

import itertools
import random
import sys
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamd.serve import classify, ranges
from streamd.serve.classify import MISSING_BYTES_MAX, READ_BYTES, RUN_READS, SLOTS, ReadClassifier
from streamd.serve.handles import Handle, Opener
from streamd.serve.order import Want
from streamd.serve.ranges import Ranges

PAGE = 4096
MIB = 1 << 20


class Loader:
    """runsc's loader: 128 slots, filled with stream reads in ascending order; faults are put first when one is free.

    Reads that are in flight arrive in an order that `rng` draws: with `fair`, mostly the oldest ones, as threads get
    scheduled; without, any, however long it was held up. Freed ranges are not read. No read crosses one of the `cuts`,
    where a range of the sandbox's memory ends: so reads are small there and, from there on, not aligned.
    """

    def __init__(self, size: int, rng: random.Random, *, fair: bool = False, cuts: Sequence[int] = ()) -> None:
        self.fair = fair
        self.size = size
        self.rng = rng
        self.position = 0
        self.faults: deque[tuple[int, int]] = deque()
        self.flying: list[tuple[int, int, bool]] = []
        self.done = bytearray(size // PAGE)
        self.cuts = sorted({*cuts, size})

    def free(self, start: int, end: int) -> None:
        self._mark(start, end)

    def _mark(self, start: int, end: int) -> None:
        self.done[start // PAGE : end // PAGE] = b"\1" * ((end - start) // PAGE)

    def _submit(self) -> bool:
        while self.faults:
            start, end = self.faults.popleft()
            if not any(self.done[start // PAGE : end // PAGE]):
                self._mark(start, end)
                self.flying.append((start, end, True))
                return True
        page = self.done.find(0, self.position // PAGE)
        if page < 0:
            return False
        self.position = page * PAGE
        limit = min(self.position + READ_BYTES, self.cuts[bisect_right(self.cuts, self.position)])
        taken = self.done.find(1, page, limit // PAGE)
        end = limit if taken < 0 else taken * PAGE
        self._mark(self.position, end)
        self.flying.append((self.position, end, False))
        self.position = end
        return True

    def next_read(self) -> tuple[int, int, bool] | None:
        while len(self.flying) < SLOTS and self._submit():
            pass
        if not self.flying:
            return None
        index = self.rng.randrange(len(self.flying))
        if self.fair and self.rng.random() < 0.98:
            index = min(index, int(self.rng.expovariate(1 / 16)))
        return self.flying.pop(index)

    def fault(self, start: int, window: int) -> None:
        self.faults.extend(
            (s, min(s + READ_BYTES, self.size)) for s in range(start, min(start + window, self.size), READ_BYTES)
        )


@given(seed=st.integers(0, 2**32), faults=st.lists(st.tuples(st.integers(0, 400), st.floats(0, 1)), max_size=6))
@settings(max_examples=30, deadline=None)
def test_no_stream_read_is_ever_called_a_fault(seed: int, faults: list[tuple[int, float]]) -> None:
    rng = random.Random(seed)
    loader = Loader(200 * MIB, rng)
    classifier = ReadClassifier()
    count = 0
    due = sorted(faults)
    while (read := loader.next_read()) is not None:
        start, end, is_fault = read
        want = classifier.classify(start, end)
        if not is_fault:
            assert want == Want.STREAM, f"stream read at {start / MIB} MiB"
        count += 1
        while due and due[0][0] <= count:
            loader.fault(int(due.pop(0)[1] * loader.size) // PAGE * PAGE, 32 * MIB)


@given(seed=st.integers(0, 2**32), at=st.floats(0.4, 1), count=st.integers(0, 200))
@settings(max_examples=30, deadline=None)
def test_a_fault_beyond_the_window_is_called_one(seed: int, at: float, count: int) -> None:
    rng = random.Random(seed)
    loader = Loader(400 * MIB, rng)
    classifier = ReadClassifier()
    for _ in range(count):
        read = loader.next_read()
        assert read is not None
        classifier.classify(*read[:2])
    start = int(at * (loader.size - MIB)) // PAGE * PAGE
    beyond = start - loader.position > 2 * MISSING_BYTES_MAX
    want = classifier.classify(start, start + PAGE)
    if beyond:
        assert want == Want.FAULT


@given(seed=st.integers(0, 2**32), freed_from=st.integers(30, 90), freed_mib=st.integers(40, 200))
@settings(max_examples=30, deadline=None)
def test_the_stream_is_found_again_above_memory_that_was_freed(seed: int, freed_from: int, freed_mib: int) -> None:
    loader = Loader(400 * MIB, random.Random(seed), fair=True)
    classifier = ReadClassifier()
    freed = (freed_from * MIB, (freed_from + freed_mib) * MIB)
    wrong, is_freed = 0, False
    while (read := loader.next_read()) is not None:
        start, end, _ = read
        if start >= 20 * MIB and not is_freed:
            loader.free(*freed)
            is_freed = True
        if classifier.classify(start, end) == Want.FAULT:
            wrong += 1
    # Until the run is longer than any fault's window can be, it looks like faults; not much longer.
    assert wrong <= 3 * RUN_READS + SLOTS


@pytest.mark.parametrize("chunk_of_reads", [4 * 1024, 64 * 1024, 256 * 1024])
def test_a_run_of_128_reads_that_jumped_the_queue_stays_a_fault(chunk_of_reads: int) -> None:
    classifier = ReadClassifier()
    classifier.classify(0, READ_BYTES)
    base = 300 * MIB
    for index in range(SLOTS):
        start = base + index * chunk_of_reads
        assert classifier.classify(start, start + chunk_of_reads) == Want.FAULT


pages_of_300_mib = st.integers(0, 300 * MIB // PAGE - 1)


@given(
    seed=st.integers(0, 2**32),
    cuts=st.lists(pages_of_300_mib, max_size=40),
    frees=st.lists(st.tuples(st.integers(0, 1200), pages_of_300_mib, st.integers(1, 20000)), max_size=5),
    faults=st.lists(st.tuples(st.integers(0, 1200), pages_of_300_mib), max_size=5),
)
@settings(max_examples=30, deadline=None)
def test_in_hindsight_no_fault_was_missed_and_freed_memory_misled_for_a_few_hundred_reads_only(
    seed: int, cuts: list[int], frees: list[tuple[int, int, int]], faults: list[tuple[int, int]]
) -> None:
    loader = Loader(300 * MIB, random.Random(seed), fair=True, cuts=[page * PAGE for page in cuts])
    classifier = ReadClassifier()
    to_free, to_fault = sorted(frees, reverse=True), sorted(faults, reverse=True)
    reads: list[tuple[int, int, Want]] = []
    while (read := loader.next_read()) is not None:
        start, end, _ = read
        reads.append((start, end, classifier.classify(start, end)))
        while to_free and to_free[-1][0] <= len(reads):
            _, page, count = to_free.pop()
            loader.free(page * PAGE, min((page + count) * PAGE, loader.size))
        while to_fault and to_fault[-1][0] <= len(reads):
            loader.fault(to_fault.pop()[1] * PAGE, 32 * MIB)
    # Which of them jumped the queue: more than a window below is asked for only later. Freed memory never is.
    later = Ranges()
    misled = 0
    for start, end, want in reversed(reads):
        jumped = start - later.missing_bytes(0, start) > MISSING_BYTES_MAX
        later.add(start, end)
        assert not (jumped and want == Want.STREAM), f"fault at {start / MIB} MiB"
        misled += not jumped and want == Want.FAULT
    assert misled <= len(frees) * (2 * RUN_READS + SLOTS)


@given(seed=st.integers(0, 2**32), opened_at=st.lists(st.integers(0, 300), max_size=3))
@settings(max_examples=15, deadline=None)
def test_each_handle_is_judged_by_what_it_has_asked_for_itself(seed: int, opened_at: list[int]) -> None:
    # Several loaders of one image, one begun while others are under way, as after a sandbox that was restored again.
    rng = random.Random(seed)
    begin = sorted([0, *opened_at], reverse=True)
    loaders: list[tuple[Loader, Handle]] = []
    for step in itertools.count():
        while begin and begin[-1] <= step:
            begin.pop()
            handle = Handle(len(loaders), "pages.img", Opener(1, "runsc", None), 0.0)
            loaders.append((Loader(64 * MIB, rng), handle))
        loader, handle = rng.choice(loaders)
        read = loader.next_read()
        if read is None:
            break
        assert handle.classifier.classify(*read[:2]) == Want.STREAM


def test_a_reader_that_begins_in_the_middle_is_the_stream_after_one_run() -> None:
    classifier = ReadClassifier()
    wants = [classifier.classify(start, start + READ_BYTES) for start in range(200 * MIB, 300 * MIB, READ_BYTES)]
    assert wants == [Want.FAULT] * (RUN_READS + 1) + [Want.STREAM] * (len(wants) - RUN_READS - 1)


@pytest.mark.parametrize("read_bytes", [1, 1000, PAGE, 100_000])
def test_small_and_unaligned_reads_in_order_are_the_stream(read_bytes: int) -> None:
    classifier = ReadClassifier()
    for start in range(0, 2000 * read_bytes, read_bytes):
        assert classifier.classify(start + 1, start + 1 + read_bytes) == Want.STREAM


def test_a_read_costs_steps_by_the_logarithm_of_what_was_asked_for_before() -> None:
    # Every other page is asked for, as an application leaves it that freed the rest: no range joins another one.
    classifier = ReadClassifier()
    taken = {}
    for count in range(8001):
        start = 2 * count * PAGE
        if count in (500, 8000):
            taken[count] = steps(lambda: classifier.classify(start, start + PAGE))  # noqa: B023 - called at once
        else:
            classifier.classify(start, start + PAGE)
    assert taken[8000] <= 2 * taken[500]


def steps(call: Callable[[], object]) -> int:
    """Count the lines of `classify` and `ranges` that a call runs: time, without a clock."""
    count = 0
    files = {classify.__file__, ranges.__file__}

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        if frame.f_code.co_filename not in files:
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count
