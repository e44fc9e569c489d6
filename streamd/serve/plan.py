"""Which bytes one GET asks for. Pure.

Neighbours in a pack become one GET, since a request costs a round trip; a fault's GET stays small, since its thread
waits for the whole of it and for all that shares the link with it.
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streamd.snapshot import Buffer
from streamd.snapshot.manifest import ChunkTable, Codec

# Bounds the walk over a long run of zero chunks, so that no plan takes longer than a read may (1 ms).
PLAN_CHUNKS_MAX = 4096


@dataclass(frozen=True, slots=True)
class FrameSpan:
    """One chunk's frame: bytes [start, end) of its pack, and what it decodes to."""

    chunk: int
    start: int
    end: int
    codec: int
    length: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class GetPlan:
    """One GET: bytes [start, end) of `pack`, which are exactly `frames`, ascending and back to back."""

    pack: int
    start: int
    end: int
    frames: tuple[FrameSpan, ...]

    @property
    def raw_bytes(self) -> int:
        """Bytes that the frames decode to."""
        return sum(frame.length for frame in self.frames)

    @property
    def held_bytes(self) -> int:
        """What memory it takes, as it comes and decoded."""
        return self.raw_bytes + self.transit_bytes

    @property
    def transit_bytes(self) -> int:
        """Most bytes that are held beside the decoded ones: a frame is decoded once it is in whole."""
        return max(frame.end - frame.start for frame in self.frames)


class Layout:
    """The chunk table's columns, for one chunk at a time.

    Views of the table's own memory, read as fast as an array (30 ns, numpy's own 47): of four million chunks a copy is
    170 MB.
    """

    __slots__ = (
        "_digests",
        "_lengths",
        "codec",
        "data_bytes",
        "frame_bytes",
        "is_stored",
        "length",
        "offset",
        "pack",
        "start",
        "stored_bytes",
        "zero_chunks",
    )

    def __init__(self, table: ChunkTable) -> None:
        self.start = table.start.data
        self.length = table.length.data
        self.codec = table.codec.data
        self.pack = table.pack.data
        self.offset = table.offset.data
        self.frame_bytes = table.frame_bytes.data
        self._digests = table.digest.reshape(-1).data
        self._lengths = table.length
        self.is_stored = table.codec != Codec.ZERO
        self.zero_chunks = len(table) - int(np.count_nonzero(self.is_stored))
        self.data_bytes = self.bytes_of(self.is_stored)  # of chunks that aren't zeros
        self.stored_bytes = int(table.frame_bytes.sum(dtype=np.uint64))

    def __len__(self) -> int:
        return len(self.length)

    def cached(self, bits: Buffer) -> NDArray[np.bool_]:
        """Tell of each chunk whether it isn't zeros and a bitmap, whose lowest bit is the first chunk's, has it."""
        has = np.unpackbits(np.frombuffer(bits, np.uint8), count=len(self), bitorder="little").astype(np.bool_)
        both: NDArray[np.bool_] = self.is_stored & has
        return both

    def bytes_of(self, chosen: NDArray[np.bool_]) -> int:
        """Add up the lengths of chunks."""
        return int(self._lengths.sum(dtype=np.uint64, where=chosen))

    def digest(self, chunk: int) -> bytes:
        """xxh3-128 of the chunk, 16 bytes."""
        return self._digests[16 * chunk : 16 * chunk + 16].tobytes()

    def is_zero(self, chunk: int) -> bool:
        """Whether the table says that the chunk is all zeros."""
        return self.codec[chunk] == Codec.ZERO

    def chunks(self, start: int, end: int) -> range:
        """Chunks that hold the bytes [start, end) of the concatenated files; `end > start`."""
        return range(bisect_right(self.start, start) - 1, bisect_right(self.start, end - 1))

    def frame(self, chunk: int) -> FrameSpan:
        """Where a chunk's frame is; the chunk is not zero."""
        offset = self.offset[chunk]
        end = offset + self.frame_bytes[chunk]
        return FrameSpan(chunk, offset, end, self.codec[chunk], self.length[chunk], self.digest(chunk))

    def plan(self, first: int, *, wanted: Callable[[int], bool], get_bytes: int, raw_bytes: int) -> GetPlan:
        """Plan the GET that begins with chunk `first` and takes in the neighbours that are `wanted` too.

        It ends at `get_bytes` of the pack, at `raw_bytes` of chunks, at the first chunk that isn't wanted and at the
        first frame that doesn't follow its predecessor; zero chunks in between have no frame and don't end it.
        """
        frames = [self.frame(first)]
        raw = frames[0].length
        for chunk in range(first + 1, min(first + PLAN_CHUNKS_MAX, len(self))):
            if self.is_zero(chunk):
                continue
            follows = self.pack[chunk] == self.pack[first] and self.offset[chunk] == frames[-1].end
            if not follows or not wanted(chunk):
                break
            frame = self.frame(chunk)
            raw += frame.length
            if frame.end - frames[0].start > get_bytes or raw > raw_bytes:
                break
            frames.append(frame)
        return GetPlan(self.pack[first], frames[0].start, frames[-1].end, tuple(frames))


def joins(due_bytes: int, *, bytes_per_s: float, round_trip_s: float, least_bytes: int = 512 << 10) -> bool:
    """Whether a fault waits for the fetch under way that will bring its chunk `due_bytes` from now.

    It does when that is sooner than an answer to a request of its own could be; `least_bytes` decides while nothing was
    measured yet (two chunks: asking again for so little costs more than it brings).
    """
    return due_bytes <= max(least_bytes, bytes_per_s * round_trip_s)
