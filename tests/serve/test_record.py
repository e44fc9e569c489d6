"""What a mount notes comes back from its record's file, and no file makes the reader do anything but refuse."""

import contextlib
import json
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from streamd.errors import Damaged, Refused, StoreErrorKind
from streamd.serve.order import Want
from streamd.serve.record import (
    ERRORS,
    EVENTS_MAX,
    FACTS_MAX,
    HANDLES_MAX,
    NO_HANDLE,
    READ_ROW,
    READS_MAX,
    RecordedFile,
    Recorder,
    RecordHead,
    Tier,
)
from streamd.serve.record_file import FORMAT_VERSION, MAGIC, decode, encode
from streamd.snapshot import envelope

ORIGIN_S = 100.0
HANDLE = 7 << 31


def recorder() -> Recorder:
    head = RecordHead(
        snapshot="web-1",
        digest="ab" * 32,
        snapshot_url="gs://bucket/web-1",
        mountpoint="/mnt/web-1",
        pid=42,
        started_s=1.7e9,
        chunk_bytes=256 << 10,
        stored_bytes=1 << 30,
        files=(RecordedFile("checkpoint.img", 4096, 0), RecordedFile("pages.img", 1 << 31, 4096)),
        facts={"prefetch": "all"},
    )
    made = Recorder(head, origin_s=ORIGIN_S)
    made.opened(HANDLE, "pages.img", ORIGIN_S + 1)
    return made


def note_read(to: Recorder, *, start: int = 0, began_s: float = ORIGIN_S + 2, wait_s: float = 0.0) -> None:
    to.read(HANDLE, Want.STREAM, Tier.STORE, start=start, size=4096, began_s=began_s, wait_s=wait_s)


def note_get(to: Recorder, error: StoreErrorKind | None) -> None:
    to.get(
        3,
        Want.FAULT,
        error,
        start=10,
        end=20,
        began_s=ORIGIN_S + 1,
        first_byte_s=0.015,
        took_s=0.1,
        requests=2,
        origin_bytes=10,
    )


times_s = st.floats(ORIGIN_S, ORIGIN_S + 1e6)
reads = st.tuples(
    st.sampled_from([HANDLE, 5]),
    st.sampled_from(Want),
    st.sampled_from(Tier),
    st.integers(0, 1 << 45),
    st.integers(0, 1 << 20),
    times_s,
    st.floats(0, 100),
)


@given(
    st.lists(reads, max_size=20), st.lists(st.sampled_from([None, *ERRORS]), max_size=8), st.lists(times_s, max_size=8)
)
def test_a_file_gives_back_what_was_noted_in_the_order_in_which_it_began(
    noted: list[Any], errors: list[StoreErrorKind | None], released_s: list[float]
) -> None:
    subject = recorder()
    for number, want, tier, start, size, began_s, wait_s in noted:
        subject.read(number, want, tier, start=start, size=size, began_s=began_s, wait_s=wait_s)
    for error in errors:
        note_get(subject, error)
    for at_s in sorted(released_s):
        subject.released(at_s, 4096)
    found = decode(encode(subject.record(ORIGIN_S + 5)))
    expected = [
        (
            int((began_s - ORIGIN_S) * 1e6),
            start,
            size,
            int(wait_s * 1e6),
            0 if number == HANDLE else NO_HANDLE,
            want,
            tier,
        )
        for number, want, tier, start, size, began_s, wait_s in sorted(
            noted, key=lambda n: int((n[5] - ORIGIN_S) * 1e6)
        )
    ]
    assert found.reads.tolist() == expected
    assert [None if row["error"] == 0 else ERRORS[row["error"] - 1] for row in found.gets] == errors
    assert found.releases["at_us"].tolist() == [int((at_s - ORIGIN_S) * 1e6) for at_s in sorted(released_s)]
    assert found.lasted_us == 5_000_000
    assert found.head.snapshot_url == "gs://bucket/web-1"
    assert found.head.facts == {"prefetch": "all"}
    assert found.head.files == subject.record(0).head.files


def test_events_and_handles_come_back() -> None:
    subject = recorder()
    subject.event(ORIGIN_S + 3, "cache-lost", "disk full")
    subject.closed(HANDLE, ORIGIN_S + 4)
    found = decode(encode(subject.record(ORIGIN_S + 5)))
    [event], [handle] = found.events, found.handles
    assert (event.at_us, event.kind, event.detail) == (3_000_000, "cache-lost", "disk full")
    assert (handle.file_name, handle.opened_us, handle.closed_us) == ("pages.img", 1_000_000, 4_000_000)


def test_a_read_of_a_file_that_was_closed_meanwhile_is_nobodys() -> None:
    subject = recorder()
    subject.closed(HANDLE, ORIGIN_S + 2)
    note_read(subject)
    found = subject.record(ORIGIN_S + 3)
    assert found.reads["handle"].tolist() == [NO_HANDLE]
    assert len(found.reads_of("pages.img")) == 0


def test_odd_times_are_told_as_the_nearest_that_fit() -> None:
    subject = recorder()
    note_read(subject, began_s=ORIGIN_S - 1, wait_s=1e9)
    assert subject.record(ORIGIN_S).reads[["began_us", "wait_us"]].tolist() == [(0, 2**32 - 1)]


def test_what_comes_after_the_bounds_is_counted_and_not_kept() -> None:
    subject = recorder()
    for _ in range(READS_MAX + 3):
        note_read(subject)
    for index in range(EVENTS_MAX + 2):
        subject.event(ORIGIN_S, "hedge", "x" * 1000)
        subject.fact(f"fact-{index}", index)
    for index in range(HANDLES_MAX + 10):
        subject.opened(index, "pages.img", ORIGIN_S)
    changes = subject.changes
    note_read(subject)
    assert subject.changes > changes
    data = encode(subject.record(ORIGIN_S + 1))
    found = decode(data)
    assert (len(found.reads), found.dropped.reads) == (READS_MAX, 4)
    assert (len(found.events), found.dropped.events) == (EVENTS_MAX, 2)
    assert (len(found.handles), len(found.head.facts)) == (HANDLES_MAX, FACTS_MAX)
    # Equal reads compress well; what is held while they are noted is what is bounded.
    assert READS_MAX * READ_ROW.itemsize <= 15 << 20


def test_texts_from_elsewhere_are_made_fit_to_be_printed() -> None:
    subject = recorder()
    subject.event(ORIGIN_S, "read-failed", "\x1b[31mred\n" + "x" * 1000)
    subject.fact("last", "a\0b")
    found = decode(encode(subject.record(ORIGIN_S)))
    assert found.events[0].detail.startswith("?[31mred?xxx")
    assert len(found.events[0].detail) == 200
    assert found.head.facts["last"] == "a?b"


def small() -> bytes:
    subject = recorder()
    note_read(subject)
    note_read(subject, began_s=ORIGIN_S + 3)
    note_get(subject, StoreErrorKind.TRANSIENT)
    subject.released(ORIGIN_S + 2, 4096)
    subject.event(ORIGIN_S + 2, "hedge")
    return encode(subject.record(ORIGIN_S + 4))


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_one_changed_bit_is_noticed(data: st.DataObject) -> None:
    changed = bytearray(small())
    bit = data.draw(st.integers(0, 8 * len(changed) - 1))
    changed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(Damaged):
        decode(changed)


def resealed(change: Callable[[dict[str, Any], bytes], tuple[object, bytes]]) -> bytes:
    """A record whose head and decompressed rows were changed by someone who can seal it again."""
    payload = envelope.unseal(small(), magic=MAGIC, version=FORMAT_VERSION, what="record")
    (size,) = struct.unpack_from("<I", payload)
    head, rows = json.loads(bytes(payload[4 : 4 + size])), zstandard.decompress(payload[4 + size :])
    head, rows = change(head, rows)
    text = json.dumps(head).encode()
    return envelope.seal(MAGIC, FORMAT_VERSION, (struct.pack("<I", len(text)), text, zstandard.compress(rows)))


HOSTILE: dict[str, Callable[[dict[str, Any], bytes], tuple[object, bytes]]] = {
    "more rows than there are": lambda h, r: (h | {"rows": h["rows"] | {"reads": 500_000}}, r),
    "more rows than allowed": lambda h, r: (h | {"rows": h["rows"] | {"reads": 1 << 40}}, r),
    "a bomb": lambda h, r: (h, bytes(1 << 28)),
    "rows too short": lambda h, r: (h, r[:-1]),
    "a head that is a list": lambda h, r: ([], r),
    "a read of no handle there is": lambda h, r: (h | {"handles": []}, r),
    "a class without a name": lambda h, r: (h | {"names": h["names"] | {"want": []}}, r),
    "times that run backwards": lambda h, r: (h, struct.pack("<Qq", 10, -5) + r[16:]),
    "times far in the future": lambda h, r: (h, b"\0" * 7 + b"\x7f" + r[8:]),
    "a file of no image": lambda h, r: (h | {"files": [{"name": "../etc", "size": 1, "base": 0}]}, r),
    "a handle of no image": lambda h, r: (h | {"handles": [h["handles"][0] | {"file": "gcs_opts.json"}]}, r),
    "control characters": lambda h, r: (h | {"mountpoint": "\x1b[2J"}, r),
    "a digest that is none": lambda h, r: (h | {"digest": "zz"}, r),
    "too many facts": lambda h, r: (h | {"facts": {str(i): "" for i in range(1000)}}, r),
    "a size beyond all": lambda h, r: (h | {"stored_bytes": 1 << 60}, r),
    "not a number": lambda h, r: (h | {"started_s": float("nan")}, r),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_a_forged_record_is_refused(change: Callable[[dict[str, Any], bytes], tuple[object, bytes]]) -> None:
    with pytest.raises(Damaged):
        decode(resealed(change))


@given(st.binary(max_size=200), st.integers(0, 400))
@settings(max_examples=200, deadline=None)
def test_whatever_is_sealed_is_read_or_refused(junk: bytes, at: int) -> None:
    payload = bytes(envelope.unseal(small(), magic=MAGIC, version=FORMAT_VERSION, what="record"))
    at = min(at, len(payload))
    changed = payload[:at] + junk + payload[at + len(junk) :]
    with contextlib.suppress(Damaged, Refused):
        decode(envelope.seal(MAGIC, FORMAT_VERSION, (changed,)))


def test_a_record_of_a_newer_streamd_is_refused_by_what_is_unknown() -> None:
    with pytest.raises(Refused, match="version 2"):
        decode(envelope.seal(MAGIC, 2, (b"",)))

    def renamed(head: dict[str, Any], rows: bytes) -> tuple[object, bytes]:
        return head | {"names": head["names"] | {"tier": ["QUANTUM"] * 6}}, rows

    with pytest.raises(Refused, match="QUANTUM"):
        decode(resealed(renamed))


def test_classes_are_found_by_their_names_whatever_numbers_the_writer_gave_them() -> None:
    def renumbered(head: dict[str, Any], rows: bytes) -> tuple[object, bytes]:
        names = list(head["names"]["want"])
        names[Want.STREAM], names[Want.AHEAD] = names[Want.AHEAD], names[Want.STREAM]
        return head | {"names": head["names"] | {"want": names}}, rows

    found = decode(resealed(renumbered))
    assert set(found.reads["want"].tolist()) == {Want.AHEAD}
    assert np.array_equal(found.gets["want"], [Want.FAULT])
