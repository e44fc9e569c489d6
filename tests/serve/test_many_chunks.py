"""An image of a million chunks of a page: what serving it takes of memory beside its table."""

import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.images import zeros_manifest
from streamd.config import Config, Prefetch
from streamd.serve.image import ServedImage
from streamd.serve.scheduler import HOT_CHUNKS_MAX
from streamd.snapshot.manifest import Codec, Pack
from streamd.store.catalog import Pinned
from streamd.store.directory import DirectoryStore
from streamd.store.port import ObjectInfo

CHUNKS = 1_000_000
PAGE = 4096


@pytest.fixture(scope="module")
def pinned() -> Pinned:
    """Give a snapshot of chunks that all have a frame, of a byte each."""
    manifest = zeros_manifest("zeros", CHUNKS)
    column = np.arange(CHUNKS, dtype=np.uint32)
    codec = np.full(CHUNKS, Codec.ZSTD, np.uint8)
    table = replace(manifest.table, codec=codec, offset=column, frame_bytes=np.ones(CHUNKS, np.uint32))
    pack = ObjectInfo("zeros/packs/p/00000000", CHUNKS, "1", None, 0.0)
    manifest = replace(manifest, table=table, packs=(Pack(CHUNKS, 0, bytes(32)),))
    return Pinned(manifest, b"", bytes(32), ObjectInfo("zeros/manifest", 1, "1", None, 0.0), (pack,))


@pytest.fixture
def traced() -> Iterator[None]:
    """Count the memory that is allocated from here on."""
    tracemalloc.start()
    yield
    tracemalloc.stop()


def serve(pinned: Pinned, tmp_path: Path) -> ServedImage:
    return ServedImage(DirectoryStore(str(tmp_path)), pinned, Config(), cache=None, prefetch=Prefetch.ALL)


@pytest.mark.usefixtures("traced")
def test_a_chunk_that_nobody_wants_takes_three_bytes(pinned: Pinned, tmp_path: Path) -> None:
    image = serve(pinned, tmp_path)
    assert tracemalloc.get_traced_memory()[0] < 3 * CHUNKS + (1 << 20)
    assert not image.is_whole


@pytest.mark.usefixtures("traced")
def test_a_learned_order_of_small_chunks_is_wanted_as_far_as_memory_for_it_goes(pinned: Pinned, tmp_path: Path) -> None:
    image = serve(pinned, tmp_path)
    before_bytes = tracemalloc.get_traced_memory()[0]
    image.want_hot([(start * PAGE, (start + 1000) * PAGE) for start in range(0, CHUNKS - 2000, 2000)])
    assert tracemalloc.get_traced_memory()[0] - before_bytes < 1000 * HOT_CHUNKS_MAX
    assert len(image._scheduler._flights) == HOT_CHUNKS_MAX
