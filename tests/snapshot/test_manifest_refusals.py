"""The table of what a manifest is refused for, although its SHA-256 is right; each refusal names the field."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import zstandard

from streamd.errors import Damaged, Refused
from streamd.snapshot.manifest import Manifest, decode, encode

Change = Callable[[Any], object]


def head(path: str, value: object) -> Change:
    """Set the member of the head at a path such as `files.0.name`."""
    *parents, last = path.split(".")

    def change(parts: Any) -> None:
        at = parts.head
        for key in parents:
            at = at[int(key) if key.isdigit() else key]
        at[int(last) if last.isdigit() else last] = value

    return change


def without(path: str) -> Change:
    """Delete the member of the head at a path."""
    *parents, last = path.split(".")

    def change(parts: Any) -> None:
        at = parts.head
        for key in parents:
            at = at[int(key) if key.isdigit() else key]
        del at[int(last) if last.isdigit() else last]

    return change


def row(column: str, index: int, value: object) -> Change:
    """Set a value of a column."""
    return lambda parts: parts.columns[column].__setitem__(index, value)


def attribute(name: str, value: object) -> Change:
    """Set something of the manifest's frame."""
    return lambda parts: setattr(parts, name, value)


def text(old: bytes, new: bytes) -> Change:
    """Replace in the head's text."""

    def change(parts: Any) -> None:
        whole = json.dumps(parts.head).encode()
        assert old in whole
        parts.head_bytes = whole.replace(old, new, 1)

    return change


def all_of(*changes: Change) -> Change:
    """Make several changes."""
    return lambda parts: [change(parts) for change in changes]


def body(make: Callable[[bytes], bytes]) -> Change:
    """Change the body, as compressed."""

    def change(parts: Any) -> None:
        raw = b"".join(column.tobytes() for column in parts.columns.values())
        parts.body = make(zstandard.ZstdCompressor().compress(raw))

    return change


def cut_in_its_checksum(frame: bytes) -> bytes:
    """Compress again, with a checksum at the end, of which the last byte is then missing."""
    raw = zstandard.ZstdDecompressor().decompress(frame)
    return zstandard.ZstdCompressor(write_checksum=True).compress(raw)[:-1]


# id: (what is changed in the example, what the message must say)
DAMAGED: dict[str, tuple[Change, str]] = {
    # the frame
    "another magic": (attribute("magic", b"PODSNAPX"), "does not start with"),
    "head longer than what is there": (attribute("sizes", (2**32 - 1, 10, 10)), "head"),
    "bytes between body and SHA-256": (attribute("after", b"x"), "body"),
    "body claims 4 GiB": (attribute("raw_bytes", 2**32 - 1), "body"),
    "body claims nothing": (attribute("raw_bytes", 0), "body"),
    "body that is no zstd frame": (attribute("body", b"x" * 50), "body"),
    "body that is empty": (attribute("body", b""), "body"),
    "body cut": (body(lambda data: data[:-1]), "body"),
    "bytes after the body's frame": (body(lambda data: data + b"x"), "body: bytes after its end"),
    "a second frame in the body": (body(lambda data: data + data), "body: bytes after its end"),
    "body that is a bomb": (
        attribute("body", zstandard.ZstdCompressor().compress(bytes(1 << 24))),
        "more than its 349 bytes",
    ),
    "body that wants a window of 1 GiB": (attribute("body", bytes.fromhex("28b52ffd00a0010000")), "too much memory"),
    "body whose bytes are all there but not its end": (body(cut_in_its_checksum), "decompresses to 349 bytes"),
    # JSON
    "head that is no JSON": (attribute("head_bytes", b"{"), "not JSON"),
    "head that is a list": (attribute("head_bytes", b"[]"), "not an object"),
    "head that is not UTF-8": (text(b'"none"', b'"\xff"'), "not JSON"),
    "head nested too deep": (attribute("head_bytes", b'{"a":' + b"[" * 60_000 + b"]" * 60_000 + b"}"), "nested"),
    "head of a million lists": (attribute("head_bytes", b'{"a":[' + b"[]," * 10**6 + b"1]}"), "lists and objects"),
    "head beyond its limit": (attribute("head_bytes", b"{" + b" " * (9 << 20) + b"}"), "head"),
    "a member twice": (text(b'"chunk_bytes"', b'"push_id": "x", "chunk_bytes"'), "push_id.*twice"),
    "NaN": (text(b"1764500000.25", b"NaN"), "NaN"),
    "Infinity": (text(b"1764500000.25", b"Infinity"), "Infinity"),
    "a float that overflows": (text(b"1764500000.25", b"1e999"), "created_s"),
    "a number of 1000 digits": (text(b"8192", b"9" * 1000), "a number of 1000 digits"),
    "a number of 5000 digits": (text(b"8192", b"9" * 5000), "digits"),
    # members
    "created before the epoch": (head("created_s", -1), "created_s"),
    "created after the year 9999": (head("created_s", 1e12), "created_s"),
    "created at a text": (head("created_s", "now"), "created_s"),
    "created at true": (head("created_s", True), "created_s"),
    "no id": (without("id"), "id"),
    "id with a slash": (head("id", "a/b"), "id"),
    "id with dots": (head("id", ".."), "id"),
    "id of 64 characters": (head("id", "a" * 64), "id"),
    "id with a line feed": (head("id", "a\n"), "id"),
    "id that is a number": (head("id", 5), "id"),
    "push id in upper case": (head("push_id", "A"), "push_id"),
    "requires missing": (without("requires"), "requires"),
    "requires a number": (head("requires", [1]), "requires"),
    "metadata that is a list": (head("metadata", []), "metadata"),
    "metadata with a number": (head("metadata", {"a": 1}), "metadata"),
    "metadata with NUL": (head("metadata", {"a": "\0"}), "metadata"),
    "metadata with half a surrogate pair": (head("metadata", {"a": "\ud800"}), "metadata"),
    "chunk size 0": (head("chunk_bytes", 0), "chunk_bytes"),
    "chunk size of no whole pages": (head("chunk_bytes", 8193), "chunk_bytes"),
    "chunk size beyond 16 MiB": (head("chunk_bytes", (16 << 20) + 4096), "chunk_bytes"),
    "chunk size that is a float": (head("chunk_bytes", 8192.0), "chunk_bytes"),
    # files
    "no files": (head("files", []), "files: names"),
    "a file too few": (without("files.1"), "files: names"),
    "a file name with ..": (head("files.2.name", "../pages.img"), "files"),
    "a file name with a slash": (head("files.2.name", "/pages.img"), "files"),
    "a file name with NUL": (head("files.2.name", "pages.img\0"), "files"),
    "a file name of 300 bytes": (head("files.2.name", "p" * 300), "files"),
    "a file name of a megabyte": (head("files.2.name", "p" * 10**6), "name"),
    "a checkpoint.img that no mount could hold": (
        head("files.0.size", (256 << 20) + 1),
        r"files\[0\]\.size: 268435457 is not",
    ),
    "a pages_meta.img that no mount could hold": (
        head("files.1.size", (64 << 20) + 1),
        r"files\[1\]\.size: 67108865 is not",
    ),
    "more members than an object may have": (
        head("metadata", {str(number): "" for number in range(2**16 + 1)}),
        "65537 members",
    ),
    "a file name twice": (head("files.1.name", "pages.img"), "files"),
    "files in another order": (lambda p: p.head["files"].insert(0, p.head["files"].pop()), "files"),
    "a file called gcs_opts.json": (head("files.0.name", "gcs_opts.json"), "files"),
    "a file too many": (lambda p: p.head["files"].append(p.head["files"][0]), "files"),
    "a file's size one too small": (head("files.2.size", 32767), "files.2..size"),
    "a file's size below 0": (head("files.2.size", -1), "size"),
    "a file's size beyond 64 bits": (head("files.2.size", 2**64 + 32768), "size"),
    "a file's size that is a text": (head("files.2.size", "32768"), "size"),
    "a file's first chunk wrong": (head("files.2.first_chunk", 2), "files.2..first_chunk"),
    "chunks moved from one file to the next": (
        all_of(head("files.1.chunk_count", 2), head("files.2.chunk_count", 4), head("files.2.first_chunk", 4)),
        "files.1..size",
    ),
    "fewer chunks than rows": (head("files.2.chunk_count", 4), "body: 349 bytes"),
    "2**32 chunks": (head("files.2.chunk_count", 2**32), "chunk_count"),
    "5 million chunks in two files": (
        all_of(head("files.1.chunk_count", 2_500_000), head("files.2.chunk_count", 2_500_000)),
        "files.*chunks",
    ),
    "4 million chunks and no rows": (head("files.2.chunk_count", 4_000_000), "body"),
    "4 million chunks and a body that claims them": (
        all_of(head("files.2.chunk_count", 4_000_000), attribute("raw_bytes", 4_000_003 * 33 + 5 * 17)),
        "body: decompresses",
    ),
    # packs
    "a pack of 0 bytes": (head("packs.1.size", 0), "packs.1..size"),
    "a pack beyond 1 GiB": (head("packs.1.size", 2**30 + 1), "packs.1..size"),
    "a pack's crc32c beyond 32 bits": (head("packs.1.crc32c", 2**32), "crc32c"),
    "a pack's crc32c that is true": (head("packs.1.crc32c", True), "crc32c"),
    "a pack's SHA-256 too short": (head("packs.0.sha256", "ab" * 31), "sha256"),
    "a pack's SHA-256 not hexadecimal": (head("packs.0.sha256", "xy" * 32), "sha256"),
    "a pack of another snapshot": (head("packs.0.snapshot", "other"), "snapshot"),
    "packs that are an object": (head("packs", {}), "packs"),
    "packs too many": (lambda p: p.head.update(packs=p.head["packs"][:1] * (2**16 + 1)), "packs"),
    # chunks
    "a chunk of no bytes": (row("length", 0, 0), "length"),
    "a chunk longer than chunk_bytes": (row("length", 0, 12288), "length"),
    "a length of 4 GiB - 1": (row("length", 3, 2**32 - 1), "length"),
    "an unaligned chunk that isn't its file's last": (row("length", 0, 8191), "length.*row 0"),
    "lengths that sum to more": (row("length", 1, 1001), "files.0..size"),
    "an unknown codec": (row("codec", 3, 3), "codec.*row 3"),
    "a zero chunk in a pack": (row("pack", 2, 1), "pack.*row 2"),
    "a zero chunk with an offset": (row("offset", 2, 1), "offset.*row 2"),
    "a zero chunk with a frame": (row("frame_bytes", 2, 1), "frame_bytes.*row 2"),
    "a zero chunk with a checksum": (row("digest", 2, 1), "digest.*row 2"),
    "a raw frame of another length": (row("frame_bytes", 1, 999), "frame_bytes.*row 1"),
    "a zstd frame of no bytes": (row("frame_bytes", 3, 0), "frame_bytes.*row 3"),
    "a zstd frame longer than its chunk": (row("frame_bytes", 5, 8193), "frame_bytes.*row 5"),
    "a pack that isn't there": (row("pack", 3, 2), "pack.*row 3"),
    "pack 2**32 - 1": (row("pack", 3, 2**32 - 1), "pack.*row 3"),
    "a frame that ends beyond its pack": (head("packs.0.size", 9491), "offset.*row 3"),
    "an offset whose end overflows 32 bits": (row("offset", 3, 2**32 - 1), "offset.*row 3"),
    "frames that overlap": (row("offset", 1, 299), "offset.*row 1"),
    "frames that overlap, the later chunk's first": (row("offset", 5, 4097), "offset.*row 5"),
    "two chunks at one place": (row("offset", 3, 300), "offset.*row [13]"),
    "no packs at all": (head("packs", []), "pack"),
    # gVisor's part
    "no gvisor part": (without("gvisor"), "gvisor"),
    "a version with an escape sequence": (head("gvisor.runsc_version", "\x1b[2J"), "runsc_version"),
    "a container name with a line feed": (head("gvisor.container_names.0", "a\nb"), "container_names"),
    "a container name of a megabyte": (head("gvisor.container_names.0", "a" * 10**6), "container_names"),
    "container names that are a text": (head("gvisor.container_names", "abc"), "container_names"),
    "runsc's SHA-256 in upper case": (head("gvisor.runsc_sha256", "AB" * 32), "runsc_sha256"),
    "CPU features that are a text": (head("gvisor.cpu_features", "avx"), "cpu_features"),
    "no memory files": (head("gvisor.memory_files", []), "memory_files|body"),
    "no main memory file": (head("gvisor.memory_files.0.private", True), "memory_files"),
    "two main memory files": (head("gvisor.memory_files.1.private", False), "memory_files"),
    "a private that is a number": (head("gvisor.memory_files.1.private", 1), "private"),
    "page ranges below 0": (head("gvisor.memory_files.0.range_count", -1), "range_count"),
    "page ranges beyond any image": (head("gvisor.memory_files.0.range_count", 2**40), "range_count"),
    "page ranges too many in all": (
        all_of(head("gvisor.memory_files.0.range_count", 2**22), head("gvisor.memory_files.1.range_count", 2**22)),
        "memory_files.*ranges",
    ),
    "a page range given to another memory file": (
        all_of(head("gvisor.memory_files.0.range_count", 2), head("gvisor.memory_files.1.range_count", 2)),
        "memory_files.1..ranges",
    ),
    "an unaligned page range": (row("range_start", 0, 1), "ranges.*4096"),
    "an empty page range": (row("range_end", 1, 16384), "ranges"),
    "a page range that ends before it starts": (row("range_end", 1, 12288), "ranges"),
    "page ranges that overlap": (row("range_start", 1, 8192), "ranges"),
    "page ranges that sum to more than pages.img": (row("range_end", 1, 24576), "sum to"),
    "a page range that overflows": (row("range_end", 2, 2**64 - 4096), "sum to"),
}
REFUSED: dict[str, tuple[Change, str]] = {
    "version 0": (attribute("version", 0), "version 0"),
    "version 2": (attribute("version", 2), "version 2"),
    "version 2, and nothing else of it as in version 1": (
        all_of(attribute("version", 2), attribute("sizes", (9, 9, 9)), attribute("head_bytes", b"?")),
        "version 2",
    ),
    "a required feature that is unknown": (head("requires", ["delta-packs"]), "'delta-packs'"),
    "a required feature, and members that it changes": (
        all_of(head("requires", ["delta-packs"]), head("packs", "elsewhere")),
        "'delta-packs'",
    ),
    "a tombstone": (attribute("magic", b"PODSNAPT"), "being removed"),
}
CASES = [(name, Damaged, *case) for name, case in DAMAGED.items()] + [
    (name, Refused, *case) for name, case in REFUSED.items()
]


@pytest.mark.parametrize(("error", "change", "says"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_manifest_is_refused_that_has(
    error: type[Exception], change: Change, says: str, example: Manifest, take_apart: Callable[[bytes], Any]
) -> None:
    parts = take_apart(encode(example))
    decode(parts.sealed())
    change(parts)
    with pytest.raises(error, match=says) as caught:
        decode(parts.sealed())
    assert len(str(caught.value)) < 600


def test_what_would_be_refused_is_not_written(example: Manifest) -> None:
    for wrong in (
        replace(example, snapshot_id="../x"),
        replace(example, chunk_bytes=4096),
        replace(example, packs=example.packs[:1]),
        replace(example, metadata={"a": "\0"}),
        replace(example, created_s=-1.0),
        replace(example, gvisor=replace(example.gvisor, memory_files=())),
    ):
        with pytest.raises(Damaged):
            encode(wrong)
    with pytest.raises(Refused):
        encode(replace(example, requires=("delta-packs",)))


def test_columns_of_another_type_are_a_bug(example: Manifest) -> None:
    wide = replace(example.table, offset=example.table.offset.astype(np.int64))
    with pytest.raises(ValueError, match="offset"):
        encode(replace(example, table=wide))
