"""gVisor: which runsc, run with which flags, restores what another one saved. Pure.

gVisor compares version strings for equality, but some builds have an empty one (`VERSION_MISSING`), and two builds of
one version may have different state formats: so the binary's digest must be the same, too. Flags: `--network=host`
against anything else is refused by gVisor, the other modes restore each other; `--directfs` must be the same (tried: a
restore with the other fails after the point of no return), and `--overlay2` decides how many memory files there are.
Nobody has tried a restore on another platform (systrap, kvm), so it must be the same.
"""

from collections.abc import Iterator

from agent.matching.facts import MachineFacts
from agent.matching.reasons import Reason, Refusal, differing

_HOST = "host"


def gvisor_differences(saved: MachineFacts, here: MachineFacts) -> Iterator[Refusal]:
    """Say what keeps this node's runsc from restoring what another one saved."""
    if saved.runsc_version != here.runsc_version:
        yield differing(Reason.RUNSC_VERSION, "gVisor version", saved.runsc_version, here.runsc_version)
    if saved.runsc_sha256 != here.runsc_sha256 or not here.runsc_sha256:
        yield differing(Reason.RUNSC_DIGEST, "SHA-256 of runsc", saved.runsc_sha256, here.runsc_sha256)
    if saved.platform != here.platform:
        yield differing(Reason.PLATFORM, "gVisor platform", saved.platform, here.platform)
    if (saved.network == _HOST) != (here.network == _HOST):
        yield differing(Reason.NETWORK, "gVisor network", saved.network, here.network)
    if saved.directfs != here.directfs:
        yield differing(Reason.DIRECTFS, "gVisor directfs", _on(saved.directfs), _on(here.directfs))
    if saved.overlay != here.overlay:
        yield differing(Reason.OVERLAY, "gVisor overlay2", saved.overlay, here.overlay)


def _on(flag: bool) -> str:
    return "true" if flag else "false"
