"""The picture of a restore: every read as a line from its arrival to its answer, and what the link brought. Pure.

What to see in it: the stream as a band that climbs from the lower left, as wide as its reads wait; faults as marks
off the band, as long as a thread stood still; above white space nobody has read yet; a link with gaps is a link that
could have brought more.
"""

import math
from collections.abc import Iterator

import numpy as np

from streamd.report import figures
from streamd.report.summary import duration_text, mib_text
from streamd.report.svg import Drawing, Scale
from streamd.serve.order import Want
from streamd.serve.record import Record
from streamd.snapshot.names import PAGES

WIDTH, HEIGHT = 960, 760
_LEFT, _RIGHT = 72, 936
_MIB = 1 << 20
# Bins of the link's rate: narrow enough to see a pause of a hundredth of the load.
_LINK_BINS = 144
# Rows of the picture of reads, in pixels: what lies in one row and touches is drawn as one mark, so that a picture of
# 80 GiB has no more marks than one of 1 GiB.
_ROW = 1.5
_MARK_LEAST = 1.6
# Waits from 10 µs (a reply from memory) to 100 s; four bars a decade.
_WAIT_LOW_US, _WAIT_HIGH_US, _BARS_A_DECADE = 10.0, 1e8, 4


def overview(record: Record, *, until_s: float | None = None) -> str:
    """Draw a record as one SVG document; the time axis ends at `until_s`, or when all was loaded."""
    load = figures.loading(record)
    ended_s = load.ended_us / 1e6 if load is not None else record.lasted_us / 1e6
    time = Scale(0.0, max(until_s or ended_s * 1.02, 0.001), _LEFT, _RIGHT)
    drawing = Drawing(WIDTH, HEIGHT, f"Restore of {record.head.snapshot}")
    drawing.text(24, 30, f"Restore of {record.head.snapshot}", style="ink title")
    drawing.text(24, 49, _subtitle(record))
    _reads(drawing, record, time, top=92, bottom=402)
    _link(drawing, record, time, top=466, bottom=550)
    _progress(drawing, record, Scale(time.low, time.high, _LEFT, 470), top=612, bottom=720)
    _waits(drawing, record, Scale(_WAIT_LOW_US, _WAIT_HIGH_US, 546, _RIGHT, is_log=True), top=612, bottom=720)
    return drawing.document()


def _subtitle(record: Record) -> str:
    load = figures.loading(record)
    if load is None:
        return "pages.img was not read"
    faults = sum(reads.reads for reads in figures.reads_by_class(record) if reads.want == Want.FAULT)
    return (
        f"{mib_text(load.asked_bytes)} in {load.took_us / 1e6:.2f} s{'' if load.is_over else ', not over yet'} · "
        f"{faults} fault reads, some of them waiting during {figures.fault_wait_us(record) / 1e6:.2f} s · "
        f"{mib_text(int(record.gets['origin_bytes'].sum(dtype=np.uint64)))} from the store"
    )


def _reads(drawing: Drawing, record: Record, time: Scale, *, top: float, bottom: float) -> None:
    size = next((file.size for file in record.head.files if file.name == PAGES), 0)
    place = Scale(0.0, max(size, 1) / _MIB, bottom, top)
    drawing.text(24, top - 14, "Reads of pages.img, from arrival to answer: offset, MiB", style="ink head")
    drawing.axes(time, place, x_text=_seconds, y_text=_number, y_ticks=5)
    reads = record.reads_of(PAGES)
    present = [want for want in Want if np.any(reads["want"] == want)]
    drawing.legend(_RIGHT, top - 14, [(want.name.lower(), want.name.lower()) for want in present])
    for want in sorted(present, reverse=True):  # the most urgent on top
        mine = reads[reads["want"] == want]
        began = mine["began_us"] / 1e6
        spans = zip(
            (mine["start"] / _MIB).tolist(),
            began.tolist(),
            (began + mine["wait_us"] / 1e6).tolist(),
            strict=True,
        )
        marks = _merged((place(at), time(came), time(answered)) for at, came, answered in spans if came <= time.high)
        drawing.dashes(marks, style=want.name.lower(), thickness=2.4 if want == Want.FAULT else 1.5)


def _merged(spans: Iterator[tuple[float, float, float]]) -> Iterator[tuple[float, float, float]]:
    """Join spans (y, x from, x to) of one row of pixels that touch: (x, y, length) each."""
    rows: dict[int, list[tuple[float, float]]] = {}
    for y, first, last in spans:
        rows.setdefault(round(y / _ROW), []).append((first, max(last, first + _MARK_LEAST)))
    for row, pieces in sorted(rows.items()):
        pieces.sort()
        low, high = pieces[0]
        for first, last in pieces[1:]:
            if first > high + 0.5:
                yield low, row * _ROW, high - low
                low = first
            high = max(high, last)
        yield low, row * _ROW, high - low


def _link(drawing: Drawing, record: Record, time: Scale, *, top: float, bottom: float) -> None:
    drawing.text(24, top - 14, "What the store sent, by why it was asked for: MB/s", style="ink head")
    edges_us = np.linspace(time.low, time.high, _LINK_BINS + 1) * 1e6
    bin_s = (time.high - time.low) / _LINK_BINS
    present = [want for want in Want if np.any(record.gets["want"] == want)]
    rates = {want: figures.link_bytes(record, edges_us, (want,)) / bin_s / 1e6 for want in present}
    highest = max((float(rate) for rate in sum(rates.values(), np.zeros(_LINK_BINS))), default=0.0)
    rate_scale = Scale(0.0, max(highest * 1.05, 1.0), bottom, top)
    drawing.axes(time, rate_scale, x_text=_seconds, y_text=_number, y_ticks=3)
    drawing.legend(_RIGHT, top - 14, [(want.name.lower(), want.name.lower()) for want in present])
    pixels = (time.last - time.first) / _LINK_BINS
    for index in range(_LINK_BINS):
        below = 0.0
        for want in present:
            rate = float(rates[want][index])
            if rate > highest / 500:
                low, high = rate_scale(below), rate_scale(below + rate)
                drawing.bar(
                    time.first + index * pixels,
                    high,
                    pixels - 0.8,
                    low - high,
                    style=want.name.lower(),
                    tip=f"{edges_us[index] / 1e6:.2f} s: {rate:.1f} MB/s for {want.name.lower()}",
                )
                below += rate


def _progress(drawing: Drawing, record: Record, time: Scale, *, top: float, bottom: float) -> None:
    drawing.text(24, top - 14, "Share of the image, %", style="ink head")
    share = Scale(0.0, 100.0, bottom, top)
    drawing.axes(time, share, x_text=_seconds, y_text=_number, x_ticks=5)
    reads = record.reads_of(PAGES)
    image = max(sum(file.size for file in record.head.files), 1)
    answered_us = reads["began_us"].astype(np.int64) + reads["wait_us"]
    order = np.argsort(answered_us)
    curves = (
        ("hot", "fetched", 4.0, record.releases["at_us"], record.releases["size"]),
        ("stream", "answered", 1.6, answered_us[order], reads["size"][order]),
    )
    for style, _, width, at_us, sizes in curves:
        steps = _steps(at_us / 1e6, np.cumsum(sizes, dtype=np.uint64) * 100 / image, time, share)
        drawing.curve(steps, style=style, width=width)
    drawing.legend(time.last, top - 14, [(style, name) for style, name, *_ in curves])


def _steps(at_s: figures.Numbers, percent: figures.Numbers, time: Scale, share: Scale) -> Iterator[tuple[float, float]]:
    """Give the points of a rising curve, one a pixel at most, up to the right edge."""
    grid = np.linspace(time.low, time.high, int(time.last - time.first) + 1)
    so_far = np.concatenate(([0.0], percent))[np.searchsorted(at_s, grid, side="right")]
    last = -1.0
    for moment, value in zip(grid.tolist(), so_far.tolist(), strict=True):
        if value != last or moment == grid[-1]:
            yield time(moment), share(value)
        last = value


def _waits(drawing: Drawing, record: Record, wait: Scale, *, top: float, bottom: float) -> None:
    drawing.text(wait.first - 48, top - 14, "Reads by how long they waited", style="ink head")
    bars = round(math.log10(_WAIT_HIGH_US / _WAIT_LOW_US)) * _BARS_A_DECADE
    edges = np.geomspace(_WAIT_LOW_US, _WAIT_HIGH_US, bars + 1)
    reads = record.reads_of(PAGES)
    present = [want for want in Want if np.any(reads["want"] == want)]
    counts = {
        want: np.histogram(np.clip(reads["wait_us"][reads["want"] == want], *edges[[0, -1]]), edges)[0]
        for want in present
    }
    highest = max((int(count) for count in sum(counts.values(), np.zeros(bars, int))), default=0)
    count_scale = Scale(0.0, max(highest * 1.05, 1.0), bottom, top)
    drawing.axes(wait, count_scale, x_text=_wait, y_text=_number, y_ticks=3)
    drawing.legend(wait.last, top - 14, [(want.name.lower(), want.name.lower()) for want in present])
    for index in range(bars):
        below = 0
        left, right = wait(float(edges[index])), wait(float(edges[index + 1]))
        for want in present:
            count = int(counts[want][index])
            if count:
                low, high = count_scale(below), count_scale(below + count)
                least = f"{duration_text(edges[index])} or a little more" if index else "not at all"
                tip = f"{count} {want.name.lower()} reads waited {least}"
                drawing.bar(left + 0.5, high, right - left - 1, low - high, style=want.name.lower(), tip=tip)
                below += count


def _wait(value_us: float) -> str:
    if value_us <= _WAIT_LOW_US:
        return "none"
    if value_us < 1e3:
        return f"{value_us:g} µs"
    return f"{value_us / 1e3:g} ms" if value_us < 1e6 else f"{value_us / 1e6:g} s"


def _seconds(value: float) -> str:
    return f"{value:g} s"


def _number(value: float) -> str:
    return f"{value:,.10g}".replace(",", " ")
