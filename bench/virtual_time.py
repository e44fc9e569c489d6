"""Blocking calls in virtual time: real threads, one at a time, whose waits are waits on Trio's mock clock.

    async def test():                                    # in a Trio run on a `MockClock`
        threads = VirtualThreads()
        link = ShapedStore(store, latency_s=0.015, bytes_per_s=1e8, clock=threads.now_s, sleep=threads.sleep)
        faulty = FaultyStore(link, clock=threads.now_s, wait=threads.wait, silence_s=10)
        image = ServedImage(faulty, …, run_blocking=threads.run)

The code under test is what runs in production, its threads included; only the store's waits are virtual. Time jumps
when every call waits, and never while one works. Since one call works at a time, in the order in which they began or
woke up, a run repeats.
"""

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass

import trio
import trio.testing

# A removed fault is noticed at the next step of a wait for it.
_STEP_S = 0.25


@dataclass(slots=True, eq=False)
class _Call:
    """One blocking call; `works`: it has the turn. `is_over`: whoever made it has left, and nobody waits for it."""

    works: bool = False
    is_over: bool = False


class VirtualThreads:
    """Makes blocking calls for one Trio run on a `MockClock`; see the module's text. Made within that run."""

    def __init__(self) -> None:
        clock = trio.lowlevel.current_clock()
        assert isinstance(clock, trio.testing.MockClock), "virtual time needs a MockClock"
        self._clock = clock
        self._token = trio.lowlevel.current_trio_token()
        self._limiter = trio.CapacityLimiter(math.inf)
        self._turn = trio.Semaphore(1)
        self._unready = 0  # calls that work or wait for their turn: while there are any, time stands still
        self._local = threading.local()

    def now_s(self) -> float:
        """Give the virtual time, from any thread, as `trio.current_time` does."""
        return self._clock.current_time()

    async def run(
        self, call: Callable[..., object], *args: object, abandon_on_cancel: bool, limiter: trio.CapacityLimiter
    ) -> object:
        """Make a call in a thread; to be used in the place of `trio.to_thread.run_sync`."""
        made = _Call()

        def in_thread() -> object:
            self._local.call = made
            return call(*args)

        async with limiter:
            await self._begin(made)
            try:
                return await trio.to_thread.run_sync(
                    in_thread, abandon_on_cancel=abandon_on_cancel, limiter=self._limiter
                )
            finally:
                made.is_over = True
                self._pause(made)

    def sleep(self, seconds: float) -> None:
        """Wait, in a thread of `run`; ends early, by an exception, when the Trio run does."""
        trio.from_thread.run(self._sleep, self._local.call, seconds, trio_token=self._token)

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        """Wait for an event as `Event.wait` does, in a thread of `run`."""
        until_s = self.now_s() + timeout_s
        while not event.is_set() and (left_s := until_s - self.now_s()) > 0:
            self.sleep(min(_STEP_S, left_s))
        return event.is_set()

    async def _sleep(self, call: _Call, seconds: float) -> None:
        self._pause(call)
        await trio.sleep(seconds)
        if not call.is_over:
            await self._begin(call)

    async def _begin(self, call: _Call) -> None:
        self._unready += 1
        self._clock.autojump_threshold = math.inf
        try:
            await self._turn.acquire()
        except BaseException:
            self._is_ready()
            raise
        call.works = True
        if call.is_over:  # while it waited for its turn
            self._pause(call)

    def _pause(self, call: _Call) -> None:
        if call.works:
            call.works = False
            self._turn.release()
            self._is_ready()

    def _is_ready(self) -> None:
        self._unready -= 1
        if not self._unready:
            self._clock.autojump_threshold = 0.0
