"""Memory files: which bytes of the sandbox's memory lie in pages.img, in which order.

gVisor writes the committed ranges of its main memory file, ascending and back to back, then those of each private one
(rootfs overlays and file-backed tmpfs); so the ranges are the map between offsets in memory and offsets in pages.img.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
from numpy.typing import NDArray

from streamd.errors import Damaged

PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class PageRange:
    """Bytes [start, end) of a gVisor memory file; `kind` as in gVisor pkg/sentry/usage/memory.go."""

    start: int
    end: int
    kind: int


class PageRanges(Sequence[PageRange]):
    """Page ranges as columns: a fragmented 80 GiB heap has a million of them, which as objects would take 150 MB."""

    __slots__ = ("end", "kind", "start")

    def __init__(self, *, start: NDArray[np.uint64], end: NDArray[np.uint64], kind: NDArray[np.uint8]) -> None:
        self.start = start
        self.end = end
        self.kind = kind

    @classmethod
    def of(cls, ranges: Iterable[PageRange]) -> "PageRanges":
        """Make columns of any ranges; columns are given back as they are."""
        if isinstance(ranges, PageRanges):
            return ranges
        rows = tuple(ranges)
        return cls(
            start=np.array([row.start for row in rows], np.uint64),
            end=np.array([row.end for row in rows], np.uint64),
            kind=np.array([row.kind for row in rows], np.uint8),
        )

    def __len__(self) -> int:
        return len(self.start)

    @overload
    def __getitem__(self, index: int) -> PageRange: ...
    @overload
    def __getitem__(self, index: slice) -> "PageRanges": ...
    def __getitem__(self, index: int | slice) -> "PageRange | PageRanges":
        """Give a row, or the rows of a slice."""
        if isinstance(index, slice):
            return PageRanges(start=self.start[index], end=self.end[index], kind=self.kind[index])
        return PageRange(int(self.start[index]), int(self.end[index]), int(self.kind[index]))

    def __iter__(self) -> Iterator[PageRange]:
        return map(PageRange, self.start.tolist(), self.end.tolist(), self.kind.tolist())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(mine == its for mine, its in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # equal to a tuple of the same rows, whose hash it hasn't

    def __repr__(self) -> str:
        return f"PageRanges({list(self[:3])!r}, {len(self)} in all)"


@dataclass(frozen=True, slots=True)
class MemoryFile:
    """The committed ranges of one memory file, ascending; back to back they are its part of pages.img."""

    private: bool
    ranges: Sequence[PageRange]

    @property
    def committed_bytes(self) -> int:
        """How much of pages.img is this file's."""
        columns = PageRanges.of(self.ranges)
        return _sum(columns.end) - _sum(columns.start)


def _sum(column: NDArray[np.uint64]) -> int:
    """Add up what may be unchecked still: numpy's sums wrap around, those of the halves of 2**22 rows can't."""
    half = np.uint64(32)
    high, low = column >> half, column & np.uint64(0xFFFF_FFFF)
    return (int(high.sum(dtype=np.uint64)) << 32) + int(low.sum(dtype=np.uint64))


def check_memory_files(files: Sequence[MemoryFile], *, pages_bytes: int, what: str) -> None:
    """Check that these can be the memory files of a pages.img of that size.

    Raises: `Damaged`, with `what` in front and the field's name: the first file isn't the main one or another is, a
        range is empty, unaligned, or doesn't ascend, the sum is not `pages_bytes`.
    """
    if [file.private for file in files] != [index > 0 for index in range(len(files))] or not files:
        raise Damaged(f"{what}: memory_files: must be the main one, then private ones")
    for index, file in enumerate(files):
        columns = PageRanges.of(file.ranges)
        field = f"{what}: memory_files[{index}].ranges"
        if np.any(columns.start % PAGE_BYTES) or np.any(columns.end % PAGE_BYTES):
            raise Damaged(f"{field}: not at multiples of {PAGE_BYTES}")
        if np.any(columns.start >= columns.end):
            raise Damaged(f"{field}: one is empty or ends before it starts")
        if np.any(columns.end[:-1] > columns.start[1:]):
            raise Damaged(f"{field}: they overlap or do not ascend")
    total = sum(file.committed_bytes for file in files)
    if total != pages_bytes:
        raise Damaged(f"{what}: memory_files: committed ranges sum to {total} bytes, but pages.img has {pages_bytes}")
