"""The node cache with several images on a small disk of its own: full or not, it never gives a wrong byte."""

import dataclasses
import os
import random
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio

from bench.images import make_image
from streamd.config import Config, FetchConfig, Prefetch
from streamd.save.push import PushOptions, push
from streamd.serve.cache_directory import list_images, open_cache, pin_image, verify_images
from streamd.serve.handles import Opener
from streamd.serve.image import ServedImage
from streamd.serve.node_cache import NodeCache
from streamd.serve.plan import Layout
from streamd.store.catalog import Pinned, open_snapshot
from streamd.store.opening import open_store
from streamd.store.port import Store

KIB, MIB = 1 << 10, 1 << 20
PAGES_BYTES = 12 * MIB
DISK_BYTES = 64 * MIB
_COUNT = 6  # images; four are more than the disk holds
_PIECE_BYTES = 200_000
_LIMIT_S = 60.0


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """One of several snapshots in a store, and what its pages are."""

    store: Store
    pinned: Pinned
    pages: bytes

    @property
    def layout(self) -> Layout:
        return Layout(self.pinned.manifest.table)

    @property
    def raw_bytes(self) -> int:
        """Bytes of its chunks that aren't zero."""
        layout = self.layout
        return sum(layout.length[chunk] for chunk in range(len(layout)) if not layout.is_zero(chunk))

    def open(self, directory: Path, *, max_bytes: int, reserve_bytes: int = 0, recent_s: float = 0.0) -> NodeCache:
        return open_cache(
            directory,
            self.pinned.data,
            self.layout,
            files=self.pinned.manifest.files,
            source=self.pinned.manifest.snapshot_id,
            owner="test",
            max_bytes=max_bytes,
            reserve_bytes=reserve_bytes,
            recent_s=recent_s,
        )

    def serve(self, cache: NodeCache) -> ServedImage:
        """Read all of it through the cache, in pieces, in a shuffled order; check every byte; let go of the cache."""
        image = ServedImage(
            self.store, self.pinned, Config(memory_max_bytes=32 * MIB), cache=cache, prefetch=Prefetch.NONE
        )
        offsets = list(range(0, len(self.pages), _PIECE_BYTES))
        random.Random(len(offsets)).shuffle(offsets)

        async def test() -> None:
            async with trio.open_nursery() as nursery:
                await nursery.start(image.run)
                handle = image.open("pages.img", Opener(1, "test", None))
                with trio.fail_after(_LIMIT_S):
                    for offset in offsets:
                        got = bytes(await image.read(handle, offset, _PIECE_BYTES))
                        assert got == self.pages[offset : offset + _PIECE_BYTES]
                nursery.cancel_scope.cancel()

        trio.run(test)
        return image


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what threads do."""
    with trio.fail_after(_LIMIT_S):
        while not condition():
            await trio.sleep(0.001)


@pytest.fixture(scope="module")
def snapshots(tmp_path_factory: pytest.TempPathFactory) -> list[Snapshot]:
    """Six snapshots of different pages."""
    place = tmp_path_factory.mktemp("snapshots")
    store = open_store(f"file://{place}/store")
    made = []
    for number in range(_COUNT):
        image = place / f"image-{number}"
        make_image(image, PAGES_BYTES, seed=number, zero=0.1)
        options = PushOptions(chunk_bytes=64 * KIB, pack_bytes=2 * MIB)
        push(image, store, snapshot_id=f"s{number}", push_id="p", options=options)
        made.append(Snapshot(store, open_snapshot(store, f"s{number}"), (image / "pages.img").read_bytes()))
    return made


@pytest.fixture(params=["ext4", "tmpfs"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MiB: ext4 in a loop-mounted file, or a tmpfs of that size; gone after the test."""
    place, backing = tmp_path / "disk", tmp_path / "disk.ext4"
    place.mkdir()
    if request.param == "ext4":
        with backing.open("wb") as file:
            file.truncate(DISK_BYTES)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", backing], check=True)
        subprocess.run(["mount", "-o", "loop,nosuid,nodev", backing, place], check=True)
    else:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", place], check=True)
    try:
        yield place / "cache"
    finally:
        try:
            subprocess.run(["umount", place], check=True)  # busy: something still has it open, and that is a failure
        except subprocess.CalledProcessError:
            subprocess.run(["umount", "--lazy", place], check=True)
            raise


def free_bytes(disk: Path) -> int:
    info = os.statvfs(disk.parent)
    return info.f_bavail * info.f_frsize


def fill(disk: Path, leave_bytes: int) -> Path:
    """Let somebody else write to the disk until no more than that is free."""
    ballast = disk.parent / f"ballast-{leave_bytes}"
    with ballast.open("wb") as file:
        while (more := free_bytes(disk) - leave_bytes) > 0:
            file.write(bytes(min(more, MIB)))
            file.flush()
            os.fsync(file.fileno())
    return ballast


def test_images_that_come_and_go_fill_the_quota_and_never_more(disk: Path, snapshots: list[Snapshot]) -> None:
    """Three fit. What is read again while it is there costs no fetch."""
    quota = 3 * snapshots[0].raw_bytes + 2 * MIB
    dice = random.Random(7)
    last: list[int] = []
    for number in [0, 1, 2, *dice.choices(range(_COUNT), k=14)]:
        snapshot = snapshots[number]
        image = snapshot.serve(snapshot.open(disk, max_bytes=quota))
        assert image.stats.cache_failure is None
        if number in last[-3:]:
            assert image.stats.origin_bytes == 0
        last = [n for n in last if n != number] + [number]
        assert sum(cached.disk_bytes for cached in list_images(disk)) <= quota + MIB
    assert all(result.bad_chunks == () for result in verify_images(disk))


def test_a_disk_that_runs_full_costs_fetches_and_no_wrong_byte(disk: Path, snapshots: list[Snapshot]) -> None:
    """Others leave 4 MiB; the cache is allowed all, and reserves nothing. Then there is room again."""
    for snapshot in snapshots[:2]:
        snapshot.serve(snapshot.open(disk, max_bytes=1 << 40, recent_s=3600))
    cache = snapshots[2].open(disk, max_bytes=1 << 40, recent_s=3600)
    assert cache.room_bytes == snapshots[2].raw_bytes
    ballast = fill(disk, 4 * MIB)
    image = snapshots[2].serve(cache)
    assert "No space" in (image.stats.cache_failure or "")
    assert 0 < image.stats.cache_written_bytes < snapshots[2].raw_bytes
    for snapshot in snapshots[:2]:  # on the full disk: what was cached is used
        assert snapshot.serve(snapshot.open(disk, max_bytes=1 << 40, recent_s=3600)).stats.origin_bytes == 0
    assert all(result.bad_chunks == () for result in verify_images(disk))
    ballast.unlink()
    again = snapshots[2].serve(snapshots[2].open(disk, max_bytes=1 << 40, recent_s=3600))
    assert 0 < again.stats.origin_bytes < sum(snapshots[2].layout.frame_bytes)
    assert snapshots[2].serve(snapshots[2].open(disk, max_bytes=1 << 40, recent_s=3600)).stats.origin_bytes == 0


def test_a_disk_that_others_fill_to_its_reserve_loses_no_recent_image(disk: Path, snapshots: list[Snapshot]) -> None:
    reserve = 8 * MIB
    for snapshot in snapshots[:2]:
        snapshot.serve(snapshot.open(disk, max_bytes=1 << 40, reserve_bytes=reserve, recent_s=3600))
    fill(disk, reserve - MIB)
    cache = snapshots[2].open(disk, max_bytes=1 << 40, reserve_bytes=reserve, recent_s=3600)
    assert cache.room_bytes == 0
    assert snapshots[2].serve(cache).stats.cache_written_bytes == 0
    for snapshot in snapshots[:2]:
        image = snapshot.serve(snapshot.open(disk, max_bytes=1 << 40, reserve_bytes=reserve, recent_s=3600))
        assert image.stats.origin_bytes == 0


def test_a_mount_stops_writing_when_others_reach_the_reserve(disk: Path, snapshots: list[Snapshot]) -> None:
    cache = snapshots[0].open(disk, max_bytes=1 << 40, reserve_bytes=8 * MIB)
    assert cache.room_bytes == snapshots[0].raw_bytes
    fill(disk, 8 * MIB - 64 * KIB)
    image = snapshots[0].serve(cache)
    assert "reserve" in (image.stats.cache_failure or "")
    assert image.stats.cache_written_bytes == 0


def test_images_that_do_not_both_fit_do_not_evict_each_other_in_turns(disk: Path, snapshots: list[Snapshot]) -> None:
    """Four rounds, cache 60 % of both: at most 2.2 × their bytes are fetched, which no choice can better."""
    pair = snapshots[:2]
    whole = sum(snapshot.raw_bytes for snapshot in pair)
    fetched = 0
    for _ in range(4):
        for snapshot in pair:
            image = snapshot.serve(snapshot.open(disk, max_bytes=whole * 6 // 10, recent_s=3600))
            fetched += image.stats.fetched_bytes
    assert fetched <= 2.2 * whole


def test_a_new_image_takes_the_place_of_one_that_is_not_used_any_more(disk: Path, snapshots: list[Snapshot]) -> None:
    quota = snapshots[0].raw_bytes + MIB
    snapshots[0].serve(snapshots[0].open(disk, max_bytes=quota, recent_s=3600))
    fetched = [
        snapshots[1].serve(snapshots[1].open(disk, max_bytes=quota, recent_s=3600)).stats.origin_bytes for _ in range(3)
    ]
    assert fetched[0] > 0
    assert fetched[1] > 0  # the second time, it is worth more than the one that wasn't asked for
    assert fetched[2] == 0


def test_an_image_larger_than_its_room_moves_a_window_over_the_disk(disk: Path, snapshots: list[Snapshot]) -> None:
    """Prefetch goes as far as memory and room let it, between any two reads; a second reader trails the first."""
    snapshot, room = snapshots[0], 3 * MIB
    cache = snapshot.open(disk, max_bytes=room)
    config = Config(memory_max_bytes=4 * MIB, fetch=FetchConfig(get_bytes=512 * KIB))
    image = ServedImage(snapshot.store, snapshot.pinned, config, cache=cache, prefetch=Prefetch.ALL)
    stored_bytes = sum(snapshot.layout.frame_bytes)
    most_bytes = 0

    def is_still() -> bool:
        status = image.status()
        has_stopped = status["prefetch_waits_for"] is not None or status["origin_bytes"] >= stored_bytes
        return has_stopped and image._residency.writing_bytes == 0

    async def test() -> None:
        nonlocal most_bytes
        async with trio.open_nursery() as nursery:
            await nursery.start(image.run)
            handles = [image.open("pages.img", Opener(number, "test", None)) for number in range(2)]
            for low in range(0, len(snapshot.pages) + 512 * KIB, 256 * KIB):
                await until(is_still)
                for handle, behind in zip(handles, (0, 512 * KIB), strict=True):
                    if 0 <= (at := low - behind) < len(snapshot.pages):
                        assert bytes(await image.read(handle, at, 256 * KIB)) == snapshot.pages[at : at + 256 * KIB]
                most_bytes = max(most_bytes, 512 * (cache.path / "files/pages.img").stat().st_blocks)
            nursery.cancel_scope.cancel()

    trio.run(test)
    assert image.stats.cache_failure is None
    assert image._residency.evicted_chunks > 0
    assert MIB < most_bytes <= room
    assert all(result.bad_chunks == () for result in verify_images(disk))
    snapshot.serve(snapshot.open(disk, max_bytes=room))


def test_a_pinned_image_is_there_after_many_others(disk: Path, snapshots: list[Snapshot]) -> None:
    quota = 2 * snapshots[0].raw_bytes
    cache = snapshots[0].open(disk, max_bytes=quota)
    snapshots[0].serve(cache)
    pin_image(disk, cache.path.name)
    for snapshot in snapshots[1:]:
        snapshot.serve(snapshot.open(disk, max_bytes=quota))
    assert snapshots[0].serve(snapshots[0].open(disk, max_bytes=quota)).stats.origin_bytes == 0
