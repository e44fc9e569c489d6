"""A container's spec, changed so that a copy of it can run beside the original and be thrown away (pure).

gVisor compares the spec of a restore with the image's (runsc/specutils/restore.go), so only what it leaves free is
changed: where the root is, which namespaces and cgroups are joined, hooks, and where a checkpoint would be written.
"""

import copy
from collections.abc import Mapping, Sequence
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


def shared_directories(spec: Mapping[str, Any], runsc_flags: Sequence[str] = ()) -> tuple[str, ...]:
    """Name where the container could write into files of the host: writable bind mounts, and its own root, unless runsc
    puts an overlay over it, as it does when no flag says otherwise.

    Raises: `Refused` when the mounts are none.
    """
    overlays = [flag.partition("=")[2] for flag in runsc_flags if flag.lstrip("-").startswith("overlay2")]
    try:
        is_bare = bool(overlays) and overlays[-1] in ("", "none") and not spec.get("root", {}).get("readonly", False)
        mounts = spec.get("mounts") or ()
        return (("/",) if is_bare else ()) + tuple(
            str(mount.get("destination")) for mount in mounts if _is_writable_bind(mount)
        )
    except (AttributeError, TypeError) as error:
        raise Refused("its config.json is not the spec of a container") from error


def _is_writable_bind(mount: Mapping[str, Any]) -> bool:
    """Tell by what runsc goes by: an option makes a bind of any type (specutils.MaybeConvertToBindMount)."""
    options = mount.get("options") or ()
    is_bind = "bind" in options or "rbind" in options or mount.get("type", "bind") not in _OWN_FILESYSTEMS
    return is_bind and ("ro" not in options or "rw" in options)
