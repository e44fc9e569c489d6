"""Bad days of the node cache under real mounts: whatever its disk does, reads are right and wait for no disk."""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from bench.mounts import FaultyDisk, LiveMount, Mounts
from streamd.fuse import mountinfo
from streamd.snapshot.manifest import Codec

if TYPE_CHECKING:
    from tests.fuse.conftest import Saved

MIB = 1 << 20
_PAGES = "files/pages.img"  # in an image's directory


def stored_chunks(status: dict[str, Any]) -> int:
    """Chunks that have bytes in the store."""
    return int(status["chunks"] - status["zero_chunks"])


def fill(mounts: Mounts, saved: "Saved") -> None:
    """Bring the whole image into the cache, and let go of it."""
    with mounts.start(saved.url, prefetch="all") as mount:
        mount.until(lambda status: status["cached_chunks"] == stored_chunks(status))


def cached_image(mounts: Mounts) -> Path:
    """Give the directory of the one image in the cache."""
    [path] = (mounts.cache_directory / "images").iterdir()
    return path


def flip(path: Path, at: int) -> None:
    """Flip one bit."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))


# Before a mount


def _tmpfs(mounts: Mounts, options: str) -> None:
    mounts.cache_directory.mkdir(mode=0o700)
    command = ["mount", "-t", "tmpfs", "-o", f"{options},mode=0700", "tmpfs", str(mounts.cache_directory)]
    subprocess.run(command, check=True)


@pytest.fixture(autouse=True)
def _no_tmpfs_stays(mounts: Mounts) -> Iterator[None]:
    yield
    while mountinfo.topmost(str(mounts.cache_directory)) is not None:
        subprocess.run(["umount", "--lazy", mounts.cache_directory], check=True)


def _is_a_file(mounts: Mounts) -> None:
    mounts.cache_directory.write_text("")


def _is_open_to_all(mounts: Mounts) -> None:
    mounts.cache_directory.mkdir()
    mounts.cache_directory.chmod(0o777)


UNUSABLE: dict[str, Callable[[Mounts], None]] = {
    "cache directory read-only": lambda mounts: _tmpfs(mounts, "ro"),
    "cache directory without a byte to spare": lambda mounts: _tmpfs(mounts, "nr_inodes=2"),
    "cache directory a file": _is_a_file,
    "cache directory writable by others": _is_open_to_all,
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_an_unusable_cache_is_said_and_done_without(
    mounts: Mounts, saved: "Saved", calm: Callable[[LiveMount], None], name: str
) -> None:
    UNUSABLE[name](mounts)
    with mounts.start(saved.url, prefetch="all") as mount:
        assert str(mounts.cache_directory) in mount.ready["cache_problem"]
        assert not mount.ready["is_caching"]
        assert saved.is_whole(mount.reader(saved.pages).outcome())
        assert mount.status()["origin_bytes"] == mount.status()["stored_bytes"]
        calm(mount)


# Damage between two mounts


def _a_chunk(saved: "Saved") -> tuple[int, int, int]:
    """Give a chunk of pages.img that is not zero, its first byte in that file, and the bytes of its frame."""
    manifest = saved.pinned().manifest
    table, first = manifest.table, manifest.files[-1].first_chunk
    chunk = next(c for c in range(first + 100, len(table)) if table.codec[c] != Codec.ZERO)
    return chunk, int(table.start[chunk] - table.start[first]), int(table.frame_bytes[chunk])


def test_a_flipped_bit_in_a_cached_chunk_costs_one_fetch_of_it(
    mounts: Mounts, saved: "Saved", calm: Callable[[LiveMount], None]
) -> None:
    fill(mounts, saved)
    _, start, frame_bytes = _a_chunk(saved)
    flip(cached_image(mounts) / _PAGES, start + 5000)
    with mounts.start(saved.url) as mount:
        assert saved.is_whole(mount.reader(saved.pages).outcome())
        status = mount.until(lambda status: status["cached_chunks"] == stored_chunks(status))
        assert status["cache_corrupt_chunks"] == 1
        assert status["origin_bytes"] == frame_bytes
        calm(mount)
    with mounts.start(saved.url) as mount:  # the right bytes were written over it
        assert saved.is_whole(mount.reader(saved.pages).outcome())
        status = mount.status()
        assert (status["cache_corrupt_chunks"], status["origin_bytes"]) == (0, 0)
        assert status["cache_verified_chunks"] == stored_chunks(status)


def _bit_of_an_absent_chunk(path: Path, saved: "Saved") -> None:
    """Punch a chunk out of the data, as a machine that crashed before the data was written would have it."""
    _, start, _ = _a_chunk(saved)
    with (path / _PAGES).open("r+b") as file:
        file.seek(start)
        file.write(bytes(64 << 10))


def _cleared_bit(path: Path, saved: "Saved") -> None:
    chunk, _, _ = _a_chunk(saved)
    bits = bytearray((path / "resident").read_bytes())
    bits[chunk >> 3] ^= 1 << (chunk & 7)
    (path / "resident").write_bytes(bits)


def _other_format(path: Path, _: "Saved") -> None:
    head = json.loads((path / "head").read_bytes())
    (path / "head").write_text(json.dumps(head | {"format": 99}))


def _link(path: Path, _: "Saved") -> None:
    (path / _PAGES).rename(path / "files/elsewhere")
    (path / _PAGES).symlink_to("elsewhere")


DAMAGE: dict[str, tuple[Callable[[Path, "Saved"], object], str]] = {
    "a bit set for a chunk that was not written": (_bit_of_an_absent_chunk, "one"),
    "a flipped bit in the bitmap": (_cleared_bit, "one"),
    "a flipped bit in the head": (lambda path, _: flip(path / "head", 3), "all"),
    "a flipped bit in the manifest": (lambda path, _: flip(path / "manifest", 100), "all"),
    "a head of another format": (_other_format, "all"),
    "a bitmap cut to nothing": (lambda path, _: (path / "resident").write_bytes(b""), "all"),
    "a file cut in half": (lambda path, _: os.truncate(path / _PAGES, 20 * MIB), "some"),
    "a file that is missing": (lambda path, _: (path / _PAGES).unlink(), "some"),
    "files that are missing": (lambda path, _: shutil.rmtree(path / "files"), "all"),
    "a file that is a link": (_link, "all"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_cache_gives_right_bytes(
    mounts: Mounts, saved: "Saved", calm: Callable[[LiveMount], None], filled: Path, name: str
) -> None:
    shutil.copytree(filled, mounts.cache_directory)
    damage, extent = DAMAGE[name]
    damage(cached_image(mounts), saved)
    with mounts.start(saved.url) as mount:
        assert saved.is_whole(mount.reader(saved.pages).outcome())
        status = mount.status()
        origin_bytes, stored_bytes = status["origin_bytes"], status["stored_bytes"]
        match extent:
            case "one":
                assert origin_bytes == _a_chunk(saved)[2]
            case "all":
                assert origin_bytes == stored_bytes
            case "some":
                assert 0 < origin_bytes < stored_bytes
        calm(mount)


@pytest.fixture(scope="module")
def filled(saved: "Saved", tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that holds the whole image; to be copied."""
    place = tmp_path_factory.mktemp("filled") / "cache"
    with Mounts() as mounts:
        fill(mounts, saved)
        shutil.copytree(mounts.cache_directory, place)
    return place


# Under a mount


def test_a_full_cache_disk_ends_caching_and_nothing_else(
    mounts: Mounts, saved: "Saved", calm: Callable[[LiveMount], None]
) -> None:
    _tmpfs(mounts, "size=64m")
    with mounts.start(saved.url, prefetch="none", options=["--cache-max", "1GiB"]) as mount:
        # More than its reserve is free, so that it begins to write, and less than what is synced at once.
        free = os.statvfs(mounts.cache_directory)
        (mounts.cache_directory / "of others").write_bytes(bytes(free.f_bavail * free.f_frsize - 8 * MIB))
        assert saved.is_whole(mount.reader(saved.pages).outcome())
        status = mount.until(lambda status: not status["is_caching"])
        assert "No space" in status["cache_failure"]
        assert 0 < status["cached_chunks"] < stored_chunks(status)  # what was written is used on
        assert saved.is_whole(mount.reader(saved.pages).outcome())
        assert mount.status()["origin_bytes"] == status["stored_bytes"]  # in memory, the rest of it
        calm(mount)


def _truncate(path: Path) -> None:
    os.truncate(path / _PAGES, MIB)


@pytest.mark.parametrize("harm", [shutil.rmtree, _truncate], ids=["removed", "cut"])
def test_a_cache_that_is_harmed_under_a_mount_hurts_no_reader(
    mounts: Mounts, saved: "Saved", calm: Callable[[LiveMount], None], harm: Callable[[Path], None]
) -> None:
    with mounts.start(saved.url, prefetch="all") as mount:
        mount.until(lambda status: status["cached_chunks"] == stored_chunks(status))
        harm(cached_image(mounts))
        assert saved.is_whole(mount.reader(saved.pages).outcome())
        calm(mount)


@pytest.fixture
def disk(mounts: Mounts, tmp_path: Path) -> Iterator[FaultyDisk]:
    """Put the cache directory on a disk that fails on demand."""
    with FaultyDisk(tmp_path / "backing", mounts.cache_directory) as running:
        yield running


@pytest.mark.parametrize("answer", ["eio", "hang"])
def test_a_disk_that_fails_writes_ends_caching_and_slows_nobody(
    mounts: Mounts, saved: "Saved", disk: FaultyDisk, calm: Callable[[LiveMount], None], answer: str
) -> None:
    with mounts.start(saved.url, options=["--cache-max", "1GiB"]) as mount:
        assert mount.ready["cache_problem"] is None
        with disk.failing("write", answer):
            outcome = mount.reader(saved.pages).outcome()
            assert saved.is_whole(outcome)
            mount.until(lambda status: status["cache_failure"])
            assert not mount.status()["is_caching"]
            assert saved.is_whole(mount.reader(saved.pages).outcome())
            assert mount.status()["origin_bytes"] <= 1.02 * mount.status()["stored_bytes"]
            calm(mount)
            mount.signal(signal.SIGTERM)
            mount.until_unmounted()
        assert mount.wait() == 0


@pytest.mark.parametrize("answer", ["eio", "hang"])
@pytest.mark.parametrize("when", ["cached in a former life", "cached in this one"])
def test_a_disk_that_fails_reads_costs_a_fetch_and_slows_nobody_for_long(
    mounts: Mounts, saved: "Saved", disk: FaultyDisk, calm: Callable[[LiveMount], None], when: str, answer: str
) -> None:
    options = ["--cache-max", "1GiB"]
    if when == "cached in a former life":
        with mounts.start(saved.url, prefetch="all", options=options) as mount:
            mount.until(lambda status: status["cached_chunks"] == stored_chunks(status))
    with mounts.start(saved.url, options=options) as mount:
        if when == "cached in this one":
            assert saved.is_whole(mount.reader(saved.pages).outcome())
            mount.until(lambda status: status["cached_chunks"] == stored_chunks(status))
        with disk.failing("read", answer):
            assert saved.is_whole(mount.reader(saved.pages).outcome())
            assert mount.status()["cache_failure"]
            calm(mount)
            mount.signal(signal.SIGTERM)
            mount.until_unmounted()
        assert mount.wait() == 0


def test_a_disk_that_hangs_before_the_mount_is_done_without(
    mounts: Mounts, saved: "Saved", disk: FaultyDisk, calm: Callable[[LiveMount], None]
) -> None:
    with disk.failing("all", "hang"), mounts.start(saved.url) as mount:
        assert "did not answer" in mount.ready["cache_problem"]
        assert saved.is_whole(mount.reader(saved.pages).outcome())
        calm(mount)
        disk.set("all", "ok")
