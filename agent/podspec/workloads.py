"""From the objects that make pods (Deployment, StatefulSet, Job, …) to the pods that they make, as far as it counts.

Most controllers copy their template, and what they add doesn't count. Two of them make each replica different in what
counts, and so these replicas have different hashes: a StatefulSet with claim templates gives each replica volumes with
claims of its own (pkg/controller/statefulset/stateful_set_utils.go), an Indexed Job a label with its index.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from agent.podspec.counted import LABELS
from agent.podspec.shapes import PodSpecError, mapping

# API group and kind → where the pod template is.
_TEMPLATES = {
    ("", "Pod"): (),
    ("", "PodTemplate"): ("template",),
    ("", "ReplicationController"): ("spec", "template"),
    ("apps", "DaemonSet"): ("spec", "template"),
    ("apps", "Deployment"): ("spec", "template"),
    ("apps", "ReplicaSet"): ("spec", "template"),
    ("apps", "StatefulSet"): ("spec", "template"),
    ("batch", "CronJob"): ("spec", "jobTemplate", "spec", "template"),
    ("batch", "Job"): ("spec", "template"),
}
WORKLOAD_KINDS = tuple(kind for _, kind in _TEMPLATES)
_LONGEST_NAME, _RANDOM_CHARS = 63, 5
# How pods are named behind their owner's name, with the replica's index where there is one; five random characters, for
# which longer names are cut (k8s.io/apiserver/pkg/storage/names).
_RANDOM = f"-[a-z0-9]{{{_RANDOM_CHARS}}}"
_POD_NAMES = {
    "Pod": "",
    "PodTemplate": _RANDOM,
    "ReplicationController": _RANDOM,
    "DaemonSet": _RANDOM,
    "Deployment": f"-[a-z0-9]{{1,10}}{_RANDOM}",
    "ReplicaSet": _RANDOM,
    "StatefulSet": r"-(?P<index>\d{1,9})",
    "CronJob": rf"-\d+(?:-(?P<index>\d{{1,9}}))?{_RANDOM}",
    "Job": rf"(?:-(?P<index>\d{{1,9}}))?{_RANDOM}",
}


@dataclass(frozen=True, slots=True)
class Workload:
    """An object that makes pods from `template` (a Pod is its own).

    `claims`: the names of a StatefulSet's claim templates; `is_indexed`: a Job's pods have an index; `first_index`: of
    the first replica.
    """

    kind: str
    namespace: str
    name: str
    template: Mapping[str, object]
    claims: tuple[str, ...] = ()
    is_indexed: bool = False
    first_index: int = 0

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}"

    @property
    def differs_by_index(self) -> bool:
        """Whether each of its pods has another hash."""
        return bool(self.claims) or self.is_indexed

    def pod(self, index: int | None = None) -> Mapping[str, object]:
        """Give what it makes as its pod of an index (the first), with its namespace. Raises: `PodSpecError`."""
        index = self.first_index if index is None else index
        metadata = mapping(self.template.get("metadata"), "metadata")
        spec = mapping(self.template.get("spec"), "spec")
        labels = mapping(metadata.get("labels"), "metadata.labels")
        if self.is_indexed:
            labels = {**labels, LABELS[0]: str(index)}
        volumes = spec.get("volumes")
        if self.claims and (volumes is None or isinstance(volumes, list)):
            own = [{"name": name, "persistentVolumeClaim": self._claim(name, index)} for name in self.claims]
            others = [
                each for each in volumes or () if not isinstance(each, Mapping) or each.get("name") not in self.claims
            ]
            spec = {**spec, "volumes": [*own, *others]}
        return {"metadata": {**metadata, "namespace": self.namespace, "labels": labels}, "spec": spec}

    def makes(self, pod_name: str) -> bool:
        """Say whether a pod of this name in its namespace may be one of its own."""
        return self._match(pod_name) is not None

    def index_of(self, pod_name: str) -> int:
        """Give the index that a pod's name holds, of the first replica where it holds none."""
        found = self._match(pod_name)
        index = found.groupdict().get("index") if found else None
        return self.first_index if index is None else int(index)

    def _claim(self, name: str, index: int) -> dict[str, object]:
        return {"claimName": f"{name}-{self.name}-{index}"}

    def _match(self, pod_name: str) -> re.Match[str] | None:
        if len(pod_name) == _LONGEST_NAME and _POD_NAMES[self.kind].endswith(_RANDOM):
            return re.match(re.escape(f"{self.name}-"[: _LONGEST_NAME - _RANDOM_CHARS]), pod_name)
        return re.fullmatch(re.escape(self.name) + _POD_NAMES[self.kind], pod_name, re.ASCII)


def workload_of(manifest: Mapping[str, object], source: str, *, namespace: str = "default") -> Workload | None:
    """Read an object that makes pods; None for other kinds.

    `source` names it in messages; `namespace`: where it goes when it doesn't say. Raises: `PodSpecError`.
    """
    kind, version = manifest.get("kind"), manifest.get("apiVersion")
    if not isinstance(kind, str) or not isinstance(version, str):
        raise PodSpecError(source, "kind and apiVersion are missing or no text: not a Kubernetes object")
    path = _TEMPLATES.get((version.rpartition("/")[0], kind))
    if path is None:
        return None
    metadata = mapping(manifest.get("metadata"), f"{source}: metadata")
    name = metadata.get("name") or metadata.get("generateName") or ""
    own_namespace = metadata.get("namespace") or namespace
    if not isinstance(name, str) or not isinstance(own_namespace, str):
        raise PodSpecError(f"{source}: metadata", "name and namespace must be text")
    template: Mapping[str, object] = manifest
    for depth, member in enumerate(path, 1):
        template = mapping(template.get(member), f"{source}: {'.'.join(path[:depth])}")
    spec = mapping(manifest.get("spec"), f"{source}: spec")
    ordinals = spec.get("ordinals")
    start = ordinals.get("start") if isinstance(ordinals, Mapping) else None
    return Workload(
        kind=kind,
        namespace=own_namespace,
        name=name,
        template=template,
        claims=_claims(spec, source) if kind == "StatefulSet" else (),
        is_indexed=kind in ("Job", "CronJob") and _job_spec(spec, kind).get("completionMode") == "Indexed",
        first_index=start if isinstance(start, int) and kind == "StatefulSet" else 0,
    )


def _claims(spec: Mapping[str, object], source: str) -> tuple[str, ...]:
    templates = spec.get("volumeClaimTemplates")
    where = f"{source}: spec.volumeClaimTemplates"
    if templates is None:
        return ()
    if not isinstance(templates, list):
        raise PodSpecError(where, "must be a list")
    names = [mapping(mapping(each, where).get("metadata"), where).get("name") for each in templates]
    if not all(isinstance(name, str) and name for name in names):
        raise PodSpecError(where, "one has no name")
    return tuple(map(str, names))


def _job_spec(spec: Mapping[str, object], kind: str) -> Mapping[str, object]:
    template = spec.get("jobTemplate") if kind == "CronJob" else None
    inner = template.get("spec") if isinstance(template, Mapping) else spec
    return inner if isinstance(inner, Mapping) else {}
