"""The ways to get at an image that lies in the store: each a context manager that gives a directory for runsc to read.

A contestant begins when its block is entered; everything it left on this machine is gone when the block ends, but for
what `Ground` is meant to keep: the daemon of the last learned restore and its cache, which the warm one starts from.
Cold is cold by construction: who reads the store finds nothing of the image on this machine, since daemons, caches,
mounts and copies are made anew in directories of their own.

streamd is asked as an agent asks it: a daemon that runs already, through its client, in this process.
"""

import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from agent.errors import AgentError
from bench.commands import CommandFailed, Streamd
from bench.daemons import Daemon, ServedImage
from bench.race_cells import LEARNED_LEAD_S, Heap, Served
from bench.race_restore import IMAGE_FILES, Image
from bench.report import cpu_s
from bench.shaped_link import ShapedLink
from streamd.errors import Exit
from streamd.snapshot.trace import HOT_BYTES, Trace, TraceRange, encode
from streamd.store.catalog import open_snapshot
from streamd.store.gcs import GoogleStore
from streamd.store.port import Condition
from streamd.store.traces import read_trace

_MOUNT_S = 60.0
# A worker tells what it has done every second.
_BEAT_S = 1.5
# The disk is some megabytes behind the link.
_CACHED_S = 20.0
# gcsfuse is where ./setup.sh bench puts it, the others are Debian's.
_TOOLS = Path(__file__).parents[1] / ".tools" / "bin"
_PROGRAMS = {"copy": "curl", "rclone": "rclone", "gcsfuse": "gcsfuse"}


@dataclass(slots=True)
class Ready:
    """A directory that runsc can restore from.

    `began_s`: when somebody who had nothing began to wait (time.monotonic). `served` asks streamd's mount for its
    account, once all is loaded. `download_cpu_s`: of the program that made the copy.
    """

    image: Path
    began_s: float
    served: Callable[[], Served | None] = lambda: None
    download_cpu_s: float | None = None


@dataclass(slots=True)
class Ground:
    """Where one image is raced: a directory of our own, the store with the image in it, what runs leave to others.

    `has_trace`: a restore of this cell's request has left its order in the store. `resident`: the daemon whose cache
    holds the whole image, and what ends it.
    """

    directory: Path
    link: ShapedLink
    image: Image
    has_trace: bool = False
    resident: tuple[Daemon, contextlib.ExitStack] | None = None
    _serial: int = field(default=0)

    @property
    def snapshot_url(self) -> str:
        return f"gs://{self.link.bucket}/snapshots/{self.image.heap.name}"

    @property
    def host(self) -> str:
        """The store without a scheme, as gVisor wants it."""
        return self.link.address.partition("://")[2]

    @property
    def mountpoint(self) -> Path:
        path = self.directory / "mnt"
        path.mkdir(exist_ok=True)
        return path

    def new_streamd(self) -> Streamd:
        """Give a streamd that has nothing on this machine."""
        self._serial += 1
        return Streamd(self.directory / f"streamd-{self._serial}")

    def forget_resident(self) -> None:
        """End the daemon that was kept, and remove its cache."""
        if self.resident is not None:
            _, stack = self.resident
            self.resident = None
            stack.close()

    def drop_trace(self) -> None:
        """Forget what earlier restores have learned."""
        with own_streamd(self) as streamd:
            try:
                streamd.run("trace", "drop", self.snapshot_url)
            except CommandFailed as error:
                if error.exit_code not in (Exit.NOT_FOUND, Exit.USAGE):  # nothing there is as good
                    raise
        self.has_trace = False


@contextlib.contextmanager
def local(ground: Ground) -> Iterator[Ready]:
    """Restore from the image that runsc wrote, in the page cache."""
    _read_all(ground.image.directory)
    yield Ready(ground.image.directory, time.monotonic())


@contextlib.contextmanager
def streamd_first(ground: Ground) -> Iterator[Ready]:
    """Ask a daemon that has nothing of it, for an image that nobody has learned anything of."""
    ground.drop_trace()
    with Daemon() as daemon, _asked(ground, daemon) as ready:
        yield ready
    ground.has_trace = True


@contextlib.contextmanager
def streamd_reference(ground: Ground) -> Iterator[Ready]:
    """Serve so that only what is read is fetched: what F is measured with."""
    ground.drop_trace()
    with Daemon() as daemon, _asked(ground, daemon, prefetch="none") as ready:
        yield ready


@contextlib.contextmanager
def streamd_learned(ground: Ground) -> Iterator[Ready]:
    """Ask a daemon that has nothing of it, LEARNED_LEAD_S before runsc starts; the last restore has left its order."""
    if not ground.has_trace:
        raise AgentError("no restore has left an order yet")
    ground.forget_resident()
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(Daemon())
        with _asked(ground, daemon) as ready:
            time.sleep(max(0.0, ready.began_s + LEARNED_LEAD_S - time.monotonic()))
            yield ready
        ground.resident = (daemon, stack.pop_all())


@contextlib.contextmanager
def streamd_warm(ground: Ground) -> Iterator[Ready]:
    """Ask the daemon of the last learned restore again: all is there, in the page cache as the local directory is."""
    if ground.resident is None:
        raise AgentError("nothing is resident yet")
    daemon, _ = ground.resident
    # The last image ended before it was sealed, which is the background's work of some seconds.
    verify = [sys.executable, "-m", "streamd.cli", "--config", str(daemon.config), "cache", "verify"]
    subprocess.run(verify, check=True, capture_output=True)
    _read_all(daemon.cache_directory)
    with _asked(ground, daemon) as ready:
        if daemon.client.images()[-1]["state"] != "warm":
            raise AgentError("the image is not warm: the cache doesn't have all of it")
        yield ready


@contextlib.contextmanager
def streamd_misled(ground: Ground) -> Iterator[Ready]:
    """Ask a daemon with nothing; the order is forged: as much as is fetched first, none of it waited for."""
    with _forged_order(ground), Daemon() as daemon, _asked(ground, daemon) as ready:
        yield ready


@contextlib.contextmanager
def gvisor_gcs(ground: Ground) -> Iterator[Ready]:
    """Point runsc at the plain files in the store; it takes the store's address from STORAGE_EMULATOR_HOST."""
    directory = ground.directory / "gcs"
    directory.mkdir()
    token = {"access_token": "x", "token_type": "Bearer"}
    options = {"bucket": ground.link.bucket, "object_prefix": f"{plain_prefix(ground.image.heap)}/", "token": token}
    (directory / "gcs_opts.json").write_text(json.dumps(options))
    try:
        yield Ready(directory, time.monotonic())
    finally:
        shutil.rmtree(directory)


@contextlib.contextmanager
def copy(ground: Ground) -> Iterator[Ready]:
    """Download the plain files, then restore from them."""
    directory = ground.directory / "copy"
    directory.mkdir()
    try:
        began_s = time.monotonic()
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(commands(ground)["copy"], check=True, capture_output=True, timeout=_MOUNT_S * 10)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used_s = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
        yield Ready(directory, began_s, download_cpu_s=used_s)
    finally:
        shutil.rmtree(directory)


@contextlib.contextmanager
def rclone(ground: Ground) -> Iterator[Ready]:
    """Mount the plain files with rclone, everything at its defaults but the cache."""
    with _foreign_mount(ground, commands(ground)["rclone"]) as ready:
        yield ready
    shutil.rmtree(ground.directory / "rclone", ignore_errors=True)


@contextlib.contextmanager
def gcsfuse(ground: Ground) -> Iterator[Ready]:
    """Mount the plain files with gcsfuse at its defaults."""
    with _foreign_mount(ground, commands(ground)["gcsfuse"]) as ready:
        yield ready


CONTESTANTS: Mapping[str, Callable[[Ground], AbstractContextManager[Ready]]] = {
    "local": local,
    "gvisor-gcs": gvisor_gcs,
    "streamd-first": streamd_first,
    "streamd-learned": streamd_learned,
    "streamd-warm": streamd_warm,
    "streamd-misled": streamd_misled,
    "copy": copy,
    "rclone": rclone,
    "gcsfuse": gcsfuse,
}


@contextlib.contextmanager
def _forged_order(ground: Ground) -> Iterator[None]:
    """Put a forged order in the place of the one that was learned, and that back in the end."""
    store = GoogleStore(ground.link.bucket, "snapshots", emulator_host=ground.link.address)
    with contextlib.closing(store):
        pinned = open_snapshot(store, ground.image.heap.name)
        if pinned.trace is None:
            raise AgentError("no restore has left an order yet")
        learned = read_trace(store, pinned, pinned.trace)
        forged = misleading(learned, pinned.manifest.files[-1].size)
        store.put(pinned.trace.key, encode(forged), condition=Condition.ANY)
        try:
            yield
        finally:
            store.put(pinned.trace.key, encode(learned), condition=Condition.ANY)


def misleading(learned: Trace, pages_bytes: int) -> Trace:
    """Give an order of `HOT_BYTES`, from the end of pages.img down, of what the learned one doesn't name."""
    ranges: list[TraceRange] = []
    left, end = HOT_BYTES, pages_bytes
    named = sorted(((row.start, row.end) for row in learned.ranges), reverse=True)
    for named_start, named_end in [*named, (0, 0)]:
        start = max(named_end, end - left)
        if start < end:
            ranges.append(TraceRange(start, end, 1.0, HOT_BYTES - left))
            left -= end - start
        end = min(end, named_start)
    return Trace(learned.digest, learned.samples, tuple(ranges))


@contextlib.contextmanager
def own_streamd(ground: Ground) -> Iterator[Streamd]:
    """Give a streamd with nothing, and remove what it had in the end."""
    streamd = ground.new_streamd()
    try:
        yield streamd
    finally:
        streamd.stop_strays()
        shutil.rmtree(streamd.directory)


def plain_prefix(heap: Heap) -> str:
    """Give where in the bucket an image's files lie as they are."""
    return f"files/{heap.name}"


def commands(ground: Ground) -> dict[str, list[str]]:
    """Give the command that each contestant but the local directory begins with."""
    address, bucket, prefix = ground.link.address, ground.link.bucket, plain_prefix(ground.image.heap)
    mnt = str(ground.mountpoint)
    streamd = ["streamd", "image", "request", ground.snapshot_url]
    restore = ["runsc", "restore", "--background", "--detach", f"--image-path={ground.directory / 'gcs'}"]
    downloads = [
        part
        for name in IMAGE_FILES
        for part in ("--output", str(ground.directory / "copy" / name), f"{address}/{bucket}/{prefix}/{name}")
    ]
    endpoint = f"{address}/storage/v1/"
    return {
        "gvisor-gcs": [f"STORAGE_EMULATOR_HOST={ground.host}", *restore],
        "streamd-first": streamd,
        "streamd-learned": streamd,
        "streamd-warm": streamd,
        "streamd-misled": streamd,
        "copy": ["curl", "--silent", "--fail", "--parallel", *downloads],
        "rclone": [
            *("rclone", "mount", f":gcs:{bucket}/{prefix}", mnt, "--gcs-endpoint", endpoint, "--gcs-anonymous"),
            *("--vfs-cache-mode", "full", "--cache-dir", str(ground.directory / "rclone"), "--read-only"),
            *("--config", "/dev/null"),
        ],
        "gcsfuse": [
            *("gcsfuse", "--foreground", "--enable-hns=false", "--custom-endpoint", endpoint),
            *("--anonymous-access", "--implicit-dirs", "--only-dir", prefix, bucket, mnt),
        ],
    }


def missing(contestant: str) -> str | None:
    """Say what of a contestant isn't installed; None when it can run."""
    program = _PROGRAMS.get(contestant)
    return program if program is not None and _found(program) is None else None


def shown(ground: Ground, contestant: str) -> str | None:
    """Give a contestant's command as a person types it, our directory being $DIR; None where there is none."""
    command = commands(ground).get(contestant)
    return None if command is None else " ".join(command).replace(str(ground.directory), "$DIR")


def _found(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ.get('PATH', os.defpath)}:{_TOOLS}")


@contextlib.contextmanager
def _asked(ground: Ground, daemon: Daemon, *, prefetch: str = "all") -> Iterator[Ready]:
    """Ask a daemon for the image as an agent does, and let it go in the end."""
    processes = (daemon.pid, daemon.until_spawner())
    before_s = sum(map(cpu_s, processes))
    began_s = time.monotonic()
    image = daemon.image(ground.snapshot_url, prefetch=prefetch)
    yield Ready(image.mountpoint, began_s, served=lambda: _served(image, processes, before_s))
    if prefetch == "all":  # the next one starts from all of it
        with contextlib.suppress(TimeoutError):
            image.until(lambda state: _is_resident(state["progress"]), "all of it on the disk", limit_s=_CACHED_S)
    daemon.client.release(image.id, force=True)
    image.until_unmounted()


def _is_resident(progress: Mapping[str, int]) -> bool:
    return 0 < progress["total_bytes"] <= progress["resident_bytes"]


def _served(image: ServedImage, processes: tuple[int, int], before_s: float) -> Served | None:
    """Ask for an image's account; None when nothing stands between runsc and the files."""
    state = image.state()
    if state["state"] == "warm":
        return None
    used_s = cpu_s(int(state["worker_pid"])) + sum(map(cpu_s, processes)) - before_s
    time.sleep(_BEAT_S)  # then all that was read has been told
    state = image.state()
    return Served(
        bytes=sum(amount for name, amount in state["bytes_by_tier"].items() if name.startswith("read_")),
        cpu_s=used_s,
        release_gap_p50_s=state["release_gaps"]["p50_ms"] / 1000,
        release_gap_p99_s=state["release_gaps"]["p99_ms"] / 1000,
    )


@contextlib.contextmanager
def _foreign_mount(ground: Ground, command: list[str]) -> Iterator[Ready]:
    """Run another project's mount in the foreground, and end it by an unmount."""
    began_s = time.monotonic()
    process = subprocess.Popen(
        [_found(command[0]) or command[0], *command[1:]],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while not os.path.ismount(ground.mountpoint):
            if process.poll() is not None or time.monotonic() > began_s + _MOUNT_S:
                raise AgentError(f"{command[0]} mounts nothing (exit code {process.poll()}): {' '.join(command)}")
            time.sleep(0.005)
        yield Ready(ground.mountpoint, began_s)
    finally:
        subprocess.run(["umount", "--lazy", str(ground.mountpoint)], capture_output=True, check=False)
        try:
            process.wait(_MOUNT_S / 6)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _read_all(directory: Path) -> None:
    """Bring the files of a directory into the page cache."""
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.read(1 << 20):
                    pass
