"""What an agent finds of a former life, and what is left over in this one: decided by what runtime and disk say.

    at its start    the pods that run, by runsc; restores whose outcome nobody has seen, by their records, whose leases
                    are taken again; snapshots that await a checkpoint of this node which has no job: failed, by name
    now and then    jobs that nobody works on: saves that were cut off are finished or undone, uploads gone on with,
                    armed sandboxes waited for; pods that runsc doesn't list any more are forgotten

Jobs under way are `Saving.busy`. All others are independent of each other, so that a paused pod need not wait for
somebody else's upload before it goes on.
"""

import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

import trio

from agent.errors import AgentError
from agent.kube.conditions import Phase as SnapshotPhase
from agent.kube.objects import ORIGIN_NODE, Kind, PodSnapshot
from agent.kube.port import Objects
from agent.node.checkpoint import Saver
from agent.node.course import Phase
from agent.node.events import Events, What
from agent.node.jobs import Job
from agent.node.node_runtime import NodeRuntime, SandboxKey
from agent.node.pods import Pods
from agent.node.pods_here import CREATING_S, PodsHere, find_again
from agent.node.restoring import Restoring
from agent.node.sandbox import NO_CONTAINERS
from agent.node.saving import Saving
from agent.node.snapshot_writer import SnapshotWriter

Spawn = Callable[[str, Callable[[], Awaitable[None]]], None]

AGAIN_S = 30.0


class Recovery:
    """One for a node."""

    def __init__(
        self,
        objects: Objects,
        runtime: NodeRuntime,
        pods: Pods,
        here: PodsHere,
        saving: Saving,
        restoring: Restoring,
        writer: SnapshotWriter,
        events: Events,
        *,
        node_name: str,
        runsc: str,
        spawn: Spawn,
    ) -> None:
        self._objects = objects
        self._runtime = runtime
        self._pods = pods
        self._here = here
        self._saving = saving
        self._restoring = restoring
        self._writer = writer
        self._events = events
        self._node_name = node_name
        self._runsc = runsc
        self._spawn = spawn
        self._told: set[str] = set()

    async def at_start(self) -> None:
        """Take up what a former life has left."""
        await find_again(self._runtime, self._pods, self._here, runsc=self._runsc)
        here = {(pod.who.namespace, pod.who.uid): pod for pod in self._here}
        for record in self._restoring.records.all():
            pod = here.get(record.pod)
            if pod is not None and not record.failure:
                self._spawn(f"restore of {pod.who}", partial(self._restoring.follow_again, pod, record.snapshot_id))
        await self._fail_lost_snapshots()
        await trio.to_thread.run_sync(self._saving.jobs.sweep)

    async def run(self) -> None:
        """Look after what nobody works on, until cancelled."""
        while True:
            try:
                await self.look()
            except (AgentError, OSError) as error:
                self._events.tell(What.PROBLEM, "recovery", str(error))
            await trio.sleep(AGAIN_S)

    async def look(self) -> None:
        """Look once: begin what is to be done for each job, and forget pods that are gone."""
        containers = await self._runtime.containers()
        keys = {key for key, _ in containers}
        self._here.keep_only(keys, now_s=time.time())
        for key in [key for key in self._saving.armed if self._here.get(key) is None]:
            await self._saving.disarm(key)
        by_id = {key.sandbox_id: key for key in keys}
        jobs, problems = await trio.to_thread.run_sync(self._saving.jobs.jobs)
        for problem in problems:
            if str(problem.path) not in self._told:  # it stays until somebody removes it
                self._told.add(str(problem.path))
                self._events.tell(What.PROBLEM, "job's note", str(problem))
        for job in jobs:
            is_armed_early = job.phase is Phase.ARMED and job.sandbox_id not in by_id and self._is_young(job)
            if job.snapshot_id not in self._saving.busy and not is_armed_early:
                self._saving.busy[job.snapshot_id] = job.metadata.get("pod", "")
                self._spawn(f"recovery of a save of {job.sandbox_id}", partial(self._recover, job, by_id))

    def _is_young(self, job: Job) -> bool:
        """Say whether runsc may still be about to create a job's sandbox, which fails without its directory."""
        try:
            return time.time() - (self._saving.jobs.path / job.job_id).stat().st_mtime < CREATING_S
        except FileNotFoundError:
            return False

    async def _recover(self, job: Job, by_id: Mapping[str, SandboxKey]) -> None:
        """Finish or undo a job, or go on waiting for its sandbox."""
        saving = self._saving
        key = by_id.get(job.sandbox_id, SandboxKey(self._runtime.roots[0], job.sandbox_id))
        pod = self._here.get(key)
        try:
            saver = Saver(saving.jobs.alone(job), saving.uploader, has_whole_state=self._runtime.has_whole_state)
            gpus, containers = (0, NO_CONTAINERS) if pod is None else (pod.facts.gpus, pod.container_ids)
            with saving.walking():
                outcomes = await saver.recover(
                    lambda _: self._runtime.sandbox(key, gpus=gpus, container_ids=containers)
                )
            for outcome in outcomes:
                await saving.conclude(outcome)
        finally:
            saving.busy.pop(job.snapshot_id, None)
        if not outcomes and job.phase is Phase.ARMED and pod is not None:
            await saving.follow(pod, job)

    async def _fail_lost_snapshots(self) -> None:
        """Say of the snapshots that this node has begun, and that no job is for, that they have failed."""
        jobs, _ = await trio.to_thread.run_sync(self._saving.jobs.jobs)
        under_way = {job.snapshot_id for job in jobs} | self._saving.busy.keys()
        listing = await self._objects.list(Kind.SNAPSHOT)
        for snapshot in listing.items:
            if not isinstance(snapshot, PodSnapshot) or snapshot.phase is not SnapshotPhase.AWAITING_CHECKPOINT:
                continue
            meta = snapshot.metadata
            if meta.annotations.get(ORIGIN_NODE) == self._node_name and meta.name not in under_way:
                said = "Interrupted: the agent ended during the save"
                await self._writer.failed(meta.namespace, meta.name, said)
                self._events.tell(What.SNAPSHOT_FAILED, "Interrupted", said, snapshot=meta.name)
