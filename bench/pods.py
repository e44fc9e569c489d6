"""Pods of one or more servers in one sandbox: started, checkpointed, and restored from an image.

The order is gVisor's: the pod's first container is restored and nothing runs yet; each other one is created and
started, and the last start sets the whole pod going. All containers take their standard streams from the command that
starts them.
"""

import contextlib
import os
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from agent.runtime import bundle
from agent.runtime.arguments import GlobalOptions
from agent.runtime.runsc import Runsc
from bench.server import Heap, Server, server_container, server_rootfs

_READY_S = 120.0


def runsc_binary() -> Path:
    """Give the runsc that `setup.sh` chose, or $RUNSC."""
    found = Path(os.environ.get("RUNSC") or Path(__file__).parents[1] / ".tools" / "runsc")
    assert found.exists(), f"{found}: no runsc there; ./setup.sh makes one"
    return found


def runsc_below(directory: Path) -> Runsc:
    """Give a runsc with a root and logs of its own in `directory`; its user removes the root (`remove_root`)."""
    log = directory / "log"
    log.mkdir(parents=True)
    options = GlobalOptions(root=directory / "runsc", network="none", ignore_cgroups=True, debug_log_dir=log)
    return Runsc(runsc_binary(), options)


@dataclass(frozen=True, slots=True)
class Shape:
    """What a pod is made of: one server a heap; `readonly`: their root file systems."""

    heaps: tuple[Heap, ...]
    readonly: bool


@dataclass(frozen=True, slots=True)
class RunningPod:
    """A pod and the pipes to its servers; the first id is the sandbox's."""

    container_ids: tuple[str, ...]
    servers: tuple[Server, ...]

    @property
    def first(self) -> str:
        return self.container_ids[0]

    def ask_all(self, request: str) -> list[str]:
        """Ask every server the same and give their answers."""
        return [server.request(request) for server in self.servers]


@dataclass(frozen=True, slots=True)
class Image:
    """A checkpoint of a pod: its directory, and each server's memory hash at the save."""

    directory: Path
    shape: Shape
    memory_hashes: tuple[str, ...]


@contextlib.contextmanager
def started(runsc: Runsc, directory: Path, shape: Shape) -> Iterator[RunningPod]:
    """Run a new pod, its bundles in `directory`, until the end of the block."""
    with _pod(runsc, shape) as pod:
        for container_id, path, server in zip(
            pod.container_ids, _bundles(directory, shape, pod.container_ids), pod.servers, strict=True
        ):
            runsc.run(container_id, path, server.stdio)
            server.connected()
        for server in pod.servers:
            server.receive(timeout_s=_READY_S)
        yield pod


@contextlib.contextmanager
def restored(runsc: Runsc, directory: Path, shape: Shape, image: Path, *, direct: bool = False) -> Iterator[RunningPod]:
    """Restore a pod from the files in `image`; it loads in the background and is removed at the end of the block.

    A sandbox whose reads wait can't be removed: end those reads first.
    """
    with _pod(runsc, shape) as pod:
        for container_id, path, server in zip(
            pod.container_ids, _bundles(directory, shape, pod.container_ids), pod.servers, strict=True
        ):
            if container_id == pod.first:
                runsc.restore(container_id, path, image, server.stdio, background=True, direct=direct)
            else:
                runsc.run(container_id, path, server.stdio)
            server.connected()
        yield pod


def checkpoint(runsc: Runsc, directory: Path, shape: Shape) -> Image:
    """Run a pod, have it write `/kept` where it may, save it into `directory`/image, and remove it."""
    image = directory / "image"
    with started(runsc, directory, shape) as pod:
        if not shape.readonly:
            pod.ask_all("write /kept as it was")
        hashes = tuple(pod.ask_all("hash"))
        runsc.checkpoint(pod.first, image)
    return Image(image, shape, hashes)


@contextlib.contextmanager
def _pod(runsc: Runsc, shape: Shape) -> Iterator[RunningPod]:
    """Make ids and pipes, and in the end remove the containers, the first of them last."""
    with contextlib.ExitStack() as stack:
        ids = tuple(str(uuid.uuid4()) for _ in shape.heaps)
        for container_id in ids:
            stack.callback(runsc.delete, container_id, force=True)
        servers = tuple(stack.enter_context(Server()) for _ in shape.heaps)
        yield RunningPod(ids, servers)


def _bundles(directory: Path, shape: Shape, container_ids: Sequence[str]) -> list[Path]:
    paths = []
    for index, (container_id, heap) in enumerate(zip(container_ids, shape.heaps, strict=True)):
        rootfs = server_rootfs(directory / f"rootfs-{container_id}", readonly=shape.readonly)
        pod = None
        if len(shape.heaps) > 1:
            pod = bundle.Pod(sandbox_id=container_ids[0], name=f"server-{index}", first=index == 0)
        container = server_container(rootfs, heap, pod)
        paths.append(bundle.write_bundle(directory / f"bundle-{container_id}", container))
    return paths
