"""What a record says in numbers: waits by class, GETs, the link, the time between two chunk releases. Pure.

Everything is computed with numpy over whole columns; the largest record there can be takes some tenths of a second.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from streamd.serve.order import Want
from streamd.serve.record import ERRORS, Record, Rows, Tier
from streamd.snapshot.names import PAGES

Numbers: TypeAlias = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of some durations, in microseconds; all 0 when there are none."""

    p50_us: int
    p99_us: int
    max_us: int


@dataclass(frozen=True, slots=True)
class ReadsOf:
    """The reads of one class: how many, their bytes, how many waited and how long those did; how many of each tier."""

    want: Want
    reads: int
    read_bytes: int
    waited: int
    wait: Percentiles
    wait_sum_us: int
    tiers: dict[Tier, int]


@dataclass(frozen=True, slots=True)
class GetsOf:
    """The GETs that one class made: how many, what the store sent, tries beyond the first, failures."""

    want: Want
    gets: int
    origin_bytes: int
    second_tries: int
    failed: int
    first_byte: Percentiles


@dataclass(frozen=True, slots=True)
class Loading:
    """From the first read of pages.img to the last answer, microseconds since the mount began to be.

    `is_over`: the file was closed. `asked_bytes` are those of its reads; what was read twice counts twice.
    """

    began_us: int
    ended_us: int
    is_over: bool
    asked_bytes: int

    @property
    def took_us(self) -> int:
        """How long it took."""
        return self.ended_us - self.began_us


def percentiles(durations_us: Numbers) -> Percentiles:
    """Give the median, the 99th percentile (nearest ranks) and the largest."""
    if not len(durations_us):
        return Percentiles(0, 0, 0)
    middle, high = np.percentile(durations_us, (50, 99), method="inverted_cdf")
    return Percentiles(int(middle), int(high), int(durations_us.max()))


def reads_by_class(record: Record) -> list[ReadsOf]:
    """Describe the kernel's reads of pages.img, class by class."""
    reads = record.reads_of(PAGES)
    found = []
    for want in Want:
        mine = reads[reads["want"] == want]
        waits = mine["wait_us"][mine["wait_us"] > 0]
        if len(mine):
            tiers = {tier: int(np.count_nonzero(mine["tier"] == tier)) for tier in Tier}
            found.append(
                ReadsOf(
                    want=want,
                    reads=len(mine),
                    read_bytes=_sum(mine["size"]),
                    waited=len(waits),
                    wait=percentiles(waits),
                    wait_sum_us=_sum(waits),
                    tiers={tier: count for tier, count in tiers.items() if count},
                )
            )
    return found


def gets_by_class(record: Record) -> list[GetsOf]:
    """Describe the GETs, class by class."""
    found = []
    for want in Want:
        mine = record.gets[record.gets["want"] == want]
        if len(mine):
            found.append(
                GetsOf(
                    want=want,
                    gets=len(mine),
                    origin_bytes=_sum(mine["origin_bytes"]),
                    second_tries=_sum(mine["requests"]) - len(mine),
                    failed=int(np.count_nonzero(mine["error"])),
                    first_byte=percentiles(mine["first_byte_us"][mine["first_byte_us"] > 0]),
                )
            )
    return found


def failures(record: Record) -> dict[str, int]:
    """Count the GETs that failed by kind of failure."""
    counts = np.bincount(record.gets["error"], minlength=len(ERRORS) + 1)[1:]
    return {kind.value: int(count) for kind, count in zip(ERRORS, counts, strict=True) if count}


def loading(record: Record) -> Loading | None:
    """Say when pages.img was read; None when it never was."""
    reads = record.reads_of(PAGES)
    if not len(reads):
        return None
    return Loading(
        began_us=int(reads["began_us"][0]),
        ended_us=int(_ends(reads).max()),
        is_over=all(handle.closed_us is not None for handle in record.handles if handle.file_name == PAGES),
        asked_bytes=_sum(reads["size"]),
    )


def release_gaps_us(record: Record) -> Numbers:
    """Give the times between two chunk releases, as far as a read of the kernel waited, in their order.

    A gap ends at a release while some read waits. It begins at the release before it or, when nobody waited then, at
    the moment since which somebody has: a link that idles while nobody wants anything makes no gap.
    """
    began_us, ended_us = waiting_spans(record)
    at_us = record.releases["at_us"].astype(np.int64)
    if not len(began_us) or not len(at_us):
        return np.empty(0, np.int64)
    before_us = np.concatenate(([np.iinfo(np.int64).min], at_us[:-1]))
    span = np.searchsorted(began_us, at_us, side="right") - 1
    waited = (span >= 0) & (at_us <= ended_us[span])
    gaps: Numbers = (at_us - np.maximum(before_us, began_us[span]))[waited]
    return gaps


def waiting_spans(record: Record, wants: Sequence[Want] = tuple(Want)) -> tuple[Numbers, Numbers]:
    """Give the disjoint spans of time in which at least one read of pages.img waited: their beginnings and ends."""
    reads = record.reads_of(PAGES)
    reads = reads[(reads["wait_us"] > 0) & np.isin(reads["want"], wants)]
    began_us = reads["began_us"].astype(np.int64)
    if not len(reads):
        return began_us, began_us
    # They are in order of their beginnings: a span ends where the next begins after all ends so far.
    latest_us = np.maximum.accumulate(_ends(reads))
    first = np.concatenate(([True], began_us[1:] > latest_us[:-1]))
    last = np.concatenate((first[1:], [True]))
    return began_us[first], latest_us[last]


def fault_wait_us(record: Record) -> int:
    """Give how long at least one fault's read waited, overlaps counted once."""
    began_us, ended_us = waiting_spans(record, (Want.FAULT,))
    return _sum(ended_us - began_us)


def link_bytes(record: Record, edges_us: Numbers, wants: Sequence[Want]) -> Numbers:
    """Give what the store sent in each of the spans between `edges_us`, for the GETs of some classes.

    A body is taken to have come evenly from its first byte to its end.
    """
    gets = record.gets[np.isin(record.gets["want"], wants) & (record.gets["origin_bytes"] > 0)]
    began = (gets["began_us"] + gets["first_byte_us"]).astype(np.float64)
    took = np.maximum(gets["took_us"].astype(np.float64) - gets["first_byte_us"], 1.0)
    sent = gets["origin_bytes"].astype(np.float64)
    edges = edges_us.astype(np.float64)
    # What had come by a moment t is, of each body, sent × clip((t - began) / took, 0, 1). As a sum over all bodies it
    # bends only where one begins or ends: slopes are added up once instead of bodies at every edge.
    times = np.concatenate((began, began + took))
    slopes = np.concatenate((sent / took, -sent / took))
    order = np.argsort(times, kind="stable")
    times, slopes = times[order], np.cumsum(slopes[order])
    if not len(times):
        return np.zeros(len(edges) - 1)
    come = np.concatenate(([0.0], np.cumsum(np.diff(times) * slopes[:-1])))
    return np.diff(np.interp(edges, times, come))


def origin_bytes_between(record: Record, began_us: int, ended_us: int) -> int:
    """Give what the store sent in a span of time."""
    return int(link_bytes(record, np.array([began_us, ended_us]), tuple(Want))[0])


def _ends(reads: Rows) -> Numbers:
    ends: Numbers = reads["began_us"].astype(np.int64) + reads["wait_us"]
    return ends


def _sum(column: Numbers) -> int:
    return int(column.sum(dtype=np.uint64))
