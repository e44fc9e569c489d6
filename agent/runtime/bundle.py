"""OCI bundles for sandboxes that this project starts itself: demo, tests and benchmarks (the agent's pods bring their
own).

A bundle is a directory with a `config.json` (opencontainers/runtime-spec). `container_spec` makes its contents from
values and `write_bundle` puts them into a directory. The root file system of these sandboxes is a directory of a few
empty mount points and links (`make_rootfs`); the host's `/usr`, and the directory of the Python that runs us, are bound
into it read-only. So it works on any machine, writes nothing into the host's files when it is writable, and needs no
container image.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# How containerd tells runsc which containers share a sandbox, and how gVisor names them in an image
# (runsc/specutils/cri.go).
CONTAINER_TYPE = "io.kubernetes.cri.container-type"
SANDBOX_ID = "io.kubernetes.cri.sandbox-id"
CONTAINER_NAME = "io.kubernetes.cri.container-name"

_HOST_LINKS = ("bin", "lib", "lib64", "sbin")
_MOUNT_POINTS = ("dev", "proc", "sys", "tmp", "usr")


@dataclass(frozen=True, slots=True)
class Mount:
    """A mount of a container; `options` as mount(8) spells them."""

    destination: str
    source: str
    kind: str = "bind"
    options: tuple[str, ...] = ("rbind", "ro")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rootfs:
    """A root file system: its directory, and what is mounted into it beside /proc, /sys, /dev and /tmp."""

    path: Path
    mounts: tuple[Mount, ...] = ()
    readonly: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """Where a container belongs: `sandbox_id` is the id of the pod's first container; `name` stays over a restore."""

    sandbox_id: str
    name: str
    first: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """What runs, in what. Without a `pod` it is alone in its sandbox."""

    args: Sequence[str]
    rootfs: Rootfs
    env: Mapping[str, str] = field(default_factory=lambda: {"PATH": "/usr/bin:/bin"})
    cwd: str = "/"
    hostname: str = "sandbox"
    pod: Pod | None = None
    annotations: Mapping[str, str] = field(default_factory=dict)


def container_spec(container: Container) -> dict[str, Any]:
    """Give the OCI spec of a container: no capabilities, no terminal, a tmpfs on /tmp."""
    mounts = [
        Mount("/proc", "proc", "proc", ()),
        Mount("/dev", "tmpfs", "tmpfs", ("nosuid", "mode=755")),
        Mount("/sys", "sysfs", "sysfs", ("nosuid", "noexec", "nodev", "ro")),
        Mount("/tmp", "tmpfs", "tmpfs", ("nosuid", "nodev", "mode=1777")),  # noqa: S108 - inside the sandbox
        *container.rootfs.mounts,
    ]
    return {
        "ociVersion": "1.0.2",
        "process": {
            "terminal": False,
            "user": {"uid": 0, "gid": 0},
            "args": list(container.args),
            "env": [f"{name}={value}" for name, value in container.env.items()],
            "cwd": container.cwd,
            "capabilities": {},
            "noNewPrivileges": True,
        },
        "root": {"path": os.fspath(container.rootfs.path), "readonly": container.rootfs.readonly},
        "hostname": container.hostname,
        "mounts": [
            {"destination": m.destination, "source": m.source, "type": m.kind, "options": list(m.options)}
            for m in mounts
        ],
        "annotations": {**pod_annotations(container.pod), **container.annotations},
        "linux": {"namespaces": [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")]},
    }


def pod_annotations(pod: Pod | None) -> dict[str, str]:
    """Give the annotations by which runsc puts a container into a sandbox; none for a container that is alone."""
    if pod is None:
        return {}
    return {
        CONTAINER_TYPE: "sandbox" if pod.first else "container",
        SANDBOX_ID: pod.sandbox_id,
        CONTAINER_NAME: pod.name,
    }


def write_bundle(directory: Path, container: Container) -> Path:
    """Make `directory` a bundle, or make it anew, and return it as the absolute path that runsc wants."""
    directory = directory.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(container_spec(container), indent=1))
    return directory


def python_interpreter() -> Path:
    """Find the real file of the Python that runs us, which has the same path in `make_rootfs`'s root."""
    base = getattr(sys, "_base_executable", None) or sys.executable
    return Path(base).resolve()


def make_rootfs(directory: Path, *, readonly: bool = True) -> Rootfs:
    """Make the root file system in `directory`; programs of the host, read-only, on a root of its own.

    Give each container that may write its own directory: with runsc's default overlay the upper layer lives in it.
    """
    directory = directory.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    for name in _MOUNT_POINTS:
        (directory / name).mkdir(exist_ok=True)
    mounts = [Mount("/usr", "/usr")]
    for name in _HOST_LINKS:
        host = Path("/", name)
        if host.is_symlink() and not (directory / name).is_symlink():
            (directory / name).symlink_to(host.readlink())  # /lib64 → usr/lib64: the merged layout of Debian and Ubuntu
        elif host.is_dir() and not host.is_symlink():
            (directory / name).mkdir(exist_ok=True)
            mounts.append(Mount(f"/{name}", f"/{name}"))
    prefix = Path(sys.base_prefix).resolve()
    if not prefix.is_relative_to("/usr"):
        (directory / prefix.relative_to("/")).mkdir(parents=True, exist_ok=True)
        mounts.append(Mount(str(prefix), str(prefix)))
    return Rootfs(path=directory, mounts=tuple(mounts), readonly=readonly)
