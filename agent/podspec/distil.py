"""From a pod to what counts of it, in canonical form.

A distilled pod has the form of a pod, so that it can be kept beside its hash, read by people and compared: distilling
it again gives the same. It never holds environments, resources, or where and for whom the pod runs.

What the API server adds to each pod is dropped, else no two pods would be alike: the volume with the token of the
pod's service account, `kube-api-access-` and five random characters, and its mounts. It is known by what it holds and
where it is mounted, as well as by its name: a volume of a user that only has such a name counts like any other.
(Which pods get one depends on `automountServiceAccountToken` of the pod, which counts, and of its service account,
which a pod doesn't show: two pods can be alike here and differ by that mount. gVisor's own comparison of mounts, which
the agent makes before it restores, tells them apart.)
"""

import re
from collections.abc import Mapping

from agent.podspec.counted import ANNOTATION_PREFIX, INJECTED_ANNOTATION_PREFIX, LABELS, POD
from agent.podspec.shapes import PodSpecError, Value, mapping, read
from agent.podspec.volume_sources import VOLUME_SOURCES, settled


def distil(pod: Mapping[str, object]) -> dict[str, Value]:
    """Keep what counts of a pod, or of a pod template, in canonical form.

    Raises: `PodSpecError`: a counted field has another type than the API's, no container is there, two have one name,
        a volume is of no kind that is known here.
    """
    _refuse_unknown_volumes(pod)
    distilled = read(POD, {"metadata": _counted_metadata(pod), "spec": pod.get("spec")}, "")
    spec = distilled.get("spec") if isinstance(distilled, dict) else None
    if not isinstance(distilled, dict) or not isinstance(spec, dict) or "containers" not in spec:
        raise PodSpecError("spec.containers", "missing: a pod has one container at least")
    if "volumes" in spec:
        spec["volumes"] = [settled(volume) for volume in _objects(spec, "volumes")]
        _drop_service_account_token(spec)
    return distilled


def _counted_metadata(pod: Mapping[str, object]) -> dict[str, object]:
    metadata = mapping(pod.get("metadata"), "metadata")
    annotations = mapping(metadata.get("annotations"), "metadata.annotations")
    labels = mapping(metadata.get("labels"), "metadata.labels")
    return {
        "annotations": {
            name: value
            for name, value in annotations.items()
            if name.startswith(ANNOTATION_PREFIX) and not name.startswith(INJECTED_ANNOTATION_PREFIX)
        },
        "labels": {name: labels[name] for name in LABELS if name in labels},
    }


def _refuse_unknown_volumes(pod: Mapping[str, object]) -> None:
    """Refuse volumes of a newer API's kinds: without their source they would pass for emptyDirs."""
    spec = pod.get("spec")
    volumes = spec.get("volumes") if isinstance(spec, Mapping) else None
    for index, volume in enumerate(volumes if isinstance(volumes, list) else []):
        path = f"spec.volumes[{index}]"
        members = {name for name, value in mapping(volume, path).items() if value is not None} - {"name"}
        if members and not members & VOLUME_SOURCES.keys():
            raise PodSpecError(path, f"of a kind that isn't known here: {', '.join(sorted(members))[:200]}")


# plugin/pkg/admission/serviceaccount/admission.go: the volume, and the one way in which it is mounted.
_TOKEN_VOLUME_NAME = re.compile(r"kube-api-access-[a-z0-9]{5}")
_TOKEN_MOUNT = {"mountPath": "/var/run/secrets/kubernetes.io/serviceaccount", "readOnly": True}
_TOKEN_SOURCES = [  # behind the token itself, whose validity is the cluster's choice
    {"configMap": {"items": [{"key": "ca.crt", "path": "ca.crt"}], "name": "kube-root-ca.crt"}},
    {"downwardAPI": {"items": [{"fieldRef": {"fieldPath": "metadata.namespace"}, "path": "namespace"}]}},
]


def _drop_service_account_token(spec: dict[str, Value]) -> None:
    tokens = {
        str(volume["name"])
        for volume in _objects(spec, "volumes")
        if _TOKEN_VOLUME_NAME.fullmatch(str(volume["name"])) and _is_service_account_token(volume)
    }
    containers = [*_objects(spec, "initContainers"), *_objects(spec, "containers")]
    for container in containers:
        for mount in _objects(container, "volumeMounts"):
            if mount != _TOKEN_MOUNT | {"name": mount.get("name", "")}:
                tokens.discard(str(mount.get("name")))
    _drop(spec, "volumes", tokens)
    for container in containers:
        _drop(container, "volumeMounts", tokens)


def _is_service_account_token(volume: Mapping[str, Value]) -> bool:
    projected = volume.get("projected")
    if volume.keys() != {"name", "projected"} or not isinstance(projected, dict) or projected.keys() != {"sources"}:
        return False
    match projected["sources"]:
        case [{"serviceAccountToken": {"path": "token", **validity}, **rest}, *others]:
            return not rest and validity.keys() <= {"expirationSeconds"} and others == _TOKEN_SOURCES
    return False


def _drop(owner: dict[str, Value], member: str, names: set[str]) -> None:
    """Take what has one of these names out of a list, and an empty list out of its owner."""
    kept: list[Value] = [item for item in _objects(owner, member) if item.get("name") not in names]
    if kept:
        owner[member] = kept
    else:
        owner.pop(member, None)


def _objects(owner: Mapping[str, Value], member: str) -> list[dict[str, Value]]:
    items = owner.get(member, [])
    assert isinstance(items, list)
    return [item for item in items if isinstance(item, dict)]
