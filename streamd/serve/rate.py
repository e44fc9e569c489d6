"""How fast one image may take from the store. Pure: times in, waits out.

A bucket of bytes that fills at the rate. A GET for HOT, STREAM or AHEAD goes once the bucket holds its bytes: in any
time these take rate × time and one bucket at most. A GET for a stopped thread (FAULT, WINDOW) never waits. Its bytes
are a debt, and what nobody is stopped for yields to it until it is paid: most of the rate, not all, for a fault's reads
need slots that the stream's reads hold, and those come free only as the stream goes on.

The bucket holds back the start of a GET, never its body: what is under way moves as fast as the link goes, so nothing
that measures the link (`limit`) or looks for GETs that stand still (`gets`) sees another link.
"""

import math

# What the bucket holds: a quarter of a second, or two chunks. A GET is half of it, so that one which is started late (a
# busy machine) costs nothing.
BURST_S = 0.25
BURST_BYTES_MIN = 512 << 10
# The share of the rate that pays debts.
YIELDS = 0.75
# Longest wait that is given: the rate may be another by then.
_DELAY_S_MAX = 1.0
# Work counts as held back until so long after it last had to wait: as often as workers tell of it.
_HELD_S = 1.0
# Over how long the use is averaged: it comes in GETs, a few a second where the rate is small.
_USED_S = 2.0
_UNBOUNDED_BYTES = 1 << 62


class FetchRate:
    """What one image takes of the link, and the bound on it (0: none). All times are seconds of one monotonic clock."""

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._level = float(self.burst_bytes)
        self._debt = 0.0
        self._used_per_s = 0.0
        self._at_s = -math.inf  # of the three above
        self._held_until_s = -math.inf

    @property
    def bytes_per_s(self) -> int:
        """The bound, 0 for none."""
        return self._bytes_per_s

    @property
    def burst_bytes(self) -> int:
        """What the bucket holds."""
        if not self._bytes_per_s:
            return _UNBOUNDED_BYTES
        return max(BURST_BYTES_MIN, int(self._bytes_per_s * BURST_S))

    @property
    def get_bytes(self) -> int:
        """How large a background GET should be at most."""
        return self.burst_bytes // 2

    def set(self, bytes_per_s: int, now_s: float) -> None:
        """Bound it anew. What is owed stays owed, unless there is no bound any more."""
        self._advance(now_s)
        self._bytes_per_s = bytes_per_s
        if not bytes_per_s:
            self._level, self._debt = float(_UNBOUNDED_BYTES), 0.0
        self._level = min(self._level, self.burst_bytes)

    def charge(self, count: int, now_s: float, *, is_urgent: bool) -> None:
        """Note that so many bytes were asked for; less than 0 gives back what was asked for and didn't come."""
        self._advance(now_s)
        self._used_per_s = max(0.0, self._used_per_s + count / _USED_S)
        if not self._bytes_per_s:
            return
        if is_urgent:
            self._debt = max(0.0, self._debt + count)
        else:
            self._level = min(self._level - count, self.burst_bytes)

    def delay_s(self, size: int, now_s: float) -> float:
        """Say how long a background GET of that size has to wait, 0 when it may go; ask again then.

        Only for one that would go otherwise: it counts as held back.
        """
        if not self._bytes_per_s:
            return 0.0
        self._advance(now_s)
        missing = min(size, self.burst_bytes) - self._level
        if missing < 1:  # less is the arithmetic's
            return 0.0
        delay_s = min(missing + self._debt, missing / (1 - YIELDS)) / self._bytes_per_s
        self._held_until_s = now_s + delay_s
        return min(delay_s, _DELAY_S_MAX)

    def used_per_s(self, now_s: float) -> float:
        """Give what was charged lately, in bytes a second."""
        self._advance(now_s)
        return self._used_per_s

    def is_held_back(self, now_s: float) -> bool:
        """Whether background work would have taken more, lately, had it been let."""
        return now_s - self._held_until_s <= _HELD_S

    def _advance(self, now_s: float) -> None:
        """Earn what the time since the last look brings: first for debts, as far as they may take it."""
        elapsed_s, self._at_s = max(0.0, now_s - self._at_s), max(now_s, self._at_s)
        self._used_per_s *= math.exp(-elapsed_s / _USED_S)
        if self._bytes_per_s and (self._debt or self._level < self.burst_bytes):
            earned = elapsed_s * self._bytes_per_s
            paid = min(self._debt, YIELDS * earned)
            self._debt -= paid
            self._level = min(self._level + earned - paid, self.burst_bytes)
