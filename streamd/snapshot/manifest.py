"""The manifest: what a snapshot holds and where every chunk of it lies (stored format 1).

In an envelope (`envelope.py`; magic `PODSNAPM`) lie

    u32 LE bytes of the head | u32 bytes of the body | u32 bytes of the body, decompressed | head | body

The head is JSON (`head.py`). The body is one zstd frame of little-endian columns, one after another (`_COLUMNS`): the
chunk table and the page ranges of the memory files. The counts of rows are in the head.

`encode` and `decode` check the same rules (`_check`), so what was written can be read. No memory is used because a
number claims it: counts have limits, and the body is decompressed piece by piece, up to the size that the counts give.
A few KB can honestly say that much, though: zero chunks, or ranges that repeat. So a reader who shares its memory with
others says how much the tables may take (`tables_bytes`), and is refused before they are made.
"""

import struct
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from streamd.errors import Damaged, Refused
from streamd.snapshot import Buffer, envelope
from streamd.snapshot.chunks import MAX_CHUNKS, ChunkTable, Codec, check_chunks
from streamd.snapshot.head import MAX_HEAD_BYTES, MAX_PAGE_RANGES, read_head, write_head
from streamd.snapshot.memory import MemoryFile, PageRange, PageRanges, check_memory_files
from streamd.snapshot.model import GvisorInfo, ImageFile, Manifest, Pack
from streamd.snapshot.tombstone import MAGIC as TOMBSTONE_MAGIC
from streamd.snapshot.tombstone import Tombstone, decode_tombstone, encode_tombstone

__all__ = [
    "FORMAT_VERSION",
    "MAX_MANIFEST_BYTES",
    "ChunkTable",
    "Codec",
    "GvisorInfo",
    "ImageFile",
    "Manifest",
    "MemoryFile",
    "Pack",
    "PageRange",
    "PageRanges",
    "TablesTooLarge",
    "Tombstone",
    "decode",
    "decode_tombstone",
    "encode",
    "encode_tombstone",
    "manifest_digest",
    "tables_bytes",
]

FORMAT_VERSION = 1
MAGIC = b"PODSNAPM"
_MAX_BODY_BYTES = MAX_CHUNKS * (4 * 4 + 1 + 16) + MAX_PAGE_RANGES * (8 + 8 + 1)
_SIZES = struct.Struct("<III")

# More than this is no manifest and needs not be read (zstd makes what it can't shrink longer by 1/256 at most).
MAX_MANIFEST_BYTES = MAX_HEAD_BYTES + _MAX_BODY_BYTES + _MAX_BODY_BYTES // 128 + 4096


class TablesTooLarge(Refused):
    """A manifest's tables take more memory than its reader has for them."""

    def __init__(self, chunks: int, ranges: int, *, needed_bytes: int, max_bytes: int) -> None:
        super().__init__(
            f"manifest: {chunks} chunks and {ranges} page ranges take {needed_bytes / 1e6:.0f} MB of memory, and there "
            f"are {max(0, max_bytes) / 1e6:.0f} MB for them"
        )
        self.needed_bytes = needed_bytes
        self.max_bytes = max_bytes


def manifest_digest(data: Buffer) -> bytes:
    """Give the snapshot's digest (32 bytes): the SHA-256 with which an undamaged manifest ends."""
    return envelope.sealed_digest(data)


def encode(manifest: Manifest) -> bytes:
    """Write a manifest. The same manifest gives the same bytes with the same version of zstd.

    Raises: `Damaged` or `Refused`, as `decode` would of the result.
    """
    head = write_head(manifest)
    read_head(head)  # its rules first (texts, ranges of numbers, limits): then the columns' own rules can rely on them
    columns = {name: getattr(manifest.table, name) for name in _CHUNK_COLUMNS}
    _check_types(columns)
    _check(manifest)
    ranges = [PageRanges.of(file.ranges) for file in manifest.gvisor.memory_files]
    columns |= {name: np.concatenate([getattr(r, column) for r in ranges]) for name, column in _RANGE_COLUMNS.items()}
    _check_types(columns)
    raw = b"".join(columns[name].tobytes() for name in _COLUMNS)
    body = zstandard.ZstdCompressor(level=3).compress(raw)
    return envelope.seal(MAGIC, FORMAT_VERSION, (_SIZES.pack(len(head), len(body), len(raw)), head, body))


def _check_types(columns: Mapping[str, NDArray[Any]]) -> None:
    for name, column in columns.items():
        dtype, _ = _COLUMNS[name]
        if column.dtype != np.dtype(dtype).base:
            raise ValueError(f"column {name} has type {column.dtype}")  # a conversion might lose bits


def tables_bytes(*, chunks: int, ranges: int) -> int:
    """Give the memory that a manifest's tables take, decoded."""
    # Beside the columns, where each chunk starts. While they are checked it may be half as much again.
    return _body_bytes(chunks=chunks, ranges=ranges) + 8 * chunks


def decode(data: Buffer, *, tables_max_bytes: int | None = None) -> Manifest:
    """Read a manifest and check everything in it that can be checked without the packs.

    Raises: `Damaged`, which names the field: it isn't as it was written, or its numbers do not add up. `Refused`: its
        version, or a feature that it requires, is unknown here; it is a tombstone. `TablesTooLarge` (a `Refused`).
    """
    view = memoryview(data).cast("B")
    if view[: len(TOMBSTONE_MAGIC)] == TOMBSTONE_MAGIC:
        raise Refused("manifest: this snapshot is being removed")
    if len(view) > MAX_MANIFEST_BYTES:
        raise Damaged(f"manifest: {len(view)} bytes, more than {MAX_MANIFEST_BYTES}")
    payload = envelope.unseal(view, magic=MAGIC, version=FORMAT_VERSION, what="manifest")
    if len(payload) < _SIZES.size:
        raise Damaged("manifest: too short for its sizes")
    head_bytes, body_bytes, raw_bytes = _SIZES.unpack_from(payload)
    if _SIZES.size + head_bytes + body_bytes != len(payload):
        raise Damaged(
            f"manifest: head ({head_bytes} bytes) and body ({body_bytes}) are not the {len(payload)} there are"
        )
    head, body = payload[_SIZES.size : _SIZES.size + head_bytes], payload[_SIZES.size + head_bytes :]

    manifest, range_counts = read_head(head)
    rows = {"chunk": sum(file.chunk_count for file in manifest.files), "range": sum(range_counts)}
    expected = _body_bytes(chunks=rows["chunk"], ranges=rows["range"])
    if raw_bytes != expected:
        raise Damaged(f"manifest: body: {raw_bytes} bytes, but the head's counts ask for {expected}")
    needed_bytes = tables_bytes(chunks=rows["chunk"], ranges=rows["range"])
    if tables_max_bytes is not None and needed_bytes > tables_max_bytes:
        raise TablesTooLarge(rows["chunk"], rows["range"], needed_bytes=needed_bytes, max_bytes=tables_max_bytes)
    raw = _decompress(body, raw_bytes)
    columns: dict[str, NDArray[Any]] = {}
    at = 0
    for name, (dtype, kind) in _COLUMNS.items():
        columns[name] = np.frombuffer(raw, dtype, count=rows[kind], offset=at)
        at += columns[name].nbytes
    memory_files = []
    first = 0
    for file, count in zip(manifest.gvisor.memory_files, range_counts, strict=True):
        mine = {column: columns[name][first : first + count] for name, column in _RANGE_COLUMNS.items()}
        memory_files.append(replace(file, ranges=PageRanges(**mine)))
        first += count
    manifest = replace(
        manifest,
        table=ChunkTable(**{name: columns[name] for name in _CHUNK_COLUMNS}),
        gvisor=replace(manifest.gvisor, memory_files=tuple(memory_files)),
    )
    _check(manifest)
    return manifest


# The body's columns in their order, widest first so that each is aligned: type, and of what there is one a row.
_COLUMNS = {
    "range_start": ("<u8", "range"),
    "range_end": ("<u8", "range"),
    "length": ("<u4", "chunk"),
    "pack": ("<u4", "chunk"),
    "offset": ("<u4", "chunk"),
    "frame_bytes": ("<u4", "chunk"),
    "codec": ("u1", "chunk"),
    "range_kind": ("u1", "range"),
    "digest": ("(16,)u1", "chunk"),
}
_CHUNK_COLUMNS = ("length", "codec", "pack", "offset", "frame_bytes", "digest")
_RANGE_COLUMNS = {"range_start": "start", "range_end": "end", "range_kind": "kind"}


def _body_bytes(*, chunks: int, ranges: int) -> int:
    rows = {"chunk": chunks, "range": ranges}
    return sum(rows[kind] * np.dtype(dtype).itemsize for dtype, kind in _COLUMNS.values())


def _decompress(body: memoryview, raw_bytes: int) -> memoryview:
    """Decompress one zstd frame, which must be the whole body, without making more than it really holds."""
    # Four bytes can become 128 KiB, so 512 at a time never go more than 16 MiB too far. What level 3 makes needs a
    # window of 2 MiB.
    zstd = zstandard.ZstdDecompressor(max_window_size=8 << 20).decompressobj(write_size=32 << 10)
    raw = bytearray()  # grows by an eighth at a time, in place
    at = 0
    try:
        while not zstd.eof and at < len(body):
            raw += zstd.decompress(body[at : at + 512])
            at += 512
            if len(raw) > raw_bytes:
                raise Damaged(f"manifest: body: decompresses to more than its {raw_bytes} bytes")
    except zstandard.ZstdError as error:
        raise Damaged(f"manifest: body: {error}") from error
    if not zstd.eof or len(raw) != raw_bytes:
        raise Damaged(f"manifest: body: decompresses to {len(raw)} bytes of its {raw_bytes}")
    if at < len(body) or zstd.unused_data:
        raise Damaged("manifest: body: bytes after its end")
    return memoryview(raw).toreadonly()


def _check(manifest: Manifest) -> None:
    """Check the columns against the head, whose own members `read_head` has checked."""
    check_chunks(
        manifest.table,
        file_sizes=[file.size for file in manifest.files],
        file_chunk_counts=[file.chunk_count for file in manifest.files],
        chunk_bytes=manifest.chunk_bytes,
        pack_sizes=[pack.size for pack in manifest.packs],
    )
    check_memory_files(manifest.gvisor.memory_files, pages_bytes=manifest.files[-1].size, what="manifest: gvisor")
