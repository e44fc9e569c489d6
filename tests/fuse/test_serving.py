"""What a mount serves: the right bytes, whatever is asked for and however, and nothing but three files."""

import os
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.mounts import LiveMount, Mounts
from streamd.snapshot.manifest import Codec

if TYPE_CHECKING:
    from tests.fuse.conftest import Saved

KIB, MIB = 1 << 10, 1 << 20
# Commands that must answer from memory; ten seconds tell a hang.
AT_ONCE_S = 10


@pytest.fixture(scope="module")
def served(saved: "Saved") -> Iterator[LiveMount]:
    """One mount without prefetch and without a cache on disk, for all tests here that change nothing."""
    with Mounts() as mounts, mounts.start(saved.url, options=["--no-cache"]) as mount:
        yield mount
        assert mount.complaints() == []


def test_a_mount_shows_three_read_only_files_of_root_and_nothing_else(served: LiveMount, saved: "Saved") -> None:
    assert sorted(os.listdir(served.mountpoint)) == ["checkpoint.img", "pages.img", "pages_meta.img"]
    root = os.stat(served.mountpoint)
    assert (stat.S_IMODE(root.st_mode), root.st_uid) == (0o500, 0)
    for path in saved.image.iterdir():
        info = os.stat(served.mountpoint / path.name)
        assert (stat.S_IMODE(info.st_mode), info.st_uid, info.st_gid) == (0o400, 0, 0)
        assert info.st_size == path.stat().st_size
    # With this one, runsc would leave the mount aside and read from a bucket that the file names.
    for name in ("gcs_opts.json", "manifest", ".hidden", "PAGES.IMG", "x" * 255, "x" * 300):
        with pytest.raises(FileNotFoundError):
            os.stat(served.mountpoint / name)
    for flags in (os.O_WRONLY, os.O_RDWR, os.O_RDONLY | os.O_TRUNC):
        with pytest.raises(OSError, match="Read-only"):
            os.open(served.pages, flags)
    with pytest.raises(OSError, match="Read-only"):
        os.mkdir(served.mountpoint / "new")


def test_a_descriptor_that_root_opened_serves_another_user_who_could_not_open_the_file(
    served: LiveMount, saved: "Saved"
) -> None:
    program = (
        "import os, sys\n"
        "fd = os.open(sys.argv[1], os.O_RDONLY)\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "sys.stdout.buffer.write(os.pread(fd, 4096, 8192))\n"
        "try: os.open(sys.argv[1], os.O_RDONLY)\n"
        "except PermissionError: sys.exit(0)\n"
        "sys.exit('opened')\n"
    )
    result = subprocess.run(["python3", "-c", program, str(served.pages)], capture_output=True, timeout=AT_ONCE_S)
    assert (result.returncode, result.stderr) == (0, b"")
    with saved.pages.open("rb") as file:
        file.seek(8192)
        assert result.stdout == file.read(4096)


@pytest.mark.parametrize("name", ["checkpoint.img", "pages_meta.img"])
def test_the_small_files_are_what_was_pushed(served: LiveMount, saved: "Saved", name: str) -> None:
    outcome = served.reader(saved.image / name, file=name, slots=4, read_bytes=1000).outcome()
    assert outcome.is_clean
    assert outcome.right_bytes == (saved.image / name).stat().st_size


def _ranges(size: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    """Ranges that begin and end anywhere, near chunk and page borders most of all, some of them beyond the end."""
    border = st.integers(0, size // (64 * KIB)).map(lambda index: index * 64 * KIB)
    near = st.tuples(border, st.integers(-5000, 5000)).map(lambda pair: max(0, sum(pair)))
    offset = st.one_of(st.integers(0, size + 4096), near, st.just(size - 1), st.just(size))
    length = st.one_of(st.integers(1, 64), st.sampled_from([4096, 64 * KIB, 256 * KIB]), st.integers(1, 2 * MIB))
    return st.lists(st.tuples(offset, length), min_size=1, max_size=24)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_every_range_has_the_bytes_that_were_pushed(served: LiveMount, saved: "Saved", data: st.DataObject) -> None:
    ranges = data.draw(_ranges(saved.pages.stat().st_size))
    outcome = served.reader(saved.pages, slots=8, ranges=ranges).outcome()
    assert outcome.is_clean, outcome
    assert outcome.reads == len(ranges)


def test_a_whole_read_by_runscs_slots_and_by_a_mapping_is_right(served: LiveMount, saved: "Saved") -> None:
    assert saved.is_whole(served.reader(saved.pages).outcome())
    # direct_io files can be mapped privately; cmp maps nothing, but reads in steps of its own.
    assert subprocess.run(["cmp", served.pages, saved.pages], timeout=60).returncode == 0


def test_signals_every_millisecond_are_never_seen_as_an_error(mounts: Mounts, saved: "Saved") -> None:
    with mounts.start(f"{saved.url}?latency=20ms&rate=200MB/s", options=["--no-cache"]) as mount:
        outcome = mount.reader(saved.pages, slots=32, signal_every_ms=1).outcome()
        assert saved.is_whole(outcome)
        assert outcome.signals > 100
        assert mount.complaints() == []


def test_without_prefetch_only_what_is_read_is_fetched(mounts: Mounts, saved: "Saved") -> None:
    table = saved.pinned().manifest.table
    pages = saved.pinned().manifest.files[-1]
    small_bytes = int(table.frame_bytes[: pages.first_chunk].sum())
    first = next(c for c in range(pages.first_chunk, len(table)) if table.codec[c] != Codec.ZERO)
    offset = int(table.start[first] - table.start[pages.first_chunk])
    with mounts.start(saved.url) as mount:
        assert mount.ready["origin_bytes"] == small_bytes
        assert mount.reader(saved.pages, slots=1, ranges=[(offset + 100, 1)]).outcome().right_bytes == 1
        # A fault's GET takes in what faults wait for: here nothing but the one chunk.
        assert mount.status()["origin_bytes"] == small_bytes + int(table.frame_bytes[first])
        assert mount.status()["fetched_chunks"] == pages.first_chunk + 1 - int(
            (table.codec[: pages.first_chunk] == Codec.ZERO).sum()
        )


@pytest.mark.parametrize("prefetch", ["none", "all"])
def test_two_readers_of_everything_cost_one_fetch_of_everything(
    mounts: Mounts, saved: "Saved", prefetch: str, calm: Callable[[LiveMount], None]
) -> None:
    with mounts.start(f"{saved.url}?latency=5ms&rate=100MB/s", prefetch=prefetch) as mount:
        readers = [mount.reader(saved.pages) for _ in range(2)]
        assert all(saved.is_whole(reader.outcome()) for reader in readers)
        status = mount.status()
        assert status["stored_bytes"] <= status["origin_bytes"] <= 1.02 * status["stored_bytes"]
        calm(mount)


def test_prefetch_brings_everything_without_a_reader(mounts: Mounts, saved: "Saved") -> None:
    with mounts.start(saved.url, prefetch="all") as mount:
        unique = mount.ready["chunks"] - mount.ready["zero_chunks"]
        status = mount.until(lambda status: status["cached_chunks"] == unique)
        assert status["origin_bytes"] == status["stored_bytes"]
        assert saved.is_whole(mount.reader(saved.pages).outcome())
        assert mount.status()["origin_bytes"] == status["stored_bytes"]


def test_a_cache_smaller_than_the_image_still_gives_right_bytes(mounts: Mounts, saved: "Saved") -> None:
    mounts.configure('memory_max_bytes = "32MiB"')
    with mounts.start(saved.url, options=["--cache-max", "8MiB"], prefetch="all") as mount:
        for _ in range(2):
            assert saved.is_whole(mount.reader(saved.pages).outcome())
        status = mount.status()
        assert 0 < status["cache_written_bytes"] <= 8 * MIB
        # The only demand read goes beyond the cap when the disk holds all of it: with one chunk, encoded and decoded.
        assert status["memory_peak_bytes"] <= status["memory_max_bytes"] + 512 * KIB
        blocks = sum(file.stat().st_blocks for file in mounts.cache_directory.rglob("*") if file.is_file())
        assert 512 * blocks <= 9 * MIB  # bitmap, manifest and head on top
        assert mount.complaints() == []


def test_pod_memory_gets_into_no_core_file(mounts: Mounts, saved: "Saved") -> None:
    with mounts.start(saved.url) as mount:
        limits = Path(f"/proc/{mount.pid}/limits").read_text()
        line = next(line for line in limits.splitlines() if line.startswith("Max core file size"))
        assert line.split()[4:6] == ["0", "0"]
