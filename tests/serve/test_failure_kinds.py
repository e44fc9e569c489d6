"""Every kind of failure at every request of a load, in virtual time: right bytes, or what the policy says.

What field reports describe are examples of kinds (`tests/test_failure_table.py` names the tests of each). Here a small
image is loaded in six ways, and one request after the other, the first, each, the last, is met by one fault after the
other: no byte is wrong, no read waits beyond its deadline, nothing is fetched twice, nothing stays held or under way.

The image begins with more zeros than runsc's window is wide, so that reads behind them are faults by themselves.
"""

import errno
import fnmatch
import random
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import trio
import trio.testing

from bench.faults import Action, Corrupt, Cut, Delay, Fail, Fault, FaultyStore, Hang, Throttle
from bench.images import expected, make_image
from bench.virtual_time import VirtualThreads
from streamd.config import Config, FetchConfig, PolicyConfig, Prefetch
from streamd.errors import StoreErrorKind
from streamd.save.push import PushOptions, push
from streamd.serve.handles import Handle, Opener, ReadFailed
from streamd.serve.image import ServedImage
from streamd.serve.node_cache import NodeCache
from streamd.serve.policy import COURSES, Course
from streamd.serve.scheduler import BACKOFF, RunBlocking
from streamd.snapshot.names import PAGES
from streamd.store.catalog import Pinned, open_snapshot
from streamd.store.opening import open_store
from streamd.store.port import Store
from streamd.store.shaped import ShapedStore

KIB, MIB = 1 << 10, 1 << 20
CHUNK = 16 * KIB
PACK = 128 * KIB
ZEROS = 32 * MIB  # more than 127 × 256 KiB
HOLD_S, CREDENTIALS_S = 60.0, 300.0
# What a client of a real store waits for a sign of life (streamd/store/gcs.py).
SILENCE_S = 10.0
# What goes ahead begins again after a failure within the longest back-off, and a quiet store is asked for all by then.
QUIET_S = 15.0
READ = 256 * KIB
# So near to the content that a stream that begins there is one from its first read on.
STREAM_FROM = ZEROS - 4 * READ


@dataclass(frozen=True, eq=False)
class Sparse:
    """A snapshot of `ZEROS` zeros and then `content`."""

    store: Store
    pinned: Pinned
    content: bytes

    def __repr__(self) -> str:
        return "Sparse()"

    def offsets(self, step: int) -> list[int]:
        """Give where in pages.img each `step` bytes of the content begin."""
        return [ZEROS + at for at in range(0, len(self.content), step)]

    def at(self, offset: int, size: int) -> bytes:
        """Give the right bytes of a range of pages.img."""
        zeros = max(0, min(ZEROS - offset, size))
        start = max(0, offset - ZEROS)
        return bytes(zeros) + self.content[start : start + size - zeros]

    def serve(
        self, store: Store, run_blocking: RunBlocking, *, prefetch: Prefetch, fetch: FetchConfig | None = None
    ) -> ServedImage:
        """Give an image that serves it from that store, without a cache."""
        config = Config(
            fetch=fetch or FetchConfig(get_bytes=PACK),
            policy=PolicyConfig(hold_s=HOLD_S, credentials_wait_s=CREDENTIALS_S),
        )
        return ServedImage(store, self.pinned, config, cache=None, prefetch=prefetch, run_blocking=run_blocking)


def _push(place: Path, content_bytes: int, pack_bytes: int) -> Sparse:
    """Make and push an image of incompressible content; a GET brings one pack at most."""
    content = expected(ZEROS, content_bytes, zero=0.0, compressible=0.0)
    make_image(place / "image", ZEROS + content_bytes, zero=0.0, compressible=0.0)
    with (place / "image" / "pages.img").open("r+b") as pages:
        pages.truncate(0)
        pages.seek(ZEROS)
        pages.write(content)
    store = open_store(f"file://{place}/store")
    options = PushOptions(chunk_bytes=CHUNK, pack_bytes=pack_bytes)
    push(place / "image", store, snapshot_id="sparse", push_id="p", options=options)
    return Sparse(store, open_snapshot(store, "sparse"), content)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Sparse:
    """1 MiB behind the zeros: each request of its load can be met by each fault."""
    return _push(tmp_path_factory.mktemp("small"), MIB, PACK)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Sparse:
    """24 MiB behind the zeros: a load that takes a while, in some 400 GETs."""
    return _push(tmp_path_factory.mktemp("large"), 24 * MIB, 4 * CHUNK)


def in_virtual_time(test: Callable[[], Any]) -> None:
    """Run a test on a clock that jumps to the next deadline; what hangs fails after two virtual hours."""

    async def limited() -> None:
        with trio.fail_after(7200):
            await test()

    trio.run(limited, clock=trio.testing.MockClock(autojump_threshold=0))


@asynccontextmanager
async def running(image: ServedImage) -> AsyncIterator[Handle]:
    """Serve, with one open handle of pages.img; at the end check that nothing stays."""
    async with trio.open_nursery() as nursery:
        await nursery.start(image.run)
        await image.load_small_files()
        yield image.open("pages.img", Opener(1, "test", None))
        await trio.sleep(QUIET_S)
        image._residency.shed(1 << 40, unread_too=True)
        status = image.status()
        assert status["waiting_chunks"] == 0
        assert image._scheduler.arriving_bytes == 0
        assert not image._scheduler._flights
        # The small files are kept; nothing else is.
        assert status["memory_bytes"] == sum(file.size for file in image.files.values() if file.name != PAGES)
        nursery.cancel_scope.cancel()


class Load(Enum):
    """How an image is loaded: what its requests are wanted for."""

    FAULT = "faults alone"
    WINDOW = "faults and the windows round them"
    LEARNED = "the learned order"
    STREAM = "the stream alone"
    AHEAD = "ahead of any read"
    BOTH = "ahead of a stream that follows"

    @property
    def prefetch(self) -> Prefetch:
        """What the image fetches before it is read."""
        match self:
            case Load.FAULT | Load.STREAM:
                return Prefetch.NONE
            case Load.WINDOW | Load.LEARNED:
                return Prefetch.HOT
            case Load.AHEAD | Load.BOTH:
                return Prefetch.ALL


@dataclass
class Reads:
    """What reads got: their waits in seconds, and how many failed."""

    waits_s: list[float] = field(default_factory=list)
    failed: int = 0

    async def check(self, sparse: Sparse, image: ServedImage, handle: Handle, offset: int, size: int) -> None:
        """Make one read; only right bytes and `ReadFailed` are answers."""
        began_s = trio.current_time()
        try:
            assert bytes(await image.read(handle, offset, size)) == sparse.at(offset, size), offset
        except ReadFailed:
            self.failed += 1
        self.waits_s.append(trio.current_time() - began_s)

    @property
    def longest_s(self) -> float:
        """The longest wait."""
        return max(self.waits_s)


async def read_all(sparse: Sparse, image: ServedImage, handle: Handle, load: Load) -> Reads:
    """Read in that way and check every byte; what is loaded ahead is read once all is quiet."""
    reads = Reads()
    if load is Load.LEARNED:
        image.want_hot([(ZEROS, ZEROS + len(sparse.content))])
    if load in (Load.LEARNED, Load.AHEAD):
        await trio.sleep(QUIET_S)
    if load in (Load.FAULT, Load.WINDOW):
        # One after the other, so that each is a request of its own, and downwards, so that none continues another.
        for offset in reversed(sparse.offsets(8 * CHUNK)):
            await reads.check(sparse, image, handle, offset, CHUNK)
        assert image.status()["reads"]["stream"]["reads"] == 0
        return reads
    offsets = iter(range(STREAM_FROM, ZEROS + len(sparse.content), READ))

    async def slot() -> None:
        for offset in offsets:
            await reads.check(sparse, image, handle, offset, READ)

    async with trio.open_nursery() as nursery:
        for _ in range(8):
            nursery.start_soon(slot)
    assert image.status()["reads"]["fault"]["reads"] == 0
    return reads


@dataclass(frozen=True, eq=False)
class Run:
    """A load that is over: its store, the image's last status, and what its reads got."""

    store: FaultyStore
    status: dict[str, Any]
    reads: Reads

    @property
    def unique_bytes(self) -> int:
        """Bytes of the store that the load asked for, each counted once."""
        total, key, reached = 0, "", 0
        for ask in sorted(self.store.requests, key=lambda ask: (ask.key, ask.start)):
            if ask.key != key:
                key, reached = ask.key, 0
            total += max(0, ask.end - max(ask.start, reached))
            reached = max(reached, ask.end)
        return total


def one_load(sparse: Sparse, load: Load, *faults: Fault) -> Run:
    """Load under these faults, from the first request on: that of the small files."""
    runs: list[Run] = []

    async def test() -> None:
        threads = VirtualThreads()
        store = FaultyStore(sparse.store, clock=threads.now_s, wait=threads.wait, silence_s=SILENCE_S)
        for fault in faults:
            store.add(fault)
        image = sparse.serve(store, threads.run, prefetch=load.prefetch)
        async with running(image) as handle:
            reads = await read_all(sparse, image, handle, load)
            await trio.sleep(QUIET_S)
            runs.append(Run(store, image.status(), reads))

    in_virtual_time(test)
    return runs[0]


# One fault, at each request of each load


ONCE: dict[str, Action] = {
    **{f"{kind}": Fail(kind) for kind in StoreErrorKind},
    "error behind the last byte": Fail(StoreErrorKind.TRANSIENT, after=True),
    "body cut at byte 0": Cut(0),
    "body cut at byte 1": Cut(1),
    "body cut in a frame": Cut(CHUNK // 2),
    "body cut at byte n-1": Cut(-1),
    "a wrong byte": Corrupt(100),
    "a wrong last byte": Corrupt(-1),
    "silence": Hang(),
    "silence in the body": Hang(CHUNK // 2),
}


# These meet every request; the others, which end in the same code, the first, one in the middle and the last.
EVERYWHERE = {str(StoreErrorKind.TRANSIENT), str(StoreErrorKind.GONE), "body cut in a frame", "a wrong byte", "silence"}


@pytest.fixture(scope="module")
def requests_of(small: Sparse) -> dict[Load, int]:
    """Count the requests of each load when nothing fails."""
    runs = {load: one_load(small, load) for load in Load}
    for run in runs.values():
        assert run.reads.failed == 0
        assert run.store.bytes_read == run.unique_bytes
    return {load: len(run.store.requests) for load, run in runs.items()}


@pytest.mark.parametrize("load", Load, ids=lambda load: load.value)
@pytest.mark.parametrize("name", ONCE)
def test_a_fault_at_any_request_costs_a_request_and_no_read(
    small: Sparse, requests_of: dict[Load, int], name: str, load: Load
) -> None:
    action = ONCE[name]
    requests = requests_of[load]
    for nth in range(requests) if name in EVERYWHERE else (0, requests // 2, requests - 1):
        fault = Fault(action, nth=nth)
        run = one_load(small, load, fault)
        at = f"request {nth}"
        assert fault.fired == 1, at
        assert run.reads.failed == run.status["failed_reads"] == 0, at
        # The whole of what one failure may cost: a back-off, and what a client waits for a sign of life.
        deadline_s = BACKOFF.limit_s + (SILENCE_S if isinstance(action, Hang) else 0)
        assert run.reads.longest_s <= deadline_s, at
        # A body that breaks off is resumed; of one that is wrong, or falls silent, a GET's bytes may be lost, once.
        lost_bytes = PACK if isinstance(action, Corrupt | Hang) else 0
        assert run.store.bytes_read <= 1.02 * run.unique_bytes + lost_bytes, at
        assert run.status["origin_bytes"] == run.store.bytes_read, at


# Faults that last


# Those without the small files, which nobody could mount without.
LATER_PACKS = "*/packs/*/0000000[2-9]"
PERMANENT = [kind for kind, course in COURSES.items() if course is Course.ASK_AGAIN_AND_HOLD]


@pytest.mark.parametrize(
    ("kind", "requests", "after_s"),
    [*((kind, 3, HOLD_S) for kind in PERMANENT), (StoreErrorKind.CORRUPT, 2, 0.0)],
    ids=str,
)
def test_an_answer_that_stays_is_asked_for_as_often_as_the_policy_says_and_ends_the_read_then(
    small: Sparse, kind: StoreErrorKind, requests: int, after_s: float
) -> None:
    async def test() -> None:
        threads = VirtualThreads()
        store = FaultyStore(small.store, clock=threads.now_s, wait=threads.wait)
        image = small.serve(store, threads.run, prefetch=Prefetch.NONE)
        async with running(image) as handle:
            before = len(store.requests)
            fault = store.add(Fault(Fail(kind), times=None))
            reads = Reads()
            await reads.check(small, image, handle, small.offsets(CHUNK)[-1], CHUNK)
            assert reads.failed == 1
            assert reads.longest_s == pytest.approx(after_s, abs=0.01)
            assert len(store.requests) - before == requests
            # It is not remembered: whoever asks later is answered by what the store says then.
            store.remove(fault)
            await reads.check(small, image, handle, small.offsets(CHUNK)[-1], CHUNK)
            assert reads.failed == 1

    in_virtual_time(test)


@pytest.mark.parametrize("kind", PERMANENT, ids=str)
def test_what_nobody_waits_for_and_cannot_be_had_is_asked_for_once_and_again_when_it_is_read(
    small: Sparse, kind: StoreErrorKind
) -> None:
    async def test() -> None:
        threads = VirtualThreads()
        store = FaultyStore(small.store, clock=threads.now_s, wait=threads.wait)
        fault = store.add(Fault(Fail(kind), key="*/packs/*/0000000[3-9]", times=None))
        store.add(Fault(Fail(StoreErrorKind.TRANSIENT), key="*/packs/*/00000002"))  # goes ahead from there again
        image = small.serve(store, threads.run, prefetch=Prefetch.ALL)
        async with running(image) as handle:
            await trio.sleep(QUIET_S)
            refused = [ask for ask in store.requests if fnmatch.fnmatchcase(ask.key, fault.key)]
            assert len(set(refused)) == len(refused) == fault.fired > 0
            store.remove(fault)
            reads = await read_all(small, image, handle, Load.STREAM)
            assert reads.failed == 0

    in_virtual_time(test)


@pytest.mark.parametrize("load", Load, ids=lambda load: load.value)
@pytest.mark.parametrize("kind", [StoreErrorKind.TRANSIENT, StoreErrorKind.THROTTLED], ids=str)
def test_an_outage_is_waited_for_is_not_hammered_and_is_over_when_it_is_over(
    small: Sparse, kind: StoreErrorKind, load: Load
) -> None:
    outage_s = 300.0

    async def test() -> None:
        threads = VirtualThreads()
        store = FaultyStore(small.store, clock=threads.now_s, wait=threads.wait)
        fault = store.add(Fault(Fail(kind), key=LATER_PACKS, times=None))
        image = small.serve(store, threads.run, prefetch=load.prefetch)

        async def end_it() -> None:
            await trio.sleep(outage_s)
            store.remove(fault)

        async with running(image) as handle, trio.open_nursery() as nursery:
            nursery.start_soon(end_it)
            reads = await read_all(small, image, handle, load)
            assert reads.failed == 0
            assert reads.longest_s <= outage_s + BACKOFF.limit_s
            # At most 8 reads wait for 16 chunks each, asked for alone at worst, and what goes ahead is one more.
            least_pause_s = BACKOFF.limit_s * (1 - BACKOFF.jitter)
            assert fault.fired <= (8 * READ // CHUNK + 1) * (10 + outage_s / least_pause_s)

    in_virtual_time(test)


def test_credentials_that_are_refused_for_good_fail_the_reads_after_their_time(small: Sparse) -> None:
    async def test() -> None:
        threads = VirtualThreads()
        store = FaultyStore(small.store, clock=threads.now_s, wait=threads.wait)
        store.add(Fault(Fail(StoreErrorKind.CREDENTIALS), key=LATER_PACKS, times=None))
        image = small.serve(store, threads.run, prefetch=Prefetch.ALL)
        async with running(image) as handle:
            reads = Reads()
            async with trio.open_nursery() as nursery:
                for offset in small.offsets(READ):
                    nursery.start_soon(reads.check, small, image, handle, offset, READ)
            assert reads.failed == len(small.offsets(READ))
            assert reads.longest_s == pytest.approx(CREDENTIALS_S, abs=0.1)

    in_virtual_time(test)


# A slow store


LATENCY_S, BYTES_PER_S = 0.015, 50e6


@dataclass(frozen=True, eq=False)
class Linked:
    """An image behind a link, in virtual time, with a store in between that fails and counts."""

    store: FaultyStore
    image: ServedImage
    handle: Handle


@asynccontextmanager
async def linked(
    sparse: Sparse, *, prefetch: Prefetch = Prefetch.ALL, bytes_per_s: float = BYTES_PER_S, fault: Fault | None = None
) -> AsyncIterator[Linked]:
    """Serve it from behind a link of 15 ms and 400 Mbit/s."""
    threads = VirtualThreads()
    link = ShapedStore(
        sparse.store, latency_s=LATENCY_S, bytes_per_s=bytes_per_s, clock=threads.now_s, sleep=threads.sleep
    )
    store = FaultyStore(link, clock=threads.now_s, wait=threads.wait, silence_s=SILENCE_S)
    if fault is not None:
        store.add(fault)
    image = sparse.serve(store, threads.run, prefetch=prefetch, fetch=FetchConfig())
    async with running(image) as handle:
        yield Linked(store, image, handle)


def test_a_fault_in_the_middle_of_a_prefetch_is_the_next_request_of_the_store(large: Sparse) -> None:
    table = large.pinned.manifest.table
    first_chunk = next(file.first_chunk for file in large.pinned.manifest.files if file.name == PAGES)

    async def test() -> None:
        async with linked(large, bytes_per_s=BYTES_PER_S / 10) as served:
            for offset in (large.offsets(CHUNK)[-1], large.offsets(CHUNK)[-400]):
                await trio.sleep(0.3)
                assert served.image.status()["origin_bytes"] < len(large.content) / 2
                before = len(served.store.requests)
                await Reads().check(large, served.image, served.handle, offset, CHUNK)
                chunk = first_chunk + offset // CHUNK
                wanted = (large.pinned.packs[int(table.pack[chunk])].key, int(table.offset[chunk]))
                asked = [(request.key, request.start) for request in served.store.requests[before:]]
                # One whose thread had begun may still come first.
                assert wanted in asked[:2]

    in_virtual_time(test)


@pytest.mark.parametrize(
    ("bytes_per_s", "factor"),
    # On a full link up to bandwidth × delay may queue, and the GETs of a burst: so much is in front of a fault.
    [(1e9, 2.0), (BYTES_PER_S, 3.0)],
    ids=["1 GB a second", "a full link"],
)
def test_faults_wait_little_longer_while_everything_else_is_fetched(
    large: Sparse, bytes_per_s: float, factor: float
) -> None:
    offsets = large.offsets(CHUNK)
    random.Random(7).shuffle(offsets)

    async def waits_s(prefetch: Prefetch) -> list[float]:
        reads = Reads()
        async with linked(large, prefetch=prefetch, bytes_per_s=bytes_per_s) as served:
            for offset in offsets[:40]:
                await reads.check(large, served.image, served.handle, offset, CHUNK)
            assert served.image.status()["reads"]["stream"]["reads"] == 0
        assert reads.failed == 0
        return [wait_s for wait_s in reads.waits_s if wait_s]

    async def test() -> None:
        idle_s = await waits_s(Prefetch.NONE)
        busy_s = await waits_s(Prefetch.ALL)
        assert len(busy_s) >= 10  # the others were here already
        assert max(busy_s) <= factor * max(idle_s)

    in_virtual_time(test)


def test_one_answer_that_takes_40_s_holds_up_no_read_for_long(large: Sparse) -> None:
    """It is asked for again when its siblings have long been answered, not when the client loses its patience."""

    async def test() -> None:
        for action in (Delay(40.0), Delay(40.0, at_byte=CHUNK)):
            fault = Fault(action, nth=100)
            async with linked(large, fault=fault) as served:
                reads = await read_all(large, served.image, served.handle, Load.STREAM)
                assert fault.fired == 1
                assert reads.failed == 0
                assert reads.longest_s <= SILENCE_S / 2

    in_virtual_time(test)


def test_a_store_that_refuses_more_than_so_many_requests_a_second_is_used_at_four_fifths_of_them(
    large: Sparse,
) -> None:
    limit_per_s = 20.0

    async def test() -> None:
        fault = Fault(Throttle(limit_per_s), times=None)
        async with linked(large, bytes_per_s=1e9, fault=fault) as served:
            began_s, before = trio.current_time(), len(served.store.requests) - fault.fired
            reads = await read_all(large, served.image, served.handle, Load.STREAM)
            assert reads.failed == 0
            answered = len(served.store.requests) - fault.fired - before
            assert answered / (trio.current_time() - began_s) >= 0.8 * limit_per_s
            assert answered > 300

    in_virtual_time(test)


# Many readers


@pytest.mark.parametrize("prefetch", Prefetch, ids=str)
def test_a_hundred_readers_cost_one_fetch_of_everything(small: Sparse, prefetch: Prefetch) -> None:
    async def test() -> None:
        async with linked(small, prefetch=prefetch) as served:
            reads = Reads()

            async def reader(number: int) -> None:
                handle = served.image.open(PAGES, Opener(number, "test", None))
                for offset in small.offsets(READ):
                    await reads.check(small, served.image, handle, offset, READ)

            async with trio.open_nursery() as nursery:
                for number in range(100):
                    nursery.start_soon(reader, number)
            assert (len(reads.waits_s), reads.failed) == (100 * len(small.offsets(READ)), 0)
            status = served.image.status()
            assert status["origin_bytes"] == status["stored_bytes"] == served.store.bytes_read

    in_virtual_time(test)


# A cache whose calls fail in ways that nobody foresaw


class FaultyCache:
    """A cache of one image whose call `operation` fails with an error number, from the `nth` on, `times` times."""

    def __init__(self, cache: NodeCache, operation: str, number: int, nth: int, times: int) -> None:
        self._cache = cache
        self._operation = operation
        self._number = number
        self._hit = range(nth, nth + times)
        self._calls = 0
        self._is_open = True

    def read_nowait(self, view: memoryview, offset: int) -> int:
        """Find nothing in the page cache where reads are to go to the disk."""
        return 0 if self._operation == "read" else self._cache.read_nowait(view, offset)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._cache, name)
        return partial(self._fail_or, found) if name == self._operation else found

    def _fail_or(self, call: Callable[..., object], *args: object) -> object:
        self._calls += 1
        if self._calls - 1 in self._hit:
            raise OSError(self._number, "injected")
        return call(*args)

    @property
    def failed_calls(self) -> int:
        """How many calls failed."""
        return len(range(self._calls)[self._hit.start : self._hit.stop])

    def close(self) -> None:
        """Let go of it, if that hasn't been done: an image forgets a cache that it has lost."""
        if self._is_open:
            self._is_open = False
            self._cache.close()


async def read_twice(saved: Any, cache: NodeCache) -> dict[str, Any]:
    """Serve with that cache, read everything twice, check it, and give the status then."""
    image = saved.serve(cache=cache, inline=False)
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            await nursery.start(image.run)
            await image.load_small_files()
            handle = image.open(PAGES, Opener(1, "test", None))
            for offset in (*range(0, len(saved.content), 100_000), *range(0, len(saved.content), 100_000)):
                assert bytes(await image.read(handle, offset, 100_000)) == saved.content[offset : offset + 100_000]
            status: dict[str, Any] = image.status()
            nursery.cancel_scope.cancel()
    cache.close()
    return status


ERRORS = [
    errno.EINTR, errno.EAGAIN, errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EBADF, errno.ESTALE,
    errno.EROFS, errno.ETIMEDOUT, errno.EINVAL, errno.EOPNOTSUPP,
]  # fmt: skip


@pytest.mark.parametrize("operation", ["read", "write", "confirm"])
@pytest.mark.parametrize("number", ERRORS, ids=lambda number: errno.errorcode[number])
async def test_whatever_error_a_call_of_the_cache_gives_no_reader_hears_of_it(
    saved: Any, make_cache: Callable[[], NodeCache], tmp_path: Path, operation: str, number: int
) -> None:
    # Of reads, first come those that verify what a former life has cached, some 230 of them, then those for replies.
    for nth, times in ((0, 1), (2, 1), (0, 1 << 30), *([(400, 1), (400, 1 << 30)] if operation == "read" else [])):
        if operation == "read":
            await read_twice(saved, cast(NodeCache, FaultyCache(make_cache(), "", 0, 0, 0)))
        cache = FaultyCache(make_cache(), operation, number, nth, times)
        status = await read_twice(saved, cast(NodeCache, cache))
        assert cache.failed_calls or (operation == "confirm" and nth)  # how many batches there are is the disk's to say
        assert status["failed_reads"] == 0
        # A cache that is lost costs what was in it once more, and nothing else.
        assert status["origin_bytes"] <= 2.02 * status["stored_bytes"]
        shutil.rmtree(tmp_path / "cache")
