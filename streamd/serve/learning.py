"""What one open handle of pages.img teaches about the order in which its memory is needed. Pure.

A sample is made of reads by their *class*, not by whether they waited: in a restore whose hot memory was there before
it began, no fault waits, and it must teach the same as the first one.

In hindsight a class can be checked. A read is called a fault when more is missing below it than the stream can have in
flight (`classify.py`). If more than that of it was asked for later, the stream was still to come, and it was a fault.
If not, it was memory that the application has freed, over which the stream itself had jumped; or the load was ended
before anybody could tell. Such reads teach nothing.
"""

import itertools
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from streamd.serve.classify import MISSING_BYTES_MAX
from streamd.serve.ranges import Ranges
from streamd.snapshot.memory import PAGE_BYTES
from streamd.snapshot.trace import Sample

# Fault reads of one handle that are kept: 8 GiB of whole reads, sixteen times what is ever fetched ahead
# (`trace.HOT_BYTES`), in 4 MiB. What comes later is not learned.
READS_MAX = 32768
# A fault's window (gVisor mm/address_space.go:mapASLocked): what is asked for below its first read may still be of it.
WINDOW_BYTES = 32 << 20
# A range goes on with its neighbour above while not more than this was asked for elsewhere in between: a window each of
# a few faulting threads. Otherwise the neighbour was needed later, and has a place of its own.
APART_BYTES = 4 * WINDOW_BYTES


class Sampler:
    """Collects a handle's reads; offsets are those of its file. State of whoever serves the handle; nothing waits."""

    __slots__ = ("_asked", "_faults", "_is_taken", "_passed", "_reads")

    def __init__(self) -> None:
        self._reads = 0
        self._asked = Ranges()
        self._faults: list[_Fault] = []
        self._passed: list[tuple[int, int]] = []  # number of a read, highest byte that the stream had come to; ascend
        self._is_taken = False

    def note(self, start: int, end: int, *, is_fault: bool) -> None:
        """Take note of every read of the handle, of what is resident, too, in the order of their classification."""
        self._reads += 1
        start -= start % PAGE_BYTES
        end += -end % PAGE_BYTES
        if not is_fault:
            self._note_passed(end)
        elif len(self._faults) < READS_MAX:
            self._faults.append(_Fault(self._reads, start, end, self._asked.missing_bytes(0, start)))
        self._asked.add(start, end)

    def _note_passed(self, end: int) -> None:
        passed = self._passed
        if passed and end <= passed[-1][1]:
            return
        # Between two faults only the last counts, so there is at most one more of these than faults.
        if passed and (not self._faults or passed[-1][0] > self._faults[-1].number):
            passed.pop()
        passed.append((self._reads, end))

    def take(self) -> Sample | None:
        """Give what the handle's life has taught, once; None when there was no fault: then it says nothing."""
        faults = [fault for fault in self._faults if self._was_fault(fault)]
        if self._is_taken or not faults:
            return None
        self._is_taken = True
        touches = _first_touches(faults)
        numbers = [number for number, _, _ in touches]
        waited_bytes = [0, *itertools.accumulate(end - start for _, start, end in touches)]
        passed = tuple((byte, waited_bytes[bisect_left(numbers, number)]) for number, byte in self._passed)
        return Sample(waited=_in_windows(touches), passed=passed)

    def _was_fault(self, fault: "_Fault") -> bool:
        """Tell in hindsight."""
        return fault.missing_bytes - self._asked.missing_bytes(0, fault.start) > MISSING_BYTES_MAX


@dataclass(frozen=True, slots=True)
class _Fault:
    """Read `number` of the handle, which was called a fault; `missing_bytes` below it were not asked for then."""

    number: int
    start: int
    end: int
    missing_bytes: int


def _first_touches(faults: Iterable[_Fault]) -> list[tuple[int, int, int]]:
    """Cut from each read what earlier ones have asked for: read number, start, end."""
    asked = Ranges()
    found: list[tuple[int, int, int]] = []
    for fault in faults:
        found += ((fault.number, low, high) for low, high in asked.missing(fault.start, fault.end))
        asked.add(fault.start, fault.end)
    return found


@dataclass(frozen=True, slots=True)
class _Window:
    """Bytes [start, end) that belong together; `begun`, `grown`: bytes asked for at all before it, and after it."""

    start: int
    end: int
    begun: int
    grown: int


def _in_windows(touches: Iterable[tuple[int, int, int]]) -> tuple[tuple[int, int], ...]:
    """Put the scrambled reads of each window together again, in the order in which the windows were begun."""
    by_start: dict[int, _Window] = {}
    by_end: dict[int, _Window] = {}
    asked_bytes = 0
    for _, start, end in touches:
        window = _Window(start, end, asked_bytes, asked_bytes + end - start)
        asked_bytes = window.grown
        below = by_end.get(start)
        if below is not None and _is_one(below, window):
            del by_start[below.start], by_end[below.end]
            window = _joined(below, window)
        above = by_start.get(end)
        if above is not None and _is_one(window, above):
            del by_start[above.start], by_end[above.end]
            window = _joined(window, above)
        by_start[window.start] = by_end[window.end] = window
    return tuple((window.start, window.end) for window in sorted(by_start.values(), key=lambda window: window.begun))


def _is_one(low: _Window, high: _Window) -> bool:
    """Tell whether neighbours are fetched as one: the upper one goes on with the lower one, or both are one window."""
    if abs(high.grown - low.grown) > APART_BYTES:
        return False
    return low.begun < high.begun or high.end - low.start <= WINDOW_BYTES


def _joined(low: _Window, high: _Window) -> _Window:
    return _Window(low.start, high.end, min(low.begun, high.begun), max(low.grown, high.grown))


# So much of what faults ask for may be unknown to the trace before the stream goes first: a tenth of a second of 800
# Mbit/s. A whole window before that cost a restore that a forged order misled an eighth of its first request.
DOUBT_BYTES = 8 << 20


class Trust(Enum):
    """How far a trace may be followed while a sandbox reads."""

    UNTRIED = "untried"  # no fault has asked for anything of it yet: in turns with what the stream waits for
    PROVEN = "proven"  # before what the stream waits for
    IN_DOUBT = "in-doubt"  # after it


class Confidence:
    """Whether a trace fits the restore that goes on: is what faults ask for in what is fetched by it?

    A trace of another workload, or a forged one, costs a restore: runsc's slots wait while the wrong bytes are fetched,
    and a fault's read needs a free slot. So a trace has the link for itself only until somebody reads, and then when a
    fault has asked for something of it; an honest one is mostly here by then. (With the link for itself until there was
    doubt, a forged one cost 8 to 12 % of a restore's first request.) The stream goes first as soon as there is doubt,
    which a single fault that the order doesn't know may raise and the next one dispel; it is left when it doesn't hold.
    """

    __slots__ = ("_hot", "_missed_bytes", "_served_bytes")

    def __init__(self, hot: Iterable[tuple[int, int]]) -> None:
        """Start with confidence in these ranges, which are what is fetched."""
        self._hot = Ranges()
        for start, end in hot:
            self._hot.add(start, end)
        self._served_bytes = 0
        self._missed_bytes = 0

    def note(self, start: int, end: int) -> None:
        """Take note of a fault's read."""
        missed_bytes = sum(high - low for low, high in self._hot.missing(start, end))
        self._missed_bytes += missed_bytes
        self._served_bytes += end - start - missed_bytes

    @property
    def trust(self) -> Trust:
        """How far it may be followed now."""
        if self._missed_bytes > self._served_bytes + DOUBT_BYTES:
            return Trust.IN_DOUBT
        return Trust.PROVEN if self._served_bytes else Trust.UNTRIED

    @property
    def holds(self) -> bool:
        """Whether it is still worth while to fetch by the trace at all."""
        return self._missed_bytes <= self._served_bytes + WINDOW_BYTES
