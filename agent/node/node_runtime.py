"""All that the agent asks of the runtime: a port, and its implementation over runsc for the roots of the configuration.

Sandboxes are known by their root and their id, which is the id of the pod's first container. What is asked of one
sandbox may raise `SandboxError` or `ControlError`; a root that can't be listed has no sandboxes, and is told of.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import structlog
import trio

from agent.config import Config
from agent.errors import AgentError
from agent.matching.facts import MachineFacts
from agent.node.checkpoint import PreflightFailed
from agent.node.gpu import GpusUnreadable, preflight, read_gpus, read_memory
from agent.node.node_facts import NodeFacts
from agent.node.restore import Canary, NotRestored, Restored, observe, saved_canary
from agent.node.sandbox import NO_CONTAINERS, RunscSandbox, Sandbox, SandboxLimits
from agent.node.workload_trigger import TriggerEnded, await_written
from agent.runtime.arguments import GlobalOptions, GpuTool
from agent.runtime.control_socket import ControlSocket
from agent.runtime.runsc import ContainerState, Runsc

log = structlog.get_logger(__name__)

# What runsc takes when nobody names a root (runsc/config/config.go: for root).
DEFAULT_ROOT = Path("/var/run/runsc")


@dataclass(frozen=True, slots=True)
class SandboxKey:
    """Which sandbox."""

    root: Path
    sandbox_id: str


class NodeRuntime(Protocol):
    """What is asked of the runtime."""

    @property
    def gpu_tool(self) -> GpuTool | None:
        """What moves GPU memory; None: there is none, and pods with GPUs can't be saved."""
        ...

    @property
    def roots(self) -> tuple[Path, ...]:
        """runsc's roots that are cared for; one at least."""
        ...

    def key(self, root: str, sandbox_id: str) -> SandboxKey | None:
        """Give the sandbox that a root (empty: runsc's default) and an id mean; None: the root isn't cared for."""
        ...

    async def facts(self) -> MachineFacts:
        """Say what this node is. Raises: `AgentError`."""
        ...

    async def containers(self) -> tuple[tuple[SandboxKey, ContainerState], ...]:
        """Give all containers, each with the key that it would have as a sandbox."""
        ...

    def sandbox(self, key: SandboxKey, *, gpus: int = 0, container_ids: Mapping[str, str] = NO_CONTAINERS) -> Sandbox:
        """Give a sandbox, to be saved; with its GPUs, whose tool may run in any of its containers."""
        ...

    async def pid(self, key: SandboxKey) -> int | None:
        """Give a sandbox's process; None when it has ended."""
        ...

    async def preflight(self, key: SandboxKey) -> None:
        """Look whether a pod with GPUs can be saved. Raises: `PreflightFailed`."""
        ...

    async def await_written(
        self, key: SandboxKey, image: Path, *, gpus: int, container_ids: Mapping[str, str]
    ) -> TriggerEnded:
        """Wait for the application's own save; the containers may become more meanwhile."""
        ...

    async def observe(
        self, key: SandboxKey, container_ids: Mapping[str, str], canary: Canary | None
    ) -> Restored | NotRestored:
        """Follow a restore to its proof."""
        ...

    async def canary(self, key: SandboxKey, container_ids: Mapping[str, str]) -> Canary:
        """Note what a restore must bring back."""
        ...

    def has_whole_state(self, checkpoint_img: Path) -> bool:
        """Say whether an object graph is whole; blocks."""
        ...


@dataclass(frozen=True, slots=True)
class RunscRuntime:
    """runsc, as the configuration has it."""

    config: Config
    _facts: NodeFacts = field(init=False)
    _one_at_a_time: trio.CapacityLimiter = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_facts", NodeFacts(self.config, self._runsc(self.config.runtime.roots[0])))
        object.__setattr__(self, "_one_at_a_time", trio.CapacityLimiter(1))

    @property
    def gpu_tool(self) -> GpuTool | None:
        return GpuTool(self.config.gpu_tool, self.config.gpu_tool_is_sequential) if self.config.gpu_tool else None

    @property
    def roots(self) -> tuple[Path, ...]:
        return self.config.runtime.roots

    def key(self, root: str, sandbox_id: str) -> SandboxKey | None:
        path = Path(os.path.normpath(root)) if root else DEFAULT_ROOT
        return SandboxKey(path, sandbox_id) if path in self.config.runtime.roots else None

    async def facts(self) -> MachineFacts:
        return await trio.to_thread.run_sync(self._facts.current, limiter=self._one_at_a_time)

    async def containers(self) -> tuple[tuple[SandboxKey, ContainerState], ...]:
        found = []
        for root in self.config.runtime.roots:
            if not root.is_dir():
                continue
            try:
                states = await trio.to_thread.run_sync(self._runsc(root).list)
            except AgentError as error:
                log.warning("a runsc root can't be listed", root=str(root), error=str(error))
                continue
            found += [(SandboxKey(root, state.container_id), state) for state in states]
        return tuple(found)

    def sandbox(
        self, key: SandboxKey, *, gpus: int = 0, container_ids: Mapping[str, str] = NO_CONTAINERS
    ) -> RunscSandbox:
        deadlines = self.config.deadlines
        limits = SandboxLimits(load_s=deadlines.load_s, save_s=deadlines.save_s, gpu_tool_s=deadlines.gpu_tool_s)
        tool = self.gpu_tool if gpus else None
        return RunscSandbox(self._runsc(key.root), key.sandbox_id, tool, limits, container_ids)

    async def pid(self, key: SandboxKey) -> int | None:
        return await self.sandbox(key).pid()

    async def preflight(self, key: SandboxKey) -> None:
        pid = await self.pid(key)
        if pid is None:
            raise PreflightFailed("the pod has ended")
        try:
            gpus = await trio.to_thread.run_sync(read_gpus)
            memory = await trio.to_thread.run_sync(read_memory, pid)
        except (GpusUnreadable, ImportError, OSError) as error:
            raise PreflightFailed(f"the pod's GPUs or memory can't be read: {error}") from error
        drivers = await trio.to_thread.run_sync(self._runsc(key.root).supported_gpu_drivers)
        if problems := preflight(gpus, None, memory, supported_drivers=drivers):
            raise PreflightFailed("; ".join(problems))

    async def await_written(
        self, key: SandboxKey, image: Path, *, gpus: int, container_ids: Mapping[str, str]
    ) -> TriggerEnded:
        return await await_written(self.sandbox(key, gpus=gpus, container_ids=container_ids), image)

    async def observe(
        self, key: SandboxKey, container_ids: Mapping[str, str], canary: Canary | None
    ) -> Restored | NotRestored:
        control = ControlSocket(key.root, key.sandbox_id)
        return await observe(control, container_ids, canary, timeout_s=self.config.deadlines.load_s)

    async def canary(self, key: SandboxKey, container_ids: Mapping[str, str]) -> Canary:
        return await saved_canary(ControlSocket(key.root, key.sandbox_id), container_ids)

    def has_whole_state(self, checkpoint_img: Path) -> bool:
        return self._runsc(self.config.runtime.roots[0]).has_whole_state(checkpoint_img)

    def _runsc(self, root: Path) -> Runsc:
        runtime = self.config.runtime
        options = GlobalOptions(
            root=root,
            network=runtime.network.value,
            overlay2=runtime.overlay2 or None,
            directfs=None if runtime.directfs else False,
            ignore_cgroups=runtime.ignore_cgroups,
        )
        return Runsc(runtime.runsc, options)


if TYPE_CHECKING:
    _: type[NodeRuntime] = RunscRuntime
