"""A small real snapshot in a directory store, with a wrapper that can fail its calls."""

from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from bench.faults import FaultyStore
from bench.images import make_image
from streamd.config import Config, FetchConfig, PolicyConfig, Prefetch
from streamd.save.push import PushOptions, push
from streamd.serve.cache_directory import open_cache
from streamd.serve.image import ServedImage
from streamd.serve.node_cache import NodeCache
from streamd.serve.plan import Layout
from streamd.store.catalog import Pinned, open_snapshot
from streamd.store.opening import open_store
from streamd.store.port import Store

CHUNK = 16 << 10
PAGES_BYTES = 4 << 20


class Saved:
    """One snapshot of synthetic pages, and what is in it. (No dataclass: Hypothesis would print its megabytes.)"""

    def __init__(self, store: Store, pinned: Pinned, content: bytes) -> None:
        self.store = store
        self.pinned = pinned
        self.content = content

    def __repr__(self) -> str:
        return "Saved()"

    def serve(
        self,
        store: Store | None = None,
        *,
        cache: NodeCache | None = None,
        ahead: bool = False,
        memory_max_bytes: int = 8 << 20,
        fetch: FetchConfig | None = None,
        inline: bool = True,
    ) -> ServedImage:
        """An image that serves it; `inline`: blocking calls run in place, so that virtual time knows of them."""
        return ServedImage(
            store or self.store,
            self.pinned,
            Config(
                fetch=fetch or FetchConfig(get_bytes=256 << 10),
                policy=PolicyConfig(hold_s=60, credentials_wait_s=300),
                memory_max_bytes=memory_max_bytes,
            ),
            cache=cache,
            prefetch=Prefetch.ALL if ahead else Prefetch.NONE,
            run_blocking=run_inline if inline else trio.to_thread.run_sync,
        )

    def faulty(self) -> FaultyStore:
        """The store, ready to be told how to fail."""
        return FaultyStore(self.store)


async def run_inline(
    call: Callable[..., object], *args: object, abandon_on_cancel: bool, limiter: trio.CapacityLimiter
) -> object:
    """Make a blocking call in place, under the limiter that a thread would be under.

    Like a thread's, its result comes after all that it told Trio by `run_sync_soon`.
    """
    async with limiter:
        await trio.lowlevel.checkpoint()
        told = trio.Event()
        try:
            return call(*args)
        finally:
            trio.lowlevel.current_trio_token().run_sync_soon(told.set)
            await told.wait()


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """4 MiB of pages in 16 KiB chunks: 256 chunks in packs of 256 KiB."""
    place: Path = tmp_path_factory.mktemp("saved")
    make_image(place / "image", PAGES_BYTES, zero=0.2, compressible=0.3)
    store = open_store(f"file://{place}/store")
    options = PushOptions(chunk_bytes=CHUNK, pack_bytes=256 << 10)
    push(place / "image", store, snapshot_id="small", push_id="p", options=options)
    return Saved(store, open_snapshot(store, "small"), (place / "image" / "pages.img").read_bytes())


@pytest.fixture
def make_cache(saved: Saved, tmp_path: Path) -> Callable[..., NodeCache]:
    """Opens the snapshot's directory in a cache of the test's own."""

    def make(max_bytes: int | None = None) -> NodeCache:
        manifest = saved.pinned.data
        layout = Layout(saved.pinned.manifest.table)
        return open_cache(tmp_path / "cache", manifest, layout, source="s", owner="test", max_bytes=max_bytes)

    return make
