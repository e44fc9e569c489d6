"""Arbitrary bytes into every decoder: an answer or an error of ours, and never memory that only a number asked for."""

import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.images import zeros_manifest
from streamd.errors import Damaged, StreamdError
from streamd.snapshot import Buffer, envelope, strict_json
from streamd.snapshot.frames import Decoder
from streamd.snapshot.manifest import Manifest, TablesTooLarge, decode, encode, tables_bytes
from streamd.snapshot.pages_meta import decode_pages_meta
from streamd.snapshot.statefile import decode_head
from streamd.snapshot.tombstone import decode_tombstone

DECODERS: dict[str, Callable[[Buffer], object]] = {
    "manifest": decode,
    "sealed manifest": lambda data: decode(envelope.seal(b"PODSNAPM", 1, (data,))),
    "tombstone": decode_tombstone,
    "sealed tombstone": lambda data: decode_tombstone(envelope.seal(b"PODSNAPT", 1, (data,))),
    "checkpoint.img": decode_head,
    "pages_meta.img": decode_pages_meta,
    "zstd frame": lambda data: Decoder().decode(data, codec=2, length=1 << 20, digest=bytes(16)),
    "raw frame": lambda data: Decoder().decode(data, codec=1, length=1 << 20, digest=bytes(16)),
}


@pytest.fixture
def peak_bytes() -> Iterator[Callable[[], int]]:
    """Give the most memory that Python held at once since the test began."""
    tracemalloc.start()
    yield lambda: tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()


@pytest.mark.parametrize("decoder", DECODERS.values(), ids=DECODERS)
@given(data=st.binary(max_size=400))
@settings(max_examples=200)
def test_any_bytes_give_an_answer_or_an_error_of_ours(decoder: Callable[[Buffer], object], data: bytes) -> None:
    for buffer in (data, bytearray(data), memoryview(data)):
        with suppress(StreamdError):
            decoder(buffer)


@given(data=st.data())
@settings(max_examples=300)
def test_a_manifest_with_any_bytes_changed_and_sealed_again_is_read_or_refused(example: Manifest, data: Any) -> None:
    """What a hostile writer can do, who can compute a SHA-256."""
    whole = bytearray(encode(example)[12:-32])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(whole) - 1))
        whole[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
    with suppress(StreamdError):
        manifest = decode(envelope.seal(b"PODSNAPM", 1, (whole,)))
        encode(manifest)


def test_numbers_that_claim_much_cost_nothing(
    example: Manifest, take_apart: Callable[[bytes], Any], peak_bytes: Callable[[], int]
) -> None:
    parts = take_apart(encode(example))
    parts.head["files"][2]["chunk_count"] = 4_000_000
    parts.head["gvisor"]["memory_files"][2]["range_count"] = 4_000_000
    parts.raw_bytes = 4_000_003 * 33 + 4_000_004 * 17
    with pytest.raises(StreamdError, match="body"):
        decode(parts.sealed())
    for data in (
        b"gVisorSF" + (16 << 20).to_bytes(8, "big"),
        (1 << 40).to_bytes(8, "little"),
        bytes.fromhex("28b52ffd e0 0000000000010000"),  # zstd: content size 2**40
    ):
        for decoder in DECODERS.values():
            with suppress(StreamdError):
                decoder(data)
    assert peak_bytes() < 4 << 20


def test_a_few_kb_that_say_millions_of_chunks_are_refused_before_they_are_tables(
    peak_bytes: Callable[[], int],
) -> None:
    data = encode(zeros_manifest("zeros", 1_000_000))
    assert len(data) < 16 << 10
    needed_bytes = tables_bytes(chunks=1_000_000, ranges=1)
    tracemalloc.reset_peak()
    before_bytes = peak_bytes()
    with pytest.raises(TablesTooLarge, match="1000000 chunks and 1 page ranges take 41 MB") as caught:
        decode(data, tables_max_bytes=needed_bytes - 1)
    assert (caught.value.needed_bytes, caught.value.max_bytes) == (needed_bytes, needed_bytes - 1)
    assert peak_bytes() - before_bytes < 1 << 20


def test_tables_take_what_is_said_and_half_as_much_again_while_they_are_checked(
    peak_bytes: Callable[[], int],
) -> None:
    data = encode(zeros_manifest("zeros", 1_000_000))
    needed_bytes = tables_bytes(chunks=1_000_000, ranges=1)
    tracemalloc.reset_peak()
    before_bytes = tracemalloc.get_traced_memory()[0]
    manifest = decode(data, tables_max_bytes=needed_bytes)
    assert tracemalloc.get_traced_memory()[0] - before_bytes < 1.13 * needed_bytes  # it grew by an eighth at a time
    assert peak_bytes() - before_bytes < 1.7 * needed_bytes
    assert len(manifest.table) == 1_000_000


def test_a_bomb_is_not_blown_up(
    example: Manifest, take_apart: Callable[[bytes], Any], peak_bytes: Callable[[], int]
) -> None:
    parts = take_apart(encode(example))
    zstd = zstandard.ZstdCompressor().compressobj()
    parts.body = b"".join(zstd.compress(bytes(1 << 20)) for _ in range(128)) + zstd.flush()
    with pytest.raises(StreamdError, match="more than its"):
        decode(parts.sealed())
    assert peak_bytes() < 40 << 20


def test_a_head_of_many_small_values_costs_a_small_multiple(peak_bytes: Callable[[], int]) -> None:
    for value in (b"[],", b'"ab",', b"1000,", b"1.5,", b"null,"):
        head = b'{"requires":[' + value * (2**20 // len(value)) + b"0]}"
        with pytest.raises(StreamdError):
            DECODERS["sealed manifest"](len(head).to_bytes(4, "little") + bytes(8) + head)
    assert peak_bytes() < 24 << 20


class _Counted(str):
    """A text that counts how often one is compared."""

    __slots__ = ()
    comparisons = 0

    def __eq__(self, other: object) -> bool:
        _Counted.comparisons += 1
        return super().__eq__(other)

    __hash__ = str.__hash__


def test_a_name_that_is_there_twice_among_many_is_found_in_linear_time() -> None:
    pairs: list[tuple[str, object]] = [(_Counted(number), 0) for number in range(1000)]
    with pytest.raises(Damaged, match="'999' is there twice"):
        strict_json._unique([*pairs, (_Counted(999), 0)], "head")
    assert _Counted.comparisons < 2000


def test_a_whole_head_of_names_is_refused_for_their_number() -> None:
    names = b",".join(b'"%x":0' % number for number in range(700_000))
    head = b'{"metadata":{' + names + b',"0":0}}'
    assert len(head) < 8 << 20
    with pytest.raises(Damaged, match="700001 members"):
        DECODERS["sealed manifest"](len(head).to_bytes(4, "little") + bytes(8) + head)
