"""The GETs under way: how much is outstanding, and which one is much slower than its siblings. Pure.

A GET that stands still while others move (one of 500 whose first byte takes 40 s, a connection that died silently) is
asked for a second time, once, and whichever brings a chunk first has brought it. When all stand still it is the store,
and a second request would only be one more.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from streamd.serve.order import Want
from streamd.serve.plan import GetPlan

# A GET stands still when, for this long and for so many round trips, it brought less than a sixteenth of its share.
STILL_S = 0.5
STILL_ROUND_TRIPS = 6.0
_SLOW_SHARE = 1 / 16
# The same while nothing else moves, as with a lone fault: its siblings are those before it.
ALONE_STILL_S = 2.0
# Second tries at a time: a store that is slow as a whole must not be asked twice for everything.
SECOND_TRIES_MAX = 4


@dataclass(slots=True, eq=False)
class Progress:
    """How far a GET is; written by its thread, read by the scheduler (single stores of ints: no lock).

    `received` is the next byte of the pack that is still to come, `origin_bytes` all bytes that the store sent,
    `first_byte_s` and `took_s` are seconds. Setting `stop` ends the thread at the next piece of the body.
    """

    received: int
    origin_bytes: int = 0
    requests: int = 0
    first_byte_s: float = 0.0
    took_s: float = 0.0
    stop: bool = False


@dataclass(slots=True, eq=False)
class Get:
    """One GET: what it asks for, why, how far it is.

    `demand`: a read waits for it. `began_s` is a time of the Trio clock, as is `moved_s`, when it had last brought its
    share, up to byte `moved_to` of the pack. `is_second`: another GET was to bring the same already.
    """

    plan: GetPlan
    progress: Progress
    want: Want
    demand: bool
    began_s: float
    moved_s: float
    moved_to: int
    is_second: bool = False
    tried_twice: bool = False

    @property
    def is_urgent(self) -> bool:
        """Whether it was started for a stopped thread, on capacity of its own."""
        return self.want <= Want.WINDOW

    @property
    def outstanding_bytes(self) -> int:
        """What the store was asked for and has not sent."""
        return self.plan.end - self.progress.received


class Gets:
    """The GETs under way."""

    def __init__(self) -> None:
        self._gets: set[Get] = set()

    def __len__(self) -> int:
        return len(self._gets)

    def __iter__(self) -> Iterator[Get]:
        return iter(self._gets)

    def add(self, get: Get) -> None:
        """Count one in."""
        self._gets.add(get)

    def discard(self, get: Get) -> None:
        """Count one out."""
        self._gets.discard(get)

    @property
    def urgent(self) -> int:
        """How many were started for faults; here and below, one that was tried a second time counts no more."""
        return sum(1 for get in self._gets if get.is_urgent and not get.tried_twice)

    @property
    def background(self) -> int:
        """How many were not."""
        return sum(1 for get in self._gets if not get.is_urgent and not get.tried_twice)

    def has(self, want: Want) -> bool:
        """Whether one that was started for that class is under way."""
        return any(get.want == want and not get.tried_twice for get in self._gets)

    def is_urgent_moving(self, now_s: float, *, round_trip_s: float) -> bool:
        """Whether any that was started for a fault has brought something lately."""
        still_s = max(STILL_S, STILL_ROUND_TRIPS * round_trip_s)
        return any(get.is_urgent and not get.tried_twice and now_s - get.moved_s <= still_s for get in self._gets)

    @property
    def outstanding_bytes(self) -> int:
        """What the store was asked for by all of them and has not sent."""
        return sum(get.outstanding_bytes for get in self._gets if not get.tried_twice)

    @property
    def arrived_bytes(self) -> int:
        """What the store has sent for them so far."""
        return sum(get.progress.origin_bytes for get in self._gets)

    def standing_still(self, now_s: float, *, bytes_per_s: float, round_trip_s: float) -> list[Get]:
        """Give the GETs to try a second time; call it a few times a second.

        `bytes_per_s` is what all of them together bring, 0 when that isn't known.
        """
        share_per_s = _SLOW_SHARE * bytes_per_s / max(len(self._gets), 1)
        for get in self._gets:
            moved = get.progress.received - get.moved_to
            if moved > share_per_s * (now_s - get.moved_s):
                get.moved_to, get.moved_s = get.progress.received, now_s
        still_s = max(STILL_S, STILL_ROUND_TRIPS * round_trip_s)
        latest_s = max((get.moved_s for get in self._gets), default=now_s)
        second_tries = sum(1 for get in self._gets if get.tried_twice)
        chosen = [
            get
            for get in self._gets
            if not (get.tried_twice or get.is_second or get.progress.stop)
            and now_s - get.moved_s > (still_s if latest_s > get.moved_s + still_s / 2 else ALONE_STILL_S + still_s)
        ]
        chosen.sort(key=lambda get: (get.want, get.began_s))
        return chosen[: max(0, SECOND_TRIES_MAX - second_tries)]
