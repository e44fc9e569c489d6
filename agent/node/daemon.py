"""`snapagent daemon`: joins the parts of the node agent, in one nursery that nothing outlives.

    the wrapper's questions → `decisions` → restores (`restoring`) and saves (`saving`)
    the objects' watch      → `known_objects` → triggers (`triggers`), retention (`keeping`), conditions (`standing`),
                              `collecting`
    what was left over      → `recovery`
    people                  → `status_socket`

It hears of containers by the wrapper's calls, not by containerd's events: only the wrapper can wait for an answer, is
asked before the sandbox exists, and works with any caller of runsc; events come when it is too late to decide.

Each task is guarded: what fails in one pod's save or restore is an event, and ends nothing else. At SIGTERM nothing new
is decided (wrappers start plainly), saves under way have `stop_s` to end, and are undone then; what must go on after
that is on disk.
"""

import signal
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress

import structlog
import trio

from agent.config import Config
from agent.errors import AgentError
from agent.kube.directory import ObjectDirectory
from agent.kube.local import LocalObjects
from agent.kube.port import Objects
from agent.matching.facts import MachineFacts
from agent.node.checkpoint import Uploader
from agent.node.collecting import Collecting
from agent.node.decisions import NodeDecisions
from agent.node.events import Events, What
from agent.node.hand_triggers import HandTriggers
from agent.node.images import Images, StreamdImages
from agent.node.jobs import JobDirectory
from agent.node.keeping import Keeping
from agent.node.known_objects import KnownObjects
from agent.node.metrics import metrics_text
from agent.node.node_runtime import NodeRuntime, RunscRuntime
from agent.node.pod_manifests import LocalPods
from agent.node.pods import Pods
from agent.node.pods_here import PodsHere
from agent.node.recovery import Recovery
from agent.node.restore_records import RestoreRecords
from agent.node.restoring import Restoring
from agent.node.runtime_requests import RuntimeRequests
from agent.node.saving import Saving
from agent.node.snapshot_writer import SnapshotWriter
from agent.node.standing import Standings
from agent.node.status import Under, described
from agent.node.status_socket import Json, StatusSocket
from agent.node.store_access import NamespaceUploader, StoreAccess
from agent.node.triggers import Triggers
from streamd.daemon.service_manager import Notifier
from streamd.errors import StreamdError

log = structlog.get_logger(__name__)

_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# Tasks of pods and saves at a time; some for each pod of a node.
_TASKS_MAX = 10_000
# How long something that must not end (a watch) rests after it has failed.
_AGAIN_S = 5.0


class Agent:
    """The parts, joined; `run` them. Outside systems come by their ports."""

    def __init__(
        self,
        config: Config,
        *,
        objects: Objects,
        runtime: NodeRuntime,
        images: Images,
        uploader: Uploader,
        pods: Pods,
    ) -> None:
        self._config = config
        self._objects = objects
        self._runtime = runtime
        self._images = images
        self._nursery: trio.Nursery | None = None
        self._tasks = 0
        self.events = Events()
        self.known = KnownObjects(self.events)
        self.here = PodsHere()
        self.writer = SnapshotWriter(objects)
        state = config.state_directory
        records = RestoreRecords(state / "restores.json")
        if records.problem:
            self.events.tell(What.PROBLEM, "restore records", records.problem)
        self.restoring = Restoring(
            images,
            runtime,
            records,
            self.writer,
            self.events,
            image_s=config.deadlines.image_s,
            report_s=config.deadlines.report_s,
        )
        self.saving = Saving(
            JobDirectory(state / "jobs"),
            uploader,
            runtime,
            self.known,
            self.writer,
            self.events,
            node_name=config.node_name,
        )
        self.decisions = NodeDecisions(
            configured=config.runtime,
            runtime=runtime,
            objects=objects,
            known=self.known,
            pods=pods,
            here=self.here,
            restoring=self.restoring,
            saving=self.saving,
            events=self.events,
            spawn=self.spawn,
        )
        self.triggers = Triggers(
            self.known, self.here, runtime, self.saving, self.writer, self.events, spawn=self.spawn
        )
        self.recovery = Recovery(
            objects,
            runtime,
            pods,
            self.here,
            self.saving,
            self.restoring,
            self.writer,
            self.events,
            node_name=config.node_name,
            runsc=str(config.runtime.runsc),
            spawn=self.spawn,
        )
        self.keeping = Keeping(
            objects,
            self.known,
            images,
            self.writer,
            self.events,
            used=lambda: frozenset(plan.snapshot for plan in self.restoring.plans.values()),
            look_every_s=config.look_every_s,
        )
        self.standings = Standings(self.known, self.here, images, self.writer, self.events)
        self.collecting = Collecting(images, self.known, self.events, every_s=config.collect_every_s)
        self._by_hand = HandTriggers(
            config.objects_directory, objects, self.known, self.here, self.events, waiting=self.triggers.problems
        )

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Do everything but answer sockets, until cancelled. Started when what a former life has left is known."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            try:
                nursery.start_soon(self._on_and_on, "watch", lambda: self.known.follow(self._objects))
                await self._guarded("recovery", self.recovery.at_start)
                nursery.start_soon(self._guarded, "start", self._tell_problems)
                nursery.start_soon(self._on_and_on, "recovery", self.recovery.run)
                nursery.start_soon(self._on_and_on, "triggers", self._act_on_triggers)
                nursery.start_soon(self._on_and_on, "retention", self.keeping.run)
                nursery.start_soon(self._on_and_on, "conditions", self.standings.run)
                nursery.start_soon(self._on_and_on, "collection", self.collecting.run)
                task_status.started()
                await trio.sleep_forever()
            finally:
                self._nursery = None

    def spawn(self, name: str, run: Callable[[], Awaitable[None]]) -> None:
        """Run something beside everything else, until it ends or the agent does."""
        if self._nursery is None or self._tasks >= _TASKS_MAX:
            raise AgentError(f"{name}: the agent ends, or has too much to do")
        self._tasks += 1
        self._nursery.start_soon(self._spawned, name, run)

    async def end(self) -> None:
        """Let nothing new begin, and give saves that are under way some time."""
        self.decisions.is_ending = True
        with trio.move_on_after(self._config.deadlines.stop_s):
            while self.saving.is_saving:
                await trio.sleep(0.1)

    # For `status_socket`

    async def status(self) -> Json:
        """Describe the agent."""
        machine: MachineFacts | None = None
        with suppress(AgentError):
            machine = await self._runtime.facts()
        return described(
            self._config.node_name,
            machine,
            self.known,
            self.here,
            self._under(),
            self.events,
            problems=await self._problems(),
            is_ending=self.decisions.is_ending,
        )

    def metrics(self) -> str:
        """Give the metrics."""
        return metrics_text(self.known, self.here, self._under(), self.events)

    async def trigger(self, target: str, namespace: str, *, stop: bool) -> Json:
        """Write a trigger."""
        return await self._by_hand.trigger(target, namespace, stop=stop)

    def triggered(self, namespace: str, name: str) -> Json:
        """Say what has become of it."""
        return self._by_hand.triggered(namespace, name)

    async def untrigger(self, namespace: str, name: str) -> Json:
        """Take it back."""
        return await self._by_hand.untrigger(namespace, name)

    async def remove(self, namespace: str, name: str) -> Json:
        """Begin to delete a snapshot."""
        await self.keeping.remove(namespace, name)
        return {"namespace": namespace, "name": name}

    async def _tell_problems(self) -> None:
        for problem in await self._problems():
            self.events.tell(What.PROBLEM, "node", problem)

    async def _problems(self) -> tuple[str, ...]:
        """Say what this node lacks, without which no pod is saved or restored, or this one isn't."""
        found = []
        try:
            await self._runtime.facts()
        except AgentError as error:
            found.append(f"no pod is saved or restored without runsc, which [runtime] runsc names: {error}")
        away = await self._images.unavailable()
        if away:
            found.append(f"pods start cold without streamd (`systemctl start streamd`): {away}")
        for (namespace, name), why in self.triggers.problems.items():
            found.append(f"trigger {namespace}/{name} waits, and is tried again: {why}")
        return tuple(found)

    def _under(self) -> Under:
        restores = tuple((str(pod.who), plan.snapshot) for pod, plan in self.restoring.plans.items())
        return Under(saves=self.saving.busy, restores=restores, uncollected=self.collecting.problems)

    # Tasks

    async def _act_on_triggers(self) -> None:
        await self._by_hand.at_start()
        await self.triggers.run()

    async def _spawned(self, name: str, run: Callable[[], Awaitable[None]]) -> None:
        try:
            await self._guarded(name, run)
        finally:
            self._tasks -= 1

    async def _guarded(self, name: str, run: Callable[[], Awaitable[None]]) -> None:
        """Run something whose failure is its own."""
        try:
            await run()
        except (AgentError, StreamdError, OSError) as error:
            self.events.tell(What.PROBLEM, type(error).__name__, f"{name}: {error}")
        except Exception:
            log.exception("a task failed", task=name)
            self.events.tell(What.PROBLEM, "bug", f"{name}: internal error; the log has the details")

    async def _on_and_on(self, name: str, run: Callable[[], Awaitable[None]]) -> None:
        """Run something that never ends by itself, again after a rest when it fails."""
        while True:
            await self._guarded(name, run)
            await trio.sleep(_AGAIN_S)


def assembled(config: Config) -> Agent:
    """Put an agent together over runsc, streamd's daemon and the local directories."""
    config.state_directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    access = StoreAccess(config.credentials)
    agent = Agent(
        config,
        objects=LocalObjects(ObjectDirectory(config.objects_directory, config.state_directory)),
        runtime=RunscRuntime(config),
        images=StreamdImages(config.streamd_run_directory, access),
        uploader=NamespaceUploader(access, deadline_s=config.deadlines.store_s),
        pods=LocalPods(config.objects_directory / "pods"),
    )
    known = agent.known
    access.has_snapshots = lambda store_url: not known.is_synced or known.index.has_store(store_url)
    return agent


def run_daemon(config: Config, notifier: Notifier) -> None:
    """Run the agent until a signal ends it. Raises: `Refused` when another one answers; `StreamdError`, OSError."""
    trio.run(_run, config, notifier)


async def _run(config: Config, notifier: Notifier) -> None:
    agent = assembled(config)
    with ExitStack() as stack:
        signals = stack.enter_context(trio.open_signal_receiver(*_ENDING_SIGNALS))
        requests = stack.enter_context(RuntimeRequests(config.runtime_socket))
        people = stack.enter_context(StatusSocket(config.status_socket))
        async with trio.open_nursery() as nursery:
            await nursery.start(agent.run)
            nursery.start_soon(requests.serve, agent.decisions)
            nursery.start_soon(people.serve, agent)
            nursery.start_soon(notifier.keep_alive)
            notifier.ready()
            log.info("agent serves", socket=str(config.runtime_socket), node=config.node_name)
            async for number in signals:
                log.info("ending on a signal", signal=signal.Signals(number).name)
                break
            notifier.stopping()
            await agent.end()
            nursery.cancel_scope.cancel()
