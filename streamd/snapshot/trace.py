"""The trace of a snapshot: which bytes of pages.img restores waited for, in which order, learned over many of them.

Every restore is a sample. A range's *weight* is the share of restores that waited for it, the latest counting most; its
*position* is how many bytes a restore had waited for before it, the mean of those that did. Positions in bytes, not in
seconds, because seconds are the link's and bytes are the workload's.

What a sample says of a range that the trace has:
- waited for: its weight grows.
- Passed by the stream after the restore had waited for more than `position` bytes: it had its turn and was not wanted.
  Its weight falls.
- Passed by the stream before that, or never: nobody knows whether it would have been waited for; a fast link, or the
  trace itself, may just have been in time. Its weight falls slowly (`UNKNOWN_SHARE`). Without this rule a restore that
  the trace made fast would unlearn what made it so.

Stored beside the manifest in an envelope (`envelope.py`, magic `PODSNAPO`), little-endian, one column after another:

    32 bytes digest of the snapshot | u32 samples | u32 ranges
    | u64 start[] | u64 position[] | f64 weight[] | u32 pages[]

Uncompressed: it is small (`MAX_RANGES`), and so no length in it can claim more memory than it has bytes. It comes from
outside and is data only: the worst that a forged one can do is to have the wrong bytes fetched first.
"""

import itertools
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from streamd.errors import Damaged, Refused
from streamd.snapshot import Buffer, envelope
from streamd.snapshot.memory import PAGE_BYTES

FORMAT_VERSION = 1
MAGIC = b"PODSNAPO"
_HEAD = struct.Struct("<32sII")
_COLUMNS = ("<u8", "<u8", "<f8", "<u4")  # start, position, weight, pages
_ROW_BYTES = sum(np.dtype(column).itemsize for column in _COLUMNS)
# Four times the chunks that `HOT_BYTES` holds: what is finer than a chunk can't be fetched apart. 224 KiB.
MAX_RANGES = 8192
# More than this is no trace and needs not be read.
MAX_TRACE_BYTES = 1 << 20
MAX_SAMPLES = 2**32 - 1

# How much the latest sample counts once there are more than a few (before, each counts the same): what a new workload
# waits for outweighs what only the old one did after three restores, and the latter is forgotten after eight. More
# would let a single odd restore upset the order, less would keep a dead order for a day of deployments.
LATEST_SHARE = 0.25
# How much of that share counts for what a sample can't tell. Not nothing: what is of the past must leave some day, even
# when the stream is always there first. It takes twenty restores to become unlikely, and seventy to be forgotten.
UNKNOWN_SHARE = 0.125
# What fewer restores than this waited for leaves the trace.
MIN_WEIGHT = 0.1
# What most restores wait for is fetched before all else.
LIKELY_WEIGHT = 0.5
# Neighbours that differ by less are one range: four chunks; a position in the order is no better known than that.
_JOIN_BYTES = 1 << 20
_JOIN_WEIGHT = 0.02
# What is fetched before it is asked for. Measured workloads wait for 140 to 330 MB before their first answer, since a
# touched page brings a window of 32 MiB (gVisor mm/address_space.go:mapASLocked); 800 Mbit/s bring this in 5 s.
HOT_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class TraceRange:
    """Bytes [start, end) of pages.img, at pages; `weight` in (0, 1]; `position` in bytes (see the module)."""

    start: int
    end: int
    weight: float
    position: int


@dataclass(frozen=True, slots=True)
class Trace:
    """What `samples` restores of the snapshot with this manifest digest (32 bytes) waited for.

    `ranges` are disjoint, in the order of their positions.
    """

    digest: bytes
    samples: int
    ranges: tuple[TraceRange, ...]

    @property
    def bytes_total(self) -> int:
        """Bytes that the ranges have together."""
        return sum(row.end - row.start for row in self.ranges)


@dataclass(frozen=True, slots=True)
class Sample:
    """What one restore waited for.

    `waited`: ranges [start, end) of pages.img, at pages, disjoint, in the order in which they were first asked for.
    `passed`: where the stream was, as (byte that it had come to, bytes of `waited` asked for by then); both ascend.
    """

    waited: tuple[tuple[int, int], ...]
    passed: tuple[tuple[int, int], ...] = ()


class StaleTrace(Damaged):
    """A whole trace, but of another snapshot: its id was used before, or the object was copied."""


class UnknownTrace(Damaged):
    """A whole trace in a format of a later streamd."""


def encode(trace: Trace) -> bytes:
    """Write a trace. The same trace gives the same bytes. Raises: `ValueError` for what `decode` would refuse."""
    rows = trace.ranges
    columns = (
        np.array([row.start for row in rows], "<u8"),
        np.array([row.position for row in rows], "<u8"),
        np.array([row.weight for row in rows], "<f8"),
        np.array([(row.end - row.start) // PAGE_BYTES for row in rows], "<u4"),
    )
    head = _HEAD.pack(trace.digest, trace.samples, len(rows))
    data = envelope.seal(MAGIC, FORMAT_VERSION, (head, *(column.tobytes() for column in columns)))
    pages_bytes = max((max(row.start, row.position) + row.end - row.start for row in rows), default=0)
    try:
        decode(data, digest=trace.digest, pages_bytes=pages_bytes)
    except Damaged as error:
        raise ValueError(str(error)) from error
    return data


def decode(data: Buffer, *, digest: bytes, pages_bytes: int) -> Trace:
    """Read the trace of the snapshot with that manifest digest, whose pages.img has `pages_bytes`.

    Raises: `Damaged`, which says what is wrong; `StaleTrace` and `UnknownTrace` are such.
    """
    if len(memoryview(data).cast("B")) > MAX_TRACE_BYTES:
        raise Damaged(f"trace: more than {MAX_TRACE_BYTES} bytes")
    try:
        payload = envelope.unseal(data, magic=MAGIC, version=FORMAT_VERSION, what="trace")
    except Refused as error:
        raise UnknownTrace(str(error)) from error
    if len(payload) < _HEAD.size:
        raise Damaged("trace: too short for its head")
    owner, samples, count = _HEAD.unpack_from(payload)
    if owner != digest:
        raise StaleTrace(f"trace: it is of the snapshot with digest {owner.hex()}, not {digest.hex()}")
    if count > MAX_RANGES or len(payload) != _HEAD.size + count * _ROW_BYTES:
        raise Damaged(f"trace: {count} ranges in {len(payload)} bytes")
    columns: list[NDArray[np.generic]] = []
    at = _HEAD.size
    for column in _COLUMNS:
        columns.append(np.frombuffer(payload, column, count=count, offset=at))
        at += columns[-1].nbytes
    starts, positions, weights, pages = (column.tolist() for column in columns)
    ranges = tuple(
        TraceRange(start, start + length * PAGE_BYTES, weight, position)
        for start, length, weight, position in zip(starts, pages, weights, positions, strict=True)
    )
    _check(samples, ranges, pages_bytes=pages_bytes)
    return Trace(digest, samples, ranges)


def _check(samples: int, ranges: Sequence[TraceRange], *, pages_bytes: int) -> None:
    """Check what must be true of every trace; in Python's integers, which don't wrap. Raises: `Damaged`."""
    if not samples:
        raise Damaged("trace: of no sample")
    for row in ranges:
        if row.start % PAGE_BYTES or not row.start < row.end <= pages_bytes:
            raise Damaged(f"trace: range [{row.start}, {row.end}) in a pages.img of {pages_bytes} bytes")
        if not 0 < row.weight <= 1:  # false for NaN, too
            raise Damaged(f"trace: a weight of {row.weight}")
        if row.position + row.end - row.start > pages_bytes:  # more than all of it would have been waited for
            raise Damaged(f"trace: position {row.position} in a pages.img of {pages_bytes} bytes")
    if any(after.position < before.position for before, after in itertools.pairwise(ranges)):
        raise Damaged("trace: its ranges are not in the order of their positions")
    by_start = sorted(ranges, key=lambda row: row.start)
    if any(after.start < before.end for before, after in itertools.pairwise(by_start)):
        raise Damaged("trace: its ranges overlap")


def merge(old: Trace | None, sample: Sample, *, digest: bytes, pages_bytes: int) -> Trace:
    """Give the trace with one more sample in it, a restore of the snapshot with that digest and size of pages.img.

    A sample without `waited` says nothing of what restores wait for (all was there, or nobody ran) and must not come.
    """
    if not sample.waited:
        raise ValueError("a sample of nothing")
    before = sorted(old.ranges, key=lambda row: row.start) if old else []
    samples = old.samples + 1 if old else 1
    share = max(1 / samples, LATEST_SHARE)
    pieces = (
        piece
        for earlier, now in _cut(before, sorted(_placed(sample.waited), key=lambda row: row.start))
        if (piece := _weighed(earlier, now, sample.passed, share)) is not None
    )
    ranges = [
        replace(row, position=min(row.position, pages_bytes - (row.end - row.start)))  # what was joined may go beyond
        for row in _joined(pieces)
        if row.weight >= MIN_WEIGHT
    ]
    if len(ranges) > MAX_RANGES:
        ranges = sorted(ranges, key=lambda row: (-row.weight, row.position))[:MAX_RANGES]
    ranges.sort(key=lambda row: (row.position, -row.weight, row.start))
    return Trace(digest, min(samples, MAX_SAMPLES), tuple(ranges))


def _placed(waited: Iterable[tuple[int, int]]) -> Iterator[TraceRange]:
    """Give a sample's ranges their positions."""
    position = 0
    for start, end in waited:
        yield TraceRange(start, end, 1.0, position)
        position += end - start


def _cut(
    one: Sequence[TraceRange], other: Sequence[TraceRange]
) -> Iterator[tuple[TraceRange | None, TraceRange | None]]:
    """Cut two sets of ranges, each ascending, at each other's bounds: pieces of the same bytes, ascending."""
    bounds = sorted({bound for row in (*one, *other) for bound in (row.start, row.end)})
    starts = [row.start for row in one], [row.start for row in other]

    def piece(rows: Sequence[TraceRange], at: Sequence[int], start: int, end: int) -> TraceRange | None:
        index = bisect_right(at, start) - 1
        if index < 0 or rows[index].end <= start:
            return None
        row = rows[index]
        return replace(row, start=start, end=end, position=row.position + start - row.start)

    for start, end in itertools.pairwise(bounds):
        yield piece(one, starts[0], start, end), piece(other, starts[1], start, end)


def _weighed(
    earlier: TraceRange | None, now: TraceRange | None, passed: Sequence[tuple[int, int]], share: float
) -> TraceRange | None:
    """Weigh what the trace and the sample, of which `share` is to count, say of the same bytes."""
    if now is None:
        if earlier is None:
            return None
        index = bisect_left(passed, earlier.end, key=lambda at: at[0])
        had_its_turn = index < len(passed) and passed[index][1] > earlier.position
        return replace(earlier, weight=earlier.weight * (1 - (share if had_its_turn else share * UNKNOWN_SHARE)))
    if earlier is None:
        return replace(now, weight=share)
    kept = earlier.weight * (1 - share)
    weight = kept + share
    position = round((earlier.position * kept + now.position * share) / weight)
    return replace(now, weight=min(weight, 1.0), position=position)


def _joined(pieces: Iterable[TraceRange]) -> Iterator[TraceRange]:
    """Join neighbours of ascending pieces that stand next to each other in the order, too."""
    held: TraceRange | None = None
    for piece in pieces:
        if held is None:
            held = piece
            continue
        held_bytes, piece_bytes = held.end - held.start, piece.end - piece.start
        if (
            piece.start == held.end
            and abs(piece.weight - held.weight) <= _JOIN_WEIGHT
            and abs(piece.position - (held.position + held_bytes)) <= _JOIN_BYTES
        ):
            weight = (held.weight * held_bytes + piece.weight * piece_bytes) / (held_bytes + piece_bytes)
            held = replace(held, end=piece.end, weight=min(weight, 1.0))
        else:
            yield held
            held = piece
    if held is not None:
        yield held


def hot_ranges(trace: Trace, budget_bytes: int = HOT_BYTES) -> list[tuple[int, int]]:
    """Give what to fetch first, as ranges of pages.img in the order of fetching, `budget_bytes` at most.

    What most restores waited for comes first, in its order, and then the rest in its own: so what a workload of the
    past left in the trace costs the present one nothing.
    """
    order = sorted(trace.ranges, key=lambda row: row.weight < LIKELY_WEIGHT)  # stable
    found: list[tuple[int, int]] = []
    for row in order:
        end = min(row.end, row.start + budget_bytes // PAGE_BYTES * PAGE_BYTES)
        if end <= row.start:
            break
        budget_bytes -= end - row.start
        if found and found[-1][1] == row.start:
            found[-1] = (found[-1][0], end)
        else:
            found.append((row.start, end))
    return found
