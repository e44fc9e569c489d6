"""The background limit finds the knee of every link, follows it, and slows down when the store asks for it."""

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamd.serve.limit import CEILING_BYTES, FLOOR_BYTES, BackgroundLimit

MIB = 1 << 20
PIECE_BYTES = 256 << 10


@dataclass
class Link:
    """A link with a queue: requests take a delay to begin, then their pieces pass one after another at a rate.

    `connection_per_s` bounds what one request gets, `spread` makes delays exponential around `delay_s`.
    """

    bytes_per_s: Callable[[float], float]
    delay_s: float
    connection_per_s: float | None = None
    spread: float = 0.0
    limit: BackgroundLimit = field(default_factory=lambda: BackgroundLimit(get_bytes_max=4 * MIB))

    def __post_init__(self) -> None:
        self.random = random.Random(3)
        self.serials = itertools.count()
        self.events: list[tuple[float, int, float, int, bool]] = []
        self.free_s = 0.0
        self.outstanding = self.total = 0
        self.arrivals: list[tuple[float, int]] = []

    def _ask(self, now_s: float) -> None:
        while self.outstanding == 0 or self.outstanding + self.limit.get_bytes <= self.limit.bytes:
            size = self.limit.get_bytes
            self.outstanding += size
            self.limit.started(now_s)
            begins_s = now_s + self.delay_s * (1 + self.spread * self.random.expovariate(1))
            heapq.heappush(self.events, (begins_s, next(self.serials), now_s, size, True))

    def run(self, until_s: float) -> None:
        """Load without end until then."""
        now_s = 0.0
        self._ask(now_s)
        while now_s < until_s:
            now_s, _, asked_s, size, is_first = heapq.heappop(self.events)
            if is_first:
                self.limit.first_byte(now_s - asked_s)
            piece = min(size, PIECE_BYTES)
            self.free_s = max(self.free_s, now_s) + piece / self.bytes_per_s(now_s)
            self.outstanding -= piece
            self.total += piece
            self.arrivals.append((self.free_s, piece))
            if size > piece:
                pause_s = piece / self.connection_per_s if self.connection_per_s else 0.0
                at_s = max(self.free_s, now_s + pause_s)
                heapq.heappush(self.events, (at_s, next(self.serials), asked_s, size - piece, False))
            self.limit.received(self.total, self.free_s, is_full=True)
            self._ask(max(now_s, self.free_s))

    def rate(self, since_s: float, until_s: float) -> float:
        """Bytes a second that arrived in that time."""
        return sum(size for at_s, size in self.arrivals if since_s <= at_s < until_s) / (until_s - since_s)


LINKS = {
    "800 Mbit/s, 15 ms": (100e6, 0.015),
    "2 Gbit/s, 15 ms": (250e6, 0.015),
    "160 Mbit/s, 100 ms": (20e6, 0.1),
    "3 Gbit/s, 60 ms": (400e6, 0.06),
}


@pytest.mark.parametrize("name", LINKS)
def test_within_two_seconds_the_link_is_full_and_little_more_than_its_delay_is_under_way(name: str) -> None:
    rate, delay_s = LINKS[name]
    link = Link(lambda _: rate, delay_s)
    link.run(2.0)
    # The textbook's figure, as the floor and the size of a GET allow, and not more than a few of it.
    needed = max(rate * delay_s, FLOOR_BYTES)
    assert 0.7 * needed <= link.limit.bytes <= 4 * needed + 4 * MIB
    assert link.rate(1.5, 2.0) >= 0.85 * rate


def test_a_store_that_bounds_each_connection_gets_more_of_them() -> None:
    link = Link(lambda _: 1e9, 0.06, connection_per_s=60e6, spread=1.0)
    link.run(4.0)
    assert link.rate(3.0, 4.0) >= 3 * 60e6


def test_a_link_that_shrinks_is_noticed() -> None:
    link = Link(lambda now_s: 400e6 if now_s < 3 else 50e6, 0.015)
    link.run(5.0)
    assert link.limit.bytes <= 4 * MIB
    assert link.rate(4.0, 5.0) >= 0.85 * 50e6


def test_a_link_that_grows_is_used_again() -> None:
    link = Link(lambda now_s: 50e6 if now_s < 3 else 400e6, 0.03)
    link.run(9.0)
    assert link.rate(8.0, 9.0) >= 0.6 * 400e6


@given(
    rate=st.floats(1e5, 1e10),
    delay_s=st.floats(1e-4, 1.0),
    connection=st.none() | st.floats(1e5, 1e9),
    spread=st.floats(0, 3),
)
@settings(max_examples=40, deadline=None)
def test_the_bounds_hold_whatever_the_link_does(
    rate: float, delay_s: float, connection: float | None, spread: float
) -> None:
    link = Link(lambda now_s: rate * (1 if int(now_s) % 2 else 0.1), delay_s, connection, spread)
    link.run(min(4.0, 2e8 / rate))
    assert FLOOR_BYTES <= link.limit.bytes <= CEILING_BYTES
    assert link.limit.get_bytes <= link.limit.bytes


def test_bytes_that_arrive_while_nothing_is_held_back_say_nothing_about_the_link() -> None:
    limit = BackgroundLimit(get_bytes_max=4 * MIB)
    before = limit.bytes
    for step in range(100):
        limit.received(step * 1000, step * 0.1, is_full=False)
    assert limit.bytes == before
    assert limit.bytes_per_s == 0


class Throttling:
    """A store that answers so many requests a second (in slices of 100 ms) and refuses the others."""

    def __init__(self, per_s: float) -> None:
        self.per_slice = per_s / 10
        self.slice = -1
        self.taken = self.served = self.refused = 0

    def ask(self, now_s: float) -> bool:
        if int(now_s * 10) != self.slice:
            self.slice, self.taken = int(now_s * 10), 0
        self.taken += 1
        if self.taken > self.per_slice:
            self.refused += 1
            return False
        self.served += 1
        return True


@pytest.mark.parametrize("per_s", [20, 100, 400])
def test_under_a_limit_of_requests_most_of_it_is_used_and_few_are_refused(per_s: float) -> None:
    limit, store = BackgroundLimit(get_bytes_max=MIB), Throttling(per_s)
    now_s = 0.0
    while now_s < 60:
        wait_s = limit.delay_s(now_s)
        if wait_s:
            now_s += wait_s
            continue
        limit.started(now_s)
        if not store.ask(now_s):
            limit.throttled(now_s)
        now_s += 0.001
    assert store.served >= 0.8 * per_s * 60
    assert store.refused <= 0.1 * store.served


def test_without_throttling_no_request_waits() -> None:
    limit = BackgroundLimit(get_bytes_max=MIB)
    for step in range(1000):
        limit.started(step * 1e-4)
        assert limit.delay_s(step * 1e-4) == 0
