"""A sandbox's control socket: gVisor's private JSON over a Unix stream socket, asked from Trio.

What changes a sandbox goes by runsc's command line, which keeps runsc's own state file and locks right. What only
*waits* or looks goes by this socket: it needs no process for each wait, can be cancelled, and says more. The methods
are no stable interface of gVisor's (runsc/boot/controller.go); `METHODS` lists those that are used, and
`tests/runtime/test_control_socket.py` asks each of a real sandbox, so that a new runsc that lacks one is noticed.

A connection carries one call at a time, so each call has its own. A call is bounded by its time-out and by
`_ANSWER_MAX_BYTES`; when it is cancelled the connection is closed, and what it had asked for may still happen (gVisor
doesn't notice): a wait ends with the event that it waits for.
"""

import json
import math
import os
import socket
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import trio

from agent.errors import AgentError
from agent.runtime.failures import FailureKind, RuntimeFailure, classify

METHODS = (
    "containerManager.Checkpoint",
    "containerManager.ContainerRuntimeState",
    "containerManager.GetSavings",
    "containerManager.Processes",
    "containerManager.Signal",
    "containerManager.WaitCheckpoint",
    "containerManager.WaitRestore",
)
# A list of some thousand processes is the largest answer.
_ANSWER_MAX_BYTES = 4 << 20
# A sandbox answers from memory; one whose tasks are stopped does, too.
_QUICK_S = 10.0
# Where runsc puts the socket when its root's path doesn't do (runsc/sandbox/sandbox.go:createControlSocket).
_OTHER_PLACES = (Path("/var/run"), Path("/run"), Path("/tmp"))  # noqa: S108 - whose file it is, is checked
_SIGNAL_PROCESS = 0  # boot.DeliverToProcess


class ControlError(AgentError):
    """The sandbox said no, or nothing. `method`, and `failure`: what it means."""

    kind = "sandbox-control"

    def __init__(self, method: str, failure: RuntimeFailure) -> None:
        super().__init__(f"{method}: {failure.message}")
        self.method, self.failure = method, failure


class ControlTimeout(ControlError):
    """No answer came in time; what was asked for may still happen."""


class RuntimeState(IntEnum):
    """How a container is, by its sandbox (runsc/boot/loader.go:ContainerRuntimeState)."""

    INVALID = 0
    CREATING = 1
    RUNNING = 2
    STOPPED = 3


@dataclass(frozen=True, slots=True)
class Savings:
    """How much older the saved sandbox was at its save than the restored one when it was back, and how much more CPU it
    had used; zeros when there was no restore.

    gVisor calls that saved time (runsc/boot/restore.go:calculateWallTimeSavings, calculateCPUSavings); of a pod that
    was saved long after it was ready most of it is neither work nor waiting.
    """

    cpu_s: float
    wall_s: float


@dataclass(frozen=True, slots=True)
class Process:
    """A process of a container: its pid in the sandbox's own numbering, and its executable's short name."""

    pid: int
    command: str


@dataclass(frozen=True, slots=True)
class ControlSocket:
    """The socket of the sandbox `sandbox_id` (the id of the pod's first container) below the runsc root `root`."""

    root: Path
    sandbox_id: str

    async def wait_checkpoint(self, *, timeout_s: float = math.inf) -> None:
        """Wait for the end of the next save that ends from now on, whoever asked for it.

        After a restore this may return once without a save: the restored kernel counts the one that it came from.
        Attached before the Restore RPC it never returns: it hangs on the kernel that was replaced.
        Raises: ControlError when that save failed, or the sandbox is gone.
        """
        await self._call("containerManager.WaitCheckpoint", timeout_s=timeout_s)

    async def wait_restore(self, *, timeout_s: float = math.inf) -> None:
        """Wait until all memory of a restored sandbox is loaded, and its image needed no more.

        Raises: ControlError: loading failed (gVisor then kills the sandbox), or, `NOT_RESTORING`, it wasn't restored.
        """
        await self._call("containerManager.WaitRestore", timeout_s=timeout_s)

    async def state(self, container_id: str) -> RuntimeState:
        """Say how a container is; one that the sandbox does not know is STOPPED."""
        method = "containerManager.ContainerRuntimeState"
        value = await self._call(method, container_id, timeout_s=_QUICK_S)
        try:
            return RuntimeState(value)  # type: ignore[arg-type]  # anything else is no such value
        except ValueError:
            raise _unreadable(method, value) from None

    async def savings(self) -> Savings:
        """Say what the restore of this sandbox saved."""
        method = "containerManager.GetSavings"
        match await self._call(method, timeout_s=_QUICK_S):
            case {"CPUTimeSaved": int(cpu_ns), "WallTimeSaved": int(wall_ns)}:
                return Savings(cpu_ns / 1e9, wall_ns / 1e9)
            case other:
                raise _unreadable(method, other)

    async def processes(self, container_id: str) -> tuple[Process, ...]:
        """List the processes of a container."""
        method = "containerManager.Processes"
        found = []
        answer = await self._call(method, container_id, timeout_s=_QUICK_S)
        for entry in answer if isinstance(answer, list) else ():
            match entry:
                case {"pid": int(pid), "cmd": str(command)}:
                    found.append(Process(pid, command))
                case other:
                    raise _unreadable(method, other)
        return tuple(found)

    async def signal(self, container_id: str, pid: int, number: int) -> None:
        """Send a signal to one process of a container, by its pid as `processes` gives it."""
        argument = {"CID": container_id, "PID": pid, "Signo": number, "Mode": _SIGNAL_PROCESS}
        await self._call("containerManager.Signal", argument, timeout_s=_QUICK_S)

    async def complete(self) -> None:
        """End all processes of the sandbox as after a save without resume: its containers end with exit code 0.

        It is asked for a save into a file that can't be written: gVisor then saves nothing and ends the sandbox the way
        it does after any save that is not resumed (pkg/sentry/state/state.go:Save), before a task runs on. Of a paused
        sandbox the processes end when it is resumed, without running on.
        """
        method = "containerManager.Checkpoint"
        argument = {"metadata": {"compression": "none"}, "have_pages_file": False, "Resume": False}
        nowhere = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        try:
            await self._call(method, argument, timeout_s=_QUICK_S, descriptor=nowhere)
        except ControlTimeout:
            raise
        except ControlError as error:
            # The failed save is what was asked for, and the sandbox may be gone before it answers.
            if error.failure.kind is not FailureKind.SANDBOX_GONE and "statefile" not in error.failure.message:
                raise
        finally:
            os.close(nowhere)

    async def _call(
        self, method: str, argument: object = None, *, timeout_s: float, descriptor: int | None = None
    ) -> object:
        assert method in METHODS
        request = json.dumps({"method": method, "arg": argument}).encode()
        with trio.move_on_after(timeout_s):
            return _result(method, await self._ask(method, request, descriptor))
        raise ControlTimeout(method, RuntimeFailure(FailureKind.UNKNOWN, f"no answer in {timeout_s:g} s"))

    async def _ask(self, method: str, request: bytes, descriptor: int | None) -> dict[str, object]:
        """Send one request and read its answer: one JSON object, without a mark at its end."""
        gone = RuntimeFailure(FailureKind.SANDBOX_GONE, f"the sandbox {self.sandbox_id} is gone")
        connection = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with connection:
            try:
                with self._address() as address:
                    await connection.connect(address)
                stream = trio.SocketStream(connection)
                if descriptor is not None:  # with the first byte, by which gVisor takes it
                    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptor.to_bytes(4, sys.byteorder))]
                    await connection.sendmsg([request[:1]], rights)
                    request = request[1:]
                await stream.send_all(request)
                received = b""
                while part := await stream.receive_some():
                    received += part
                    if (answer := _parsed(received)) is not None:
                        return answer
                    if len(received) > _ANSWER_MAX_BYTES:
                        raise _unreadable(method, f"more than {_ANSWER_MAX_BYTES} bytes")
            except (OSError, trio.BrokenResourceError) as error:
                raise ControlError(method, gone) from error
        raise ControlError(method, gone)

    @contextmanager
    def _address(self) -> Iterator[str]:
        """Give the path to connect to: through a descriptor, since it may be longer than a socket's may be.

        Raises: FileNotFoundError. Sockets that are not ours are passed over: anybody may make one in /tmp.
        """
        for directory in (self.root, *_OTHER_PLACES):
            try:
                fd = os.open(directory / f"runsc-{self.sandbox_id}.sock", os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            try:
                status = os.fstat(fd)
                if stat.S_ISSOCK(status.st_mode) and status.st_uid == os.geteuid():
                    yield f"/proc/self/fd/{fd}"
                    return
            finally:
                os.close(fd)
        raise FileNotFoundError(f"no control socket of the sandbox {self.sandbox_id}")


def _parsed(received: bytes) -> dict[str, object] | None:
    """Read an answer; None while it isn't whole."""
    if not received.rstrip().endswith(b"}"):
        return None
    try:
        answer = json.loads(received)
    except (ValueError, RecursionError):
        return None
    return answer if isinstance(answer, dict) else None


def _result(method: str, answer: dict[str, object]) -> object:
    if answer.get("success") is True:
        return answer.get("result")
    raise ControlError(method, classify([str(answer.get("err") or "it failed without a reason")]))


def _unreadable(method: str, answer: object) -> ControlError:
    shown = f"an answer that can't be read: {str(answer)[:200]}"
    return ControlError(method, RuntimeFailure(FailureKind.UNKNOWN, shown))
