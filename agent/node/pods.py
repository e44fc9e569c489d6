"""Which Pod a container belongs to: a port that the Kubernetes API will fill, and what a node knows without it.

Without an API server a pod is found
1. among the manifests in `OBJECTS/pods/` (`PodManifests`): the Pod of that namespace and name, or the workload (a
   Deployment, …) that makes pods of such names;
2. for a container that is alone in its sandbox (`ctr run`, Docker, by hand): in its own bundle (`pod_of_bundle`).

A bundle is containerd's, but users fill parts of it: what it says is text to compare, never a path to open, and what
isn't of the right form is a `PodUnknown`, with which the container starts cold.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from agent.errors import AgentError
from agent.kube.meta import is_name, is_namespace
from agent.kube.objects import GROUP
from agent.kube.selectors import is_label_key, is_label_value
from agent.podspec.counted import ANNOTATION_PREFIX
from agent.runtime.bundle import CONTAINER_NAME
from agent.wrapper.protocol import ContainerKind, Create

# Annotations by which whoever runs a container without Kubernetes says what its Pod would.
POD_NAME = f"{GROUP}/pod-name"
POD_LABELS = f"{GROUP}/pod-labels"  # k=v,k2=v2
IMAGE = f"{GROUP}/image"
# containerd's CRI plugin (pkg/cri/annotations).
_CRI_IMAGE = "io.kubernetes.cri.image-name"
_FUSE = "gke-gcsfuse/volumes"
_LONE_NAME = "main"
_MAX_MOUNTS = 1000
# What a runtime mounts by itself into each container, with sources of that container's own.
_DEFAULT_MOUNTS = frozenset(
    {
        *("/proc", "/dev", "/dev/pts", "/dev/shm", "/dev/mqueue", "/sys", "/sys/fs/cgroup", "/run"),  # noqa: S108
        *("/etc/hosts", "/etc/hostname", "/etc/resolv.conf"),
    }
)

Pod = Mapping[str, object]


class PodUnknown(AgentError):
    """Which pod a container belongs to can't be said; the message says why."""

    kind = "pod-unknown"


class Pods(Protocol):
    """Finds pods."""

    async def find(self, request: Create, spec: Mapping[str, Any]) -> Pod:
        """Give the Pod, as the API server would hold it, of a sandbox's first container and its bundle's spec.

        Raises: `PodUnknown`.
        """
        ...


@dataclass(frozen=True, slots=True)
class Identity:
    """Which pod it is. `uid`: what no other pod has, on this node."""

    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


def identity(request: Create, spec: Mapping[str, Any]) -> Identity:
    """Say which pod a sandbox is.

    A container that is alone in its sandbox is of namespace `default` and has a uid of its own, whatever it says:
    nobody but its author has written its annotations. Raises: `PodUnknown`.
    """
    container_id, pod = request.container.container_id, request.pod
    if request.kind is ContainerKind.SINGLE:
        annotations = _texts(spec.get("annotations") or {}, "annotations")
        found = Identity("default", annotations.get(POD_NAME) or container_id, "")
    elif request.sandbox_id != container_id:
        raise PodUnknown(f"its annotations name another sandbox, {request.sandbox_id[:80]!r}")
    elif not pod.namespace or not pod.name:
        raise PodUnknown("its annotations don't name its pod as containerd's do (CRI-O is not supported)")
    else:
        found = Identity(pod.namespace, pod.name, pod.uid)
    if not is_namespace(found.namespace) or not is_name(found.name):
        raise PodUnknown(f"{found.namespace[:80]!r}/{found.name[:80]!r} can't be a pod's namespace and name")
    return found if found.uid else Identity(found.namespace, found.name, f"container-{container_id}")


def pod_of_bundle(request: Create, spec: Mapping[str, Any]) -> Pod:
    """Make the Pod of a container that is alone in its sandbox from its spec. Raises: `PodUnknown`."""
    if request.kind is not ContainerKind.SINGLE:
        raise PodUnknown("it is of several containers, and no manifest of it is in pods/ of the objects directory")
    who = identity(request, spec)
    try:
        annotations = _texts(spec.get("annotations") or {}, "annotations")
        process, root = _object(spec.get("process"), "process"), _object(spec.get("root"), "root")
        volumes, mounts = _volumes(spec.get("mounts") or [])
        container = {
            "name": annotations.get(CONTAINER_NAME) or _LONE_NAME,
            "image": annotations.get(_CRI_IMAGE) or annotations.get(IMAGE, ""),
            "command": _text_list(process.get("args") or [], "process.args"),
            "workingDir": process.get("cwd") or "/",
            "tty": bool(process.get("terminal")),
            "securityContext": _security(process, root),
            "volumeMounts": mounts,
        }
        namespaces = [_object(each, "linux.namespaces") for each in _object(spec.get("linux"), "linux")["namespaces"]]
        pod_spec = {
            "containers": [container],
            "volumes": volumes,
            "hostNetwork": not any(each.get("type") == "network" for each in namespaces),
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise PodUnknown(f"its bundle is no spec of a container: {error}") from error
    return {
        "metadata": {
            "name": who.name,
            "namespace": who.namespace,
            "uid": who.uid,
            "labels": _labels(annotations.get(POD_LABELS, "")),
            "annotations": {name: value for name, value in annotations.items() if _is_of_pod(name)},
        },
        "spec": pod_spec,
    }


def _is_of_pod(name: str) -> bool:
    return name.startswith((ANNOTATION_PREFIX, f"{GROUP}/")) or name == _FUSE


def _security(process: Mapping[str, Any], root: Mapping[str, Any]) -> dict[str, object]:
    user = _object(process.get("user"), "process.user")
    bounding = _object(process.get("capabilities"), "process.capabilities").get("bounding") or []
    return {
        "runAsUser": user.get("uid", 0),
        "runAsGroup": user.get("gid", 0),
        "readOnlyRootFilesystem": bool(root.get("readonly")),
        "allowPrivilegeEscalation": not process.get("noNewPrivileges"),
        "capabilities": {"add": sorted(_text_list(bounding, "process.capabilities.bounding"))},
    }


def _volumes(mounts: object) -> tuple[list[Pod], list[Pod]]:
    """Give the volumes and volumeMounts of a spec's mounts, without those that every container has."""
    if not isinstance(mounts, list) or len(mounts) > _MAX_MOUNTS:
        raise PodUnknown(f"its bundle's mounts are no list, or more than {_MAX_MOUNTS}")
    volumes: list[Pod] = []
    uses: list[Pod] = []
    for mount in mounts:
        each = _object(mount, "mounts")
        where = str(each.get("destination"))
        if where in _DEFAULT_MOUNTS:
            continue
        name = f"mount-{len(volumes)}"
        options = _text_list(each.get("options") or [], "mounts.options")
        is_bind = each.get("type") == "bind" or bool({"bind", "rbind"} & set(options))
        source: Pod = {"hostPath": {"path": str(each.get("source"))}} if is_bind else {"emptyDir": {"medium": "Memory"}}
        volumes.append({"name": name, **source})
        uses.append({"name": name, "mountPath": where, "readOnly": "ro" in options})
    return volumes, uses


def _labels(text: str) -> dict[str, str]:
    found = {}
    for part in text.split(",") if text else ():
        key, mark, value = part.strip().partition("=")
        if not mark or not is_label_key(key) or not is_label_value(value):
            raise PodUnknown(f"annotation {POD_LABELS}: {part[:80]!r} is no label")
        found[key] = value
    return found


def _object(value: object, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) and value is not None:
        raise PodUnknown(f"its bundle's {what} is no object")
    return value or {}


def _texts(value: object, what: str) -> dict[str, str]:
    members = _object(value, what)
    if not all(isinstance(name, str) and isinstance(text, str) for name, text in members.items()):
        raise PodUnknown(f"its bundle's {what} aren't texts")
    return dict(members)


def _text_list(value: object, what: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise PodUnknown(f"its bundle's {what} is no list of texts")
    return value
