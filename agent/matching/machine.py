"""Hardware: which series a machine belongs to, and whether a snapshot of one machine runs on another. Pure.

Google names the rule: same machine series, same architecture; the number of CPUs and the memory may differ. A type that
isn't Google's, or is newer than the table, has no series here; then the CPU decides, by what gVisor itself demands
(`cpuid.FeatureSet.CheckHostCompatible`, before it loads anything): the host has all features that were there at save,
and cache lines of the same size. That is asked in any case where it is known, since one series may have several CPUs
(N2: Cascade Lake and Ice Lake). The vendor must be the same, too, since programs choose code by it when they start. The
model needn't be, unless features are unknown.
"""

import re
from collections.abc import Iterator

from agent.matching.facts import Architecture, MachineFacts
from agent.matching.reasons import Reason, Refusal, differing

# docs.cloud.google.com: compute/docs/machine-resource and compute/docs/cpu-platforms (which names C4A, N4A, T2A and
# A4X as the ones with Arm processors), as of November 2025.
_AMD64 = (
    "e2 n1 n2 n2d n4 n4d t2d"  # general purpose
    " c3 c3d c4 c4d c2 c2d h3 h4d z3"  # computing, storage
    " m1 m2 m3 m4 x4"  # memory
    " a2 a3 a4 g2 g4"  # accelerators
)
_ARM64 = "c4a n4a t2a a4x"
SERIES = dict.fromkeys(_AMD64.split(), Architecture.AMD64) | dict.fromkeys(_ARM64.split(), Architecture.ARM64)
# The metadata server gives `projects/NUMBER/machineTypes/TYPE`.
_TYPE = re.compile(r"(?:.*/)?(([a-z]+\d*[a-z]*)-[a-z0-9-]+)", re.ASCII)
# Names without a series: shared-core and custom types of N1 (compute/docs/general-purpose-machines), and what the first
# memory-optimized types, now M1, were called.
_N1 = ("f1", "g1", "custom")
_M1 = re.compile(r"n1-(?:megamem|ultramem)-\d+", re.ASCII)
# TPU machines: ct3p, ct4p, ct5lp, ct6e, tpu7x and so on (kubernetes-engine/docs/concepts/tpus).
_TPU = re.compile(r"ct\d|tpu\d", re.ASCII)
_SHOWN_FEATURES = 8


def series_of(machine_type: str) -> str:
    """Give the series of a machine type, custom types included; empty when the type isn't one of the table's."""
    match = _TYPE.fullmatch(machine_type)
    if match is None:
        return ""
    name, prefix = match.groups()
    if prefix in _N1:
        return "n1"
    if _M1.fullmatch(name):
        return "m1"
    return prefix if prefix in SERIES else ""


def is_tpu_machine(machine_type: str) -> bool:
    """Say whether a machine type is one with TPUs."""
    return _TPU.match(machine_type.rpartition("/")[2]) is not None


def hardware_differences(saved: MachineFacts, here: MachineFacts) -> Iterator[Refusal]:
    """Say what keeps a snapshot of one machine from running on another."""
    if saved.architecture is not here.architecture:
        yield differing(Reason.ARCHITECTURE, "CPU architecture", saved.architecture, here.architecture)
        return  # nothing else can be compared
    series, series_here = series_of(saved.machine_type), series_of(here.machine_type)
    if series != series_here:
        yield differing(
            Reason.MACHINE_SERIES,
            "machine series",
            series or saved.machine_type,
            series_here or here.machine_type,
        )
    elif not series:
        if saved.cpu_vendor != here.cpu_vendor or not here.cpu_vendor:
            yield differing(Reason.CPU_VENDOR, "CPU vendor", saved.cpu_vendor, here.cpu_vendor)
        if not saved.cpu_features and (saved.cpu_model != here.cpu_model or not here.cpu_model):
            yield differing(Reason.CPU_MODEL, "CPU model (its features are unknown)", saved.cpu_model, here.cpu_model)
    missing = saved.cpu_features - here.cpu_features
    if missing:
        names = sorted(missing)
        shown = ", ".join(names[:_SHOWN_FEATURES]) + (" and more" if len(names) > _SHOWN_FEATURES else "")
        yield Refusal(
            Reason.CPU_FEATURES,
            f"CPU features: the snapshot was made with {len(missing)} that this CPU lacks: {shown}",
            f"{len(saved.cpu_features)} features",
            f"without {shown}",
        )
    if saved.cache_line_bytes and saved.cache_line_bytes != here.cache_line_bytes:
        yield differing(
            Reason.CACHE_LINE, "size of the CPU's cache lines", saved.cache_line_bytes, here.cache_line_bytes or ""
        )
