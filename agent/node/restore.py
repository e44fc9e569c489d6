"""A restore from its Restore RPC on: how it went, and the proof that it is one.

`Restored` means that the sandbox itself said so and that its memory is back: gVisor has loaded, or dropped as freed,
every page of an image (`WaitRestore`, which a sandbox that was started cold answers with an error), and processes that
were there at the save are there again. Anything less is `NotRestored`, with its reason; a pod that was started cold, or
whose sandbox died, never counts as restored.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from agent.runtime.control_socket import ControlError, ControlSocket, ControlTimeout, Process, RuntimeState, Savings
from agent.runtime.failures import FailureKind, RuntimeFailure

_FEW = 16


class Stage(StrEnum):
    """How far a restore got."""

    RUNNING = "running"  # the RPC was answered; memory loads behind the application
    LOADED = "loaded"  # its image is needed no more


@dataclass(frozen=True, slots=True)
class Canary:
    """What was in a sandbox's memory at its save: the processes of each container, by the container's name."""

    processes: Mapping[str, tuple[Process, ...]]


@dataclass(frozen=True, slots=True)
class Restored:
    """A restore with its proof. `savings`: against the sandbox that was saved, by gVisor's account."""

    savings: Savings

    def __str__(self) -> str:
        wall, cpu = round(self.savings.wall_s, 1), round(self.savings.cpu_s, 1)
        age, use = "younger" if wall < 0 else "older", "less" if cpu < 0 else "more"
        return (
            f"at its save the saved sandbox was {abs(wall):.1f} s {age} than this one is now,"
            f" and had used {abs(cpu):.1f} s {use} of CPU"
        )


@dataclass(frozen=True, slots=True)
class NotRestored:
    """A restore that is none, and after which stage that showed."""

    reached: Stage | None
    failure: RuntimeFailure


def canary_text(canary: Canary) -> str:
    """Write a canary for a snapshot's metadata; a few processes of each container are enough to know it by."""
    few = {name: processes[:_FEW] for name, processes in canary.processes.items()}
    return json.dumps({name: [[process.pid, process.command] for process in some] for name, some in few.items()})


def read_canary(text: str) -> Canary | None:
    """Read what `canary_text` wrote; None when it is nothing of the kind: then there is none."""
    try:
        return Canary(
            {
                name: tuple(Process(int(pid), str(command)) for pid, command in some)
                for name, some in json.loads(text).items()
            }
        )
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None


async def saved_canary(control: ControlSocket, container_ids: Mapping[str, str]) -> Canary:
    """Note what a restore must bring back; `container_ids` by the containers' names. Raises: ControlError."""
    return Canary({name: await control.processes(container_id) for name, container_id in container_ids.items()})


async def observe(
    control: ControlSocket,
    container_ids: Mapping[str, str],
    canary: Canary | None,
    *,
    timeout_s: float = math.inf,
) -> Restored | NotRestored:
    """Follow a restore whose RPC has returned, to its end. `container_ids` by name, as at the save.

    The application runs meanwhile; what it did since the RPC can have ended processes of the canary's, so one that is
    back in each container is enough. `canary` None: none was noted, and gVisor's word must do.
    """
    reached: Stage | None = None
    try:
        for container_id in container_ids.values():
            if (state := await control.state(container_id)) is not RuntimeState.RUNNING:
                return NotRestored(reached, _unproven(f"the container {container_id} is {state.name.lower()}"))
        reached = Stage.RUNNING
        await control.wait_restore(timeout_s=timeout_s)
        reached = Stage.LOADED
        savings = await control.savings()
        for name, container_id in container_ids.items():
            wanted: Sequence[Process] = canary.processes.get(name, ()) if canary is not None else ()
            if wanted and not set(wanted) & set(await control.processes(container_id)):
                return NotRestored(reached, _unproven(f"no process of the saved container {name} is back"))
    except ControlTimeout as error:
        return NotRestored(reached, RuntimeFailure(FailureKind.UNKNOWN, f"its memory was not loaded: {error}"))
    except ControlError as error:
        return NotRestored(reached, error.failure)
    return Restored(savings)


def _unproven(why: str) -> RuntimeFailure:
    return RuntimeFailure(FailureKind.NOT_RESTORING, why)
