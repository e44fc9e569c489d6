"""A set of byte ranges that knows how many bytes of any span are in it, in O(log n). Pure.

The ranges are two sorted lists. Beside them a Fenwick tree counts the bytes that are in the set, block by block, since
to walk the gaps would take thousands of steps a read where an application freed every other page: measured, 5 ms.
"""

from array import array
from bisect import bisect_left, bisect_right

# A block of the counting tree. As large as runsc's reads: one read changes two of them, and within one there is room
# for 32 ranges of whole pages at most.
BLOCK_BYTES = 256 << 10
# Ranges that a set keeps apart. A load has a few hundred; whoever makes more loses only exactness, at the lowest ones.
RANGES_MAX = 8192


class Ranges:
    """A set of byte ranges, merged, ascending. Both lists have equal length; [starts[i], ends[i]) are disjoint.

    Everything below `_taken_end` is taken to be in the set, as the lists say; the tree doesn't count it.
    """

    __slots__ = ("_counts", "_ends", "_starts", "_taken_end")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._taken_end = 0
        self._counts = _Counts()

    def add(self, start: int, end: int) -> None:
        """Add [start, end), which isn't empty; when the ranges become too many, all below their middle is taken in."""
        self._count(start, end)
        low = bisect_left(self._ends, start)
        high = bisect_right(self._starts, end)
        if low < high:
            start = min(start, self._starts[low])
            end = max(end, self._ends[high - 1])
        self._starts[low:high] = [start]
        self._ends[low:high] = [end]
        if len(self._starts) > RANGES_MAX:
            self._take_in_lower_half()

    def missing_bytes(self, start: int, end: int) -> int:
        """Count the bytes of [start, end) that are not in the set."""
        start = max(start, self._taken_end)
        return end - start - (self._below(end) - self._below(start)) if start < end else 0

    def missing(self, start: int, end: int) -> list[tuple[int, int]]:
        """Give the parts of [start, end) that are not in the set, ascending."""
        parts = []
        index = bisect_right(self._ends, start)
        while start < end:
            gap_end = min(self._starts[index], end) if index < len(self._starts) else end
            if start < gap_end:
                parts.append((start, gap_end))
            start = self._ends[index] if index < len(self._ends) else end
            index += 1
        return parts

    def as_pairs(self) -> list[tuple[int, int]]:
        """Give the ranges, ascending."""
        return list(zip(self._starts, self._ends, strict=True))

    def _take_in_lower_half(self) -> None:
        half = len(self._starts) // 2
        end = self._ends[half - 1]
        # Not block by block, of which there may be hundreds of thousands. Only the last one is also looked at from
        # above, and has to be right.
        self._count(end - end % BLOCK_BYTES, end)
        self._taken_end = end
        self._starts[:half] = [0]
        self._ends[: half - 1] = []

    def _below(self, byte: int) -> int:
        """Count the bytes below `byte` that are in the set, those below the block of `_taken_end` as the tree does."""
        block = byte // BLOCK_BYTES
        start = block * BLOCK_BYTES
        return self._counts.below(block) + byte - start - sum(e - s for s, e in self.missing(start, byte))

    def _count(self, start: int, end: int) -> None:
        """Count [start, end) in, as far as it is not in the set yet."""
        for low, high in self.missing(start, end):
            while low < high:
                block = low // BLOCK_BYTES
                cut = min(high, (block + 1) * BLOCK_BYTES)
                self._counts.add(block, cut - low)
                low = cut


class _Counts:
    """Sums of the first n of a growing row of numbers: a Fenwick tree, whose size is a power of two."""

    __slots__ = ("_tree",)

    def __init__(self) -> None:
        self._tree = array("q", (0, 0))  # from 1 on; the last one is the sum of all

    def add(self, index: int, amount: int) -> None:
        while index + 1 >= len(self._tree):
            self._tree.extend(array("q", bytes(8 * (len(self._tree) - 1))))
            self._tree[-1] = self._tree[len(self._tree) // 2]
        index += 1
        while index < len(self._tree):
            self._tree[index] += amount
            index += index & -index

    def below(self, index: int) -> int:
        """Sum up the numbers before `index`."""
        index = min(index, len(self._tree) - 1)
        total = 0
        while index:
            total += self._tree[index]
            index &= index - 1
        return total
