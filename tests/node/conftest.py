"""Sandboxes that run a program of a test's own, saved images, and stores in directories."""

import contextlib
import json
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from agent.node.course import Ending, Origin, Phase
from agent.node.jobs import Job
from agent.runtime import bundle
from agent.runtime.runsc import Runsc
from bench.pods import Image, Shape, checkpoint, runsc_below
from bench.server import Heap, Server

_READY_S = 120.0


@pytest.fixture
def runsc(tmp_path: Path) -> Iterator[Runsc]:
    """Give a runsc with a root of its own."""
    runsc = runsc_below(tmp_path)
    yield runsc
    runsc.remove_root()


@dataclass(frozen=True, slots=True)
class Pod:
    """A sandbox with one container, and its pipes."""

    sandbox_id: str
    server: Server
    bundle: Path


@dataclass(slots=True)
class Programs:
    """Starts and restores sandboxes that run a Python program; all are removed in the end."""

    runsc: Runsc
    directory: Path
    stack: contextlib.ExitStack

    def container(self, source: str, **other: object) -> bundle.Container:
        """Give the container that runs `source`; the same values give the same spec."""
        rootfs = bundle.make_rootfs(self.directory / "rootfs")
        args = (str(bundle.python_interpreter()), "-IS", "-u", "-c", source)
        return replace(bundle.Container(args=args, rootfs=rootfs), **other)  # type: ignore[arg-type]

    def start(self, container: bundle.Container) -> Pod:
        """Run it; what it prints first is still to be received."""
        pod = self._pod(container)
        self.runsc.run(pod.sandbox_id, pod.bundle, pod.server.stdio)
        pod.server.connected()
        return pod

    def restore(self, container: bundle.Container, image: Path) -> Pod:
        """Restore it."""
        pod = self._pod(container)
        self.runsc.restore(pod.sandbox_id, pod.bundle, image, pod.server.stdio)
        pod.server.connected()
        return pod

    def _pod(self, container: bundle.Container) -> Pod:
        sandbox_id = str(uuid.uuid4())
        path = bundle.write_bundle(self.directory / f"bundle-{sandbox_id}", container)
        server = self.stack.enter_context(Server())
        self.stack.callback(self.runsc.delete, sandbox_id, force=True)
        return Pod(sandbox_id, server, path)


def with_containers(checkpoint: bytes, count: int, *more: str) -> bytes:
    """Give a checkpoint.img, or its head, that has specs of more containers; so many containers were there."""
    size = int.from_bytes(checkpoint[8:16], "big")
    head = json.loads(checkpoint[16 : 16 + size])
    specs = json.loads(head["container_specs"])
    specs |= dict.fromkeys(more, specs["__no_name_0"])
    text = json.dumps(head | {"container_specs": json.dumps(specs), "container_count": str(count)}).encode()
    return checkpoint[:8] + len(text).to_bytes(8, "big") + text + checkpoint[16 + size :]


@pytest.fixture
def programs(runsc: Runsc, tmp_path: Path) -> Iterator[Programs]:
    """Give what starts sandboxes."""
    with contextlib.ExitStack() as stack:
        yield Programs(runsc, tmp_path, stack)


@pytest.fixture(scope="session")
def small_image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    """Give the image of a small pod, made once; it is not to be changed."""
    directory = tmp_path_factory.mktemp("small-image")
    runsc = runsc_below(directory)
    try:
        return checkpoint(runsc, directory, Shape((Heap(1, 8),), readonly=True))
    finally:
        runsc.remove_root()


@pytest.fixture
def image_copy(small_image: Image, tmp_path: Path) -> Path:
    """Give a copy of the small image that may be changed."""
    copy = tmp_path / "image-copy"
    copy_image(small_image.directory, copy)
    return copy


def copy_image(source: Path, target: Path) -> None:
    """Copy the files of an image."""
    target.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())


NewJob = Callable[..., Job]


@pytest.fixture
def new_job(tmp_path: Path) -> NewJob:
    """Make a job for a store in a directory."""

    def make(
        sandbox_id: str = "sandbox",
        *,
        ending: Ending = Ending.RESUME,
        origin: Origin = Origin.MANUAL,
        phase: Phase = Phase.BEGUN,
        metadata: Mapping[str, str] | None = None,
    ) -> Job:
        store = tmp_path / "store"
        store.mkdir(exist_ok=True)
        return Job(
            job_id=str(uuid.uuid4()),
            sandbox_id=sandbox_id,
            origin=origin,
            ending=ending,
            store_url=f"file://{store}",
            snapshot_id=str(uuid.uuid4()),
            push_id=str(uuid.uuid4()),
            phase=phase,
            metadata=metadata or {"pod": "ns/web"},
        )

    return make


@contextlib.contextmanager
def small_disk(directory: Path, size_bytes: int) -> Iterator[Path]:
    """Mount a file system that is soon full."""
    directory.mkdir()
    status = os.spawnlp(
        os.P_WAIT, "mount", "mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", os.fspath(directory)
    )
    assert status == 0
    try:
        yield directory
    finally:
        os.spawnlp(os.P_WAIT, "umount", "umount", "-l", os.fspath(directory))
