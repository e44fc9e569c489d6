"""Blocking calls in virtual time: they wait without waiting, one works at a time, and runs repeat."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from bench.faults import Delay, Fault, FaultyStore, Hang, Throttle
from bench.virtual_time import VirtualThreads
from streamd.errors import StoreError, StoreErrorKind
from streamd.store.directory import DirectoryStore
from streamd.store.port import Condition


def in_virtual_time(test: Callable[[], Any]) -> None:
    trio.run(test, clock=trio.testing.MockClock(autojump_threshold=0))


async def make(threads: VirtualThreads, *calls: Callable[[], object]) -> None:
    """Make calls at the same time."""
    limiter = trio.CapacityLimiter(100)
    async with trio.open_nursery() as nursery:
        for call in calls:
            nursery.start_soon(lambda call: threads.run(call, abandon_on_cancel=True, limiter=limiter), call)


def test_time_passes_as_the_calls_say_and_not_while_one_works() -> None:
    ends: list[tuple[str, float]] = []

    async def test() -> None:
        threads = VirtualThreads()

        def call(name: str, seconds: float) -> None:
            threads.sleep(seconds)
            time.sleep(0.02)  # work: a clock that jumped meanwhile would show
            ends.append((name, threads.now_s()))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep, 1000)
            await make(threads, lambda: call("long", 900.0), lambda: call("short", 10.0), lambda: call("same", 10.0))
        assert trio.current_time() == 1000

    began_s = time.monotonic()
    in_virtual_time(test)
    assert sorted(ends[:2]) == [("same", 10.0), ("short", 10.0)]  # at the same time, in either order
    assert ends[2:] == [("long", 900.0)]
    assert time.monotonic() - began_s < 60


def test_one_call_works_at_a_time() -> None:
    working: list[int] = []
    most: list[int] = []

    async def test() -> None:
        threads = VirtualThreads()

        def call() -> None:
            for _ in range(5):
                working.append(1)
                most.append(len(working))
                time.sleep(0.001)
                working.pop()
                threads.sleep(0.1)

        await make(threads, *[call] * 8)

    in_virtual_time(test)
    assert max(most) == 1


def test_a_call_that_was_left_lets_the_others_work() -> None:
    done: list[float] = []

    async def test() -> None:
        threads = VirtualThreads()
        limiter = trio.CapacityLimiter(10)
        with trio.move_on_after(5) as scope:
            await threads.run(lambda: threads.sleep(3600), abandon_on_cancel=True, limiter=limiter)
        assert scope.cancelled_caught
        await make(threads, lambda: done.append(threads.now_s()))

    in_virtual_time(test)
    assert done == [5.0]


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(str(tmp_path / "store"))


def test_a_store_in_virtual_time_is_late_silent_and_refuses_what_is_above_its_rate(store: DirectoryStore) -> None:
    info = store.put("k", bytes(1000), condition=Condition.ABSENT)
    seen: list[tuple[object, float]] = []

    async def test() -> None:
        threads = VirtualThreads()
        faulty = FaultyStore(store, clock=threads.now_s, wait=threads.wait, silence_s=10)

        def read() -> None:
            try:
                got: object = sum(len(p) for p in faulty.read("k", generation=info.generation, start=0, end=1000))
            except StoreError as error:
                got = error.store_kind
            seen.append((got, threads.now_s()))

        faulty.add(Fault(Delay(4.0)))
        await make(threads, read)
        faulty.add(Fault(Hang()))
        await make(threads, read)
        throttle = faulty.add(Fault(Throttle(2.0), times=None))
        await make(threads, read)
        await make(threads, read)
        await trio.sleep(0.5)
        await make(threads, read)
        faulty.remove(throttle)
        await make(threads, read)

    in_virtual_time(test)
    throttled = StoreErrorKind.THROTTLED
    assert seen == [
        (1000, 4.0),
        (StoreErrorKind.TRANSIENT, 14.0),
        (1000, 14.0),
        (throttled, 14.0),
        (1000, 14.5),
        (1000, 14.5),
    ]


def test_a_wait_ends_when_its_event_is_set() -> None:
    event = threading.Event()
    seen: list[tuple[bool, float]] = []

    async def test() -> None:
        threads = VirtualThreads()
        async with trio.open_nursery() as nursery:

            async def set_it() -> None:
                await trio.sleep(7)
                event.set()

            nursery.start_soon(set_it)
            await make(threads, lambda: seen.append((threads.wait(event, 100), threads.now_s())))

    in_virtual_time(test)
    [(is_set, at_s)] = seen
    assert is_set
    assert 7 <= at_s <= 8
