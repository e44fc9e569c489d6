"""The objects, followed: policies, storage configs and pending triggers in memory, snapshots in matching's index.

Until all there is has been told once (`is_synced`) nothing can be decided from this: an empty index isn't one without
snapshots. Changed only by `follow`, between its awaits.
"""

import trio

from agent.kube.conditions import ConditionType, Phase, Status, condition
from agent.kube.objects import (
    Kind,
    PodSnapshot,
    PodSnapshotManualTrigger,
    PodSnapshotPolicy,
    PodSnapshotStorageConfig,
)
from agent.kube.port import Change, Gone, Mended, Objects, Put, Synced, Unreadable
from agent.matching.index import SnapshotIndex
from agent.matching.snapshots import SnapshotFacts, snapshot_facts
from agent.node.events import Events, What

Named = tuple[str, str]  # namespace, name


class KnownObjects:
    """See the module's text. `unreadable`: what can't be used, by where it is."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._synced = trio.Event()
        self._changed = trio.Event()
        self.index = SnapshotIndex()
        self.policies: dict[Named, PodSnapshotPolicy] = {}
        self.configs: dict[str, PodSnapshotStorageConfig] = {}
        self.triggers: dict[Named, PodSnapshotManualTrigger] = {}
        self.unreadable: dict[str, tuple[str, ...]] = {}

    @property
    def is_synced(self) -> bool:
        """Whether all there was has been told."""
        return self._synced.is_set()

    async def synced(self) -> None:
        """Wait until all there was has been told."""
        await self._synced.wait()

    def next_change(self) -> trio.Event:
        """Give what is set at the next change. Whoever looks and then waits takes it before the look."""
        return self._changed

    def snapshot(self, namespace: str, name: str) -> SnapshotFacts | None:
        """Give what matching knows of a snapshot."""
        return self.index.namespace(namespace).snapshots.get(name)

    def phase(self, namespace: str, name: str) -> Phase | None:
        """Say where a snapshot is; None: there is none."""
        found = self.snapshot(namespace, name)
        return None if found is None else found.needs.phase

    def pending(self) -> list[PodSnapshotManualTrigger]:
        """Give the triggers that nothing final is said of, by their names."""
        return [trigger for _, trigger in sorted(self.triggers.items()) if is_pending(trigger)]

    def without_policy(self) -> dict[Named, int]:
        """Give the policies that aren't there and that snapshots are of, and how many are.

        A policy's file is its user's, so nothing can keep it from going first, as an API server could.
        """
        return self.index.without_policy() if self.is_synced else {}

    async def follow(self, objects: Objects) -> None:
        """Follow all kinds until cancelled."""
        async with objects.watch(*Kind) as changes:
            async for change in changes:
                self._take(change)
                self._changed.set()
                self._changed = trio.Event()

    def _take(self, change: Change) -> None:
        match change:
            case Put(PodSnapshot() as snapshot):
                self.index.put(snapshot_facts(snapshot))
            case Put(PodSnapshotPolicy() as policy):
                self.policies[policy.metadata.namespace, policy.metadata.name] = policy
                self.index.put_policy(policy)
            case Put(PodSnapshotStorageConfig() as config):
                self.configs[config.metadata.name] = config
            case Put(PodSnapshotManualTrigger() as trigger):
                self.triggers[trigger.metadata.namespace, trigger.metadata.name] = trigger
            case Gone(key):
                self._forget(key.kind, key.namespace, key.name)
            case Unreadable(where, problems):
                self.unreadable[where] = problems
                self._events.tell(What.UNREADABLE, "unreadable", f"{where}: {'; '.join(problems)}")
            case Mended(where):
                self.unreadable.pop(where, None)
            case Synced():
                self._synced.set()

    def _forget(self, kind: Kind, namespace: str, name: str) -> None:
        match kind:
            case Kind.SNAPSHOT:
                self.index.remove(namespace, name)
            case Kind.POLICY:
                self.policies.pop((namespace, name), None)
                self.index.remove_policy(namespace, name)
                kept = self.without_policy().get((namespace, name))
                if kept:
                    said = f"policy {namespace}/{name} is gone; its {kept} snapshots stay until it is back or they are "
                    self._events.tell(What.POLICY_GONE, "SnapshotsKept", f"{said}removed by hand (`snapagent rm`)")
            case Kind.STORAGE_CONFIG:
                self.configs.pop(name, None)
            case Kind.TRIGGER:
                self.triggers.pop((namespace, name), None)


def named(trigger: PodSnapshotManualTrigger) -> Named:
    """Give a trigger's namespace and name."""
    return trigger.metadata.namespace, trigger.metadata.name


def is_pending(trigger: PodSnapshotManualTrigger) -> bool:
    """Say whether nothing final is said of a trigger."""
    found = condition(trigger.status.conditions, ConditionType.TRIGGERED)
    return found is None or found.status is Status.UNKNOWN
