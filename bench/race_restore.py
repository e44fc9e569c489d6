"""The race's sandboxes: one that is saved, and the restores that are timed."""

import contextlib
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from agent.runtime import bundle
from agent.runtime.loading import PageLoading, find_completed
from agent.runtime.runsc import Runsc
from bench import race_workload
from bench.race_cells import Heap
from bench.server import NoAnswer, Server

IMAGE_FILES = ("checkpoint.img", "pages_meta.img", "pages.img")
_READY_S = 300.0
_HASH_S = 300.0
# gcsfuse takes four minutes for the large image; this finds what hangs.
_LOAD_S = 900.0
_SETTLE_S = 5.0
_SCRIPT = Path(race_workload.__file__)


@dataclass(frozen=True, slots=True)
class Image:
    """A saved heap: the directory that runsc wrote, and the hash of the heap (`hash HEX`)."""

    directory: Path
    heap: Heap
    memory_hash: str

    @property
    def bytes(self) -> int:
        return sum((self.directory / name).stat().st_size for name in IMAGE_FILES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """When things happened in one restore, on the clock of time.monotonic."""

    started_s: float
    answered_s: float
    loaded_s: float
    answer: str


class Sandbox:
    """A sandbox under way. `timing`: of its restore and its first request."""

    def __init__(self, runsc: Runsc, container_id: str, server: Server, timing: Timing) -> None:
        self._runsc = runsc
        self._container_id = container_id
        self._server = server
        self.timing = timing

    def memory_hash(self) -> str:
        """Have it read all its memory."""
        self._server.send("hash")
        return self._server.receive(timeout_s=_HASH_S)

    def loading(self) -> PageLoading | None:
        """Give gVisor's own account of the load."""
        return find_completed(self._runsc.debug_log(self._container_id))


def save(runsc: Runsc, directory: Path, heap: Heap) -> Image:
    """Run a heap, save it into `directory`/image, and end it."""
    image = directory / "image"
    container_id = str(uuid.uuid4())
    with Server() as server:
        try:
            runsc.run(container_id, _bundle(directory, heap), server.stdio)
            server.connected()
            server.receive(timeout_s=_READY_S)
            server.send("hash")
            memory_hash = server.receive(timeout_s=_HASH_S)
            runsc.checkpoint(container_id, image)
        finally:
            runsc.delete(container_id, force=True)
    return Image(image, heap, memory_hash)


@contextlib.contextmanager
def restored(runsc: Runsc, directory: Path, image: Path, heap: Heap, request: str) -> Iterator[Sandbox]:
    """Restore a heap from the files in `image`, ask it, wait until it is loaded; it is removed at the end of the block.

    The request lies in the pipe before runsc starts, so that the answer comes as soon as there can be one.

    Raises: AgentError when runsc fails or no answer comes.
    """
    container_id = str(uuid.uuid4())
    bundle_directory = _bundle(directory, heap)
    with Server() as server:
        server.send(request)
        try:
            yield Sandbox(runsc, container_id, server, _time(runsc, container_id, bundle_directory, image, server))
        finally:
            runsc.delete(container_id, force=True)
            if runsc.options.debug_log_dir is not None:  # each look at one sandbox's log reads them all
                for log in runsc.options.debug_log_dir.iterdir():
                    log.unlink()


def _time(runsc: Runsc, container_id: str, bundle_directory: Path, image: Path, server: Server) -> Timing:
    def load() -> float:
        try:
            runsc.restore(container_id, bundle_directory, image, server.stdio)
        finally:
            server.connected()  # also when it failed: then there is no output to wait for
        runsc.wait_restore(container_id, timeout_s=_LOAD_S)
        return time.monotonic()

    with ThreadPoolExecutor(1) as pool:
        started_s = time.monotonic()
        loaded = pool.submit(load)
        try:
            answer = server.receive(timeout_s=_LOAD_S)
        except NoAnswer:
            with contextlib.suppress(TimeoutError):
                loaded.result(_SETTLE_S)  # says why, when runsc knows
            raise
        except BaseException:
            runsc.delete(container_id, force=True)  # else the pool waits for all of it to be loaded
            raise
        answered_s = time.monotonic()
        return Timing(started_s=started_s, answered_s=answered_s, loaded_s=loaded.result(), answer=answer)


def _bundle(directory: Path, heap: Heap) -> Path:
    """Make the one bundle that a heap is saved and restored with: a restore needs the same spec."""
    rootfs = bundle.make_rootfs(directory / "rootfs")
    shutil.copyfile(_SCRIPT, rootfs.path / _SCRIPT.name)
    # -I -S: no site packages and no environment, which are the host's and differ.
    args = (os.fspath(bundle.python_interpreter()), "-IS", f"/{_SCRIPT.name}", heap.kind, str(heap.mib))
    return bundle.write_bundle(directory / "bundle", bundle.Container(args=args, rootfs=rootfs))
