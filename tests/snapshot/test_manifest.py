"""Manifests: what is written is read, the same way for ever, and nothing else is taken for one."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamd.errors import Damaged, Refused
from streamd.snapshot.chunks import check_chunks
from streamd.snapshot.manifest import (
    ChunkTable,
    Codec,
    GvisorInfo,
    ImageFile,
    Manifest,
    MemoryFile,
    Pack,
    PageRange,
    PageRanges,
    decode,
    encode,
    manifest_digest,
)

Values = Callable[[Manifest], dict[str, object]]
TakeApart = Callable[[bytes], Any]
PAGE = 4096

texts = st.text(st.characters(exclude_categories=("C", "Z")), max_size=12)
ids = st.from_regex(r"[a-z0-9][a-z0-9-]{0,62}", fullmatch=True)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    """Make any valid manifest of a few dozen chunks, frames in any order, with gaps between them."""
    most_pages = draw(st.integers(1, 64))
    lengths: list[int] = []
    files: list[ImageFile] = []
    for name in ("checkpoint.img", "pages_meta.img", "pages.img"):
        mine = [PAGE * n for n in draw(st.lists(st.integers(1, most_pages), max_size=12))]
        if mine and name != "pages.img" and draw(st.booleans()):
            mine[-1] -= draw(st.integers(1, PAGE - 1))
        files.append(ImageFile(name, sum(mine), len(lengths), len(mine)))
        lengths += mine
    codec = draw(st.lists(st.integers(0, 2), min_size=len(lengths), max_size=len(lengths)))
    pack, offset, frame_bytes = [0] * len(lengths), [0] * len(lengths), [0] * len(lengths)
    packs = [0]
    for row in draw(st.permutations(range(len(lengths)))):
        if codec[row] == 0:
            continue
        if packs[-1] and draw(st.integers(0, 4)) == 0:
            packs.append(0)
        gap = draw(st.sampled_from((0, 0, 0, 1, 777)))
        frame_bytes[row] = lengths[row] if codec[row] == 1 else draw(st.integers(1, lengths[row]))
        pack[row], offset[row] = len(packs) - 1, packs[-1] + gap
        packs[-1] = offset[row] + frame_bytes[row]
    digest = np.frombuffer(draw(st.binary(min_size=16 * len(lengths), max_size=16 * len(lengths))), np.uint8)
    digest = digest.reshape(-1, 16).copy()
    digest[[row for row, how in enumerate(codec) if how == 0]] = 0
    return Manifest(
        snapshot_id=draw(ids),
        push_id=draw(ids),
        created_s=draw(st.floats(0, 2e11)),
        chunk_bytes=PAGE * most_pages,
        files=tuple(files),
        packs=tuple(
            Pack(
                size + draw(st.integers(0, 9)),
                draw(st.integers(0, 2**32 - 1)),
                draw(st.binary(min_size=32, max_size=32)),
            )
            for size in packs
            if size
        ),
        table=ChunkTable(
            length=np.array(lengths, np.uint32),
            codec=np.array(codec, np.uint8),
            pack=np.array(pack, np.uint32),
            offset=np.array(offset, np.uint32),
            frame_bytes=np.array(frame_bytes, np.uint32),
            digest=digest,
        ),
        gvisor=GvisorInfo(
            runsc_version=draw(texts),
            network=draw(texts),
            container_names=tuple(draw(st.lists(texts, max_size=3))),
            memory_files=tuple(draw(memory_files(files[-1].size // PAGE))),
            runsc_sha256=draw(st.none() | st.from_regex(r"[0-9a-f]{64}", fullmatch=True)),
            cpu_features=draw(st.none() | st.lists(texts, max_size=3).map(tuple)),
        ),
        metadata=draw(
            st.dictionaries(texts, st.text(st.characters(codec="utf-8", exclude_characters="\0")), max_size=3)
        ),
        optional=tuple(draw(st.lists(texts, max_size=2))),
    )


@st.composite
def memory_files(draw: st.DrawFn, pages: int) -> list[MemoryFile]:
    """Cut that many pages into ranges, and these into memory files."""
    cuts = sorted(draw(st.sets(st.integers(1, pages - 1), max_size=8))) if pages > 1 else []
    ranges = [(a, b) for a, b in pairwise((0, *cuts, pages)) if b > a]
    files: list[list[PageRange]] = [[]]
    for first, last in ranges:
        if draw(st.booleans()):
            files.append([])
        shift = files[-1][-1].end // PAGE - first if files[-1] else 0
        start = first + max(0, shift) + draw(st.integers(0, 3))
        files[-1].append(PageRange(start * PAGE, (start + last - first) * PAGE, draw(st.integers(0, 255))))
    return [MemoryFile(index > 0, tuple(rows)) for index, rows in enumerate(files)]


@given(manifest=manifests())
@settings(max_examples=150)
def test_what_is_written_is_read_again(manifest: Manifest, values_of: Values) -> None:
    data = encode(manifest)
    again = decode(data)
    assert values_of(again) == values_of(manifest)
    assert encode(again) == data
    assert manifest_digest(data) == data[-32:]


def test_a_format_1_manifest_of_long_ago_is_still_read(example: Manifest, values_of: Values, here: Path) -> None:
    golden = (here / "golden" / "format-1.manifest").read_bytes()
    assert values_of(decode(golden)) == values_of(example)


def test_format_1_is_still_written_as_long_ago(example: Manifest, here: Path, take_apart: TakeApart) -> None:
    golden = take_apart((here / "golden" / "format-1.manifest").read_bytes())
    written = take_apart(encode(example))
    # Not byte by byte: another version of zstd may compress the body otherwise.
    assert (written.head, written.magic, written.version) == (golden.head, golden.magic, golden.version)
    assert {n: c.tobytes() for n, c in written.columns.items()} == {n: c.tobytes() for n, c in golden.columns.items()}


def test_an_independent_writers_manifest_is_read(example: Manifest, values_of: Values, take_apart: TakeApart) -> None:
    assert values_of(decode(take_apart(encode(example)).sealed())) == values_of(example)


def test_any_flipped_bit_is_refused(example: Manifest) -> None:
    data = bytearray(encode(example))
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises((Damaged, Refused)):
            decode(data)
        data[bit // 8] ^= 1 << bit % 8
    decode(data)


def test_any_truncation_is_refused(example: Manifest) -> None:
    data = encode(example)
    for length in range(len(data)):
        with pytest.raises(Damaged):
            decode(data[:length])


@given(after=st.binary(min_size=1, max_size=64))
def test_bytes_after_the_end_are_refused(example: Manifest, after: bytes) -> None:
    with pytest.raises(Damaged):
        decode(encode(example) + after)


def test_members_that_nobody_knows_are_ignored(example: Manifest, values_of: Values, take_apart: TakeApart) -> None:
    parts = take_apart(encode(example))
    parts.head["later"] = {"a": [1, None, 2.5]}
    parts.head["files"][0]["later"] = True
    assert values_of(decode(parts.sealed())) == values_of(example)


def test_a_table_of_80_gib_is_read(example: Manifest) -> None:
    """Such a table is the design's measure; how fast is for the benchmark."""
    count = 80 * 2**30 // 2**18
    codec = np.arange(count, dtype=np.uint32) % 3
    length = np.full(count, 2**18, np.uint32)
    frame_bytes = np.choose(codec, (0, 2**18, 99_000)).astype(np.uint32)
    per_pack = 300
    pack = np.arange(count, dtype=np.uint32) // per_pack
    before = np.cumsum(frame_bytes, dtype=np.uint64) - frame_bytes
    offset = (before - before[pack * per_pack]).astype(np.uint32)
    digest = np.arange(16 * count, dtype=np.uint32).astype(np.uint8).reshape(-1, 16)
    zero = codec == 0
    pack[zero], offset[zero], digest[zero] = 0, 0, 0
    size = int(length.sum(dtype=np.uint64)) - 2 * 2**18
    manifest = replace(
        example,
        chunk_bytes=2**18,
        files=(
            ImageFile("checkpoint.img", 2**18, 0, 1),
            ImageFile("pages_meta.img", 2**18, 1, 1),
            ImageFile("pages.img", size, 2, count - 2),
        ),
        packs=(Pack(2**26, 0, bytes(32)),) * int(pack.max() + 1),
        table=ChunkTable(
            length=length,
            codec=codec.astype(np.uint8),
            pack=pack,
            offset=offset,
            frame_bytes=frame_bytes,
            digest=digest,
        ),
        gvisor=replace(example.gvisor, memory_files=(MemoryFile(False, (PageRange(0, size, 1),)),)),
    )
    table = decode(encode(manifest)).table
    assert len(table) == count
    assert int(table.start[-1]) == 80 * 2**30
    assert np.array_equal(table.offset, offset)


def test_the_start_of_a_chunk_is_the_sum_of_those_before(example: Manifest) -> None:
    lengths = example.table.length.tolist()
    assert example.table.start.tolist() == [sum(lengths[:n]) for n in range(len(lengths) + 1)]


def test_page_ranges_are_a_sequence_like_a_tuple() -> None:
    rows = (PageRange(0, 4096, 1), PageRange(8192, 2**63, 255), PageRange(2**63, 2**64 - 4096, 0))
    ranges = PageRanges.of(rows)
    assert ranges == rows
    assert rows == ranges
    assert tuple(ranges) == rows
    assert ranges[1] == rows[1]
    assert ranges[-1] == rows[-1]
    assert ranges[1:] == rows[1:]
    assert ranges != rows[1:]
    assert MemoryFile(False, rows).committed_bytes == sum(row.end - row.start for row in rows)


frames = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 12), st.integers(0, 3)), min_size=1, max_size=8)


@given(frames=frames)
@settings(max_examples=300)
def test_frames_that_share_a_byte_are_refused_and_no_others_in_whatever_order(
    frames: list[tuple[int, int, int]],
) -> None:
    """A frame is its pack, its offset and its bytes; one of no bytes is a zero chunk."""
    taken = [(pack, byte) for pack, offset, size in frames for byte in range(offset, offset + size)]
    stored = np.array([size > 0 for _, _, size in frames])
    table = ChunkTable(
        length=np.full(len(frames), PAGE, np.uint32),
        codec=np.where(stored, Codec.ZSTD, Codec.ZERO).astype(np.uint8),
        pack=np.array([pack if size else 0 for pack, _, size in frames], np.uint32),
        offset=np.array([offset if size else 0 for _, offset, size in frames], np.uint32),
        frame_bytes=np.array([size for _, _, size in frames], np.uint32),
        digest=np.zeros((len(frames), 16), np.uint8),
    )
    may_be_refused = pytest.raises(Damaged, match="overlap") if len(set(taken)) < len(taken) else nullcontext()
    with may_be_refused:
        check_chunks(
            table,
            file_sizes=[PAGE * len(frames)],
            file_chunk_counts=[len(frames)],
            chunk_bytes=PAGE,
            pack_sizes=[99, 99],
        )
