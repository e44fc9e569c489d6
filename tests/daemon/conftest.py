"""Snapshots in a directory and in the emulator, and real daemons that are sure to go away."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.daemons import Daemon
from bench.emulator import Emulator
from bench.fault_proxy import FaultProxy
from bench.images import make_image
from bench.slot_reader import Outcome
from streamd.save.push import PushOptions, push
from streamd.snapshot.chunks import Codec
from streamd.snapshot.model import Manifest
from streamd.snapshot.names import PAGES
from streamd.store.catalog import open_snapshot
from streamd.store.gcs import GoogleStore
from streamd.store.opening import open_store
from streamd.store.port import Store

# More than runsc's whole window of 128 × 256 KiB.
PAGES_BYTES = 40 << 20
CHUNK_BYTES = 64 << 10
_OPTIONS = PushOptions(chunk_bytes=CHUNK_BYTES, pack_bytes=4 << 20)


@dataclass(frozen=True, slots=True)
class Saved:
    """A snapshot: where it is, the right bytes of its pages.img, and what is in its table."""

    pages: Path
    url: str
    manifest: Manifest

    @property
    def stored_bytes(self) -> int:
        """What a node has to fetch of it."""
        return int(self.manifest.table.frame_bytes.sum())

    def slow(self, mb_per_s: int) -> str:
        """Give its address at the end of a link of that speed; in a directory only."""
        return f"{self.url}?rate={mb_per_s}MB/s"

    def resident_bytes(self, end: int) -> int:
        """Give what the daemon says is on the node once pages.img was read up to `end`, and nothing else of it was."""
        codecs = self.manifest.table.codec
        wanted: set[int] = set()
        for file in self.manifest.files:
            count = end // CHUNK_BYTES if file.name == PAGES else file.chunk_count
            wanted.update(range(file.first_chunk, file.first_chunk + count))
        here = sum(index in wanted or codec == Codec.ZERO for index, codec in enumerate(codecs))
        return int(here / len(codecs) * sum(file.size for file in self.manifest.files))

    def is_whole(self, outcome: Outcome) -> bool:
        """Whether a reader got every byte of pages.img, and every byte right."""
        return outcome.is_clean and outcome.right_bytes == self.pages.stat().st_size


def _save(image: Path, store: Store, snapshot_id: str) -> Saved:
    push(image, store, snapshot_id=snapshot_id, push_id="p", options=_OPTIONS)
    return Saved(image / PAGES, f"{store.url}/{snapshot_id}", open_snapshot(store, snapshot_id).manifest)


@pytest.fixture(scope="session")
def save() -> Callable[[Path, Path, str], Saved]:
    """Give what pushes an image to a directory, by a name."""
    return lambda image, store, snapshot_id: _save(image, open_store(f"file://{store}"), snapshot_id)


@pytest.fixture(scope="session")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make an image of 40 MiB, a tenth of its blocks zero."""
    directory = tmp_path_factory.mktemp("image") / "image"
    make_image(directory, PAGES_BYTES, zero=0.1)
    return directory


@pytest.fixture(scope="session")
def saved(image: Path, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Push it to a directory; not to be changed."""
    return _save(image, open_store(f"file://{tmp_path_factory.mktemp('store')}"), "small")


@pytest.fixture(scope="session")
def sixteen(tmp_path_factory: pytest.TempPathFactory) -> list[Saved]:
    """Push sixteen images of 4 MiB, no two alike."""
    place = tmp_path_factory.mktemp("sixteen")
    store = open_store(f"file://{place}/store")
    found = []
    for number in range(16):
        make_image(place / f"image-{number}", 4 << 20, seed=number + 1, zero=0.1)
        found.append(_save(place / f"image-{number}", store, f"small-{number}"))
    return found


@pytest.fixture(scope="session")
def emulator() -> Iterator[Emulator]:
    """Start a Google Cloud Storage of our own."""
    with Emulator() as running:
        yield running


@pytest.fixture(scope="session")
def uploaded(image: Path, emulator: Emulator) -> Iterator[Saved]:
    """Push it to the emulator; not to be changed."""
    store = GoogleStore(emulator.bucket, "shared", emulator_host=emulator.address)
    with contextlib.closing(store):
        yield _save(image, store, "small")


@pytest.fixture
def proxy(emulator: Emulator) -> Iterator[FaultProxy]:
    """Start a proxy before the emulator, without rules."""
    with FaultProxy(emulator.port) as running:
        yield running


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """Start a daemon with a cache."""
    with Daemon() as running:
        yield running


@pytest.fixture
def hasty() -> Iterator[Daemon]:
    """Start a daemon that unmounts at once what nobody uses."""
    with Daemon('[daemon]\ngrace_s = "200ms"') as running:
        yield running


@pytest.fixture
def behind_proxy(proxy: FaultProxy) -> Iterator[Daemon]:
    """Start a daemon with a cache that asks the emulator through the proxy."""
    with Daemon(env={"STORAGE_EMULATOR_HOST": proxy.address}) as running:
        yield running


@pytest.fixture
def calm() -> Callable[[Daemon], None]:
    """Give the check that no process of a daemon logged an exception, or text of an interpreter."""

    def check(daemon: Daemon) -> None:
        assert daemon.complaints() == []

    return check
