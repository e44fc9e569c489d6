"""Whether the wrapper was called with the flags that the agent's configuration tells of. Pure.

A sandbox's network, platform, overlay and directfs are part of its image, and a restore under other ones fails when
there is no way back (gVisor refuses another network mode, and fails on another directfs). Snapshots note what the
configuration says; so where containerd calls runsc otherwise, nothing that is known of them holds.
"""

from collections.abc import Mapping

from agent.config import RuntimeConfig

# What runsc takes where nobody gives it (gVisor runsc/config/flags.go).
_DEFAULTS = {"network": "sandbox", "platform": "systrap", "overlay2": "root:self", "directfs": "true"}
# As Go's strconv.ParseBool reads it; a boolean flag without a value is true (Go's `flag`).
_TRUE = frozenset({"", "1", "t", "T", "true", "TRUE", "True"})


def differing_flags(given: Mapping[str, str], configured: RuntimeConfig) -> str:
    """Say how the wrapper's flags differ from the configuration; empty when they don't."""
    wanted = {
        "network": configured.network.value,
        "platform": configured.platform,
        "overlay2": configured.overlay2 or _DEFAULTS["overlay2"],
        "directfs": "true" if configured.directfs else "false",
    }
    found = _DEFAULTS | {name: given[name] for name in _DEFAULTS if name in given}
    found["directfs"] = "true" if found["directfs"] in _TRUE else "false"
    differences = [
        f"--{name}={found[name]}, and [runtime] {name} is {wanted[name]}"
        for name in _DEFAULTS
        if found[name] != wanted[name]
    ]
    return f"runsc is called with {'; '.join(differences)}" if differences else ""
