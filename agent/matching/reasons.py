"""Why a pod isn't restored: one reason for each rule. Pure."""

from dataclasses import dataclass
from enum import StrEnum


class Decider(StrEnum):
    """What kind of thing a reason is about."""

    POLICY = "policy"
    SNAPSHOT = "snapshot"
    HASH = "hash"
    HARDWARE = "hardware"
    GVISOR = "gvisor"
    GPU = "gpu"
    POD = "pod"


class Reason(StrEnum):
    """The reasons, in the order in which rules are asked (`choice`)."""

    # Of the pod on this node, whatever the snapshot.
    NO_POLICY = "no-policy"
    E2_MACHINE = "e2-machine"
    TPU = "tpu"
    FUSE_SIDECAR = "cloud-storage-fuse-sidecar"
    GPU_MISSING = "gpu-missing"
    GPU_MIXED = "gpu-mixed"
    GPU_MIG = "gpu-mig"
    GPU_MACHINE_TYPE = "gpu-machine-type"
    GPU_SEVERAL = "gpu-several"
    GPU_WHOLE_NODE = "gpu-whole-node"
    # Which snapshots are asked about at all.
    PIN_MISSING = "pin-missing"
    PIN_OTHER = "pin-other"  # only where one snapshot is asked about: the pod's own choice isn't that one
    NO_SNAPSHOT = "no-snapshot"
    POLICY_GONE = "policy-gone"
    POLICY_SELECTOR = "policy-selector"
    GROUP_LABEL = "group-label"
    # Of one snapshot.
    POD_HASH = "pod-hash"
    NOT_READY = "not-ready"
    FAILED = "failed"
    DELETING = "deleting"
    NO_RECORD = "no-record"
    RESTING = "resting"
    ARCHITECTURE = "architecture"
    MACHINE_SERIES = "machine-series"
    CPU_VENDOR = "cpu-vendor"
    CPU_MODEL = "cpu-model"
    CPU_FEATURES = "cpu-features"
    CACHE_LINE = "cache-line"
    RUNSC_VERSION = "runsc-version"
    RUNSC_DIGEST = "runsc-digest"
    PLATFORM = "platform"
    NETWORK = "network"
    DIRECTFS = "directfs"
    OVERLAY = "overlay"
    GPU_COUNT = "gpu-count"
    GPU_MODEL = "gpu-model"
    GPU_DRIVER = "gpu-driver"

    @property
    def decider(self) -> Decider:
        """What it is about."""
        return _DECIDERS[self]


_OF = {
    Decider.POLICY: (Reason.NO_POLICY, Reason.POLICY_GONE, Reason.POLICY_SELECTOR, Reason.GROUP_LABEL),
    Decider.SNAPSHOT: (
        Reason.NO_SNAPSHOT,
        Reason.PIN_MISSING,
        Reason.PIN_OTHER,
        Reason.NOT_READY,
        Reason.FAILED,
        Reason.DELETING,
        Reason.NO_RECORD,
        Reason.RESTING,
    ),
    Decider.HASH: (Reason.POD_HASH,),
    Decider.HARDWARE: (
        Reason.E2_MACHINE,
        Reason.ARCHITECTURE,
        Reason.MACHINE_SERIES,
        Reason.CPU_VENDOR,
        Reason.CPU_MODEL,
        Reason.CPU_FEATURES,
        Reason.CACHE_LINE,
    ),
    Decider.GVISOR: (
        Reason.RUNSC_VERSION,
        Reason.RUNSC_DIGEST,
        Reason.PLATFORM,
        Reason.NETWORK,
        Reason.DIRECTFS,
        Reason.OVERLAY,
    ),
    Decider.GPU: (
        Reason.GPU_MISSING,
        Reason.GPU_MIXED,
        Reason.GPU_MIG,
        Reason.GPU_MACHINE_TYPE,
        Reason.GPU_SEVERAL,
        Reason.GPU_WHOLE_NODE,
        Reason.GPU_COUNT,
        Reason.GPU_MODEL,
        Reason.GPU_DRIVER,
    ),
    Decider.POD: (Reason.TPU, Reason.FUSE_SIDECAR),
}
_DECIDERS = {reason: decider for decider, reasons in _OF.items() for reason in reasons}
assert _DECIDERS.keys() == set(Reason)


@dataclass(frozen=True, slots=True)
class Refusal:
    """One rule that isn't met. `saved` and `here`: the two values that differ, where there are two; shown to people."""

    reason: Reason
    message: str
    saved: str = ""
    here: str = ""


def differing(reason: Reason, what: str, saved: object, here: object) -> Refusal:
    """Make the refusal of a rule that wants two values to be the same."""
    shown = [str(value) if str(value) else "unknown" for value in (saved, here)]
    return Refusal(reason, f"{what}: the snapshot was made with {shown[0]}, here it is {shown[1]}", *shown)
