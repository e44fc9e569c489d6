"""What has happened on this node, for people: a log line, a place among the last, and a count. Nothing is silent.

Each verdict on a pod is one event, with its reason; so are the ends of saves and restores, and what can't be read. The
last ones are for `snapagent status`, counts are for Prometheus, the log is what stays. A kind of which a namespace has
many takes no other's place among the last, and has counts of its own.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

import structlog

log = structlog.get_logger(__name__)

MAX_EVENTS = 500
_MESSAGE_CHARS = 2000
# Of a kind. Reasons are enums of ours and names of errors; a bound all the same: counts live as long as the process.
MAX_REASONS = 100
OTHER = "other"


class What(StrEnum):
    """What an event is about."""

    COLD_START = "cold start"
    RESTORING = "restoring"
    RESTORED = "restored"
    FALLBACK = "fallback to a cold start"
    RESTORE_FAILED = "restore failed"
    ARMED = "armed"
    REFUSED = "container refused"
    SNAPSHOT_BEGUN = "snapshot begun"
    SNAPSHOT_READY = "snapshot ready"
    SNAPSHOT_FAILED = "snapshot failed"
    SNAPSHOT_DELAYED = "snapshot delayed"
    SNAPSHOT_DELETED = "snapshot deleted"
    TRIGGER_FAILED = "trigger failed"
    COLLECTED = "store collected"
    UNREADABLE = "object unreadable"
    NOT_READY = "object not ready"
    READY = "object ready"
    OVERLAP = "policies overlap"
    POLICY_GONE = "policy gone"
    PROBLEM = "problem"


# What an operator should look at; the rest is a node at work.
WARNINGS = frozenset(
    {
        What.FALLBACK,
        What.RESTORE_FAILED,
        What.REFUSED,
        What.SNAPSHOT_FAILED,
        What.SNAPSHOT_DELAYED,
        What.TRIGGER_FAILED,
        What.UNREADABLE,
        What.NOT_READY,
        What.OVERLAP,
        What.POLICY_GONE,
        What.PROBLEM,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One. `pod` is NAMESPACE/NAME, `snapshot` a PodSnapshot's name; both may be empty."""

    at_s: float
    what: What
    reason: str
    message: str
    pod: str = ""
    snapshot: str = ""


class Events:
    """The last ones and the counts; one thread's."""

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._kept: list[Event] = []
        self.counts: Counter[tuple[What, str]] = Counter()

    def tell(self, what: What, reason: str, message: str = "", *, pod: str = "", snapshot: str = "") -> None:
        """Note an event."""
        event = Event(
            at_s=self._clock(), what=what, reason=reason, message=message[:_MESSAGE_CHARS], pod=pod, snapshot=snapshot
        )
        self._kept = _fairly([*self._kept, event], MAX_EVENTS)
        is_new = (what, reason) not in self.counts
        if is_new and sum(each is what for each, _ in self.counts) >= MAX_REASONS:
            reason = OTHER
        self.counts[what, reason] += 1
        facts = {name: value for name, value in asdict(event).items() if value and name not in ("at_s", "what")}
        (log.warning if what in WARNINGS else log.info)(what.value, **facts)

    def last(self, count: int = MAX_EVENTS) -> tuple[Event, ...]:
        """Give events, oldest first: the newest ones of each kind and namespace."""
        return tuple(_fairly(self._kept, count))


def _fairly(events: Sequence[Event], count: int) -> list[Event]:
    """Choose so many: the newest of each kind and namespace, then the newest but one, and so on; in their order."""
    if len(events) <= count:
        return [*events]
    ranks: Counter[tuple[What, str]] = Counter()
    ranked = []
    for age, event in enumerate(reversed(events)):
        alike = (event.what, event.pod.partition("/")[0])
        ranked.append((ranks[alike], age))
        ranks[alike] += 1
    return [events[-1 - age] for age in sorted((age for _, age in sorted(ranked)[:count]), reverse=True)]
