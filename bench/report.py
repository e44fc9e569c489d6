"""What every benchmark prints: JSON with its figures, the commit, the machine and the parameters."""

import json
import os
import platform
import statistics
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

_POLL_S = 0.02


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and most of some runs."""
    return {
        "median": round(statistics.median(values), 4),
        "min": round(min(values), 4),
        "max": round(max(values), 4),
        "runs": len(values),
    }


def description(name: str, parameters: Mapping[str, object], figures: Mapping[str, object]) -> dict[str, object]:
    """Give a benchmark's result, in what JSON can hold: what was measured, of what, where."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        check=False,
    )
    return {
        "benchmark": name,
        "commit": commit.stdout.strip(),
        "machine": {
            "cpus": os.cpu_count(),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "kernel": platform.release(),
            "python": platform.python_version(),
        },
        "parameters": dict(parameters),
        "figures": dict(figures),
    }


def publish(name: str, parameters: Mapping[str, object], figures: Mapping[str, object]) -> None:
    """Print a benchmark's result."""
    print(json.dumps(description(name, parameters, figures), indent=2), flush=True)


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used, in the kernel and outside (proc(5): stat, fields 14 and 15)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class PeakAnonymous:
    """Watches a process's anonymous memory (RssAnon) while it is entered; `peak_bytes` is the most that was seen."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.peak_bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(_POLL_S):
            self.peak_bytes = max(self.peak_bytes, anonymous_bytes(self._pid))


def anonymous_bytes(pid: int) -> int:
    """Anonymous memory of a process right now, 0 when it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    kib = next((line.split()[1] for line in lines if line.startswith("RssAnon:")), "0")
    return int(kib) << 10


def paired(first: Callable[[], float], second: Callable[[], float], rounds: int) -> tuple[list[float], list[float]]:
    """Take two measurements in turn, so that a machine that changes its speed changes both."""
    pairs = [(first(), second()) for _ in range(rounds)]
    return [a for a, _ in pairs], [b for _, b in pairs]
