"""PodSnapshotManualTriggers: which are acted on, which are refused, and when one is over.

A trigger names its snapshot as soon as there is one, and what becomes of it follows from that snapshot alone: Complete
when it is Ready, Failed when it has failed. So it makes no difference who has brought the save to its end, this life of
the agent or the next. A pod has one uncompleted trigger at a time; a second one is refused, in GKE's words.

While the objects can't be written (a full disk) nothing can be begun, nor said of a trigger: it is tried again, and
`problems` says why it waits.
"""

import math
from collections.abc import Awaitable, Callable
from dataclasses import replace

import trio

from agent.errors import AgentError
from agent.kube.conditions import Phase, Reason, Status
from agent.kube.errors import NotFound, Unavailable
from agent.kube.objects import GROUP, PodSnapshotManualTrigger, PodSnapshotPolicy, TriggerType
from agent.matching.facts import MachineFacts
from agent.matching.pod import limits
from agent.matching.policies import policy_for
from agent.node.course import Ending, Origin
from agent.node.events import Events, What
from agent.node.known_objects import KnownObjects, Named, named
from agent.node.node_runtime import NodeRuntime
from agent.node.pods_here import PodHere, PodsHere, State
from agent.node.saving import Saving
from agent.node.snapshot_writer import SnapshotWriter

# On a trigger: what becomes of the pod, whatever the policy says (`snapagent snapshot --stop`).
POST_CHECKPOINT = f"{GROUP}/post-checkpoint"
# Room on a disk comes without a change of an object.
_AGAIN_S = 2.0

# Each is a write with its syncs, some ten milliseconds on a good disk.
_REFUSALS_A_LOOK = 32

Spawn = Callable[[str, Callable[[], Awaitable[None]]], None]


class _Refused(AgentError):
    """A trigger that isn't acted on."""


class Triggers:
    """One for a node. `problems`: why a trigger can't be acted on now."""

    def __init__(
        self,
        known: KnownObjects,
        here: PodsHere,
        runtime: NodeRuntime,
        saving: Saving,
        writer: SnapshotWriter,
        events: Events,
        *,
        spawn: Spawn,
    ) -> None:
        self._known = known
        self._here = here
        self._runtime = runtime
        self._saving = saving
        self._writer = writer
        self._events = events
        self._spawn = spawn
        self._begun: set[Named] = set()  # between the first look at it and its snapshot's name in its status
        self._over: dict[Named, PodSnapshotManualTrigger] = {}  # settled here, and not yet known to be
        self.problems: dict[Named, str] = {}
        self._names: dict[Named, str] = {}  # of snapshots; so that what is tried again makes no second object

    async def run(self) -> None:
        """Act on triggers until cancelled."""
        await self._known.synced()
        while True:
            change = self._known.next_change()
            if not await self._look():
                with trio.move_on_after(_AGAIN_S if self._known.pending() else math.inf):
                    await change.wait()

    async def _look(self) -> bool:
        """Look at each pending trigger once; true: some are still to be refused.

        Refusals come last and some at a time: a file may bring a thousand, each of which is written down, and nobody
        else's trigger is to wait for that.
        """
        pending = {named(each): each for each in self._known.pending()}
        self._over = {name: each for name, each in self._over.items() if pending.get(name) is each}
        for gone in (self.problems.keys() | self._names.keys()) - pending.keys():
            self.problems.pop(gone, None)
            self._names.pop(gone, None)
        acted_on = {
            (each.metadata.namespace, each.target_pod): each.metadata.name
            for name, each in pending.items()
            if each.status.snapshot_created or name in self._begun
        }
        refused: list[tuple[PodSnapshotManualTrigger, str]] = []
        for name, trigger in pending.items():
            if name in self._over or name in self._begun:
                continue
            target = (trigger.metadata.namespace, trigger.target_pod)
            try:
                if trigger.status.snapshot_created:
                    await self._follow(trigger, trigger.status.snapshot_created)
                elif target in acted_on:
                    said = f"Another PodSnapshotManualTrigger {acted_on[target]} is already targeting Pod {target[1]}"
                    raise _Refused(f"{said} and is not yet completed")
                else:
                    await self._begin(trigger)
                    acted_on[target] = trigger.metadata.name
            except _Refused as error:
                refused.append((trigger, str(error)))
            except AgentError as error:
                self._waits(trigger, error)
            else:
                if trigger.status.snapshot_created:
                    self.problems.pop(name, None)
        for trigger, said in refused[:_REFUSALS_A_LOOK]:
            try:
                await self._fail(trigger, said)
            except AgentError as error:
                self._waits(trigger, error)
                return False
        return len(refused) > _REFUSALS_A_LOOK

    def _waits(self, trigger: PodSnapshotManualTrigger, error: AgentError) -> None:
        """Note why a trigger can't be acted on, which is tried again; tell it once."""
        said = str(error)
        if self.problems.get(named(trigger)) != said:
            self.problems[named(trigger)] = said
            pod = f"{trigger.metadata.namespace}/{trigger.target_pod}"
            self._events.tell(What.PROBLEM, "trigger", f"{trigger.metadata.name}: {said}", pod=pod)

    async def _follow(self, trigger: PodSnapshotManualTrigger, created: str) -> None:
        """Look what has become of a trigger's snapshot."""
        match self._known.phase(trigger.metadata.namespace, created):
            case Phase.AVAILABLE:
                await self._settle(trigger, Status.TRUE, Reason.COMPLETE)
            case Phase.FAILED:
                why = await self._writer.failure(trigger.metadata.namespace, created)
                said = f"snapshot {created} has failed" + (f": {why}" if why else "")
                await self._settle(trigger, Status.FALSE, Reason.FAILED, said)
            case Phase.DELETING:
                await self._fail(trigger, f"snapshot {created} was deleted")
            case None if created not in self._saving.busy:
                await self._fail(trigger, f"snapshot {created} is gone")
            case _:
                pass

    async def _begin(self, trigger: PodSnapshotManualTrigger) -> None:
        """Act on a trigger. Raises: `_Refused`."""
        pod, policy = self._target(trigger)
        try:
            machine = await self._runtime.facts()
        except AgentError as error:
            raise _Refused(str(error)) from error
        unmet = next(limits(pod.facts, machine), None)
        if unmet is not None:
            raise _Refused(unmet.message)
        self._spawn(f"trigger {'/'.join(named(trigger))}", lambda: self._act(trigger, pod, policy, machine))
        self._begun.add(named(trigger))

    async def _act(
        self, trigger: PodSnapshotManualTrigger, pod: PodHere, policy: PodSnapshotPolicy, machine: MachineFacts
    ) -> None:
        meta, key = trigger.metadata, named(trigger)
        try:
            wanted = meta.annotations.get(POST_CHECKPOINT)
            job = self._saving.job(
                pod, policy, machine, origin=Origin.MANUAL, ending=None if wanted is None else Ending(wanted)
            )
            job = replace(job, snapshot_id=self._names.setdefault(key, job.snapshot_id))
            draft = self._saving.draft(pod, policy, machine, name=job.snapshot_id, trigger=meta.name)
            self._saving.busy[job.snapshot_id] = str(pod.who)
            try:
                await self._writer.begin(draft)
                await self._writer.names_snapshot(trigger, job.snapshot_id)
            except BaseException:
                del self._saving.busy[job.snapshot_id]
                raise
            self.problems.pop(key, None)
            self._names.pop(key, None)
        except NotFound:
            return  # the trigger was removed
        except Unavailable as error:
            self._waits(trigger, error)
            return
        except (AgentError, ValueError) as error:
            try:
                await self._fail(trigger, str(error))
            except Unavailable as unwritten:
                self._waits(trigger, unwritten)
            return
        finally:
            self._begun.discard(key)
        await self._saving.save(pod, job, draft)

    def _target(self, trigger: PodSnapshotManualTrigger) -> tuple[PodHere, PodSnapshotPolicy]:
        namespace = trigger.metadata.namespace
        pod = self._here.named(namespace, trigger.target_pod)
        if pod is None:
            raise _Refused(f"no pod {trigger.target_pod} of namespace {namespace} runs here in a sandbox")
        if pod.state in (State.CREATED, State.FAILED):
            raise _Refused(f"pod {trigger.target_pod} does not run ({pod.state})")
        choice = policy_for(pod.facts, self._known.policies.values(), TriggerType.MANUAL)
        if choice.policy is None:
            assert choice.refusal is not None
            raise _Refused(choice.refusal.message)
        return pod, choice.policy

    async def _settle(
        self, trigger: PodSnapshotManualTrigger, status: Status, reason: Reason, message: str = ""
    ) -> None:
        await self._writer.settle(trigger, status, reason, message)
        self._over[named(trigger)] = trigger

    async def _fail(self, trigger: PodSnapshotManualTrigger, message: str) -> None:
        meta = trigger.metadata
        await self._settle(trigger, Status.FALSE, Reason.FAILED, message)
        pod = f"{meta.namespace}/{trigger.target_pod}"
        self._events.tell(What.TRIGGER_FAILED, "Failed", f"{meta.name}: {message}", pod=pod)
