"""The four kinds of podsnapshot.gke.io/v1. Pure; `codec` reads and writes them.

Fields, defaults and rules are those of GKE's CRDs (docs.cloud.google.com, kubernetes-engine/docs/reference/crds/
podsnapshot, as of April 2026, and what clients were seen to rely on), with what is ours beside them:

- a storage config may name a `file` directory in the place of `gcs`;
- `status.storageStatus.snapshotURL` of a snapshot is the address of its data, written down when the snapshot is
  begun: whoever deletes it later needs neither the policy nor the storage config, which may be gone by then;
- `status.origin` says what the snapshot was made from and on, which is all that matching needs. It is in the status
  since only the agent and the controller may write that; in annotations it would be texts without a schema.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, TypeAlias, TypeVar
from urllib.parse import quote

from agent.kube.conditions import Conditions, Phase, phase
from agent.kube.durations import parse_duration_s
from agent.kube.meta import ObjectMeta
from agent.kube.origin import Origin
from agent.kube.selectors import LabelSelector, is_label_value

GROUP = "podsnapshot.gke.io"
API_VERSION = f"{GROUP}/v1"

# Annotations on a PodSnapshot, where GKE has them, and the label that names the trigger which asked for it.
ORIGIN_POD = f"{GROUP}/origin-pod"
ORIGIN_NODE = f"{GROUP}/origin-node"
TRIGGERED_BY = "gke-pod-snapshot-triggered-by"
# Annotation on a Pod: restore it from this PodSnapshot.
PIN = f"{GROUP}/ps-name"


class Kind(StrEnum):
    """The kinds."""

    STORAGE_CONFIG = "PodSnapshotStorageConfig"
    POLICY = "PodSnapshotPolicy"
    TRIGGER = "PodSnapshotManualTrigger"
    SNAPSHOT = "PodSnapshot"


class TokenSource(StrEnum):
    """Who a bucket is asked as: the pod's service account, or the node's by a token for one path.

    Where no API server gives such tokens both are what the agent's configuration names, or the node's own credentials
    (`node/store_access.py`).
    """

    POD_KSA = "podKSA"
    FEDERATED_P4SA = "federatedP4SA"


class TriggerType(StrEnum):
    """What makes a snapshot: the application's word, or a PodSnapshotManualTrigger."""

    WORKLOAD = "workload"
    MANUAL = "manual"


class PostCheckpoint(StrEnum):
    """What happens to the pod after its checkpoint."""

    RESUME = "resume"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class GcsLocation:
    """A bucket, and a directory in it ("" for its top)."""

    bucket: str
    path: str = ""
    token_source: TokenSource = TokenSource.POD_KSA

    @property
    def store_url(self) -> str:
        """The store's address."""
        return f"gs://{self.bucket}/{quote(self.path)}" if self.path else f"gs://{self.bucket}"


@dataclass(frozen=True, slots=True)
class FileLocation:
    """A directory of this node, or of a file system that all nodes share."""

    directory: str

    @property
    def store_url(self) -> str:
        """The store's address."""
        return f"file://{quote(self.directory)}"


@dataclass(frozen=True, slots=True)
class ObjectStatus:
    """The status of a kind that has nothing special in it."""

    conditions: Conditions = ()
    observed_generation: int = 0


@dataclass(frozen=True, slots=True)
class TriggerStatus:
    """`snapshot_created`: the name of the PodSnapshot, as soon as there is one."""

    conditions: Conditions = ()
    observed_generation: int = 0
    snapshot_created: str = ""


@dataclass(frozen=True, slots=True)
class SnapshotStatus:
    """`snapshot_url`, `origin`: see the module's text. `last_access_time`: when a pod was last restored from it."""

    conditions: Conditions = ()
    observed_generation: int = 0
    last_access_time: str = ""
    observed_checkpoint_retry_count: int = 0
    snapshot_url: str = ""
    origin: Origin | None = None


@dataclass(frozen=True, slots=True)
class PodSnapshotStorageConfig:
    """Where snapshots are kept; belongs to the whole cluster."""

    kind: ClassVar[Kind] = Kind.STORAGE_CONFIG
    metadata: ObjectMeta
    location: GcsLocation | FileLocation
    status: ObjectStatus = field(default_factory=ObjectStatus)


@dataclass(frozen=True, slots=True)
class PodSnapshotPolicy:
    """Which pods are saved, where, when, and for how long.

    `last_access_timeout` is as it was written, and empty for "until it is deleted by hand"; `grouping_labels`: a pod is
    restored only from a snapshot with the same values for these; `max_snapshots_per_group` 0: no limit.
    """

    kind: ClassVar[Kind] = Kind.POLICY
    metadata: ObjectMeta
    storage_config_name: str
    selector: LabelSelector
    trigger_type: TriggerType
    post_checkpoint: PostCheckpoint = PostCheckpoint.RESUME
    last_access_timeout: str = ""
    grouping_labels: tuple[str, ...] = ()
    max_snapshots_per_group: int = 0
    status: ObjectStatus = field(default_factory=ObjectStatus)

    @property
    def last_access_timeout_s(self) -> int | None:
        """After how long without a restore a snapshot goes; None: never."""
        return parse_duration_s(self.last_access_timeout) if self.last_access_timeout else None


@dataclass(frozen=True, slots=True)
class PodSnapshotManualTrigger:
    """Snapshot this pod now, once."""

    kind: ClassVar[Kind] = Kind.TRIGGER
    metadata: ObjectMeta
    target_pod: str
    status: TriggerStatus = field(default_factory=TriggerStatus)


@dataclass(frozen=True, slots=True)
class PodSnapshot:
    """One snapshot of a pod; written by the agent and the controller only."""

    kind: ClassVar[Kind] = Kind.SNAPSHOT
    metadata: ObjectMeta
    policy_name: str
    status: SnapshotStatus = field(default_factory=SnapshotStatus)

    @property
    def phase(self) -> Phase:
        """Where it is on its way. One that is being deleted says so before its conditions do."""
        return Phase.DELETING if self.metadata.deletion_timestamp else phase(self.status.conditions)


Resource: TypeAlias = PodSnapshotStorageConfig | PodSnapshotPolicy | PodSnapshotManualTrigger | PodSnapshot
R = TypeVar("R", bound=Resource)
KINDS: dict[Kind, type[Resource]] = {
    each.kind: each for each in (PodSnapshotStorageConfig, PodSnapshotPolicy, PodSnapshotManualTrigger, PodSnapshot)
}


def new_snapshot(
    name: str, policy: PodSnapshotPolicy, *, pod_name: str, pod_labels: Mapping[str, str], node_name: str, trigger: str
) -> PodSnapshot:
    """Make a snapshot of a pod as `Objects.create` takes it, with GKE's labels and annotations.

    The grouping labels and their values are the pod's: clients find the snapshots of a group by them. `trigger` is the
    name of the PodSnapshotManualTrigger, or empty. Raises: `ValueError` when the pod lacks a grouping label.
    """
    missing = [key for key in policy.grouping_labels if key not in pod_labels]
    if missing:
        raise ValueError(f"pod {pod_name} lacks the grouping label {missing[0]} of policy {policy.metadata.name}")
    labels = {key: pod_labels[key] for key in policy.grouping_labels}
    if trigger and is_label_value(trigger):  # names may be longer than labels
        labels[TRIGGERED_BY] = trigger
    meta = ObjectMeta(
        name=name,
        namespace=policy.metadata.namespace,
        labels=labels,
        annotations={ORIGIN_POD: pod_name, ORIGIN_NODE: node_name},
    )
    return PodSnapshot(meta, policy.metadata.name)
