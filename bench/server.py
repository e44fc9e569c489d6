"""The host's end of `workload.py`: a sandbox that serves, its pipes, and requests with a deadline.

A `Server` owns three pipes. Its container ends go to runsc (`stdio`) and are closed here by `connected`, so that the
end of the sandbox is the end of its output.
"""

import os
import select
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from agent.errors import AgentError
from agent.runtime import bundle
from agent.runtime.runsc import Stdio

WORKLOAD = Path(__file__).with_name("workload.py")
_IN_SANDBOX = "/workload.py"


class NoAnswer(AgentError):
    """The server's output ended, or no line came in time."""


@dataclass(frozen=True, slots=True)
class Heap:
    """What a server's memory holds: `blocks` MiB that follow from `seed`."""

    seed: int
    blocks: int


def server_rootfs(directory: Path, *, readonly: bool = True) -> bundle.Rootfs:
    """Make a root file system with the server in it."""
    rootfs = bundle.make_rootfs(directory, readonly=readonly)
    (rootfs.path / _IN_SANDBOX.lstrip("/")).write_bytes(WORKLOAD.read_bytes())
    return rootfs


def server_container(rootfs: bundle.Rootfs, heap: Heap, pod: bundle.Pod | None = None) -> bundle.Container:
    """Give the container that runs the server; the same values give the same spec, which a restore needs."""
    interpreter = str(bundle.python_interpreter())
    # -I -S: no site packages and no environment, which are the host's and differ.
    args = (interpreter, "-IS", _IN_SANDBOX, str(heap.seed), str(heap.blocks))
    return bundle.Container(args=args, rootfs=rootfs, pod=pod)


class Server:
    """The pipes to one sandboxed server; close it, or use it as a context manager."""

    def __init__(self) -> None:
        inner_in, self._to = os.pipe()
        self._from, inner_out = os.pipe()
        self._errors, inner_err = os.pipe()
        self.stdio = Stdio(inner_in, inner_out, inner_err)
        self._inner: tuple[int, ...] = (inner_in, inner_out, inner_err)
        self._pending = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def connected(self) -> None:
        """Close the container's ends here; call it once runsc has them."""
        for fd in self._inner:
            os.close(fd)
        self._inner = ()

    def close(self) -> None:
        """Close everything; twice is once."""
        self.connected()
        for fd in {self._to, self._from, self._errors} - {-1}:
            os.close(fd)
        self._to = self._from = self._errors = -1

    def send(self, request: str) -> None:
        """Send a request without waiting for its answer."""
        os.write(self._to, request.encode() + b"\n")

    def receive(self, *, timeout_s: float) -> str:
        """Give the next line of the server's output.

        Raises: NoAnswer after `timeout_s`, or when the output ended.
        """
        until = time.monotonic() + timeout_s
        while b"\n" not in self._pending:
            if not select.select([self._from], [], [], max(0.0, until - time.monotonic()))[0]:
                raise NoAnswer(f"no answer within {timeout_s:g} s")
            data = os.read(self._from, 65536)
            if not data:
                raise NoAnswer(f"the server's output ended; it said {self.errors()!r}")
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        return line.decode()

    def request(self, request: str, *, timeout_s: float = 60.0) -> str:
        """Send a request and give the answer's value: what follows its first word."""
        self.send(request)
        return self.receive(timeout_s=timeout_s).partition(" ")[2]

    def errors(self) -> str:
        """Give what is to be read of the server's standard error, without waiting."""
        said = b""
        while self._errors >= 0 and select.select([self._errors], [], [], 0)[0]:
            data = os.read(self._errors, 65536)
            if not data:
                break
            said += data
        return said.decode(errors="replace")
