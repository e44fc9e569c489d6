"""pages_meta.img: real ones add up; written ones come back; others are refused, in bounded memory."""

import tracemalloc
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamd.errors import Damaged, Refused, StreamdError
from streamd.snapshot.memory import MemoryFile, PageRange, check_memory_files
from streamd.snapshot.pages_meta import _numbers, _row, decode_pages_meta

OWNERS = "pkg/sentry/kernel.privateMemoryFileMetadata"
PAGE = 4096


def uint(value: int) -> bytes:
    """Write a varint."""
    low, high = value & 0x7F, value >> 7
    return bytes([low | 0x80]) + uint(high) if high else bytes([low])


def text(value: str) -> bytes:
    """Write a string of the state encoding, without a tag."""
    return uint(len(value.encode())) + value.encode()


def message(*fields: tuple[int, int | bytes]) -> bytes:
    """Write a protobuf message."""
    return b"".join(
        uint(number << 3) + uint(value) if isinstance(value, int) else uint(number << 3 | 2) + uint(len(value)) + value
        for number, value in fields
    )


def memory_file(*ranges: tuple[int, int, int, bool], version: int = 1) -> bytes:
    """Write a memory file with these (start, end, kind, committed), and a field of each other kind."""
    accounts = [
        (3, message((1, start), (2, end), (3, kind), (4, 6), (5, int(committed))))
        for start, end, kind, committed in ranges
    ]
    proto = message((1, version), (2, message((1, 1))), *accounts, (4, b""), (8, message((1, 5), (2, 6))))
    return len(proto).to_bytes(8, "little") + proto


def owners(count: int, *, capacity: int | None = None) -> bytes:
    """Write the state-encoded list of the owners of `count` private memory files, as gVisor does."""
    capacity = count if capacity is None else capacity
    root_type = uint(17) + text(OWNERS) + uint(1) + text("owners")
    if not capacity:
        return uint(1 << 63 | 1) + root_type + uint(2) + uint(1) + uint(11) + uint(1) + uint(5)
    owner_type = uint(17) + text("pkg/sentry/checkpoint.ResourceID") + uint(2) + text("ContainerName") + text("Path")
    root = uint(2) + uint(1) + uint(11) + uint(1) + uint(8) + uint(count) + uint(capacity) + uint(2) + uint(0)
    owner = [uint(2) + uint(13) + uint(2) + uint(7) + text(f"c{n}") + uint(7) + text("/") for n in range(capacity)]
    array = uint(2) + uint(2) + uint(9) + uint(capacity) + uint(11) + b"".join(owner)
    return uint(1 << 63 | 2) + root_type + owner_type + root + array


@st.composite
def accounts(draw: st.DrawFn) -> list[tuple[int, int, int, bool]]:
    """Make ascending ranges, committed or not."""
    edges = sorted(draw(st.sets(st.integers(0, 2**52 - 1), max_size=12)))
    return [
        (start * PAGE, end * PAGE, draw(st.integers(0, 5)), draw(st.booleans()))
        for start, end in pairwise(edges)
        if draw(st.booleans())
    ]


@pytest.mark.parametrize(
    ("name", "pages_bytes", "private_bytes"),
    [("readonly", 135168, []), ("writable", 3137536, [3002368]), ("pod", 1064960, [303104, 503808])],
)
def test_a_real_one_adds_up(name: str, pages_bytes: int, private_bytes: list[int], here: Path) -> None:
    files = decode_pages_meta((here / "fixtures" / f"{name}.pages_meta.img").read_bytes())
    check_memory_files(files, pages_bytes=pages_bytes, what="pages_meta.img")
    assert sorted(file.committed_bytes for file in files if file.private) == private_bytes
    assert files[0].ranges[0].start == 0
    assert {row.kind for file in files[1:] for row in file.ranges} <= {2, 3}


@pytest.mark.parametrize("name", ["readonly", "writable", "pod"])
def test_a_real_one_cut_anywhere_is_refused(name: str, here: Path) -> None:
    data = (here / "fixtures" / f"{name}.pages_meta.img").read_bytes()
    for end in range(len(data)):
        with pytest.raises(Damaged, match="pages_meta"):
            decode_pages_meta(data[:end])
    with pytest.raises(Damaged, match="after its end"):
        decode_pages_meta(data + b"\0")


@pytest.mark.parametrize("name", ["readonly", "writable", "pod"])
def test_a_real_one_with_a_flipped_bit_is_read_or_refused(name: str, here: Path) -> None:
    data = bytearray((here / "fixtures" / f"{name}.pages_meta.img").read_bytes())
    tracemalloc.start()
    try:
        for bit in range(0, 8 * len(data), 7):  # each of a byte's bits in turn
            data[bit // 8] ^= 1 << bit % 8
            with suppress(StreamdError):
                decode_pages_meta(data)
            data[bit // 8] ^= 1 << bit % 8
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


@given(main=accounts(), private=st.lists(accounts(), max_size=4), spare=st.integers(0, 4))
def test_what_gvisor_writes_is_read(
    main: list[tuple[int, int, int, bool]], private: list[list[tuple[int, int, int, bool]]], spare: int
) -> None:
    data = memory_file(*main) + owners(len(private), capacity=len(private) + spare * bool(private))
    data += b"".join(memory_file(*rows) for rows in private)
    assert decode_pages_meta(data) == tuple(
        MemoryFile(index > 0, tuple(PageRange(start, end, kind) for start, end, kind, committed in rows if committed))
        for index, rows in enumerate([main, *private])
    )


@pytest.mark.parametrize(
    ("data", "error", "says"),
    [
        (b"", Damaged, "empty"),
        (bytes(8), Refused, "version 0"),
        (memory_file(version=2) + owners(0), Refused, "version 2"),
        ((2**64 - 1).to_bytes(8, "little") + b"x", Damaged, "cut short"),
        (memory_file(), Damaged, "cut short"),
        (memory_file() + uint(5), Damaged, "announces no objects"),
        (memory_file() + uint(1 << 63 | 2**40) + uint(17), Damaged, "cut short"),
        (memory_file() + uint(1 << 63), Damaged, "root object"),
        (memory_file() + owners(0).replace(b"owners", b"owner5"), Damaged, "owners"),
        (memory_file() + owners(0).replace(b"kernel", b"colonel"), Damaged, "cut short|root|unknown"),
        (memory_file() + owners(0)[:-1] + uint(7) + text("x"), Damaged, "not a list"),
        (memory_file() + owners(2**20, capacity=1), Damaged, "1048576 private"),
        (memory_file() + owners(2), Damaged, "cut short"),
        (memory_file() + owners(0) + memory_file(), Damaged, "after its end"),
        (memory_file((0, PAGE, 256, True)) + owners(0), Damaged, "kind"),
        (memory_file() + uint(1 << 63 | 1) + uint(2) + uint(1) + uint(9) + uint(2**60) + uint(5), Damaged, "values"),
        (memory_file() + uint(1 << 63 | 1) + uint(17) + text("T") + uint(2**20), Damaged, "values"),
        (memory_file() + uint(1 << 63 | 1) + uint(2) + uint(1) + uint(6) + uint(1) + uint(2**20), Damaged, "values"),
        (memory_file() + uint(1 << 63 | 1) + uint(2) + uint(1) + uint(7) + uint(2**62), Damaged, "cut short"),
        (memory_file() + uint(1 << 63 | 1) + uint(2) + uint(1) + (uint(13) + uint(1)) * 5000, Damaged, "levels"),
        (memory_file() + uint(1 << 63 | 1) + uint(2) + uint(1) + uint(14) + uint(1) * 5000, Damaged, "levels"),
        (memory_file() + b"\xff" * 11, Damaged, "ten bytes"),
        (memory_file() + b"\xff" * 9 + b"\x7f", Damaged, "64 bits"),
    ],
)
def test_what_gvisor_does_not_write_is_refused(data: bytes, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        decode_pages_meta(data)


def test_more_ranges_than_a_manifest_may_have_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamd.snapshot.pages_meta.MAX_PAGE_RANGES", 3)
    rows = [(number * 2 * PAGE, number * 2 * PAGE + PAGE, 0, True) for number in range(5)]
    assert len(decode_pages_meta(memory_file(*rows[:2]) + owners(1) + memory_file(*rows[:1]))) == 2
    for data in (memory_file(*rows), memory_file(*rows[:2]) + owners(1) + memory_file(*rows[:3])):
        with pytest.raises(Damaged, match="more than 3 ranges"):
            decode_pages_meta(data)


@pytest.mark.parametrize(
    ("field", "count"),
    [((3, message((1, 0), (2, PAGE))), 100), ((2, b""), 100), ((3, message((2, b"x" * 10))), 10)],
    ids=["ranges that are not committed", "other fields", "ranges with fields that gVisor does not write"],
)
def test_what_is_no_range_costs_time_too_and_is_counted(
    field: tuple[int, bytes], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamd.snapshot.pages_meta._MAX_ROWS", 100)
    proto = message((1, 1), *[field] * count)
    with pytest.raises(Damaged, match="ranges of memory"):
        decode_pages_meta(len(proto).to_bytes(8, "little") + proto + owners(0))


@given(fields=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 2**64 - 1)), max_size=8))
def test_a_row_is_read_the_same_quickly_and_slowly(fields: list[tuple[int, int]]) -> None:
    quick = _row(message(*fields))
    assert quick in ({}, _numbers(message(*fields), "row"))


@given(data=st.binary(max_size=30))
def test_any_row_that_is_read_quickly_is_read_slowly(data: bytes) -> None:
    quick = _row(data)
    if quick:
        assert quick == _numbers(data, "row")


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ((), "main one"),
        ((MemoryFile(True, ()),), "main one"),
        ((MemoryFile(False, ()), MemoryFile(False, ())), "main one"),
        ((MemoryFile(False, (PageRange(0, 100, 0),)),), "multiples"),
        ((MemoryFile(False, (PageRange(0, 0, 0),)),), "empty"),
        ((MemoryFile(False, (PageRange(8192, 4096, 0),)),), "empty or ends before"),
        ((MemoryFile(False, (PageRange(4096, 8192, 0), PageRange(0, 4096, 0))),), "ascend"),
        ((MemoryFile(False, (PageRange(0, 8192, 0), PageRange(4096, 12288, 0))),), "overlap"),
        ((MemoryFile(False, (PageRange(0, 4096, 0),)),), "sum to 4096 bytes, but pages.img has 8192"),
        ((MemoryFile(False, (PageRange(0, 4096, 0),)), MemoryFile(True, (PageRange(0, 8192, 0),))), "sum to 12288"),
        ((MemoryFile(False, (PageRange(0, 2**64 - 4096, 0),)), MemoryFile(True, (PageRange(0, 12288, 0),))), "sum to"),
    ],
)
def test_ranges_that_cannot_be_those_of_pages_img_are_refused(files: tuple[MemoryFile, ...], says: str) -> None:
    with pytest.raises(Damaged, match=says):
        check_memory_files(files, pages_bytes=8192, what="pages_meta.img")
