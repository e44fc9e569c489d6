"""What commands print: one JSON object for machines, text for people, progress on stderr where there is a terminal."""

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import click

# done bytes, total bytes (None: unknown), a short note
Report = Callable[[int, int | None, str], None]


_printed = False


def print_json(record: dict[str, object]) -> None:
    """Print the object that a command run with `--json` prints."""
    global _printed
    _printed = True
    click.echo(json.dumps(record))


def print_json_error(record: dict[str, object]) -> None:
    """Print an error as this process's JSON object, unless it printed its object already (a mount that served)."""
    if not _printed:
        print_json({"error": record})


def printable(text: object) -> str:
    """Make text from a store or another process safe for a terminal: what could be a control sequence is escaped."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in str(text))


def ratio_text(part: float, whole: float) -> str:
    """Write a share for people: `12.3 %`, or a dash of nothing."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def age_text(seconds: float) -> str:
    """Write an age for people, in its largest unit: `3 h`."""
    for length_s, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= length_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def time_text(epoch_s: float) -> str:
    """Write a moment in UTC: `2026-01-31 12:00:00Z`."""
    return time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(epoch_s))


def print_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print aligned columns, numbers to the right; never cut, so that pipes get whole words."""
    cells = [[printable(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    right = [bool(rows) and all(isinstance(row[index], int | float) for row in rows) for index in range(len(header))]
    for row in cells:
        line = (cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(row, widths, right, strict=True))
        click.echo("  ".join(line).rstrip())


def print_facts(facts: Sequence[tuple[str, object]]) -> None:
    """Print `name  value` lines, aligned."""
    lines = [(printable(name), printable(_value_text(value))) for name, value in facts]
    width = max((len(name) for name, _ in lines), default=0)
    for name, value in lines:
        click.echo(f"{name.ljust(width)}  {value}")


def flat_facts(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Write nested facts as `a.b` names."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        match value:
            case dict():
                yield from flat_facts(value, f"{name}.")
            case list():
                for index, item in enumerate(value):
                    yield from (
                        flat_facts(item, f"{name}.{index}.") if isinstance(item, dict) else [(f"{name}.{index}", item)]
                    )
            case _:
                yield name, value


def _value_text(value: object) -> object:
    """Write what JSON has words for in words for people."""
    match value:
        case None:
            return "–"
        case bool():
            return "yes" if value else "no"
        case _:
            return value


@contextmanager
def progress_bar(label: str) -> Iterator[Report]:
    """Show a bar with rate and remaining time on stderr if that is a terminal, else nothing.

    The callback may be called from any thread.
    """
    if not sys.stderr.isatty():
        yield lambda done, total, note: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(label, total=None, note="")

        def report(done: int, total: int | None, note: str) -> None:
            bars.update(task, completed=done, total=total, note=note)

        yield report
