"""Processes that use a mount, for tests and benchmarks: each may have to wait for its server, for ever.

So they are waited for with a limit, and ended once nothing can hold them any more (`daemons.Daemon.own`).
"""

import contextlib
import hashlib
import os
import select
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.mounts import LIMIT_S

# What the kernel gives a read whose connection is ended under it: our EIO, or the end itself.
GONE = frozenset({"EIO", "ECONNABORTED", "ENOTCONN"})
# A pause begins with the last read that ended before a kill, or with a reply that was under way.
_PAUSE_BEGINS_WITHIN_S = 0.05


def pause_s(gaps: Sequence[tuple[float, float]], at_s: float) -> float:
    """Give the longest time without an answer that a reader (`slot_reader.Outcome.gaps`) met around a moment."""
    met = (long_s for began_s, long_s in gaps if began_s - _PAUSE_BEGINS_WITHIN_S <= at_s <= began_s + long_s)
    return max(met, default=0.0)


class Command:
    """A process that may have to wait for a mount."""

    def __init__(self, vector: Sequence[str | Path], *, stdin: int = subprocess.DEVNULL) -> None:
        self.process = subprocess.Popen(
            [str(word) for word in vector], stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def is_done(self) -> bool:
        """Tell, without waiting, whether it has ended."""
        return self.process.poll() is not None

    def waits_for_a_mount(self) -> bool:
        """Whether it waits in the kernel for the answer of a FUSE server (proc_pid_wchan(5))."""
        with contextlib.suppress(OSError):
            return "request_wait_answer" in Path(f"/proc/{self.process.pid}/wchan").read_text()
        return False

    def result(self, limit_s: float = LIMIT_S) -> "subprocess.CompletedProcess[str]":
        """Wait for its end. Raises: `TimeoutExpired`, and it stays: nobody waits for a process that can't be killed."""
        out, err = self.process.communicate(timeout=limit_s)
        return subprocess.CompletedProcess(self.process.args, self.process.returncode, out, err)

    def end(self) -> None:
        """Kill it; call this once nothing can hold it any more."""
        self.process.kill()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self.process.wait(LIMIT_S)


_HOLDER = """
import errno, hashlib, os, sys
fd = -1
for line in sys.stdin:
    verb, *numbers = line.split()
    answer = "done"
    try:
        if verb == "open":
            fd = os.open(sys.argv[1], os.O_RDONLY)
        elif verb == "close":
            os.close(fd)
        else:
            offset, size = map(int, numbers)
            answer = hashlib.sha256(os.pread(fd, size, offset)).hexdigest()
    except OSError as error:
        answer = errno.errorcode.get(error.errno, str(error.errno))
    print(answer, flush=True)
"""


class FileHolder:
    """A process that has one file open for as long as it is told to."""

    def __init__(self, file: Path) -> None:
        self._command = Command([sys.executable, "-S", "-c", _HOLDER, file], stdin=subprocess.PIPE)

    def open(self) -> str:
        """Open the file; `done`, or an errno's name."""
        return self._ask("open")

    def close(self) -> str:
        """Close it."""
        return self._ask("close")

    def read(self, offset: int, size: int) -> str:
        """Read; the SHA-256 of what came (`digest`), or an errno's name."""
        return self._ask(f"read {offset} {size}")

    @staticmethod
    def digest(file: Path, offset: int, size: int) -> str:
        """Give what `read` must answer, from a file that isn't on a mount."""
        with file.open("rb") as right:
            return hashlib.sha256(os.pread(right.fileno(), size, offset)).hexdigest()

    def _ask(self, request: str) -> str:
        to, answers = self._command.process.stdin, self._command.process.stdout
        assert to is not None
        assert answers is not None
        to.write(f"{request}\n")
        to.flush()
        if not select.select([answers], [], [], LIMIT_S)[0]:
            raise TimeoutError(f"{request}: no answer within {LIMIT_S:g} s")
        return answers.readline().rstrip("\n")

    def end(self) -> None:
        """End the process."""
        self._command.end()
