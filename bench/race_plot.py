"""The race as a picture: for each cell a bar per contestant, to the first answer and until all is loaded."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.race_cells import CONTESTANTS, TITLES, Cell
from bench.race_figures import Race, first_from_nothing, loaded_from_nothing

_INCH_A_BAR = 0.3
_FIRST, _LOADED = "#1b6ca8", "#c9d6df"


def draw(race: Race, path: Path) -> None:
    """Write the picture as SVG. Bars begin when somebody began to wait, also for a mount that had a head start."""
    cells = [(cell, found) for cell in race.cells if (found := _present(race, cell))]
    heights = [len(found) + 2.0 for _, found in cells]
    figure = Figure(figsize=(9, _INCH_A_BAR * sum(heights) + 1.0), layout="constrained")
    for axes, (cell, found) in zip(
        figure.subplots(len(cells), 1, squeeze=False, height_ratios=heights)[:, 0], cells, strict=True
    ):
        # What takes minutes would press all others against the axis: its bar leaves the picture, its number stays.
        usual = [race.median(cell.name, c, loaded_from_nothing) or 0.0 for c in found if c != "gcsfuse"]
        end_s = 1.15 * max(usual, default=0.0) or None
        axes.set_xlim(0, end_s)
        for at, contestant in enumerate(found):
            _bar(axes, at, race.values(cell.name, contestant, loaded_from_nothing), _LOADED, "all loaded")
            answered = race.values(cell.name, contestant, first_from_nothing)
            _bar(axes, at, answered, _FIRST, "first request")
            inside = end_s is None or max(answered) < 0.9 * end_s
            axes.text(
                *(max(answered) if inside else end_s, at, f" {statistics.median(answered):.1f} s "),
                ha="left" if inside else "right",
                va="center",
                fontsize=8,
                color="black" if inside else "white",
            )
        axes.set_yticks(range(len(found)), [TITLES[contestant] for contestant in found], fontsize=8)
        axes.invert_yaxis()
        axes.set_title(
            f"{cell.name}: {cell.heap.mib} MiB, {cell.bit_per_s / 1e6:g} Mbit/s", loc="left", fontsize=9, weight="bold"
        )
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=2, fontsize=8, frameon=False)
    figure.axes[-1].set_xlabel("seconds since somebody began to wait (median, bar: least to most)", fontsize=8)
    figure.savefig(path, metadata={"Date": None})


def _bar(axes: Axes, at: int, values: Sequence[float], color: str, label: str) -> None:
    """Draw one bar: the median, with a mark from the least to the most."""
    middle = statistics.median(values)
    spread = [[middle - min(values)], [max(values) - middle]]
    axes.barh(at, middle, color=color, label=None if at else label, xerr=spread, error_kw={"capsize": 2, "lw": 0.8})


def _present(race: Race, cell: Cell) -> list[str]:
    """Give the contestants that ran in a cell."""
    ran = {run.contestant for run in race.runs if run.cell == cell.name}
    return [contestant for contestant in CONTESTANTS if contestant in ran]
