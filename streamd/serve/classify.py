"""Is a read a fault's, or the stream's? Decided per open handle, in bytes. Pure.

runsc submits its stream reads in strictly ascending order, at most 128 at a time of at most 256 KiB each (gVisor
pkg/sentry/state/stateio/pagesfile.go), and they reach us scrambled within that window. So when a stream read arrives,
at most 127 × 256 KiB below it have never been asked for; anything above that is a fault's read, which jumped the queue.

Memory that the application frees before it was loaded is never asked for, so holes stay below the stream for good. They
count only above a *floor*: when more reads in a row than a fault's window can have (128) continue one ascending run,
that run is the stream, and the floor rises to the run's start; and so on with what follows, so that a hole counts for a
few hundred reads at most. Windows next to each other make one long run, too, when a large array is walked through; but
between them the stream goes on below, and what is above the stream is not the stream. So a read that continues a lower
run lets the higher ones begin again.
"""

from dataclasses import dataclass

from streamd.serve.order import Want
from streamd.serve.ranges import Ranges
from streamd.snapshot.memory import PAGE_BYTES

SLOTS = 128
READ_BYTES = 256 << 10
# What may be missing below a stream read: every other slot, not yet arrived.
MISSING_BYTES_MAX = (SLOTS - 1) * READ_BYTES
# A fault's window is at most 32 MiB, 128 reads (gVisor mm/address_space.go:mapASLocked); more than this is the stream.
RUN_READS = 160
# How far from a run's highest byte a read may begin and still continue it: reads are held up by two windows at times.
RUN_REACH_BYTES = 2 * MISSING_BYTES_MAX
# A handle that is taken over: as many reads as may have waited.
SETTLING_READS = 128
# Runs that are followed at the same time: the stream and a few faulting threads.
RUNS_MAX = 8


@dataclass(slots=True)
class _Run:
    """Reads that continue one ascending run: each began within `RUN_REACH_BYTES` of the highest byte before it."""

    low: int
    high: int
    reads: int = 0


class ReadClassifier:
    """What one handle has asked for, and so what its next read is."""

    __slots__ = ("_asked", "_floor", "_reads_to_settle", "_runs")

    def __init__(self, *, is_continued: bool = False) -> None:
        """`is_continued`: what was asked for before is not known (another process has served the handle)."""
        self._asked = Ranges()
        self._floor = 0
        self._runs: list[_Run] = []
        self._reads_to_settle = SETTLING_READS if is_continued else 0

    @property
    def floor(self) -> int:
        """The byte from which holes count."""
        return self._floor

    def classify(self, start: int, end: int) -> Want:
        """Class of a read of [start, end), which is then remembered as asked for."""
        # Reads of runsc begin and end at pages; others are rounded to them, so that no reader makes the set large.
        start -= start % PAGE_BYTES
        end += -end % PAGE_BYTES
        if self._reads_to_settle:
            # The first reads are those that waited: the lowest of them is where the stream is, near enough.
            self._floor = start if self._reads_to_settle == SETTLING_READS else min(self._floor, start)
            self._reads_to_settle -= 1
        is_fault = self._asked.missing_bytes(self._floor, start) > MISSING_BYTES_MAX
        self._asked.add(start, end)
        self._follow(start, end)
        return Want.FAULT if is_fault else Want.STREAM

    def _follow(self, start: int, end: int) -> None:
        near = [run for run in self._runs if abs(start - run.high) <= RUN_REACH_BYTES]
        if near:
            # The longest: reads that were held up must not found runs of their own and share the count.
            run = max(near, key=lambda run: run.reads)
            self._runs.remove(run)
        else:
            run = _Run(low=start, high=end)
        self._runs.insert(0, run)
        del self._runs[RUNS_MAX:]
        run.low = min(run.low, start)
        run.high = max(run.high, end)
        run.reads += 1
        for other in self._runs:
            if other.low > run.high:
                other.low, other.reads = other.high, 0
        if run.reads > RUN_READS:
            # It is the stream. Begin again one window back, so that the floor follows it over every hole.
            self._floor = max(self._floor, run.low)
            run.low, run.reads = max(run.low, run.high - MISSING_BYTES_MAX), 0
