"""The server that demo, tests and benchmarks run inside a sandbox: a heap whose every byte is known, and a few
requests.

It runs as a script in the sandbox (`python3 workload.py SEED MIB`), so it needs nothing but Python's standard library.
It fills MIB MiB, in blocks of 1 MiB, with bytes that follow from SEED alone: of every eight blocks four are
compressible to about a half, two are not compressible and two are zero. Then it answers requests, one line in, one line
out:

| request | answer |
|---|---|
| (start) | `ready N`: N blocks are filled |
| `touch K` | `touched CRC`: CRC-32 of two pages that follow from K: of the index (the first 8 blocks), of any block |
| `hash` | `hash HEX`: SHA-256 over all blocks that are left |
| `free` | `freed N`: gives the memory of N blocks, 15 of 16, back to the kernel |
| `write PATH TEXT` / `read PATH` | `wrote` / `text TEXT`: a file in the container |
| `exit N` | ends the process with exit code N, after a line on standard error |

It reads file descriptor 0 with os.read and keeps no buffer of its own across requests: a restored process finds new
pipes under the old numbers.
"""

import hashlib
import mmap
import os
import sys
import zlib

BLOCK_BYTES = 1 << 20
PAGE_BYTES = 4096
INDEX_BLOCKS = 8


def block_bytes(seed: int, index: int) -> bytes:
    """Give the contents of block `index`: BLOCK_BYTES bytes."""
    kind = index % 8
    if kind in (3, 7):
        return bytes(BLOCK_BYTES)
    name = f"{seed}/{index}".encode()
    if kind in (2, 6):
        return hashlib.shake_128(name).digest(BLOCK_BYTES)
    # Half of each page is random, half repeats: as one finds it in heaps of pointers and small numbers.
    random = hashlib.shake_128(name).digest(BLOCK_BYTES // 2)
    filler = hashlib.sha256(name).digest() * (PAGE_BYTES // 2 // 32)
    half = PAGE_BYTES // 2
    return b"".join(part for at in range(0, BLOCK_BYTES // 2, half) for part in (random[at : at + half], filler))


def heap_hash(seed: int, blocks: int) -> str:
    """Give what `hash` must answer while nothing was freed."""
    whole = hashlib.sha256()
    for index in range(blocks):
        whole.update(block_bytes(seed, index))
    return whole.hexdigest()


def pages_of_request(key: int, blocks: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Give what `touch key` reads: two pairs of block and offset in it, of the index and of a record."""
    digest = hashlib.sha256(str(key).encode()).digest()
    numbers = [int.from_bytes(digest[at : at + 4], "little") for at in range(0, 16, 4)]
    pages = BLOCK_BYTES // PAGE_BYTES
    index = (numbers[0] % min(INDEX_BLOCKS, blocks), numbers[1] % pages * PAGE_BYTES)
    record = (numbers[2] % blocks, numbers[3] % pages * PAGE_BYTES)
    return index, record


def touch_crc(seed: int, blocks: int, key: int) -> int:
    """Give what `touch key` must answer."""
    crc = 0
    for block, offset in pages_of_request(key, blocks):
        crc = zlib.crc32(block_bytes(seed, block)[offset : offset + PAGE_BYTES], crc)
    return crc


class Heap:
    """The blocks: private anonymous mappings, as malloc makes them; each can be given back by itself."""

    def __init__(self, seed: int, blocks: int) -> None:
        self._blocks: list[mmap.mmap] = []
        for index in range(blocks):
            block = mmap.mmap(-1, BLOCK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            block[:] = block_bytes(seed, index)
            self._blocks.append(block)

    def __len__(self) -> int:
        return len(self._blocks)

    def touch(self, key: int) -> int:
        crc = 0
        for block, offset in pages_of_request(key, len(self._blocks)):
            crc = zlib.crc32(self._blocks[block][offset : offset + PAGE_BYTES], crc)
        return crc

    def hash(self) -> str:
        whole = hashlib.sha256()
        for block in self._blocks:
            whole.update(block)
        return whole.hexdigest()

    def free(self) -> int:
        kept, freed = self._blocks[::16], [b for i, b in enumerate(self._blocks) if i % 16]
        for block in freed:
            block.close()
        self._blocks = kept
        return len(freed)


def answer(heap: Heap, request: str) -> str:
    """Answer one request, or end the process."""
    verb, _, rest = request.partition(" ")
    match verb:
        case "touch":
            return f"touched {heap.touch(int(rest))}"
        case "hash":
            return f"hash {heap.hash()}"
        case "free":
            return f"freed {heap.free()}"
        case "write":
            path, _, text = rest.partition(" ")
            with open(path, "w") as file:
                file.write(text)
            return "wrote"
        case "read":
            with open(rest) as file:
                return f"text {file.read()}"
        case "exit":
            os.write(2, b"bye\n")
            os._exit(int(rest))
        case _:
            return f"unknown request {verb!r}"


def main() -> None:
    """Serve until standard input ends."""
    seed, blocks = int(sys.argv[1]), int(sys.argv[2])
    heap = Heap(seed, blocks)
    os.write(1, f"ready {len(heap)}\n".encode())
    pending = b""
    while data := os.read(0, 4096):
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            os.write(1, answer(heap, line.decode()).encode() + b"\n")


if __name__ == "__main__":
    main()
