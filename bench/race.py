"""Race whole restores against the alternatives: one machine, one store, one shaped link, in turns.

    python -m bench.race                                      # all cells and rounds: within the hour
    python -m bench.race --quick --cells region --contestants local,streamd-first,streamd-learned

For each heap: a real sandbox is filled and saved, the store gets its image at full speed (its files as they are, and a
snapshot of them), a reference run finds F, and then the contestants take turns, round by round. What each
one is, and the exact command of each, is printed when it comes up and kept in the results.

Progress goes to stderr, the results as JSON to stdout; `--output DIR` gets race.json, race.md and race.svg. Everything
else that is made here is in one directory under $TMPDIR (or /var/tmp), in processes, and in a network namespace; all
of it is gone at the end, also after Ctrl-C and SIGTERM.
"""

import argparse
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from agent.errors import AgentError
from agent.runtime.arguments import GlobalOptions
from agent.runtime.loading import PageLoading
from agent.runtime.runsc import Runsc
from bench import race_contestants, race_workload
from bench.commands import CommandFailed
from bench.race_cells import (
    CELLS,
    CONTESTANTS,
    EVERY_ROUND,
    LATENCY_S,
    REFERENCE_BIT_PER_S,
    Cell,
    Loading,
    Run,
    shortened,
)
from bench.race_contestants import Ground, Ready
from bench.race_figures import Race, goals, link_use, markdown, wrong
from bench.race_plot import draw
from bench.race_restore import IMAGE_FILES, Image, Sandbox, restored, save
from bench.report import description
from bench.shaped_link import ShapedLink

RESULTS = Path(__file__).parent / "results"
_SAMPLE_S = 0.02
_BUCKET = "race"
_PUSH_S = 900.0


class _LinkWatch:
    """Notes how much has arrived, every 20 ms while it is entered."""

    def __init__(self, link: ShapedLink) -> None:
        self._link = link
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.samples = [(time.monotonic(), link.received_bytes())]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(_SAMPLE_S):
            self.samples.append((time.monotonic(), self._link.received_bytes()))


class _Course:
    """One race under way: `runs`, `awaited_bytes` (F by heap and request), `commands` and `failures` grow."""

    def __init__(self, directory: Path, runsc: Runsc, contestants: Sequence[str]) -> None:
        self._directory = directory
        self._runsc = runsc
        self._contestants = contestants
        self.runs: list[Run] = []
        self.awaited_bytes: dict[tuple[str, str], int] = {}
        self.commands: dict[str, str] = {}
        self.failures: list[str] = []

    def race_heap(self, cells: Sequence[Cell]) -> None:
        """Race in all cells of one heap; its image is gone at the end."""
        heap = cells[0].heap
        directory = self._directory / heap.name
        try:
            _say(f"{heap.name}: saving a sandbox with {heap.mib} MiB")
            image = save(self._runsc, directory, heap)
            with ShapedLink(_BUCKET, latency_s=LATENCY_S, data=_plain_files(image, directory / "data")) as link:
                # Read by runsc (which wants no scheme) and by streamd (which takes it with or without).
                os.environ["STORAGE_EMULATOR_HOST"] = link.address.partition("://")[2]
                ground = Ground(directory, link, image)
                _push(ground)
                try:
                    for cell in cells:
                        self._race_cell(ground, cell)
                finally:
                    ground.forget_resident()
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def _race_cell(self, ground: Ground, cell: Cell) -> None:
        self._find_awaited(ground, cell)
        ground.drop_trace()  # the order that another request's restores have left isn't this one's
        for number in range(cell.rounds):
            for contestant in self._contestants:
                is_extra = contestant in cell.extra or (contestant in cell.once and not number)
                if contestant not in EVERY_ROUND and not is_extra:
                    continue
                if program := race_contestants.missing(contestant):
                    _say(f"{cell.name}: {contestant} is left out: {program} isn't installed")
                    continue
                if contestant not in self.commands and (command := race_contestants.shown(ground, contestant)):
                    self.commands[contestant] = command
                    _say(f"{contestant}: $ {command}")
                try:
                    self._prepare(ground, cell, contestant)
                    run = self._run(ground, cell, contestant, number)
                except (AgentError, CommandFailed, subprocess.SubprocessError) as error:
                    # The others' hour isn't lost for it.
                    self.failures.append(f"{cell.name} {number + 1}: {contestant}: {error}")
                    _say(f"FAILED: {self.failures[-1]}")
                    continue
                self.runs.append(run)
                _say(_line(run))

    def _prepare(self, ground: Ground, cell: Cell, contestant: str) -> None:
        """Make what a contestant starts from, by a run that doesn't count, where no earlier one has left it."""
        if contestant in ("streamd-learned", "streamd-misled") and not ground.has_trace:
            self._run(ground, cell, "streamd-first", -1)
        if contestant == "streamd-warm" and ground.resident is None:
            self._prepare(ground, cell, "streamd-learned")
            self._run(ground, cell, "streamd-learned", -1)

    def _find_awaited(self, ground: Ground, cell: Cell) -> None:
        """Measure F, once for a heap and a request: only what is read is fetched, one request, then nothing."""
        key = (cell.heap.name, cell.request)
        if key not in self.awaited_bytes:
            ground.link.set_rate(REFERENCE_BIT_PER_S)
            with race_contestants.streamd_reference(ground) as ready, self._restored(ready, cell) as sandbox:
                loading = sandbox.loading()
            if loading is None:
                raise RuntimeError("gVisor's log says nothing about the load")
            self.awaited_bytes[key] = loading.awaited_bytes
            _say(f"{cell.name}: F = {loading.awaited_bytes / 1e6:.0f} MB")

    def _run(self, ground: Ground, cell: Cell, contestant: str, number: int) -> Run:
        ground.link.set_rate(cell.bit_per_s)  # and its counters begin anew
        with (
            _LinkWatch(ground.link) as watch,
            race_contestants.CONTESTANTS[contestant](ground) as ready,
            self._restored(ready, cell) as sandbox,
        ):
            timing, wire_bytes, served = sandbox.timing, ground.link.wire_bytes(), ready.served()
            heap = cell.heap
            return Run(
                cell=cell.name,
                contestant=contestant,
                round=number,
                lead_s=timing.started_s - ready.began_s,
                first_s=timing.answered_s - timing.started_s,
                loaded_s=timing.loaded_s - timing.started_s,
                wire_bytes=wire_bytes,
                link_use=link_use(
                    watch.samples,
                    wire_bytes=wire_bytes,
                    until_s=timing.loaded_s,
                    bytes_per_s=cell.link_bytes_per_s,
                ),
                answer_right=timing.answer == race_workload.right_answer(heap.kind, heap.mib, cell.request),
                memory_right=sandbox.memory_hash() == ground.image.memory_hash if not number else None,
                loading=_short(sandbox.loading()),
                served=served,
                download_cpu_s=ready.download_cpu_s,
                download_bytes=ground.image.bytes if ready.download_cpu_s is not None else None,
            )

    def _restored(self, ready: Ready, cell: Cell) -> contextlib.AbstractContextManager[Sandbox]:
        return restored(self._runsc, self._directory / cell.heap.name, ready.image, cell.heap, cell.request)


def _plain_files(image: Image, data: Path) -> str:
    """Lay out an image's files as they are for the store to begin with; give that directory.

    (Uploading gigabytes to the emulator takes minutes, since it grows a buffer for what it doesn't know the size of.)
    """
    directory = data / _BUCKET / race_contestants.plain_prefix(image.heap)
    directory.mkdir(parents=True)
    for name in IMAGE_FILES:
        os.link(image.directory / name, directory / name)
    return str(data)


def _push(ground: Ground) -> None:
    """Bring an image into the store as a snapshot, over a link that isn't shaped yet."""
    image = ground.image
    _say(f"{image.heap.name}: pushing {image.bytes / 1e6:.0f} MB")
    with race_contestants.own_streamd(ground) as streamd:
        store_url = f"gs://{_BUCKET}/snapshots"
        streamd.run("push", str(image.directory), store_url, "--id", image.heap.name, timeout_s=_PUSH_S)


def _short(loading: PageLoading | None) -> Loading | None:
    if loading is None:
        return None
    return Loading(
        took_s=loading.took_s,
        waiters=loading.waiters,
        stopped_s=loading.stopped_s,
        awaited_bytes=loading.awaited_bytes,
    )


def _line(run: Run) -> str:
    right = "right" if run.answer_right and run.memory_right is not False else "WRONG MEMORY"
    use = "" if run.link_use is None else f", link {run.link_use:.0%}"
    return (
        f"{run.cell} {run.round + 1}: {run.contestant:16} lead {run.lead_s:5.2f}  first {run.first_s:6.2f}  "
        f"loaded {run.loaded_s:6.2f} s{use}; {right}"
    )


def _say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def _published(race: Race, course: _Course, *, quick: bool) -> str:
    """Give the whole race as JSON."""
    figures = {
        "goals": [{**asdict(goal), "verdict": goal.verdict()} for goal in goals(race)],
        "awaited_bytes": {f"{heap} {request}": value for (heap, request), value in race.awaited_bytes.items()},
        "runs": [asdict(run) for run in race.runs],
        "failures": course.failures,
    }
    parameters = {
        "latency_s": LATENCY_S,
        "quick": quick,
        "cells": [asdict(cell) for cell in race.cells],
        "commands": course.commands,
    }
    return json.dumps(description("race", parameters, figures), indent=1)


def _chosen(text: str, known: Sequence[str]) -> list[str]:
    """Read a list of names, in the order of `known`."""
    names = text.split(",")
    if unknown := sorted(set(names) - set(known)):
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)} (of {', '.join(known)})")
    return [name for name in known if name in names]


def main() -> int:
    """Race; 1 when a restore failed or gave wrong memory."""
    names = [cell.name for cell in CELLS]
    parser = argparse.ArgumentParser(prog="python -m bench.race", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cells", type=lambda text: _chosen(text, names), default=names, metavar="NAME,…")
    parser.add_argument(
        "--contestants", type=lambda text: _chosen(text, CONTESTANTS), default=list(CONTESTANTS), metavar="NAME,…"
    )
    parser.add_argument("--rounds", type=int, help="in every cell")
    parser.add_argument("--quick", action="store_true", help="one round, a third of the memory: to see that it runs")
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="DIR", help="[%(default)s]")
    arguments = parser.parse_args()

    cells = [shortened(cell) if arguments.quick else cell for cell in CELLS if cell.name in arguments.cells]
    if arguments.rounds is not None:
        cells = [replace(cell, rounds=arguments.rounds) for cell in cells]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # leaves by the same door as Ctrl-C

    def keep(course: _Course) -> Race:
        """Write down what was raced so far."""
        race = Race(cells, course.runs, course.awaited_bytes)
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / "race.json").write_text(_published(race, course, quick=arguments.quick) + "\n")
        (arguments.output / "race.md").write_text(markdown(race))
        draw(race, arguments.output / "race.svg")
        return race

    try:
        course = _run_course(cells, arguments.contestants, keep)
    except KeyboardInterrupt:
        _say("interrupted; everything is cleaned up")
        return 130
    race = keep(course)
    print(_published(race, course, quick=arguments.quick), flush=True)
    print(markdown(race), file=sys.stderr)
    problems = [*course.failures, *(f"wrong memory: {run}" for run in wrong(race))]
    for problem in problems:
        _say(problem)
    return 1 if problems else 0


def _run_course(cells: Sequence[Cell], contestants: Sequence[str], keep: Callable[[_Course], object]) -> _Course:
    """Race in a directory of our own, and take everything away that was made; `keep` is called after each heap."""
    with contextlib.ExitStack() as stack:
        parent = os.environ.get("TMPDIR") or "/var/tmp"  # on a disk where /tmp may be memory
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="streamd-race-", dir=parent)))
        (directory / "log").mkdir()
        binary = Path(os.environ.get("RUNSC") or Path(__file__).parents[1] / ".tools" / "runsc")
        options = GlobalOptions(
            root=directory / "runsc", network="none", ignore_cgroups=True, debug_log_dir=directory / "log"
        )
        runsc = Runsc(binary, options)
        stack.callback(runsc.remove_root)
        course = _Course(directory, runsc, contestants)
        for _, of_one_heap in itertools.groupby(cells, key=lambda cell: cell.heap):
            course.race_heap(list(of_one_heap))
            keep(course)
    return course


if __name__ == "__main__":
    sys.exit(main())
