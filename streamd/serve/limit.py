"""How much background work may be on its way from the store at a time. Pure: times in, bytes out.

Too little, and the link idles for a round trip between two requests; too much, and a fault's bytes queue behind what
nobody is waiting for. Between the two lies bandwidth × delay, and neither can be asked for. So the limit is moved and
what arrives is watched: more is kept only while it brings more, less is kept whenever it brings as much. That finds
the knee on a link with a queue, on a store that answers each connection at a bounded rate, and on one whose answers
take now 20 ms and now 200 (where bandwidth × shortest delay, the textbook figure, would sink to nothing).

A store that says "too many requests" (429, 503) is another matter: it counts requests, not bytes. The pace of
background requests then falls below what it took before, and climbs again slowly.
"""

from collections import deque
from dataclasses import dataclass

# The named bounds. The lower one: a GET that is being received and one that is being asked for. The upper one: 10
# Gbit/s at 50 ms, and a quarter of the default memory cap.
FLOOR_BYTES = 1 << 20
CEILING_BYTES = 64 << 20
# Where it begins: 1 Gbit/s at 16 ms. Windows of two round trips double it.
START_BYTES = 2 << 20
# GETs that the limit is made of, as long as they aren't larger than they may be: the next is asked for when half of the
# last is in. More of them (4) filled the link no better and took 14 % more CPU; a limit beyond twice a GET's greatest
# size is made of more.
GETS = 2
LEAST_GET_BYTES = 512 << 10
# What is measured: the bytes of one window, which spans this many of the waits for a first byte, and at least 100 ms.
_WINDOW_ROUND_TRIPS = 2.0
_WINDOW_S = 0.1
# And at least once the limit itself, so that single answers don't decide, unless that takes too long.
_WINDOW_S_MAX = 0.5
# Doubling brings at least this much more, as long as the link isn't full.
_GROWTH = 1.3
# A step up has to bring so much more to stay; a step down may cost so little.
_WORTH = 1.08
_EQUAL = 0.96
_UP, _DOWN = 1.5, 0.75
# Windows between two trials.
_TRIAL_WINDOWS = 6
# The link is another when it brings less than this share of what it did, twice in a row.
_FELL = 0.6
# First bytes that come this many times later than they did while as little arrives: a queue, ours or others'.
_LATE = 2.5
# After a 429, the pace is this share of what was taken before. It grows slowly at first (by 10 % in a second, to where
# it was in two), and quickly when nothing is refused (four times as much in five seconds): one refusal is no limit.
_BACK_OFF = 0.8
_RECOVERY = 1.05
_CALM_S = 10.0
_LEAST_PACE_PER_S = 1.0


@dataclass(slots=True)
class _Window:
    """Bytes that arrived since `began_s`, and the waits for a first byte that ended meanwhile."""

    began_s: float
    began_bytes: int
    first_bytes_s: list[float]


@dataclass(frozen=True, slots=True)
class _Refusal:
    """The store refused a request: the pace from then on; it counts as heeded after `heeded_s`."""

    pace_per_s: float
    heeded_s: float


class BackgroundLimit:
    """Bytes that HOT, STREAM and AHEAD may have asked the store for and not received, and the pace of their requests.

    All times are seconds of one monotonic clock.
    """

    def __init__(self, *, get_bytes_max: int) -> None:
        self._get_bytes_max = get_bytes_max
        self._bytes = float(START_BYTES)
        self._window: _Window | None = None
        self._growing = True
        self._rate = 0.0  # bytes a second that the current limit brings
        self._round_trip_s = 0.0
        self._least_first_byte_s = 0.0
        self._calm_first_byte_s = 0.0
        self._trial_from: float | None = None  # the limit to go back to
        self._windows = 0
        self._low_windows = 0
        self._is_settling = False
        self._refusal: _Refusal | None = None
        self._starts: deque[float] = deque(maxlen=512)
        self._next_start_s = 0.0

    @property
    def bytes(self) -> int:
        """The limit."""
        return int(self._bytes)

    @property
    def get_bytes(self) -> int:
        """How large one background GET should be."""
        return max(LEAST_GET_BYTES, min(self.bytes // GETS, self._get_bytes_max))

    @property
    def needed_bytes(self) -> int:
        """What keeps the link busy for the shortest wait for a first byte that was seen: bandwidth × delay."""
        return int(self._rate * self._least_first_byte_s)

    @property
    def bytes_per_s(self) -> float:
        """What arrives while work waits for the limit; 0 until that is known."""
        return self._rate

    @property
    def round_trip_s(self) -> float:
        """Smoothed wait for a first byte; 0 until one came."""
        return self._round_trip_s

    # Bytes in flight

    def first_byte(self, wait_s: float) -> None:
        """Note how long a request waited for its first byte."""
        self._round_trip_s = wait_s if not self._round_trip_s else 0.8 * self._round_trip_s + 0.2 * wait_s
        # Rises by a fifth over a hundred answers, in case the path has become longer.
        self._least_first_byte_s = min(wait_s, self._least_first_byte_s * 1.002 or wait_s)
        if self._window is not None:
            self._window.first_bytes_s.append(wait_s)

    def received(self, total_bytes: int, now_s: float, *, is_full: bool) -> None:
        """Note that `total_bytes` have arrived in all; `is_full`: it is the limit that holds work back now."""
        if not is_full:  # what arrives now says nothing about the link
            self._window = None
            return
        window = self._window
        if window is None:
            self._window = _Window(now_s, total_bytes, [])
            return
        elapsed_s = now_s - window.began_s
        if elapsed_s < max(_WINDOW_S, _WINDOW_ROUND_TRIPS * self._round_trip_s):
            return
        if total_bytes - window.began_bytes < self._bytes and elapsed_s < _WINDOW_S_MAX:
            return
        self._window = _Window(now_s, total_bytes, [])
        waits = sorted(window.first_bytes_s)
        self._judge((total_bytes - window.began_bytes) / elapsed_s, waits[len(waits) // 2] if waits else 0.0)

    def _judge(self, rate: float, first_byte_s: float) -> None:
        """Move the limit by what one window brought."""
        if self._is_settling:  # it began under another limit
            self._is_settling = False
            return
        before = self._rate
        if self._growing:
            self._grow(rate, first_byte_s)
            return
        if self._trial_from is not None:
            self._end_trial(rate)
            return
        self._low_windows = self._low_windows + 1 if rate < _FELL * before else 0
        if self._low_windows >= 2:  # another link, or this machine was busy: look for the knee again
            self._growing, self._low_windows, self._rate = True, 0, 0.0
            self._set(min(self._bytes / 2, 2 * rate * self._calm_first_byte_s or self._bytes))
            return
        self._rate = 0.7 * before + 0.3 * rate
        if first_byte_s and self._calm_first_byte_s and first_byte_s > _LATE * self._calm_first_byte_s:
            self._set(self._bytes * _DOWN)
        if first_byte_s:  # follows a longer path slowly, a shorter one at once
            calm_s = self._calm_first_byte_s
            self._calm_first_byte_s = min(first_byte_s, calm_s + 0.02 * first_byte_s) if calm_s else first_byte_s
        self._windows += 1
        if self._windows % _TRIAL_WINDOWS == 0:
            self._trial_from = self._bytes
            self._set(self._bytes * (_UP if self._windows % (2 * _TRIAL_WINDOWS) else _DOWN))

    def _grow(self, rate: float, first_byte_s: float) -> None:
        """Double while that brings more; a window that brought no more is looked at twice."""
        if rate >= _GROWTH * self._rate:
            self._rate, self._low_windows = rate, 0
            self._set(2 * self._bytes)
            return
        self._low_windows += 1
        if self._low_windows < 2:
            return
        self._growing, self._low_windows = False, 0
        self._rate = max(rate, self._rate)
        self._set(self._bytes * 0.75)  # the doubling before this one was nearly enough
        self._calm_first_byte_s = first_byte_s

    def _end_trial(self, rate: float) -> None:
        assert self._trial_from is not None
        was_up = self._bytes > self._trial_from
        if was_up and rate >= _WORTH * self._rate:
            self._growing = rate >= _GROWTH * self._rate
            self._rate = rate
            if self._growing:
                self._set(2 * self._bytes)
        elif was_up or rate < _EQUAL * self._rate:
            self._set(self._trial_from)
        self._trial_from = None

    def _set(self, limit: float) -> None:
        self._bytes = min(max(limit, FLOOR_BYTES), CEILING_BYTES)
        self._is_settling = True

    # The pace of requests

    def started(self, now_s: float) -> None:
        """Note a background request."""
        while self._starts and self._starts[0] <= now_s - 1.0:
            self._starts.popleft()
        self._starts.append(now_s)
        pace_per_s = self._pace_per_s(now_s)
        if pace_per_s is not None:
            self._next_start_s = max(self._next_start_s, now_s) + 1 / pace_per_s

    def throttled(self, now_s: float) -> None:
        """Note that the store has asked for fewer requests."""
        if self._refusal is not None and now_s < self._refusal.heeded_s:  # an answer to what was asked at the old pace
            return
        recent = [start_s for start_s in self._starts if start_s > now_s - 1.0]
        taken_per_s = len(recent) / max(now_s - recent[0], 0.1) if recent else _LEAST_PACE_PER_S
        pace_per_s = max(_BACK_OFF * min(taken_per_s, self._pace_per_s(now_s) or taken_per_s), _LEAST_PACE_PER_S)
        self._refusal = _Refusal(pace_per_s, now_s + max(0.1, 2 * self._round_trip_s))
        self._next_start_s = self._refusal.heeded_s

    def delay_s(self, now_s: float) -> float:
        """How long the next background request has to wait, because of the pace; 0 when it may go."""
        return max(0.0, self._next_start_s - now_s) if self._pace_per_s(now_s) is not None else 0.0

    def _pace_per_s(self, now_s: float) -> float | None:
        """Requests a second; None once the last refusal is long past."""
        if self._refusal is None:
            return None
        calm_s = max(0.0, now_s - self._refusal.heeded_s)
        if calm_s > _CALM_S:
            self._refusal = None
            return None
        return self._refusal.pace_per_s * float(_RECOVERY ** (calm_s + calm_s**2))
