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
from streamd.snapshot.memory import MemoryFile, PageRanges
from streamd.snapshot.state_wire import Slice, read_graph
from streamd.snapshot.varints import Cursor

_VERSION = 1
_MAX_PRIVATE_FILES = 2**12


def decode_pages_meta(data: Buffer) -> tuple[MemoryFile, ...]:
    """Give the committed ranges of every memory file, in the order in which they lie in pages.img, the main one first.

    Whether they ascend and add up to the size of pages.img is for `memory.check_memory_files` to say.

    Raises: `Damaged`: not as gVisor writes it, cut, longer. `Refused`: a version that is unknown here.
    """
    cursor = Cursor(data, "pages_meta.img")
    if not cursor.left:
        raise Damaged("pages_meta.img: empty")
    files = [_memory_file(cursor, private=False)]
    owners = read_graph(cursor).root_field("pkg/sentry/kernel.privateMemoryFileMetadata", "owners")
    match owners:
        case None:  # a nil slice: no private ones
            count = 0
        case Slice(length=count):
            pass
        case _:
            raise Damaged("pages_meta.img: owners: not a list")
    if count > _MAX_PRIVATE_FILES:
        raise Damaged(f"pages_meta.img: owners: {count} private memory files, more than {_MAX_PRIVATE_FILES}")
    files += [_memory_file(cursor, private=True) for _ in range(count)]
    if cursor.left:
        raise Damaged(f"pages_meta.img: {cursor.left} bytes after its end")
    return tuple(files)


def _memory_file(cursor: Cursor, *, private: bool) -> MemoryFile:
    length = int.from_bytes(cursor.take(8), "little")
    proto = Cursor(cursor.take(length), cursor.what)
    start, end, kind = array("Q"), array("Q"), array("B")
    version = 0
    while proto.left:
        number, value = _field(proto)
        if number == 1 and isinstance(value, int):
            version = value
        elif number == 3 and isinstance(value, bytes):
            fields = _numbers(value, proto.what)
            if fields.get(5):  # known_committed
                start.append(fields.get(1, 0))
                end.append(fields.get(2, 0))
                if fields.get(3, 0) > 255:
                    raise Damaged(f"{proto.what}: mem_acct: kind {fields[3]}")
                kind.append(fields.get(3, 0))
    if version != _VERSION:
        raise Refused(f"{proto.what}: MemoryFileMetadataProto version {version} is unknown here; update streamd")
    ranges = PageRanges(start=np.array(start, np.uint64), end=np.array(end, np.uint64), kind=np.array(kind, np.uint8))
    return MemoryFile(private, ranges)


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
