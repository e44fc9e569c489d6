"""One identity's token, always at hand: who asks waits for a fetch only when there is no good token.

A token is fetched again when four fifths of its life are over (give or take a twentieth, so that a node's mounts don't
all ask in one moment), by a thread of its own, while everybody goes on with the old one; so a token that ends while
reads are under way is seen by none of them. One fetch at a time, whoever wants it; those who need its result wait for
it. One that fails is paused after, for all; the old token serves until it really ends. Nothing runs while nobody asks.

A token that the store refuses (`refuse`) is fetched anew at once. When that brings the same one, or another that is
refused too, there is nothing to do but to wait, longer each time, and then to try what the source gives, even if that
is the old one again: a store can be wrong about a token for a while.

`epoch` counts the tokens. Who proved something with one of them (that this tenant may read a snapshot, say) proves it
again when the count has changed: the source may have begun to give another identity.

State is under one lock, which is never held through a fetch, a callback or a log line.
"""

import random
import threading
import time
from collections.abc import Callable
from enum import Enum, auto
from typing import Protocol

import structlog

from streamd.errors import StoreError, StoreErrorKind
from streamd.store.token_sources import Token, TokenSource

log = structlog.get_logger()

REFRESH_SHARE = 0.8
REFRESH_JITTER = 0.05
# With less left than this a request might arrive after the end: then a new one is waited for, if it may be asked for.
MARGIN_S = 10.0
_MARGIN_SHARE = 0.1  # of a short life
# A source that gives the same token again before its end is asked no more often than this.
SAME_AGAIN_S = 5.0
# Between tries that fail: doubled each time, and drawn from the upper half. At most half a minute, of the five that
# reads wait for credentials (`serve/policy.py`).
BACK_OFF_FIRST_S = 1.0
BACK_OFF_MOST_S = 30.0
# A refusal after so long isn't one more of the same trouble.
REFUSALS_FORGOTTEN_S = 300.0
# Longer than any source takes: a command has 10 s.
FETCH_WAIT_S = 20.0


class TokenProvider(Protocol):
    """What a store needs of whoever gives it tokens; `Identity` and `credentials.Tokens` are such."""

    def fresh(self) -> str:
        """Give a token that should be accepted. Raises: `StoreError` CREDENTIALS or TRANSIENT."""
        ...

    def refuse(self, token: str) -> None:
        """Say that the store answered 401 to this token."""
        ...


class _Need(Enum):
    NOTHING = auto()
    SOON = auto()  # a new token, but the one that is here will do
    NEARLY = auto()  # the one that is here might end on the way
    NOW = auto()  # there is none to give


def _boot_clock() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)  # a token's life goes on while a machine is suspended


def _in_thread(call: Callable[[], None]) -> None:
    threading.Thread(target=call, name="token-refresh", daemon=True).start()


class Identity:
    """The tokens of one source; any thread may use it.

    `on_change` is called with the new epoch, in whichever thread has fetched, after each new token; it must not raise.
    `clock` gives seconds that only go forward, `draw` numbers in [0, 1), `in_background` has a call made elsewhere.
    """

    def __init__(
        self,
        source: TokenSource,
        *,
        on_change: Callable[[int], None] | None = None,
        clock: Callable[[], float] = _boot_clock,
        draw: Callable[[], float] = random.random,
        in_background: Callable[[Callable[[], None]], None] = _in_thread,
    ) -> None:
        self._source = source
        self._on_change = on_change
        self._clock = clock
        self._draw = draw
        self._in_background = in_background
        self._changed = threading.Condition()
        # All of these under it.
        self._is_fetching = False
        self._epoch = 0
        self._value = ""
        self._ends_s: float | None = None  # None: nobody said; times are the clock's
        self._margin_s = 0.0
        self._refresh_at_s = 0.0
        self._not_before_s = 0.0  # no fetch until then
        self._failures = 0
        self._error: StoreError | None = None  # of the last fetch, or why there is none
        self._is_refused = False
        self._refusals = 0
        self._refused_at_s = 0.0
        self._retry_same_s = 0.0  # from then on a refused token is worth another try

    def __repr__(self) -> str:
        return f"Identity({self._source!r}, epoch {self._epoch})"

    @property
    def epoch(self) -> int:
        """How many different tokens there have been, one after another; 0 before the first."""
        with self._changed:
            return self._epoch

    def fresh(self) -> str:
        """Give a token that should be accepted; waits only when there is none.

        Raises: `StoreError` CREDENTIALS when there is none to be had; TRANSIENT when who gives them doesn't answer.
        """
        with self._changed:
            while True:
                now_s = self._clock()
                need = self._need(now_s)
                may_fetch = now_s >= self._not_before_s
                if need is _Need.NOTHING or (need is not _Need.NOW and (self._is_fetching or not may_fetch)):
                    return self._value
                if self._is_fetching:
                    # Whatever comes of it is looked at anew; a fetch that failed has set a pause.
                    if not self._changed.wait_for(lambda: not self._is_fetching, FETCH_WAIT_S):
                        raise StoreError(StoreErrorKind.TRANSIENT, "", f"no access token: {self._source!r} hangs")
                    continue
                if not may_fetch:
                    raise self._reason()
                self._is_fetching = True
                value = self._value
                break
        if need is _Need.SOON:
            try:
                self._in_background(self._fetch)
            except RuntimeError:  # no thread to be had; it is tried again at the next call
                self._done()
            return value
        self._fetch()
        # What this fetch has brought, or else what is good still; it isn't fetched a second time.
        with self._changed:
            if self._need(self._clock()) is _Need.NOW:
                raise self._reason()
            return self._value

    def refuse(self, token: str) -> None:
        """Say that the store answered 401 to this token; if it is the newest here, another is asked for.

        Many reads that were refused together count as one.
        """
        with self._changed:
            now_s = self._clock()
            if token != self._value or self._need(now_s) is _Need.NOW:
                return  # it is to be replaced anyway
            if now_s - self._refused_at_s > REFUSALS_FORGOTTEN_S:
                self._refusals = 0
            pause_s = self._back_off_s(self._refusals + 1)
            self._is_refused = True
            self._refused_at_s = now_s
            self._retry_same_s = now_s + pause_s
            self._not_before_s = self._retry_same_s if self._refusals else now_s
            self._refusals += 1
            self._error = StoreError(
                StoreErrorKind.CREDENTIALS, "", f"the store refuses the access token of {self._source!r}"
            )

    def _need(self, now_s: float) -> _Need:
        if not self._value or self._is_refused:
            return _Need.NOW
        if self._ends_s is not None and now_s >= self._ends_s:
            return _Need.NOW
        if now_s < self._refresh_at_s:
            return _Need.NOTHING
        if self._ends_s is not None and now_s >= self._ends_s - self._margin_s:
            return _Need.NEARLY
        return _Need.SOON

    def _fetch(self) -> None:
        """Ask the source, and keep what it says; the one call that may, by whoever set `_is_fetching`."""
        try:
            asked_s = self._clock()
            try:
                token = self._source.fetch()
            except StoreError as error:
                self._failed(error)
            except Exception as error:
                # Its text may hold what was being read.
                kind = type(error).__name__
                self._failed(
                    StoreError(StoreErrorKind.CREDENTIALS, "", f"no access token: {self._source!r} raised {kind}")
                )
            else:
                self._take(token, asked_s)
        finally:
            self._done()

    def _done(self) -> None:
        with self._changed:
            self._is_fetching = False
            self._changed.notify_all()

    def _take(self, token: Token, asked_s: float) -> None:
        epoch = None
        with self._changed:
            now_s = self._clock()
            # Its life counts from before it was asked for: better too short than too long.
            ends_s = None if token.expires_in_s is None else asked_s + token.expires_in_s
            error = None
            if ends_s is not None and ends_s <= now_s:
                error = StoreError(
                    StoreErrorKind.CREDENTIALS, "", f"no access token: {self._source!r} gives one that has run out"
                )
            elif token.value == self._value and self._is_refused and now_s < self._retry_same_s:
                error = StoreError(
                    StoreErrorKind.CREDENTIALS, "", f"the store refuses the only access token of {self._source!r}"
                )
                self._error = error
                self._not_before_s = self._retry_same_s
                return
            if error is None:
                is_new = token.value != self._value
                if is_new:
                    self._epoch += 1
                    epoch = self._epoch
                self._value, self._ends_s, self._is_refused = token.value, ends_s, False
                self._error, self._failures, self._not_before_s = None, 0, now_s
                self._schedule(token, now_s, is_new=is_new)
        if error is not None:
            self._failed(error)
        elif epoch is not None and self._on_change is not None:
            self._on_change(epoch)

    def _schedule(self, token: Token, now_s: float, *, is_new: bool) -> None:
        """Decide when to ask next."""
        after_s = []
        if self._ends_s is not None:
            life_s = self._ends_s - now_s
            self._margin_s = min(MARGIN_S, _MARGIN_SHARE * life_s)
            after_s.append((REFRESH_SHARE + REFRESH_JITTER * (2 * self._draw() - 1)) * life_s)
        if token.again_in_s is not None:
            after_s.append(token.again_in_s)
        wait_s = min(after_s, default=float("inf"))
        self._refresh_at_s = now_s + (wait_s if is_new else max(wait_s, SAME_AGAIN_S))

    def _failed(self, error: StoreError) -> None:
        with self._changed:
            now_s = self._clock()
            self._failures += 1
            self._not_before_s = now_s + self._back_off_s(self._failures)
            self._error = error
            is_needed = self._need(now_s) is _Need.NOW
            left_s = None if self._ends_s is None else round(self._ends_s - now_s)
            failures = self._failures
        # When it is needed, whoever asked gets the error. A source that stays broken is told of ever more rarely.
        if not is_needed and failures & (failures - 1) == 0:
            log.warning("credentials not renewed, old ones serve", reason=str(error), good_for_s=left_s, tries=failures)

    def _back_off_s(self, tries: int) -> float:
        return min(BACK_OFF_MOST_S, BACK_OFF_FIRST_S * 2.0 ** min(tries - 1, 10)) * (0.5 + 0.5 * self._draw())

    def _reason(self) -> StoreError:
        """Make an error of its own for each caller: they are raised in many threads."""
        if self._error is None:
            return StoreError(StoreErrorKind.CREDENTIALS, "", f"no access token: {self._source!r} gives none")
        return StoreError(self._error.store_kind, "", str(self._error))
