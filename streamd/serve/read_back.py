"""Reading an image's files back from the disk, to see whether it has them as they were written. Blocks.

From the disk itself (O_DIRECT), since the page cache would only give back what was put into it; a few megabytes at a
time, so that a network disk is kept busy by one reader; past the page cache, so that nothing is pushed out of it.
"""

import errno
import fcntl
import mmap
import os
import sys
from collections.abc import Iterator, Sequence

import numpy as np

from streamd.safe_paths import open_regular
from streamd.serve.plan import Layout
from streamd.snapshot.frames import chunk_digest
from streamd.snapshot.manifest import ImageFile

# At the latency of a network disk (1 ms) still gigabytes a second; small against any memory cap.
_READ_BYTES = 4 << 20
# What O_DIRECT asks of offsets, sizes and memory on every disk that is in use (open(2)).
_ALIGN_BYTES = 4096


def damaged_chunks(directory_fd: int, files: Sequence[ImageFile], layout: Layout) -> list[int]:
    """Read every chunk of the files in a directory, and give those that aren't right.

    A zero chunk is right when it reads as zeros. Raises: OSError when something can't be read at all.
    """
    bad_chunks = []
    room = max(_READ_BYTES, max(layout.length, default=0))
    with mmap.mmap(-1, -(-room // _ALIGN_BYTES) * _ALIGN_BYTES) as memory, memoryview(memory) as buffer:
        for file in files:
            disk_file = _DiskFile(directory_fd, file.name)
            try:
                base = layout.start[file.first_chunk] if file.chunk_count else 0
                for run in _runs(disk_file, file, layout):
                    start, end = layout.start[run[0]], layout.start[run[-1] + 1]
                    disk_file.read(buffer, start - base, end - start)
                    for chunk in run:
                        low = layout.start[chunk] - start
                        with buffer[low : low + layout.length[chunk]] as data:
                            if not _is_right(data, chunk, layout):
                                bad_chunks.append(chunk)
            finally:
                disk_file.close()
    return bad_chunks


def _runs(disk_file: "_DiskFile", file: ImageFile, layout: Layout) -> Iterator[range]:
    """Cut a file's chunks into runs that are read at once; a zero chunk that is a hole is right, and left out."""
    base = layout.start[file.first_chunk] if file.chunk_count else 0
    first = chunk = file.first_chunk
    for chunk in range(file.first_chunk, file.first_chunk + file.chunk_count):
        start, end = layout.start[chunk], layout.start[chunk + 1]
        is_hole = layout.is_zero(chunk) and disk_file.is_hole(start - base, end - base)
        if first < chunk and (is_hole or end - layout.start[first] > _READ_BYTES):
            yield range(first, chunk)
            first = chunk
        if is_hole:
            first = chunk + 1
    end_chunk = file.first_chunk + file.chunk_count
    if first < end_chunk:
        yield range(first, end_chunk)


def _is_right(data: memoryview, chunk: int, layout: Layout) -> bool:
    if layout.is_zero(chunk):
        return not np.frombuffer(data, np.uint8).any()
    return chunk_digest(data) == layout.digest(chunk)


class _DiskFile:
    """A file read from the disk itself; through the page cache where its file system knows no other way."""

    def __init__(self, directory_fd: int, name: str) -> None:
        self._directory_fd = directory_fd
        self._name = name
        self._hole = range(0)  # the last one that was found
        try:
            self._fd = self._open(os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._fd = self._open(0)

    def _open(self, flag: int) -> int:
        return open_regular(self._directory_fd, self._name, os.O_RDONLY | flag)

    def close(self) -> None:
        """Close it."""
        os.close(self._fd)

    def is_hole(self, start: int, end: int) -> bool:
        """Whether no byte of [start, end) was ever written (lseek(2): SEEK_DATA)."""
        if start not in self._hole:  # millions of zero chunks may lie in one
            self._hole = range(start, self._data_from(start))
        return end <= self._hole.stop

    def _data_from(self, start: int) -> int:
        try:
            return os.lseek(self._fd, start, os.SEEK_DATA)
        except OSError as error:
            return sys.maxsize if error.errno == errno.ENXIO else start  # ENXIO: no data to the end of the file

    def read(self, buffer: memoryview, offset: int, size: int) -> None:
        """Fill the first `size` bytes of page-aligned memory. Raises: OSError, also when the file is too short."""
        done = 0
        while done < size:
            end = -(-size // _ALIGN_BYTES) * _ALIGN_BYTES  # beyond the file's end, when it isn't a whole page long
            try:
                with buffer[done:end] as view:
                    got = os.preadv(self._fd, [view], offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL or not fcntl.fcntl(self._fd, fcntl.F_GETFL) & os.O_DIRECT:
                    raise
                direct_fd, self._fd = self._fd, self._open(0)
                os.close(direct_fd)
                continue
            if got == 0:
                raise OSError(errno.EIO, f"ends at byte {offset + done}", self._name)
            done += got
