"""The few things of SVG that the pictures need: scales, axes, bars, lines, many marks in one path. Pure.

A library that draws (matplotlib and what it needs) is some 100 MB on every node, for four charts; this is a page.
Coordinates are written with one digit after the point, so the same record gives the same bytes. Colours are CSS classes
for a light and a dark background, whichever the reader's system asks for; they work inside `<img>`, too, and need
nothing that viewers other than browsers lack. Text from records is escaped here.
"""

import html
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

# One hue a class, the same in every picture, told apart by colour-blind readers too: on light, on dark.
_HUES = {
    "fault": ("#d9480f", "#f0733a"),
    "window": ("#b07800", "#d19a20"),
    "hot": ("#1a8f63", "#2db482"),
    "stream": ("#2a78d6", "#4a94ee"),
    "ahead": ("#8f8d86", "#84827b"),
}
_INKS = {
    "surface": ("#fcfcfb", "#1a1a19"),
    "ink": ("#0b0b0b", "#f4f4f2"),
    "muted": ("#52514e", "#b5b4ae"),
    "grid": ("#e4e3df", "#32312f"),
    "axis": ("#b5b4ae", "#5d5c57"),
}


def _colours(mode: int) -> str:
    inks = [f".{name}{{{'stroke' if name in ('grid', 'axis') else 'fill'}:{ink[mode]}}}" for name, ink in _INKS.items()]
    hues = [f".{name}.fill{{fill:{hue[mode]}}}.{name}.line{{stroke:{hue[mode]}}}" for name, hue in _HUES.items()]
    return "".join(inks + hues)


_STYLE = (
    'text{font:12px system-ui,-apple-system,"Segoe UI",sans-serif}.title{font-size:15px;font-weight:600}'
    ".head{font-size:12.5px;font-weight:600}.small{font-size:11px}.line{fill:none}"
    f"{_colours(0)}@media (prefers-color-scheme:dark){{{_colours(1)}}}"
)


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps values of [low, high] to pixels of [first, last], linear or by the logarithm; `high` is above `low`."""

    low: float
    high: float
    first: float
    last: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        """Give the pixel of a value; those outside are moved to the nearer end."""
        value = min(max(value, self.low), self.high)
        if self.is_log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.first + share * (self.last - self.first)

    def ticks(self, most: int) -> list[float]:
        """Give at most `most` + 1 round values in it, the same distance apart (powers of ten on a log scale)."""
        if self.is_log:
            powers = range(math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9) + 1)
            return [10.0**power for power in powers]
        rough = (self.high - self.low) / most
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= rough * (1 - 1e-9))
        first = math.ceil(self.low / step - 1e-9)
        return [index * step for index in range(first, math.floor(self.high / step + 1e-9) + 1)]


@dataclass(slots=True)
class Drawing:
    """An SVG picture of `width` × `height` that is put together mark by mark."""

    width: int
    height: int
    title: str
    _parts: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, text: str, *, style: str = "muted", anchor: str = "start") -> None:
        """Write text at its baseline; `anchor`: start, middle, end."""
        self._parts.append(
            f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, *, style: str) -> None:
        """Draw one line."""
        self._parts.append(f'<path class="{style}" d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}"/>')

    def curve(self, points: Iterable[tuple[float, float]], *, style: str, width: float = 2.0) -> None:
        """Draw a line through points."""
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        if path:
            self._parts.append(
                f'<path class="{style} line" stroke-width="{width}" stroke-linejoin="round" d="M{path}"/>'
            )

    def dashes(self, marks: Iterable[tuple[float, float, float]], *, style: str, thickness: float) -> None:
        """Draw many horizontal marks, (x, y, length), as one path."""
        path = "".join(f"M{x:.1f} {y:.1f}h{length:.1f}" for x, y, length in marks)
        if path:
            self._parts.append(f'<path class="{style} line" stroke-width="{thickness:.1f}" d="{path}"/>')

    def bar(self, x: float, y: float, width: float, height: float, *, style: str, tip: str) -> None:
        """Draw a filled rectangle; `tip` is shown when somebody points at it."""
        self._parts.append(
            f'<rect class="{style} fill" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}">'
            f"<title>{html.escape(tip)}</title></rect>"
        )

    def legend(self, x: float, y: float, entries: Sequence[tuple[str, str]]) -> None:
        """Name the classes, (style, name), from `x` to the left."""
        for style, name in reversed(entries):
            x -= 6.4 * len(name) + 8
            self.text(x, y, name, style="muted small")
            x -= 15
            self._parts.append(
                f'<rect class="{style} fill" x="{x:.1f}" y="{y - 8.5:.1f}" width="10" height="10" rx="2"/>'
            )
            x -= 8

    def axes(
        self,
        x: Scale,
        y: Scale,
        *,
        x_text: Callable[[float], str],
        y_text: Callable[[float], str],
        x_ticks: int = 10,
        y_ticks: int = 4,
    ) -> None:
        """Draw the grid and what it means, below and to the left of the plot."""
        for value in y.ticks(y_ticks):
            self.line(x.first, y(value), x.last, y(value), style="grid")
            self.text(x.first - 8, y(value) + 4, y_text(value), style="muted small", anchor="end")
        self.line(x.first, y.first, x.last, y.first, style="axis")
        for value in x.ticks(x_ticks):
            self.line(x(value), y.first, x(value), y.first + 4, style="axis")
            self.text(x(value), y.first + 17, x_text(value), style="muted small", anchor="middle")

    def document(self) -> str:
        """Give the whole picture; it refers to nothing outside."""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'height="{self.height}" role="img"><title>{html.escape(self.title)}</title><style>{_STYLE}</style>'
            f'<rect class="surface" width="{self.width}" height="{self.height}" rx="8"/>'
            + "".join(self._parts)
            + "</svg>\n"
        )
