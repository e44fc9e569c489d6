"""Which bytes one GET asks for. Pure.

Neighbours in a pack become one GET, since a request costs a round trip; a fault's GET stays small, since its thread
waits for the whole of it and for all that shares the link with it.
"""

from array import array
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

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
    def transit_bytes(self) -> int:
        """Most bytes that are held beside the decoded ones: a frame is decoded once it is in whole."""
        return max(frame.end - frame.start for frame in self.frames)


class Layout:
    """The chunk table as plain arrays: numpy's per-element access costs more than the rest of a read."""

    __slots__ = ("_digests", "codec", "frame_bytes", "length", "offset", "pack", "start")

    def __init__(self, table: ChunkTable) -> None:
        self.start = array("Q", table.start.astype("u8").tobytes())
        self.length = array("I", table.length.astype("u4").tobytes())
        self.codec = table.codec.astype("u1").tobytes()
        self.pack = array("I", table.pack.astype("u4").tobytes())
        self.offset = array("I", table.offset.astype("u4").tobytes())
        self.frame_bytes = array("I", table.frame_bytes.astype("u4").tobytes())
        self._digests = table.digest.tobytes()

    def __len__(self) -> int:
        return len(self.length)

    def digest(self, chunk: int) -> bytes:
        """xxh3-128 of the chunk, 16 bytes."""
        return self._digests[16 * chunk : 16 * chunk + 16]

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
