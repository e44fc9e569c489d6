"""What the supervisor knows of an image, and what follows from it (pure: times come in as numbers).

An image is one snapshot of one tenant on this node: one mount, one worker, one fetch, however many pods restore it.
"""

import hashlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from streamd.config import Prefetch
from streamd.daemon.api.models import (
    CredentialsKind,
    ErrorFacts,
    FaultWaits,
    ImageRequest,
    ImageState,
    ImageStateName,
    Lease,
    Opener,
    Progress,
    ReleaseGaps,
    StoreAway,
)
from streamd.daemon.shares import Demand
from streamd.daemon.troubles import FailedReads, Failures, store_away

# Workers that die more often than this are not replaced: the reads fail, and somebody looks at it. One that dies at
# once, over a request that is given out again each time, gets there in some three seconds.
DEATHS_MAX = 20
DEATHS_WITHIN_S = 30.0
_KNOWN_OPENERS_MAX = 64

LIVE = (ImageStateName.PREPARING, ImageStateName.SERVING, ImageStateName.WARM, ImageStateName.DRAINING)


def image_id(snapshot_url: str, tenant: str) -> str:
    """Name the image of a snapshot and a tenant (32 hex digits)."""
    return hashlib.sha256(f"{tenant}\0{snapshot_url}".encode()).hexdigest()[:32]


def credentials_of(request: ImageRequest) -> Mapping[str, Any] | None:
    """Give what a request wants to be identified by, as `parse_credentials` takes it."""
    return None if request.credentials is None else msgspec.to_builtins(request.credentials)


class Deaths:
    """When workers of one image died; says when it is enough."""

    def __init__(self) -> None:
        self._at_s: deque[float] = deque(maxlen=DEATHS_MAX + 1)

    def note(self, now_s: float) -> bool:
        """Note one; true when the next worker may be started."""
        self._at_s.append(now_s)
        return len(self._at_s) <= DEATHS_MAX or now_s - self._at_s[0] > DEATHS_WITHIN_S


@dataclass(slots=True, eq=False)
class Image:
    """One image of this node. Totals are sums over its workers: what dead ones had counted is in `_before`."""

    id: str
    snapshot_url: str
    tenant: str
    prefetch: Prefetch
    credentials: Mapping[str, Any] | None
    mountpoint: str
    created_s: float
    state: ImageStateName = ImageStateName.PREPARING
    is_warm: bool = False
    restarts: int = 0
    worker_pid: int | None = None
    worker_started_s: float | None = None
    leases: dict[str, Lease] = field(default_factory=dict)
    openers: list[Opener] = field(default_factory=list)
    last_error: ErrorFacts | None = None
    store_away: StoreAway | None = None
    deaths: Deaths = field(default_factory=Deaths)
    ends_when_unused: bool = False
    idle_since_s: float | None = None
    # Its mount is being taken away. Who asks for it now gets the next one (`wanted`), which begins once this is gone.
    is_ending: bool = False
    is_unmounted: bool = False  # the kernel has agreed
    tables_bytes: int = 0  # of its worker's memory, beside the cap; 0 until that has told
    has_served: bool = False  # it was mounted once: its failure is more than a mistyped address
    wanted: ImageRequest | None = None
    status: Mapping[str, Any] = field(default_factory=dict)
    # Who had which handle open, for the next worker: it learns of a handle only by what is asked of it.
    known_openers: dict[int, Opener] = field(default_factory=dict)
    _seen: set[int] = field(default_factory=set)  # of them, those that the present worker has told of
    _before: dict[str, int] = field(default_factory=dict)
    _failures: Failures = field(default_factory=Failures)

    @property
    def is_live(self) -> bool:
        """Whether it is served, or will be."""
        return self.state in LIVE

    @property
    def mounted_state(self) -> ImageStateName:
        """The state of an image that is mounted and is to stay."""
        return ImageStateName.WARM if self.is_warm else ImageStateName.SERVING

    @property
    def cache_problem(self) -> str | None:
        """Why its worker does without the cache's disk, from the start or since that has failed."""
        problem = self.status.get("cache_problem") or self.status.get("cache_failure")
        return None if problem is None else str(problem)

    @property
    def is_in_use(self) -> bool:
        """Whether somebody holds a lease or has a file open, as far as is known.

        Who has files of a warm image open only the kernel knows, which then refuses to unmount it.
        """
        return bool(self.leases or self.openers)

    def has_credentials(self, credentials: Mapping[str, Any] | None) -> bool:
        """Whether it is served by these, and would be by its next mount, if that was asked for."""
        wanted = [] if self.wanted is None else [credentials_of(self.wanted)]
        return all(used == credentials for used in (self.credentials, *wanted))

    def end_leases(self) -> list[str]:
        """End all leases; give their ids, each of which is to be told of once."""
        ended = list(self.leases)
        self.leases.clear()
        return ended

    def want_next(self, request: ImageRequest) -> list[str]:
        """Note that it was asked for while it ends. Leases of before end with it, later ones are the next one's.

        Gives the ids of those that end.
        """
        ended = []
        if self.wanted is None:
            self.wanted = request
            ended = self.end_leases()
        self.state = ImageStateName.PREPARING
        return ended

    def stay(self) -> bool:
        """Go on, since the kernel has said no to the unmount: somebody uses it. Tells whether it was asked for."""
        self.is_ending = False
        self.idle_since_s = None
        if self.wanted is None:
            return False
        self.wanted = None
        self.ends_when_unused = False
        self.state = self.mounted_state
        return True

    @property
    def demand(self) -> Demand:
        """What it would take of the node's link: all, until its worker has said what; of a warm image, nothing."""
        if self.is_warm:
            return Demand(0.0, is_held_back=False)
        status = self.status
        return Demand(int(status.get("fetch_bytes_per_s", 0)), bool(status.get("fetch_is_held_back", True)))

    def take_status(self, status: Mapping[str, Any]) -> None:
        """Take what a worker says of itself."""
        self.status = status
        self.tables_bytes = int(status.get("tables_bytes", 0))
        self.openers = [
            Opener(handle=handle, file=file, pid=pid, command=command, container=container)
            for handle, file, pid, command, container in status.get("openers", [])
        ]
        here = {opener.handle: opener for opener in self.openers}
        for handle in self._seen - here.keys():  # closed
            self.known_openers.pop(handle, None)
        self._seen = set(here)
        self.known_openers |= here
        while len(self.known_openers) > _KNOWN_OPENERS_MAX:
            del self.known_openers[next(iter(self.known_openers))]

    def newly_failed(self, now_s: float) -> Sequence[FailedReads]:
        """Give reads that have failed, as far as they are to be told of; the last of them is the image's last error."""
        news = self._failures.news(self.status.get("failures", {}), now_s)
        for failed in news:
            self.last_error = ErrorFacts(
                kind=failed.kind,
                message=f"reads failed: {failed.reason}"[:1000],
                exit_code=failed.exit_code,
                at_s=round(now_s, 3),
            )
        return news

    def look_at_store(self, now_s: float, *, after_s: float) -> bool:
        """Take what the worker says of the store; true when that has gone away, or is back."""
        before = self.store_away
        age_s = now_s - (self.worker_started_s or now_s)
        self.store_away = store_away(before, self.status, now_s=now_s, worker_age_s=age_s, after_s=after_s)
        return (before is None) != (self.store_away is None)

    def worker_is_gone(self) -> None:
        """Keep what a worker had counted."""
        self._failures.worker_is_gone()
        for name, amount in self._of_worker().items():
            self._before[name] = self._before.get(name, 0) + amount
        self.status = {}
        self.openers = []
        self._seen = set()
        self.worker_pid = self.worker_started_s = None

    def is_idle(self, now_s: float, *, grace_s: float) -> bool:
        """Whether nobody has used it for so long that it may go. To be asked now and then."""
        if self.is_in_use or self.state not in (self.mounted_state, ImageStateName.DRAINING):
            self.idle_since_s = None
            return False
        if self.idle_since_s is None:
            self.idle_since_s = now_s
        return self.ends_when_unused or now_s - self.idle_since_s >= grace_s

    def _of_worker(self) -> dict[str, int]:
        reads = self.status.get("reads", {})
        counts = {f"read_{kind}": int(of["bytes"]) for kind, of in reads.items()}
        counts["origin"] = int(self.status.get("origin_bytes", 0))
        counts["cache_verified_chunks"] = int(self.status.get("cache_verified_chunks", 0))
        counts["stalls"] = sum(int(of["stalled"]) for of in reads.values())
        counts["failed"] = int(self.status.get("failed_reads", 0))
        counts["faults"] = int(reads.get("fault", {}).get("waited", 0))
        return counts

    def describe(self) -> ImageState:
        """Give it as the API shows it."""
        totals = dict(self._before)
        for name, amount in self._of_worker().items():
            totals[name] = totals.get(name, 0) + amount
        fault = self.status.get("reads", {}).get("fault", {})
        chunks, zeros = int(self.status.get("chunks", 0)), int(self.status.get("zero_chunks", 0))
        total_bytes = int(self.status.get("image_bytes", 0))
        # Chunks are of one size but for the last of each file.
        share = (int(self.status.get("cached_chunks", 0)) + zeros) / chunks if chunks else 0.0
        state = ImageStateName.DRAINING if self.is_unmounted and self.state is self.mounted_state else self.state
        is_mounted = not self.is_unmounted and state in (
            ImageStateName.SERVING,
            ImageStateName.WARM,
            ImageStateName.DRAINING,
        )
        kind = CredentialsKind.DEFAULT if not self.credentials else CredentialsKind(next(iter(self.credentials)))
        return ImageState(
            id=self.id,
            snapshot_url=self.snapshot_url,
            tenant=self.tenant,
            state=state,
            created_s=self.created_s,
            prefetch=self.prefetch,
            credentials=kind,
            mountpoint=self.mountpoint if is_mounted else None,
            restarts=self.restarts,
            worker_pid=self.worker_pid,
            worker_started_s=self.worker_started_s,
            leases=list(self.leases.values()),
            openers=list(self.openers),
            progress=Progress(resident_bytes=int(share * total_bytes), total_bytes=total_bytes),
            fault_waits=FaultWaits(
                count=totals.pop("faults", 0),
                p50_ms=1000 * float(fault.get("wait_p50_s", 0.0)),
                p99_ms=1000 * float(fault.get("wait_p99_s", 0.0)),
            ),
            release_gaps=ReleaseGaps(
                p50_ms=1000 * float(self.status.get("release_gap_p50_s", 0.0)),
                p99_ms=1000 * float(self.status.get("release_gap_p99_s", 0.0)),
            ),
            stalls=totals.pop("stalls", 0),
            failed_reads=totals.pop("failed", 0),
            fetch_max_bytes_per_s=int(self.status.get("fetch_max_bytes_per_s", 0)),
            bytes_by_tier={name: amount for name, amount in totals.items() if name != "cache_verified_chunks"},
            last_error=self.last_error,
            cache_problem=self.cache_problem,
            store_away=self.store_away,
        )
