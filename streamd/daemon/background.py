"""How `mount` goes to the background: a new process that says over a pipe that it serves, or why it can't.

The child is started fresh (no fork of a process that has threads and clients), in its own session, with its output in
the log. It writes one JSON line to the pipe: `{"ready": {…}}` or `{"error": {…}}`; the parent returns, or ends with the
same message and exit code. The pipe ties them together until then: when the parent is gone the child's line can't be
written, and it unmounts and ends, since whoever wanted the mount believes that it failed.
"""

import hashlib
import json
import os
import re
import select
import site
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import streamd
from streamd.daemon.relay import error_record, relayed
from streamd.errors import NotPermitted, StreamdError

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
        os.set_inheritable(fd, False)
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


def start(arguments: Callable[[int], Sequence[str]], *, log: Path, wait_s: float) -> Started:
    """Run `streamd` in the background and wait until it serves; `arguments` are given the pipe's descriptor.

    The child is ended when it isn't ready within `wait_s`, or when this call is interrupted. Raises: the child's error,
    `StreamdError`, `NotPermitted`.
    """
    try:
        log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        log_fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except PermissionError as error:
        raise NotPermitted(f"log {log}: {error.strerror}") from error
    except OSError as error:
        raise StreamdError(f"log {log}: {error.strerror}") from error
    read_fd, write_fd = os.pipe()
    try:
        log_start = os.fstat(log_fd).st_size
        # -P: a module in the working directory must not be taken for one of ours or of our libraries.
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "streamd.cli", *arguments(write_fd)],
            stdin=subprocess.DEVNULL,
            stdout=log_fd,
            stderr=log_fd,
            pass_fds=[write_fd],
            start_new_session=True,
            umask=0o077,
            env=_environment(),
        )
        os.close(write_fd)
        write_fd = -1
        try:
            line = _read_line(read_fd, wait_s)
            if line is None:
                raise StreamdError(f"the mount did not serve within {wait_s:g} s; log: {log}")
            ready = _ready(child, line, log, log_start)
        except BaseException:
            _stop(child)
            raise
    finally:
        for fd in (read_fd, write_fd, log_fd):
            if fd >= 0:
                os.close(fd)
    return Started(child.pid, log, ready)


def _environment() -> dict[str, str]:
    """Give an environment in which -P finds the package that runs now, also when that is a checkout's."""
    root = str(Path(streamd.__file__).resolve().parents[1])
    if root in site.getsitepackages():
        return dict(os.environ)
    others = os.environ.get("PYTHONPATH")
    return os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{others}" if others else root}


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


def _ready(child: "subprocess.Popen[bytes]", line: bytes, log: Path, log_start: int) -> dict[str, object]:
    """Give what the child reported. Raises: its error, or one that tells how it ended."""
    try:
        message = json.loads(line) if line else None
    except ValueError:
        message = None
    match message:
        case {"ready": dict(facts)}:
            return facts
        case {"error": record}:
            _wait(child)
            raise relayed(record)
        case _:
            _wait(child)
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


def _wait(child: "subprocess.Popen[bytes]") -> bool:
    with suppress(subprocess.TimeoutExpired):
        child.wait(_STOP_WAIT_S)
    return child.returncode is not None


def _stop(child: "subprocess.Popen[bytes]") -> None:
    """End the child: SIGTERM, so that it unmounts, and SIGKILL when that takes too long. Does nothing once it ended."""
    child.terminate()
    if not _wait(child):
        child.kill()
        child.wait()
