"""What runs in the sandboxes of the race: one large heap of known bytes, and requests that touch chosen parts of it.

It runs as a script in the sandbox (`python3 race_workload.py KIND MIB`) with nothing but the standard library, and the
race itself imports it to know the right answers. The heap is one private anonymous mapping of MIB MiB, filled in
ascending order, so that an address in it is about as far into the image as into the heap. KIND `random` can't be
compressed; in `half` every page is random in its first half and repeats 32 bytes in its second.

| request | answer |
|---|---|
| (start) | `ready MIB` |
| `region` | `region CRC`: CRC-32 of the REGION_MIB in the middle, page by page |
| `pages K` | `pages CRC`: CRC-32 of SCATTERED pages that follow from K |
| `hash` | `hash HEX`: SHA-256 of all |

A request reads file descriptor 0 with os.read and answers on 1: a restored process finds new pipes there.
"""

import hashlib
import mmap
import os
import random
import sys
import zlib
from collections.abc import Iterator

MIB = 1 << 20
PAGE_BYTES = 4096
REGION_MIB = 128
SCATTERED = 24
_BASE_MIB = 32


class Contents:
    """The bytes of a heap, block by block of 1 MiB.

    Making gigabytes of random bytes takes Python minutes, so each block is a part of one base of 32 MiB, begun
    elsewhere: no two blocks are alike, and what they share lies too far apart for a compressor that sees a chunk.
    """

    def __init__(self, kind: str) -> None:
        base = random.Random(20260905).randbytes(_BASE_MIB * MIB)
        if kind == "half":
            half = PAGE_BYTES // 2
            pages = (base[at : at + half] + base[at : at + 32] * (half // 32) for at in range(0, len(base), PAGE_BYTES))
            base = b"".join(pages)
        self._base = memoryview(base)

    def block(self, index: int) -> memoryview:
        """Give block `index`; it begins on a page of the base, so that pages stay whole."""
        pages = (_BASE_MIB - 1) * MIB // PAGE_BYTES
        at = index * 1543 % pages * PAGE_BYTES  # 1543: prime to the number of pages, so it takes long to come back
        return self._base[at : at + MIB]

    def page(self, number: int) -> memoryview:
        """Give page `number` of the heap."""
        block, inside = divmod(number * PAGE_BYTES, MIB)
        return self.block(block)[inside : inside + PAGE_BYTES]


def region_pages(mib: int) -> range:
    """Give the numbers of the pages that `region` touches, in a heap of `mib` MiB."""
    first = (mib - REGION_MIB) // 2 * MIB // PAGE_BYTES
    return range(first, first + REGION_MIB * MIB // PAGE_BYTES)


def scattered_pages(key: int, mib: int) -> list[int]:
    """Give the numbers of the pages that `pages KEY` touches, in the order in which it does."""
    return random.Random(key).sample(range(mib * MIB // PAGE_BYTES), SCATTERED)


def right_answer(kind: str, mib: int, request: str) -> str:
    """Give what a heap must answer to `region` or `pages K`."""
    contents = Contents(kind)
    return f"{request.split()[0]} {_crc(map(contents.page, _pages(request, mib)))}"


def _pages(request: str, mib: int) -> range | list[int]:
    verb, _, key = request.partition(" ")
    return region_pages(mib) if verb == "region" else scattered_pages(int(key), mib)


def _crc(parts: Iterator[memoryview]) -> int:
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
    return crc


class Heap:
    """The mapping, and the answers."""

    def __init__(self, kind: str, mib: int) -> None:
        self._mib = mib
        contents = Contents(kind)
        self._memory = mmap.mmap(-1, mib * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for index in range(mib):
            self._memory[index * MIB : (index + 1) * MIB] = contents.block(index)
        self._view = memoryview(self._memory)

    def answer(self, request: str) -> str:
        verb = request.split()[0]
        if verb == "hash":
            return f"hash {hashlib.sha256(self._view).hexdigest()}"
        numbers = _pages(request, self._mib)
        return f"{verb} {_crc(self._view[n * PAGE_BYTES : (n + 1) * PAGE_BYTES] for n in numbers)}"


def main() -> None:
    """Serve until standard input ends."""
    kind, mib = sys.argv[1], int(sys.argv[2])
    heap = Heap(kind, mib)
    os.write(1, f"ready {mib}\n".encode())
    pending = b""
    while data := os.read(0, 4096):
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            os.write(1, heap.answer(line.decode()).encode() + b"\n")


if __name__ == "__main__":
    main()
