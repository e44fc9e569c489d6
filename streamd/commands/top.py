"""`streamd top`: the node's images as they load."""

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from streamd.commands.image_facts import GONE, ImageFacts, count_text, facts_of, in_use, wait_text
from streamd.commands.invocation import Invocation, duration
from streamd.commands.output import age_text, print_table, printable
from streamd.config import size_text
from streamd.daemon.client import Answer, DaemonClient
from streamd.errors import StreamdError

if TYPE_CHECKING:
    from rich.console import RenderableType

_LEAST_INTERVAL_S = 0.1
# The cache is a directory, on a disk that may hang: it is looked at more rarely, and waited for shortly.
_CACHE_EVERY_S = 10.0
_CACHE_WAIT_S = 2.0
_HEADER = (
    *("IMAGE", "SNAPSHOT", "STATE", "RESIDENT", "STORE MB/s", "READ MB/s", "OPEN", "LEASES"),
    *("FAULT WAITS", "P50", "P99", "STALLS", "RESTARTS", "WORKER", "PROBLEM"),
)
_NUMBERS = frozenset(_HEADER) - {"IMAGE", "SNAPSHOT", "STATE", "PROBLEM"}


@dataclass(frozen=True, slots=True)
class Sample:
    """What the node said at a moment: `at_s` of a clock that only goes forward, `now_s` in Unix time."""

    at_s: float
    now_s: float
    health: Answer
    images: Sequence[ImageFacts]
    cache: str


@click.command("top")
@click.option(
    "--interval",
    "interval_s",
    metavar="DURATION",
    callback=duration,
    default="1s",
    show_default=True,
    help="How often it looks.",
)
@click.option("--once", is_flag=True, help="Look twice, an interval apart, print the table, and end.")
@click.pass_obj
def command(invocation: Invocation, interval_s: float, once: bool) -> None:
    """Watch the daemon's images as they load; Ctrl-C ends it.

    STORE MB/s is what the store sends, `of` how much where that is limited (stopped threads don't wait for a limit),
    READ MB/s what readers get. FAULT WAITS counts reads of stopped threads that had to wait, P50 and P99 say for how
    long; STALLS are reads that waited for too long. Images that somebody uses come first. While the daemon is restarted
    the view stays and says so.

    \b
    Example:
      streamd top --interval 2s
    """
    if interval_s < _LEAST_INTERVAL_S:
        raise click.BadParameter(f"must be at least {_LEAST_INTERVAL_S:g}s", param_hint="--interval")
    if not once and not sys.stdout.isatty():
        raise click.UsageError("the live view needs a terminal; with --once it is printed")
    watch = _Watch(invocation.config().run_directory)
    first = watch.look()  # without a daemon there is nothing to show
    if once:
        time.sleep(interval_s)
        sample = watch.look()
        for line in summary(sample, first):
            click.echo(line)
        if sample.images:
            print_table(_HEADER, rows(sample, first))
        return
    with suppress(KeyboardInterrupt):
        _show_live(watch, first, interval_s)


class _Watch:
    """Asks the daemon, the cache now and then."""

    def __init__(self, run_directory: Path) -> None:
        self._client = DaemonClient(run_directory)
        self._patient_for_cache = DaemonClient(run_directory, wait_s=_CACHE_WAIT_S)
        self._cache = ""
        self._cache_at_s: float | None = None

    def look(self) -> Sample:
        """Give the node's state of now. Raises: `NoDaemon`, `NoAnswer`, `NotPermitted`."""
        health, images = self._client.health(), self._client.images()
        at_s = time.monotonic()
        if self._cache_at_s is None or at_s - self._cache_at_s >= _CACHE_EVERY_S:
            self._cache, self._cache_at_s = self._look_at_cache(), at_s
        facts = [facts for facts in map(facts_of, images) if facts.state != GONE]
        return Sample(at_s=at_s, now_s=time.time(), health=health, images=facts, cache=self._cache)

    def _look_at_cache(self) -> str:
        try:
            return cache_text(self._patient_for_cache.cache())
        except StreamdError as error:
            return f"cache: {error}"


def cache_text(cache: Answer) -> str:
    """Say in a line how full the cache is, or why it isn't used."""
    if cache.get("problem"):
        return f"cache: not used: {cache['problem']}"
    if cache.get("directory") is None:
        return "cache: none (cache.enabled = false)"
    sizes = {name: cache.get(f"{name}_bytes") for name in ("used", "max", "free")}
    used, most, free = (size_text(size) if isinstance(size, int) else "–" for size in sizes.values())
    return f"cache: {used} of {most}, {free} free on its disk"


def summary(sample: Sample, before: Sample | None) -> list[str]:
    """Say in lines how the node is."""
    health = sample.health
    started_s = health.get("started_s")
    up = f", up {age_text(sample.now_s - started_s)}" if isinstance(started_s, int | float) else ""
    used = f"{count_text(len(sample.images), 'image')}, {len(in_use(sample.images))} in use"
    rates = [_rates(image, sample, before) for image in sample.images]
    store, read = (sum(rate or 0.0 for rate in column) for column in zip(*rates, strict=True)) if rates else (0.0, 0.0)
    limit = _limit_text(health.get("fetch_max_bytes_per_s"))
    draining = "; draining: no new images" if health.get("is_draining") else ""
    warnings = health.get("warnings")
    lines = [
        f"streamd {health.get('version')} (pid {health.get('pid')}{up}): {used}{draining}",
        f"from the store {store:.1f}{limit} MB/s, to readers {read:.1f} MB/s; {sample.cache}",
        *(f"warning: {warning}" for warning in (warnings if isinstance(warnings, list) else [])),
    ]
    return list(map(printable, lines))


def rows(sample: Sample, before: Sample | None) -> list[list[object]]:
    """Give the table's rows; those in use first, else in the daemon's order."""
    found: list[list[object]] = []
    for image in sorted(sample.images, key=lambda image: not image.is_in_use):
        store, read = ("–" if rate is None else f"{rate:.1f}" for rate in _rates(image, sample, before))
        store += _limit_text(image.fetch_max_bytes_per_s)
        waits = (image.fault_p50_ms, image.fault_p99_ms)
        median, most = map(wait_text, waits) if image.fault_waits else ("–", "–")
        found.append(
            [
                *(image.short_id, image.name, image.state, image.resident, store, read, image.openers, image.leases),
                *(image.fault_waits, median, most, image.stalls),
                *(image.restarts, image.worker_age(sample.now_s), image.note),
            ]
        )
    return found


def _rates(image: ImageFacts, sample: Sample, before: Sample | None) -> tuple[float | None, float | None]:
    """Give MB/s from the store and to readers since the sample before; None where that can't be said."""
    earlier: Mapping[str, ImageFacts] = {} if before is None else {other.id: other for other in before.images}
    former = earlier.get(image.id)
    if former is None or before is None or sample.at_s <= before.at_s:
        return None, None
    seconds = sample.at_s - before.at_s
    differences = (image.store_bytes - former.store_bytes, image.read_bytes - former.read_bytes)
    # Counted anew: a daemon that has taken over knows what its worker has done, not its predecessors.
    store, read = (None if difference < 0 else difference / seconds / 1e6 for difference in differences)
    return store, read


def _limit_text(bytes_per_s: object) -> str:
    """Write what a rate is bounded by, nothing where it isn't."""
    return f" of {bytes_per_s / 1e6:.1f}" if isinstance(bytes_per_s, int) and bytes_per_s else ""


def _show_live(watch: _Watch, sample: Sample, interval_s: float) -> None:
    """Show the view until interrupted; a daemon that goes away is waited for."""
    from rich.console import Console
    from rich.live import Live

    before: Sample | None = None
    trouble = ""
    with Live(console=Console(), screen=True, auto_refresh=False) as live:
        while True:
            live.update(_screen(sample, before, trouble), refresh=True)
            time.sleep(interval_s)
            try:
                before, sample, trouble = sample, watch.look(), ""
            except StreamdError as error:
                trouble = f"{error}; the last that it said:"


def _screen(sample: Sample, before: Sample | None, trouble: str) -> "RenderableType":
    """Lay the view out. Text objects throughout: in plain strings rich would look for markup."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, expand=True)
    for name in _HEADER:
        table.add_column(
            Text(name),
            justify="right" if name in _NUMBERS else "left",
            no_wrap=True,
            overflow="ellipsis",
            ratio=1 if name == "PROBLEM" else None,
        )
    for row in rows(sample, before):
        table.add_row(*(Text(printable(cell)) for cell in row))
    lines = [Text(line, no_wrap=True, overflow="ellipsis") for line in summary(sample, before)]
    notice = [Text(printable(trouble), style="bold red")] if trouble else []
    return Group(*notice, *lines, Text(), table if sample.images else Text("no images"))
