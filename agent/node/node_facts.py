"""What this node is, as far as a snapshot cares: read from runsc, the kernel, /proc/cpuinfo and NVIDIA's library.

What runsc is, is asked again when its file changes: a node's runsc may be upgraded under a running agent, and a pod
that is saved with the new one must not be noted as made by the old.
"""

import hashlib
import os
import platform
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import structlog

from agent.config import Config
from agent.errors import AgentError
from agent.matching.facts import Architecture, Gpus, MachineFacts
from agent.node.gpu import GpusUnreadable, NodeGpus, read_gpus
from agent.runtime.runsc import Runsc

log = structlog.get_logger(__name__)

# NVIDIA's driver makes it; without it there is no use in asking its library, which loads for a while.
_DRIVER = Path("/proc/driver/nvidia/version")
_CPUINFO = Path("/proc/cpuinfo")

Signature = tuple[int, int, int, int]


class NodeFacts:
    """The facts, kept until runsc's file is another; for one thread at a time, and it blocks."""

    def __init__(self, config: Config, runsc: Runsc, *, read_gpus: Callable[[], NodeGpus] = read_gpus) -> None:
        self._config = config
        self._runsc = runsc
        self._read_gpus = read_gpus
        self._signature: Signature | None = None
        self._facts: MachineFacts | None = None

    def current(self) -> MachineFacts:
        """Give the facts. Raises: `AgentError` when runsc can't be asked, and then nothing can be saved or restored."""
        try:
            signature = _signature(self._runsc.binary)
            if self._facts is None or signature != self._signature:
                self._facts, self._signature = self._read(), signature
        except OSError as error:
            raise AgentError(f"{self._runsc.binary}: {error.strerror}") from error
        return self._facts

    def _read(self) -> MachineFacts:
        runtime = self._config.runtime
        cpu = cpu_facts(_CPUINFO.read_text(errors="replace"))
        with open(self._runsc.binary, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return MachineFacts(
            architecture=_architecture(platform.machine()),
            machine_type=self._config.machine_type,
            cpu_vendor=cpu.get("vendor_id") or cpu.get("CPU implementer", ""),
            cpu_model=cpu.get("model name") or cpu.get("CPU part", ""),
            cpu_features=self._runsc.cpu_features(),
            cache_line_bytes=_cache_line_bytes(cpu),
            runsc_version=self._runsc.version(),
            runsc_sha256=digest,
            platform=runtime.platform,
            network=runtime.network.value,
            directfs=runtime.directfs,
            overlay=runtime.overlay2,
            gpus=self._gpus(),
            node_version=self._config.node_version,
        )

    def _gpus(self) -> tuple[Gpus, ...]:
        if not _DRIVER.exists():
            return ()
        try:
            node = self._read_gpus()
        except (GpusUnreadable, ImportError) as error:
            log.error("GPUs can't be read; pods that use them start cold", error=str(error))
            return ()
        counts = Counter((gpu.model, gpu.is_mig) for gpu in node.gpus)
        return tuple(Gpus(model, count, node.driver, is_mig) for (model, is_mig), count in counts.items())


def cpu_facts(cpuinfo: str) -> dict[str, str]:
    """Read the first processor of a /proc/cpuinfo (proc(5)); which fields there are depends on the architecture."""
    first = cpuinfo.partition("\n\n")[0]
    lines = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, mark, value in lines if mark}


def _cache_line_bytes(cpu: dict[str, str]) -> int:
    """Give the size of a cache line as gVisor counts it: of CLFLUSH (pkg/cpuid, CacheLine); 0 where it isn't told."""
    text = cpu.get("clflush size", "")
    return int(text) if re.fullmatch(r"\d{1,4}", text) else 0


def _architecture(machine: str) -> Architecture:
    try:
        return Architecture.of_kernel(machine)
    except ValueError as error:
        raise AgentError(str(error)) from error


def _signature(path: Path) -> Signature:
    info = os.stat(path)
    return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns
