"""Objects from plain mappings, as a person writes them in YAML or an API server gives them, and back. Pure.

A person's file is refused for a field that nobody knows, since that is a typo. An API server has its own
schema for that, and may know fields that are newer than we are: there, unknown fields are passed over. A status in a
person's file is passed over as an API server does.
"""

from collections.abc import Mapping

from agent.kube.conditions import TIMESTAMP, conditions_mapping, read_conditions
from agent.kube.durations import parse_duration_s
from agent.kube.errors import InvalidObject
from agent.kube.fields import Fields, shown
from agent.kube.meta import NAME, ObjectMeta, meta_mapping, read_meta
from agent.kube.objects import (
    API_VERSION,
    FileLocation,
    GcsLocation,
    Kind,
    ObjectStatus,
    PodSnapshot,
    PodSnapshotManualTrigger,
    PodSnapshotPolicy,
    PodSnapshotStorageConfig,
    PostCheckpoint,
    Resource,
    SnapshotStatus,
    TokenSource,
    TriggerStatus,
    TriggerType,
)
from agent.kube.origin import origin_mapping, read_origin
from agent.kube.selectors import LABEL_KEY, read_selector, selector_mapping

# https://cloud.google.com/storage/docs/buckets#naming
BUCKET = r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]"
_PATH = r"/?[^/]+(?:/[^/]+)*/?"
MAX_GROUP_LABELS = 16
_MAX_COUNT = 1_000_000


def parse(document: object, *, where: str, is_from_person: bool = False) -> Resource:
    """Read one object. `where` names it in messages; `is_from_person`: a field that nobody knows is a problem.

    Raises: `InvalidObject` with all problems.
    """
    problems: list[str] = []
    top = Fields(document, "", problems, is_strict=is_from_person)
    version = top.text("apiVersion", default="")
    kind_name = top.text("kind", default="")
    if not problems and version != API_VERSION:
        problems.append(f"apiVersion: must be {API_VERSION}, not {shown(version)}")
    if not problems and kind_name not in list(Kind):
        problems.append(f"kind: must be one of {', '.join(Kind)}, not {shown(kind_name)}")
    if problems:
        raise InvalidObject(where, tuple(problems))
    kind = Kind(kind_name)
    meta = read_meta(top.member("metadata", is_required=True), is_namespaced=kind is not Kind.STORAGE_CONFIG)
    spec = top.member("spec", is_required=True)
    status = Fields({} if is_from_person else top.take("status") or {}, "status", problems, is_strict=False)
    top.ignore(("status",))
    resource: Resource
    match kind:
        case Kind.STORAGE_CONFIG:
            resource = PodSnapshotStorageConfig(meta, _read_location(spec), _read_status(status))
        case Kind.POLICY:
            resource = _read_policy(meta, spec, _read_status(status))
        case Kind.TRIGGER:
            pod = spec.text("targetPod", pattern=NAME, what="the name of a pod")
            resource = PodSnapshotManualTrigger(meta, pod, _read_trigger_status(status))
        case Kind.SNAPSHOT:
            policy = spec.text("policyName", pattern=NAME, what="the name of a policy")
            resource = PodSnapshot(meta, policy, _read_snapshot_status(status))
    spec.done()
    top.done()
    if problems:
        raise InvalidObject(where, tuple(problems))
    return resource


def to_mapping(resource: Resource) -> dict[str, object]:
    """Write an object as the API holds it: defaults spelt out, what is empty left out."""
    mapping: dict[str, object] = {
        "apiVersion": API_VERSION,
        "kind": resource.kind.value,
        "metadata": meta_mapping(resource.metadata),
        "spec": spec_mapping(resource),
    }
    return mapping | _without_empty({"status": status_mapping(resource)})


def spec_mapping(resource: Resource) -> dict[str, object]:
    """Write an object's spec."""
    match resource:
        case PodSnapshotStorageConfig():
            return {"snapshotStorageConfig": _location_mapping(resource.location)}
        case PodSnapshotPolicy():
            return _policy_mapping(resource)
        case PodSnapshotManualTrigger():
            return {"targetPod": resource.target_pod}
        case PodSnapshot():
            return {"policyName": resource.policy_name}


def status_mapping(resource: Resource) -> dict[str, object]:
    """Write an object's status."""
    status = resource.status
    mapping: dict[str, object] = {
        "conditions": conditions_mapping(status.conditions),
        "observedGeneration": status.observed_generation,
    }
    match status:
        case TriggerStatus():
            # An object: every client reads `.name` of it, though the CRD's page speaks of a string.
            mapping["snapshotCreated"] = _without_empty({"name": status.snapshot_created})
        case SnapshotStatus():
            url = status.snapshot_url
            gcs = {"observedGCSPath": url} if url.startswith("gs://") else {}
            mapping |= {
                "lastAccessTime": status.last_access_time,
                "observedCheckpointRetryCount": status.observed_checkpoint_retry_count,
                "storageStatus": _without_empty({"gcs": gcs, "snapshotURL": url}),
                "origin": {} if status.origin is None else origin_mapping(status.origin),
            }
        case ObjectStatus():
            pass
    return _without_empty(mapping)


def _location_mapping(location: GcsLocation | FileLocation) -> dict[str, object]:
    match location:
        case GcsLocation():
            gcs = {"bucket": location.bucket, "path": location.path, "tokenSource": location.token_source.value}
            return {"gcs": _without_empty(gcs)}
        case FileLocation():
            return {"file": {"directory": location.directory}}


def _without_empty(mapping: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in mapping.items() if value}


def _read_location(spec: Fields) -> GcsLocation | FileLocation:
    config = spec.member("snapshotStorageConfig", is_required=True)
    has_gcs, has_file = config.has("gcs"), config.has("file")
    if has_gcs == has_file:
        config.problem("gcs", "exactly one of gcs and file must be given")
    location: GcsLocation | FileLocation
    if has_file:
        inner = config.member("file")
        directory = inner.text("directory", pattern=r"/.*", what="an absolute path")
        if any(part in (".", "..") for part in directory.split("/")):
            inner.problem("directory", f"must not have . or .. in it: {shown(directory)}")
        location = FileLocation(directory.rstrip("/") or "/")
    else:
        inner = config.member("gcs")
        bucket = inner.text("bucket", pattern=BUCKET, what="the name of a bucket") if has_gcs else ""
        path = inner.text("path", default="", pattern=rf"(?:{_PATH})?", what="a directory in the bucket").strip("/")
        if any(part in (".", "..") for part in path.split("/")):
            inner.problem("path", f"must not have . or .. in it: {shown(path)}")
        location = GcsLocation(bucket, path, inner.choice("tokenSource", TokenSource, default=TokenSource.POD_KSA))
    inner.done()
    config.done()
    return location


def _read_policy(meta: ObjectMeta, spec: Fields, status: ObjectStatus) -> PodSnapshotPolicy:
    storage = spec.text("storageConfigName", pattern=NAME, what="the name of a PodSnapshotStorageConfig")
    selector = read_selector(spec.member("selector", is_required=True))
    scope = spec.text("snapshotScope", default="whole-pod")
    if scope == "rootfs-only":
        spec.problem("snapshotScope", "rootfs-only is not supported yet; whole-pod is")
    elif scope != "whole-pod":
        spec.problem("snapshotScope", f"must be whole-pod, not {shown(scope)}")
    trigger = spec.member("triggerConfig", is_required=True)
    # GKE's own tools know more types than its CRD's page: onDelete, readinessProbe.
    trigger_type = trigger.choice("type", TriggerType)
    post_checkpoint = trigger.choice("postCheckpoint", PostCheckpoint, default=PostCheckpoint.RESUME)
    trigger.done()
    timeout = ""
    if spec.has("retentionConfig"):
        retention = spec.member("retentionConfig")
        timeout = retention.text("lastAccessTimeout")
        try:
            if timeout:
                parse_duration_s(timeout)
        except ValueError as error:
            retention.problem("lastAccessTimeout", str(error))
        retention.done()
    labels, most = _read_grouping(spec)
    return PodSnapshotPolicy(
        metadata=meta,
        storage_config_name=storage,
        selector=selector,
        trigger_type=trigger_type,
        post_checkpoint=post_checkpoint,
        last_access_timeout=timeout,
        grouping_labels=labels,
        max_snapshots_per_group=most,
        status=status,
    )


def _read_grouping(spec: Fields) -> tuple[tuple[str, ...], int]:
    """Read `snapshotGroupingRules`: the labels, and how many snapshots a group may have (0: any number)."""
    if not spec.has("snapshotGroupingRules"):
        return (), 0
    rules = spec.member("snapshotGroupingRules")
    by_label = rules.member("groupByLabelValue", is_required=True)
    labels = by_label.texts("labels", most=MAX_GROUP_LABELS, pattern=LABEL_KEY, what="a label's key")
    if not labels:
        by_label.problem("labels", "must name a label")
    if len(set(labels)) != len(labels):
        by_label.problem("labels", "names a label twice")
    most = 0
    if by_label.has("groupRetentionPolicy"):
        retention = by_label.member("groupRetentionPolicy")
        most = retention.integer("maxSnapshotCountPerGroup", low=0, high=_MAX_COUNT)
        retention.done()
    by_label.done()
    rules.done()
    return labels, most


def _policy_mapping(policy: PodSnapshotPolicy) -> dict[str, object]:
    by_label: dict[str, object] = {"labels": [*policy.grouping_labels]}
    if policy.max_snapshots_per_group:
        by_label["groupRetentionPolicy"] = {"maxSnapshotCountPerGroup": policy.max_snapshots_per_group}
    retention = {"lastAccessTimeout": policy.last_access_timeout} if policy.last_access_timeout else {}
    mapping: dict[str, object] = {
        "storageConfigName": policy.storage_config_name,
        "selector": selector_mapping(policy.selector),
        "snapshotScope": "whole-pod",
        "triggerConfig": {"type": policy.trigger_type.value, "postCheckpoint": policy.post_checkpoint.value},
    }
    optional = {
        "retentionConfig": retention,
        "snapshotGroupingRules": {"groupByLabelValue": by_label} if policy.grouping_labels else {},
    }
    return mapping | _without_empty(optional)


def _read_status(status: Fields) -> ObjectStatus:
    return ObjectStatus(read_conditions(status), _read_generation(status))


def _read_trigger_status(status: Fields) -> TriggerStatus:
    created = status.member("snapshotCreated").text("name", default="")
    return TriggerStatus(read_conditions(status), _read_generation(status), created)


def _read_snapshot_status(status: Fields) -> SnapshotStatus:
    storage = status.member("storageStatus")
    observed = storage.member("gcs").text("observedGCSPath", default="")
    return SnapshotStatus(
        conditions=read_conditions(status),
        observed_generation=_read_generation(status),
        last_access_time=status.text(
            "lastAccessTime", default="", pattern=f"(?:{TIMESTAMP})?", what="a time such as 2026-01-31T12:00:00Z"
        ),
        observed_checkpoint_retry_count=status.integer(
            "observedCheckpointRetryCount", default=0, low=0, high=_MAX_COUNT
        ),
        snapshot_url=storage.text("snapshotURL", default=observed),
        origin=read_origin(status.member("origin")) if status.has("origin") else None,
    )


def _read_generation(status: Fields) -> int:
    return status.integer("observedGeneration", default=0, low=0, high=1 << 62)
