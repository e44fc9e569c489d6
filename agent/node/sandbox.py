"""One pod's sandbox as a save needs it: a port, and its implementation over runsc.

What changes the sandbox goes by runsc's command line, in threads; what only waits goes by the control socket. Whatever
fails is a `SandboxError` with the kind of failure; what that means for a save is `checkpoint.REASONS`.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from signal import SIGKILL
from types import MappingProxyType
from typing import Protocol, TypeVar

import trio

from agent.errors import AgentError
from agent.node.course import Found
from agent.node.image_check import image_bytes
from agent.node.threads import run_endable
from agent.runtime.arguments import GpuTool
from agent.runtime.control_socket import ControlError, ControlSocket, ControlTimeout, Process
from agent.runtime.failures import FailureKind, RuntimeFailure, classify
from agent.runtime.runsc import NoSuchContainer, Runsc, RunscError, RunscTimeout

T = TypeVar("T")

NO_CONTAINERS: Mapping[str, str] = MappingProxyType({})

# Calls of runsc at a time, for all sandboxes: a save takes a thread for its whole time, and a node has some pods.
_CALLS = trio.CapacityLimiter(32)
# A sandbox that was told to end has no more to do than to close its files.
_END_S = 10.0
# How often is looked how far a save with a GPU is; its tool takes seconds.
_LOOK_S = 0.25


class SandboxError(AgentError):
    """Something could not be done with a sandbox; `failure` says what it means."""

    kind = "sandbox"

    def __init__(self, failure: RuntimeFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class SandboxDeadline(SandboxError):
    """It took too long; it may go on inside the sandbox."""


class GpuToolHung(SandboxError):
    """The GPU's tool did not end in its time, and was killed in the sandbox, so that gVisor undid what it had done."""


class Sandbox(Protocol):
    """What a save does with a pod. Every method may raise `SandboxError`."""

    async def found(self) -> Found:
        """Say how it is, by the runtime."""

    async def pid(self) -> int | None:
        """Give its process; None when it has ended."""

    async def await_loaded(self) -> None:
        """Return when all its memory is there and it runs; at once for one that was not restored."""

    async def pause(self) -> None:
        """Stop all its tasks."""

    async def save(self, image: Path) -> None:
        """Write its image; it goes on after that as before it, running or paused, whether the save failed or not."""

    async def resume(self) -> None:
        """Let it go on; nothing is done to one that runs."""

    async def end(self) -> None:
        """End it, paused or not, without letting anything run on; nothing is done to one that has ended."""

    async def remove(self) -> None:
        """End what is left of a sandbox whose restore has failed, and let runsc forget it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """How long a step may take. A load takes the image's size over the link, a save its size over the disk.

    `gpu_tool_s`: for cuda-checkpoint on each way; it moves up to 80 GB at some GB/s.
    """

    load_s: float = 1800.0
    save_s: float = 900.0
    change_s: float = 120.0
    gpu_tool_s: float = 120.0


@dataclass(slots=True)
class RunscSandbox:
    """The sandbox of the container `sandbox_id`, its pod's first. `gpu_tool`: for pods with GPUs, whose containers, in
    which it may run, are `container_ids`, by name; the mapping may change.
    """

    runsc: Runsc
    sandbox_id: str
    gpu_tool: GpuTool | None = None
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    container_ids: Mapping[str, str] = field(default_factory=lambda: NO_CONTAINERS)
    _pause_unanswered: bool = False

    @property
    def control(self) -> ControlSocket:
        """The sandbox's control socket."""
        return ControlSocket(self.runsc.options.root, self.sandbox_id)

    async def found(self) -> Found:
        try:
            state = await _in_thread(functools.partial(self.runsc.state, self.sandbox_id))
        except SandboxError as error:
            if error.failure.kind is FailureKind.NO_CONTAINER:
                return Found.GONE
            raise
        match state.status:
            case "stopped":
                return Found.GONE
            case "paused":
                return Found.PAUSED
            case _:
                return Found.RUNNING

    async def pid(self) -> int | None:
        if await self.found() is Found.GONE:
            return None
        return (await _in_thread(functools.partial(self.runsc.state, self.sandbox_id))).pid or None

    async def await_loaded(self) -> None:
        try:
            await self.control.wait_restore(timeout_s=self.limits.load_s)
        except ControlTimeout as error:
            raise SandboxDeadline(error.failure) from error
        except ControlError as error:
            if error.failure.kind is not FailureKind.NOT_RESTORING:
                raise SandboxError(error.failure) from error
        found = await self.found()
        if found is not Found.RUNNING:
            raise SandboxError(RuntimeFailure(FailureKind.WRONG_STATE, f"the pod is {found}, so it can't be saved"))

    async def pause(self) -> None:
        try:
            await _in_thread(functools.partial(self.runsc.pause, self.sandbox_id, timeout_s=self.limits.change_s))
        except SandboxDeadline:
            self._pause_unanswered = True
            raise

    async def save(self, image: Path) -> None:
        watch = _ToolWatch()
        error: SandboxError | None = None
        begin = functools.partial(self.runsc.begin_checkpoint, self.sandbox_id, image, gpu_tool=self.gpu_tool)
        with contextlib.closing(await _in_thread(begin)) as saving:
            async with trio.open_nursery() as nursery:
                if self.gpu_tool is not None:
                    nursery.start_soon(self._watch_tool, image, watch)
                wait = functools.partial(saving.result, timeout_s=self.limits.save_s)
                try:
                    await _in_thread(wait, end=saving.abandon)
                except SandboxError as caught:  # raised below, as it is: a nursery would wrap it
                    error = caught
                nursery.cancel_scope.cancel()
        if error is not None and watch.has_killed:
            said = f"cuda-checkpoint did not end in {self.limits.gpu_tool_s:g} s and was killed"
            raise GpuToolHung(RuntimeFailure(FailureKind.GPU_TOOL, said)) from error
        if error is not None:
            raise error

    async def resume(self) -> None:
        match await self.found():
            case Found.PAUSED:
                await _in_thread(functools.partial(self.runsc.resume, self.sandbox_id, timeout_s=self.limits.change_s))
            case Found.GONE:
                raise SandboxError(RuntimeFailure(FailureKind.SANDBOX_GONE, "the pod ended"))
            case Found.RUNNING if self._pause_unanswered:
                # runsc's record says "running", and the sandbox may have stopped its tasks nevertheless.
                said = "runsc did not answer whether the pod is paused; `runsc pause` and `runsc resume` set it right"
                raise SandboxError(RuntimeFailure(FailureKind.UNKNOWN, said))
            case Found.RUNNING:
                pass

    async def end(self) -> None:
        if await self.found() is Found.GONE:
            return
        try:
            await self.control.complete()
            if await self.found() is Found.PAUSED:
                await _in_thread(functools.partial(self.runsc.resume, self.sandbox_id, timeout_s=_END_S))
            if await _in_thread(functools.partial(self.runsc.ends_within, self.sandbox_id, timeout_s=_END_S)):
                return
        except (ControlError, SandboxError):
            pass  # it is ended the hard way; its exit code is then 137
        await _in_thread(functools.partial(self.runsc.end_sandbox, self.sandbox_id, timeout_s=self.limits.change_s))

    async def remove(self) -> None:
        # Its process lives on, and runsc calls it stopped all the same: no other command would end it.
        call = functools.partial(self.runsc.delete, self.sandbox_id, force=True, timeout_s=self.limits.change_s)
        await _in_thread(call)

    async def _watch_tool(self, image: Path, watch: "_ToolWatch") -> None:
        """Bound the GPU's tool, which gVisor doesn't: it runs before the image's first byte is written, and again after
        its last. So it is given its time whenever the image doesn't grow; a slow disk has no process of that name.
        """
        last_bytes, since_s = -1, 0.0
        while True:
            now_bytes = image_bytes(image)
            if now_bytes != last_bytes:
                last_bytes, since_s = now_bytes, trio.current_time()
            if trio.current_time() - since_s > self.limits.gpu_tool_s:
                for container_id, process in await self.tools():
                    watch.has_killed = True
                    await self.kill_tool(container_id, process)
            await trio.sleep(_LOOK_S)

    async def tools(self) -> tuple[tuple[str, Process], ...]:
        """List the processes of the GPU's tool, each with its container's id; none where there is no such tool."""
        if self.gpu_tool is None:
            return ()
        name = PurePosixPath(self.gpu_tool.path).name
        found: list[tuple[str, Process]] = []
        for container_id in {self.sandbox_id, *self.container_ids.values()}:
            with contextlib.suppress(ControlError):  # an init container has ended
                processes = await self.control.processes(container_id)
                found += [(container_id, process) for process in processes if process.command == name]
        return tuple(found)

    async def kill_tool(self, container_id: str, process: Process) -> None:
        """End a process of the GPU's tool, so that gVisor undoes what it has done; one that has ended is fine."""
        with contextlib.suppress(ControlError):
            await self.control.signal(container_id, process.pid, SIGKILL)


@dataclass(slots=True)
class _ToolWatch:
    has_killed: bool = False


async def _in_thread(call: Callable[[], T], *, end: Callable[[], None] | None = None) -> T:
    """Run a blocking call of runsc, which has its own time-out; `end` ends it sooner. Raises: `SandboxError`."""
    try:
        if end is not None:
            return await run_endable(call, end, limiter=_CALLS)
        return await trio.to_thread.run_sync(call, limiter=_CALLS)
    except RunscTimeout as error:
        raise SandboxDeadline(RuntimeFailure(FailureKind.UNKNOWN, str(error))) from error
    except NoSuchContainer as error:
        raise SandboxError(RuntimeFailure(FailureKind.NO_CONTAINER, str(error))) from error
    except RunscError as error:
        raise SandboxError(classify(error.messages)) from error
