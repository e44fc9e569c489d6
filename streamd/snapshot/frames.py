"""Frames: a chunk's bytes as they are stored, and back, verified.

Codecs for one thread: an `Encoder` or a `Decoder` holds a zstd context, so each thread makes its own and keeps it. zstd
and xxhash release the GIL. No limits on chunk sizes here: the manifest's are checked before.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import xxhash
import zstandard

from streamd.errors import Damaged
from streamd.snapshot import Buffer
from streamd.snapshot.chunks import Codec

# Snapshots are written once, in the pod's pause or right after it, and read at the speed of the link: level 1.
DEFAULT_LEVEL = 1
DIGEST_BYTES = 16
NO_DIGEST = bytes(DIGEST_BYTES)


class FrameCorrupt(Damaged):
    """A frame is not the chunk that the table describes."""

    kind = "corrupt"


@dataclass(frozen=True, slots=True)
class Frame:
    """A chunk as stored. `data` is the caller's own buffer when the codec is RAW, and empty when it is ZERO."""

    codec: Codec
    data: Buffer
    digest: bytes


def chunk_digest(chunk: Buffer) -> bytes:
    """Give the xxh3-128 of a chunk's bytes, as the table has it. It finds accidents, not forgery."""
    return xxhash.xxh3_128_digest(chunk)


class Encoder:
    """Chunks to frames, for one thread."""

    def __init__(self, *, level: int = DEFAULT_LEVEL) -> None:
        self._zstd = zstandard.ZstdCompressor(
            level=level, write_content_size=True, write_checksum=False, write_dict_id=False
        )

    def encode(self, chunk: Buffer) -> Frame:
        """Choose how to store a chunk: nothing if it is all zeros, as it is unless zstd takes off 1/16, else zstd.

        `chunk` is contiguous, not empty, and does not change meanwhile.
        """
        digest = chunk_digest(chunk)
        length = memoryview(chunk).nbytes
        # Two steps: the checksum, which is needed anyway, rules out nearly every chunk; it can be forged, so then look.
        if digest == _digest_of_zeros(length) and not np.frombuffer(chunk, np.uint8).any():
            return Frame(Codec.ZERO, b"", NO_DIGEST)
        compressed = self._zstd.compress(chunk)
        if len(compressed) * 16 <= length * 15:
            return Frame(Codec.ZSTD, compressed, digest)
        return Frame(Codec.RAW, chunk, digest)


@lru_cache(maxsize=64)  # a snapshot has one chunk size, and three files' last chunks
def _digest_of_zeros(length: int) -> bytes:
    return chunk_digest(bytes(length))


class Decoder:
    """Frames to chunks, for one thread."""

    def __init__(self) -> None:
        self._zstd = zstandard.ZstdDecompressor()

    def decode(self, frame: Buffer, *, codec: int, length: int, digest: bytes) -> Buffer:
        """Give the chunk's `length` bytes, verified. A chunk that is stored as it is remains where it is, in `frame`.

        Never allocates more than `length` bytes, whatever the frame claims.

        Raises: `FrameCorrupt`: not a frame of that codec, more or fewer bytes than `length`, another digest.
        """
        match codec:
            case Codec.ZERO:
                if memoryview(frame).nbytes or digest != NO_DIGEST:
                    raise FrameCorrupt("a chunk of zeros has bytes or a checksum")
                return bytes(length)
            case Codec.RAW:
                chunk = frame
            case Codec.ZSTD:
                chunk = self._decompress(frame, length)
            case _:
                raise FrameCorrupt(f"codec {codec} is unknown")
        size = memoryview(chunk).nbytes
        if size != length:
            raise FrameCorrupt(f"the chunk has {size} bytes instead of {length}")
        if chunk_digest(chunk) != digest:
            raise FrameCorrupt("the chunk's checksum does not match")
        return chunk

    def _decompress(self, frame: Buffer, length: int) -> bytes:
        try:
            # zstandard allocates what the frame's head claims, so look at that first; -1 and 0 are no sizes of ours.
            claimed = zstandard.frame_content_size(frame)
            if claimed != length or length == 0:
                raise FrameCorrupt(f"the frame claims {claimed} bytes instead of {length}")
            return self._zstd.decompress(frame, max_output_size=length, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise FrameCorrupt(f"zstd: {error}") from error
