"""One call of runsc: a process, what it says, and how long it is waited for.

The process that calls `create`, `run` or `restore` gives the container its standard streams, so runsc can't report
errors there; they go to a memory file whose path every call hands over as `--log`.
"""

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.errors import AgentError
from agent.runtime import arguments
from agent.runtime.arguments import GlobalOptions

# How long a call may take to reach its sandbox.
_CONNECT_S = 30.0


class RunscError(AgentError):
    """runsc refused or failed. `verb`, `container_id` (may be empty), `exit_code`, `messages`: its errors, in order."""

    def __init__(self, verb: str, container_id: str, exit_code: int, messages: Sequence[str]) -> None:
        said = "; ".join(messages) or f"exit code {exit_code}, no message"
        super().__init__(f"runsc {verb} {container_id}: {said}".replace(" :", ":"))
        self.verb, self.container_id, self.exit_code, self.messages = verb, container_id, exit_code, tuple(messages)


class NoSuchContainer(RunscError):
    """There is no container of exactly this id in this root."""


class RunscTimeout(RunscError):
    """runsc did not answer in time; it was killed, what it was doing may go on inside the sandbox."""


@dataclass(frozen=True, slots=True)
class Stdio:
    """File descriptors for a container's standard streams; the sandbox gets copies, the caller closes its own."""

    stdin: int = subprocess.DEVNULL
    stdout: int = subprocess.DEVNULL
    stderr: int = subprocess.DEVNULL


NO_STDIO = Stdio()


def start_call(
    binary: Path,
    options: GlobalOptions,
    verb: str,
    vector: Sequence[str],
    container_id: str = "",
    *,
    stdio: Stdio | None = None,
) -> "RunningCall":
    """Start runsc once. `stdio`: given, the container's; None, nothing on stdin and the output is captured."""
    log_fd = os.memfd_create(f"runsc-{verb.split()[0]}-log", os.MFD_CLOEXEC)
    try:
        # By a path and not by --log-fd: runsc hands a path on to the processes that it starts, so their errors are here
        # too.
        log = f"/proc/{os.getpid()}/fd/{log_fd}"
        process = subprocess.Popen(
            [binary, *arguments.global_flags(options), *arguments.log_flags(log), *vector],
            stdin=subprocess.DEVNULL if stdio is None else stdio.stdin,
            stdout=subprocess.PIPE if stdio is None else stdio.stdout,
            stderr=subprocess.PIPE if stdio is None else stdio.stderr,
            process_group=0,
        )
    except BaseException:
        os.close(log_fd)
        raise
    return RunningCall(verb, container_id, process, log_fd)


@dataclass(slots=True)
class RunningCall:
    """A runsc process under way; `end` must follow."""

    verb: str
    container_id: str
    process: subprocess.Popen[bytes]
    log_fd: int

    def finish(self, *, timeout_s: float) -> "Done":
        try:
            stdout, stderr = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            messages = [f"no answer in {timeout_s:g} s", *_messages(self.log_fd)]
            raise RunscTimeout(self.verb, self.container_id, -1, messages) from None
        return Done(self.process.returncode, stdout or b"", stderr or b"", tuple(_messages(self.log_fd)))

    def until_connected(self) -> None:
        """Wait until the process talks to the sandbox (it has a socket then, its only one) or has ended."""
        until = time.monotonic() + _CONNECT_S
        while self.process.poll() is None and time.monotonic() < until:
            with contextlib.suppress(OSError):  # it ended, or closed one meanwhile
                descriptors = f"/proc/{self.process.pid}/fd"
                if any(os.readlink(f"{descriptors}/{fd}").startswith("socket:") for fd in os.listdir(descriptors)):
                    return
            time.sleep(0.002)

    def end(self) -> None:
        """Kill the process if it still runs, reap it, close what belongs to the call."""
        if self.process.poll() is None:
            self.process.kill()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        self.process.wait()
        if self.log_fd >= 0:
            os.close(self.log_fd)
            self.log_fd = -1


@dataclass(frozen=True, slots=True)
class Done:
    """A call that has ended; `messages` are its errors, in order."""

    returncode: int
    stdout: bytes
    stderr: bytes
    messages: tuple[str, ...]


def _messages(log_fd: int) -> Iterator[str]:
    """Read runsc's errors from its log: JSON objects back to back, with or without newlines between them."""
    text = os.pread(log_fd, 1 << 20, 0).decode(errors="replace")
    decoder = json.JSONDecoder()
    position = 0
    while (position := text.find("{", position)) >= 0:
        try:
            found, position = decoder.raw_decode(text, position)
        except ValueError:
            return
        if isinstance(found, dict) and found.get("level") in ("error", "fatal", "panic"):
            yield str(found.get("msg", "")).strip()


def parsed_object(verb: str, container_id: str, said: bytes) -> dict[str, Any]:
    """Read what runsc printed as a JSON object. Raises: `RunscError`."""
    try:
        found = json.loads(said)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise RunscError(verb, container_id, 0, [f"unexpected answer {said[:200]!r}"])
    return found
