"""What the tests of save share: small snapshots made by hand, and image directories."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from bench.images import make_image
from streamd.snapshot.frames import chunk_digest
from streamd.snapshot.manifest import (
    ChunkTable,
    Codec,
    GvisorInfo,
    ImageFile,
    Manifest,
    MemoryFile,
    Pack,
    PageRange,
)
from streamd.snapshot.names import IMAGE_FILES

PAGE = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Small:
    """A snapshot of four chunks of a page in two packs: `packs[i]` are pack i's bytes."""

    snapshot_id: str
    push_id: str
    packs: tuple[bytes, bytes]

    def manifest(self, packs: tuple[Pack, ...], *, created_s: float = 0.0) -> Manifest:
        """Give the manifest, with the packs as they were put."""
        chunks = [self.packs[0][:PAGE], self.packs[0][PAGE:], self.packs[1][:PAGE], self.packs[1][PAGE:]]
        table = ChunkTable(
            length=np.full(4, PAGE, np.uint32),
            codec=np.full(4, Codec.RAW, np.uint8),
            pack=np.array([0, 0, 1, 1], np.uint32),
            offset=np.array([0, PAGE, 0, PAGE], np.uint32),
            frame_bytes=np.full(4, PAGE, np.uint32),
            digest=np.frombuffer(b"".join(map(chunk_digest, chunks)), np.uint8).reshape(4, 16),
        )
        sizes = zip(IMAGE_FILES, (PAGE, PAGE, 2 * PAGE), (0, 1, 2), (1, 1, 2), strict=True)
        return Manifest(
            snapshot_id=self.snapshot_id,
            push_id=self.push_id,
            created_s=created_s,
            chunk_bytes=PAGE,
            files=tuple(ImageFile(name, size, first, count) for name, size, first, count in sizes),
            packs=packs,
            table=table,
            gvisor=GvisorInfo("v", "none", ("app",), (MemoryFile(False, (PageRange(0, 2 * PAGE, 1),)),)),
        )


@pytest.fixture(scope="session")
def small() -> Callable[[str, str], Small]:
    """Make a `Small`, whose bytes depend on its ids."""

    def make(snapshot_id: str, push_id: str) -> Small:
        seed = sum(push_id.encode())
        content = np.random.Generator(np.random.SFC64(seed)).bytes(4 * PAGE)
        return Small(snapshot_id, push_id, (content[: 2 * PAGE], content[2 * PAGE :]))

    return make


@pytest.fixture(scope="session")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image of 4 MiB in 16 blocks of all kinds; not to be written to."""
    path = tmp_path_factory.mktemp("image") / "image"
    make_image(path, 4 << 20, seed=3, private_bytes=64 * PAGE)
    (path / "gcs_opts.json").write_text("{}")  # is never pushed
    return path
