"""Restores of this node's pods: the image is asked for at `create`, looked at before `start`, followed to its proof.

    begin     at create: streamd is asked for the image, so that it is fetched while the sandbox is made
    decide    at start: is it there in time, and is there no doubt? Then the restore is noted, durably, and may begin
    reported  the wrapper says how the RPC has ended
    …         the rest is one task for each plan, which holds the lease: until all memory is loaded, or the pod has died

Any doubt before the RPC is a cold start with its reason; after it, a failure ends the pod, and its record makes the
next attempt of that pod start cold. What is not proven doesn't count as restored.
"""

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import trio

from agent.errors import AgentError
from agent.matching.facts import MachineFacts
from agent.node.events import Events, What
from agent.node.images import HeldImage, Images, Lease
from agent.node.node_runtime import NodeRuntime
from agent.node.pods_here import BUNDLES_MAX, PodHere, State
from agent.node.resting import Resting, is_of_the_snapshot
from agent.node.restore import Canary, NotRestored, Restored, Stage, read_canary
from agent.node.restore_check import PodFacts, RuntimeFacts, Why, refusals
from agent.node.restore_records import RestoreRecord, RestoreRecords, SnapshotRests
from agent.node.sandbox import SandboxError
from agent.node.snapshot_writer import SnapshotWriter
from agent.runtime.failures import FailureKind, RuntimeFailure, classify
from agent.wrapper.bundle import read_spec
from streamd.errors import StreamdError

T = TypeVar("T")

# A sandbox that was created and isn't started in that time keeps no image here.
_UNUSED_S = 600.0
_OF_THE_SNAPSHOT = (Why.DAMAGED, Why.FILES_DIFFER)  # whichever pod asks


@dataclass(slots=True, eq=False)
class Plan:
    """A pod's restore. `goes`: the wrapper was told to restore; `decided`: whether it was is known."""

    pod: PodHere
    snapshot: str
    snapshot_url: str = ""
    here: MachineFacts | None = None
    image: HeldImage | None = None
    problem: str = ""
    goes: bool = False
    failure: str | None = None
    waited_for: set[str] = field(default_factory=set)  # containers whose start is still to be reported
    started: set[str] = field(default_factory=set)  # containers whose start was answered
    held: trio.Event = field(default_factory=trio.Event)
    decided: trio.Event = field(default_factory=trio.Event)
    reported: trio.Event = field(default_factory=trio.Event)


class ColdStart(AgentError):
    """Why a restore that was planned isn't tried; `reason` in a word."""

    kind = "cold-start"

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Restoring:
    """One for a node."""

    def __init__(
        self,
        images: Images,
        runtime: NodeRuntime,
        records: RestoreRecords,
        writer: SnapshotWriter,
        events: Events,
        *,
        image_s: float,
        report_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.records = records
        self._images = images
        self._runtime = runtime
        self._writer = writer
        self._events = events
        self._image_s = image_s
        self._report_s = report_s
        self._clock = clock
        self._writing = trio.CapacityLimiter(1)
        self._reading = trio.CapacityLimiter(BUNDLES_MAX)
        self.plans: dict[PodHere, Plan] = {}
        self.resting = Resting()

    def begin(self, pod: PodHere, snapshot: str, snapshot_url: str, here: MachineFacts) -> Plan:
        """Make a plan, which `run` carries out."""
        plan = Plan(pod, snapshot, snapshot_url, here)
        self.plans[pod] = plan
        return plan

    async def run(self, plan: Plan) -> None:
        """Hold the image, and follow the restore if there is one; the lease ends with this."""
        pod = plan.pod
        try:
            try:
                plan.image = await self._images.hold(
                    plan.snapshot_url,
                    request_id=uuid.uuid4().hex,
                    tenant=pod.who.namespace,
                    owner=f"pod {pod.who}",
                )
            except (AgentError, StreamdError, OSError) as error:
                plan.problem = str(error)  # for `decide`, which says it
                if is_of_the_snapshot(error):
                    self.resting.put(pod.who.namespace, plan.snapshot, str(error))
            finally:
                plan.held.set()
            with trio.move_on_after(_UNUSED_S):
                await plan.decided.wait()
            if plan.goes:
                await self._follow_plan(plan)
        finally:
            if plan.image is not None:
                plan.image.lease.close()
            if self.plans.get(pod) is plan:
                del self.plans[pod]

    async def decide(self, plan: Plan) -> str:
        """Give the directory to restore from. Raises: `ColdStart`, and then nothing is noted."""
        try:
            with trio.move_on_after(self._image_s):
                await plan.held.wait()
            if plan.image is None:
                late = f"its image isn't there within {self._image_s:g} s: `streamd status` says what it waits for"
                raise ColdStart("ImageUnavailable", plan.problem or late)
            await self._check(plan, plan.image)
            refusal = await self._record(partial(self.records.begin, plan.pod.who, plan.snapshot, now_s=self._clock()))
            match refusal:
                case RestoreRecord():
                    raise ColdStart(Why.FAILED_BEFORE, str(refusal))
                case SnapshotRests():
                    self.resting.put(plan.pod.who.namespace, plan.snapshot, str(refusal))
                    raise ColdStart(Why.SNAPSHOT_RESTS, str(refusal))
            plan.waited_for = set(plan.pod.names)
            plan.started.add(plan.pod.first_name)
            plan.goes = True
            plan.pod.state, plan.pod.reason, plan.pod.snapshot = State.RESTORING, "", plan.snapshot
            return str(plan.image.directory)
        finally:
            plan.decided.set()

    async def _check(self, plan: Plan, image: HeldImage) -> None:
        here, pod = plan.here, plan.pod
        assert here is not None
        try:
            spec, _ = await trio.to_thread.run_sync(read_spec, pod.bundle, limiter=self._reading)
        except AgentError as error:
            raise ColdStart("BundleUnreadable", str(error)) from error
        runtime = RuntimeFacts(
            version=here.runsc_version,
            sha256=here.runsc_sha256,
            network=here.network,
            cpu_features=here.cpu_features,
        )
        found = refusals(image.facts, runtime, PodFacts(specs=[spec], names=pod.names))
        if found and found[0].why in _OF_THE_SNAPSHOT:
            self.resting.put(pod.who.namespace, plan.snapshot, found[0].message)
        if found:
            raise ColdStart(found[0].why, "; ".join(each.message for each in found))

    def joins(self, pod: PodHere, container: str) -> bool:
        """Say whether a further container's start is part of its pod's restore; its report is waited for then."""
        plan = self.plans.get(pod)
        if plan is None or not plan.goes:
            return False
        plan.started.add(container)
        return True

    def reported(self, pod: PodHere, container: str, exit_code: int, message: str) -> None:
        """Take in how a container's start has ended; `container` by gVisor's name."""
        plan = self.plans.get(pod)
        if plan is None:
            return
        if exit_code and plan.failure is None:
            plan.failure = message or f"runsc ended with {exit_code}"
        plan.waited_for.discard(container)
        if plan.failure is not None or not plan.waited_for:
            plan.reported.set()

    async def follow_again(self, pod: PodHere, snapshot: str) -> None:
        """Follow a restore that a former life of the agent had begun; of its containers some may still be to come."""
        lease: Lease | None = None
        pod.state, pod.snapshot = State.RESTORING, snapshot
        plan = Plan(pod, snapshot, goes=True, waited_for=set(pod.names - pod.running_ids.keys()))
        self.plans[pod] = plan
        try:
            pid = await self._runtime.pid(pod.key)
            if pid is not None:
                try:
                    lease = await self._images.hold_again(sandbox_pid=pid, owner=f"pod {pod.who}")
                except (AgentError, StreamdError) as error:
                    self._events.tell(What.PROBLEM, "lease", str(error), pod=str(pod.who), snapshot=snapshot)
            await self._follow_plan(plan)
        finally:
            if lease is not None:
                lease.close()
            if self.plans.get(pod) is plan:
                del self.plans[pod]

    async def _follow_plan(self, plan: Plan) -> None:
        if plan.waited_for:
            await self._await_reports(plan)
        if plan.failure is not None:
            failure = classify([plan.failure])
            await self._failed(plan.pod, plan.snapshot, failure.kind, failure.message)
            await self._end(plan.pod)
            return
        noted = "" if plan.image is None else plan.image.facts.manifest.metadata.get("canary", "")
        await self._prove(plan.pod, plan.snapshot, read_canary(noted))

    async def _await_reports(self, plan: Plan) -> None:
        """Wait until each container's start was reported, a report is overdue, or the sandbox has ended.

        A pod's containers are started when their container images are there, which may take long, and nothing of the
        pod runs before the last one's start.
        """
        pod = plan.pod
        while not plan.reported.is_set():
            with trio.move_on_after(self._report_s):
                await plan.reported.wait()
                return
            missing = plan.waited_for - plan.started
            if not missing or await self._runtime.pid(pod.key) is None:
                return
            pod.reason = f"its containers {', '.join(sorted(missing))} were not started yet"

    async def _prove(self, pod: PodHere, snapshot: str, canary: Canary | None) -> None:
        """Wait for the proof; without a word from the wrapper, the sandbox's is asked for all the same."""
        match await self._runtime.observe(pod.key, pod.running_ids, canary):
            case Restored() as restored:
                pod.state, pod.reason = State.RESTORED, ""
                try:
                    await self._writer.accessed(pod.who.namespace, snapshot)
                except AgentError as error:
                    self._events.tell(What.PROBLEM, "last access", str(error), pod=str(pod.who), snapshot=snapshot)
                # After the access: with the record gone, no next life would note it, and retention goes by it.
                await self._record(partial(self.records.proven, pod.who, now_s=self._clock()))
                self._events.tell(What.RESTORED, "proven", str(restored), pod=str(pod.who), snapshot=snapshot)
            case NotRestored(Stage.RUNNING, RuntimeFailure(FailureKind.NOT_RESTORING, message)):
                # The wrapper never heard our answer, or gave up: then it has started the pod as runsc would.
                pod.state, pod.reason = State.COLD, message
                await self._record(partial(self.records.forget, pod.who))
                self._events.tell(What.FALLBACK, "NotTried", message, pod=str(pod.who), snapshot=snapshot)
            case NotRestored(_, failure):
                await self._failed(pod, snapshot, failure.kind, failure.message)

    async def _failed(self, pod: PodHere, snapshot: str, reason: str, message: str) -> None:
        pod.state, pod.reason = State.FAILED, message
        await self._record(partial(self.records.failed, pod.who, message))
        self._events.tell(What.RESTORE_FAILED, reason, message, pod=str(pod.who), snapshot=snapshot)

    async def _end(self, pod: PodHere) -> None:
        """End a pod whose RPC has failed.

        A pod of several keeps its sandbox when a further container's start has failed, and its first one looks alive.
        The wrapper ends what it was called for at the same time, so one of both may find it gone half-way.
        """
        try:
            await self._runtime.sandbox(pod.key).remove()
        except SandboxError as error:
            if await self._runtime.pid(pod.key) is None:
                return
            self._events.tell(What.PROBLEM, "sandbox not ended", str(error), pod=str(pod.who))

    async def _record(self, call: Callable[[], T]) -> T:
        """Read or change the records, which block on the disk and belong to one thread at a time."""
        return await trio.to_thread.run_sync(call, limiter=self._writing)
