"""The workload trigger: the application itself says when it is ready to be saved.

Its protocol is gVisor's (`docs/workload/`): it writes `1` to `/proc/gvisor/checkpoint` and reads `resume`, `restore` or
`error`. For that the sandbox must have been created with annotations and an empty directory, into which it then saves
by itself, once in its life; so the wrapper asks at every `create` (`armed_annotations`), and the agent waits
(`await_written`).

The wait's truth is what the sandbox has open (`image_check.written`): it misses no save and believes in none that was
not, whatever happened between two looks. `WaitCheckpoint` only wakes it at once. Alone it would not do: it returns
after a restore without a save, and after a save that came by runsc's command line; and it misses a save that ended
before it was attached.

One thing is not true at once: after a save that failed, checkpoint.img stays open in the sandbox until Go's collector
comes by, minutes later (nothing but its finalizer closes it). So when a failure was heard, an image that grows no more
has ended, too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import trio

from agent.node.course import Written
from agent.node.image_check import image_bytes, written
from agent.node.sandbox import RunscSandbox
from agent.runtime.arguments import GpuTool
from agent.runtime.bundle import CONTAINER_TYPE
from agent.runtime.control_socket import ControlError, ControlTimeout, Process
from agent.runtime.failures import FailureKind, RuntimeFailure

# gVisor runsc/boot/restore.go
PREFIX = "dev.gvisor.internal.checkpoint."
# How long a save can stay unnoticed that ended in the moment between a look and the wait.
_LOOK_AGAIN_S = 5.0
# A save under way is looked at so often when its end was missed, and more seldom while it stands still.
_SAVING_S = 0.05
# A save that is under way writes something within this time; what stands still for longer after a failure was that one.
_STILL_S = 3.0


def armed_annotations(
    annotations: Mapping[str, str], image: Path | None, *, gpu_tool: GpuTool | None = None
) -> dict[str, str]:
    """Give a container's annotations with the workload trigger set up, and nothing else of a trigger.

    `image`: an empty directory for this sandbox alone; None takes the trigger away. Whatever the pod's author wrote
    under gVisor's prefix is dropped: the path of a save is a path on the node. The sandbox's first container has the
    path, all its containers may write.
    """
    kept = {key: value for key, value in annotations.items() if not key.startswith(PREFIX)}
    if image is None:
        return kept
    kept[f"{PREFIX}enable"] = "true"
    if annotations.get(CONTAINER_TYPE) == "container":
        return kept
    # Resume, always: without it a save that fails ends the pod. A pod that is to stop is paused after the save.
    kept |= {
        f"{PREFIX}path": str(image),
        f"{PREFIX}resume": "true",
        f"{PREFIX}compression": "none",
        f"{PREFIX}exclude-committed-zero-pages": "true",
    }
    if gpu_tool is not None:
        kept[f"{PREFIX}cuda-checkpoint-path"] = gpu_tool.path
        kept[f"{PREFIX}cuda-checkpoint-sequential"] = "true" if gpu_tool.sequential else "false"
    return kept


class _Growth:
    """How long an image has had the size that it has."""

    def __init__(self) -> None:
        self._bytes, self._since_s = -1, 0.0

    def stands_for_s(self, size: int) -> float:
        now_s = trio.current_time()
        if size != self._bytes:
            self._bytes, self._since_s = size, now_s
        return now_s - self._since_s


@dataclass(frozen=True, slots=True)
class TriggerEnded:
    """How the wait for an application's save ended. `asked`: it saved, whole or not; `failure`: as heard.

    Not asked: the sandbox ended without. Whether an image is whole, the save's own check says.
    """

    asked: bool
    failure: RuntimeFailure | None = None


class _Tools:
    """Bounds the GPU's tool, which gVisor doesn't: nobody else waits for a save that the application asked for."""

    def __init__(self, sandbox: RunscSandbox) -> None:
        self._sandbox = sandbox
        self._since_s: dict[tuple[str, Process], float] = {}

    async def bound(self) -> None:
        """Look once, and end those that have been seen for longer than their time: the save fails, the pod goes on."""
        now_s = trio.current_time()
        found = await self._sandbox.tools()
        self._since_s = {each: self._since_s.get(each, now_s) for each in found}
        for (container_id, process), since_s in self._since_s.items():
            if now_s - since_s > self._sandbox.limits.gpu_tool_s:
                await self._sandbox.kill_tool(container_id, process)


async def await_written(sandbox: RunscSandbox, image: Path) -> TriggerEnded:
    """Wait until the sandbox has written the image that its application asked for, or has ended.

    May begin at any time in the sandbox's life, and again after the agent's death.
    Raises: `SandboxError` when runsc can't say how the sandbox is.
    """
    failure: RuntimeFailure | None = None
    tools, growth, was_open, looks_spent = _Tools(sandbox), _Growth(), False, False
    while True:
        await tools.bound()
        pid = await sandbox.pid()
        match await trio.to_thread.run_sync(written, image, pid):
            case Written.CLOSED:
                return TriggerEnded(True, failure)
            case Written.SPENT if looks_spent:
                return TriggerEnded(True, failure)
            case Written.NOTHING if pid is None:
                return TriggerEnded(False)
            case Written.SAVING:
                stood_s = growth.stands_for_s(await trio.to_thread.run_sync(image_bytes, image))
                has_failed = failure is not None and failure.kind is not FailureKind.SANDBOX_GONE
                if has_failed and stood_s > _STILL_S:
                    return TriggerEnded(True, failure)
                # A wait that is given up goes on in the sandbox: thousands of them stopped one from answering.
                patience_s, was_open = min(max(stood_s, _SAVING_S), _LOOK_AGAIN_S), True
            case Written.NOTHING:
                patience_s, was_open = _LOOK_AGAIN_S, True
            case Written.SPENT if was_open or failure is not None:  # or it is just ending: the next look tells
                patience_s, looks_spent = _SAVING_S, True
            case Written.SPENT:  # it was never armed, or has failed in a former life of the agent
                patience_s = _LOOK_AGAIN_S
        try:
            await sandbox.control.wait_checkpoint(timeout_s=patience_s)
            failure = None
        except ControlTimeout:
            pass
        except ControlError as error:
            failure = error.failure
            if error.failure.kind is FailureKind.SANDBOX_GONE:
                await trio.sleep(_SAVING_S)  # its records may say "running" for a moment
