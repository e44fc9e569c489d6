"""From the runs of a race to the table of goals, and both tables as Markdown (pure).

A *goal* is a figure that counts, what it must be and what it aims at. Figures are medians over a cell's rounds.
The unit of the first two rows is F/B, the time that the link needs for the bytes that gVisor waits for before the first
answer: F (bytes) is measured once per heap and request, by a reference run; B is the cell's link.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from bench.race_cells import CONTESTANTS, LEARNED_LEAD_S, TITLES, Cell, Run

# What a release is compared with: the chunk size of a snapshot (streamd/snapshot/manifest.py).
CHUNK_BYTES = 256 << 10
_FIRST_SAMPLE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Goal:
    """A row. `values` are None where the race didn't measure them; `must` and `aim` have one limit for each value.

    `is_least`: the limits are lower ones.
    """

    title: str
    values: tuple[float | None, ...]
    must: tuple[float, ...]
    aim: tuple[float, ...]
    is_least: bool = False

    def verdict(self) -> str:
        """Say which limits all values keep; what wasn't measured keeps none."""
        if any(value is None for value in self.values):
            return "not measured"
        if self._keeps(self.aim):
            return "aim"
        return "must" if self._keeps(self.must) else "MISSED"

    def _keeps(self, limits: tuple[float, ...]) -> bool:
        pairs = zip(self.values, limits, strict=True)
        return all(v is not None and (v >= limit if self.is_least else v <= limit) for v, limit in pairs)


@dataclass(frozen=True, slots=True)
class Race:
    """All that a race measured. `awaited_bytes`: F by (heap name, request)."""

    cells: Sequence[Cell]
    runs: Sequence[Run]
    awaited_bytes: Mapping[tuple[str, str], int]

    def values(self, cell: str, contestant: str, figure: Callable[[Run], float | None]) -> list[float]:
        """Give a figure of each run of one contestant in one cell, where it has one."""
        found = (figure(run) for run in self.runs if (run.cell, run.contestant) == (cell, contestant))
        return [value for value in found if value is not None]

    def median(self, cell: str, contestant: str, figure: Callable[[Run], float | None]) -> float | None:
        values = self.values(cell, contestant, figure)
        return statistics.median(values) if values else None

    def unit_s(self, cell: Cell) -> float | None:
        """F/B: the seconds that the cell's link needs for what the first answer waits for."""
        awaited = self.awaited_bytes.get((cell.heap.name, cell.request))
        return awaited / cell.link_bytes_per_s if awaited else None

    def excess(self, cell: Cell, first_s: float | None) -> float | None:
        """(first request − T0) ÷ (F/B); T0 is the first request from the local directory."""
        local_s, unit_s = self.median(cell.name, "local", first), self.unit_s(cell)
        return None if first_s is None or local_s is None or unit_s is None else (first_s - local_s) / unit_s


def first(run: Run) -> float:
    """Give the time from the start of runsc to the first answer."""
    return run.first_s


def first_from_nothing(run: Run) -> float:
    """Give the time from asking for the image (or starting to mount, or to download) to the first answer."""
    return run.lead_s + run.first_s


def first_learned(run: Run) -> float:
    """Give the time from LEARNED_LEAD_S after asking for the image to the first answer.

    That is the start of runsc, unless it took longer to get it: then the wait for it counts.
    """
    return run.lead_s + run.first_s - LEARNED_LEAD_S


def loaded_from_nothing(run: Run) -> float:
    """Give the time from asking for the image (or starting to mount, or to download) until all memory was there."""
    return run.lead_s + run.loaded_s


def link_use(
    samples: Sequence[tuple[float, int]], *, wire_bytes: int, until_s: float, bytes_per_s: float
) -> float | None:
    """Give the share of a link that was used from the first MiB on; None when less came.

    `samples`: (time, bytes that had arrived), ascending, the first before anything came. `wire_bytes`: all that the
    link carried, `until_s`: when the load was over.
    """
    base = samples[0][1]
    for at_s, received in samples:
        if received - base >= _FIRST_SAMPLE_BYTES and until_s > at_s:
            return (wire_bytes - (received - base)) / (bytes_per_s * (until_s - at_s))
    return None


# From when a first request counts, where it isn't from nothing (as the goal defines it).
_FIGURES = {"streamd-learned": first_learned, "streamd-warm": first}


def goals(race: Race) -> list[Goal]:
    """Give the table of goals."""
    cells = {cell.name: cell for cell in race.cells}
    compact, large = cells.get("region"), cells.get("large")

    def loaded_ratio(cell: str) -> float | None:
        ours = race.median(cell, "streamd-first", loaded_from_nothing)
        return _ratio(ours, race.median(cell, "gvisor-gcs", loaded_from_nothing))

    def excess(contestant: str, figure: Callable[[Run], float]) -> float | None:
        return race.excess(compact, race.median("region", contestant, figure)) if compact else None

    gap_unit_s = CHUNK_BYTES / compact.link_bytes_per_s if compact else None
    first_ever, learned = ("streamd-first", first_from_nothing), ("streamd-learned", first_learned)
    reader_s = race.median("large", "gvisor-gcs", first) if large else None
    return [
        Goal("(first request − T0) ÷ (F/B), first restore ever", (excess(*first_ever),), (2.0,), (1.2,)),
        Goal("(first request − T0) ÷ (F/B), order learned, lead 1.0 s", (excess(*learned),), (0.7,), (0.2,)),
        Goal(
            "first request, 4 × larger image ÷ the smaller one's: first ever / learned",
            tuple(_ratio(race.median("large", *who), race.median("region", *who)) for who in (first_ever, learned)),
            (1.15, 1.15),
            (1.03, 1.03),
        ),
        Goal(
            "first request ÷ gVisor's GCS reader's, 3.2 GB: first ever / learned",
            tuple(_ratio(race.median("large", *who), reader_s) for who in (first_ever, learned)),
            (0.15, 0.08),
            (0.08, 0.035),
        ),
        Goal(
            "all loaded ÷ gVisor's GCS reader's: incompressible / halves under zstd",
            (loaded_ratio("region"), loaded_ratio("compressible")),
            (1.1, 0.7),
            (1.0, 0.55),
        ),
        Goal(
            "link used while loading",
            (race.median("region", "streamd-first", lambda run: run.link_use),),
            (0.85,),
            (0.95,),
            is_least=True,
        ),
        Goal(
            "p99 of the time between two releases ÷ (chunk bytes / B)",
            (_ratio(race.median("region", "streamd-first", _gap_p99), gap_unit_s),),
            (8.0,),
            (3.0,),
        ),
        Goal(
            "server CPU per GB served ÷ curl's to a file",
            (_ratio(race.median("region", "streamd-first", _server_cpu), race.median("region", "copy", _curl_cpu)),),
            (4.0,),
            (2.0,),
        ),
        Goal(
            "first request, an order that misleads ÷ none",
            (
                _ratio(
                    race.median("region", "streamd-misled", first_from_nothing),
                    race.median("region", "streamd-first", first_from_nothing),
                ),
            ),
            (1.05,),
            (1.0,),
        ),
        Goal(
            "warm image: first request ÷ T0",
            (_ratio(race.median("region", "streamd-warm", first), race.median("region", "local", first)),),
            (1.1,),
            (1.0,),
        ),
    ]


def _gap_p99(run: Run) -> float | None:
    return run.served.release_gap_p99_s if run.served else None


def _server_cpu(run: Run) -> float | None:
    return run.served.cpu_s / (run.served.bytes / 1e9) if run.served and run.served.bytes else None


def _curl_cpu(run: Run) -> float | None:
    return run.download_cpu_s / (run.download_bytes / 1e9) if run.download_cpu_s and run.download_bytes else None


def _ratio(value: float | None, to: float | None) -> float | None:
    return None if value is None or not to else value / to


def wrong(race: Race) -> list[Run]:
    """Give the runs whose memory wasn't what was saved."""
    return [run for run in race.runs if not run.answer_right or run.memory_right is False]


def markdown(race: Race) -> str:
    """Write the table of goals, and below it what every contestant took in every cell."""
    lines = ["| goal | measured | must | aim | |", "|---|---|---|---|---|"]
    for goal in goals(race):
        sign = "≥" if goal.is_least else "≤"
        must, aim = (f"{sign} {_joined(limits)}" for limits in (goal.must, goal.aim))
        lines.append(f"| {goal.title} | {_joined(goal.values)} | {must} | {aim} | {goal.verdict()} |")
    for cell in race.cells:
        lines += ["", *_cell_table(race, cell)]
    return "\n".join(lines) + "\n"


def _cell_table(race: Race, cell: Cell) -> Iterable[str]:
    """Seconds, median (least–most); times from the start of the mount where that is what a user waits for."""
    unit_s = race.unit_s(cell)
    unit = f", F/B = {unit_s:.2f} s" if unit_s else ""
    yield (
        f"**{cell.name}**: heap of {cell.heap.mib} MiB ({cell.heap.kind}), `{cell.request}`, "
        f"{cell.bit_per_s / 1e6:g} Mbit/s{unit}"
    )
    yield ""
    yield (
        "| | rounds | began before runsc | first request, from runsc | (first − T0) ÷ (F/B) | all loaded, from runsc "
        "| link | gVisor: waiters, stopped, awaited |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for contestant in CONTESTANTS:
        rounds = len(race.values(cell.name, contestant, first))
        if not rounds:
            continue
        figure = _FIGURES.get(contestant, first_from_nothing)
        excess = race.excess(cell, race.median(cell.name, contestant, figure))
        columns = [
            TITLES[contestant],
            str(rounds),
            _spread(race.values(cell.name, contestant, lambda run: run.lead_s)),
            _spread(race.values(cell.name, contestant, first)),
            "–" if excess is None else f"{excess:.2f}",
            _spread(race.values(cell.name, contestant, lambda run: run.loaded_s)),
            _percent(race.median(cell.name, contestant, lambda run: run.link_use)),
            _said(race, cell, contestant),
        ]
        yield f"| {' | '.join(columns)} |"


def _said(race: Race, cell: Cell, contestant: str) -> str:
    figures = [
        race.median(cell.name, contestant, lambda run: run.loading.waiters if run.loading else None),
        race.median(cell.name, contestant, lambda run: run.loading.stopped_s if run.loading else None),
        race.median(cell.name, contestant, lambda run: run.loading.awaited_bytes if run.loading else None),
    ]
    match figures:
        case [float() | int() as waiters, float() | int() as stopped_s, float() | int() as awaited]:
            return f"{waiters:.0f}, {stopped_s:.2f} s, {awaited / 1e6:.0f} MB"
        case _:
            return "–"


def _spread(values: Sequence[float]) -> str:
    if len(values) < 2:
        return " ".join(f"{value:.2f}" for value in values)
    return f"{statistics.median(values):.2f} ({min(values):.2f}–{max(values):.2f})"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def _joined(values: Iterable[float | None]) -> str:
    return " / ".join("–" if value is None else f"{value:.3g}" for value in values)
