"""A snapshot in a directory and in the emulator, a proxy that misbehaves, and real mounts that are sure to go away."""

import contextlib
import dataclasses
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.emulator import Emulator
from bench.fault_proxy import FaultProxy
from bench.images import make_image
from bench.mounts import LiveMount, Mounts
from bench.slot_reader import Outcome
from streamd.save.push import PushOptions, push
from streamd.store.catalog import Pinned, open_snapshot
from streamd.store.gcs import GoogleStore
from streamd.store.opening import open_store
from streamd.store.port import Store

# More than runsc's whole window of 128 × 256 KiB that are not zero.
PAGES_BYTES = 40 << 20
CHUNK_BYTES = 64 << 10
_OPTIONS = PushOptions(chunk_bytes=CHUNK_BYTES, pack_bytes=4 << 20)
_ID = "small"


@dataclass(frozen=True, slots=True)
class Saved:
    """An image directory and where its snapshot is; `store` is the store itself, not what a proxy makes of it."""

    image: Path
    store: Store
    url: str
    directory: Path | None = None  # of a file:// store

    @property
    def pages(self) -> Path:
        """The right bytes."""
        return self.image / "pages.img"

    def pinned(self) -> Pinned:
        """Open the snapshot as it is now."""
        return open_snapshot(self.store, _ID)

    def packs(self) -> list[Path]:
        """Files of the packs, in a directory store."""
        assert self.directory is not None
        return sorted((self.directory / _ID / "packs").rglob("0*"))

    def is_whole(self, outcome: Outcome) -> bool:
        """Whether a reader got every byte of pages.img, and every byte right."""
        return outcome.is_clean and outcome.right_bytes == self.pages.stat().st_size


@pytest.fixture(scope="session")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make an image of 40 MiB, a tenth of its blocks zero."""
    directory = tmp_path_factory.mktemp("image") / "image"
    make_image(directory, PAGES_BYTES, zero=0.1)
    return directory


@pytest.fixture(scope="session")
def saved(image: Path, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Push it to a directory; not to be changed."""
    directory = tmp_path_factory.mktemp("store") / "store"
    store = open_store(f"file://{directory}")
    push(image, store, snapshot_id=_ID, push_id="p", options=_OPTIONS)
    return Saved(image, store, f"file://{directory}/{_ID}", directory)


@pytest.fixture(scope="session")
def copy_of() -> Callable[[Saved, Path], Saved]:
    """Give what copies a snapshot's store into another directory, for a test that damages it."""

    def copy(saved: Saved, place: Path) -> Saved:
        assert saved.directory is not None
        directory = place / "store"
        shutil.copytree(saved.directory, directory)
        store = open_store(f"file://{directory}")
        return dataclasses.replace(saved, store=store, url=f"file://{directory}/{_ID}", directory=directory)

    return copy


@pytest.fixture
def copied(saved: Saved, copy_of: Callable[[Saved, Path], Saved], tmp_path: Path) -> Saved:
    """Copy the store, for a test that damages it."""
    return copy_of(saved, tmp_path)


@pytest.fixture(scope="session")
def emulator() -> Iterator[Emulator]:
    """Start a Google Cloud Storage of our own."""
    with Emulator() as running:
        yield running


@pytest.fixture(scope="session")
def push_to_emulator(image: Path, emulator: Emulator) -> Iterator[Callable[[str], Saved]]:
    """Give what pushes the image under a prefix of the emulator's bucket."""
    with contextlib.ExitStack() as stores:

        def pushed(prefix: str) -> Saved:
            store = GoogleStore(emulator.bucket, prefix, emulator_host=emulator.address)
            stores.callback(store.close)
            push(image, store, snapshot_id=_ID, push_id="p", options=_OPTIONS)
            return Saved(image, store, f"gs://{emulator.bucket}/{prefix}/{_ID}")

        yield pushed


@pytest.fixture(scope="session")
def uploaded(push_to_emulator: Callable[[str], Saved]) -> Saved:
    """Push it to the emulator; not to be changed."""
    return push_to_emulator("shared")


@pytest.fixture
def proxy(emulator: Emulator) -> Iterator[FaultProxy]:
    """Start a proxy before the emulator, without rules."""
    with FaultProxy(emulator.port) as running:
        yield running


@pytest.fixture
def mounts() -> Iterator[Mounts]:
    """Give what starts mounts."""
    with Mounts() as starting:
        yield starting


@pytest.fixture
def through(proxy: FaultProxy) -> dict[str, str]:
    """The environment of a process that asks the emulator through the proxy."""
    return {"STORAGE_EMULATOR_HOST": proxy.address}


@pytest.fixture
def calm() -> Callable[[LiveMount], None]:
    """Give the check that a mount logged no exception and no text of an interpreter."""

    def check(mount: LiveMount) -> None:
        assert mount.complaints() == []

    return check
