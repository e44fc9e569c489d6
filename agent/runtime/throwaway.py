"""A container's spec, changed so that a copy of it can run beside the original and be thrown away (pure).

gVisor compares the spec of a restore with the image's (runsc/specutils/restore.go), so only what it leaves free is
changed: where the root is, which namespaces and cgroups are joined, hooks, and where a checkpoint would be written.
"""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agent.runtime.bundle import CONTAINER_TYPE, SANDBOX_ID
from streamd.errors import Refused

# Where the application's own checkpoint would go: the original's, into which only one sandbox can write.
_CHECKPOINT_PATH = "dev.gvisor.internal.checkpoint.path"
# A file system of the sandbox's own, or one that holds nothing of the host's users.
_OWN_FILESYSTEMS = frozenset({"tmpfs", "proc", "sysfs", "devpts", "mqueue", "devtmpfs", "cgroup", "cgroup2"})


def throwaway_spec(spec: Mapping[str, Any], *, bundle: Path, container_id: str) -> dict[str, Any]:
    """Give the spec of a copy with that id; `bundle` is the directory of the original's.

    The copy joins no namespace and no cgroup, runs no hook, and has its root where the original has it.
    Raises: `Refused` when it is no spec, or that of a pod's second or later container.
    """
    changed = copy.deepcopy(dict(spec))
    try:
        annotations = changed.setdefault("annotations", {})
        if annotations.get(CONTAINER_TYPE) == "container":
            raise Refused(f"{bundle}: it is the bundle of a further container of a pod; give that of its first one")
        if SANDBOX_ID in annotations:
            annotations[SANDBOX_ID] = container_id
        annotations.pop(_CHECKPOINT_PATH, None)
        changed["root"]["path"] = str(bundle / changed["root"]["path"])
        changed.pop("hooks", None)
        linux = changed.setdefault("linux", {})
        linux.pop("cgroupsPath", None)
        for namespace in linux.get("namespaces", ()):
            namespace.pop("path", None)
    except (AttributeError, KeyError, TypeError) as error:
        raise Refused(f"{bundle}: its config.json is not the spec of a container") from error
    return changed


def shared_directories(spec: Mapping[str, Any]) -> tuple[str, ...]:
    """Name where the container could write into files of the host: its writable bind mounts."""
    return tuple(
        str(mount.get("destination"))
        for mount in spec.get("mounts", ())
        if mount.get("type", "bind") not in _OWN_FILESYSTEMS and "ro" not in mount.get("options", ())
    )
