"""A seal is good exactly as long as the files are what was read back from the disk, in the same boot."""

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.images import make_image
from streamd.safe_paths import acting_as
from streamd.save.push import PushOptions, push
from streamd.serve import sealing
from streamd.serve.cache_directory import open_cache
from streamd.serve.node_cache import FILES, SEALED, SEALED_MODE, NodeCache
from streamd.serve.plan import Layout
from streamd.serve.sealing import FileFacts, NotSealed, Seal
from streamd.snapshot.manifest import ImageFile
from streamd.snapshot.names import IMAGE_FILES, PAGES
from streamd.store.catalog import Pinned, open_snapshot
from streamd.store.opening import open_store

CHUNK = 16 << 10
PAGES_BYTES = 2 << 20
NOBODY = 65534
NAMES = st.sampled_from(IMAGE_FILES)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot and its image directory."""

    pinned: Pinned
    image: Path
    layout: Layout

    @property
    def files(self) -> tuple[ImageFile, ...]:
        return self.pinned.manifest.files

    def content(self, chunk: int) -> bytes:
        """The right bytes of a chunk."""
        for file in self.files:
            if file.first_chunk <= chunk < file.first_chunk + file.chunk_count:
                start = self.layout.start[chunk] - self.layout.start[file.first_chunk]
                return (self.image / file.name).read_bytes()[start : start + self.layout.length[chunk]]
        raise IndexError(chunk)


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Snapshot:
    """Some hundred chunks, every fifth zero; pages_meta.img and checkpoint.img end within a page."""
    place = tmp_path_factory.mktemp("sealing")
    make_image(place / "image", PAGES_BYTES, zero=0.3, compressible=0.3)
    store = open_store(f"file://{place}/store")
    push(place / "image", store, snapshot_id="s", push_id="p", options=PushOptions(chunk_bytes=CHUNK))
    pinned = open_snapshot(store, "s")
    return Snapshot(pinned, place / "image", Layout(pinned.manifest.table))


@pytest.fixture
def cache(snapshot: Snapshot, tmp_path: Path) -> Iterator[NodeCache]:
    """The snapshot's place in a cache of the test's own, empty."""
    opened = open_cache(
        tmp_path / "cache", snapshot.pinned.data, snapshot.layout, source="s", owner="test", max_bytes=None
    )
    yield opened
    opened.close()


def fill(cache: NodeCache, snapshot: Snapshot, *, without: int | None = None, wrong: int | None = None) -> None:
    """Write every chunk but one; one of them wrong."""
    layout = snapshot.layout
    for chunk in range(len(layout)):
        if not layout.is_zero(chunk) and chunk != without:
            data = bytearray(snapshot.content(chunk))
            if chunk == wrong:
                data[-1] ^= 1
            cache.write(data, layout.start[chunk])
    cache.confirm([chunk for chunk in range(len(layout)) if not layout.is_zero(chunk) and chunk != without])


def seal(cache: NodeCache, snapshot: Snapshot) -> None:
    sealing.seal(cache, snapshot.files, snapshot.layout)


def reason(cache: NodeCache, snapshot: Snapshot) -> str:
    """Say why the image is not sealed; empty when it is."""
    try:
        os.close(sealing.open_sealed(cache, snapshot.files))
    except NotSealed as refusal:
        assert not sealing.is_sealed(cache, snapshot.files)
        return str(refusal)
    assert sealing.is_sealed(cache, snapshot.files)
    return ""


def modes(cache: NodeCache) -> set[int]:
    return {(cache.path / FILES / name).stat().st_mode & 0o7777 for name in IMAGE_FILES}


def test_a_whole_image_is_sealed_and_its_files_are_the_snapshots(cache: NodeCache, snapshot: Snapshot) -> None:
    fill(cache, snapshot)
    assert reason(cache, snapshot) == "the image is not sealed"
    seal(cache, snapshot)
    directory_fd = sealing.open_sealed(cache, snapshot.files)
    try:
        assert sorted(os.listdir(directory_fd)) == sorted(IMAGE_FILES)
        for name in IMAGE_FILES:
            fd = os.open(name, os.O_RDONLY, dir_fd=directory_fd)
            assert os.pread(fd, 2 * PAGES_BYTES, 0) == (snapshot.image / name).read_bytes()
            os.close(fd)
    finally:
        os.close(directory_fd)
    assert modes(cache) == {SEALED_MODE}
    seal(cache, snapshot)  # a second time, as a scrub does
    assert reason(cache, snapshot) == ""


@pytest.mark.parametrize("which", ["first", "last"])
def test_an_image_with_a_chunk_missing_is_not_sealed(cache: NodeCache, snapshot: Snapshot, which: str) -> None:
    chunks = [chunk for chunk in range(len(snapshot.layout)) if not snapshot.layout.is_zero(chunk)]
    fill(cache, snapshot, without=chunks[0 if which == "first" else -1])
    with pytest.raises(NotSealed, match="1 chunks are not in the cache"):
        seal(cache, snapshot)
    assert modes(cache) == {0o600}


def test_a_chunk_that_the_disk_gives_back_wrong_is_forgotten_and_nothing_sealed(
    cache: NodeCache, snapshot: Snapshot
) -> None:
    # The first chunks are checkpoint.img's, the last pages.img's; both ends of a run that is read at once.
    for wrong in (0, len(snapshot.layout) - 1):
        assert not snapshot.layout.is_zero(wrong)
        fill(cache, snapshot, wrong=wrong)
        with pytest.raises(NotSealed) as refusal:
            seal(cache, snapshot)
        assert refusal.value.bad_chunks == (wrong,)
        assert not cache.has(wrong)
        assert modes(cache) == {0o600}
    assert reason(cache, snapshot)


def test_an_owner_without_capabilities_opens_a_sealed_image_as_it_is_and_punches_no_hole_into_it(
    snapshot: Snapshot,
) -> None:
    """A worker, where a sandbox may have the files open natively."""
    manifest, layout = snapshot.pinned.data, snapshot.layout
    chunk = next(chunk for chunk in range(len(layout)) if not layout.is_zero(chunk))
    start, length, content = layout.start[chunk], layout.length[chunk], snapshot.content(chunk)
    with tempfile.TemporaryDirectory() as place:
        os.chown(place, NOBODY, NOBODY)

        def opened() -> contextlib.closing[NodeCache]:
            with acting_as(NOBODY, NOBODY):
                cache = open_cache(Path(place), manifest, layout, source="s", owner="test", max_bytes=None)
            return contextlib.closing(cache)

        with opened() as cache:
            fill(cache, snapshot)
            with acting_as(NOBODY, NOBODY):
                seal(cache, snapshot)
        with opened() as cache, acting_as(NOBODY, NOBODY):
            assert reason(cache, snapshot) == ""
            cache.write(content, start)  # in the place of one that was damaged, say
            cache.confirm([chunk])
            assert cache.read(length, start) == content
            assert modes(cache) == {SEALED_MODE}
            assert reason(cache, snapshot) == "the image is not sealed"
            with pytest.raises(OSError, match="may be open in a sandbox"):
                cache.evict(chunk, start, length)


def test_a_zero_chunk_must_be_zeros_on_the_disk(cache: NodeCache, snapshot: Snapshot) -> None:
    fill(cache, snapshot)
    zero = next(chunk for chunk in range(len(snapshot.layout)) if snapshot.layout.is_zero(chunk))
    cache.write(bytes(snapshot.layout.length[zero]), snapshot.layout.start[zero])  # written, not a hole: as good
    seal(cache, snapshot)
    cache.write(b"\0\1", snapshot.layout.start[zero])
    with pytest.raises(NotSealed) as refusal:
        seal(cache, snapshot)
    assert refusal.value.bad_chunks == (zero,)


CHANGES: dict[str, Callable[[Path], object]] = {
    "a byte written as it was": lambda files: _write(files / PAGES),
    "cut to its own size": lambda files: os.truncate(files / PAGES, PAGES_BYTES),
    "made readable": lambda files: (files / PAGES).chmod(0o444),
    "made writable": lambda files: (files / "checkpoint.img").chmod(0o600),
    "made writable and back": lambda files: _chmod_twice(files / PAGES),
    "shortened": lambda files: os.truncate(files / PAGES, PAGES_BYTES - 1),
    "replaced by its copy": lambda files: _replace(files / "pages_meta.img"),
    "linked elsewhere": lambda files: os.link(files / PAGES, files.parent / "link"),
    "removed": lambda files: (files / PAGES).unlink(),
    "another file beside them": lambda files: (files / "gcs_opts.json").write_text("{}"),
    "a symlink in its place": lambda files: _symlink(files / PAGES),
    "a directory in its place": lambda files: _directory(files / PAGES),
}


def _write(path: Path) -> None:
    with path.open("r+b") as file:
        first = file.read(1)
        file.seek(0)
        file.write(first)


def _chmod_twice(path: Path) -> None:
    path.chmod(0o600)
    path.chmod(SEALED_MODE)


def _directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _replace(path: Path) -> None:
    copy = path.with_name("copy")
    copy.write_bytes(path.read_bytes())
    copy.chmod(SEALED_MODE)
    copy.rename(path)


def _symlink(path: Path) -> None:
    path.rename(path.parent.parent / "moved")
    path.symlink_to("../moved")


@pytest.mark.parametrize("change", CHANGES)
def test_any_change_of_the_files_breaks_the_seal(cache: NodeCache, snapshot: Snapshot, change: str) -> None:
    fill(cache, snapshot)
    seal(cache, snapshot)
    assert reason(cache, snapshot) == ""
    CHANGES[change](cache.path / FILES)
    assert reason(cache, snapshot) != ""


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[]", b"\xff", b"[" * 4000, b'{"format": 1, "boot_id": "b", "files": []}']
)
def test_a_seal_that_is_not_understood_is_none(cache: NodeCache, snapshot: Snapshot, content: bytes) -> None:
    fill(cache, snapshot)
    seal(cache, snapshot)
    (cache.path / SEALED).write_bytes(content)
    assert "can't be read" in reason(cache, snapshot)


def test_a_seal_of_another_boot_is_none(cache: NodeCache, snapshot: Snapshot) -> None:
    fill(cache, snapshot)
    seal(cache, snapshot)
    path = cache.path / SEALED
    path.write_bytes(sealing.encode(replace(sealing.decode(path.read_bytes()), boot_id="another")))
    assert "started anew" in reason(cache, snapshot)


def test_whoever_changes_the_image_takes_its_seal_away_and_the_files_stay_read_only(
    cache: NodeCache, snapshot: Snapshot
) -> None:
    fill(cache, snapshot)
    seal(cache, snapshot)
    cache.forget(0)
    assert reason(cache, snapshot) == "the image is not sealed"
    # A sandbox may have them open natively, and no lock would tell: the mode is what keeps holes out of them.
    assert modes(cache) == {SEALED_MODE}
    with pytest.raises(NotSealed):
        seal(cache, snapshot)
    assert modes(cache) == {SEALED_MODE}
    cache.write(snapshot.content(0), 0)
    cache.confirm([0])
    seal(cache, snapshot)
    assert reason(cache, snapshot) == ""


def test_a_chunk_forgotten_while_the_image_is_sealed_is_never_under_a_seal(
    cache: NodeCache, snapshot: Snapshot
) -> None:
    fill(cache, snapshot)
    gone = threading.Event()

    def forget() -> None:
        until_s = time.monotonic() + 30
        # Between the first change that sealing makes and the seal.
        while modes(cache) != {SEALED_MODE} and time.monotonic() < until_s:
            pass
        cache.forget(3)
        gone.set()

    thread = threading.Thread(target=forget)
    thread.start()
    with suppress(NotSealed):
        seal(cache, snapshot)
    thread.join()
    assert gone.is_set()
    assert reason(cache, snapshot) == "the image is not sealed"


def test_sealing_leaves_its_thread_as_urgent_as_it_was(cache: NodeCache, snapshot: Snapshot) -> None:
    fill(cache, snapshot)
    after: list[int] = []

    def seal_in_a_hurry() -> None:
        os.setpriority(os.PRIO_PROCESS, 0, 5)  # this thread's alone
        seal(cache, snapshot)
        after.append(os.getpriority(os.PRIO_PROCESS, 0))

    thread = threading.Thread(target=seal_in_a_hurry)
    thread.start()
    thread.join()
    assert after == [5]


WITHOUT_CAPABILITIES = """
import errno, sys
from pathlib import Path
from streamd.daemon import hardening
from streamd.serve.node_cache import open_image
from streamd.serve.plan import Layout
from streamd.serve.sealing import is_sealed, seal
from streamd.snapshot.manifest import decode
path = Path(sys.argv[1])
data = (path / "manifest").read_bytes()
manifest = decode(data)
layout = Layout(manifest.table)
hardening.drop_capabilities()
cache = open_image(path, data, manifest.files, layout, owner="a worker")
assert is_sealed(cache, manifest.files)
content = cache.read(layout.length[0], 0)
cache.write(content, 0)
cache.confirm([0])
assert not is_sealed(cache, manifest.files)
assert cache.read(layout.length[0], 0) == content
try:
    cache.evict(0, 0, layout.length[0])
except OSError as error:
    assert error.errno == errno.ENOSPC
else:
    raise AssertionError("a hole in a file that may be open")
seal(cache, manifest.files, layout)
assert is_sealed(cache, manifest.files)
"""


def test_an_owner_without_capabilities_breaks_a_seal_only_by_what_it_writes_and_can_seal(
    snapshot: Snapshot, tmp_path: Path
) -> None:
    """As the daemon's workers are: what is sealed may not be opened for writing then."""
    cache = open_cache(
        tmp_path / "cache", snapshot.pinned.data, snapshot.layout, source="s", owner="test", max_bytes=None
    )
    fill(cache, snapshot)
    seal(cache, snapshot)
    cache.close()
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_CAPABILITIES, cache.path],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},  # they are dropped while there is one thread
    )
    assert result.returncode == 0, result.stderr
    assert modes(cache) == {SEALED_MODE}


facts = st.builds(FileFacts, *(st.integers(0, 1 << 62) for _ in range(4)))
seals = st.builds(Seal, st.text(), st.dictionaries(st.text(), facts, max_size=4))


@given(seals)
def test_a_seal_is_read_as_it_was_written(seal: Seal) -> None:
    assert sealing.decode(sealing.encode(seal)) == seal


@given(st.binary(max_size=200))
def test_anything_else_is_refused_as_such(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a seal"):
        sealing.decode(data)


@given(
    st.dictionaries(NAMES, facts.map(lambda f: replace(f, mode=SEALED_MODE)), min_size=3, max_size=3),
    NAMES,
    st.sampled_from(["size", "mode", "ctime_ns", "inode"]),
    st.integers(1, 1 << 62),
)
def test_a_seal_is_broken_by_one_fact_that_changed_and_by_nothing_else(
    files: dict[str, FileFacts], name: str, fact: str, by: int
) -> None:
    seal = Seal("boot", files)
    assert sealing.broken_by(seal, Seal("boot", dict(files))) is None
    changed = replace(files[name], **{fact: getattr(files[name], fact) + by})
    assert sealing.broken_by(seal, Seal("boot", files | {name: changed})) is not None
    assert sealing.broken_by(seal, Seal("other", files)) is not None
