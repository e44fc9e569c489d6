"""`metadata` of an object: its name, its labels, and what an API server adds. Pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from agent.kube.conditions import TIMESTAMP
from agent.kube.fields import Fields
from agent.kube.selectors import is_label_key, is_label_value

# Kubernetes' rules for names (https://kubernetes.io/docs/concepts/overview/working-with-objects/names/): a namespace is
# an RFC 1123 label, the name of a custom object a subdomain: labels with dots between them.
_LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
NAMESPACE = _LABEL
NAME = rf"(?=.{{1,253}}\Z){_LABEL}(?:\.{_LABEL})*"
# apimachinery, apis/meta/v1 `ObjectMeta`: what else there is, and `kubectl get -o yaml` brings along.
_OF_THE_SERVER = (
    "selfLink",
    "deletionGracePeriodSeconds",
    "ownerReferences",
    "finalizers",
    "managedFields",
)
_MAX_INTEGER = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectMeta:
    """What all objects have. `namespace` is empty for what belongs to the whole cluster.

    `resource_version` is another with each change of the object and has no other meaning; `generation` counts changes
    of its spec. Both, and the times (RFC 3339, UTC), are the keeper's to set; empty or 0: not kept yet.
    """

    name: str
    namespace: str = ""
    uid: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    resource_version: str = ""
    generation: int = 0
    creation_timestamp: str = ""
    deletion_timestamp: str = ""


def read_meta(fields: Fields, *, is_namespaced: bool) -> ObjectMeta:
    """Read `metadata`; what is wrong with it is noted. As with kubectl, no namespace means `default`."""
    name = fields.text("name", pattern=NAME, what="a name (lower-case letters, digits, - and .)")
    namespace = ""
    if is_namespaced:
        namespace = fields.text("namespace", default="default", pattern=NAMESPACE, what="the name of a namespace")
    elif fields.take("namespace"):
        fields.problem("namespace", "can't be given: this kind belongs to the whole cluster")
    if fields.take("generateName"):
        fields.problem("generateName", "can't be used here; give a name")
    labels = fields.text_map("labels")
    for key, value in labels.items():
        if not is_label_key(key) or not is_label_value(value):
            fields.problem("labels", f"{key[:80]!r}: {value[:80]!r} is no label")
    meta = ObjectMeta(
        name=name,
        namespace=namespace,
        uid=fields.text("uid", default=""),
        labels=labels,
        annotations=fields.text_map("annotations"),
        resource_version=fields.text("resourceVersion", default=""),
        generation=fields.integer("generation", default=0, low=0, high=_MAX_INTEGER),
        creation_timestamp=_time(fields, "creationTimestamp"),
        deletion_timestamp=_time(fields, "deletionTimestamp"),
    )
    fields.ignore(_OF_THE_SERVER)
    fields.done()
    return meta


def meta_mapping(meta: ObjectMeta) -> dict[str, object]:
    """Write `metadata` as the API holds it; what is empty is left out."""
    members: dict[str, object] = {
        "name": meta.name,
        "namespace": meta.namespace,
        "uid": meta.uid,
        "labels": dict(meta.labels),
        "annotations": dict(meta.annotations),
        "resourceVersion": meta.resource_version,
        "generation": meta.generation,
        "creationTimestamp": meta.creation_timestamp,
        "deletionTimestamp": meta.deletion_timestamp,
    }
    return {name: value for name, value in members.items() if value}


def is_name(text: str) -> bool:
    """Say whether a text may be the name of an object."""
    return re.fullmatch(NAME, text, re.ASCII) is not None


def is_namespace(text: str) -> bool:
    """Say whether a text may be the name of a namespace."""
    return re.fullmatch(NAMESPACE, text, re.ASCII) is not None


def _time(fields: Fields, name: str) -> str:
    """Take a time. One that isn't in quotes in YAML comes as a date, which the API's own files never have."""
    return fields.text(name, default="", pattern=f"(?:{TIMESTAMP})?", what="a time such as 2026-01-31T12:00:00Z")
