"""Is a read a fault's, or the stream's? Decided per open handle, in bytes. Pure.

runsc submits its stream reads in strictly ascending order, at most 128 at a time of at most 256 KiB each (gVisor
pkg/sentry/state/stateio/pagesfile.go), and they reach us scrambled within that window. So when a stream read arrives,
at most 127 × 256 KiB below it have never been asked for; anything above that is a fault's read, which jumped the queue.

Memory that the application frees before it was loaded is never asked for, so holes stay below the stream for good. They
count only above a *floor*: when more reads in a row than a fault's window can have (128) continue one ascending run,
that run is the stream, and the floor rises to the run's start; and so on with what follows, so that a hole counts for a
few hundred reads at most.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass

from streamd.serve.order import Want
from streamd.snapshot.memory import PAGE_BYTES

SLOTS = 128
READ_BYTES = 256 << 10
# What may be missing below a stream read: every other slot, not yet arrived.
MISSING_BYTES_MAX = (SLOTS - 1) * READ_BYTES
# A fault's window is at most 32 MiB, 128 reads (gVisor mm/address_space.go:mapASLocked); more than this is the stream.
RUN_READS = 160
# Ranges that a set keeps apart. A load has a few hundred; whoever makes more loses only exactness, at the lowest ones.
RANGES_MAX = 8192
# How far from a run's highest byte a read may begin and still continue it: reads are held up by two windows at times.
RUN_REACH_BYTES = 2 * MISSING_BYTES_MAX
# Runs that are followed at the same time: the stream and a few faulting threads.
RUNS_MAX = 8


class Ranges:
    """A set of byte ranges, merged, ascending. Both lists have equal length; [starts[i], ends[i]) are disjoint."""

    __slots__ = ("_ends", "_starts")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, start: int, end: int) -> None:
        """Add [start, end); when the ranges become too many, the lower half is taken as one."""
        low = bisect_left(self._ends, start)
        high = bisect_right(self._starts, end)
        if low < high:
            start = min(start, self._starts[low])
            end = max(end, self._ends[high - 1])
        self._starts[low:high] = [start]
        self._ends[low:high] = [end]
        if len(self._starts) > RANGES_MAX:
            half = len(self._starts) // 2
            del self._starts[1:half]
            del self._ends[: half - 1]

    def missing_exceeds(self, floor: int, below: int, limit: int) -> bool:
        """Tell whether more than `limit` bytes of [floor, below) are not in the set.

        Walks the gaps downwards and stops as soon as it knows, so it takes at most as many steps as there are gaps in
        the last `limit` bytes that are missing.
        """
        missing = 0
        position = below
        index = bisect_left(self._starts, below) - 1
        while position > floor:
            end = max(floor, min(self._ends[index], position)) if index >= 0 else floor
            missing += position - end
            if missing > limit:
                return True
            position = self._starts[index] if index >= 0 else floor
            index -= 1
        return False

    def as_pairs(self) -> list[tuple[int, int]]:
        """Give the ranges, ascending."""
        return list(zip(self._starts, self._ends, strict=True))


@dataclass(slots=True)
class _Run:
    """Reads that continue one ascending run: each began within `RUN_REACH_BYTES` of the highest byte before it."""

    low: int
    high: int
    reads: int


class ReadClassifier:
    """What one handle has asked for, and so what its next read is."""

    __slots__ = ("_asked", "_floor", "_runs")

    def __init__(self) -> None:
        self._asked = Ranges()
        self._floor = 0
        self._runs: list[_Run] = []

    @property
    def floor(self) -> int:
        """The byte from which holes count."""
        return self._floor

    def classify(self, start: int, end: int) -> Want:
        """Class of a read of [start, end), which is then remembered as asked for."""
        # Reads of runsc begin and end at pages; others are rounded to them, so that no reader makes the set large.
        start -= start % PAGE_BYTES
        end += -end % PAGE_BYTES
        is_fault = self._asked.missing_exceeds(self._floor, start, MISSING_BYTES_MAX)
        self._asked.add(start, end)
        self._follow(start, end)
        return Want.FAULT if is_fault else Want.STREAM

    def _follow(self, start: int, end: int) -> None:
        near = [run for run in self._runs if abs(start - run.high) <= RUN_REACH_BYTES]
        if not near:
            self._runs.insert(0, _Run(low=start, high=end, reads=1))
            del self._runs[RUNS_MAX:]
            return
        # The longest: reads that were held up must not found runs of their own and share the count.
        run = max(near, key=lambda run: run.reads)
        self._runs.remove(run)
        self._runs.insert(0, run)
        run.low = min(run.low, start)
        run.high = max(run.high, end)
        run.reads += 1
        if run.reads > RUN_READS:
            # It is the stream. Begin again one window back, so that the floor follows it over every hole.
            self._floor = max(self._floor, run.low)
            run.low, run.reads = max(run.low, run.high - MISSING_BYTES_MAX), 0
