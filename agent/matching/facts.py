"""What a node is, as far as a snapshot cares, and how that is written down beside a snapshot. Pure.

The facts are the node's own at save and at restore, and rules compare the two. Empty, or 0, means unknown; it equals
nothing where a rule needs the value.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from agent.kube.errors import InvalidObject
from agent.kube.fields import Fields

# A machine's features are some 100 to 200 names; `runsc cpu-features` prints them.
MAX_FEATURES = 1024
MAX_GPUS = 64
_DIGEST = r"(?:[0-9a-f]{64})?"


class Architecture(StrEnum):
    """A CPU architecture, by Kubernetes' name of it (label kubernetes.io/arch)."""

    AMD64 = "amd64"
    ARM64 = "arm64"

    @classmethod
    def of_kernel(cls, machine: str) -> "Architecture":
        """Give the architecture that uname(2) calls `machine`. Raises: `ValueError`: gVisor doesn't run there."""
        names = {"x86_64": cls.AMD64, "aarch64": cls.ARM64}
        if machine not in names:
            raise ValueError(f"gVisor runs on x86_64 and aarch64, not on {machine}")
        return names[machine]


@dataclass(frozen=True, slots=True)
class Gpus:
    """A node's GPUs of one model, by the name that NVML gives it; `is_mig`: whether one of them is partitioned."""

    model: str
    count: int
    driver: str
    is_mig: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """A node. See `machine`, `gvisor` and `gpu` for what each is compared with, and how.

    `machine_type`: Google's name (n2-standard-4), empty elsewhere; `node_version`: the kubelet's (1.35.0-gke.1738000).
    `cpu_features`, `cache_line_bytes`: as runsc sees them. `network`, `platform`, `overlay`: runsc's flags.
    """

    architecture: Architecture
    machine_type: str = ""
    cpu_vendor: str = ""
    cpu_model: str = ""
    cpu_features: frozenset[str] = frozenset()
    cache_line_bytes: int = 0
    runsc_version: str = ""
    runsc_sha256: str = ""
    platform: str = ""
    network: str = ""
    directfs: bool = True
    overlay: str = ""
    gpus: tuple[Gpus, ...] = ()
    node_version: str = ""

    def to_mapping(self) -> dict[str, object]:
        """Write the facts down as JSON can hold them."""
        return {
            "architecture": self.architecture.value,
            "machineType": self.machine_type,
            "cpu": {
                "vendor": self.cpu_vendor,
                "model": self.cpu_model,
                "features": sorted(self.cpu_features),
                "cacheLineBytes": self.cache_line_bytes,
            },
            "runsc": {
                "version": self.runsc_version,
                "sha256": self.runsc_sha256,
                "platform": self.platform,
                "network": self.network,
                "directfs": self.directfs,
                "overlay2": self.overlay,
            },
            "gpus": [
                {"model": each.model, "count": each.count, "driver": each.driver, "mig": each.is_mig}
                for each in self.gpus
            ],
            "nodeVersion": self.node_version,
        }

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, object], *, where: str) -> "MachineFacts":
        """Read what `to_mapping` wrote; members that are newer than we are pass. Raises: `InvalidObject`."""
        problems: list[str] = []
        top = Fields(mapping, "", problems, is_strict=False)
        cpu, runsc = top.member("cpu"), top.member("runsc", is_required=True)
        gpus = tuple(
            Gpus(
                model=each.text("model"),
                count=each.integer("count", low=1, high=1024),
                driver=each.text("driver"),
                is_mig=each.boolean("mig", default=False),
            )
            for each in top.members("gpus", most=MAX_GPUS)
        )
        facts = cls(
            architecture=top.choice("architecture", Architecture),
            machine_type=top.text("machineType", default=""),
            cpu_vendor=cpu.text("vendor", default=""),
            cpu_model=cpu.text("model", default=""),
            cpu_features=frozenset(cpu.texts("features", most=MAX_FEATURES)),
            cache_line_bytes=cpu.integer("cacheLineBytes", default=0, low=0, high=1 << 16),
            runsc_version=runsc.text("version", default=""),
            runsc_sha256=runsc.text("sha256", default="", pattern=_DIGEST, what="64 hexadecimal digits"),
            platform=runsc.text("platform", default=""),
            network=runsc.text("network", default=""),
            directfs=runsc.boolean("directfs", default=True),
            overlay=runsc.text("overlay2", default=""),
            gpus=gpus,
            node_version=top.text("nodeVersion", default=""),
        )
        if problems:
            raise InvalidObject(where, tuple(problems))
        return facts
