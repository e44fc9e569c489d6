"""Conditions: how an object's status says what has happened to it. Pure: times are arguments, RFC 3339 in UTC.

What clients of GKE's API wait for, and take as final:
- a snapshot: `Checkpoint` (the sandbox is written down), `StorageReplicated` (it is in the store), `Ready` (it may be
  restored from). STATUS in `kubectl get` is the reason of `Ready`. False with the reason `Failed` is final; False with
  `AwaitingCheckpoint` isn't.
- a trigger: `Triggered`, True with `Complete`, or False with `Failed` or `Error`. A trigger without it is pending.

GKE's storage configs and policies have conditions, too, whose types its page doesn't name. Ours: `Ready`, and of a
policy `Overlapping`. No client waits for them: they are for people.

Sources: the CRD page of GKE Pod snapshots, and the clients that drive it (k8s-agent-sandbox 1.0.8, gke-labs/
pod-migration), which read these types and reasons by name.
"""

import re
from calendar import timegm
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from agent.kube.fields import Fields

# RFC 3339 with a resolution of a second, as an API server writes `metav1.Time`. Texts of this form sort by time.
TIMESTAMP = r"\d{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12]\d|3[01])T(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\dZ"
MAX_CONDITIONS = 32
MAX_MESSAGE_CHARS = 1024


class Status(StrEnum):
    """A condition's status."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class ConditionType(StrEnum):
    """The conditions of all kinds."""

    CHECKPOINT = "Checkpoint"
    STORAGE_REPLICATED = "StorageReplicated"
    READY = "Ready"
    TRIGGERED = "Triggered"
    OVERLAPPING = "Overlapping"


class Reason(StrEnum):
    """Their reasons."""

    AWAITING_CHECKPOINT = "AwaitingCheckpoint"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    ALL_SNAPSHOTS_AVAILABLE = "AllSnapshotsAvailable"
    DELETING = "Deleting"
    COMPLETE = "Complete"
    ERROR = "Error"
    # Of storage configs
    STORE_AVAILABLE = "StoreAvailable"
    STORE_NOT_FOUND = "StoreNotFound"
    STORE_NOT_PERMITTED = "StoreNotPermitted"
    STORE_UNREACHABLE = "StoreUnreachable"
    STORE_FAILED = "StoreFailed"
    # Of policies
    IN_FORCE = "InForce"
    STORAGE_CONFIG_NOT_FOUND = "StorageConfigNotFound"
    STORAGE_CONFIG_NOT_READY = "StorageConfigNotReady"
    PODS_IN_COMMON = "PodsInCommon"
    NO_PODS_IN_COMMON = "NoPodsInCommon"


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition. `type` and `reason` are free texts, since others write objects, too."""

    type: str
    status: Status
    reason: str
    message: str = ""
    last_transition_time: str = ""
    observed_generation: int = 0


Conditions = tuple[Condition, ...]


class Phase(StrEnum):
    """Where a snapshot is on its way; each value is the reason of `Ready` then, and what `kubectl get` shows."""

    AWAITING_CHECKPOINT = "AwaitingCheckpoint"
    AVAILABLE = "AllSnapshotsAvailable"
    FAILED = "Failed"
    DELETING = "Deleting"


class Step(StrEnum):
    """What happens to a snapshot, as its conditions tell it."""

    BEGUN = "begun"
    CHECKPOINTED = "checkpointed"
    REPLICATED = "replicated"
    CHECKPOINT_FAILED = "checkpoint failed"
    REPLICATION_FAILED = "replication failed"
    DELETION_BEGUN = "deletion begun"


# Step → the conditions that it sets. What a step doesn't name stays as it is.
_C, _S, _R = ConditionType.CHECKPOINT, ConditionType.STORAGE_REPLICATED, ConditionType.READY
_STEPS: dict[Step, tuple[tuple[ConditionType, Status, Reason], ...]] = {
    Step.BEGUN: (
        (_C, Status.FALSE, Reason.AWAITING_CHECKPOINT),
        (_S, Status.FALSE, Reason.AWAITING_CHECKPOINT),
        (_R, Status.FALSE, Reason.AWAITING_CHECKPOINT),
    ),
    Step.CHECKPOINTED: ((_C, Status.TRUE, Reason.SUCCEEDED),),
    Step.REPLICATED: ((_S, Status.TRUE, Reason.SUCCEEDED), (_R, Status.TRUE, Reason.ALL_SNAPSHOTS_AVAILABLE)),
    Step.CHECKPOINT_FAILED: (
        (_C, Status.FALSE, Reason.FAILED),
        (_S, Status.FALSE, Reason.FAILED),
        (_R, Status.FALSE, Reason.FAILED),
    ),
    Step.REPLICATION_FAILED: ((_S, Status.FALSE, Reason.FAILED), (_R, Status.FALSE, Reason.FAILED)),
    Step.DELETION_BEGUN: ((_R, Status.FALSE, Reason.DELETING),),
}
# Which steps may follow which; None: a snapshot that has no conditions yet. A failed one never becomes available: who
# was told that it failed has gone on without it. Attempts in between are counted, not told
# (`observedCheckpointRetryCount`).
_FOLLOWS: dict[Step, tuple[Step | None, ...]] = {
    Step.BEGUN: (None,),
    Step.CHECKPOINTED: (Step.BEGUN,),
    Step.REPLICATED: (Step.CHECKPOINTED,),
    Step.CHECKPOINT_FAILED: (None, Step.BEGUN),
    Step.REPLICATION_FAILED: (Step.CHECKPOINTED,),
    Step.DELETION_BEGUN: (None, *(step for step in Step if step is not Step.DELETION_BEGUN)),
}


def epoch_s(timestamp: str) -> int:
    """Give the seconds since the epoch of a time as objects hold it (`TIMESTAMP`)."""
    return timegm(tuple(map(int, re.findall(r"\d+", timestamp))))


def condition(conditions: Iterable[Condition], kind: str) -> Condition | None:
    """Give the condition of a type, the first if there should be several."""
    return next((entry for entry in conditions if entry.type == kind), None)


def with_condition(conditions: Conditions, new: Condition, *, now: str) -> Conditions:
    """Set a condition, in the place that its type has. Its `last_transition_time` is `now` if the status is another.

    Its message is cut to what a status should hold.
    """
    message = new.message if len(new.message) <= MAX_MESSAGE_CHARS else new.message[: MAX_MESSAGE_CHARS - 1] + "…"
    old = condition(conditions, new.type)
    since = old.last_transition_time if old is not None and old.status is new.status else now
    entry = replace(new, message=message, last_transition_time=since)
    if old is None:
        return (*conditions, entry)
    return tuple(entry if each is old else each for each in conditions)


def last_step(conditions: Conditions) -> Step | None:
    """Say how far a snapshot's conditions tell it to be; None when they tell nothing."""
    ready, checkpoint = condition(conditions, _R), condition(conditions, _C)
    if ready is None:
        return None
    match ready.reason:
        case Reason.DELETING:
            return Step.DELETION_BEGUN
        case Reason.ALL_SNAPSHOTS_AVAILABLE if ready.status is Status.TRUE:
            return Step.REPLICATED
        case Reason.FAILED:
            is_written = checkpoint is not None and checkpoint.status is Status.TRUE
            return Step.REPLICATION_FAILED if is_written else Step.CHECKPOINT_FAILED
        case _:
            is_written = checkpoint is not None and checkpoint.status is Status.TRUE
            return Step.CHECKPOINTED if is_written else Step.BEGUN


def after_step(
    conditions: Conditions, step: Step, *, now: str, message: str = "", observed_generation: int = 0
) -> Conditions:
    """Give a snapshot's conditions after a step. A step that was made already changes nothing but messages.

    Raises: `ValueError` for a step that can't follow what the conditions tell, as after a failure.
    """
    before = last_step(conditions)
    if before is not step and before not in _FOLLOWS[step]:
        raise ValueError(f"a snapshot is {before or 'not begun'}, and can't be {step} after that")
    for kind, status, reason in _STEPS[step]:
        entry = Condition(kind.value, status, reason.value, message, observed_generation=observed_generation)
        conditions = with_condition(conditions, entry, now=now)
    return conditions


def phase(conditions: Conditions) -> Phase:
    """Say where a snapshot is; without conditions, it awaits its checkpoint."""
    match last_step(conditions):
        case Step.REPLICATED:
            return Phase.AVAILABLE
        case Step.DELETION_BEGUN:
            return Phase.DELETING
        case Step.CHECKPOINT_FAILED | Step.REPLICATION_FAILED:
            return Phase.FAILED
        case None | Step.BEGUN | Step.CHECKPOINTED:
            return Phase.AWAITING_CHECKPOINT


def read_conditions(status: Fields) -> Conditions:
    """Read `conditions` of a status; what is wrong with them is noted."""
    found = []
    for entry in status.members("conditions", most=MAX_CONDITIONS):
        kind = entry.text("type")
        found.append(
            Condition(
                type=kind,
                status=entry.choice("status", Status),
                reason=entry.text("reason", default=""),
                message=entry.free_text("message"),
                last_transition_time=entry.text("lastTransitionTime", default=""),
                observed_generation=entry.integer("observedGeneration", default=0, low=0, high=1 << 62),
            )
        )
        entry.done()
    return tuple(found)


def conditions_mapping(conditions: Conditions) -> list[dict[str, object]]:
    """Write conditions as the API holds them (apimachinery, meta/v1 `Condition`)."""
    return [
        {
            "type": entry.type,
            "status": entry.status.value,
            "reason": entry.reason,
            "message": entry.message,
            "lastTransitionTime": entry.last_transition_time,
        }
        | ({"observedGeneration": entry.observed_generation} if entry.observed_generation else {})
        for entry in conditions
    ]
