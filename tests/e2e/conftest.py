"""Real sandboxes, real mounts, real stores. Checkpoints and pushes are made once and restored many times.

Whatever a test does or dies of, its mounts, sandboxes and processes are gone after it: first the mount (a sandbox that
waits for it can't be killed), then the sandboxes, then the processes.
"""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from agent.runtime.runsc import Runsc
from bench.commands import Streamd
from bench.emulator import Emulator
from bench.pods import Image, Shape, checkpoint, runsc_below
from bench.server import Heap

# Small, since laziness is shown elsewhere, but many times runsc's 128 reads of 256 KiB: 96 MiB, three quarters of it
# not zero.
_BLOCKS = 96


def _shape(containers: int, rootfs: str, blocks: int) -> Shape:
    heaps = tuple(Heap(seed, blocks // containers) for seed in range(1, containers + 1))
    return Shape(heaps, readonly=rootfs == "ro")


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Image]:
    """Give the image of a pod of so many containers with a root of this kind (`ro`, `rw`) and so many MiB of heap."""
    made: dict[tuple[int, str, int], Image] = {}

    def image(containers: int, rootfs: str, blocks: int = _BLOCKS) -> Image:
        key = (containers, rootfs, blocks)
        if key not in made:
            directory = tmp_path_factory.mktemp(f"image-{containers}-{rootfs}-{blocks}")
            runsc = runsc_below(directory)
            try:
                made[key] = checkpoint(runsc, directory, _shape(containers, rootfs, blocks))
            finally:
                runsc.remove_root()
        return made[key]

    return image


@dataclass(slots=True)
class Stores:
    """The stores of this session: `urls` and the environment that reaches them."""

    urls: dict[str, str]
    env: dict[str, str]
    pushed: set[str] = field(default_factory=set)


@pytest.fixture(scope="session")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stores]:
    """Give a `file` and a `gs` store, the latter a real emulator."""
    with Emulator() as emulator:
        urls = {"file": f"file://{tmp_path_factory.mktemp('store')}", "gs": f"gs://{emulator.bucket}/snapshots"}
        yield Stores(urls, {"STORAGE_EMULATOR_HOST": emulator.address})


@pytest.fixture
def runsc(tmp_path: Path) -> Iterator[Runsc]:
    """Give a runsc with a root of its own."""
    runsc = runsc_below(tmp_path)
    yield runsc
    runsc.remove_root()


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Give a directory whose name is short: Unix sockets in it must have names of at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="e2e-", dir="/var/tmp") as directory:
        yield Path(directory)


@pytest.fixture
def streamd(short_path: Path, stores: Stores, runsc: Runsc) -> Iterator[Streamd]:
    """Give the command; it depends on `runsc` so that its mounts go before the sandboxes."""
    streamd = Streamd(short_path, stores.env)
    yield streamd
    streamd.stop_strays()


Push = Callable[[Image, str], str]
Mount = Callable[[str], Path]


@pytest.fixture
def push(streamd: Streamd, stores: Stores) -> Push:
    """Give the URL of an image's snapshot in a store (`file`, `gs`), pushing it when that was not done yet."""

    def url(image: Image, store: str) -> str:
        blocks = sum(heap.blocks for heap in image.shape.heaps)
        snapshot_id = f"pod-{len(image.shape.heaps)}-{'ro' if image.shape.readonly else 'rw'}-{blocks}"
        url = f"{stores.urls[store]}/{snapshot_id}"
        if url not in stores.pushed:
            streamd.run("push", str(image.directory), stores.urls[store], "--id", snapshot_id)
            stores.pushed.add(url)
        return url

    return url


@pytest.fixture
def mount(streamd: Streamd, tmp_path: Path) -> Iterator[Mount]:
    """Mount a snapshot at a new directory; taken away by force in the end."""
    with contextlib.ExitStack() as stack:

        def mounted(url: str) -> Path:
            mountpoint = tmp_path / "mnt"
            mountpoint.mkdir()
            stack.callback(streamd.unmount, mountpoint, force=True)
            streamd.run("mount", url, str(mountpoint))
            return mountpoint

        yield mounted
