"""gVisor's pages_meta.img: which ranges of which memory file lie in pages.img, and in which order.

As gVisor writes it (pkg/sentry/kernel/kernel.go:saveMemoryFiles, pkg/sentry/pgalloc/save_restore.go:SaveTo):

    main memory file | state-encoded `privateMemoryFileMetadata` (whose they are) | private memory file | …

and each memory file as u64 little-endian length and a `MemoryFileMetadataProto` (version 1). Its `mem_acct` ranges
ascend; those that are `known_committed` lie in pages.img, back to back, file after file.
"""

from array import array

import numpy as np

from streamd.errors import Damaged, Refused
from streamd.snapshot import Buffer
from streamd.snapshot.head import MAX_MEMORY_FILES, MAX_PAGE_RANGES
from streamd.snapshot.memory import MemoryFile, PageRanges
from streamd.snapshot.state_wire import Slice, read_graph
from streamd.snapshot.varints import Cursor

_VERSION = 1
# Rows of all files together, and what else they hold. Between two committed rows there is at most one that is not.
_MAX_ROWS = 2 * MAX_PAGE_RANGES + MAX_MEMORY_FILES


def decode_pages_meta(data: Buffer) -> tuple[MemoryFile, ...]:
    """Give the committed ranges of every memory file, in the order in which they lie in pages.img, the main one first.

    Whether they ascend and add up to the size of pages.img is for `memory.check_memory_files` to say.

    Takes about 3 µs a row; no more of them are read than a manifest may have.

    Raises: `Damaged`: not as gVisor writes it, cut, longer, too many ranges. `Refused`: a version that is unknown here.
    """
    cursor = Cursor(data, "pages_meta.img")
    if not cursor.left:
        raise Damaged("pages_meta.img: empty")
    reader = _Reader(cursor)
    files = [reader.memory_file(private=False)]
    owners = read_graph(cursor).root_field("pkg/sentry/kernel.privateMemoryFileMetadata", "owners")
    match owners:
        case None:  # a nil slice: no private ones
            count = 0
        case Slice(length=count):
            pass
        case _:
            raise Damaged("pages_meta.img: owners: not a list")
    if count >= MAX_MEMORY_FILES:
        raise Damaged(f"pages_meta.img: owners: {count} private memory files, more than {MAX_MEMORY_FILES - 1}")
    files += [reader.memory_file(private=True) for _ in range(count)]
    if cursor.left:
        raise Damaged(f"pages_meta.img: {cursor.left} bytes after its end")
    return tuple(files)


class _Reader:
    """Takes memory files from a cursor, counting what they hold together."""

    def __init__(self, cursor: Cursor) -> None:
        self._cursor = cursor
        self._rows = 0
        self._ranges = 0

    def memory_file(self, *, private: bool) -> MemoryFile:
        """Take the next one."""
        length = int.from_bytes(self._cursor.take(8), "little")
        proto = Cursor(self._cursor.take(length), self._cursor.what)
        start, end, kind = array("Q"), array("Q"), array("B")
        version = 0
        while proto.left:
            number, value = _field(proto)
            self._count(1, len(start))
            if number == 1 and isinstance(value, int):
                version = value
            elif number == 3 and isinstance(value, bytes):
                row = _row(value)
                if not row:
                    self._count(len(value), len(start))  # this way is slow
                    row = _numbers(value, proto.what)
                if row.get(5):  # known_committed
                    start.append(row.get(1, 0))
                    end.append(row.get(2, 0))
                    if row.get(3, 0) > 255:
                        raise Damaged(f"{proto.what}: mem_acct: kind {row[3]}")
                    kind.append(row.get(3, 0))
        self._ranges += len(start)
        if version != _VERSION:
            raise Refused(f"{proto.what}: MemoryFileMetadataProto version {version} is unknown here; update streamd")
        columns = PageRanges(
            start=np.array(start, np.uint64), end=np.array(end, np.uint64), kind=np.array(kind, np.uint8)
        )
        return MemoryFile(private, columns)

    def _count(self, rows: int, ranges_here: int) -> None:
        self._rows += rows
        if self._rows > _MAX_ROWS or self._ranges + ranges_here > MAX_PAGE_RANGES:
            raise Damaged(f"{self._cursor.what}: mem_acct: more than {MAX_PAGE_RANGES} ranges of memory")


def _row(message: bytes) -> dict[int, int]:
    """Read a row as gVisor writes them, a few numbers in fields below 16, quickly; nothing for any other message."""
    found: dict[int, int] = {}
    number = value = shift = 0
    for byte in message:
        if not number:
            if byte & 0x87 or not byte:  # not a tag of one byte for a varint
                return {}
            number = byte >> 3
            value = shift = 0
        else:
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                found[number] = value
                number = 0
            elif shift >= 63:
                return {}
    return {} if number else found


def _numbers(message: bytes, what: str) -> dict[int, int]:
    """Read a flat protobuf message: its numbers by field; of a field that is repeated, the last counts."""
    cursor = Cursor(message, what)
    found: dict[int, int] = {}
    while cursor.left:
        number, value = _field(cursor)
        if isinstance(value, int):
            found[number] = value
    return found


def _field(cursor: Cursor) -> tuple[int, int | bytes]:
    """Take one field of a protobuf message: its number, and its value. Fields unknown to the caller are its to skip."""
    tag = cursor.uint()
    match tag & 7:
        case 0:  # varint
            return tag >> 3, cursor.uint()
        case 1:  # 64 bits
            return tag >> 3, int.from_bytes(cursor.take(8), "little")
        case 2:  # bytes, a text or a message
            return tag >> 3, cursor.take(cursor.uint())
        case 5:  # 32 bits
            return tag >> 3, int.from_bytes(cursor.take(4), "little")
        case unknown:
            raise Damaged(f"{cursor.what}: a field of unknown wire type {unknown} at byte {cursor.at}")
