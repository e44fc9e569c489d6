"""What the wrapper is answered: restore, or start as runsc would, and why.

Every path ends in an answer, and every cold start in an event that names its reason; what can't be decided is a plain
start. `create` decides by objects and node alone and asks for the image; `start` by the image itself, within a deadline
that is shorter than the wrapper's. What goes on after an answer runs in the daemon's nursery (`spawn`).
"""

import os
from collections.abc import Awaitable, Callable

import trio

from agent.config import RuntimeConfig
from agent.errors import AgentError
from agent.kube.objects import PodSnapshot, TriggerType
from agent.kube.port import Objects
from agent.matching.choice import Verdict, choose
from agent.matching.facts import MachineFacts
from agent.matching.pod import limits
from agent.matching.policies import policy_for
from agent.matching.reasons import Reason
from agent.node.events import Events, What
from agent.node.known_objects import KnownObjects
from agent.node.node_runtime import NodeRuntime, SandboxKey
from agent.node.pods import Pods
from agent.node.pods_here import PodHere, PodsHere, State, pod_of
from agent.node.restoring import ColdStart, Restoring
from agent.node.saving import Saving
from agent.node.workload_trigger import PREFIX, armed_annotations
from agent.node.wrapper_flags import differing_flags
from agent.podspec.difference import differences
from agent.podspec.distil import distil
from agent.wrapper.protocol import (
    Container,
    ContainerKind,
    Create,
    Finished,
    Join,
    Plain,
    Refused,
    Report,
    Request,
    Restore,
    Start,
)
from streamd.errors import StreamdError

Spawn = Callable[[str, Callable[[], Awaitable[None]]], None]

# Differences that are named in a message; `snapagent explain` names all.
_NAMED_DIFFERENCES = 3
# The pod waits for them, and starts cold all the same: milliseconds for what pods are like, and no more for what isn't.
_NAMING_S = 0.5


class Ending(AgentError):
    """The agent ends, and decides nothing any more."""

    kind = "ending"


class NodeDecisions:
    """The port `runtime_requests.Decisions`."""

    def __init__(
        self,
        *,
        configured: RuntimeConfig,
        runtime: NodeRuntime,
        objects: Objects,
        known: KnownObjects,
        pods: Pods,
        here: PodsHere,
        restoring: Restoring,
        saving: Saving,
        events: Events,
        spawn: Spawn,
    ) -> None:
        self._configured = configured
        self._runtime = runtime
        self._objects = objects
        self._known = known
        self._pods = pods
        self._here = here
        self._restoring = restoring
        self._saving = saving
        self._events = events
        self._spawn = spawn
        self._naming = trio.CapacityLimiter(1)
        self.is_ending = False

    # At create

    async def create(self, request: Create) -> Plain | Finished | Refused:
        """Say how a container is to be created."""
        self._refuse_at_the_end()
        container = request.container
        try:
            is_further = request.kind is ContainerKind.FURTHER
            key = self._key(container, request.sandbox_id if is_further else container.container_id)
            if is_further:
                return self._create_further(request, key)
            if not self._known.is_synced:
                raise ColdStart("NotReady", "the agent hasn't read its policies and snapshots yet")
            pod, annotations = await pod_of(request, key, self._pods, reading=self._here.reading)
            self._here.put(pod)
            return await self._create_first(pod, annotations)
        except ColdStart as error:
            self._tell_cold(container.container_id, error.reason, str(error))
        except (AgentError, StreamdError, OSError) as error:
            self._tell_cold(container.container_id, type(error).__name__, str(error))
        return Plain()

    async def _create_first(self, pod: PodHere, annotations: dict[str, str]) -> Plain:
        machine = await self._runtime.facts()
        resting = self._restoring.resting.of(pod.who.namespace)
        verdict = choose(pod.facts, machine, self._known.index, resting=resting)
        if verdict.chosen is not None:
            plan = self._restoring.begin(pod, verdict.chosen.name, verdict.chosen.url, machine)
            self._spawn(f"restore of {pod.who}", lambda: self._restoring.run(plan))
            return Plain()
        await self._tell_verdict(pod, verdict)
        return Plain(await self._armed(pod, machine, annotations))

    async def _armed(self, pod: PodHere, machine: MachineFacts, annotations: dict[str, str]) -> dict[str, str]:
        """Set the workload trigger up, if a policy wants it; give the annotations."""
        choice = policy_for(pod.facts, self._known.policies.values(), TriggerType.WORKLOAD)
        if choice.policy is None or any(limits(pod.facts, machine)):
            return {}
        try:
            image = await self._saving.arm(pod, choice.policy, machine)
        except (AgentError, OSError) as error:
            self._events.tell(What.PROBLEM, "workload trigger", str(error), pod=str(pod.who))
            return {}
        if choice.others:
            said = f"policy {choice.policy.metadata.name} decides; {', '.join(choice.others)} select it, too"
            self._events.tell(What.ARMED, "SeveralPolicies", said, pod=str(pod.who))
        tool = self._runtime.gpu_tool if pod.facts.gpus else None
        armed = armed_annotations(annotations, image, gpu_tool=tool)
        return {name: text for name, text in armed.items() if name.startswith(PREFIX)}

    def _create_further(self, request: Create, key: SandboxKey) -> Plain | Finished | Refused:
        """Decide about one more container of a pod, by what has become of its sandbox."""
        pod = self._here.get(key)
        if pod is None:
            return Plain()
        plan = self._restoring.plans.get(pod)
        if plan is not None and plan.goes and request.name not in pod.names:
            if request.name in pod.finished:
                return Finished()
            said = f"{pod.who} is restored from {plan.snapshot}, which has no container {request.name}"
            self._events.tell(What.REFUSED, "ContainersMismatch", said, pod=str(pod.who), snapshot=plan.snapshot)
            return Refused(said)
        pod.container_ids[request.name] = request.container.container_id
        is_armed = key in self._saving.followed
        return Plain({f"{PREFIX}enable": "true"} if is_armed else {})

    # At start

    async def start(self, request: Start) -> Plain | Restore | Join:
        """Say how a created container is to be started."""
        self._refuse_at_the_end()
        container = request.container
        try:
            key = self._key(container, container.container_id)
        except ColdStart:
            return Plain()  # told at create
        pod = self._here.get(key)
        if pod is None:
            return self._start_further(key)
        plan = self._restoring.plans.get(pod)
        if plan is not None:
            try:
                image = await self._restoring.decide(plan)
            except ColdStart as error:
                self._cold(pod, error.reason, str(error), what=What.FALLBACK, snapshot=plan.snapshot)
            except (AgentError, StreamdError, OSError) as error:
                self._cold(pod, type(error).__name__, str(error), what=What.FALLBACK, snapshot=plan.snapshot)
            else:
                self._events.tell(What.RESTORING, "chosen", pod=str(pod.who), snapshot=plan.snapshot)
                return Restore(image)
        pod.state = State.COLD
        job = self._saving.take_armed(key)
        if job is not None:
            self._spawn(f"workload trigger of {pod.who}", lambda: self._saving.follow(pod, job))
        return Plain()

    def _start_further(self, key: SandboxKey) -> Plain | Join:
        pod = self._here.of_container(key)
        if pod is None:
            return Plain()
        return Join() if self._restoring.joins(pod, pod.name_of(key.sandbox_id)) else Plain()

    async def report(self, report: Report) -> None:
        """Note how a restore has ended."""
        container = report.container
        try:
            key = self._key(container, container.container_id)
        except ColdStart:
            return
        pod = self._here.of_container(key)
        if pod is None:
            return
        name = pod.name_of(container.container_id)
        self._restoring.reported(pod, name, report.exit_code, report.message)

    def given_up(self, request: Request) -> None:
        """Note that a wrapper doesn't wait for its answer any more: its container starts plainly, or not at all."""
        if isinstance(request, Report):
            return  # taken in at once, whoever waits
        container = request.container
        said = f"container {container.container_id}: its wrapper waits no longer for what to do at its "
        said += "create" if isinstance(request, Create) else "start"
        try:
            pod = self._here.of_container(self._key(container, container.container_id))
        except ColdStart:
            pod = None
        if pod is None:
            self._events.tell(What.COLD_START, "GivenUp", said)
            return
        plan = self._restoring.plans.get(pod)
        if isinstance(request, Start):
            pod.state = State.COLD
        if plan is None:
            self._cold(pod, "GivenUp", said)
        else:
            self._cold(pod, "GivenUp", said, what=What.FALLBACK, snapshot=plan.snapshot)

    # What is said

    def _refuse_at_the_end(self) -> None:
        if self.is_ending:
            raise Ending("the agent is ending")

    def _key(self, container: Container, sandbox_id: str) -> SandboxKey:
        key = self._runtime.key(container.runsc_root, sandbox_id)
        if key is None:
            root = container.runsc_root or "runsc's default root"
            raise ColdStart("UnknownRoot", f"{root} is none of [runtime] roots of the agent's configuration")
        if os.path.realpath(container.runsc) != os.path.realpath(self._configured.runsc):
            said = f"the wrapper calls {container.runsc}, and the agent's configuration has {self._configured.runsc}"
            raise ColdStart("AnotherRunsc", said)
        differing = differing_flags(container.flags, self._configured)
        if differing:
            raise ColdStart("OtherFlags", differing)
        return key

    async def _tell_verdict(self, pod: PodHere, verdict: Verdict) -> None:
        """Tell why a pod starts cold: what decided, and which field, when that was the pod's spec."""
        deciding = verdict.deciding
        assert deciding is not None
        message = deciding.message
        if deciding.reason is Reason.POD_HASH and verdict.candidates:
            nearest = verdict.candidates[0].snapshot.name
            with trio.move_on_after(_NAMING_S):
                message = await self._named_differences(pod, nearest) or message
        self._cold(pod, deciding.reason, message)

    async def _named_differences(self, pod: PodHere, snapshot_name: str) -> str:
        try:
            snapshot = await self._objects.get(PodSnapshot, snapshot_name, pod.who.namespace)
            origin = snapshot.status.origin
            if origin is None:
                return ""
            found = await trio.to_thread.run_sync(
                lambda: differences(distil(origin.distilled), pod.distilled),
                abandon_on_cancel=True,
                limiter=self._naming,
            )
        except AgentError:
            return ""
        more = f" and {len(found) - _NAMED_DIFFERENCES} more" if len(found) > _NAMED_DIFFERENCES else ""
        named = "; ".join(map(str, found[:_NAMED_DIFFERENCES])) + more
        return f"it differs from the pod of snapshot {snapshot_name} in {named}" if named else ""

    def _cold(
        self, pod: PodHere, reason: str, message: str, *, what: What = What.COLD_START, snapshot: str = ""
    ) -> None:
        pod.reason = message
        self._events.tell(what, reason, message, pod=str(pod.who), snapshot=snapshot)

    def _tell_cold(self, container_id: str, reason: str, message: str) -> None:
        self._events.tell(What.COLD_START, reason, f"container {container_id}: {message}")
