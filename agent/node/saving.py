"""Saves of this node's pods, from what asks for one to what the PodSnapshot says in the end.

    draft       what the snapshot is to say: policy, group, origin; its id is the object's name
    manual      object → note and image → push → Ready
    workload    `arm` at create: note and draft; `follow`: the application asks → object → push → Ready

The steps on the sandbox, and what a failure at each leads to, are `checkpoint.Saver`'s. Here is what surrounds them:
one save at a time for a pod, a bound on what is pushed at once, conditions, events. What ends as PENDING (a store that
is down) keeps its image and its note; `recovery` goes on with it. `busy` are the snapshots whose jobs are under way
here, which recovery leaves alone.
"""

import json
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import trio

from agent.kube.conditions import Step as SnapshotStep
from agent.kube.objects import PodSnapshot, PodSnapshotPolicy, PostCheckpoint, new_snapshot
from agent.kube.origin import Origin as PodOrigin
from agent.matching.facts import MachineFacts
from agent.node.checkpoint import Outcome, PreflightFailed, Saver, Uploader
from agent.node.course import Ending, Origin, Phase, Step
from agent.node.drafts import read_draft, write_draft
from agent.node.events import Events, What
from agent.node.jobs import Job, JobDirectory
from agent.node.known_objects import KnownObjects
from agent.node.node_runtime import NodeRuntime, SandboxKey
from agent.node.pods_here import PodHere
from agent.node.restore import canary_text
from agent.node.snapshot_writer import SnapshotWriter
from agent.node.workload_trigger import TriggerEnded
from agent.runtime.control_socket import ControlError
from streamd.save.push import PushResult

# Each push takes a core or two and some 100 MiB; the saves themselves write to the node's disk.
PUSHES_MAX = 2
SAVES_MAX = 4


class NotStorable(PreflightFailed):
    """There is nowhere to save to: the policy's storage config isn't there."""


@dataclass(frozen=True, slots=True)
class _TellingUploader:
    """Pushes, a few at a time; tells before it that the checkpoint is there, and after it that it is in the store."""

    inner: Uploader
    jobs: JobDirectory
    writer: SnapshotWriter
    turns: trio.CapacityLimiter = field(default_factory=lambda: trio.CapacityLimiter(PUSHES_MAX))

    async def push(self, job: Job, image: Path) -> PushResult:
        draft = await trio.to_thread.run_sync(read_draft, self.jobs, job)
        if draft is not None:
            await self.writer.begin(draft)  # nothing is in the store that no object speaks of
        namespace = job.namespace
        await self.writer.step(namespace, job.snapshot_id, SnapshotStep.CHECKPOINTED, attempts=job.attempt)
        async with self.turns:
            result = await self.inner.push(job, image)
        # Before the job's note goes: an agent that ends in between pushes again, and finds it there.
        await self.writer.step(namespace, job.snapshot_id, SnapshotStep.REPLICATED, attempts=job.attempt)
        return result


class Saving:
    """One for a node."""

    def __init__(
        self,
        jobs: JobDirectory,
        uploader: Uploader,
        runtime: NodeRuntime,
        known: KnownObjects,
        writer: SnapshotWriter,
        events: Events,
        *,
        node_name: str,
    ) -> None:
        self.jobs = jobs
        self.uploader = _TellingUploader(uploader, jobs, writer)
        self._saver = Saver(jobs, self.uploader, has_whole_state=runtime.has_whole_state)
        self._runtime = runtime
        self._known = known
        self._writer = writer
        self._events = events
        self._node_name = node_name
        self._saves = trio.CapacityLimiter(SAVES_MAX)
        self._walking = 0
        self.busy: dict[str, str] = {}  # snapshot → pod
        self.armed: dict[SandboxKey, Job] = {}  # of sandboxes that aren't started yet
        self.followed: set[SandboxKey] = set()

    @property
    def is_saving(self) -> bool:
        """Whether an image is being written, checked or pushed; sandboxes that may yet save themselves don't count."""
        return self._walking > 0

    # What a snapshot is to say

    def draft(
        self, pod: PodHere, policy: PodSnapshotPolicy, here: MachineFacts, *, name: str, trigger: str = ""
    ) -> PodSnapshot:
        """Write down what a snapshot of a pod is to say. Raises: `NotStorable`, `ValueError`: a label is missing."""
        config = self._known.configs.get(policy.storage_config_name)
        if config is None:
            raise NotStorable(f"policy {policy.metadata.name}: there is no storage config {policy.storage_config_name}")
        snapshot = new_snapshot(
            name,
            policy,
            pod_name=pod.who.name,
            pod_labels=pod.facts.labels,
            node_name=self._node_name,
            trigger=trigger,
        )
        origin = PodOrigin(
            pod_name=pod.who.name,
            pod_uid=pod.who.uid,
            pod_hash=pod.facts.pod_hash,
            distilled=pod.distilled,
            containers=pod.containers,
            gpus=pod.facts.gpus,
            node_name=self._node_name,
            node_facts=here.to_mapping(),
        )
        url = f"{config.location.store_url.rstrip('/')}/{name}"
        return replace(snapshot, status=replace(snapshot.status, snapshot_url=url, origin=origin))

    def job(
        self, pod: PodHere, policy: PodSnapshotPolicy, here: MachineFacts, *, origin: Origin, ending: Ending | None
    ) -> Job:
        """Make the job of a save; `ending` None: the policy's. Raises: `NotStorable`."""
        config = self._known.configs.get(policy.storage_config_name)
        if config is None:
            raise NotStorable(f"policy {policy.metadata.name}: there is no storage config {policy.storage_config_name}")
        stops = policy.post_checkpoint is PostCheckpoint.STOP
        return Job(
            job_id=str(uuid.uuid4()),
            sandbox_id=pod.key.sandbox_id,
            origin=origin,
            ending=ending or (Ending.STOP if stops else Ending.RESUME),
            store_url=config.location.store_url,
            snapshot_id=str(uuid.uuid4()),
            push_id=str(uuid.uuid4()),
            phase=Phase.ARMED if origin is Origin.WORKLOAD else Phase.BEGUN,
            runsc_sha256=here.runsc_sha256,
            cpu_features=tuple(sorted(here.cpu_features)),
            metadata=self._metadata(pod, policy, here),
        )

    def _metadata(self, pod: PodHere, policy: PodSnapshotPolicy, here: MachineFacts) -> Mapping[str, str]:
        """Say whose a snapshot is and what it needs, for whoever has only the store."""
        facts = here.to_mapping()
        del facts["cpu"]  # its features have a place of their own there
        return {
            "namespace": pod.who.namespace,
            "pod": pod.who.name,
            "pod_uid": pod.who.uid,
            "policy": policy.metadata.name,
            "node": self._node_name,
            "pod_hash": pod.facts.pod_hash.sha256,
            "machine": json.dumps(facts, sort_keys=True),
        }

    # A manual save

    async def save(self, pod: PodHere, job: Job, draft: PodSnapshot) -> None:
        """Save a pod whose snapshot's object is there."""
        with self._busy(job, pod):
            self._events.tell(What.SNAPSHOT_BEGUN, job.origin, pod=str(pod.who), snapshot=job.snapshot_id)
            async with self._saves, pod.saving:
                job = await self._with_canary(pod, job)
                preflight = partial(self._preflight, pod) if pod.facts.gpus else None
                sandbox = self._runtime.sandbox(pod.key, gpus=pod.facts.gpus, container_ids=pod.container_ids)
                with self.walking():
                    outcome = await self._saver.save(job, sandbox, preflight=preflight)
            await self.conclude(outcome)

    async def _preflight(self, pod: PodHere) -> None:
        if self._runtime.gpu_tool is None:
            raise PreflightFailed("the pod has GPUs, and no tool for them is configured ([gpu] tool)")
        await self._runtime.preflight(pod.key)

    # The workload trigger

    async def arm(self, pod: PodHere, policy: PodSnapshotPolicy, here: MachineFacts) -> Path:
        """Prepare that a sandbox saves itself; give the directory for its image. Raises: `AgentError`, OSError."""
        job = self.job(pod, policy, here, origin=Origin.WORKLOAD, ending=None)
        draft = self.draft(pod, policy, here, name=job.snapshot_id)
        self.busy[job.snapshot_id] = str(pod.who)  # before there is a note that recovery could find

        def prepare() -> Path:
            image = self.jobs.arm(job)
            write_draft(self.jobs, job, draft)
            return image

        try:
            image = await trio.to_thread.run_sync(prepare)
        except BaseException:
            del self.busy[job.snapshot_id]  # what it left is recovery's to clear
            raise
        former = self.armed.get(pod.key)
        self.armed[pod.key] = job
        if former is not None:
            await self._forget(former)
        return image

    async def disarm(self, key: SandboxKey) -> None:
        """Take an armed job back whose sandbox was never started."""
        job = self.armed.pop(key, None)
        if job is not None:
            await self._forget(job)

    def take_armed(self, key: SandboxKey) -> Job | None:
        """Give the job of a sandbox that is about to start, to be followed."""
        return self.armed.pop(key, None)

    async def _forget(self, job: Job) -> None:
        await trio.to_thread.run_sync(self.jobs.discard, job)
        self.busy.pop(job.snapshot_id, None)

    async def follow(self, pod: PodHere, job: Job) -> None:
        """Wait for the application of an armed pod, and bring what it saves into the store."""
        self.followed.add(pod.key)
        with self._busy(job, pod):
            try:
                ended = await self._runtime.await_written(
                    pod.key, self.jobs.image(job), gpus=pod.facts.gpus, container_ids=pod.container_ids
                )
            finally:
                self.followed.discard(pod.key)
            if not ended.asked:
                await trio.to_thread.run_sync(self.jobs.discard, job)
                return
            await self._save_written(pod, job, ended)

    async def _save_written(self, pod: PodHere, job: Job, ended: TriggerEnded) -> None:
        draft = await trio.to_thread.run_sync(read_draft, self.jobs, job)
        sandbox = self._runtime.sandbox(pod.key, gpus=pod.facts.gpus, container_ids=pod.container_ids)
        self._events.tell(What.SNAPSHOT_BEGUN, job.origin, pod=str(pod.who), snapshot=job.snapshot_id)
        if job.ending is Ending.RESUME:  # one that is to stop is paused first of all
            job = await self._with_canary(pod, job)
            if draft is not None:
                await self._writer.begin(draft)
        async with pod.saving:
            with self.walking():
                outcome = await self._saver.save(job, sandbox)
        if draft is not None and outcome.course.failure is not None:
            await self._writer.begin(draft)  # so that there is something that can say so
        if ended.failure is not None and outcome.course.failure is not None:
            self._events.tell(What.PROBLEM, "application's save", ended.failure.message, pod=str(pod.who))
        await self.conclude(outcome)

    # Ends

    async def conclude(self, outcome: Outcome) -> None:
        """Tell how a save has ended: in the snapshot's conditions, and as an event."""
        job, course = outcome.job, outcome.course
        namespace, failure = job.namespace, course.failure
        pod = f"{namespace}/{job.metadata.get('pod', '')}"
        tell = partial(self._events.tell, pod=pod, snapshot=job.snapshot_id)
        match course.step:
            case Step.DONE if outcome.pushed is not None:
                tell(What.SNAPSHOT_READY, job.origin)
            case Step.FAILED if failure is not None:
                said = f"{failure.reason}: {failure.message}"
                await self._writer.failed(namespace, job.snapshot_id, said, attempts=job.attempt)
                tell(What.SNAPSHOT_FAILED, failure.reason, failure.message)
            case Step.PENDING if failure is not None:
                tell(What.SNAPSHOT_DELAYED, failure.reason, failure.message)
            case _:
                pass  # an armed job that came to nothing

    async def _with_canary(self, pod: PodHere, job: Job) -> Job:
        """Note what a restore must bring back; without it there is one proof less."""
        try:
            canary = await self._runtime.canary(pod.key, pod.running_ids)
        except ControlError:
            return job
        return replace(job, metadata={**job.metadata, "canary": canary_text(canary)})

    @contextmanager
    def walking(self) -> Iterator[None]:
        """Count a save while its steps are done."""
        self._walking += 1
        try:
            yield
        finally:
            self._walking -= 1

    @contextmanager
    def _busy(self, job: Job, pod: PodHere) -> Iterator[None]:
        self.busy[job.snapshot_id] = str(pod.who)
        try:
            yield
        finally:
            self.busy.pop(job.snapshot_id, None)
