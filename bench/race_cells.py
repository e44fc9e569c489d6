"""What is raced over which link, and what one restore gave (pure).

A *cell* is an image, a request and a link; a *run* is one contestant's restore in it. Times of a run are seconds from
the start of runsc; `lead_s` is how long before that the contestant began (to mount, or to download), so that
`lead_s + first_s` is the time that somebody waited who had nothing before.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from bench.race_workload import REGION_MIB

MBIT = 10**6
# What F is measured at, whatever the rate of the cell (as the goal defines it).
REFERENCE_BIT_PER_S = 800 * MBIT
LATENCY_S = 0.015
# How long before runsc the image of a learned restore is asked for (as the goal defines it).
LEARNED_LEAD_S = 1.0

EVERY_ROUND = ("local", "gvisor-gcs", "streamd-first", "streamd-learned", "streamd-warm")
# In cells that name them.
SLOW = ("copy", "rclone", "gcsfuse")
CONTESTANTS = (*EVERY_ROUND, "streamd-misled", *SLOW)
TITLES: Mapping[str, str] = {
    "local": "local directory, page cache hot",
    "gvisor-gcs": "gVisor's GCS reader",
    "streamd-first": "streamd, first restore ever",
    "streamd-learned": "streamd, order learned",
    "streamd-warm": "streamd, all resident",
    "streamd-misled": "streamd, a forged order",
    "copy": "download (curl), then restore",
    "rclone": "rclone mount, full cache",
    "gcsfuse": "gcsfuse, defaults",
}


@dataclass(frozen=True, slots=True)
class Heap:
    """What is saved: `race_workload.py`'s KIND and its size; `name` is the snapshot's id."""

    name: str
    kind: str
    mib: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One race. `extra`: who takes part beside those of every cell; `once`: and who in the first round only."""

    name: str
    heap: Heap
    request: str
    bit_per_s: int
    rounds: int
    once: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()

    @property
    def link_bytes_per_s(self) -> float:
        """B: what the link carries, headers counted."""
        return self.bit_per_s / 8


PLAIN = Heap("plain", "random", 776)
LARGE = Heap("large", "random", 3104)
HALF = Heap("half", "half", 776)

# Cells of one heap stand together: one image is in the store at a time.
CELLS = (
    Cell(
        name="region",
        heap=PLAIN,
        request="region",
        bit_per_s=800 * MBIT,
        rounds=5,
        once=SLOW,
        extra=("streamd-misled", "copy"),
    ),
    Cell(name="fast", heap=PLAIN, request="region", bit_per_s=2000 * MBIT, rounds=3),
    Cell(name="scattered", heap=PLAIN, request="pages 24", bit_per_s=800 * MBIT, rounds=3),
    Cell(name="compressible", heap=HALF, request="region", bit_per_s=800 * MBIT, rounds=3),
    Cell(name="large", heap=LARGE, request="region", bit_per_s=800 * MBIT, rounds=3, once=SLOW),
)


def shortened(cell: Cell) -> Cell:
    """Give a cell for a look: one round, a third of the heap."""
    heap = replace(cell.heap, mib=max(cell.heap.mib // 3, 2 * REGION_MIB))
    return replace(cell, heap=heap, rounds=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """gVisor's own line about a load (`agent.runtime.loading`), what the tables need of it."""

    took_s: float
    waiters: int
    stopped_s: float
    awaited_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What a streamd daemon says of an image once all is loaded.

    `cpu_s`: of its worker, and of supervisor and spawner since it was asked for. `bytes`: what runsc read.
    """

    bytes: int
    cpu_s: float
    release_gap_p50_s: float | None
    release_gap_p99_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One restore. `first_s`: the answer to the request; `loaded_s`: `runsc wait --restore` returned.

    `wire_bytes`: what the store sent from the contestant's beginning to `loaded_s`, headers counted. `link_use`: that,
    from the first MiB on, as a share of what the link could have carried until `loaded_s`; None when little came.
    `download_cpu_s`, `download_bytes`: of the program that fetched a copy. `memory_right`: the hash of the whole heap
    after loading, where it was taken.
    """

    cell: str
    contestant: str
    round: int
    lead_s: float
    first_s: float
    loaded_s: float
    wire_bytes: int
    link_use: float | None
    answer_right: bool
    memory_right: bool | None
    loading: Loading | None
    served: Served | None = None
    download_cpu_s: float | None = None
    download_bytes: int | None = None
