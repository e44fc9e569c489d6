"""A reader like runsc's: many reads in flight, in ascending order, every byte compared. Run as a process of its own.

    python bench/slot_reader.py MOUNTPOINT/pages.img IMAGE/pages.img [--slots 128] [--read-bytes 262144]

A read that waits for a FUSE server can't be ended by a signal, so whoever might have to wait for ever is a process that
can be left behind. It needs nothing but the standard library and starts in some 30 ms. On stdout it says one line of
JSON: `{"opened": true}` once the file is open, and at the end one with what it got (`Outcome`).
"""

import argparse
import contextlib
import ctypes
import errno
import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field

SLOTS = 128  # gVisor pkg/sentry/state/stateio/pagesfile.go
READ_BYTES = 256 << 10
# A gap worth telling; and how many of them are told, which a reader in its right mind doesn't reach.
GAP_S = 0.02
_GAPS_MAX = 1000


@dataclass(slots=True)
class Outcome:
    """What the reads got: bytes that were right, offsets of wrong bytes and of short reads, errors by errno name.

    `errors` holds [offset, name]; `signals` counts what interrupted the readers, `took_s` is from the first read on,
    `longest_s` the longest single read. `gaps` are the times of at least `GAP_S` in which no read ended: [when it
    began, by time.monotonic, which all processes share; how long it was].
    """

    right_bytes: int = 0
    reads: int = 0
    wrong: list[int] = field(default_factory=list)
    short: list[int] = field(default_factory=list)
    errors: list[tuple[int, str]] = field(default_factory=list)
    signals: int = 0
    took_s: float = 0.0
    longest_s: float = 0.0
    gaps: list[tuple[float, float]] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        """Whether nothing went wrong."""
        return not (self.wrong or self.short or self.errors)


class SlotReader:
    """`slots` threads that take the next range each, read it and compare it; a thread stops at its first error."""

    def __init__(self, fd: int, expected_fd: int, ranges: Iterator[tuple[int, int]], *, go_on: bool) -> None:
        self._fd = fd
        self._expected_fd = expected_fd
        self._ranges = ranges
        self._go_on = go_on
        self._lock = threading.Lock()
        self._read: Callable[[int, int], bytes] = lambda size, offset: os.pread(self._fd, size, offset)
        self.outcome = Outcome()
        self._last_end_s = 0.0

    def see_interrupts(self) -> None:
        """Read by libc's pread, since Python's own hides EINTR (PEP 475)."""
        libc = ctypes.CDLL(None, use_errno=True)
        libc.pread.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64]
        libc.pread.restype = ctypes.c_ssize_t

        def read(size: int, offset: int) -> bytes:
            buffer = ctypes.create_string_buffer(size)
            got = libc.pread(self._fd, buffer, size, offset)
            if got < 0:
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code))
            return buffer.raw[:got]

        self._read = read

    def run(self, slots: int, *, signal_every_s: float | None) -> Outcome:
        """Read all ranges."""
        if signal_every_s is not None:
            signal.signal(signal.SIGUSR1, lambda *_: None)
            self.see_interrupts()
        began_s = self._last_end_s = time.monotonic()
        threads = [threading.Thread(target=self._slot) for _ in range(slots)]
        for thread in threads:
            thread.start()
        while signal_every_s is not None and any(thread.is_alive() for thread in threads):
            for thread in threads:
                if thread.is_alive() and thread.ident is not None:
                    signal.pthread_kill(thread.ident, signal.SIGUSR1)
                    self.outcome.signals += 1
            time.sleep(signal_every_s)
        for thread in threads:
            thread.join()
        self.outcome.took_s = time.monotonic() - began_s
        return self.outcome

    def _slot(self) -> None:
        while True:
            with self._lock:
                item = next(self._ranges, None)
            if item is None or not (self._one(*item) or self._go_on):
                return

    def _one(self, offset: int, size: int) -> bool:
        expected = os.pread(self._expected_fd, size, offset)
        began_s = time.monotonic()
        failure: OSError | None = None
        got = b""
        try:
            got = self._read(size, offset)
        except OSError as error:
            failure = error
        ended_s = time.monotonic()
        outcome = self.outcome
        with self._lock:
            outcome.reads += 1
            outcome.longest_s = max(outcome.longest_s, ended_s - began_s)
            if ended_s - self._last_end_s >= GAP_S and len(outcome.gaps) < _GAPS_MAX:
                outcome.gaps.append((self._last_end_s, ended_s - self._last_end_s))
            self._last_end_s = max(self._last_end_s, ended_s)
            if failure is not None:
                outcome.errors.append((offset, errno.errorcode.get(failure.errno or 0, str(failure.errno))))
            elif got == expected:
                outcome.right_bytes += len(got)
            elif got != expected[: len(got)]:
                outcome.wrong.append(offset)
            else:
                outcome.short.append(offset)
        return failure is None


def ascending(start: int, end: int, size: int) -> Iterator[tuple[int, int]]:
    """Cut [start, end) into (offset, size) as runsc's stream asks for it."""
    return ((offset, min(size, end - offset)) for offset in range(start, end, size))


def main(arguments: Sequence[str] | None = None) -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description="Read a file as runsc does and compare it.")
    parser.add_argument("file")
    parser.add_argument("expected", help="file with the right bytes")
    parser.add_argument("--slots", type=int, default=SLOTS)
    parser.add_argument("--read-bytes", type=int, default=READ_BYTES)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--end", type=int)
    parser.add_argument("--passes", type=int, default=1, help="how often, one after another")
    parser.add_argument("--ranges", help="JSON: [[offset, size], …] instead of the whole file")
    parser.add_argument("--go-on", action="store_true", help="read on after an error")
    parser.add_argument("--signal-every-ms", type=float)
    chosen = parser.parse_args(arguments)
    expected_fd = os.open(chosen.expected, os.O_RDONLY)
    fd = os.open(chosen.file, os.O_RDONLY)
    print(json.dumps({"opened": True}), flush=True)
    end = os.fstat(expected_fd).st_size if chosen.end is None else chosen.end
    given = json.loads(chosen.ranges) if chosen.ranges else list(ascending(chosen.start, end, chosen.read_bytes))
    ranges = itertools.chain.from_iterable(itertools.repeat(given, chosen.passes))
    reader = SlotReader(fd, expected_fd, ranges, go_on=chosen.go_on)
    every_s = None if chosen.signal_every_ms is None else chosen.signal_every_ms / 1000
    outcome = reader.run(chosen.slots, signal_every_s=every_s)
    with contextlib.suppress(OSError):  # of a mount whose server has died
        os.close(fd)
    print(json.dumps(asdict(outcome)), flush=True)


if __name__ == "__main__":
    main()
