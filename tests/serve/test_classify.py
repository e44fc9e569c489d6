"""Reads of a model of gVisor's loader are told apart as the loader means them."""

import itertools
import random
from collections import deque

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from streamd.serve.classify import MISSING_BYTES_MAX, RANGES_MAX, READ_BYTES, RUN_READS, SLOTS, Ranges, ReadClassifier
from streamd.serve.order import Want

PAGE = 4096
MIB = 1 << 20


class Loader:
    """runsc's loader: 128 slots, filled with stream reads in ascending order; faults are put first when one is free.

    Reads that are in flight arrive in an order that `rng` draws: with `fair`, mostly the oldest ones, as threads get
    scheduled; without, any, however long it was held up. Freed ranges are not read.
    """

    def __init__(self, size: int, rng: random.Random, *, fair: bool = False) -> None:
        self.fair = fair
        self.size = size
        self.rng = rng
        self.position = 0
        self.faults: deque[tuple[int, int]] = deque()
        self.flying: list[tuple[int, int, bool]] = []
        self.done = bytearray(size // PAGE)

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
        limit = min(self.position + READ_BYTES, self.size)
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


ranges = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=30)


@given(ranges, st.integers(0, 80), st.integers(0, 80), st.integers(0, 80))
@example([(0, 5), (5, 5)], 0, 10, 0)
def test_missing_bytes_are_counted_as_a_set_of_bytes_counts_them(
    added: list[tuple[int, int]], floor: int, below: int, limit: int
) -> None:
    subject, model = Ranges(), set[int]()
    for start, size in added:
        subject.add(start, start + size)
        model |= set(range(start, start + size))
    missing = sum(1 for byte in range(floor, below) if byte not in model)
    assert subject.missing_exceeds(floor, below, limit) == (missing > limit)
    assert {b for s, e in subject.as_pairs() for b in range(s, e)} == model
    pairs = subject.as_pairs()
    assert all(end < start for (_, end), (start, _) in itertools.pairwise(pairs))


def test_no_reader_can_make_the_set_of_ranges_large() -> None:
    ranges = Ranges()
    for index in range(3 * RANGES_MAX):
        ranges.add(2 * index * PAGE, (2 * index + 1) * PAGE)
        assert len(ranges._starts) == len(ranges._ends) <= RANGES_MAX
    # What was given up is exactness at the low end; the latest are still told apart.
    assert ranges.as_pairs()[-1] == ((6 * RANGES_MAX - 2) * PAGE, (6 * RANGES_MAX - 1) * PAGE)
    assert ranges.as_pairs()[0][0] == 0
