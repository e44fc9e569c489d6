"""The kill matrix: processes of a daemon are killed at random moments, most of them under a reader like runsc's.

What each kill may cost its reader is in a table. How long a pause was is measured, and printed; only a hang fails.
100 kills with STREAMD_STRESS=full, else 8. The seed is in the output, and STREAMD_KILL_SEED repeats it, as far as
processes let it. STREAMD_KILL_JSON names the file that the figures go to (else one in the test's own directory).
"""

import json
import math
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from bench.daemons import Daemon, ServedImage
from bench.event_tape import until
from bench.mount_users import pause_s
from bench.mounts import Reader

if TYPE_CHECKING:
    from tests.stress.conftest import Snapshot

# A takeover takes tenths of a second.
PAUSE_MAX_S = 10.0
# With one that dies twice they are as many deaths as the daemon puts up with in a minute.
_KILLS_A_SITTING = 4
# 25 MB are stored, so a reader needs 3 s and what its pauses take; from the cache it reads the image over and over. At
# that speed a pause is also what the next worker waits for its first bytes: it has no cache.
_COLD = "?rate=8MB/s"
_WARM_PASSES = 60
_GONE = {"EIO", "ECONNABORTED", "ENOTCONN"}


class Kill(Enum):
    """Who is killed, all at once."""

    WORKER = "worker"
    TAKEOVER = "worker, and the next one in its first moment"
    SPAWNER = "spawner and worker"
    SUPERVISOR = "supervisor"
    ALL = "supervisor and worker"


# What a reader may see. Without a service manager nobody keeps the connection when both of them are gone.
ALLOWED: dict[Kill, set[str]] = {
    Kill.WORKER: set(),
    Kill.TAKEOVER: set(),
    Kill.SPAWNER: set(),
    Kill.SUPERVISOR: set(),
    Kill.ALL: _GONE,
}
# The last kill of a sitting, in turns: where the supervisor goes, nobody replaces workers any more.
_LAST = (Kill.SUPERVISOR, Kill.ALL, Kill.WORKER, Kill.SPAWNER)
_BEFORE = ((Kill.WORKER, Kill.SPAWNER, Kill.WORKER), (Kill.WORKER, Kill.TAKEOVER, Kill.WORKER))


@dataclass(frozen=True, slots=True)
class Row:
    """One kill, while somebody read or not. `pause_s`: the longest time around it in which no read ended."""

    kill: Kill
    is_warm: bool
    at_s: float
    is_read: bool
    pause_s: float | None = None


def test_kills_at_random_moments_cost_a_pause(snapshot: "Snapshot", tmp_path: Path, is_full: bool) -> None:
    seed = int(os.environ.get("STREAMD_KILL_SEED") or random.SystemRandom().randrange(1 << 32))
    kills = 100 if is_full else 8
    print(f"STREAMD_KILL_SEED={seed}, {kills} kills")
    dice = random.Random(seed)
    rows: list[Row] = []
    for number in range(kills // _KILLS_A_SITTING):
        kinds = [*dice.sample(_BEFORE[number % 2], _KILLS_A_SITTING - 1), _LAST[number % len(_LAST)]]
        rows += _sitting(dice, snapshot, kinds, is_warm=(number + number // len(_LAST)) % 2 == 1)
    path = Path(os.environ.get("STREAMD_KILL_JSON") or tmp_path / "kill_matrix.json")
    figures = {name: _figures(chosen) for name, chosen in _groups(rows)}
    path.write_text(json.dumps({"seed": seed, "kills": len(rows), "figures": figures}, indent=2))
    _print_table(figures)
    print(f"figures: {path}")
    assert sum(row.is_read for row in rows) > len(rows) / 2
    assert max(row.pause_s or 0.0 for row in rows) <= PAUSE_MAX_S


def _sitting(dice: random.Random, snapshot: "Snapshot", kinds: Sequence[Kill], *, is_warm: bool) -> list[Row]:
    """Kill a few times under one daemon and one image, and see what its reader got."""
    last = kinds[-1]
    rows: list[Row] = []
    with Daemon(has_cache=is_warm) as daemon:
        image = daemon.image(snapshot.file_url + ("" if is_warm else _COLD))
        if is_warm:
            assert image.reader(snapshot.pages).outcome().is_clean
        before = image.mounts()
        reader = image.reader(snapshot.pages, passes=_WARM_PASSES if is_warm else 1)
        image.until_open(reader)
        for kind in kinds:
            time.sleep(dice.uniform(0.0, 0.3))
            rows.append(_kill(kind, image, reader, is_warm=is_warm))
        outcome = reader.outcome()
        assert outcome.wrong == outcome.short == []
        assert {name for _, name in outcome.errors} <= ALLOWED[last], rows
        size = snapshot.pages.stat().st_size * (_WARM_PASSES if is_warm else 1)
        assert outcome.errors or outcome.right_bytes == size
        if last is not Kill.ALL:
            assert image.mounts() == before
        assert daemon.complaints() == []
    # A reader whose reads have failed has no pause.
    return [
        replace(row, pause_s=pause_s(outcome.gaps, row.at_s)) if row.is_read and row.kill is not Kill.ALL else row
        for row in rows
    ]


def _kill(kind: Kill, image: ServedImage, reader: Reader, *, is_warm: bool) -> Row:
    """Kill, and wait until readers are served again, where they will be."""
    daemon = image.daemon
    known = len(daemon.tape.of("worker-replaced", image=image.id))
    pid = image.worker_pid()
    if kind is Kill.SPAWNER:
        daemon.send(daemon.spawner_pid(), signal.SIGKILL)
    is_read = not reader.is_done()
    at_s = time.monotonic()
    if kind in (Kill.SUPERVISOR, Kill.ALL):
        daemon.stop(signal.SIGKILL)
    if kind is not Kill.SUPERVISOR:
        daemon.send(pid, signal.SIGKILL)
    if kind is Kill.TAKEOVER:
        daemon.send(image.until_replaced(pid), signal.SIGKILL)
    if kind in (Kill.SUPERVISOR, Kill.ALL):
        until(lambda: daemon.pid not in daemon.process_ids(), "the supervisor's end")
    else:
        daemon.tape.until("worker-replaced", image=image.id, count=known + 1)
    return Row(kind, is_warm, at_s, is_read)


def _groups(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    for kill in Kill:
        yield kill.value, [row for row in rows if row.kill is kill]
    replaced = [row for row in rows if row.kill not in (Kill.SUPERVISOR, Kill.ALL)]
    yield "all that are replaced, while it loads", [row for row in replaced if not row.is_warm]
    yield "all that are replaced, from the cache", [row for row in replaced if row.is_warm]


def _figures(rows: Sequence[Row]) -> dict[str, float | None]:
    pauses = sorted(row.pause_s for row in rows if row.pause_s is not None)
    return {
        "kills": len(rows),
        "while_read": sum(row.is_read for row in rows),
        "pause_p50_s": _quantile(pauses, 0.5),
        "pause_p99_s": _quantile(pauses, 0.99),
        "pause_max_s": _quantile(pauses, 1.0),
    }


def _quantile(values: Sequence[float], share: float) -> float | None:
    """Give the nearest rank of sorted values."""
    return round(values[max(0, math.ceil(share * len(values)) - 1)], 3) if values else None


def _print_table(figures: dict[str, dict[str, float | None]]) -> None:
    print(f"\n{'killed':46} {'kills':>6} {'read':>6} {'p50 s':>7} {'p99 s':>7} {'max s':>7}")
    for name, row in figures.items():
        kills, read, *pauses = ("" if value is None else value for value in row.values())
        print(f"{name:46} {kills:>6} {read:>6} " + " ".join(f"{value:>7}" for value in pauses))
