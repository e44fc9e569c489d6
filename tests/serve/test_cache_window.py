"""An image that is larger than its room in the cache: the file keeps what came first until memory gets short."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from streamd.serve.cache_directory import list_images, open_cache
from streamd.serve.handles import Opener
from streamd.serve.image import ServedImage
from streamd.serve.memory import Accountant
from streamd.serve.node_cache import NodeCache
from streamd.serve.plan import Layout
from streamd.serve.residency import Place, Residency
from streamd.serve.stats import ServeStats
from streamd.store.port import Buffer

KIB, MIB = 1 << 10, 1 << 20
LIMIT_S = 20.0


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what threads do."""
    with trio.fail_after(LIMIT_S):
        while not condition():
            await trio.sleep(0.001)


@pytest.mark.parametrize("ahead", [True, False], ids=["prefetch", "no prefetch"])
def test_the_window_moves_for_what_was_fetched_ahead_and_only_for_that(
    saved: Any, make_cache: Any, tmp_path: Path, ahead: bool
) -> None:
    cache: NodeCache = make_cache(MIB)
    image: ServedImage = saved.serve(cache=cache, ahead=ahead, inline=False, memory_max_bytes=2 * MIB)
    stored = sum(Layout(saved.pinned.manifest.table).frame_bytes)

    async def test() -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(image.run)
            handle = image.open("pages.img", Opener(1, "test", None))

            def is_still() -> bool:
                """Prefetch has gone as far as it can, and the disk has what it was given."""
                status = image.status()
                is_done = status["prefetch_waits_for"] is not None or status["origin_bytes"] >= stored
                return not ahead or (is_done and image._residency.writing_bytes == 0)

            # Whole chunks: memory this small has to give up a chunk that was read in part before the rest is.
            for low in range(0, len(saved.content), 96 * KIB):
                await until(is_still)
                assert bytes(await image.read(handle, low, 96 * KIB)) == saved.content[low : low + 96 * KIB]
            nursery.cancel_scope.cancel()

    trio.run(test)
    assert (image._residency.evicted_chunks > 0) == ahead
    assert image.stats.origin_bytes <= 1.02 * stored
    assert image.stats.cache_failure is None
    (cached,) = list_images(tmp_path / "cache")
    assert cached.disk_bytes <= MIB + 128 * KIB  # and the manifest
    assert serve_in_pieces(saved, saved.serve(cache=make_cache(MIB), inline=False, memory_max_bytes=MIB))


def serve_in_pieces(saved: Any, image: ServedImage) -> bool:
    """Whether another life gives right bytes."""

    async def test() -> bool:
        async with trio.open_nursery() as nursery:
            await nursery.start(image.run)
            handle = image.open("pages.img", Opener(1, "test", None))
            got = [bytes(await image.read(handle, low, 77_777)) for low in range(0, len(saved.content), 77_777)]
            nursery.cancel_scope.cancel()
            return bool(b"".join(got) == saved.content)

    return trio.run(test)


class SlowReads(NodeCache):
    """A cache whose disk answers reads when it is told to."""

    def __init__(self, cache: NodeCache) -> None:
        self.__dict__ = cache.__dict__
        self.__dict__["may_answer"] = threading.Event()
        self.__dict__["asked"] = threading.Event()

    def read(self, size: int, offset: int) -> bytearray:
        self.__dict__["asked"].set()
        self.__dict__["may_answer"].wait(LIMIT_S)
        return super().read(size, offset)


class Bench:
    """The residency of a snapshot whose cache holds its small files and four chunks; memory is for eight."""

    def __init__(self, saved: Any, directory: Path) -> None:
        self.layout = Layout(saved.pinned.manifest.table)
        stored = [c for c in range(len(self.layout)) if not self.layout.is_zero(c)]
        first = saved.pinned.manifest.files[-1].first_chunk
        self.chunks = [c for c in stored if c >= first]
        self.size = self.layout.length[self.chunks[0]]
        self.small = [c for c in stored if c < first]
        self.room_bytes = sum(self.layout.length[c] for c in self.small) + 4 * self.size
        manifest = saved.pinned.data
        cache = open_cache(directory, manifest, self.layout, source="s", owner="t", max_bytes=self.room_bytes)
        self.cache = SlowReads(cache)
        self.accountant = Accountant(8 * self.size, reserve_bytes=2 * self.size)
        self.residency = Residency(self.layout, self.accountant, ServeStats(), cache=self.cache, on_room=lambda: None)

    def data(self, chunk: int) -> Buffer:
        return bytes([chunk % 251 + 1]) * self.layout.length[chunk]

    def arrive(self, chunk: int) -> None:
        self.accountant.take(self.layout.length[chunk])
        self.residency.keep(chunk, self.data(chunk))

    async def fill(self, *, read: bool = True) -> list[int]:
        """Cache the small files and four chunks, all that fits, and read them from the file, in order."""
        four = self.chunks[:4]
        for chunk in (*self.small, *four):
            self.arrive(chunk)
        await until(lambda: all(self.residency.is_resident(chunk) for chunk in (*self.small, *four)))
        for chunk in (*self.small, *four) if read else ():
            await until(lambda: self.read(chunk))  # noqa: B023
        return four

    def read(self, chunk: int) -> bool:
        view = memoryview(bytearray(self.layout.length[chunk]))
        found = self.residency.read_nowait(view, self.layout.start[chunk])
        assert not found or view == self.data(chunk)
        return found


def test_what_a_thread_reads_stays_until_it_is_read(saved: Any, tmp_path: Path) -> None:
    bench = Bench(saved, tmp_path / "c")
    residency = bench.residency

    async def test() -> None:
        residency.start()
        four = await bench.fill()
        found: dict[int, Buffer] = {}

        async def read_slow() -> None:
            found.update(await residency.read_slow([four[0]]))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read_slow)
            await until(bench.cache.__dict__["asked"].is_set)
            for chunk in bench.chunks[4:12]:  # more than memory wants to hold unread
                bench.arrive(chunk)
            assert residency.place(four[0]) == Place.RESIDENT
            assert residency.place(four[1]) == Place.ABSENT
            bench.cache.__dict__["may_answer"].set()
        assert found == {four[0]: bench.data(four[0])}
        await residency.finish(1.0)

    trio.run(test)


def test_a_chunk_that_left_is_absent_at_once_and_comes_back_right(saved: Any, tmp_path: Path) -> None:
    bench = Bench(saved, tmp_path / "c")
    residency = bench.residency

    async def test() -> None:
        residency.start()
        four = await bench.fill()
        for chunk in bench.chunks[4:9]:
            bench.arrive(chunk)
        gone = [chunk for chunk in four if residency.place(chunk) == Place.ABSENT]
        assert gone == four[: len(gone)]
        assert gone
        assert residency.is_absent(gone[0])
        for chunk in bench.chunks[4:9]:
            await until(lambda: residency.held(chunk) is None or not residency.is_resident(chunk))  # noqa: B023
        bench.accountant.cap_bytes *= 2
        bench.arrive(gone[0])  # fetched again: held in memory, or written over the hole
        assert residency.held(gone[0]) == bench.data(gone[0])
        await residency.finish(1.0)
        again = open_cache(
            tmp_path / "c", saved.pinned.data, bench.layout, source="s", owner="t", max_bytes=bench.room_bytes
        )
        cached = [chunk for chunk in range(len(bench.layout)) if again.has(chunk)]
        assert sum(bench.layout.length[chunk] for chunk in cached) <= bench.room_bytes
        for chunk in cached:
            assert again.read(bench.layout.length[chunk], bench.layout.start[chunk]) == bench.data(chunk)
        again.close()

    trio.run(test)


def test_the_small_files_stay_since_every_mount_needs_them(saved: Any, tmp_path: Path) -> None:
    bench = Bench(saved, tmp_path / "c")

    async def test() -> None:
        bench.residency.start()
        four = await bench.fill()
        for chunk in bench.chunks[4:12]:
            bench.arrive(chunk)
        assert bench.residency.place(four[0]) == Place.ABSENT
        assert all(bench.residency.is_resident(chunk) for chunk in bench.small)
        await bench.residency.finish(1.0)

    trio.run(test)


def test_nothing_that_was_not_read_leaves(saved: Any, tmp_path: Path) -> None:
    bench = Bench(saved, tmp_path / "c")
    residency = bench.residency

    async def test() -> None:
        residency.start()
        four = await bench.fill(read=False)
        for chunk in bench.chunks[4:12]:
            bench.arrive(chunk)
        assert all(residency.is_resident(chunk) for chunk in four)
        assert residency.evicted_chunks == 0
        await residency.finish(1.0)

    trio.run(test)
