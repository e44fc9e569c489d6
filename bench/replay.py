"""Ask a mount for what a recorded restore asked for, without runsc: the same reads, in the same order, 128 at a time.

    python -m bench.replay RECORD MOUNTPOINT [--paced] [--expected IMAGE/pages.img]

A restore's reads aren't those of `cat`: most are not aligned, faults jump ahead by whole windows, and what the
application freed is never asked for. Without `--paced` each of the slots takes the next read as soon as it has its
last, which is how a loader meets a faster server; with it no read comes before its recorded time, which keeps the
pauses of the application. It prints JSON: how long it took, and how long the reads of each recorded class waited.

Run it as a process of its own: a read that waits for a FUSE server can't be ended by a signal.
"""

import argparse
import errno
import json
import mmap
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from bench.slot_reader import SLOTS
from streamd.serve.order import Want
from streamd.serve.record import Record
from streamd.serve.record_file import decode
from streamd.snapshot.names import PAGES


@dataclass(frozen=True, slots=True)
class Read:
    """A recorded read: `at_s` is seconds after the first one, offset and size are bytes of pages.img."""

    at_s: float
    offset: int
    size: int
    want: Want


@dataclass(frozen=True, slots=True)
class Waited:
    """How long the reads of a class took, in milliseconds."""

    reads: int
    p50_ms: float
    p99_ms: float
    longest_ms: float


@dataclass(slots=True)
class Replayed:
    """What came of it. `wrong` and `short` are counts of reads, `errors` counts by errno name."""

    read_bytes: int = 0
    took_s: float = 0.0
    wrong: int = 0
    short: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    classes: dict[str, Waited] = field(default_factory=dict)


def recorded_reads(record: Record) -> list[Read]:
    """Give the reads of pages.img in the order in which they came, all handles together."""
    rows = record.reads_of(PAGES)
    began_us = rows["began_us"] - rows["began_us"][0] if len(rows) else rows["began_us"]
    columns = ((began_us / 1e6).tolist(), rows["start"].tolist(), rows["size"].tolist(), rows["want"].tolist())
    return [Read(at_s, start, size, Want(want)) for at_s, start, size, want in zip(*columns, strict=True)]


def replay(
    path: Path, reads: Sequence[Read], *, slots: int = SLOTS, paced: bool = False, expected: Path | None = None
) -> Replayed:
    """Make the reads of a file, `slots` at a time; compare with the file `expected` where one is given."""
    replayer = _Replayer(reads, paced=paced)
    with open(path, "rb", buffering=0) as file, open(expected or os.devnull, "rb", buffering=0) as right:
        fd, right_fd = file.fileno(), right.fileno() if expected is not None else None
        threads = [threading.Thread(target=replayer.slot, args=(fd, right_fd)) for _ in range(slots)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return replayer.finished()


class _Replayer:
    """What the threads share: the reads that are left, and what came of those that are done."""

    def __init__(self, reads: Sequence[Read], *, paced: bool) -> None:
        self._reads: Iterator[Read] = iter(reads)
        self._largest = max((read.size for read in reads), default=0) or 1
        self._paced = paced
        self._began_s = time.monotonic()
        self._lock = threading.Lock()
        self._outcome = Replayed()
        self._took_ms: dict[Want, list[float]] = {want: [] for want in Want}

    def slot(self, fd: int, right_fd: int | None) -> None:
        """Take reads and make them, until none is left."""
        with mmap.mmap(-1, self._largest) as buffer, memoryview(buffer) as view:
            while (read := self._take()) is not None:
                if self._paced:
                    time.sleep(max(0.0, self._began_s + read.at_s - time.monotonic()))
                began_s = time.monotonic()
                try:
                    got = os.preadv(fd, [view[: read.size]], read.offset)
                except OSError as error:
                    name = errno.errorcode.get(error.errno or 0, str(error.errno))
                    with self._lock:
                        self._outcome.errors[name] = self._outcome.errors.get(name, 0) + 1
                    continue
                took_ms = (time.monotonic() - began_s) * 1000
                is_wrong = right_fd is not None and view[:got] != os.pread(right_fd, got, read.offset)
                with self._lock:
                    self._took_ms[read.want].append(took_ms)
                    self._outcome.read_bytes += got
                    self._outcome.short += got < read.size
                    self._outcome.wrong += is_wrong

    def _take(self) -> Read | None:
        with self._lock:
            return next(self._reads, None)

    def finished(self) -> Replayed:
        """Sum up; call it once all slots have ended."""
        outcome = self._outcome
        outcome.took_s = time.monotonic() - self._began_s
        for want, took_ms in self._took_ms.items():
            if took_ms:
                p50, p99 = np.percentile(took_ms, (50, 99))
                outcome.classes[want.name.lower()] = Waited(len(took_ms), float(p50), float(p99), max(took_ms))
        return outcome


def main() -> int:
    """Do what the command line says; 1 when a read failed or was wrong."""
    parser = argparse.ArgumentParser(prog="python -m bench.replay", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("record", type=Path)
    parser.add_argument("mountpoint", type=Path)
    parser.add_argument("--slots", type=int, default=SLOTS, help="reads in flight [%(default)s]")
    parser.add_argument("--paced", action="store_true", help="no read before its recorded time")
    parser.add_argument("--expected", type=Path, metavar="FILE", help="compare with the right bytes")
    chosen = parser.parse_args()
    reads = recorded_reads(decode(chosen.record.read_bytes()))
    outcome = replay(chosen.mountpoint / PAGES, reads, slots=chosen.slots, paced=chosen.paced, expected=chosen.expected)
    print(json.dumps(asdict(outcome)))
    return 1 if outcome.errors or outcome.wrong or outcome.short else 0


if __name__ == "__main__":
    sys.exit(main())
