"""Which snapshots go: those that no pod was restored from for too long, those that a group has too many of, and those
that somebody removes by hand.

`due` decides (pure); `Keeping` deletes, in an order that an interruption can't turn into data that nobody knows of: the
object says Deleting, the data goes, and then the object. The data's place is in the object, so policy and storage
config may be gone by then. Nodes that still load from it go on: the store keeps packs that were in use (`streamd rm`).
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

import trio

from agent.errors import AgentError
from agent.kube.conditions import ConditionType, Phase, Step, condition, epoch_s
from agent.kube.errors import NotFound
from agent.kube.objects import Kind, PodSnapshot, PodSnapshotPolicy
from agent.kube.port import Objects
from agent.node.events import Events, What
from agent.node.images import Images
from agent.node.known_objects import KnownObjects, Named
from agent.node.snapshot_writer import SnapshotWriter
from streamd.errors import Exit, StreamdError

UNUSED, TOO_MANY, BY_HAND = "unused for too long", "too many in its group", "removed by hand"
_BEGUN = "its deletion was begun"


class BeingSaved(AgentError):
    """The snapshot can't be removed yet."""

    ends_with, kind = Exit.REFUSED, "being-saved"


def due(
    snapshots: Iterable[PodSnapshot], policies: Mapping[Named, PodSnapshotPolicy], *, now_s: float, used: frozenset[str]
) -> list[tuple[PodSnapshot, str]]:
    """Say which snapshots are to go, and why. `used`: those that pods are being restored from here.

    Without its policy a snapshot is kept: the policy may come back. Pure.
    """
    found: list[tuple[PodSnapshot, str]] = []
    groups: dict[tuple[str, ...], list[PodSnapshot]] = defaultdict(list)
    for snapshot in snapshots:
        meta = snapshot.metadata
        policy = policies.get((meta.namespace, snapshot.policy_name))
        if snapshot.phase is Phase.DELETING:
            begun = condition(snapshot.status.conditions, ConditionType.READY)
            found.append((snapshot, begun.message if begun is not None and begun.message else _BEGUN))
        elif policy is None or snapshot.phase is Phase.AWAITING_CHECKPOINT or meta.name in used:
            continue
        elif _is_unused(snapshot, policy, now_s):
            found.append((snapshot, f"{UNUSED} ({policy.last_access_timeout})"))
        elif policy.max_snapshots_per_group and snapshot.phase is Phase.AVAILABLE:
            group = tuple(meta.labels.get(key, "") for key in policy.grouping_labels)
            groups[meta.namespace, snapshot.policy_name, *group].append(snapshot)
    for (namespace, name, *_), members in groups.items():
        most = policies[namespace, name].max_snapshots_per_group
        newest_last = sorted(members, key=lambda each: (each.metadata.creation_timestamp, each.metadata.name))
        found += [(each, f"{TOO_MANY} (more than {most})") for each in newest_last[:-most]]
    return found


def _is_unused(snapshot: PodSnapshot, policy: PodSnapshotPolicy, now_s: float) -> bool:
    timeout_s = policy.last_access_timeout_s
    since = snapshot.status.last_access_time or snapshot.metadata.creation_timestamp
    return timeout_s is not None and bool(since) and now_s - epoch_s(since) > timeout_s


class Keeping:
    """One for a node."""

    def __init__(
        self,
        objects: Objects,
        known: KnownObjects,
        images: Images,
        writer: SnapshotWriter,
        events: Events,
        *,
        used: Callable[[], frozenset[str]],
        look_every_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._objects = objects
        self._known = known
        self._images = images
        self._writer = writer
        self._events = events
        self._used = used
        self._look_every_s = look_every_s
        self._clock = clock
        self._asked = trio.Event()

    async def remove(self, namespace: str, name: str) -> None:
        """Begin to delete a snapshot, whatever its policy says; `run` does the rest.

        Raises: `NotFound`; `BeingSaved`: what is uploaded afterwards would be nobody's.
        """
        if self._known.phase(namespace, name) is Phase.AWAITING_CHECKPOINT:
            raise BeingSaved(f"snapshot {namespace}/{name} is being saved; remove it when that has ended")
        if not await self._writer.step(namespace, name, Step.DELETION_BEGUN, BY_HAND):
            raise NotFound(f"PodSnapshot {namespace}/{name}", "isn't there")
        self._asked.set()

    async def run(self) -> None:
        """Delete what is due, until cancelled."""
        await self._known.synced()
        while True:
            self._asked = trio.Event()
            try:
                await self.look()
            except AgentError as error:
                self._events.tell(What.PROBLEM, "retention", str(error))
            with trio.move_on_after(self._look_every_s):
                await self._asked.wait()

    async def look(self) -> None:
        """Delete what is due now."""
        listing = await self._objects.list(Kind.SNAPSHOT)
        snapshots = [each for each in listing.items if isinstance(each, PodSnapshot)]
        for snapshot, why in due(snapshots, self._known.policies, now_s=self._clock(), used=self._used()):
            meta = snapshot.metadata
            try:
                await self._delete(snapshot, why)
            except (AgentError, StreamdError) as error:
                said = f"its deletion ({why}) is tried again later: {error}"
                self._events.tell(What.PROBLEM, "deletion", said, snapshot=meta.name)

    async def _delete(self, snapshot: PodSnapshot, why: str) -> None:
        meta = snapshot.metadata
        if not await self._writer.step(meta.namespace, meta.name, Step.DELETION_BEGUN, why):
            return
        if snapshot.status.snapshot_url:
            await self._images.remove(snapshot.status.snapshot_url, tenant=meta.namespace)
        try:
            await self._objects.delete(await self._objects.get(PodSnapshot, meta.name, meta.namespace))
        except NotFound:
            return
        self._events.tell(What.SNAPSHOT_DELETED, why.partition(" (")[0], why, snapshot=meta.name)
