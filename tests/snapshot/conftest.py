"""What the tests of snapshots share: a manifest written by hand, and a second, independent writer of format 1."""

import hashlib
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from numpy.typing import NDArray

from streamd.snapshot.manifest import (
    ChunkTable,
    GvisorInfo,
    ImageFile,
    Manifest,
    MemoryFile,
    Pack,
    PageRange,
)

COLUMNS = {  # as the format has them, in their order
    "range_start": "<u8",
    "range_end": "<u8",
    "length": "<u4",
    "pack": "<u4",
    "offset": "<u4",
    "frame_bytes": "<u4",
    "codec": "u1",
    "range_kind": "u1",
    "digest": "(16,)u1",
}


@dataclass
class Parts:
    """A manifest taken apart: change any part, then `sealed()` gives it a matching SHA-256."""

    head: dict[str, Any]
    columns: dict[str, NDArray[Any]]
    magic: bytes = b"PODSNAPM"
    version: int = 1
    head_bytes: bytes | None = None  # instead of `head`
    body: bytes | None = None  # instead of `columns`, compressed
    raw_bytes: int | None = None  # what the manifest claims of the body
    after: bytes = b""
    sizes: tuple[int, int, int] | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def sealed(self) -> bytes:
        """Write it, whatever it says."""
        head = self.head_bytes if self.head_bytes is not None else json.dumps(self.head).encode()
        raw = b"".join(np.ascontiguousarray(self.columns[name]).tobytes() for name in COLUMNS)
        body = self.body if self.body is not None else zstandard.ZstdCompressor().compress(raw)
        raw_bytes = self.raw_bytes if self.raw_bytes is not None else len(raw)
        sizes = self.sizes or (len(head), len(body), raw_bytes)
        data = struct.pack("<8sIIII", self.magic, self.version, *sizes) + head + body + self.after
        return data + hashlib.sha256(data).digest()


def take_apart_manifest(data: bytes) -> Parts:
    """Read format 1 as its description says, without any check."""
    magic, version, head_len, body_len, raw_len = struct.unpack_from("<8sIIII", data)
    head = json.loads(data[24 : 24 + head_len])
    raw = zstandard.ZstdDecompressor().decompress(data[24 + head_len : 24 + head_len + body_len])
    assert len(raw) == raw_len
    chunks = sum(file["chunk_count"] for file in head["files"])
    ranges = sum(file["range_count"] for file in head["gvisor"]["memory_files"])
    columns = {}
    at = 0
    for name, dtype in COLUMNS.items():
        count = ranges if name.startswith("range_") else chunks
        columns[name] = np.frombuffer(raw, dtype, count=count, offset=at).copy()
        at += columns[name].nbytes
    assert at == raw_len
    return Parts(head=head, columns=columns, magic=magic, version=version)


def manifest_values(manifest: Manifest) -> dict[str, object]:
    """Give everything in a manifest as values that can be compared."""
    gvisor = manifest.gvisor
    return {
        "id": manifest.snapshot_id,
        "push_id": manifest.push_id,
        "created_s": manifest.created_s,
        "chunk_bytes": manifest.chunk_bytes,
        "files": manifest.files,
        "packs": manifest.packs,
        "table": {
            name: getattr(manifest.table, name).tolist()
            for name in ("length", "codec", "pack", "offset", "frame_bytes", "digest", "start")
        },
        "gvisor": (gvisor.runsc_version, gvisor.network, gvisor.container_names, gvisor.runsc_sha256),
        "cpu_features": gvisor.cpu_features,
        "memory_files": [(file.private, list(file.ranges)) for file in gvisor.memory_files],
        "metadata": dict(manifest.metadata),
        "features": (manifest.requires, manifest.optional),
    }


def small_manifest() -> Manifest:
    """Give a manifest of eight chunks that has one of everything; it is the golden one, so it never changes."""
    digests = np.arange(8 * 16, dtype=np.uint8).reshape(8, 16)
    digests[[2, 6]] = 0
    table = ChunkTable(
        length=np.array([8192, 1000, 8192, 8192, 4096, 8192, 8192, 4096], np.uint32),
        codec=np.array([2, 1, 0, 2, 1, 2, 0, 2], np.uint8),
        pack=np.array([0, 0, 0, 0, 1, 1, 0, 1], np.uint32),
        offset=np.array([0, 300, 0, 1300, 0, 5000, 0, 4096], np.uint32),
        frame_bytes=np.array([300, 1000, 0, 8192, 4096, 50, 0, 904], np.uint32),
        digest=digests,
    )
    return Manifest(
        snapshot_id="golden-1",
        push_id="push-1",
        created_s=1764500000.25,
        chunk_bytes=8192,
        files=(
            ImageFile("checkpoint.img", 9192, 0, 2),
            ImageFile("pages_meta.img", 8192, 2, 1),
            ImageFile("pages.img", 32768, 3, 5),
        ),
        packs=(Pack(9492, 0xE3069283, bytes(range(32))), Pack(6000, 0, bytes(32))),
        table=table,
        gvisor=GvisorInfo(
            runsc_version="release-20260901.0",
            network="none",
            container_names=("server", "sidecar-ü"),
            memory_files=(
                MemoryFile(
                    False, (PageRange(0, 12288, 0), PageRange(16384, 20480, 1), PageRange(2**40, 2**40 + 4096, 5))
                ),
                MemoryFile(True, (PageRange(8192, 16384, 3),)),
                MemoryFile(True, (PageRange(0, 4096, 3),)),
            ),
            runsc_sha256="ab" * 32,
            cpu_features=("fpu", "avx512f"),
        ),
        metadata={"git": "0123abcd", "note": "two\nlines"},
        optional=("hints",),
    )


@pytest.fixture(scope="session")
def take_apart() -> Callable[[bytes], Parts]:
    """Give the independent reader of format 1."""
    return take_apart_manifest


@pytest.fixture(scope="session")
def values_of() -> Callable[[Manifest], dict[str, object]]:
    """Give the function that makes manifests comparable."""
    return manifest_values


@pytest.fixture(scope="session")
def example() -> Manifest:
    """Give the manifest that is in golden/."""
    return small_manifest()


@pytest.fixture(scope="session")
def here() -> Path:
    """Give the directory of these tests."""
    return Path(__file__).parent
