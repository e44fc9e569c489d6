"""The chunk table: where every chunk of the image lies, as columns, and what must be true of it.

A row is 33 bytes; an 80 GiB image in 256 KiB chunks has 327 680. All work on it is vectorised.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from streamd.errors import Damaged
from streamd.snapshot.memory import PAGE_BYTES

# 1 TiB in chunks of 256 KiB. Bounds what a manifest can make its reader allocate (140 MB for the table).
MAX_CHUNKS = 2**22
MAX_CHUNK_BYTES = 16 << 20
MAX_PACK_BYTES = 1 << 30  # so that offsets, and sums of an offset and a length, stay below 2**32


class Codec(IntEnum):
    """How a chunk is stored."""

    ZERO = 0  # all bytes zero, nothing stored
    RAW = 1  # the chunk's bytes
    ZSTD = 2  # one zstd frame


@dataclass(frozen=True, slots=True, eq=False)
class ChunkTable:
    """One row a chunk, as columns of equal length n, in file order (checkpoint.img, pages_meta.img, pages.img).

    `digest` is xxh3-128 of the chunk's own bytes, big-endian as `xxhash.xxh3_128_digest` gives it (zeros for ZERO).
    `start` is the chunk's first byte in the concatenation of the files, derived: n + 1 values, the last is the total.
    """

    length: NDArray[np.uint32]
    codec: NDArray[np.uint8]
    pack: NDArray[np.uint32]
    offset: NDArray[np.uint32]  # in its pack
    frame_bytes: NDArray[np.uint32]
    digest: NDArray[np.uint8]  # shape (n, 16)
    start: NDArray[np.uint64] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        start = np.zeros(len(self.length) + 1, np.uint64)
        np.cumsum(self.length, dtype=np.uint64, out=start[1:])
        start.flags.writeable = False
        object.__setattr__(self, "start", start)

    def __len__(self) -> int:
        return len(self.length)


NO_CHUNKS = ChunkTable(
    length=np.zeros(0, np.uint32),
    codec=np.zeros(0, np.uint8),
    pack=np.zeros(0, np.uint32),
    offset=np.zeros(0, np.uint32),
    frame_bytes=np.zeros(0, np.uint32),
    digest=np.zeros((0, 16), np.uint8),
)


def check_chunks(
    table: ChunkTable,
    *,
    file_sizes: Sequence[int],
    file_chunk_counts: Sequence[int],
    chunk_bytes: int,
    pack_sizes: Sequence[int],
) -> None:
    """Check a table against the files that it describes (in order) and the packs that it points into.

    Raises: `Damaged`, which names the column and the first row that is wrong.
    """
    count = len(table)
    for name in ("codec", "pack", "offset", "frame_bytes", "digest"):
        if len(getattr(table, name)) != count:
            raise Damaged(f"manifest: chunks.{name}: {len(getattr(table, name))} rows, but chunks.length has {count}")
    if table.digest.shape != (count, 16):
        raise Damaged(f"manifest: chunks.digest: has shape {table.digest.shape}, not ({count}, 16)")
    if count > MAX_CHUNKS:
        raise Damaged(f"manifest: chunks: {count} rows, more than {MAX_CHUNKS}")
    if count != sum(file_chunk_counts):
        raise Damaged(f"manifest: chunks: {count} rows, but the files have {sum(file_chunk_counts)}")
    _check_lengths(table, file_sizes, file_chunk_counts, chunk_bytes)
    _check_frames(table, pack_sizes)


def _check_lengths(
    table: ChunkTable, file_sizes: Sequence[int], file_chunk_counts: Sequence[int], chunk_bytes: int
) -> None:
    _refuse_where(table.length == 0, "length", "is 0")
    _refuse_where(table.length > chunk_bytes, "length", f"is more than chunk_bytes, {chunk_bytes}")
    after = np.cumsum(np.asarray(file_chunk_counts, np.int64))
    unaligned = table.length % PAGE_BYTES != 0
    unaligned[[end - 1 for end, n in zip(after.tolist(), file_chunk_counts, strict=True) if n]] = False
    _refuse_where(unaligned, "length", f"is not a multiple of {PAGE_BYTES}, and the chunk is not its file's last")
    first = 0
    for index, (size, end) in enumerate(zip(file_sizes, after.tolist(), strict=True)):
        total = int(table.start[end]) - int(table.start[first])
        if total != size:
            raise Damaged(f"manifest: files[{index}].size: {size}, but the lengths of its chunks sum to {total}")
        first = end


def _check_frames(table: ChunkTable, pack_sizes: Sequence[int]) -> None:
    _refuse_where(table.codec > max(Codec), "codec", "is unknown")
    zero = table.codec == Codec.ZERO
    for name in ("pack", "offset", "frame_bytes"):
        _refuse_where(zero & (getattr(table, name) != 0), name, "is not 0, but the chunk is zeros")
    _refuse_where(zero & table.digest.any(axis=1), "digest", "is not 0, but the chunk is zeros")
    raw = (table.codec == Codec.RAW) & (table.frame_bytes != table.length)
    _refuse_where(raw, "frame_bytes", "is not the chunk's length, but the chunk is stored raw")
    _refuse_where(~zero & (table.frame_bytes == 0), "frame_bytes", "is 0, but the chunk is not zeros")
    _refuse_where(table.frame_bytes > table.length, "frame_bytes", "is more than the chunk's length")
    _refuse_where(~zero & (table.pack >= len(pack_sizes)), "pack", f"is not among the {len(pack_sizes)} packs")

    if not pack_sizes:  # all chunks are zeros, then
        return
    size = np.asarray(pack_sizes, np.uint32)[table.pack]
    beyond = (table.offset > size) | (table.frame_bytes > size - table.offset)
    _refuse_where(beyond, "offset", "lets the frame end beyond its pack")
    _refuse_where(_overlapping(table, zero), "offset", "lets the frame overlap another")


def _overlapping(table: ChunkTable, zero: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Tell which frames begin before another one has ended, one by one in the order of the packs' bytes.

    Takes 16 bytes a chunk for frames in file order, which is how they are written; 36 for any other.
    """
    # Where a frame begins among all packs' bytes, when each pack has 4 GiB for itself.
    place = table.pack.astype(np.uint64)
    place <<= np.uint64(32)
    place |= table.offset
    reached = place + table.frame_bytes
    np.maximum.accumulate(reached, out=reached)
    overlapping = np.zeros(len(table), np.bool_)
    if not (~zero[1:] & (place[1:] < reached[:-1])).any():
        return overlapping
    del reached
    place[zero] = np.iinfo(np.uint64).max  # behind all frames
    order = np.argsort(place)
    place = place[order]
    overlapping[order[1:]] = (place + table.frame_bytes[order])[:-1] > place[1:]
    return overlapping


def _refuse_where(wrong: NDArray[np.bool_], column: str, why: str) -> None:
    if wrong.any():
        raise Damaged(f"manifest: chunks.{column}: in row {int(wrong.argmax())} it {why}")
