"""The cache directory has what it says it has, through restarts, damage, limits and other processes."""

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from bench.faults import FaultyStore
from streamd.errors import NotFound, Refused
from streamd.serve import node_cache
from streamd.serve.cache_directory import (
    clear_images,
    list_images,
    open_cache,
    pin_image,
    unpin_image,
    verify_images,
)
from streamd.serve.handles import Opener
from streamd.serve.image import ServedImage
from streamd.serve.node_cache import CacheUnusable, NodeCache
from streamd.serve.plan import Layout
from streamd.snapshot.names import IMAGE_FILES

MIB = 1 << 20


@pytest.fixture
def manifest(saved: Any) -> bytes:
    data: bytes = saved.pinned.data
    return data


@pytest.fixture
def layout(saved: Any) -> Layout:
    return Layout(saved.pinned.manifest.table)


def stored_bytes(layout: Layout) -> int:
    return sum(layout.length[chunk] for chunk in range(len(layout)) if not layout.is_zero(chunk))


def pages_base(saved: Any, layout: Layout) -> int:
    """First byte of pages.img in the image."""
    first: int = saved.pinned.manifest.files[-1].first_chunk
    return layout.start[first]


def chunk_bytes(layout: Layout, chunk: int) -> bytes:
    return bytes([chunk % 251 + 1]) * layout.length[chunk]


def test_a_second_owner_is_refused_and_told_who_has_it(manifest: bytes, layout: Layout, tmp_path: Path) -> None:
    first = open_cache(
        tmp_path / "c", manifest, layout, source="s", owner="the mount at /mnt/a (pid 7)", max_bytes=None
    )
    with pytest.raises(Refused, match=r"/mnt/a \(pid 7\)"):
        open_cache(tmp_path / "c", manifest, layout, source="s", owner="second", max_bytes=None)
    first.close()
    open_cache(tmp_path / "c", manifest, layout, source="s", owner="second", max_bytes=None).close()


def test_chunks_survive_a_process_that_was_killed(manifest: bytes, layout: Layout, tmp_path: Path) -> None:
    (tmp_path / "manifest").write_bytes(manifest)
    writer = textwrap.dedent(
        f"""
        import os, signal
        from pathlib import Path
        from streamd.serve.cache_directory import open_cache
        from streamd.serve.plan import Layout
        from streamd.snapshot.manifest import decode
        manifest = Path({str(tmp_path / "manifest")!r}).read_bytes()
        layout = Layout(decode(manifest).table)
        cache = open_cache(Path({str(tmp_path / "c")!r}), manifest, layout, source="s", owner="writer", max_bytes=None)
        for chunk in (3, 9, 200):
            cache.write(bytes([chunk % 251 + 1]) * layout.length[chunk], layout.start[chunk])
            cache.confirm([chunk])
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    assert subprocess.run([sys.executable, "-c", writer], check=False).returncode == -9
    cache = open_cache(tmp_path / "c", manifest, layout, source="s", owner="reader", max_bytes=None)
    assert [chunk for chunk in range(len(layout)) if cache.has(chunk)] == [3, 9, 200]
    for chunk in (3, 9, 200):
        assert cache.read(layout.length[chunk], layout.start[chunk]) == chunk_bytes(layout, chunk)
    cache.close()


@pytest.mark.parametrize("damage", ["other format", "not json", "other manifest", "missing head", "short bitmap"])
def test_a_directory_that_is_not_understood_is_begun_anew(
    manifest: bytes, layout: Layout, tmp_path: Path, damage: str
) -> None:
    cache = open_cache(tmp_path / "c", manifest, layout, source="s", owner="a", max_bytes=None)
    cache.write(chunk_bytes(layout, 5), layout.start[5])
    cache.confirm([5])
    cache.close()
    match damage:
        case "other format":
            head = json.loads((cache.path / "head").read_text())
            (cache.path / "head").write_text(json.dumps(head | {"format": node_cache.CACHE_FORMAT + 1}))
        case "not json":
            (cache.path / "head").write_bytes(b"\xff")
        case "other manifest":
            (cache.path / "manifest").write_bytes(b"x")
        case "missing head":
            (cache.path / "head").unlink()
        case "short bitmap":
            os.truncate(cache.path / "resident", 0)
    again = open_cache(tmp_path / "c", manifest, layout, source="s", owner="b", max_bytes=None)
    assert not any(again.has(chunk) for chunk in range(len(layout)))
    again.close()


def test_a_directory_that_others_could_write_to_is_not_used(manifest: bytes, layout: Layout, tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c").chmod(0o777)
    with pytest.raises(CacheUnusable, match="writable by nobody else"):
        open_cache(tmp_path / "c", manifest, layout, source="s", owner="a", max_bytes=None)


@pytest.fixture
def foreign() -> Iterator[Path]:
    """A directory of another user, in one like /tmp."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "theirs"
        path.mkdir()
        os.chown(path, 65534, 65534)
        yield path


def test_a_cache_in_another_users_directory_is_not_used(manifest: bytes, layout: Layout, foreign: Path) -> None:
    for directory in (foreign, foreign / "c", foreign / "c" / "d"):
        with pytest.raises(CacheUnusable, match="belongs to uid 65534"):
            open_cache(directory, manifest, layout, source="s", owner="a", max_bytes=None)
    (foreign / "c").mkdir(mode=0o700)  # ours, but whoever owns what it is in can replace it
    with pytest.raises(CacheUnusable, match="belongs to uid 65534"):
        open_cache(foreign / "c", manifest, layout, source="s", owner="a", max_bytes=None)
    assert list((foreign / "c").iterdir()) == []


@pytest.mark.parametrize("planted", ["a directory of theirs", "a symlink"])
def test_an_operator_is_not_led_elsewhere_by_a_cache_of_another_user(
    foreign: Path, tmp_path: Path, planted: str
) -> None:
    key = "0" * 64
    victim = tmp_path / "victim"
    plant(victim, key)
    if planted == "a symlink":
        (foreign / "images").symlink_to(victim / "images")
    else:
        shutil.copytree(victim / "images", foreign / "images")
    before = sorted(path.relative_to(foreign) for path in foreign.rglob("*"))
    calls: list[Callable[[], object]] = [
        lambda: list_images(foreign),
        lambda: clear_images(foreign),
        lambda: clear_images(foreign, key),
        lambda: verify_images(foreign),
        lambda: pin_image(foreign, key),
        lambda: unpin_image(foreign, key),
    ]
    for call in calls:
        with pytest.raises(CacheUnusable, match="belong"):
            call()
    assert sorted(path.relative_to(foreign) for path in foreign.rglob("*")) == before
    assert [image.key for image in list_images(victim)] == [key]


@pytest.mark.parametrize("name", ["images", "pins", "images/KEY"])
def test_a_part_of_a_cache_that_others_may_write_to_is_not_used(
    manifest: bytes, layout: Layout, tmp_path: Path, name: str
) -> None:
    cache = open_cache(tmp_path / "c", manifest, layout, source="s", owner="a", max_bytes=None)
    cache.close()
    pin_image(tmp_path / "c", cache.path.name)
    (tmp_path / "c" / name.replace("KEY", cache.path.name)).chmod(0o777)
    uses: dict[str, Callable[[], object]] = {
        "images": lambda: list_images(tmp_path / "c"),
        "pins": lambda: list_images(tmp_path / "c"),
        "images/KEY": lambda: open_cache(tmp_path / "c", manifest, layout, source="s", owner="a", max_bytes=None),
    }
    with pytest.raises(CacheUnusable, match="writable by nobody else"):
        uses[name]()


def test_a_planted_symlink_is_not_followed(manifest: bytes, layout: Layout, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    cache = open_cache(tmp_path / "c", manifest, layout, source="s", owner="a", max_bytes=None)
    cache.close()
    for name in ("files/pages.img", "resident", "lock"):
        (cache.path / name).unlink()
        (cache.path / name).symlink_to(victim)
        with pytest.raises(CacheUnusable):
            open_cache(tmp_path / "c", manifest, layout, source="s", owner="a", max_bytes=None)
        (cache.path / name).unlink()
    assert victim.read_text() == "precious"


def plant(
    directory: Path, key: str, *, size: int = MIB, used_s: float = 1.0, form: int = node_cache.CACHE_FORMAT
) -> Path:
    """Put an idle image into a cache directory, used a long time ago."""
    path = directory / "images" / key
    (path / "files").mkdir(mode=0o700, parents=True)
    (path / "files/pages.img").write_bytes(bytes([1]) * size)
    (path / "lock").touch()
    (path / "head").write_text(json.dumps({"format": form}))
    os.utime(path / "head", (used_s, used_s))
    return path


def keys(directory: Path) -> set[str]:
    """Names of the images that a cache directory has."""
    return {image.key for image in list_images(directory)}


def freed(cache: NodeCache) -> None:
    """Wait for the thread that frees what left."""
    assert cache.freeing is not None
    cache.freeing.join(60)
    assert not cache.freeing.is_alive()


def test_idle_images_leave_for_a_new_one_and_used_ones_stay(manifest: bytes, layout: Layout, tmp_path: Path) -> None:
    place = tmp_path / "c"
    place.mkdir(mode=0o700)
    plant(place, "old", used_s=1)
    plant(place, "new", used_s=2)
    limit = stored_bytes(layout) + MIB + MIB // 2
    cache = open_cache(place, manifest, layout, source="s", owner="b", max_bytes=limit)
    assert keys(place) == {"new", cache.path.name}
    assert cache.room_bytes == stored_bytes(layout)
    removed, in_use = clear_images(place)
    assert [image.key for image in removed] == ["new"]
    assert [image.key for image in in_use] == [cache.path.name]
    assert in_use[0].owner == "b"
    cache.close()
    clear_images(place)
    assert list_images(place) == []
    assert sorted(p.name for p in place.iterdir()) == ["images"]


def test_what_dead_processes_left_goes_and_their_chunks_stay(manifest: bytes, layout: Layout, tmp_path: Path) -> None:
    place = tmp_path / "c"
    place.mkdir(mode=0o700)
    cache = open_cache(place, manifest, layout, source="s", owner="a", max_bytes=None)
    freed(cache)
    plant(place, "of another version", form=node_cache.CACHE_FORMAT + 1)
    half_made = plant(place, "half made")
    (half_made / "head").unlink()
    (place / "images" / "just begun").mkdir()
    plant(place, "good")
    shutil.copytree(half_made, place / "trash-1")
    other = open_cache(place, manifest, layout, source="t", owner="b", max_bytes=None)
    freed(other)
    assert keys(place) == {"good", cache.path.name, other.path.name}
    assert sorted(entry.name for entry in place.iterdir()) == ["images"]
    cache.close()
    other.close()


def test_a_pinned_image_stays_until_it_is_unpinned(manifest: bytes, layout: Layout, tmp_path: Path) -> None:
    place, key = tmp_path / "c", "ab" * 32
    place.mkdir(mode=0o700)
    with pytest.raises(NotFound):
        pin_image(place, key)
    plant(place, key)
    pin_image(place, key)
    limit = stored_bytes(layout)
    cache = open_cache(place, manifest, layout, source="s", owner="a", max_bytes=limit)
    assert keys(place) == {key, cache.path.name}
    assert 0 < cache.room_bytes < limit
    cache.close()
    removed, left = clear_images(place)
    assert [image.key for image in removed] == [cache.path.name]
    assert [(image.key, image.is_pinned) for image in left] == [(key, True)]
    unpin_image(place, key)
    with pytest.raises(NotFound):
        unpin_image(place, key)
    cache = open_cache(place, manifest, layout, source="s", owner="a", max_bytes=limit)
    assert keys(place) == {cache.path.name}
    cache.close()


def test_an_image_whose_files_are_mounted_stays_though_nobody_owns_it(
    manifest: bytes, layout: Layout, tmp_path: Path
) -> None:
    place = tmp_path / "c"
    place.mkdir(mode=0o700)
    files_fd = os.open(plant(place, "mounted") / "files", os.O_RDONLY)
    fcntl.flock(files_fd, fcntl.LOCK_SH)
    cache = open_cache(place, manifest, layout, source="s", owner="a", max_bytes=stored_bytes(layout))
    assert keys(place) == {"mounted", cache.path.name}
    cache.close()
    assert [image.key for image in clear_images(place)[1]] == ["mounted"]
    os.close(files_fd)
    open_cache(place, manifest, layout, source="s", owner="a", max_bytes=stored_bytes(layout)).close()
    assert keys(place) == {cache.path.name}


@pytest.mark.parametrize("key", ["../images", "", "a/b", "\0", "ab" * 31])
def test_a_name_that_is_no_key_pins_nothing(tmp_path: Path, key: str) -> None:
    (tmp_path / "images" / "x").mkdir(parents=True)
    for call in (pin_image, unpin_image):
        with pytest.raises(NotFound):
            call(tmp_path, key)


def test_the_reserve_of_a_disk_bounds_what_an_image_gets_and_what_is_written(
    manifest: bytes, layout: Layout, tmp_path: Path
) -> None:
    disk = os.statvfs(tmp_path)
    free_bytes = disk.f_bavail * disk.f_frsize
    cache = open_cache(
        tmp_path / "c", manifest, layout, source="s", owner="a", max_bytes=None, reserve_bytes=2 * free_bytes
    )
    assert cache.room_bytes == 0
    with pytest.raises(OSError, match="reserve") as caught:
        cache.check_reserve()
    assert caught.value.errno == errno.ENOSPC
    cache.close()
    cache = open_cache(tmp_path / "c", manifest, layout, source="s", owner="a", max_bytes=1 << 40, reserve_bytes=0)
    assert cache.room_bytes == stored_bytes(layout)
    cache.check_reserve()
    cache.close()


def test_an_image_is_used_when_a_mount_begins_and_when_it_lets_go(saved: Any, make_cache: Any, tmp_path: Path) -> None:
    cache: NodeCache = make_cache()
    os.utime(cache.path / "head", (5, 5))
    assert serve_everything(saved, saved.serve(cache=cache, inline=False)) == saved.content
    [image] = list_images(tmp_path / "cache")
    assert image.used_s > 5
    os.utime(cache.path / "head", (5, 5))
    cache = make_cache()
    [image] = list_images(tmp_path / "cache")
    assert image.used_s > 5
    cache.close()


def test_a_check_of_the_cache_is_no_use_of_it(manifest: bytes, layout: Layout, tmp_path: Path) -> None:
    place = tmp_path / "c"
    cache = open_cache(place, manifest, layout, source="s", owner="a", max_bytes=None)
    cache.close()
    os.utime(cache.path / "head", (5, 5))
    assert [image.bad_chunks for image in verify_images(place)] == [()]
    assert [image.used_s for image in list_images(place)] == [5]


def test_a_chunk_that_leaves_gives_its_bytes_back_and_is_gone_in_the_next_life(
    manifest: bytes, layout: Layout, tmp_path: Path
) -> None:
    place = tmp_path / "c"
    cache = open_cache(place, manifest, layout, source="s", owner="a", max_bytes=None)
    for chunk in (40, 41, 42):
        cache.write(chunk_bytes(layout, chunk), layout.start[chunk])
    cache.confirm([40, 41, 42])
    (before,) = list_images(place)
    cache.evict(41, layout.start[41], layout.length[41])
    (after,) = list_images(place)
    assert before.disk_bytes - after.disk_bytes == layout.length[41]
    assert cache.read(layout.length[41], layout.start[41]) == bytes(layout.length[41])
    cache.close()
    cache = open_cache(place, manifest, layout, source="s", owner="a", max_bytes=None)
    assert [chunk for chunk in range(len(layout)) if cache.has(chunk)] == [40, 42]
    for chunk in (40, 42):
        assert cache.read(layout.length[chunk], layout.start[chunk]) == chunk_bytes(layout, chunk)
    cache.close()


@pytest.mark.parametrize("change", ["write", "forget", "evict"])
def test_a_seal_goes_before_anything_changes(manifest: bytes, layout: Layout, tmp_path: Path, change: str) -> None:
    cache = open_cache(tmp_path / "c", manifest, layout, source="s", owner="a", max_bytes=None)
    (cache.path / node_cache.SEALED).touch()
    match change:
        case "write":
            cache.write(chunk_bytes(layout, 5), layout.start[5])
        case "forget":
            cache.forget(5)
        case "evict":
            cache.evict(5, layout.start[5], layout.length[5])
    assert not (cache.path / node_cache.SEALED).exists()
    cache.close()


def test_the_files_are_the_snapshots_own(saved: Any, make_cache: Any, tmp_path: Path) -> None:
    cache: NodeCache = make_cache()
    assert serve_everything(saved, saved.serve(cache=cache, ahead=True, inline=False)) == saved.content
    files = cache.path / "files"
    assert sorted(path.name for path in files.iterdir()) == sorted(IMAGE_FILES)
    assert {path.stat().st_mode & 0o7777 for path in files.iterdir()} == {0o600}
    assert (files / "pages.img").read_bytes() == saved.content
    for file in saved.pinned.manifest.files:
        assert (files / file.name).stat().st_size == file.size


def serve_everything(saved: Any, image: ServedImage) -> bytes:
    async def test() -> bytes:
        async with trio.open_nursery() as nursery:
            await nursery.start(image.run)
            handle = image.open("pages.img", Opener(1, "test", None))
            got = [bytes(await image.read(handle, o, 100_000)) for o in range(0, len(saved.content), 100_000)]
            nursery.cancel_scope.cancel()
            return b"".join(got)

    return trio.run(test)


def test_a_second_life_fetches_nothing_again_and_verifies_what_it_finds(saved: Any, make_cache: Any) -> None:
    assert serve_everything(saved, saved.serve(cache=make_cache(), inline=False)) == saved.content
    store: FaultyStore = saved.faulty()
    image: ServedImage = saved.serve(store, cache=make_cache(), inline=False)
    assert serve_everything(saved, image) == saved.content
    assert store.bytes_read == 0
    assert image.stats.cache_hits_verified > 0


def test_a_flipped_bit_in_the_cache_is_never_served_and_is_fetched_again(
    saved: Any, make_cache: Any, layout: Layout
) -> None:
    cache = make_cache()
    assert serve_everything(saved, saved.serve(cache=cache, inline=False)) == saved.content
    stored = [c for c in range(30, len(layout)) if not layout.is_zero(c)]
    hurt = [stored[0], stored[40], stored[-1]]
    with (cache.path / "files/pages.img").open("r+b") as file:
        for chunk in hurt:
            at = layout.start[chunk] - pages_base(saved, layout) + 77
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 4]))
    store: FaultyStore = saved.faulty()
    image: ServedImage = saved.serve(store, cache=make_cache(), inline=False)
    assert serve_everything(saved, image) == saved.content
    assert image.stats.cache_corrupt == len(hurt)
    assert store.bytes_read == sum(layout.frame_bytes[chunk] for chunk in hurt)
    # And what was fetched again was written again.
    last: ServedImage = saved.serve(store, cache=make_cache(), inline=False)
    assert serve_everything(saved, last) == saved.content
    assert last.stats.cache_corrupt == 0
    assert store.bytes_read == sum(layout.frame_bytes[chunk] for chunk in hurt)


def test_cache_verify_finds_and_forgets_damaged_chunks(
    saved: Any, make_cache: Any, layout: Layout, tmp_path: Path
) -> None:
    cache = make_cache()
    assert serve_everything(saved, saved.serve(cache=cache, inline=False)) == saved.content
    chunk = next(c for c in range(30, len(layout)) if not layout.is_zero(c))
    with (cache.path / "files/pages.img").open("r+b") as file:
        file.seek(layout.start[chunk] - pages_base(saved, layout))
        file.write(b"wrong")
    (found,) = verify_images(tmp_path / "cache")
    assert found.bad_chunks == (chunk,)
    (again,) = verify_images(tmp_path / "cache")
    assert (again.bad_chunks, again.cached_chunks) == ((), found.cached_chunks - 1)


def test_a_limit_smaller_than_the_image_bounds_what_is_written(saved: Any, make_cache: Any) -> None:
    image: ServedImage = saved.serve(cache=make_cache(MIB), inline=False, memory_max_bytes=MIB)
    assert serve_everything(saved, image) == saved.content
    assert 0 < image.stats.cache_written_bytes <= MIB
    assert image.stats.cache_dropped_chunks > 0


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=["full", "faulty"])
def test_what_the_disk_has_not_confirmed_is_never_read_from_it(saved: Any, make_cache: Any, number: int) -> None:
    cache: NodeCache = make_cache()
    confirmed = cache.confirm
    calls: list[int] = []

    def confirm(chunks: Sequence[int]) -> None:
        """The second write-back fails, and what the kernel had taken reads as zeros from then on."""
        calls.append(len(chunks))
        if len(calls) < 2:
            confirmed(chunks)
            return
        layout = Layout(saved.pinned.manifest.table)
        for chunk in chunks:
            cache.write(bytes(layout.length[chunk]), layout.start[chunk])
        raise OSError(number, os.strerror(number))

    cache.confirm = confirm  # type: ignore[method-assign]
    image: ServedImage = saved.serve(cache=cache, inline=False, memory_max_bytes=MIB)

    async def test() -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(image.run)
            handle = image.open("pages.img", Opener(1, "test", None))

            async def check(start: int, end: int) -> None:
                for low in range(start, end, 100_000):
                    got = bytes(await image.read(handle, low, 100_000))
                    assert got == saved.content[low : low + 100_000]

            with trio.fail_after(20):
                await check(0, MIB)
                while len(calls) < 1:
                    await trio.sleep(0.01)
                await check(MIB, len(saved.content))
                while image.stats.cache_failure is None:
                    await trio.sleep(0.01)
                await check(0, len(saved.content))
            nursery.cancel_scope.cancel()

    trio.run(test)
    assert len(calls) == 2


def test_mounts_that_begin_together_stay_within_the_limit_together(
    manifest: bytes, layout: Layout, tmp_path: Path
) -> None:
    limit = 2 * stored_bytes(layout) + MIB
    caches = [
        open_cache(tmp_path / "c", manifest, layout, source=str(n), owner=str(n), max_bytes=limit) for n in range(4)
    ]
    assert [cache.room_bytes for cache in caches][:2] == [stored_bytes(layout)] * 2
    assert sum(cache.room_bytes for cache in caches) <= limit
    for cache in caches:
        cache.close()


def test_images_of_different_sources_share_no_byte(manifest: bytes, layout: Layout, tmp_path: Path) -> None:
    first = open_cache(tmp_path / "c", manifest, layout, source="file:///a", owner="a", max_bytes=None)
    first.write(chunk_bytes(layout, 5), layout.start[5])
    first.confirm([5])
    # Beside the first, not instead of it: another tenant's copy neither sees nor blocks it.
    second = open_cache(tmp_path / "c", manifest, layout, source="file:///b", owner="b", max_bytes=None)
    assert not second.has(5)
    second.close()
    first.close()


def test_a_claim_of_zeros_takes_no_room_from_others(manifest: bytes, layout: Layout, tmp_path: Path) -> None:
    place = tmp_path / "c"
    place.mkdir(mode=0o700)
    other = plant(place, "other")
    zeros = layout.start[-1] - stored_bytes(layout)
    assert zeros > 4 * 64 * 1024
    limit = stored_bytes(layout) + MIB + 64 * 1024
    cache = open_cache(place, manifest, layout, source="s", owner="a", max_bytes=limit)
    assert other.exists()
    cache.close()


class CacheMachine(RuleBasedStateMachine):
    """One image's directory against a dictionary, with restarts in between."""

    def __init__(self) -> None:
        super().__init__()
        self.model: dict[int, bytes] = {}
        self.cache = open_cache(PLACE, MANIFEST, LAYOUT, source="s", owner="machine", max_bytes=None)

    @rule(chunk=st.integers(0, 255), fill=st.integers(1, 255))
    def write(self, chunk: int, fill: int) -> None:
        data = bytes([fill]) * LAYOUT.length[chunk]
        self.cache.write(data, LAYOUT.start[chunk])
        self.cache.confirm([chunk])
        self.model[chunk] = data

    @rule(chunk=st.integers(0, 255))
    def forget(self, chunk: int) -> None:
        self.cache.forget(chunk)
        self.model.pop(chunk, None)

    @rule(chunk=st.integers(0, 255))
    def evict(self, chunk: int) -> None:
        self.cache.evict(chunk, LAYOUT.start[chunk], LAYOUT.length[chunk])
        self.model.pop(chunk, None)

    @rule()
    def reopen(self) -> None:
        self.cache.close()
        self.cache = open_cache(PLACE, MANIFEST, LAYOUT, source="s", owner="machine", max_bytes=None)

    @rule(chunk=st.integers(0, 255))
    def read(self, chunk: int) -> None:
        if chunk in self.model:
            assert self.cache.read(LAYOUT.length[chunk], LAYOUT.start[chunk]) == self.model[chunk]
            view = memoryview(bytearray(LAYOUT.length[chunk]))
            assert self.cache.read_nowait(view, LAYOUT.start[chunk]) in (0, len(view))

    @invariant()
    def same_chunks(self) -> None:
        assert {c for c in range(len(LAYOUT)) if self.cache.has(c)} == set(self.model)

    def teardown(self) -> None:
        self.cache.close()
        clear_images(PLACE)


PLACE: Path
MANIFEST: bytes
LAYOUT: Layout


def test_a_directory_behaves_as_a_dictionary_of_chunks(manifest: bytes, layout: Layout, tmp_path: Path) -> None:
    global PLACE, MANIFEST, LAYOUT
    PLACE, MANIFEST, LAYOUT = tmp_path / "machine", manifest, layout
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(CacheMachine, settings=settings(max_examples=25, deadline=None, stateful_step_count=30))
