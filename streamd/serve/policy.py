"""What each kind of failure gets: one table, which the tests walk and README shows. Pure.

One failed read kills a sandbox and gVisor retries nothing, so EIO is the last resort: what may pass is waited for
without end, and what won't pass is asked for once more and held, so that an agent or a person can act before the reads
fail.
"""

from dataclasses import dataclass, field
from enum import Enum

from streamd.config import PolicyConfig
from streamd.errors import StoreErrorKind


class Course(Enum):
    """How a kind of failure is treated."""

    WAIT_FOREVER = "wait without end, with jittered back-off"
    WAIT_BOUNDED = "refresh credentials once for all, wait a bounded time, then EIO"
    ASK_AGAIN_AND_HOLD = "ask again once, hold, then EIO"
    REFETCH_ONCE = "drop what was read, fetch once more, then EIO"


COURSES: dict[StoreErrorKind, Course] = {
    StoreErrorKind.TRANSIENT: Course.WAIT_FOREVER,
    StoreErrorKind.THROTTLED: Course.WAIT_FOREVER,
    StoreErrorKind.CREDENTIALS: Course.WAIT_BOUNDED,
    StoreErrorKind.GONE: Course.ASK_AGAIN_AND_HOLD,
    StoreErrorKind.CHANGED: Course.ASK_AGAIN_AND_HOLD,
    StoreErrorKind.FORBIDDEN: Course.ASK_AGAIN_AND_HOLD,
    StoreErrorKind.CORRUPT: Course.REFETCH_ONCE,
}


@dataclass(frozen=True, slots=True)
class Retry:
    """Ask again after `delay_s`."""

    delay_s: float


@dataclass(frozen=True, slots=True)
class Fail:
    """Fail the reads that wait, now."""


@dataclass(slots=True)
class Trouble:
    """How often, and since when, one chunk's fetch has failed in each way (times in seconds of one monotonic clock)."""

    since_s: dict[StoreErrorKind, float] = field(default_factory=dict)
    failures: dict[StoreErrorKind, int] = field(default_factory=dict)

    def after(self, kind: StoreErrorKind, *, now_s: float, backoff_s: float, policy: PolicyConfig) -> Retry | Fail:
        """Note one more failure of that kind and say what to do; `backoff_s` is the next jittered back-off."""
        since_s = self.since_s.setdefault(kind, now_s)
        failures = self.failures[kind] = self.failures.get(kind, 0) + 1
        match COURSES[kind]:
            case Course.WAIT_FOREVER:
                return Retry(backoff_s)
            case Course.WAIT_BOUNDED:
                left_s = since_s + policy.credentials_wait_s - now_s
                return Retry(min(backoff_s, left_s)) if left_s > 0 else Fail()
            case Course.ASK_AGAIN_AND_HOLD:
                # The first answer is asked again at once, the second after the hold: what came back by then is served.
                if failures == 1:
                    return Retry(0.0)
                left_s = since_s + policy.hold_s - now_s
                return Retry(left_s) if left_s > 0 else Fail()
            case Course.REFETCH_ONCE:
                return Retry(0.0) if failures == 1 else Fail()

    @property
    def attempts(self) -> int:
        """Failures of every kind together."""
        return sum(self.failures.values())
