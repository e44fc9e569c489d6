"""An agent that is killed at a point of a save or of a restore: run as a process by test_agent_killed.py.

Arguments: directory, image, what (`resume` and `stop` are saves with that ending, or `restore`), point. A point is
`pod POINT` (`fake_pod`), `push`, `hold`, `answer`, `report`, `observe`, or `write N` for the N-th write of an object;
with `!` the process dies once it is done.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from agent.kube.objects import PodSnapshot, PodSnapshotManualTrigger, R
from agent.kube.port import Objects
from agent.node.checkpoint import StoreUploader
from agent.node.images import HeldImage
from agent.node.jobs import Job
from agent.node.node_runtime import SandboxKey
from agent.node.restore import Canary, NotRestored, Restored
from agent.wrapper.protocol import Report, Restore
from bench.pods import Image, Shape
from streamd.save.push import PushResult
from streamd.store.opening import open_store
from tests.agentd.conftest import FakeImages, FakeRuntime, make_node
from tests.node.fake_pod import dies_at


@dataclass(frozen=True, slots=True)
class DyingUploader:
    """Dies before or after its push."""

    inner: StoreUploader
    dies: str

    async def push(self, job: Job, image: Path) -> PushResult:
        dies_at("push", self.dies)
        result = await self.inner.push(job, image)
        dies_at("push!", self.dies)
        return result


class DyingObjects:
    """Objects, of which the so-many-th write is the last of this process."""

    def __init__(self, inner: Objects, dies: str) -> None:
        self._inner = inner
        self._dies = dies
        self._writes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def create(self, snapshot: PodSnapshot) -> PodSnapshot:
        self._before()
        created = await self._inner.create(snapshot)
        dies_at(f"write {self._writes}!", self._dies)
        return created

    async def update_status(self, resource: R) -> R:
        if not isinstance(resource, PodSnapshot | PodSnapshotManualTrigger):
            return await self._inner.update_status(resource)  # conditions of policies are no step of a save
        self._before()
        updated = await self._inner.update_status(resource)
        dies_at(f"write {self._writes}!", self._dies)
        return updated

    def _before(self) -> None:
        self._writes += 1
        dies_at(f"write {self._writes}", self._dies)


@dataclass(slots=True)
class DyingImages(FakeImages):
    """Dies before or after it gives an image."""

    dies: str = ""

    async def hold(self, snapshot_url: str, *, request_id: str, tenant: str, owner: str) -> HeldImage:
        dies_at("hold", self.dies)
        held = await FakeImages.hold(self, snapshot_url, request_id=request_id, tenant=tenant, owner=owner)
        dies_at("hold!", self.dies)
        return held


@dataclass(slots=True)
class DyingRuntime(FakeRuntime):
    """Dies before or after it sees that a pod is back."""

    dies: str = ""

    async def observe(
        self, key: SandboxKey, container_ids: Mapping[str, str], canary: Canary | None
    ) -> Restored | NotRestored:
        dies_at("observe", self.dies)
        found = await FakeRuntime.observe(self, key, container_ids, canary)
        dies_at("observe!", self.dies)
        return found


async def main() -> None:
    """Save or restore a pod, and die."""
    directory, image, what, point = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4]
    node = make_node(Image(image, Shape((), readonly=True), ()), directory)
    node.uploader = DyingUploader(StoreUploader(open_store, deadline_s=2.0), point)
    node.wrap = lambda objects: DyingObjects(objects, point)
    if point.startswith("pod "):
        node.runtime.pod("web").dies = point.removeprefix("pod ")
    if what == "restore":
        node.images = DyingImages(node.images.directory, may=node.images.may, dies=point)
        loads = node.runtime.loads
        node.runtime = DyingRuntime(directory, node.runtime.image, node.runtime.machine, loads=loads, dies=point)
    else:
        node.write_policy("manual", what)
    async with node.running() as agent:
        request = node.create("web")
        (directory / "bundle").write_text(request.bundle)
        await agent.decisions.create(request)
        answer = await agent.decisions.start(node.start("web"))
        if what == "restore":
            assert isinstance(answer, Restore), answer
            dies_at("answer!", point)
            await agent.decisions.report(Report(node.container("web"), 0, ""))
            dies_at("report!", point)
        else:
            node.write_trigger("now", "web")
        await trio.sleep(60)


if __name__ == "__main__":
    trio.run(main)
