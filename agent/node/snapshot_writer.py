"""Writes PodSnapshots and users' statuses: in the order that clients rely on, whatever others write meanwhile.

A snapshot's object is there before its image is: created, then its status with the address of its data and what it was
made from, then its steps. A trigger names its snapshot as soon as there is one, and is Complete when that is Ready.

Clients sort the snapshots of a group by `creationTimestamp`, which has seconds: so no two of one group are created
within one second.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

import trio

from agent.kube.conditions import (
    Condition,
    ConditionType,
    Reason,
    Status,
    Step,
    after_step,
    condition,
    last_step,
    with_condition,
)
from agent.kube.directory import utc_now
from agent.kube.errors import AlreadyExists, Conflict, NotFound
from agent.kube.objects import (
    TRIGGERED_BY,
    PodSnapshot,
    PodSnapshotManualTrigger,
    PodSnapshotPolicy,
    PodSnapshotStorageConfig,
    R,
    SnapshotStatus,
)
from agent.kube.port import Objects

# Others write an object now and then, not all the time.
_TRIES = 20
_SECOND_LOOK_S = 0.05

Standing = TypeVar("Standing", bound=PodSnapshotStorageConfig | PodSnapshotPolicy)
GroupKey = tuple[str, str, tuple[tuple[str, str], ...]]


class SnapshotWriter:
    """One for a node."""

    def __init__(self, objects: Objects, *, now: Callable[[], str] = utc_now) -> None:
        self._objects = objects
        self._now = now
        self._creating = trio.Lock()
        self._last: dict[GroupKey, str] = {}  # when the last one of a group was created; of this second only

    async def begin(self, draft: PodSnapshot) -> None:
        """Create a snapshot's object, and say that its checkpoint is awaited; what is there already is gone on with.

        `draft` has the status' address and origin.
        """
        meta = draft.metadata
        async with self._creating:
            labels = tuple(sorted((key, value) for key, value in meta.labels.items() if key != TRIGGERED_BY))
            group = (meta.namespace, draft.policy_name, labels)
            while self._last.get(group) == self._now():
                await trio.sleep(_SECOND_LOOK_S)
            try:
                created = await self._objects.create(draft)
            except AlreadyExists:
                pass
            else:
                now = created.metadata.creation_timestamp
                self._last = {each: at for each, at in self._last.items() if at >= now} | {group: now}

        def begun(found: PodSnapshot) -> PodSnapshot:
            if last_step(found.status.conditions) is not None:
                return found
            generation = found.metadata.generation
            conditions = after_step((), Step.BEGUN, now=self._now(), observed_generation=generation)
            return replace(found, status=replace(draft.status, conditions=conditions, observed_generation=generation))

        await self._update(PodSnapshot, meta.name, meta.namespace, begun)

    async def step(self, namespace: str, name: str, step: Step, message: str = "", *, attempts: int = 0) -> bool:
        """Tell a step of a snapshot; false when it isn't there (any more), or when that step can't follow."""

        def told(found: PodSnapshot) -> PodSnapshot:
            conditions = after_step(
                found.status.conditions,
                step,
                now=self._now(),
                message=message,
                observed_generation=found.metadata.generation,
            )
            retries = max(attempts, found.status.observed_checkpoint_retry_count)
            return _with_status(found, conditions=conditions, observed_checkpoint_retry_count=retries)

        try:
            await self._update(PodSnapshot, name, namespace, told)
        except (NotFound, ValueError):
            return False
        return True

    async def failed(self, namespace: str, name: str, message: str, *, attempts: int = 0) -> bool:
        """Tell that a snapshot has failed, before or after its checkpoint; false as `step`."""
        try:
            found = await self._objects.get(PodSnapshot, name, namespace)
        except NotFound:
            return False
        is_written = last_step(found.status.conditions) is Step.CHECKPOINTED
        step = Step.REPLICATION_FAILED if is_written else Step.CHECKPOINT_FAILED
        return await self.step(namespace, name, step, message, attempts=attempts)

    async def failure(self, namespace: str, name: str) -> str:
        """Give why a snapshot has failed, as `failed` has told it; empty when nobody has."""
        try:
            found = await self._objects.get(PodSnapshot, name, namespace)
        except NotFound:
            return ""
        told = condition(found.status.conditions, ConditionType.READY)
        return "" if told is None else told.message

    async def accessed(self, namespace: str, name: str) -> None:
        """Note that a pod was restored from a snapshot just now."""
        with suppress(NotFound):
            await self._update(
                PodSnapshot, name, namespace, lambda found: _with_status(found, last_access_time=self._now())
            )

    async def names_snapshot(self, trigger: PodSnapshotManualTrigger, snapshot: str) -> None:
        """Note in a trigger's status which snapshot it has made. Raises: `NotFound`: the trigger is gone."""

        def naming(found: PodSnapshotManualTrigger) -> PodSnapshotManualTrigger:
            return replace(found, status=replace(found.status, snapshot_created=snapshot))

        await self._update(PodSnapshotManualTrigger, trigger.metadata.name, trigger.metadata.namespace, naming)

    async def settle(
        self, trigger: PodSnapshotManualTrigger, status: Status, reason: Reason, message: str = ""
    ) -> None:
        """Say what has become of a trigger, which is final."""

        def settled(found: PodSnapshotManualTrigger) -> PodSnapshotManualTrigger:
            entry = Condition(
                ConditionType.TRIGGERED, status, reason, message, observed_generation=found.metadata.generation
            )
            conditions = with_condition(found.status.conditions, entry, now=self._now())
            return replace(
                found,
                status=replace(found.status, conditions=conditions, observed_generation=found.metadata.generation),
            )

        with suppress(NotFound):
            await self._update(PodSnapshotManualTrigger, trigger.metadata.name, trigger.metadata.namespace, settled)

    async def stands(self, resource: Standing, *conditions: Condition) -> None:
        """Say how a storage config or a policy stands, as of its present generation."""

        def standing(found: Standing) -> Standing:
            generation, told = found.metadata.generation, found.status.conditions
            for each in conditions:
                told = with_condition(told, replace(each, observed_generation=generation), now=self._now())
            status = replace(found.status, conditions=told, observed_generation=generation)
            return replace(found, status=status)

        with suppress(NotFound):
            await self._update(type(resource), resource.metadata.name, resource.metadata.namespace, standing)

    async def _update(self, kind: type[R], name: str, namespace: str, change: Callable[[R], R]) -> R:
        """Change an object's status, again if somebody else was faster."""
        for attempt in range(_TRIES):
            found = await self._objects.get(kind, name, namespace)
            wanted = change(found)
            if wanted == found:
                return found
            try:
                return await self._objects.update_status(wanted)
            except Conflict:
                if attempt + 1 == _TRIES:
                    raise
        raise AssertionError("unreachable")


def _with_status(snapshot: PodSnapshot, **changes: object) -> PodSnapshot:
    status: SnapshotStatus = replace(snapshot.status, **changes)  # type: ignore[arg-type]  # names are checked there
    return replace(snapshot, status=status)
