"""An agent whose outside is fake: sandboxes that are files, an image server in memory. Objects and stores are real."""

import json
import shutil
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import trio

from agent.config import Config, Deadlines, RuntimeConfig
from agent.errors import AgentError
from agent.kube.conditions import ConditionType, condition
from agent.kube.directory import ObjectDirectory
from agent.kube.local import LocalObjects
from agent.kube.objects import Kind, PodSnapshot, PodSnapshotManualTrigger
from agent.kube.port import Objects
from agent.matching.facts import Architecture, MachineFacts
from agent.node.checkpoint import StoreUploader, Uploader
from agent.node.course import Found
from agent.node.daemon import Agent
from agent.node.events import Event, What
from agent.node.images import HeldImage, ImageUnavailable, Lease, StreamdImages
from agent.node.node_runtime import SandboxKey
from agent.node.pod_manifests import LocalPods
from agent.node.restore import Canary, NotRestored, Restored
from agent.node.restore_files import image_facts
from agent.node.sandbox import NO_CONTAINERS
from agent.node.workload_trigger import TriggerEnded
from agent.runtime.arguments import GpuTool
from agent.runtime.control_socket import Savings
from agent.runtime.runsc import ContainerState
from agent.runtime.spec_rules import saved_specs
from agent.wrapper.protocol import Container, ContainerKind, Create, PodName, Start
from bench.agent_node import POLICY, STORAGE
from bench.pods import Image
from streamd.errors import Exit, NotFound
from streamd.save.lifecycle import CollectResult
from streamd.snapshot.names import CHECKPOINT
from streamd.store.catalog import open_snapshot
from streamd.store.opening import open_store, split_snapshot_url
from tests.node.conftest import small_image as small_image
from tests.node.fake_pod import FakePod

_HANG_S = 60.0


@dataclass(slots=True)
class FakeRuntime:
    """Sandboxes that live in files of a directory, and so longer than an agent. `asks`: an application's save."""

    directory: Path
    image: Image
    machine: MachineFacts
    pods: dict[str, FakePod] = field(default_factory=dict)
    bundles: dict[str, Path] = field(default_factory=dict)
    outcome: Restored | NotRestored = field(default_factory=lambda: Restored(Savings(1.0, 2.0)))
    observed: dict[str, trio.Event] = field(default_factory=dict)
    asked: dict[str, trio.Event] = field(default_factory=dict)
    loads: trio.Event = field(default_factory=trio.Event)
    gpu_tool: GpuTool | None = None
    lacks: str = ""
    looks: int = 0  # for processes of sandboxes

    @property
    def roots(self) -> tuple[Path, ...]:
        return (self.directory / "runsc",)

    def key(self, root: str, sandbox_id: str) -> SandboxKey | None:
        return SandboxKey(Path(root), sandbox_id) if Path(root) in self.roots else None

    async def facts(self) -> MachineFacts:
        if self.lacks:
            raise AgentError(self.lacks)
        return self.machine

    async def containers(self) -> tuple[tuple[SandboxKey, ContainerState], ...]:
        return tuple(
            (SandboxKey(self.roots[0], name), ContainerState(name, "running", 1, bundle))
            for name, bundle in self.bundles.items()
            if self.pod(name).now is not Found.GONE
        )

    def pod(self, sandbox_id: str) -> FakePod:
        """Give a sandbox, a running one if it was never heard of."""
        if sandbox_id not in self.pods:
            self.pods[sandbox_id] = FakePod(self.directory / f"pod-{sandbox_id}", self.image.directory)
        return self.pods[sandbox_id]

    def sandbox(self, key: SandboxKey, *, gpus: int = 0, container_ids: Mapping[str, str] = NO_CONTAINERS) -> FakePod:
        return self.pod(key.sandbox_id)

    async def pid(self, key: SandboxKey) -> int | None:
        self.looks += 1
        return None if self.pod(key.sandbox_id).now is Found.GONE else 4711

    async def preflight(self, key: SandboxKey) -> None:
        raise AssertionError("no pod here has GPUs")

    async def await_written(
        self, key: SandboxKey, image: Path, *, gpus: int, container_ids: Mapping[str, str]
    ) -> TriggerEnded:
        asked = self.asked.setdefault(key.sandbox_id, trio.Event())
        await asked.wait()
        if self.pod(key.sandbox_id).now is Found.GONE:
            return TriggerEnded(False)
        shutil.copytree(self.image.directory, image, dirs_exist_ok=True)
        return TriggerEnded(True)

    async def observe(
        self, key: SandboxKey, container_ids: Mapping[str, str], canary: Canary | None
    ) -> Restored | NotRestored:
        self.observed.setdefault(key.sandbox_id, trio.Event()).set()
        await self.loads.wait()
        return self.outcome

    async def canary(self, key: SandboxKey, container_ids: Mapping[str, str]) -> Canary:
        return Canary({})

    def has_whole_state(self, checkpoint_img: Path) -> bool:
        return True


@dataclass(slots=True)
class FakeLease:
    """A lease that notes that it was closed."""

    is_held: bool = True

    def close(self) -> None:
        self.is_held = False


@dataclass(slots=True)
class FakeImages:
    """streamd: serves any snapshot that is in its store from the same directory, when it `may`."""

    directory: Path
    may: trio.Event = field(default_factory=trio.Event)
    problem: str = ""
    problem_is: Exit = Exit.FAILED
    away: str = ""
    leases: list[FakeLease] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    probed: list[str] = field(default_factory=list)
    removed: list[tuple[str, str]] = field(default_factory=list)
    collected: list[str] = field(default_factory=list)

    async def hold(self, snapshot_url: str, *, request_id: str, tenant: str, owner: str) -> HeldImage:
        self.asked.append(snapshot_url)
        if self.problem:
            raise ImageUnavailable(self.problem, self.problem_is)
        await self.may.wait()
        store_url, snapshot_id = split_snapshot_url(snapshot_url)
        store = open_store(store_url)
        try:
            manifest = open_snapshot(store, snapshot_id).manifest
        finally:
            store.close()
        self.leases.append(FakeLease())
        return HeldImage(self.directory, image_facts(self.directory, manifest), self.leases[-1])

    async def hold_again(self, *, sandbox_pid: int, owner: str) -> Lease | None:
        self.leases.append(FakeLease())
        return self.leases[-1]

    async def remove(self, snapshot_url: str, *, tenant: str) -> None:
        from streamd.save.lifecycle import remove

        self.removed.append((snapshot_url, tenant))
        store_url, snapshot_id = split_snapshot_url(snapshot_url)
        store = open_store(store_url)
        try:
            remove(store, snapshot_id)
        except NotFound:
            pass
        finally:
            store.close()

    async def unavailable(self) -> str:
        return self.away

    async def probe(self, store_url: str) -> None:
        self.probed.append(store_url)
        await StreamdImages(self.directory).probe(store_url)

    async def collect(self, store_url: str, *, every_s: float) -> CollectResult | None:
        self.collected.append(store_url)
        if self.problem:
            raise ImageUnavailable(self.problem)
        return CollectResult(objects_deleted=3, bytes_deleted=4096)


@dataclass(slots=True)
class Node:
    """A node of a test; `agent` is the one that runs now. Its state is on disk, so another may follow."""

    directory: Path
    runtime: FakeRuntime
    images: FakeImages
    config: Config
    spec: dict[str, Any]
    agent: Agent | None = None
    uploader: Uploader = field(default_factory=lambda: StoreUploader(open_store, deadline_s=2.0))
    wrap: Callable[[Objects], Objects] = lambda objects: objects

    def objects(self) -> Objects:
        """Open the objects, as the agent does."""
        files = ObjectDirectory(self.config.objects_directory, self.config.state_directory)
        return self.wrap(LocalObjects(files, look_every_s=0.02))

    @property
    def store_url(self) -> str:
        return f"file://{self.directory}/store"

    @asynccontextmanager
    async def running(self, *, synced: bool = True) -> AsyncIterator[Agent]:
        """Run an agent; leaving the block is its death at that moment, as far as its tasks are concerned."""
        agent = Agent(
            self.config,
            objects=self.objects(),
            runtime=self.runtime,
            images=self.images,
            uploader=self.uploader,
            pods=LocalPods(self.config.objects_directory / "pods"),
        )
        self.agent = agent
        async with trio.open_nursery() as nursery:
            await nursery.start(agent.run)
            if synced:
                await agent.known.synced()
            yield agent
            nursery.cancel_scope.cancel()

    def write(self, name: str, text: str) -> None:
        """Put a file into the objects directory, whole."""
        path = self.config.objects_directory / name
        path.parent.mkdir(exist_ok=True)
        temporary = path.with_name(f".{path.name}.new")
        temporary.write_text(text)
        temporary.replace(path)

    def write_policy(self, trigger: str, post_checkpoint: str = "resume", *, more: str = "") -> None:
        """Write a storage config and a policy for pods with app=web."""
        text = STORAGE.format(location=f"{{file: {{directory: {self.directory}/store}}}}")
        text += POLICY.format(trigger=trigger, post_checkpoint=post_checkpoint, namespace="default")
        self.write("policy.yaml", text + more)

    def write_trigger(self, name: str, pod: str, **annotations: str) -> None:
        """Write a manual trigger."""
        document = {
            "apiVersion": "podsnapshot.gke.io/v1",
            "kind": Kind.TRIGGER.value,
            "metadata": {"name": name, "namespace": "default", "annotations": annotations},
            "spec": {"targetPod": pod},
        }
        self.write(f"{name}.yaml", json.dumps(document))

    def create(self, name: str, **members: Any) -> Create:
        """Make a bundle of the saved spec with other members, and the question at its create."""
        spec = {**json.loads(json.dumps(self.spec)), **members}
        spec["annotations"] = {
            **(spec.get("annotations") or {}),
            "podsnapshot.gke.io/pod-labels": "app=web",
            **(members.get("annotations") or {}),
        }
        bundle = self.directory / f"bundle-{name}-{uuid.uuid4()}"
        bundle.mkdir()
        (bundle / "config.json").write_text(json.dumps(spec))
        self.runtime.bundles[name] = bundle
        return Create(self.container(name), str(bundle), ContainerKind.SINGLE, "", name, PodName())

    def container(self, name: str) -> Container:
        return Container(name, str(self.config.runtime.runsc), str(self.runtime.roots[0]))

    def start(self, name: str) -> Start:
        return Start(self.container(name))

    def events(self, what: What) -> list[Event]:
        """Give the events of a kind of the agent that runs."""
        assert self.agent is not None
        return [event for event in self.agent.events.last() if event.what is what]

    async def event(self, what: What, *, count: int = 1) -> Event:
        """Wait for the so-many-th event of a kind."""
        await until(lambda: len(self.events(what)) >= count, f"{count} × {what}")
        return self.events(what)[count - 1]

    def snapshots(self) -> list[PodSnapshot]:
        """Read the snapshots' objects as they are on disk."""
        directory = ObjectDirectory(self.config.objects_directory, self.config.state_directory)
        return [each for each in directory.list(Kind.SNAPSHOT).items if isinstance(each, PodSnapshot)]

    def triggered(self, name: str) -> tuple[str, str, str]:
        """Read a trigger's status, reason and message as they are on disk; empty ones while it is pending."""
        directory = ObjectDirectory(self.config.objects_directory, self.config.state_directory)
        try:
            trigger = directory.get(PodSnapshotManualTrigger, name, "default")
        except AgentError:
            return "", "", ""
        found = condition(trigger.status.conditions, ConditionType.TRIGGERED)
        return ("", "", "") if found is None else (found.status.value, found.reason, found.message)

    def jobs(self) -> list[Path]:
        """Give what is left in the directory of jobs."""
        path = self.config.state_directory / "jobs"
        return sorted(path.iterdir()) if path.exists() else []

    async def saved(self, name: str = "origin") -> str:
        """Have a snapshot made of a pod by its own word, under an agent of its own; give the snapshot's name."""
        self.write_policy("workload")
        async with self.running() as agent:
            await agent.decisions.create(self.create(name))
            await agent.decisions.start(self.start(name))
            self.runtime.asked.setdefault(name, trio.Event()).set()
            snapshot = (await self.event(What.SNAPSHOT_READY)).snapshot
            await until(lambda: agent.known.index.namespace("default").snapshots.keys() == {snapshot}, "the index")
        self.runtime.asked.clear()
        return snapshot


async def until(condition: Callable[[], object], what: str) -> None:
    """Wait for what must come; the deadline finds a hang."""
    with trio.move_on_after(_HANG_S):
        while not condition():
            await trio.sleep(0.005)
        return
    raise AssertionError(f"{what} did not come")


@pytest.fixture
def node(small_image: Image, tmp_path: Path) -> Node:
    return make_node(small_image, tmp_path)


def make_node(small_image: Image, tmp_path: Path) -> Node:
    """Make a node below a directory, or go on with the one that is there."""
    head = (small_image.directory / CHECKPOINT).read_bytes()[: 1 << 20]
    spec = saved_specs(head)["__no_name_0"]
    for name in ("objects", "store", "state"):
        (tmp_path / name).mkdir(mode=0o700, exist_ok=True)
    machine = MachineFacts(
        architecture=Architecture.AMD64,
        cpu_vendor="AuthenticAMD",
        cpu_features=frozenset({"avx", "sse2"}),
        runsc_version="VERSION_MISSING",
        runsc_sha256="ab" * 32,
        network="none",
    )
    runtime = FakeRuntime(tmp_path, small_image, machine)
    runtime.loads.set()
    images = FakeImages(small_image.directory)
    images.may.set()
    config = replace(
        Config(),
        objects_directory=tmp_path / "objects",
        state_directory=tmp_path / "state",
        node_name="node-1",
        runtime=RuntimeConfig(runsc=tmp_path / "runsc-binary", roots=runtime.roots),
        deadlines=Deadlines(image_s=0.2, report_s=_HANG_S, stop_s=2.0),
        look_every_s=0.05,
    )
    return Node(tmp_path, runtime, images, config, dict(spec))
