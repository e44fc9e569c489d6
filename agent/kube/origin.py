"""What a snapshot was made from and on, as its status keeps it (`status.origin`). Pure.

    pod:  {name, uid, gpus, containers: [NAME…], hash: {version, xxh3, sha256}, spec: {the distilled pod}}
    node: {name, facts: {the machine, runsc and its flags}}

The distilled pod lies beside its hash so that a mismatch can name the field that differs (Kubernetes' own KEP-5823
keeps a `checkpointedPodTemplate` for the same end). It has no environment and no resources: those don't count. `facts`
is kept here as it came: `agent.matching.facts` reads it, and what it can't read makes a snapshot that matches nothing,
not one that can't be listed or deleted.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from agent.kube.fields import Fields
from agent.podspec.identity import PodHash

_HEX = r"[0-9a-f]"
MAX_CONTAINERS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """See the module's text. `gpus`: how many the pod had; `containers`: their names, in the order of the spec."""

    pod_name: str
    pod_uid: str
    pod_hash: PodHash
    distilled: Mapping[str, object] = field(default_factory=dict)
    containers: tuple[str, ...] = ()
    gpus: int = 0
    node_name: str = ""
    node_facts: Mapping[str, object] = field(default_factory=dict)


def read_origin(fields: Fields) -> Origin:
    """Read it; what is wrong with it is noted."""
    pod, node = fields.member("pod", is_required=True), fields.member("node")
    pod_hash = pod.member("hash", is_required=True)
    return Origin(
        pod_name=pod.text("name"),
        pod_uid=pod.text("uid", default=""),
        pod_hash=PodHash(
            version=pod_hash.integer("version", low=0, high=1 << 30),
            xxh3_128=pod_hash.text("xxh3", pattern=_HEX + "{32}", what="32 hexadecimal digits"),
            sha256=pod_hash.text("sha256", pattern=_HEX + "{64}", what="64 hexadecimal digits"),
        ),
        distilled=_plain(pod, "spec"),
        containers=pod.texts("containers", most=MAX_CONTAINERS),
        gpus=pod.integer("gpus", default=0, low=0, high=1024),
        node_name=node.text("name", default=""),
        node_facts=_plain(node, "facts"),
    )


def origin_mapping(origin: Origin) -> dict[str, object]:
    """Write it."""
    return {
        "pod": {
            "name": origin.pod_name,
            "uid": origin.pod_uid,
            "gpus": origin.gpus,
            "containers": [*origin.containers],
            "hash": {
                "version": origin.pod_hash.version,
                "xxh3": origin.pod_hash.xxh3_128,
                "sha256": origin.pod_hash.sha256,
            },
            "spec": dict(origin.distilled),
        },
        "node": {"name": origin.node_name, "facts": dict(origin.node_facts)},
    }


def _plain(fields: Fields, name: str) -> Mapping[str, object]:
    value = fields.take(name)
    if isinstance(value, Mapping):
        return value
    if value is not None:
        fields.problem(name, "must be an object")
    return {}
