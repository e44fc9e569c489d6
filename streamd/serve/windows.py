"""What a fault will turn out to wait for: the rest of its window. Pure.

A thread that touches a page waits for up to 32 MiB around it (gVisor pkg/sentry/mm/address_space.go:mapASLocked), and
gVisor asks for that piece by piece, in ascending order, each when a slot of its 128 comes free. Asked one at a time,
every piece would cost a round trip and a slot that some stream read has to give up first. So a fault's read also wants
what follows it, before it is asked for; its later reads then find their bytes here, and hand one and the same slot on
at the speed of memory.

How far the window goes can't be seen from here (address space and image are not in the same order), so the reach grows
while a run of fault reads goes on: what was fetched and not needed is bounded by what was needed.
"""

from dataclasses import dataclass

# The first reach: 10 ms of a link of 800 Mbit/s, about a round trip. Twice that, a fault for one page alone would hold
# up others noticeably.
FIRST_BYTES = 1 << 20
# The largest step, wanted when half of the step before it is left: keeps 3 Gbit/s busy over a round trip of 15 ms.
REACH_BYTES_MAX = 8 << 20
# As many faulting threads are followed at a time.
RUNS_MAX = 16


@dataclass(slots=True)
class _Run:
    """Fault reads up to `position` that continue one another; up to `planned` everything was wanted."""

    position: int
    planned: int
    reach: int


class FaultRuns:
    """The runs of fault reads of one image, the latest first."""

    def __init__(self) -> None:
        self._runs: list[_Run] = []

    def note(self, start: int, end: int) -> tuple[int, int] | None:
        """Note a fault's read of [start, end) and give what is to be wanted beyond it; None when that is on its way.

        The result begins where the previous result of the same run ended, so nothing is given twice.
        """
        run = next((run for run in self._runs if run.position - REACH_BYTES_MAX <= start <= run.planned), None)
        if run is None:
            self._runs.insert(0, _Run(position=end, planned=end + FIRST_BYTES, reach=2 * FIRST_BYTES))
            del self._runs[RUNS_MAX:]
            return end, end + FIRST_BYTES
        self._runs.remove(run)
        self._runs.insert(0, run)
        run.position = max(run.position, end)
        if run.planned - run.position >= run.reach // 2:
            return None
        beginning = max(run.planned, run.position)
        run.planned = beginning + run.reach
        run.reach = min(2 * run.reach, REACH_BYTES_MAX)
        return beginning, run.planned
