"""What stress tests share, and how long they take: a sample by default, `STREAMD_STRESS=full` (make stress) for all.

What makes no sense in short is left out of a sample: no test is skipped.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.emulator import Emulator
from bench.fault_proxy import FaultProxy
from bench.images import make_image
from bench.mounts import Mounts
from streamd.save.push import PushOptions, push
from streamd.store.gcs import GoogleStore
from streamd.store.opening import open_store

FULL = os.environ.get("STREAMD_STRESS") == "full"

collect_ignore = [] if FULL else ["test_long.py"]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One snapshot in a directory and in the emulator, and the right bytes of its pages.img."""

    pages: Path
    file_url: str
    gs_url: str


@pytest.fixture(scope="session")
def is_full() -> bool:
    """Whether there is time."""
    return FULL


@pytest.fixture(scope="session")
def emulator() -> Iterator[Emulator]:
    """Start a Google Cloud Storage of our own."""
    with Emulator() as running:
        yield running


@pytest.fixture(scope="session")
def snapshot(emulator: Emulator, tmp_path_factory: pytest.TempPathFactory) -> Snapshot:
    """Push 40 MiB, a tenth of them zero, in chunks of 64 KiB."""
    place = tmp_path_factory.mktemp("stress")
    make_image(place / "image", 40 << 20, zero=0.1)
    stores = (
        open_store(f"file://{place}/store"),
        GoogleStore(emulator.bucket, "stress", emulator_host=emulator.address),
    )
    for store in stores:
        options = PushOptions(chunk_bytes=64 << 10, pack_bytes=4 << 20)
        push(place / "image", store, snapshot_id="small", push_id="p", options=options)
        store.close()
    return Snapshot(place / "image" / "pages.img", f"{stores[0].url}/small", f"{stores[1].url}/small")


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
