"""How storage configs and policies stand, said in their conditions: may a pod that is selected be saved, and where to?

    Ready of a storage config      its store took a small object, and lists it
    Ready of a policy              its storage config is there and Ready
    Overlapping of a policy        pods of this node are selected by another one with its trigger, too

Nothing follows from them: a save is tried whatever they say, since a store may be back in this moment. They are for
who wrote the objects, before the first pod is saved. An object that can't be read has none: it isn't there, and its
file is told of (`KnownObjects.unreadable`).

What is asked of stores is asked now and then, by each node; all else follows from what is known.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import trio

from agent.errors import AgentError
from agent.kube.conditions import Condition, ConditionType, Reason, Status, condition
from agent.kube.objects import PodSnapshotPolicy, PodSnapshotStorageConfig
from agent.kube.port import Key, key_of
from agent.matching.pod import PodFacts
from agent.matching.policies import policy_for
from agent.node.events import Events, What
from agent.node.images import Images
from agent.node.known_objects import KnownObjects, Named
from agent.node.pods_here import PodsHere
from agent.node.snapshot_writer import SnapshotWriter
from streamd.errors import Exit, StreamdError

# A store that is there mostly stays there, and each look writes an object; one that isn't is waited for.
_GOOD_FOR_S = 600.0
_BAD_FOR_S = 30.0
# Pods come and go without an object's change; which of them have several policies is nothing urgent.
_LOOK_EVERY_S = 10.0
_NAMED_PODS = 3

_OF_STORES = {
    Exit.NOT_FOUND: (Reason.STORE_NOT_FOUND, "make it, or name another"),
    Exit.NOT_PERMITTED: (
        Reason.STORE_NOT_PERMITTED,
        "the agent must be allowed to create, delete, get and list objects there",
    ),
    Exit.UNREACHABLE: (Reason.STORE_UNREACHABLE, "images of saves wait on their node until it is back"),
}


def of_store(store_url: str, error: StreamdError | OSError | None) -> Condition:
    """Give the condition of a storage config by what its store said to a look. Pure."""
    if error is None:
        return _ready(Status.TRUE, Reason.STORE_AVAILABLE, f"{store_url} can be written")
    code = error.exit_code if isinstance(error, StreamdError) else Exit.FAILED
    reason, advice = _OF_STORES.get(code, (Reason.STORE_FAILED, "no pod can be saved there until that is mended"))
    return _ready(Status.FALSE, reason, f"{store_url}: {error}; {advice}")


def of_policy(
    policy: PodSnapshotPolicy, config: PodSnapshotStorageConfig | None, store: Condition | None
) -> Condition | None:
    """Give `Ready` of a policy; `store`: that of its storage config. None: nothing is known yet. Pure."""
    name = policy.storage_config_name
    if config is None:
        said = f"there is no PodSnapshotStorageConfig {name}: pods that this selects are not saved; write one, or name"
        return _ready(Status.FALSE, Reason.STORAGE_CONFIG_NOT_FOUND, f"{said} another")
    if store is None:
        return None
    if store.status is not Status.TRUE:
        said = f"PodSnapshotStorageConfig {name}: {store.message}"
        return _ready(Status.FALSE, Reason.STORAGE_CONFIG_NOT_READY, said)
    return _ready(Status.TRUE, Reason.IN_FORCE, f"pods that it selects are saved in {config.location.store_url}")


def overlaps(policies: Iterable[PodSnapshotPolicy], pods: Iterable[PodFacts]) -> dict[Named, Condition]:
    """Give `Overlapping` of each policy: of several with one trigger that select a pod, one decides. Pure."""
    policies = list(policies)
    of_namespace: dict[str, list[PodSnapshotPolicy]] = defaultdict(list)
    for policy in policies:
        of_namespace[policy.metadata.namespace].append(policy)
    common: dict[Named, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))  # policy → others → pods
    for pod in pods:
        there = {each.metadata.name: each for each in of_namespace.get(pod.namespace, ())}
        for trigger in {each.trigger_type for each in there.values()}:
            choice = policy_for(pod, there.values(), trigger)
            others = [name for name in choice.others if there[name].trigger_type is trigger]
            if choice.policy is not None:
                first = choice.policy.metadata.name
                for name in others:
                    common[pod.namespace, name][first].add(pod.name)
                    common[pod.namespace, first][name].add(pod.name)
    return {
        (each.metadata.namespace, each.metadata.name): _overlapping(
            each, common[each.metadata.namespace, each.metadata.name]
        )
        for each in policies
    }


def _overlapping(policy: PodSnapshotPolicy, others: dict[str, set[str]]) -> Condition:
    if not others:
        return Condition(ConditionType.OVERLAPPING, Status.FALSE, Reason.NO_PODS_IN_COMMON)
    names, pods = sorted(others), sorted(set().union(*others.values()))
    named = ", ".join(pods[:_NAMED_PODS]) + (f" and {len(pods) - _NAMED_PODS} more" if len(pods) > _NAMED_PODS else "")
    said = f"{', '.join(names)} select pods of this, too ({named}); {min(policy.metadata.name, *names)} decides, the "
    message = f"{said}first by name: change a selector"
    return Condition(ConditionType.OVERLAPPING, Status.TRUE, Reason.PODS_IN_COMMON, message)


def _ready(status: Status, reason: Reason, message: str) -> Condition:
    return Condition(ConditionType.READY, status, reason, message)


@dataclass(frozen=True, slots=True)
class _Look:
    """What a store said, and until when that is good."""

    store_url: str
    found: Condition
    until_s: float


class Standings:
    """One for a node."""

    def __init__(
        self,
        known: KnownObjects,
        here: PodsHere,
        images: Images,
        writer: SnapshotWriter,
        events: Events,
        *,
        look_every_s: float = _LOOK_EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._known = known
        self._here = here
        self._images = images
        self._writer = writer
        self._events = events
        self._look_every_s = look_every_s
        self._clock = clock
        self._looks: dict[str, _Look] = {}  # by storage config
        self._looking: set[str] = set()
        self._told: dict[tuple[Key, str], tuple[Status, str]] = {}
        self._saying = trio.Lock()

    async def run(self) -> None:
        """Say how they stand whenever that may have changed, until cancelled."""
        await self._known.synced()
        async with trio.open_nursery() as nursery:
            while True:
                change = self._known.next_change()
                for config in self._due():
                    nursery.start_soon(self._look_at, config)
                await self._say()
                with trio.move_on_after(self._look_every_s):
                    await change.wait()

    def _due(self) -> list[PodSnapshotStorageConfig]:
        """Give the configs whose stores are to be looked at now, and count them as being looked at."""
        configs = self._known.configs
        self._looks = {
            name: look
            for name, look in self._looks.items()
            if name in configs and configs[name].location.store_url == look.store_url
        }
        now_s = self._clock()
        found = [
            config
            for name, config in configs.items()
            if name not in self._looking and (name not in self._looks or self._looks[name].until_s <= now_s)
        ]
        self._looking |= {config.metadata.name for config in found}
        return found

    async def _look_at(self, config: PodSnapshotStorageConfig) -> None:
        name, url = config.metadata.name, config.location.store_url
        failure: StreamdError | OSError | None = None
        try:
            await self._images.probe(url)
        except (StreamdError, OSError) as error:
            failure = error
        finally:
            self._looking.discard(name)
        until_s = self._clock() + (_GOOD_FOR_S if failure is None else _BAD_FOR_S)
        self._looks[name] = _Look(url, of_store(url, failure), until_s)
        await self._say()

    async def _say(self) -> None:
        """Write the conditions that aren't as they are to be."""
        async with self._saying:
            wanted = self._wanted()
            there = {key_of(resource) for resource, _ in wanted}
            self._told = {told: said for told, said in self._told.items() if told[0] in there}
            try:
                for resource, conditions in wanted:
                    self._tell_changes(resource, conditions)
                    if not _says(resource, conditions):
                        await self._writer.stands(resource, *conditions)
            except AgentError as error:  # the objects can't be written now; the next look does
                self._events.tell(What.PROBLEM, "conditions", str(error))

    def _wanted(self) -> list[tuple[PodSnapshotStorageConfig | PodSnapshotPolicy, list[Condition]]]:
        """Give all storage configs and policies with the conditions that they are to have, as far as is known."""
        known = self._known
        stores = {
            name: look.found
            for name, look in self._looks.items()
            if name in known.configs and known.configs[name].location.store_url == look.store_url
        }
        found: list[tuple[PodSnapshotStorageConfig | PodSnapshotPolicy, list[Condition]]]
        found = [(config, [stores[name]]) for name, config in sorted(known.configs.items()) if name in stores]
        overlapping = overlaps(known.policies.values(), (pod.facts for pod in self._here))
        for named, policy in sorted(known.policies.items()):
            name = policy.storage_config_name
            ready = of_policy(policy, known.configs.get(name), stores.get(name))
            found.append((policy, [*filter(None, [ready]), overlapping[named]]))
        return found

    def _tell_changes(
        self, resource: PodSnapshotStorageConfig | PodSnapshotPolicy, conditions: Iterable[Condition]
    ) -> None:
        key = key_of(resource)
        for each in conditions:
            was = condition(resource.status.conditions, each.type)
            before = self._told.get((key, each.type), None if was is None else (was.status, was.reason))
            self._told[key, each.type] = (each.status, each.reason)
            if before != (each.status, each.reason):
                self._tell(key, each)

    def _tell(self, key: Key, found: Condition) -> None:
        match found.type, found.status:
            case ConditionType.READY, Status.FALSE:
                self._events.tell(What.NOT_READY, found.reason, f"{key}: {found.message}")
            case ConditionType.READY, Status.TRUE:
                self._events.tell(What.READY, found.reason, f"{key}: {found.message}")
            case ConditionType.OVERLAPPING, Status.TRUE:
                self._events.tell(What.OVERLAP, found.reason, f"{key}: {found.message}")
            case _:
                pass


def _says(resource: PodSnapshotStorageConfig | PodSnapshotPolicy, conditions: Iterable[Condition]) -> bool:
    """Say whether an object's status has these conditions, of its present generation, as it was read."""
    generation = resource.metadata.generation
    there = {
        (each.type, each.status, each.reason, each.message, each.observed_generation)
        for each in resource.status.conditions
    }
    return all((each.type, each.status, each.reason, each.message, generation) in there for each in conditions)
