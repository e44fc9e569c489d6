"""Reads of a served image: right bytes, in the right order, whatever the store does; or the policy's answer."""

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.faults import Cut, Fail, Fault, FaultyStore, Hang
from streamd.config import FetchConfig
from streamd.errors import StoreErrorKind
from streamd.serve.cache_directory import open_cache
from streamd.serve.handles import BY_OPERATOR, Handle, Opener, ReadFailed
from streamd.serve.image import ServedImage
from streamd.serve.order import Want
from streamd.serve.plan import Layout
from streamd.serve.policy import COURSES, Course

KIB, MIB = 1 << 10, 1 << 20
CHUNK = 16 * KIB


@asynccontextmanager
async def running(image: ServedImage) -> AsyncIterator[Handle]:
    """The image, serving, with one open handle of pages.img."""
    async with trio.open_nursery() as nursery:
        await nursery.start(image.run)
        await image.load_small_files()
        yield image.open("pages.img", Opener(1, "test", None))
        nursery.cancel_scope.cancel()


def in_virtual_time(test: Callable[[], Any]) -> None:
    """Run a test on a clock that jumps to the next deadline; what hangs fails after a virtual hour."""

    async def limited() -> None:
        with trio.fail_after(4000):
            await test()

    trio.run(limited, clock=trio.testing.MockClock(autojump_threshold=0))


async def read(image: ServedImage, handle: Handle, offset: int, size: int) -> bytes:
    return bytes(await image.read(handle, offset, size))


async def test_small_files_are_served_from_memory_while_the_store_is_gone(saved: Any) -> None:
    store = saved.faulty()
    image = saved.serve(store, inline=False)
    async with running(image):
        store.add(Fault(Fail(StoreErrorKind.TRANSIENT), times=None))
        for name in ("checkpoint.img", "pages_meta.img"):
            handle = image.open(name, Opener(1, "test", None))
            content = await read(image, handle, 0, 1 << 30)
            assert len(content) == image.files[name].size
            assert content
            assert await read(image, handle, len(content), 10) == b""


@pytest.mark.parametrize("cached", [False, True], ids=["from memory", "with a cache"])
@pytest.mark.parametrize("ahead", [False, True], ids=["on demand", "ahead"])
async def test_every_byte_is_right(saved: Any, cached: bool, ahead: bool, make_cache: Any) -> None:
    image = saved.serve(cache=make_cache() if cached else None, ahead=ahead, inline=False)
    async with running(image) as handle:
        got = b"".join([await read(image, handle, o, 100_000) for o in range(0, len(saved.content), 100_000)])
        assert got == saved.content
        again = image.open("pages.img", Opener(2, "test", None))
        assert await read(image, again, 0, MIB) == saved.content[:MIB]


ranges = st.lists(st.tuples(st.integers(0, 4 * MIB + 10), st.integers(1, MIB)), min_size=1, max_size=20)
kinds = st.sampled_from([StoreErrorKind.TRANSIENT, StoreErrorKind.THROTTLED])
faults = st.lists(
    st.tuples(st.one_of(st.builds(Fail, kinds), st.builds(Cut, st.integers(-1, 40_000), kinds)), st.integers(1, 4)),
    max_size=6,
)


@given(asked=ranges, troubles=faults, ahead=st.booleans(), memory_kib=st.sampled_from([64, 512, 8192]))
@settings(max_examples=40, deadline=None)
def test_what_passes_is_waited_for_and_every_byte_is_right(
    saved: Any, asked: list[tuple[int, int]], troubles: list[tuple[Any, int]], ahead: bool, memory_kib: int
) -> None:
    store: FaultyStore = saved.faulty()
    image: ServedImage = saved.serve(store, ahead=ahead, memory_max_bytes=memory_kib * KIB)

    async def test() -> None:
        async with running(image) as handle:
            for action, nth in troubles:
                store.add(Fault(action, operation="read", nth=nth, times=2))

            async def check(offset: int, size: int) -> None:
                assert await read(image, handle, offset, size) == saved.content[offset : offset + size]

            async with trio.open_nursery() as nursery:
                for offset, size in asked:
                    nursery.start_soon(check, offset, size)
            for offset, size in asked:
                await check(offset, size)

    in_virtual_time(test)


@given(seed=st.integers(0, 2**32), kind=st.sampled_from(StoreErrorKind), share=st.floats(0, 0.5))
@settings(max_examples=40, deadline=None)
def test_a_read_gives_right_bytes_or_fails_by_the_policy(
    saved: Any, seed: int, kind: StoreErrorKind, share: float
) -> None:
    rng = random.Random(seed)
    store: FaultyStore = saved.faulty()
    image: ServedImage = saved.serve(store)
    outcomes: list[bool] = []

    async def test() -> None:
        async with running(image) as handle:
            for _ in range(int(60 * share)):
                store.add(Fault(Fail(kind), operation="read", nth=rng.randint(1, 120), times=1))

            async def check() -> None:
                offset = rng.randrange(0, 4 * MIB)
                try:
                    outcomes.append(await read(image, handle, offset, 64 * KIB) == saved.content[offset:][: 64 * KIB])
                except ReadFailed:
                    assert COURSES[kind] != Course.WAIT_FOREVER
                    outcomes.append(True)

            async with trio.open_nursery() as nursery:
                for _ in range(40):
                    nursery.start_soon(check)

    in_virtual_time(test)
    assert outcomes == [True] * 40


@given(
    readers=st.lists(ranges, min_size=1, max_size=4),
    memory_kib=st.sampled_from([64, 256, 1024]),
    cache_kib=st.sampled_from([0, 100, 1000, 8192]),
    ahead=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_every_byte_is_right_however_little_room_there_is(
    saved: Any,
    tmp_path_factory: pytest.TempPathFactory,
    readers: list[list[tuple[int, int]]],
    memory_kib: int,
    cache_kib: int,
    ahead: bool,
) -> None:
    place = tmp_path_factory.mktemp("cache")
    manifest = saved.pinned.data
    layout = Layout(saved.pinned.manifest.table)
    cache = open_cache(place, manifest, layout, source="s", owner="test", max_bytes=cache_kib * KIB)
    image: ServedImage = saved.serve(cache=cache, ahead=ahead, inline=False, memory_max_bytes=memory_kib * KIB)

    async def reader(asked: list[tuple[int, int]]) -> None:
        handle = image.open("pages.img", Opener(1, "test", None))
        for offset, size in asked:
            assert await read(image, handle, offset, size) == saved.content[offset : offset + size]

    async def test() -> None:
        async with running(image):
            with trio.fail_after(60):
                async with trio.open_nursery() as nursery:
                    for asked in readers:
                        nursery.start_soon(reader, asked)

    trio.run(test)


@pytest.mark.parametrize("kind", StoreErrorKind, ids=str)
def test_reads_fail_when_the_policy_says_so_and_not_before(saved: Any, kind: StoreErrorKind) -> None:
    store: FaultyStore = saved.faulty()
    image: ServedImage = saved.serve(store)
    expected_s = {Course.WAIT_BOUNDED: 300.0, Course.ASK_AGAIN_AND_HOLD: 60.0, Course.REFETCH_ONCE: 0.0}

    async def test() -> None:
        async with running(image) as handle:
            offset = first_stored(image)
            fault = store.add(Fault(Fail(kind), operation="read", times=None))
            began_s = trio.current_time()
            if COURSES[kind] == Course.WAIT_FOREVER:
                with trio.move_on_after(3600) as scope:
                    await read(image, handle, offset, KIB)
                assert scope.cancelled_caught
                store.remove(fault)
                assert await read(image, handle, offset, KIB) == saved.content[offset : offset + KIB]
                return
            with pytest.raises(ReadFailed):
                await read(image, handle, offset, KIB)
            assert trio.current_time() - began_s == pytest.approx(expected_s[COURSES[kind]], abs=0.01)
            assert seen_of_failures(image) == {kind.value: 1}
            store.remove(fault)
            assert await read(image, handle, offset, KIB) == saved.content[offset : offset + KIB]

    in_virtual_time(test)


def seen_of_failures(image: ServedImage) -> dict[str, int]:
    """Give how many reads failed by each kind, as the status says it."""
    status = image.status()
    assert status["failed_reads"] == sum(failures["reads"] for failures in status["failures"].values())
    assert all(failures["message"] for failures in status["failures"].values())
    return {kind: failures["reads"] for kind, failures in status["failures"].items()}


def test_a_wait_counts_as_a_stall_from_when_it_is_long_whether_it_goes_on_or_ends_badly(saved: Any) -> None:
    store: FaultyStore = saved.faulty()
    image: ServedImage = saved.serve(store)

    async def test() -> None:
        async with running(image) as handle:
            store.add(Fault(Fail(StoreErrorKind.FORBIDDEN), operation="read", times=None))
            async with trio.open_nursery() as nursery:

                async def expect_failure() -> None:
                    with pytest.raises(ReadFailed):
                        await read(image, handle, first_stored(image), KIB)

                nursery.start_soon(expect_failure)
                seen = []
                for sleep_s in (9.0, 2.0, 50.0):  # it begins to count after ten seconds, and fails after sixty
                    await trio.sleep(sleep_s)
                    of = image.status()["reads"].values()
                    seen.append(tuple(sum(counts[name] for counts in of) for name in ("stalled", "waited", "bytes")))
            assert seen == [(0, 0, 0), (1, 0, 0), (1, 1, 0)]
            assert max(counts["longest_s"] for counts in of) == pytest.approx(60.0, abs=0.01)

    in_virtual_time(test)


def test_reads_that_come_after_their_handle_was_failed_are_counted_as_failed(saved: Any) -> None:
    image: ServedImage = saved.serve()

    async def test() -> None:
        async with running(image) as handle:
            assert image.fail(lambda _: True, "test", kind=BY_OPERATOR) == 1
            assert seen_of_failures(image) == {}
            for expected in (1, 2):
                with pytest.raises(ReadFailed):
                    await read(image, handle, 0, KIB)
                assert seen_of_failures(image) == {BY_OPERATOR: expected}

    in_virtual_time(test)


@pytest.mark.parametrize("ahead", [False, True], ids=["a read waits", "nobody waits"])
def test_a_store_that_is_away_is_noticed_and_so_is_its_return(saved: Any, ahead: bool) -> None:
    store: FaultyStore = saved.faulty()
    slow = FetchConfig(get_bytes=256 * KIB, max_bytes_per_s=MIB)  # so that there is something left to fetch ahead
    image: ServedImage = saved.serve(store, ahead=ahead, memory_max_bytes=64 * MIB, fetch=slow)

    async def test() -> None:
        async with running(image) as handle:
            fault = store.add(Fault(Fail(StoreErrorKind.TRANSIENT), operation="read", times=None))
            async with trio.open_nursery() as nursery:
                if not ahead:
                    nursery.start_soon(read, image, handle, first_stored(image), KIB)
                await trio.sleep(100.0)
                assert image.status()["store_wait_s"] == pytest.approx(100.0, abs=3.0)
                store.remove(fault)
                await trio.sleep(10.0)
            assert image.status()["store_wait_s"] == 0.0
            assert image.status()["failures"] == {}

    in_virtual_time(test)


def first_stored(image: ServedImage, *, from_chunk: int = 0) -> int:
    """Offset in pages.img of the first chunk from there on that is not zeros."""
    table = image.manifest.table
    first = next(f.first_chunk for f in image.manifest.files if f.name == "pages.img")
    chunk = next(c for c in range(first + from_chunk, len(table)) if table.codec[c] != 0)
    return int(table.start[chunk] - table.start[first])


def test_a_shared_fetch_that_fails_ahead_does_not_fail_the_read_that_joined_it(saved: Any) -> None:
    store: FaultyStore = saved.faulty()
    image: ServedImage = saved.serve(store, ahead=True)

    async def test() -> None:
        store.add(Fault(Fail(StoreErrorKind.FORBIDDEN), operation="read", times=3, nth=2))
        async with running(image) as handle:
            got = [await read(image, handle, o, 64 * KIB) for o in range(0, 4 * MIB, 64 * KIB)]
            assert b"".join(got) == saved.content

    in_virtual_time(test)


def test_two_readers_of_everything_cost_one_fetch_of_everything(saved: Any, make_cache: Any) -> None:
    store: FaultyStore = saved.faulty()
    image: ServedImage = saved.serve(store, cache=make_cache(), inline=False, memory_max_bytes=16 * MIB)

    async def test() -> None:
        async with running(image):

            async def reader(step: int) -> None:
                handle = image.open("pages.img", Opener(step, "test", None))
                for offset in range(0, 4 * MIB, step):
                    assert await read(image, handle, offset, step) == saved.content[offset : offset + step]

            async with trio.open_nursery() as nursery:
                nursery.start_soon(reader, 64 * KIB)
                nursery.start_soon(reader, 100 * KIB)

    trio.run(test)
    assert image.stats.origin_bytes <= 1.02 * sum(image.manifest.table.frame_bytes)


def test_a_fault_is_fetched_before_the_stream_that_waits(saved: Any) -> None:
    store: FaultyStore = saved.faulty()
    fetch = FetchConfig(background_gets=1, fault_gets=1, get_bytes=64 * KIB)
    image: ServedImage = saved.serve(store, fetch=fetch)
    order: list[str] = []

    async def test() -> None:
        async with running(image) as handle:
            # Without a hole of 32 MiB no read of a 4 MiB image is a fault: the class is given.
            async def one(offset: int, want: Want) -> None:
                await image._read_as(handle, offset, offset + KIB, want)
                order.append(want.name)

            offsets = [first_stored(image, from_chunk=c) for c in range(0, 200, 9)]
            async with trio.open_nursery() as nursery:
                for offset in offsets[:-1]:
                    nursery.start_soon(one, offset, Want.STREAM)
                nursery.start_soon(one, offsets[-1], Want.FAULT)

    in_virtual_time(test)
    assert order.index("FAULT") <= 2  # what was under way may end first


async def test_chunks_below_a_stalled_byte_are_released(saved: Any) -> None:
    store: FaultyStore = saved.faulty()
    image = saved.serve(store, inline=False, ahead=False, fetch=FetchConfig(background_gets=1, get_bytes=256 * KIB))
    layout, base = image._layout, image.files["pages.img"].base
    # Eight chunks that one GET brings.
    plans = (
        layout.plan(chunk, wanted=lambda _: True, get_bytes=1 << 20, raw_bytes=8 * CHUNK)
        for chunk in range(60, len(layout))
        if not layout.is_zero(chunk)
    )
    plan = next(plan for plan in plans if len(plan.frames) == 8)
    got: list[int] = []

    async with running(image) as handle:

        async def one(index: int, start: int) -> None:
            assert await read(image, handle, start, KIB) == saved.content[start : start + KIB]
            got.append(index)

        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                # Something else keeps the only background GET busy until all eight are wanted.
                busy = store.add(Fault(Hang(), operation="read"))
                nursery.start_soon(one, 99, first_stored(image))
                await until(lambda: store.hanging == 1)
                for index, frame in enumerate(plan.frames):
                    nursery.start_soon(one, index, layout.start[frame.chunk] - base)
                    await trio.testing.wait_all_tasks_blocked()
                stall = store.add(Fault(Hang(at_byte=plan.frames[3].start - plan.start + 10), operation="read"))
                store.remove(busy)
                await until(lambda: len(got) == 4)
                await until(lambda: store.hanging == 1)
                assert sorted(got) == [0, 1, 2, 99]
                store.remove(stall)
        assert sorted(got) == [*range(8), 99]


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what threads bring about; the test's own deadline bounds it."""
    while not condition():
        await trio.sleep(0.005)


async def test_reads_of_one_handle_can_be_failed_alone(saved: Any) -> None:

    store: FaultyStore = saved.faulty()
    image = saved.serve(store, inline=False)
    async with running(image) as first:
        second = image.open("pages.img", Opener(2, "test", "other"))
        hang = store.add(Fault(Hang(), operation="read"))
        failed: list[bool] = []

        async def expect_failure() -> None:
            with pytest.raises(ReadFailed):
                await read(image, first, 0, MIB)
            failed.append(True)

        async def expect_bytes() -> None:
            assert await read(image, second, 0, MIB) == saved.content[:MIB]

        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(expect_failure)
                nursery.start_soon(expect_bytes)
                await trio.testing.wait_all_tasks_blocked()
                assert image.fail(lambda handle: handle is first, "test", kind=BY_OPERATOR) == 1
                while not failed:
                    await trio.sleep(0.01)
                store.remove(hang)
        with pytest.raises(ReadFailed):
            await read(image, first, 0, KIB)


def test_a_demand_that_no_cap_has_room_for_takes_one_chunk_beyond_it(saved: Any) -> None:
    image: ServedImage = saved.serve(ahead=False, memory_max_bytes=1 * KIB)
    largest = max(image._layout.length)

    async def test() -> None:
        async with running(image) as handle:
            for offset in range(0, 4 * MIB, 64 * KIB):
                assert await read(image, handle, offset, 64 * KIB) == saved.content[offset : offset + 64 * KIB]
            # As it comes and decoded; its neighbours in the pack stay for later.
            assert image.status()["memory_peak_bytes"] <= 1 * KIB + 2 * largest + 4 * KIB

    in_virtual_time(test)


def test_memory_is_given_back_and_the_cap_is_kept(saved: Any) -> None:
    image: ServedImage = saved.serve(ahead=True, memory_max_bytes=1 * MIB)

    async def test() -> None:
        async with running(image) as handle:
            for offset in range(0, 4 * MIB, 64 * KIB):
                assert await read(image, handle, offset, 64 * KIB) == saved.content[offset : offset + 64 * KIB]
            status = image.status()
            # One demand read is always granted, however small the cap.
            assert status["memory_peak_bytes"] <= status["memory_max_bytes"] + 256 * KIB

    in_virtual_time(test)
    assert image._accountant.held_bytes <= image._accountant.cap_bytes
