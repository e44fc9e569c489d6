"""Stored frames back from packs: which to ask for together, and cutting what arrives into frames."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streamd.errors import StoreError, StoreErrorKind
from streamd.snapshot.manifest import ChunkTable, Codec, Manifest
from streamd.store.port import Buffer, ObjectInfo, Store


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """Frames of one pack that lie back to back: rows of the table, in the order of their offsets."""

    pack: int
    rows: NDArray[np.intp]


def spans(table: ChunkTable, *, span_bytes: int | None = None) -> Iterator[Span]:
    """Group all stored chunks, each in one span, in pack order.

    A span ends with its pack, before a gap, and at the frame that begins at or beyond each multiple of `span_bytes`.
    """
    rows = np.flatnonzero(table.codec != Codec.ZERO)
    if not len(rows):
        return
    rows = rows[np.lexsort((table.offset[rows], table.pack[rows]))]
    pack, offset = table.pack[rows], table.offset[rows].astype(np.uint64)
    apart = (pack[1:] != pack[:-1]) | (offset[1:] != offset[:-1] + table.frame_bytes[rows][:-1])
    if span_bytes:
        part = offset // np.uint64(span_bytes)
        apart |= part[1:] != part[:-1]
    # One at a time: a table whose frames all lie apart has millions.
    first = 0
    for after in (*(np.flatnonzero(apart) + 1).tolist(), len(rows)):
        yield Span(int(pack[first]), rows[first:after])
        first = after


def read_frames(store: Store, info: ObjectInfo, table: ChunkTable, span: Span) -> Iterator[tuple[int, bytes]]:
    """Read a span from its pack's version, and give each row with its frame as soon as it is in.

    Raises: `StoreError`.
    """
    start = int(table.offset[span.rows[0]])
    end = int(table.offset[span.rows[-1]]) + int(table.frame_bytes[span.rows[-1]])
    pieces = store.read(info.key, generation=info.generation, start=start, end=end)
    parts = ((0, size) for size in table.frame_bytes[span.rows].tolist())
    yield from zip(span.rows.tolist(), cut(pieces, parts, info.key), strict=True)


def rows_of_packs(table: ChunkTable, pack_count: int) -> list[NDArray[np.intp]]:
    """Give each pack's rows, in the order of their offsets."""
    rows = np.flatnonzero(table.codec != Codec.ZERO)
    rows = rows[np.lexsort((table.offset[rows], table.pack[rows]))]
    return np.split(rows, np.searchsorted(table.pack[rows], np.arange(1, pack_count)))


def cut(pieces: Iterator[Buffer], parts: Iterable[tuple[int, int]], key: str) -> Iterator[bytes]:
    """Cut a body: each part is how many bytes to pass over, and how many to give then.

    Only what is given is held, one part at a time and a piece. Raises: `StoreError` TRANSIENT when the body ends early.
    """
    piece = memoryview(b"")
    for gap, size in parts:
        part = bytearray()
        while gap or len(part) < size:
            if not piece:
                following = next(pieces, None)
                if following is None:
                    raise StoreError(StoreErrorKind.TRANSIENT, key, "the body ended early")
                piece = memoryview(following).cast("B")
            passed = min(gap, len(piece))
            gap -= passed
            taken = piece[passed : passed + size - len(part)]
            part += taken
            piece = piece[passed + len(taken) :]
        yield bytes(part)


def place(manifest: Manifest, row: int) -> tuple[int, int]:
    """Give the index of the file that a chunk belongs to, and the chunk's first byte in that file."""
    for index, file in enumerate(manifest.files):
        if file.first_chunk <= row < file.first_chunk + file.chunk_count:
            return index, int(manifest.table.start[row]) - int(manifest.table.start[file.first_chunk])
    raise ValueError(f"row {row} is in no file")
