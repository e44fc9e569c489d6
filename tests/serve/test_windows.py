"""What a fault will wait for is wanted before it is asked for, once, and not far beyond what it needs."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from streamd.serve.windows import FIRST_BYTES, REACH_BYTES_MAX, FaultRuns

KIB, MIB = 1 << 10, 1 << 20
READ = 256 * KIB


def walk(runs: FaultRuns, start: int, reads: int) -> list[tuple[int, int]]:
    """A fault's reads, one after another; what each made wanted."""
    ahead = (runs.note(start + step * READ, start + (step + 1) * READ) for step in range(reads))
    return [found for found in ahead if found is not None]


def test_every_read_of_a_window_but_the_first_is_wanted_before_it_comes() -> None:
    runs = FaultRuns()
    wanted_to = 0
    for step in range(128):
        start = 100 * MIB + step * READ
        assert step == 0 or start + READ <= wanted_to
        ahead = runs.note(start, start + READ)
        if ahead is not None:
            wanted_to = ahead[1]


def test_a_lone_read_wants_little() -> None:
    assert FaultRuns().note(64 * MIB, 64 * MIB + READ) == (64 * MIB + READ, 64 * MIB + READ + FIRST_BYTES)


def test_reads_that_come_in_another_order_belong_to_the_same_run() -> None:
    runs = FaultRuns()
    assert runs.note(64 * MIB, 64 * MIB + READ) is not None
    assert runs.note(64 * MIB + 3 * READ, 64 * MIB + 4 * READ) is not None  # near the end of what was wanted
    assert runs.note(64 * MIB + READ, 64 * MIB + 2 * READ) is None
    assert runs.note(64 * MIB + 2 * READ, 64 * MIB + 3 * READ) is None


def test_two_threads_have_runs_of_their_own() -> None:
    runs = FaultRuns()
    for step in range(40):
        for start in (10 * MIB, 500 * MIB):
            runs.note(start + step * READ, start + (step + 1) * READ)
    ahead = walk(runs, 10 * MIB + 40 * READ, 40)
    assert ahead
    assert all(10 * MIB < start < end <= 10 * MIB + 80 * READ + 2 * REACH_BYTES_MAX for start, end in ahead)


@given(reads=st.integers(1, 300))
def test_what_is_wanted_in_vain_is_bounded_by_what_was_read(reads: int) -> None:
    ahead = walk(FaultRuns(), 64 * MIB, reads)
    wanted_bytes = sum(end - start for start, end in ahead)
    assert wanted_bytes <= 4 * reads * READ + 2 * FIRST_BYTES
    assert wanted_bytes <= reads * READ + 2 * REACH_BYTES_MAX


@given(starts=st.lists(st.integers(0, 1 << 40), max_size=300))
def test_nothing_is_wanted_twice_within_a_run_and_memory_is_bounded(starts: list[int]) -> None:
    runs = FaultRuns()
    for start in starts:
        runs.note(start, start + READ)
    ahead = walk(runs, 1 << 41, 200)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(ahead))
