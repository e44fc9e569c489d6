"""Synthetic image directories: valid to `check_image_dir`, of any size, with every byte a function of its offset.

`pages.img` is a row of 256 KiB blocks, each one zero, compressible or random as a hash of (seed, block) says; so the
right value of any byte is known without keeping the image (`expected`). Compressible blocks look like a heap full of
pointers: 8-byte words that differ in 20 bits, which zstd -1 shrinks to about two fifths. `checkpoint.img` has a real
head and noise for the object graph. `pages_meta.img` is what gVisor writes (pkg/sentry/pgalloc/pgalloc.proto and
pkg/state/wire), with holes between committed ranges, and a private memory file when `private_bytes` asks for one.
"""

import json
import os
import struct
from pathlib import Path

import numpy as np

from streamd.snapshot.manifest import ChunkTable, Codec, GvisorInfo, ImageFile, Manifest, MemoryFile, PageRange

PAGE = 4096
BLOCK = 256 * 1024

RUNSC_VERSION = "release-20260905.0"
CONTAINER_NAMES = ("app",)
_GRAPH_BYTES = 200_000


def make_image(
    path: Path,
    pages_bytes: int,
    *,
    seed: int = 0,
    zero: float = 0.2,
    compressible: float = 0.4,
    private_bytes: int = 0,
) -> None:
    """Write an image directory at `path`, which is made if it is missing.

    `pages_bytes` is the size of pages.img, `private_bytes` the last part of it that belongs to a private memory file;
    both are multiples of 4096. `zero` and `compressible` are shares of its blocks, the rest is random.
    """
    if pages_bytes % PAGE or private_bytes % PAGE or not 0 <= private_bytes < pages_bytes:
        raise ValueError(f"sizes must be whole pages, private less than all: {pages_bytes=} {private_bytes=}")
    path.mkdir(parents=True, exist_ok=True)
    (path / "checkpoint.img").write_bytes(checkpoint_img(seed=seed))
    (path / "pages_meta.img").write_bytes(pages_meta_img(pages_bytes - private_bytes, private_bytes))
    with (path / "pages.img").open("wb") as file:
        for offset in range(0, pages_bytes, BLOCK):
            length = min(BLOCK, pages_bytes - offset)
            block = _block(offset // BLOCK, seed=seed, zero=zero, compressible=compressible)
            if block is None:
                file.seek(length, os.SEEK_CUR)
            else:
                file.write(block[:length])
        file.truncate(pages_bytes)


def zeros_manifest(snapshot_id: str, chunks: int, *, pages: int = 1) -> Manifest:
    """Give a manifest of zero chunks, each of so many pages: stored it is some KB, however many they are."""
    chunk_bytes = pages * PAGE
    column = np.zeros(chunks, np.uint32)
    memory = (PageRange(0, (chunks - 2) * chunk_bytes, 0),)
    return Manifest(
        snapshot_id=snapshot_id,
        push_id="p",
        created_s=1764500000.0,
        chunk_bytes=chunk_bytes,
        files=(
            ImageFile("checkpoint.img", chunk_bytes, 0, 1),
            ImageFile("pages_meta.img", chunk_bytes, 1, 1),
            ImageFile("pages.img", (chunks - 2) * chunk_bytes, 2, chunks - 2),
        ),
        packs=(),
        table=ChunkTable(
            length=np.full(chunks, chunk_bytes, np.uint32),
            codec=np.full(chunks, Codec.ZERO, np.uint8),
            pack=column,
            offset=column,
            frame_bytes=column,
            digest=np.zeros((chunks, 16), np.uint8),
        ),
        gvisor=GvisorInfo(RUNSC_VERSION, "none", CONTAINER_NAMES, (MemoryFile(False, memory),)),
    )


def expected(offset: int, length: int, *, seed: int = 0, zero: float = 0.2, compressible: float = 0.4) -> bytes:
    """Give bytes [offset, offset + length) of pages.img of an image made with these arguments."""
    parts = []
    end = offset + length
    while offset < end:
        index, within = divmod(offset, BLOCK)
        take = min(BLOCK - within, end - offset)
        block = _block(index, seed=seed, zero=zero, compressible=compressible)
        parts.append(bytes(take) if block is None else block[within : within + take])
        offset += take
    return b"".join(parts)


def checkpoint_img(
    *, seed: int = 0, compression: str = "none", container_names: tuple[str, ...] = CONTAINER_NAMES
) -> bytes:
    """Give a checkpoint.img: magic, big-endian length, JSON head (pkg/state/statefile/statefile.go), then noise."""
    specs = {name: {"ociVersion": "1.1.0", "process": {"env": ["SECRET=hunter2"]}} for name in container_names}
    head = {
        "compression": compression,
        "container_count": str(len(container_names)),
        "container_specs": json.dumps(specs),
        "network": "none",
        "runsc_version": RUNSC_VERSION,
        "timestamp": "2026-09-05 02:01:02.000000003 +0000 UTC m=+1.5",
    }
    text = json.dumps(head).encode()
    graph = np.random.Generator(np.random.SFC64([seed, 7])).integers(0, 64, _GRAPH_BYTES, dtype=np.uint8).tobytes()
    return b"gVisorSF" + struct.pack(">Q", len(text)) + text + graph


def pages_meta_img(main_bytes: int, private_bytes: int = 0) -> bytes:
    """Give a pages_meta.img whose committed ranges sum to `main_bytes` and, if not zero, `private_bytes`."""
    main = _memory_file(main_bytes)
    if not private_bytes:
        return main + _owners("")
    return main + _owners("app") + _memory_file(private_bytes)


def _block(index: int, *, seed: int, zero: float, compressible: float) -> bytes | None:
    """Give one block of pages.img, None when it is zero."""
    random = np.random.Generator(np.random.SFC64([seed, index]))
    kind = random.random()
    if kind < zero:
        return None
    if kind < zero + compressible:
        words = random.integers(0, 1 << 20, BLOCK // 8, dtype=np.uint32).astype("<u8")
        words <<= np.uint64(4)
        words += np.uint64(0x7F0000000000 + (index << 24))
        return words.tobytes()
    return random.bytes(BLOCK)


def _memory_file(committed_bytes: int) -> bytes:
    """Encode one memory file: a little-endian length and a MemoryFileMetadataProto, version 1.

    Three System pages, a hole, then Anonymous ranges of 1 MiB and more with holes that aren't committed between them.
    """
    ranges: list[tuple[int, int, int, bool]] = []
    position, left = 0, committed_bytes
    sizes = [3 * PAGE, 1 << 20, 16 << 20, 256 << 20]
    while left:
        take = min(left, sizes[min(len(ranges), 3)])
        ranges.append((position, position + take, 0 if not ranges else 1, True))
        ranges.append((position + take, position + take + 2 * PAGE, 1, False))
        position += take + 4 * PAGE  # two pages not committed, two not even allocated
        left -= take
    body = b"\x08\x01"  # version = 1
    chunk_count = -(-position // (1 << 30))
    body += b"".join(_field(2, b"") for _ in range(chunk_count))
    for start, end, kind, committed in ranges:
        body += _field(
            3,
            (b"\x08" + _varint(start) if start else b"")
            + (b"\x10" + _varint(end))
            + (b"\x18" + _varint(kind) if kind else b"")
            + (b"\x20" + _varint(6))
            + (b"\x28\x01" if committed else b""),
        )
    return struct.pack("<Q", len(body)) + body


def _owners(container_name: str) -> bytes:
    """Encode kernel.privateMemoryFileMetadata as gVisor's state package does, with one owner or, for "", none."""
    out = _varint((1 << 63) | (2 if container_name else 1))  # objects that follow
    out += _type("pkg/sentry/kernel.privateMemoryFileMetadata", "owners")
    if not container_name:
        return out + b"\x02\x01" + b"\x0b\x01" + b"\x05"  # object 1: struct of type 1, its field nil
    out += _type("pkg/sentry/checkpoint.ResourceID", "ContainerName", "Path")
    out += b"\x02\x01" + b"\x0b\x01" + b"\x08\x01\x01\x02\x00"  # object 1: a slice of length 1, capacity 1 at object 2
    out += b"\x02\x02" + b"\x09\x01"  # object 2: an array of one
    return out + b"\x0b\x02" + b"\x0d\x02" + b"\x07" + _string(container_name) + b"\x07" + _string("/")


def _type(name: str, *fields: str) -> bytes:
    return b"\x11" + _string(name) + _varint(len(fields)) + b"".join(map(_string, fields))


def _string(text: str) -> bytes:
    return _varint(len(text)) + text.encode()


def _field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
