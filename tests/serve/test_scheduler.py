"""The in-flight table under every order of events: fetches end, fail and overlap as the test says."""

from collections.abc import Callable
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from streamd.config import FetchConfig, PolicyConfig
from streamd.errors import StoreError, StoreErrorKind
from streamd.serve import fetch as fetching
from streamd.serve.gets import Progress
from streamd.serve.handles import PendingRead
from streamd.serve.learning import Trust
from streamd.serve.limit import START_BYTES
from streamd.serve.memory import Accountant
from streamd.serve.order import Want
from streamd.serve.plan import FrameSpan, GetPlan, Layout
from streamd.serve.policy import COURSES, Course
from streamd.serve.residency import Residency
from streamd.serve.scheduler import GATHER_S, Scheduler
from streamd.serve.stats import ServeStats

KIB, MIB = 1 << 10, 1 << 20
# Of an image in these tests, where there is one: it then takes some 5 s to load.
RATE = 512 * KIB


class Call:
    """A fetch under way, whose course the test decides."""

    def __init__(self, plan: GetPlan, progress: Progress, deliver: Callable[[FrameSpan, bytes], None]) -> None:
        self.plan = plan
        self.progress = progress
        self._deliver = deliver
        self._left = list(plan.frames)
        self.over = trio.Event()
        self.error: StoreError | None = None

    def deliver_next(self) -> bool:
        if not self._left:
            return False
        frame = self._left.pop(0)
        self.progress.received = frame.end
        self.progress.origin_bytes += frame.end - frame.start
        self._deliver(frame, bytes(frame.length))
        return True

    def finish(self) -> None:
        while self.deliver_next():
            pass
        self.over.set()

    def fail(self, kind: StoreErrorKind) -> None:
        if not self._left:
            self.over.set()
            return
        self.error = StoreError(kind, "pack", "by the test")
        self.over.set()


class Waiting(PendingRead):
    """A read that says when it is over."""

    __slots__ = ("_over",)

    def __init__(self, want: Want, over: set[PendingRead]) -> None:
        super().__init__(want, trio.current_time())
        self._over = over

    def settled(self) -> None:
        self._over.add(self)


class Bench:
    """A scheduler whose blocking calls are `calls`."""

    def __init__(
        self, saved: Any, *, ahead: bool, memory_bytes: int, foresees: bool = False, max_bytes_per_s: int = 0
    ) -> None:
        self.calls: list[Call] = []
        self.asked: list[tuple[float, GetPlan]] = []  # every GET, and when it began
        self.layout = Layout(saved.pinned.manifest.table)
        self.stored = [c for c in range(len(self.layout)) if not self.layout.is_zero(c)]
        self.stats = ServeStats()
        self.accountant = Accountant(memory_bytes, reserve_bytes=memory_bytes // 2)
        self.residency = Residency(
            self.layout, self.accountant, self.stats, cache=None, on_room=lambda: self.scheduler.kick()
        )
        self.scheduler = Scheduler(
            saved.store,
            saved.pinned.packs,
            self.layout,
            self.residency,
            self.accountant,
            self.stats,
            fetch=FetchConfig(background_gets=2, get_bytes=128 * KIB, fault_gets=3, max_bytes_per_s=max_bytes_per_s),
            policy=PolicyConfig(hold_s=60, credentials_wait_s=300),
            foresees=foresees,
            ahead=ahead,
            run_blocking=self._run,
        )
        self.reads: list[PendingRead] = []
        self.over: set[PendingRead] = set()

    async def _run(self, call: Callable[..., object], *args: Any, **_: object) -> None:
        assert call is fetching.fetch
        _store, _pinned, plan, progress, deliver = args
        under_way = Call(plan, progress, deliver)
        self.calls.append(under_way)
        self.asked.append((trio.current_time(), plan))
        try:
            await under_way.over.wait()
            await _told_before()
        finally:
            self.calls.remove(under_way)
        if under_way.error is not None:
            raise under_way.error

    def want(self, chunk: int, want: Want) -> PendingRead | None:
        if self.residency.is_here(chunk):
            return None
        read = Waiting(want, self.over)
        read.wait_for({chunk})
        self.reads.append(read)
        self.scheduler.want(chunk, want, read)
        return read

    def want_hot(self, first: int, last: int) -> None:
        start, end = self.layout.start[self.stored[first]], self.layout.start[self.stored[last]]
        self.scheduler.want_hot([(start, end)])

    async def answer(self) -> None:
        """Be a link that is much faster than any rate: every GET is over after 10 ms."""
        while True:
            for call in list(self.calls):
                call.finish()
            await trio.sleep(0.01)

    def asked_bytes(self, since_s: float = 0.0, *, before: int | None = None) -> int:
        """Give the bytes that were asked for since then, of chunks below `before`."""
        plans = [plan for at_s, plan in self.asked if at_s >= since_s]
        return sum(plan.end - plan.start for plan in plans if before is None or plan.frames[0].chunk < before)

    def call_for(self, chunk: int) -> Call:
        return next(call for call in self.calls if chunk in [frame.chunk for frame in call.plan.frames])

    def check(self) -> None:
        for flight in self.scheduler._flights.values():
            assert flight.fetches >= 0
        assert self.scheduler._gets.urgent <= 3
        assert self.scheduler._gets.background <= 2


async def settle() -> None:
    """Let everything that was told to Trio happen, and chunks that have arrived be taken (in virtual time)."""
    await trio.sleep(2 * GATHER_S)


async def _told_before() -> None:
    """Let what threads have told Trio happen, as it does before the end of a thread is told."""
    told = trio.Event()
    trio.lowlevel.current_trio_token().run_sync_soon(told.set)
    await told.wait()


def in_virtual_time(test: Callable[[], Any]) -> None:
    async def limited() -> None:
        with trio.fail_after(4000):
            await test()

    trio.run(limited, clock=trio.testing.MockClock(autojump_threshold=0))


actions = st.lists(
    st.one_of(
        st.tuples(st.just("want"), st.integers(0, 30), st.sampled_from([Want.FAULT, Want.STREAM])),
        st.tuples(st.just("deliver"), st.integers(0, 9), st.none()),
        st.tuples(st.just("finish"), st.integers(0, 9), st.none()),
        st.tuples(st.just("fail"), st.integers(0, 9), st.sampled_from(StoreErrorKind)),
        st.tuples(st.just("evict"), st.just(0), st.none()),
        st.tuples(st.just("hot"), st.integers(0, 30), st.none()),
        st.tuples(st.just("forget hot"), st.just(0), st.none()),
        st.tuples(st.just("fault"), st.integers(0, 30), st.none()),
        st.tuples(st.just("wait"), st.sampled_from([0, 1, 70]), st.none()),
    ),
    max_size=60,
)


@given(steps=actions, ahead=st.booleans(), memory_kib=st.sampled_from([64, 1024]), far=st.booleans())
@settings(max_examples=150, deadline=None)
def test_every_wait_ends_and_all_memory_is_given_back(
    saved: Any, steps: list[tuple[str, int, Any]], ahead: bool, memory_kib: int, far: bool
) -> None:
    async def test() -> None:
        bench = Bench(saved, ahead=ahead, memory_bytes=memory_kib * KIB, foresees=True)
        if far:  # faults join nothing that is under way
            bench.scheduler._is_too_far = lambda flight: flight.want == Want.FAULT  # type: ignore[method-assign]
        async with trio.open_nursery() as nursery:
            await nursery.start(bench.scheduler.run)
            may_fail = False
            for action, number, extra in steps:
                call = bench.calls[number % len(bench.calls)] if bench.calls else None
                match action:
                    case "want":
                        bench.want(bench.stored[number * 5 % len(bench.stored)], extra)
                    case "deliver" if call:
                        call.deliver_next()
                    case "finish" if call:
                        call.finish()
                    case "fail" if call:
                        may_fail |= COURSES[extra] != Course.WAIT_FOREVER
                        call.fail(extra)
                    case "hot":
                        bench.want_hot(number * 5 % 150, number * 5 % 150 + 20)
                    case "forget hot":
                        bench.scheduler.forget_hot()
                    case "fault":
                        start = bench.layout.start[bench.stored[number * 5 % 150]]
                        bench.scheduler.note_fault(start, start + 1, file_end=bench.layout.start[-1])
                    case "evict":
                        bench.residency.shed(1 << 30, unread_too=True)
                        bench.scheduler.kick()
                    case "wait":
                        await trio.sleep(number)
                await settle()
                await trio.testing.wait_all_tasks_blocked()
                bench.check()
            # From now on the store is well: whatever is asked is answered, and so every wait ends.
            while not bench.over >= set(bench.reads):
                for call in list(bench.calls):
                    call.finish()
                await trio.sleep(0.5)
            assert may_fail or all(read.failure is None for read in bench.reads)
            quiet_s = 0
            while quiet_s < 10:  # the pace after a 429 is one request a second, at the least
                quiet_s = 0 if bench.calls else quiet_s + 1
                for call in list(bench.calls):
                    call.finish()
                await trio.sleep(1)
                bench.residency.shed(1 << 30, unread_too=True)
                bench.scheduler.kick()
            bench.residency.shed(1 << 30, unread_too=True)
            assert bench.accountant.held_bytes == 0
            nursery.cancel_scope.cancel()

    in_virtual_time(test)


def test_a_late_failure_of_an_old_fetch_does_not_lose_a_new_wait_for_its_chunk(saved: Any) -> None:
    async def test() -> None:
        bench = Bench(saved, ahead=False, memory_bytes=MIB)
        bench.scheduler._is_too_far = lambda flight: flight.want == Want.FAULT  # type: ignore[method-assign]
        async with trio.open_nursery() as nursery:
            await nursery.start(bench.scheduler.run)
            chunk = bench.stored[50]
            bench.want(chunk, Want.STREAM)
            await trio.testing.wait_all_tasks_blocked()
            old = bench.call_for(chunk)
            bench.want(chunk, Want.FAULT)
            await trio.testing.wait_all_tasks_blocked()
            (own,) = [call for call in bench.calls if call is not old]
            own.finish()
            await trio.testing.wait_all_tasks_blocked()
            await settle()
            assert bench.over >= set(bench.reads)
            bench.residency.shed(1 << 30, unread_too=True)
            anew = bench.want(chunk, Want.FAULT)
            await trio.testing.wait_all_tasks_blocked()
            old.fail(StoreErrorKind.TRANSIENT)
            await trio.sleep(10)
            assert bench.calls
            for latest in list(bench.calls):  # the first try, and the second, since the first stood still
                latest.fail(StoreErrorKind.TRANSIENT)
            await trio.sleep(10)
            for call in bench.calls:
                call.finish()
            await settle()
            await trio.testing.wait_all_tasks_blocked()
            assert anew is not None
            assert anew in bench.over
            nursery.cancel_scope.cancel()

    in_virtual_time(test)


def test_a_fault_goes_before_the_stream_and_the_stream_before_what_nobody_asked_for(saved: Any) -> None:
    async def test() -> None:
        bench = Bench(saved, ahead=True, memory_bytes=8 * MIB)
        async with trio.open_nursery() as nursery:
            await nursery.start(bench.scheduler.run)
            await trio.testing.wait_all_tasks_blocked()
            assert len(bench.calls) == 2  # ahead, from the beginning
            stream, fault = bench.stored[120], bench.stored[150]
            bench.want(stream, Want.STREAM)
            bench.want(fault, Want.FAULT)
            await trio.testing.wait_all_tasks_blocked()
            fault_call = bench.call_for(fault)  # at once: its capacity is its own
            assert [frame.chunk for frame in fault_call.plan.frames] == [fault]
            assert not any(stream in [f.chunk for f in call.plan.frames] for call in bench.calls)
            bench.calls[0].finish()
            await settle()
            await trio.testing.wait_all_tasks_blocked()
            assert bench.call_for(stream).plan.frames[0].chunk == stream
            nursery.cancel_scope.cancel()

    in_virtual_time(test)


def test_what_was_read_and_has_left_memory_is_not_fetched_again_ahead_of_anybody(saved: Any) -> None:
    async def test() -> None:
        bench = Bench(saved, ahead=True, memory_bytes=256 * KIB)
        brought: list[int] = []
        async with trio.open_nursery() as nursery:
            await nursery.start(bench.scheduler.run)
            for chunk in bench.stored:
                read = bench.want(chunk, Want.STREAM)
                while read is not None and read not in bench.over:
                    for call in list(bench.calls):
                        brought += [frame.chunk for frame in call.plan.frames]
                        call.finish()
                    await settle()
                    await trio.testing.wait_all_tasks_blocked()
                bench.residency.touched(chunk)
            for _ in range(20):
                for call in list(bench.calls):
                    brought += [frame.chunk for frame in call.plan.frames]
                    call.finish()
                await trio.sleep(1)
                bench.residency.shed(1 << 30, unread_too=True)
                bench.scheduler.kick()
            nursery.cancel_scope.cancel()
        assert set(brought) == set(bench.stored)
        assert len(brought) <= 1.02 * len(bench.stored)

    in_virtual_time(test)


def test_a_read_that_joined_the_learned_order_is_answered_when_that_is_given_up(saved: Any) -> None:
    async def test() -> None:
        bench = Bench(saved, ahead=False, memory_bytes=8 * MIB, foresees=True)
        async with trio.open_nursery() as nursery:
            await nursery.start(bench.scheduler.run)
            bench.want_hot(0, 120)
            await trio.testing.wait_all_tasks_blocked()
            read = bench.want(bench.stored[100], Want.STREAM)  # still queued: two GETs at a time
            bench.scheduler.forget_hot()
            while read not in bench.over:
                for call in list(bench.calls):
                    call.finish()
                await trio.sleep(0.5)
            assert read is not None
            assert read.failure is None
            nursery.cancel_scope.cancel()

    in_virtual_time(test)


@pytest.mark.parametrize(
    ("trust", "expected"),
    [
        (Trust.UNTRIED, ["stream", "hot", "stream"]),
        (Trust.PROVEN, ["hot", "hot", "hot"]),
        (Trust.IN_DOUBT, ["stream", "stream"]),
    ],
)
def test_the_learned_order_goes_before_the_stream_as_far_as_it_is_trusted(
    saved: Any, trust: Trust, expected: list[str]
) -> None:
    async def test() -> None:
        bench = Bench(saved, ahead=False, memory_bytes=64 * MIB, foresees=True)
        async with trio.open_nursery() as nursery:
            await nursery.start(bench.scheduler.run)
            bench.scheduler.trust_hot(trust)
            bench.want_hot(0, 120)
            await trio.testing.wait_all_tasks_blocked()
            for chunk in (130, 150):  # apart, so that one GET doesn't bring both
                bench.want(bench.stored[chunk], Want.STREAM)
            under_way = list(bench.calls)
            begun: list[str] = []
            while len(begun) < len(expected):
                bench.calls[0].finish()
                await trio.sleep(0.5)
                begun += [
                    "stream" if c.plan.frames[0].chunk >= 120 else "hot" for c in bench.calls if c not in under_way
                ]
                under_way = list(bench.calls)
            assert begun[: len(expected)] == expected
            nursery.cancel_scope.cancel()

    in_virtual_time(test)


def test_a_chunk_that_comes_right_before_everything_stands_still_reaches_its_reader(saved: Any) -> None:
    async def test() -> None:
        bench = Bench(saved, ahead=False, memory_bytes=64 * MIB)
        async with trio.open_nursery() as nursery:
            await nursery.start(bench.scheduler.run)
            reads = [bench.want(chunk, Want.STREAM) for chunk in bench.stored[:2]]
            await trio.testing.wait_all_tasks_blocked()
            (call,) = bench.calls
            call.deliver_next()  # taken at once
            await trio.testing.wait_all_tasks_blocked()
            call.deliver_next()  # kept for the next one, which doesn't come
            await trio.testing.wait_all_tasks_blocked()
            assert bench.over == {reads[0]}
            await trio.sleep(0.2)
            assert bench.over == set(reads)
            nursery.cancel_scope.cancel()

    in_virtual_time(test)


def test_what_is_read_is_fetched_though_the_learned_order_has_filled_the_memory(saved: Any) -> None:
    async def test() -> None:
        bench = Bench(saved, ahead=False, memory_bytes=256 * KIB, foresees=True)
        async with trio.open_nursery() as nursery:
            await nursery.start(bench.scheduler.run)
            bench.want_hot(0, 150)
            for _ in range(20):  # nobody reads what comes, and soon there is no room for more of it
                for call in list(bench.calls):
                    call.finish()
                await trio.sleep(0.5)
            read = bench.want(bench.stored[140], Want.STREAM)
            assert read is not None
            await trio.testing.wait_all_tasks_blocked()
            bench.call_for(bench.stored[140]).finish()
            await settle()
            assert read in bench.over
            nursery.cancel_scope.cancel()

    in_virtual_time(test)


def test_what_nobody_waits_for_and_stood_still_is_asked_for_again(saved: Any) -> None:
    async def test() -> None:
        bench = Bench(saved, ahead=True, memory_bytes=64 * MIB)
        async with trio.open_nursery() as nursery:
            await nursery.start(bench.scheduler.run)
            await trio.testing.wait_all_tasks_blocked()
            hung = bench.calls[0]
            for _ in range(400):
                for call in list(bench.calls):
                    if call is not hung:
                        call.finish()
                await trio.sleep(0.5)
            hung.fail(StoreErrorKind.TRANSIENT)
            await trio.sleep(10)
            for _ in range(20):
                for call in list(bench.calls):
                    call.finish()
                await trio.sleep(1)
            assert not any(bench.residency.is_absent(chunk) for chunk in bench.stored)
            assert not bench.scheduler._flights
            nursery.cancel_scope.cancel()

    in_virtual_time(test)


# A rate


def test_under_a_rate_what_nobody_waits_for_takes_that_and_the_link_looks_the_same(saved: Any) -> None:
    async def test() -> None:
        bench = Bench(saved, ahead=True, memory_bytes=64 * MIB, max_bytes_per_s=RATE)
        async with trio.open_nursery() as nursery:
            began_s = trio.current_time()
            await nursery.start(bench.scheduler.run)
            nursery.start_soon(bench.answer)
            while any(bench.residency.is_absent(chunk) for chunk in bench.stored):
                await trio.sleep(0.01)
            took_s = trio.current_time() - began_s
            nursery.cancel_scope.cancel()
        burst, taken = bench.scheduler.rate.burst_bytes, 0
        for at_s, plan in bench.asked:
            taken += plan.end - plan.start
            assert taken <= burst + RATE * (at_s - began_s) + len(bench.asked)
        assert taken == bench.stats.origin_bytes
        assert (taken - burst) / RATE <= took_s <= taken / RATE
        assert took_s > 2
        assert bench.scheduler.limit.bytes == START_BYTES

    in_virtual_time(test)


def test_a_fault_waits_for_no_rate_and_what_nobody_waits_for_pays_most_of_it(saved: Any) -> None:
    async def test() -> None:
        slow = RATE // 8
        bench = Bench(saved, ahead=True, memory_bytes=64 * MIB, max_bytes_per_s=slow)
        first_fault, size = bench.stored[-120], bench.scheduler.rate.get_bytes
        async with trio.open_nursery() as nursery:
            await nursery.start(bench.scheduler.run)
            nursery.start_soon(bench.answer)
            await trio.sleep(0.5)
            assert bench.scheduler.rate.is_held_back(trio.current_time())
            now_s = trio.current_time()
            for chunk in bench.stored[-120:]:
                bench.want(chunk, Want.FAULT)
            await trio.testing.wait_all_tasks_blocked()
            assert bench.call_for(first_fault)
            assert trio.current_time() == now_s
            await trio.sleep(1.0)
            assert bench.over == set(bench.reads)
            await trio.sleep(15.0)
            owed = bench.asked_bytes(now_s) - bench.asked_bytes(now_s, before=first_fault)
            assert owed > 16 * slow * 0.75  # it is not paid yet
            earned = 16 * slow / 4
            assert 0 < earned - size / 2 <= bench.asked_bytes(now_s, before=first_fault) <= earned + size
            nursery.cancel_scope.cancel()

    in_virtual_time(test)


def test_a_slot_comes_free_while_the_learned_order_has_the_rate(saved: Any) -> None:
    async def test() -> None:
        bench = Bench(saved, ahead=False, memory_bytes=64 * MIB, foresees=True, max_bytes_per_s=RATE)
        async with trio.open_nursery() as nursery:
            await nursery.start(bench.scheduler.run)
            nursery.start_soon(bench.answer)
            bench.want_hot(0, 150)
            await trio.sleep(0.5)
            read = bench.want(bench.stored[160], Want.STREAM)
            await trio.sleep(1.5)
            assert read in bench.over
            assert sum(bench.residency.is_absent(chunk) for chunk in bench.stored[:150]) > 20
            nursery.cancel_scope.cancel()

    in_virtual_time(test)


def test_a_share_of_the_link_holds_from_when_it_is_told(saved: Any) -> None:
    async def test() -> None:
        bench = Bench(saved, ahead=True, memory_bytes=64 * MIB, max_bytes_per_s=RATE)
        async with trio.open_nursery() as nursery:
            await nursery.start(bench.scheduler.run)
            bench.scheduler.share_link(RATE // 8)
            nursery.start_soon(bench.answer)
            await trio.sleep(4)
            slow_bytes = bench.asked_bytes()
            assert slow_bytes <= bench.scheduler.rate.burst_bytes + RATE // 2
            bench.scheduler.share_link(RATE)
            await trio.sleep(2)
            assert bench.asked_bytes() - slow_bytes >= 2 * RATE - bench.scheduler.rate.get_bytes
            bench.scheduler.share_link(0)
            await trio.sleep(0.2)
            assert not any(bench.residency.is_absent(chunk) for chunk in bench.stored)
            nursery.cancel_scope.cancel()

    in_virtual_time(test)


def test_bytes_that_did_not_come_are_not_charged(saved: Any) -> None:
    async def test() -> None:
        bench = Bench(saved, ahead=True, memory_bytes=64 * MIB, max_bytes_per_s=RATE)
        async with trio.open_nursery() as nursery:
            await nursery.start(bench.scheduler.run)
            await trio.testing.wait_all_tasks_blocked()
            rate, now_s = bench.scheduler.rate, trio.current_time()
            assert rate.delay_s(rate.burst_bytes, now_s) > 0
            for call in list(bench.calls):
                call.fail(StoreErrorKind.TRANSIENT)
            await settle()
            await trio.testing.wait_all_tasks_blocked()
            assert not bench.calls
            assert rate.delay_s(rate.burst_bytes, now_s) == 0
            nursery.cancel_scope.cancel()

    in_virtual_time(test)
