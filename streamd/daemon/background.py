"""How `mount` goes to the background: a new process that says over a pipe that it serves, or why it can't.

The child is a fork of the command, which has looked at its arguments and has neither threads nor clients yet: a fresh
interpreter would take 0.2 s to come as far. It gets its own session, and its output goes to the log. It writes one JSON
line to the pipe: `{"ready": {…}}` or `{"error": {…}}`; the parent returns, or ends with the same message and exit code.
The pipe ties them together until then: when the parent is gone the child's line can't be written, and it unmounts and
ends, since whoever wanted the mount believes that it failed.
"""

import hashlib
import json
import os
import re
import select
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from streamd.daemon.relay import error_record, relayed
from streamd.errors import NotPermitted, StreamdError
from streamd.safe_paths import SafeDirectory

_LINE_MAX_BYTES = 1 << 20
_TAIL_LINES = 10
_TAIL_MAX_BYTES = 4096
# A child that was told to stop waits for its mount's readers (policy: 10 s), and a little for its cache.
_STOP_WAIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Started:
    """A mount that serves: its process, its log, and what it said of itself."""

    pid: int
    log_path: Path
    ready: dict[str, object]


class ReadyPipe:
    """The child's end."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def ready(self, facts: dict[str, object]) -> None:
        """Report that the mount serves. Raises: `StreamdError` when nobody waits for it any more."""
        try:
            self._send({"ready": facts})
        except OSError as error:
            raise StreamdError("the command that started this mount is gone") from error

    def failed(self, error: StreamdError) -> None:
        """Report why it doesn't; does nothing once it was reported ready."""
        with suppress(OSError):
            self._send({"error": error_record(error)})

    def _send(self, message: dict[str, object]) -> None:
        if self._fd < 0:
            return
        with open(self._fd, "wb", buffering=0) as pipe:
            self._fd = -1
            pipe.write(json.dumps(message).encode() + b"\n")


def log_path(directory: Path, mountpoint: str) -> Path:
    """Give the log of a mountpoint: a readable name, and a few digits that tell `/a/b` from `/a-b`."""
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", mountpoint).strip("-.")[-80:] or "root"
    return directory / f"{readable}-{hashlib.sha256(os.fsencode(mountpoint)).hexdigest()[:6]}.log"


class Child:
    """A forked process, to wait for within a time; `returncode` is as subprocess gives it, None while it runs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._pidfd = os.pidfd_open(pid)

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end; false when it goes on."""
        if self.returncode is None:
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            if not poll.poll(timeout_s * 1000):
                return False
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return True

    def send_signal(self, number: signal.Signals) -> None:
        """Signal it; does nothing once it ended."""
        if self.returncode is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def close(self) -> None:
        """Let go of it; it may go on."""
        os.close(self._pidfd)


def start(*, log: Path, wait_s: float) -> Started | ReadyPipe:
    """Fork, and wait until the child serves. The child gets the `ReadyPipe`, and returns from here as well.

    The child is ended when it isn't ready within `wait_s`, or when this call is interrupted. Call it before there is
    any thread. Raises: the child's error, `StreamdError`, `NotPermitted`, `Refused` for a log that others can change.
    """
    try:
        with SafeDirectory.open(log.parent, make=True) as directory:
            log_fd = directory.open_file(log.name, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    except PermissionError as error:
        raise NotPermitted(f"log {log}: {error.strerror}") from error
    except OSError as error:
        raise StreamdError(f"log {log}: {error.strerror}") from error
    read_fd, write_fd = os.pipe()
    try:
        log_start = os.fstat(log_fd).st_size
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if not pid:
            pipe_fd = write_fd
            _leave(log_fd, keep=pipe_fd)
            read_fd = write_fd = log_fd = -1
            return ReadyPipe(pipe_fd)
        os.close(write_fd)
        write_fd = -1
        child = Child(pid)
        try:
            line = _read_line(read_fd, wait_s)
            if line is None:
                raise StreamdError(f"the mount did not serve within {wait_s:g} s; log: {log}")
            ready = _ready(child, line, log, log_start)
        except BaseException:
            _stop(child)
            raise
        finally:
            child.close()
    finally:
        for fd in (read_fd, write_fd, log_fd):
            if fd >= 0:
                os.close(fd)
    return Started(pid, log, ready)


def _leave(log_fd: int, *, keep: int) -> None:
    """Make this forked process one of its own: session, umask, descriptors. Whoever called the command may wait for the
    end of any that it was given."""
    os.setsid()
    os.umask(0o077)
    null_fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(null_fd, 0)
    os.close(null_fd)
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    for name in os.listdir("/proc/self/fd"):
        if (fd := int(name)) > 2 and fd != keep:
            with suppress(OSError):  # that of the listing itself
                os.close(fd)


def _read_line(fd: int, wait_s: float) -> bytes | None:
    """Read up to the end of a line or of the pipe; None when the time is over."""
    until_s = time.monotonic() + wait_s
    received = b""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while not received.endswith(b"\n") and len(received) < _LINE_MAX_BYTES:
        left_s = until_s - time.monotonic()
        if left_s <= 0 or not poll.poll(left_s * 1000):
            return None
        piece = os.read(fd, 1 << 16)
        if not piece:
            break
        received += piece
    return received


def _ready(child: Child, line: bytes, log: Path, log_start: int) -> dict[str, object]:
    """Give what the child reported. Raises: its error, or one that tells how it ended."""
    try:
        message = json.loads(line) if line else None
    except ValueError:
        message = None
    match message:
        case {"ready": dict(facts)}:
            return facts
        case {"error": record}:
            child.wait(_STOP_WAIT_S)
            raise relayed(record)
        case _:
            child.wait(_STOP_WAIT_S)
            raise StreamdError(_obituary(child.returncode, log, log_start))


def _obituary(returncode: int | None, log: Path, log_start: int) -> str:
    """Say how a child ended that said nothing, with the last lines of its log."""
    match returncode:
        case None:
            how = "hangs"
        case int(code) if code < 0:
            how = f"was killed by signal {-code}"
        case code:
            how = f"ended with exit code {code}"
    with open(log, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(log_start, size - _TAIL_MAX_BYTES))
        lines = file.read().decode(errors="replace").splitlines()[-_TAIL_LINES:]
    tail = "".join(f"\n  {line}" for line in lines)
    said = f"the last lines of its log {log}:{tail}" if lines else f"its log {log} says nothing"
    return f"the mount process {how} before it served; {said}"


def _stop(child: Child) -> None:
    """End the child: SIGTERM, so that it unmounts, and SIGKILL when that takes too long. Does nothing once it ended."""
    child.send_signal(signal.SIGTERM)
    if not child.wait(_STOP_WAIT_S):
        child.send_signal(signal.SIGKILL)
        child.wait(_STOP_WAIT_S)
