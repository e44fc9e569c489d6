"""Frames: whatever the chunk, its bytes come back; whatever the frame, no other bytes do."""

import random

import pytest
import xxhash
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from streamd.errors import Damaged
from streamd.snapshot.chunks import Codec
from streamd.snapshot.frames import Decoder, Encoder, FrameCorrupt

PAGE = 4096

# Bytes of every kind: zeros with something in them, text that shrinks, noise that doesn't.
chunks = st.one_of(
    st.binary(min_size=1, max_size=3 * PAGE),
    st.integers(1, 3 * PAGE).map(bytes),
    st.tuples(st.integers(0, 2**32), st.integers(1, 3 * PAGE)).map(lambda t: random.Random(t[0]).randbytes(t[1])),
    st.tuples(st.binary(min_size=1, max_size=9), st.integers(1, 900)).map(lambda t: t[0] * t[1]),
    st.tuples(st.integers(0, PAGE - 1), st.integers(1, 255)).map(
        lambda t: bytes(t[0]) + bytes([t[1]]) + bytes(PAGE - 1 - t[0])
    ),
)


@given(chunk=chunks, level=st.sampled_from((1, 3)))
def test_a_chunk_comes_back_as_it_was(chunk: bytes, level: int) -> None:
    frame = Encoder(level=level).encode(memoryview(chunk))
    assert Decoder().decode(frame.data, codec=frame.codec, length=len(chunk), digest=frame.digest) == chunk
    match frame.codec:
        case Codec.ZERO:
            assert chunk == bytes(len(chunk))
            assert (frame.data, frame.digest) == (b"", bytes(16))
        case Codec.RAW:
            assert frame.data == chunk
            assert frame.digest == xxhash.xxh3_128(chunk).digest()
        case Codec.ZSTD:
            assert len(frame.data) <= len(chunk) * 15 / 16
            assert frame.digest == xxhash.xxh3_128(chunk).digest()
    assert (frame.codec == Codec.ZERO) == (chunk == bytes(len(chunk)))


def test_a_chunk_is_stored_raw_unless_zstd_takes_off_a_sixteenth() -> None:
    noise = random.Random(1).randbytes(PAGE)
    zstd = zstandard.ZstdCompressor(level=1)
    codecs = set()
    for zeros in range(0, 600, 5):
        chunk = noise[zeros:] + bytes(zeros)
        frame = Encoder().encode(chunk)
        assert (frame.codec == Codec.ZSTD) == (len(zstd.compress(chunk)) <= PAGE - PAGE // 16)
        codecs.add(frame.codec)
    assert codecs == {Codec.RAW, Codec.ZSTD}


def test_the_same_chunk_gives_the_same_frame() -> None:
    encoder = Encoder()
    chunk = b"abc" * 5000
    assert encoder.encode(chunk) == encoder.encode(bytearray(chunk)) == Encoder().encode(chunk)


def test_a_raw_chunk_stays_where_it_is() -> None:
    frame = bytearray(random.Random(2).randbytes(PAGE))
    assert Decoder().decode(frame, codec=Codec.RAW, length=PAGE, digest=xxhash.xxh3_128_digest(frame)) is frame


@pytest.mark.parametrize(
    "chunk", [b"abc" * 2000, random.Random(3).randbytes(700), bytes(700)], ids=["zstd", "raw", "zero"]
)
def test_any_change_is_refused(chunk: bytes) -> None:
    frame = Encoder().encode(chunk)
    decoder = Decoder()
    right = {"codec": int(frame.codec), "length": len(chunk), "digest": frame.digest}

    def refused(data: bytes | bytearray, **changed: object) -> None:
        with pytest.raises(FrameCorrupt):
            decoder.decode(data, **(right | changed))  # type: ignore[arg-type]

    data = bytearray(frame.data)
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        try:
            assert decoder.decode(data, **right) == chunk  # type: ignore[arg-type]  # a bit of zstd's head may mean nothing
        except FrameCorrupt:
            pass
        else:
            assert frame.codec == Codec.ZSTD
        data[bit // 8] ^= 1 << bit % 8
    for end in range(len(data)):
        refused(data[:end])
    refused(data + b"\0")
    refused(data + data or b"x")
    refused(data, digest=bytes(15) + b"\1")
    refused(data, codec=3)
    refused(data, codec=(frame.codec + 1) % 3)
    if frame.codec != Codec.ZERO:
        refused(data, length=len(chunk) - 1)
        refused(data, length=len(chunk) + 1)
        refused(data, length=0)


def test_frame_corrupt_is_damage() -> None:
    assert issubclass(FrameCorrupt, Damaged)


@given(
    data=st.binary(max_size=300),
    codec=st.integers(-1, 4),
    length=st.integers(0, 1 << 24),
    digest=st.binary(max_size=17),
)
def test_any_bytes_are_refused_or_have_that_digest(data: bytes, codec: int, length: int, digest: bytes) -> None:
    for frame in (data, b"\x28\xb5\x2f\xfd" + data):
        try:
            chunk = Decoder().decode(frame, codec=codec, length=length, digest=digest)
        except FrameCorrupt:
            continue
        assert len(chunk) == length
        assert codec == Codec.ZERO or xxhash.xxh3_128_digest(chunk) == digest
