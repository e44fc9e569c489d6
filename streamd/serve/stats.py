"""What a served image counts, as `streamd status` shows it. Plain numbers, changed by the Trio thread only."""

from bisect import bisect_right
from dataclasses import dataclass, field

from streamd.serve.handles import ReadFailed
from streamd.serve.order import Want


class Durations:
    """Times as a histogram whose steps are 10 % apart, from 10 µs to 5 minutes."""

    # Where each step ends; longer ones are counted with the last.
    _ENDS_S = tuple(1e-5 * 1.1**step for step in range(1, 181))

    def __init__(self) -> None:
        self._counts = [0] * (len(self._ENDS_S) + 1)

    def note(self, duration_s: float) -> None:
        """Count one."""
        self._counts[bisect_right(self._ENDS_S, duration_s)] += 1

    def at_least(self, duration_s: float) -> int:
        """Count those of so much or more, give or take a step."""
        return sum(self._counts[bisect_right(self._ENDS_S, duration_s) :])

    def quantile_s(self, share: float) -> float:
        """Give the time below which that share of them lie, up to 10 % too large; 0 when there are none."""
        left = share * sum(self._counts)
        for step, count in enumerate(self._counts):
            left -= count
            if count and left <= 0:
                return self._ENDS_S[min(step, len(self._ENDS_S) - 1)]
        return 0.0


@dataclass(slots=True)
class Waits:
    """Reads of one class: how many, bytes, how many had to wait and for how long (seconds: sum, longest, all)."""

    reads: int = 0
    read_bytes: int = 0
    waited: int = 0
    wait_s: float = 0.0
    longest_s: float = 0.0
    durations: Durations = field(default_factory=Durations)

    def note(self, size: int, wait_s: float | None) -> None:
        """Count one read that is answered, by bytes or an error; `wait_s` is None when it didn't wait."""
        self.reads += 1
        self.read_bytes += size
        if wait_s is not None:
            self.waited += 1
            self.wait_s += wait_s
            self.longest_s = max(self.longest_s, wait_s)
            self.durations.note(wait_s)


class ReleaseGaps(Durations):
    """Times between two chunk releases. One counts while something is under way from the store without a break."""

    def __init__(self) -> None:
        super().__init__()
        self._last_s: float | None = None

    def released(self, at_s: float) -> None:
        """Note a release."""
        if self._last_s is not None:
            self.note(at_s - self._last_s)
        self._last_s = at_s

    def pause(self) -> None:
        """Note that nothing is under way any more."""
        self._last_s = None


@dataclass(slots=True)
class Failures:
    """Reads that failed by one kind of failure, and the last of these."""

    last: ReadFailed
    reads: int = 0


@dataclass(slots=True)
class ServeStats:
    """Counters of one mount's life."""

    origin_bytes: int = 0  # what the store sent
    origin_requests: int = 0
    fetched_chunks: int = 0
    fetched_bytes: int = 0  # their bytes, decoded
    duplicate_chunks: int = 0  # came twice, since a fault did not wait for the fetch under way
    second_tries: int = 0  # GETs that were asked for again, since they stood still
    store_failures: dict[str, int] = field(default_factory=dict)
    cache_hits_verified: int = 0  # cached chunks of a former life that were right
    cache_corrupt: int = 0  # and that were not, and were fetched again
    cache_written_bytes: int = 0
    cache_dropped_chunks: int = 0  # left memory uncached: the disk fell behind, or the limit was reached
    cache_failure: str | None = None  # why caching ended
    failures: dict[str, Failures] = field(default_factory=dict)  # reads that were told EIO, by kind
    release_gaps: ReleaseGaps = field(default_factory=ReleaseGaps)
    classes: dict[Want, Waits] = field(default_factory=lambda: {want: Waits() for want in Want})

    @property
    def failed_reads(self) -> int:
        """How many reads were told EIO."""
        return sum(failures.reads for failures in self.failures.values())

    def failed(self, failure: ReadFailed) -> None:
        """Count a read that failed."""
        failures = self.failures.setdefault(failure.kind, Failures(failure))
        failures.last = failure
        failures.reads += 1
