"""Numbers of a record, against plain loops over the same rows."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from streamd.errors import StoreErrorKind
from streamd.report import figures
from streamd.serve.order import Want
from streamd.serve.record import Record, RecordedFile, Recorder, RecordHead, Tier

HEAD = RecordHead(
    snapshot="web-1",
    digest="00" * 32,
    snapshot_url="file:///store/web-1",
    mountpoint="/mnt",
    pid=1,
    started_s=0.0,
    chunk_bytes=4096,
    stored_bytes=4096,
    files=(RecordedFile("pages.img", 1 << 30, 0),),
)


def record(
    *,
    reads: list[tuple[Want, float, float]] = [],  # noqa: B006 - only looked at
    releases_s: list[float] = [],  # noqa: B006
    gets: list[tuple[Want, float, float, float, int]] = [],  # noqa: B006
) -> Record:
    """A record of reads (class, began, wait), releases, and GETs (class, began, first byte, took, bytes); seconds."""
    subject = Recorder(HEAD, origin_s=0.0)
    subject.opened(1, "pages.img", 0.0)
    for want, began_s, wait_s in reads:
        subject.read(1, want, Tier.STORE, start=0, size=4096, began_s=began_s, wait_s=wait_s)
    for at_s in sorted(releases_s):
        subject.released(at_s, 4096)
    for want, began_s, first_s, took_s, sent in gets:
        subject.get(
            0,
            want,
            None,
            start=0,
            end=sent,
            began_s=began_s,
            first_byte_s=first_s,
            took_s=took_s,
            requests=1,
            origin_bytes=sent,
        )
    return subject.record(10.0).ordered()


ticks = st.integers(0, 50)


@given(st.lists(st.tuples(ticks, ticks), max_size=8), st.lists(ticks, max_size=12))
@example([(10, 10)], [5, 25])
def test_a_release_gap_is_the_part_of_it_in_which_a_read_waited_without_a_break(
    waits: list[tuple[int, int]], releases: list[int]
) -> None:
    found = record(
        reads=[(Want.STREAM, began / 1024, wait / 1024) for began, wait in waits],
        releases_s=[at / 1024 for at in releases],
    )
    us = [int(tick / 1024 * 1e6) for tick in range(200)]
    waiting = [(us[began], us[began] + us[wait]) for began, wait in waits if wait]
    expected = []
    before = -1
    for at in sorted(us[at] for at in releases):
        since = at
        # Walk back over every wait that holds `since`, or touches it, to where nobody waited.
        while earlier := [began for began, end in waiting if began < since <= end]:
            since = min(earlier)
        if any(began <= at <= end for began, end in waiting):
            expected.append(at - max(before, since))
        before = at
    assert figures.release_gaps_us(found).tolist() == expected


gets = st.tuples(
    st.sampled_from(Want), st.floats(0, 5), st.floats(0.001, 1), st.floats(0.001, 3), st.integers(0, 1 << 22)
)


@given(st.lists(gets, max_size=10), st.lists(st.floats(0, 10), min_size=2, max_size=10, unique=True))
def test_the_link_brings_what_each_body_brings_in_a_span(
    made: list[tuple[Want, float, float, float, int]], edges: list[float]
) -> None:
    found = record(gets=[(want, began, first, first + took, sent) for want, began, first, took, sent in made])
    edges_us = np.array(sorted(edges)) * 1e6
    expected = np.zeros(len(edges) - 1)
    for row in found.gets:
        began, took = int(row["began_us"]) + int(row["first_byte_us"]), int(row["took_us"]) - int(row["first_byte_us"])
        come = np.clip((edges_us - began) / max(took, 1), 0, 1) * int(row["origin_bytes"])
        expected += np.diff(come)
    assert figures.link_bytes(found, edges_us, tuple(Want)) == pytest.approx(expected, abs=1.0)


def test_nothing_gives_no_numbers() -> None:
    found = record()
    assert figures.loading(found) is None
    assert len(figures.release_gaps_us(found)) == 0
    assert figures.reads_by_class(found) == []
    assert figures.gets_by_class(found) == []
    assert figures.fault_wait_us(found) == 0
    assert figures.link_bytes(found, np.array([0, 1]), tuple(Want)).tolist() == [0.0]


def test_waits_are_counted_by_class_and_those_that_did_not_wait_are_no_wait() -> None:
    waits_s = [0.0, 0.0, *(index / 100 for index in range(1, 101))]
    found = record(reads=[(Want.FAULT, 1.0, wait_s) for wait_s in waits_s] + [(Want.STREAM, 1.0, 0.0)])
    fault, stream = figures.reads_by_class(found)
    assert (fault.want, fault.reads, fault.waited) == (Want.FAULT, 102, 100)
    assert (fault.wait.p50_us, fault.wait.p99_us, fault.wait.max_us) == (500_000, 990_000, 1_000_000)
    assert (stream.reads, stream.waited, stream.wait.max_us) == (1, 0, 0)


def test_overlapping_fault_waits_count_once_and_stream_waits_not_at_all() -> None:
    faults = [(Want.FAULT, 1.0, 1.0), (Want.FAULT, 1.5, 1.0), (Want.FAULT, 4.0, 0.5)]
    found = record(reads=[*faults, (Want.STREAM, 0.0, 9.0)])
    assert figures.fault_wait_us(found) == 2_000_000


def test_failures_are_counted_by_kind_and_further_tries_by_class() -> None:
    subject = Recorder(HEAD, origin_s=0.0)
    for error in (None, StoreErrorKind.TRANSIENT, StoreErrorKind.TRANSIENT, StoreErrorKind.GONE):
        subject.get(0, Want.HOT, error, start=0, end=9, began_s=1, first_byte_s=0, took_s=1, requests=3, origin_bytes=0)
    found = subject.record(2.0)
    assert figures.failures(found) == {"transient": 2, "gone": 1}
    [hot] = figures.gets_by_class(found)
    assert (hot.gets, hot.failed, hot.second_tries) == (4, 3, 8)


def test_a_load_goes_from_the_first_read_to_the_last_answer() -> None:
    found = record(reads=[(Want.STREAM, 2.0, 0.5), (Want.STREAM, 1.0, 3.0)])
    load = figures.loading(found)
    assert load is not None
    assert (load.began_us, load.ended_us, load.is_over, load.asked_bytes) == (1_000_000, 4_000_000, False, 8192)
