"""The GPUs of this node, by NVIDIA's management library, and whether a pod that uses them can be saved.

`nvidia-ml-py` is imported here and nowhere else, and when it is used: nodes without a GPU need not have its library.
What is read are values; the judgement (`preflight`) is a function of them.

A save moves all GPU memory into the process's own: gVisor runs `cuda-checkpoint` for each process, and the memory of
the pod grows by what its GPUs hold, on the way out and again on the way back. A pod whose limit has no room for that is
killed by the kernel in the middle of it, so this is asked before.

What has met a real GPU of all this: nothing yet. See `tests/node/test_gpu_tool.py` for what is driven without one.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.errors import AgentError

# What a pod needs beside the bytes of its GPUs while they move: pinned staging buffers and the driver's own state.
# A guess that errs to the safe side; a measurement on real GPUs would change it.
MARGIN_SHARE = 0.05
MARGIN_BYTES = 512 << 20
_GIB = 1 << 30
_CGROUPS = Path("/sys/fs/cgroup")


class GpusUnreadable(AgentError):
    """NVIDIA's library is missing or fails; what a pod with GPUs needs can't be known."""

    kind = "gpus-unreadable"


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as it is now. `used_bytes`: by everybody. `is_mig`: partitioned."""

    uuid: str
    model: str
    used_bytes: int
    total_bytes: int
    is_mig: bool


@dataclass(frozen=True, slots=True)
class NodeGpus:
    """The GPUs of a node, in the order of their indices, and the driver's version."""

    driver: str
    gpus: tuple[Gpu, ...]


@dataclass(frozen=True, slots=True)
class PodMemory:
    """A pod's memory: what it uses, and what it may; None: no limit."""

    used_bytes: int
    limit_bytes: int | None


def read_gpus() -> NodeGpus:
    """Ask the library; blocks for some ms, for seconds when the driver has to wake up. Raises: `GpusUnreadable`."""
    import pynvml  # type: ignore[import-untyped]

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise GpusUnreadable(f"NVIDIA's management library: {error}") from error
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return NodeGpus(_text(pynvml.nvmlSystemGetDriverVersion()), tuple(_gpu(pynvml, handle) for handle in handles))
    except pynvml.NVMLError as error:
        raise GpusUnreadable(f"NVIDIA's management library: {error}") from error
    finally:
        pynvml.nvmlShutdown()


def _gpu(pynvml: Any, handle: object) -> Gpu:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    try:
        current, _pending = pynvml.nvmlDeviceGetMigMode(handle)
    except pynvml.NVMLError_NotSupported:
        current = 0  # a model that can't be partitioned
    return Gpu(
        uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
        model=_text(pynvml.nvmlDeviceGetName(handle)),
        used_bytes=int(memory.used),
        total_bytes=int(memory.total),
        is_mig=bool(current),
    )


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def read_memory(pid: int) -> PodMemory:
    """Give the memory of the cgroup (v2) of a sandbox's process.

    Raises: OSError when it can't be read; on nodes with cgroup v1, always.
    """
    own = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    path = next((line.removeprefix("0::") for line in own if line.startswith("0::")), "/")
    return group_memory(_CGROUPS / path.lstrip("/"), top=_CGROUPS)


def group_memory(group: Path, *, top: Path) -> PodMemory:
    """Give what a cgroup uses, and the tightest limit of it and those above it. Raises: OSError."""
    limits = []
    for directory in (group, *group.parents):
        if not directory.is_relative_to(top) or not (directory / "memory.max").exists():  # the topmost has none
            break
        text = (directory / "memory.max").read_text().strip()
        limits += [] if text == "max" else [int(text)]
    return PodMemory(int((group / "memory.current").read_text()), min(limits, default=None))


def preflight(
    node: NodeGpus,
    used: Iterable[str] | None,
    memory: PodMemory,
    *,
    supported_drivers: Sequence[str] | frozenset[str],
) -> tuple[str, ...]:
    """Say why a pod with GPUs can't be saved now; nothing: it can.

    `used`: the UUIDs of the pod's GPUs; None: any of the node's may be. `supported_drivers`: what this runsc knows
    (`Runsc.supported_gpu_drivers`).
    """
    wanted = None if used is None else set(used)
    gpus = [gpu for gpu in node.gpus if wanted is None or gpu.uuid in wanted]
    problems = []
    if not gpus or (wanted is not None and len(gpus) < len(wanted)):
        problems.append(f"of the pod's GPUs {len(gpus)} are on this node")
    if node.driver not in supported_drivers:
        problems.append(
            f"the NVIDIA driver {node.driver} is unknown to this runsc (`runsc nvproxy list-supported-drivers`)"
        )
    problems += [f"{gpu.model} {gpu.uuid} is partitioned (MIG)" for gpu in gpus if gpu.is_mig]
    if len({gpu.model for gpu in gpus}) > 1:
        problems.append(f"the pod's GPUs are of several models: {', '.join(sorted({gpu.model for gpu in gpus}))}")
    gpu_bytes = sum(gpu.used_bytes for gpu in gpus)
    needed_bytes = memory.used_bytes + gpu_bytes + int(gpu_bytes * MARGIN_SHARE) + MARGIN_BYTES
    if memory.limit_bytes is not None and needed_bytes > memory.limit_bytes:
        problems.append(
            f"a save needs {needed_bytes / _GIB:.1f} GiB of memory (the pod uses {memory.used_bytes / _GIB:.1f}, its"
            f" GPUs {gpu_bytes / _GIB:.1f}, and a margin), the pod's limit is {memory.limit_bytes / _GIB:.1f} GiB"
        )
    return tuple(problems)
