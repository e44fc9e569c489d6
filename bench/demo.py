"""`make demo`: the main job, on this machine, with everything real but the distance to the store.

A server with a heap of known contents runs in a sandbox; it is checkpointed and pushed to a store, and comes back
twice: from a mount while the rest of the image is still in the store, and after a copy of the whole image. Both are
timed from the moment at which the server is wanted.

Everything that the demo makes is in one directory under $TMPDIR (or /var/tmp) and in processes that name it, so that
the end, an error, Ctrl-C and SIGTERM all clean up in the same way: sandboxes and mounts first, then the directory.
"""

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from rich.console import Console

from agent.errors import AgentError
from agent.runtime import bundle
from agent.runtime.arguments import GlobalOptions
from agent.runtime.loading import find_completed
from agent.runtime.runsc import Runsc
from bench import workload
from bench.commands import CommandFailed, Streamd
from bench.demo_report import Restored, Saved, is_good, show
from bench.emulator import Emulator
from bench.server import Heap, Server, server_container, server_rootfs
from streamd.errors import StreamdError

LATENCY_MS = 15
RATE_MB_S = 100
REQUESTS = 20
SEED = 20260905
SNAPSHOT_ID = "demo"
# The server's heap when nothing is said. A quarter of it is zero pages, which a checkpoint leaves out: 704 MiB make an
# image of more than 512 MiB.
HEAP_MIB = 704
_LOAD_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where the demo works and with what."""

    directory: Path
    runsc: Runsc
    streamd: Streamd
    store_url: str
    heap: Heap
    console: Console

    @property
    def mountpoint(self) -> Path:
        return self.directory / "mnt"

    @property
    def snapshot_url(self) -> str:
        base, question, query = self.store_url.partition("?")
        return f"{base}/{SNAPSHOT_ID}{question}{query}"

    def say(self, command: str) -> None:
        """Show a step as the command that a user would type."""
        self.console.print(f"[dim]$[/] {command}")


def main() -> int:
    """Run the demo; 0 when both restores gave the memory back."""
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--store", choices=("file", "gs"), default="file")
    parser.add_argument("--heap", type=int, default=HEAP_MIB, metavar="MIB")
    options = parser.parse_args()
    console = Console(soft_wrap=True, highlight=False, width=None if sys.stdout.isatty() else 110)
    interrupts = _Interrupts()
    try:
        with _place(options.store, Heap(SEED, options.heap), console, interrupts) as place:
            return _demo(place, "an emulator on this machine, as fast as it goes" if options.store == "gs" else _link())
    except KeyboardInterrupt:
        console.print("interrupted; everything is cleaned up")
        return 130
    except (AgentError, StreamdError, CommandFailed, OSError, subprocess.SubprocessError) as error:
        console.print("[red]demo failed:[/]", str(error), markup=True)
        return 1


class _Interrupts:
    """SIGINT, SIGTERM, SIGHUP as KeyboardInterrupt; held back while something has no owner yet, and in the clean-up."""

    def __init__(self) -> None:
        self._held = False
        self._came = False
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._held:
            self._came = True
        else:
            raise KeyboardInterrupt

    def hold(self) -> None:
        """From here on a signal is only remembered."""
        self._held = True

    def release(self) -> None:
        """Let signals through again, and one that came meanwhile."""
        self._held = False
        if self._came:
            raise KeyboardInterrupt


def _link() -> str:
    return f"a directory that answers like one far away: {LATENCY_MS} ms latency, {RATE_MB_S} MB/s (artificial)"


@contextlib.contextmanager
def _place(store: str, heap: Heap, console: Console, interrupts: _Interrupts) -> Iterator[Place]:
    """Make the directory, the store and the runsc root, and take everything away in the end."""
    if os.geteuid() != 0:
        raise AgentError("sandboxes and mounts need root")
    binary = Path(os.environ.get("RUNSC") or Path(__file__).parents[1] / ".tools" / "runsc")
    if not binary.exists():
        raise AgentError(f"{binary}: no runsc there; ./setup.sh makes one")
    parent = os.environ.get("TMPDIR") or "/var/tmp"  # on a disk where /tmp may be memory
    needed = 4 * heap.blocks << 20
    if shutil.disk_usage(parent).free < needed:
        raise AgentError(f"{parent}: needs {needed >> 20} MiB of free space (TMPDIR names another place)")
    with contextlib.ExitStack() as stack:
        interrupts.hold()
        directory = Path(tempfile.mkdtemp(prefix="streamd-demo-", dir=parent))
        stack.callback(shutil.rmtree, directory)
        env = {}
        store_url = f"file://{directory}/store?latency={LATENCY_MS}ms&rate={RATE_MB_S}MB/s"
        if store == "gs":
            emulator = stack.enter_context(Emulator())
            env["STORAGE_EMULATOR_HOST"] = emulator.address
            store_url = f"gs://{emulator.bucket}/snapshots"
        for name in ("log", "mnt", "store"):
            (directory / name).mkdir()
        options = GlobalOptions(
            root=directory / "runsc", network="none", ignore_cgroups=True, debug_log_dir=directory / "log"
        )
        place = Place(directory, Runsc(binary, options), Streamd(directory / "streamd", env), store_url, heap, console)
        stack.callback(place.streamd.stop_strays)
        stack.callback(place.runsc.remove_root)
        # A sandbox that waits for the mount can't be killed: the mount goes first.
        stack.callback(_forced_unmount, place)
        stack.callback(interrupts.hold)
        # An interrupt unwinds the stack from here, in reverse order.
        interrupts.release()
        yield place


def _forced_unmount(place: Place) -> None:
    with contextlib.suppress(CommandFailed, subprocess.SubprocessError):  # stop_strays is the second way
        place.streamd.unmount(place.mountpoint, force=True)


def _demo(place: Place, link: str) -> int:
    console = place.console
    console.print(f"[bold]store:[/] {link}")
    saved = _save(place)
    lazy = _restore_from_mount(place)
    copied = _restore_from_copy(place)
    show(console, link, saved, lazy, copied)
    return 0 if is_good(saved, lazy, copied) else 1


def _save(place: Place) -> Saved:
    """Run the server, checkpoint it, push the image, end the server and remove the image."""
    image = place.directory / "image"
    container_id = str(uuid.uuid4())
    heap_bytes = place.heap.blocks * workload.BLOCK_BYTES
    place.say(f"runsc run SERVER      # fills {heap_bytes >> 20} MiB of memory")
    with Server() as server:
        place.runsc.run(container_id, _bundle(place, "original"), server.stdio)
        server.connected()
        server.receive(timeout_s=120)
        memory_hash = server.request("hash", timeout_s=120)
        place.say("runsc checkpoint --leave-running --exclude-committed-zero-pages --image-path IMAGE SERVER")
        checkpoint_s = _timed(lambda: place.runsc.checkpoint(container_id, image))
        place.runsc.delete(container_id, force=True)
    place.say(f"streamd push IMAGE '{place.store_url}' --id {SNAPSHOT_ID}")
    began = time.monotonic()
    pushed = place.streamd.run("push", str(image), place.store_url, "--id", SNAPSHOT_ID)
    push_s = time.monotonic() - began
    shutil.rmtree(image)
    return Saved(
        heap_bytes=heap_bytes,
        image_bytes=int(pushed["image_bytes"]),
        stored_bytes=int(pushed["stored_bytes"]),
        checkpoint_s=checkpoint_s,
        push_s=push_s,
        memory_hash=memory_hash,
    )


def _restore_from_mount(place: Place) -> Restored:
    began = time.monotonic()
    place.say(f"streamd mount '{place.snapshot_url}' MNT")
    place.streamd.run("mount", place.snapshot_url, str(place.mountpoint))
    restored = _restore(place, place.mountpoint, began, mounted=True)
    place.say("streamd umount MNT")
    place.streamd.unmount(place.mountpoint)
    return restored


def _restore_from_copy(place: Place) -> Restored:
    copy = place.directory / "copy"
    began = time.monotonic()
    place.say(f"streamd pull '{place.snapshot_url}' COPY")
    place.streamd.run("pull", place.snapshot_url, str(copy))
    restored = _restore(place, copy, began, mounted=False)
    shutil.rmtree(copy)
    return restored


def _restore(place: Place, image: Path, began: float, *, mounted: bool) -> Restored:
    """Restore the server, which was wanted at `began` (monotonic); ask it, wait for its memory, compare, end it."""
    ready_s = time.monotonic() - began
    container_id = str(uuid.uuid4())
    place.say(f"runsc restore --background --detach --image-path {'MNT' if mounted else 'COPY'} SERVER")
    with Server() as server, ThreadPoolExecutor(1) as pool:
        bundle_directory = _bundle(place, image.name)
        place.runsc.restore(container_id, bundle_directory, image, server.stdio)
        server.connected()
        running_s = time.monotonic() - began
        loaded = pool.submit(_loaded, place.runsc, container_id, began)
        answers = [server.request("touch 0")]
        first_s = time.monotonic() - began
        at_first = place.streamd.status(place.mountpoint) if mounted else {}
        answers += [server.request(f"touch {key}") for key in range(1, REQUESTS)]
        many_s = time.monotonic() - began
        loaded_s = loaded.result()
        memory_hash = server.request("hash", timeout_s=120)
        at_end = place.streamd.status(place.mountpoint) if mounted else {}
        place.runsc.delete(container_id, force=True)
    expected = [str(workload.touch_crc(place.heap.seed, place.heap.blocks, key)) for key in range(REQUESTS)]
    fault = at_end["reads"]["fault"] if mounted else {}
    everything = 0 if mounted else place.streamd.run("inspect", place.snapshot_url)["stored_bytes"]
    return Restored(
        ready_s=ready_s,
        running_s=running_s,
        first_s=first_s,
        many_s=many_s,
        requests=REQUESTS,
        loaded_s=loaded_s,
        read_bytes=sum(kind["bytes"] for kind in at_first["reads"].values()) if mounted else None,
        fetched_bytes=at_first["origin_bytes"] if mounted else everything,
        origin_bytes=at_end["origin_bytes"] if mounted else everything,
        faults=fault["reads"] if mounted else None,
        fault_wait_s=fault["wait_s"] if mounted else 0.0,
        longest_fault_s=fault["longest_s"] if mounted else 0.0,
        loading=find_completed(place.runsc.debug_log(container_id)),
        answers_right=answers == expected,
        memory_hash=memory_hash,
    )


def _loaded(runsc: Runsc, container_id: str, began: float) -> float:
    runsc.wait_restore(container_id, timeout_s=_LOAD_TIMEOUT_S)
    return time.monotonic() - began


def _bundle(place: Place, name: str) -> Path:
    rootfs = server_rootfs(place.directory / f"rootfs-{name}")
    return bundle.write_bundle(place.directory / f"bundle-{name}", server_container(rootfs, place.heap))


def _timed(action: Callable[[], None]) -> float:
    began = time.monotonic()
    action()
    return time.monotonic() - began


if __name__ == "__main__":
    sys.exit(main())
