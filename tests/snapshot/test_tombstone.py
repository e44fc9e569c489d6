"""Tombstones: told apart from manifests, and as hard to mistake."""

from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from streamd.errors import Damaged, Refused
from streamd.snapshot import envelope
from streamd.snapshot.manifest import Manifest, encode
from streamd.snapshot.tombstone import MAGIC, Tombstone, decode_tombstone, encode_tombstone

tombstones = st.builds(
    Tombstone,
    st.sampled_from(("gc", "rm")),
    st.none() | st.from_regex(r"[a-z0-9][a-z0-9-]{0,62}", fullmatch=True),
)


@given(tombstone=tombstones)
def test_what_is_written_is_read_again(tombstone: Tombstone) -> None:
    assert decode_tombstone(encode_tombstone(tombstone)) == tombstone


def test_a_tombstone_of_long_ago_is_still_read_and_written(here: Path) -> None:
    golden = (here / "golden" / "format-1.tombstone").read_bytes()
    assert decode_tombstone(golden) == Tombstone("rm", "push-1")
    assert encode_tombstone(Tombstone("rm", "push-1")) == golden


@given(data=st.binary(max_size=100))
def test_anything_else_is_no_tombstone(data: bytes) -> None:
    assume(not data.startswith(MAGIC))
    assert decode_tombstone(data) is None


def test_a_manifest_is_no_tombstone(example: Manifest) -> None:
    assert decode_tombstone(encode(example)) is None


def test_any_flipped_bit_behind_the_magic_is_refused() -> None:
    data = bytearray(encode_tombstone(Tombstone("gc")))
    for bit in range(8 * len(MAGIC), 8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Damaged):
            decode_tombstone(data)
        data[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize(
    ("payload", "version", "error"),
    [
        (b'{"push_id":null,"reason":"gc"}', 2, Refused),
        (b'{"push_id":null,"reason":"because"}', 1, Damaged),
        (b'{"push_id":null}', 1, Damaged),
        (b'{"push_id":"../x","reason":"rm"}', 1, Damaged),
        (b"", 1, Damaged),
    ],
)
def test_a_tombstone_that_says_something_else_is_refused(payload: bytes, version: int, error: type[Exception]) -> None:
    with pytest.raises(error):
        decode_tombstone(envelope.seal(MAGIC, version, (payload,)))
    assert decode_tombstone(envelope.seal(MAGIC, 1, (b'{"reason":"gc"}',))) == Tombstone("gc")
