"""A record as a file (format 1): what `Recorder` noted, in an envelope like those of the store's own objects. Pure.

In an envelope (`snapshot/envelope.py`; magic `PODSNAPR`) lie

    u32 LE bytes of the head | head | one zstd frame

The head is JSON: what the mount was of, its handles and events, how many rows there are, and the names of classes,
tiers and errors, whose numbers are of no lasting meaning. The frame holds the rows' columns one after another,
ascending ones as differences; it is several times smaller than the rows. A record may come from anywhere (people send
them to each other), so reading one allocates only what the counts, which have bounds, allow.
"""

import json
import struct

import numpy as np
import zstandard

from streamd.errors import Damaged, Refused
from streamd.serve.order import Want
from streamd.serve.record import (
    ERRORS,
    EVENTS_MAX,
    FACTS_MAX,
    GET_ROW,
    GETS_MAX,
    HANDLES_MAX,
    NO_HANDLE,
    READ_ROW,
    READS_MAX,
    RELEASE_ROW,
    RELEASES_MAX,
    Dropped,
    Record,
    RecordedEvent,
    RecordedFile,
    RecordedHandle,
    RecordHead,
    Rows,
    Tier,
)
from streamd.snapshot import Buffer, envelope, strict_json
from streamd.snapshot.names import IMAGE_FILES

FORMAT_VERSION = 1
MAGIC = b"PODSNAPR"
# Rows and columns as they are written; the first of each is ascending and written as differences.
_TABLES = {"reads": (READ_ROW, READS_MAX), "gets": (GET_ROW, GETS_MAX), "releases": (RELEASE_ROW, RELEASES_MAX)}
_RAW_BYTES_MAX = sum(row.itemsize * most for row, most in _TABLES.values())
_HEAD_BYTES_MAX = 2 << 20
# More than this is no record; zstd makes what it can't shrink longer by 1/256 at most.
RECORD_BYTES_MAX = _HEAD_BYTES_MAX + _RAW_BYTES_MAX + _RAW_BYTES_MAX // 128 + 4096
_SIZE = struct.Struct("<I")
# No number of a record is larger: 2^53 is what JSON's readers agree on, and 285 years in microseconds.
_NUMBER_MAX = 1 << 53
_WHAT = "record"
# What the small columns mean here, by number.
_NAMES = {
    "want": tuple(want.name for want in Want),
    "tier": tuple(tier.name for tier in Tier),
    "error": ("", *ERRORS),
}


def encode(record: Record) -> bytes:
    """Write a record, its rows in order."""
    record = record.ordered()
    head = {
        "snapshot": record.head.snapshot,
        "digest": record.head.digest,
        "snapshot_url": record.head.snapshot_url,
        "mountpoint": record.head.mountpoint,
        "pid": record.head.pid,
        "started_s": record.head.started_s,
        "chunk_bytes": record.head.chunk_bytes,
        "stored_bytes": record.head.stored_bytes,
        "files": [{"name": file.name, "size": file.size, "base": file.base} for file in record.head.files],
        "facts": dict(record.head.facts),
        "lasted_us": record.lasted_us,
        "handles": [
            {"file": handle.file_name, "opened_us": handle.opened_us, "closed_us": handle.closed_us}
            for handle in record.handles
        ],
        "events": [{"at_us": event.at_us, "kind": event.kind, "detail": event.detail} for event in record.events],
        "names": {column: list(names) for column, names in _NAMES.items()},
        "rows": {name: len(getattr(record, name)) for name in _TABLES},
        "dropped": {
            "reads": record.dropped.reads,
            "gets": record.dropped.gets,
            "releases": record.dropped.releases,
            "events": record.dropped.events,
        },
    }
    text = json.dumps(head, separators=(",", ":")).encode()
    columns = b"".join(_columns(getattr(record, name)) for name in _TABLES)
    body = zstandard.ZstdCompressor(level=3).compress(columns)
    return envelope.seal(MAGIC, FORMAT_VERSION, (_SIZE.pack(len(text)), text, body))


def decode(data: Buffer) -> Record:
    """Read a record and check that its numbers are possible.

    Raises: `Damaged`, which names what is wrong; `Refused`: its format version is unknown here.
    """
    view = memoryview(data).cast("B")
    if len(view) > RECORD_BYTES_MAX:
        raise Damaged(f"{_WHAT}: {len(view)} bytes, more than {RECORD_BYTES_MAX}")
    payload = envelope.unseal(view, magic=MAGIC, version=FORMAT_VERSION, what=_WHAT)
    if len(payload) < _SIZE.size:
        raise Damaged(f"{_WHAT}: too short for its head's size")
    (head_bytes,) = _SIZE.unpack_from(payload)
    if head_bytes > min(_HEAD_BYTES_MAX, len(payload) - _SIZE.size):
        raise Damaged(f"{_WHAT}: a head of {head_bytes} bytes")
    text, body = payload[_SIZE.size : _SIZE.size + head_bytes], payload[_SIZE.size + head_bytes :]
    head = strict_json.parse(text, _WHAT, max_containers=HANDLES_MAX + EVENTS_MAX + 64)
    counts = head.member("rows")
    rows = {name: counts.integer(name, most=most) for name, (_, most) in _TABLES.items()}
    tables = _tables(body, rows)
    names = head.member("names")
    for table, column in (("reads", "want"), ("reads", "tier"), ("gets", "want"), ("gets", "error")):
        _renumber(tables[table], column, names.name_list(column))
    dropped = head.member("dropped")
    record = Record(
        head=_head(head),
        lasted_us=head.integer("lasted_us", most=_NUMBER_MAX),
        handles=tuple(_handle(fields) for fields in head.members("handles", most=HANDLES_MAX)),
        events=tuple(
            RecordedEvent(fields.integer("at_us", most=_NUMBER_MAX), fields.name("kind"), fields.name("detail"))
            for fields in head.members("events", most=EVENTS_MAX)
        ),
        dropped=Dropped(
            reads=dropped.integer("reads", most=_NUMBER_MAX),
            gets=dropped.integer("gets", most=_NUMBER_MAX),
            releases=dropped.integer("releases", most=_NUMBER_MAX),
            events=dropped.integer("events", most=_NUMBER_MAX),
        ),
        **tables,
    )
    _check(record)
    return record


def _columns(rows: Rows) -> bytes:
    first, *others = rows.dtype.names or ()
    times = rows[first]
    return np.diff(times, prepend=times.dtype.type(0)).tobytes() + b"".join(rows[name].tobytes() for name in others)


def _renumber(rows: Rows, column: str, names: tuple[str, ...]) -> None:
    """Replace the numbers of whoever wrote the record by the numbers that mean the same here."""
    for number in np.unique(rows[column]).tolist():
        if number >= len(names):
            raise Damaged(f"{_WHAT}: {column} {number} has no name")
        if names[number] not in _NAMES[column]:
            raise Refused(f"{_WHAT}: {column} {names[number]!r} is unknown here; update streamd")
    known = [_NAMES[column].index(name) if name in _NAMES[column] else 0 for name in names]
    rows[column] = np.array(known or [0], np.uint8)[rows[column]]


def _tables(body: memoryview, rows: dict[str, int]) -> dict[str, Rows]:
    expected = sum(row.itemsize * rows[name] for name, (row, _) in _TABLES.items())
    try:
        # Both are looked at before anything is allocated: the frame's own claim, and that it is what the counts need.
        claimed = zstandard.frame_content_size(body)
        if claimed != expected:
            raise Damaged(f"{_WHAT}: rows of {claimed} bytes, but the counts ask for {expected}")
        # A frame of nothing has no bytes to decompress.
        raw = zstandard.ZstdDecompressor(max_window_size=64 << 20).decompress(body) if expected else b""
    except zstandard.ZstdError as error:
        raise Damaged(f"{_WHAT}: {error}") from error
    tables: dict[str, Rows] = {}
    at = 0
    for table, (row, _) in _TABLES.items():
        found = np.empty(rows[table], row)
        for index, name in enumerate(row.names or ()):
            column = np.frombuffer(raw, row[name], count=rows[table], offset=at)
            found[name] = np.cumsum(column, dtype=column.dtype) if index == 0 else column
            at += column.nbytes
        tables[table] = found
    return tables


def _head(fields: strict_json.Fields) -> RecordHead:
    facts = fields.texts("facts")
    if len(facts) > FACTS_MAX:
        fields.refuse("facts", f"{len(facts)} of them, more than {FACTS_MAX}")
    return RecordHead(
        snapshot=fields.name("snapshot"),
        digest=fields.hexadecimal("digest", size=32).hex(),
        snapshot_url=fields.name("snapshot_url"),
        mountpoint=fields.name("mountpoint"),
        pid=fields.integer("pid", most=1 << 32),
        started_s=fields.number("started_s", least=0, most=1e11),
        chunk_bytes=fields.integer("chunk_bytes", most=_NUMBER_MAX),
        stored_bytes=fields.integer("stored_bytes", most=_NUMBER_MAX),
        files=tuple(
            RecordedFile(
                name=_file_name(file, "name"),
                size=file.integer("size", most=_NUMBER_MAX),
                base=file.integer("base", most=_NUMBER_MAX),
            )
            for file in fields.members("files", most=len(IMAGE_FILES))
        ),
        facts=facts,
    )


def _handle(fields: strict_json.Fields) -> RecordedHandle:
    closed_us = None if fields.absent("closed_us") else fields.integer("closed_us", most=_NUMBER_MAX)
    return RecordedHandle(_file_name(fields, "file"), fields.integer("opened_us", most=_NUMBER_MAX), closed_us)


def _file_name(fields: strict_json.Fields, name: str) -> str:
    found = fields.name(name)
    if found not in IMAGE_FILES:
        fields.refuse(name, f"{found[:80]!r} is no file of an image")
    return found


def _check(record: Record) -> None:
    """Refuse rows that no recorder can have written; after this they can be used as indices and added up."""
    reads, gets, releases = record.reads, record.gets, record.releases
    for name, column, most in (
        ("began_us of a read", reads["began_us"], _NUMBER_MAX),
        ("start of a read", reads["start"], _NUMBER_MAX),
        ("began_us of a GET", gets["began_us"], _NUMBER_MAX),
        ("at_us of a release", releases["at_us"], _NUMBER_MAX),
    ):
        if len(column) and int(column.max()) > most:
            raise Damaged(f"{_WHAT}: {name}: {int(column.max())} is more than {most}")
    handles = reads["handle"][reads["handle"] != NO_HANDLE]
    if len(handles) and int(handles.max()) >= len(record.handles):
        raise Damaged(f"{_WHAT}: a read of handle {int(handles.max())} of {len(record.handles)}")
    for times in (reads["began_us"], gets["began_us"], releases["at_us"]):
        if np.any(times[1:] < times[:-1]):  # the differences ran over
            raise Damaged(f"{_WHAT}: times that run backwards")
