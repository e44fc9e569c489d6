"""What a served image counts, as `streamd status` shows it. Plain numbers, changed by the Trio thread only."""

from dataclasses import dataclass, field

from streamd.serve.order import Want


@dataclass(slots=True)
class Waits:
    """Reads of one class: how many, bytes, how many had to wait and for how long (seconds, sum and longest)."""

    reads: int = 0
    read_bytes: int = 0
    waited: int = 0
    wait_s: float = 0.0
    longest_s: float = 0.0

    def note(self, size: int, wait_s: float | None) -> None:
        """Count one read that is answered; `wait_s` is None when it didn't wait."""
        self.reads += 1
        self.read_bytes += size
        if wait_s is not None:
            self.waited += 1
            self.wait_s += wait_s
            self.longest_s = max(self.longest_s, wait_s)


@dataclass(slots=True)
class ServeStats:
    """Counters of one mount's life."""

    origin_bytes: int = 0  # what the store sent
    origin_requests: int = 0
    fetched_chunks: int = 0
    fetched_bytes: int = 0  # their bytes, decoded
    duplicate_chunks: int = 0  # came twice, since a fault did not wait for the fetch under way
    store_failures: dict[str, int] = field(default_factory=dict)
    cache_hits_verified: int = 0  # cached chunks of a former life that were right
    cache_corrupt: int = 0  # and that were not, and were fetched again
    cache_written_bytes: int = 0
    cache_dropped_chunks: int = 0  # left memory uncached: the disk fell behind, or the limit was reached
    cache_failure: str | None = None  # why caching ended
    failed_reads: int = 0
    classes: dict[Want, Waits] = field(default_factory=lambda: {want: Waits() for want in Want})
