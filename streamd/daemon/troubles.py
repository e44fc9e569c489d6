"""What the beats of an image's workers say of reads that failed, and of a store that is away; what of it is news.

Pure: times come in as numbers, Unix time all of them. A beat repeats what the one before said, an event is told once:
of reads that failed, one a kind of failure and minute; of a store, one when it goes and one when it is back.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streamd.daemon.api.models import StoreAway

# Reads that fail come in hundreds, and a sandbox ends with the first.
TOLD_AGAIN_S = 60.0


@dataclass(frozen=True, slots=True)
class FailedReads:
    """Reads that have failed since the last were told of: their kind, how many, and why the last of them did."""

    kind: str
    reads: int
    reason: str
    exit_code: int


class Failures:
    """Reads that failed."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[float, int]] = {}  # by kind: when, and how many of this worker were told of

    def news(self, failures: Mapping[str, Mapping[str, Any]], now_s: float) -> Sequence[FailedReads]:
        """Give what is to be told, of what the present worker counts."""
        found = []
        for kind, failure in failures.items():
            told_s, told = self._told.get(kind, (0.0, 0))
            reads = int(failure["reads"]) - told
            if reads > 0 and not 0 <= now_s - told_s < TOLD_AGAIN_S:  # the clock may be set back
                self._told[kind] = (now_s, told + reads)
                found.append(FailedReads(kind, reads, str(failure["message"]), int(failure["exit_code"])))
        return found

    def worker_is_gone(self) -> None:
        """Expect counts that begin anew."""
        self._told = {kind: (told_s, 0) for kind, (told_s, _) in self._told.items()}


def store_away(
    now: StoreAway | None, status: Mapping[str, Any], *, now_s: float, worker_age_s: float, after_s: float
) -> StoreAway | None:
    """Say whether the store is away, by what was known of it (`now`) and a beat; it is when nothing came for `after_s`.

    A worker that has just begun knows nothing yet: what the last one knew holds, until something comes.
    """
    wait_s = float(status.get("store_wait_s", 0.0))
    reason = str(status.get("last_failure") or "no answer")
    if wait_s >= after_s:
        since_s = round(now_s - wait_s, 3) if now is None else now.since_s
        return StoreAway(since_s=since_s, reason=reason)
    if wait_s > 0 or (not status.get("origin_bytes") and worker_age_s < after_s):
        return now
    return None
