"""Harvest: restore a snapshot once where nobody sees it, so that its memory's order is known before users come.

The sandbox is thrown away and has no network. It is restored from a mount of its own, whose process notes what the
sandbox waits for and adds it to the snapshot's learned order in the store when it ends (`streamd trace`).

Whatever happens, nothing stays: the mount goes first (a sandbox that waits for a read of it can't be killed), then the
sandbox, then the files.
"""

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from agent.errors import AgentError
from agent.interrupts import Interrupts
from agent.node.streamd_command import StreamdCommand
from agent.runtime.arguments import GlobalOptions
from agent.runtime.loading import PageLoading, find_completed
from agent.runtime.runsc import Runsc, RunscError, RunscTimeout, Stdio
from agent.runtime.throwaway import shared_directories, throwaway_spec
from streamd.errors import NotFound, NotPermitted, Refused
from streamd.snapshot.trace import Trace
from streamd.store.catalog import open_snapshot
from streamd.store.opening import open_store, split_snapshot_url
from streamd.store.retry import retrying
from streamd.store.traces import LearnedOrder

# A sandbox that is killed while it loads ends with its reads under way, which a store answers in less.
_KILL_S = 20.0
_CHATTER_BYTES = 4096
# What a pipe may hold (pipe(7): /proc/sys/fs/pipe-max-size), so that nobody has to feed it.
STDIN_MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class HarvestRequest:
    """What is to be restored, and what is asked of it.

    `stdin`: what the container reads there, in which nothing comes after it, and no end (at most `STDIN_MAX_BYTES`).
    `commands` run in the container one after another, as soon as it runs. `limit_s`: how long the sandbox may run;
    `must_load`: whether it is a failure when it isn't loaded by then. `shares_directories`: let it write where its
    bundle lets the original write.
    """

    snapshot_url: str
    bundle: Path
    runsc: Path
    runsc_flags: tuple[str, ...] = ()
    stdin: bytes = b""
    commands: tuple[tuple[str, ...], ...] = ()
    limit_s: float
    must_load: bool
    shares_directories: bool = False
    store_timeout_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Harvest:
    """What came of it. `before` and `after`: the learned order in the store; `loading`: gVisor's account, if loaded."""

    before: Trace | None
    after: Trace | None
    loading: PageLoading | None

    @property
    def has_learned(self) -> bool:
        """Whether this restore, or another at the same time, has added to what was known."""
        return self.after is not None and (self.before is None or self.after.samples > self.before.samples)


def harvest(
    request: HarvestRequest, streamd: StreamdCommand, interrupts: Interrupts, *, say: Callable[[str], None]
) -> Harvest:
    """Do it; `say` is told each step.

    Raises: `NotPermitted` (not root), `NotFound` (no bundle, no runsc, no snapshot), `Refused` (it can't be restored
        this way), `StreamdError` and `AgentError` as the mount and runsc fail, `KeyboardInterrupt`.
    """
    if os.geteuid() != 0:
        raise NotPermitted("a sandbox and a mount need root; run it with sudo")
    if not request.runsc.is_file():
        raise NotFound(f"{request.runsc}: no runsc there (--runsc, or $PATH)")
    spec = _read_spec(request.bundle)
    shared = shared_directories(spec, request.runsc_flags)
    if shared and not request.shares_directories:
        raise Refused(
            f"{request.bundle}: the sandbox could write into the host's {', '.join(shared)}; give a bundle with copies,"
            " or --share-directories"
        )
    before = _learned(request, check=True)
    container_id = str(uuid.uuid4())
    config = throwaway_spec(spec, bundle=request.bundle.absolute(), container_id=container_id)
    with _place(request, streamd, interrupts) as place:
        (place.bundle / "config.json").write_text(json.dumps(config))
        if not place.runsc.has_background():
            raise Refused(f"{request.runsc}: it has no `restore --background`; a later runsc has")
        say(f"mounting {request.snapshot_url}")
        streamd.mount(request.snapshot_url, place.mountpoint, store_timeout_s=request.store_timeout_s)
        say("restoring in a sandbox without network")
        loading = _run(request, place, container_id, say=say)
        say("unmounting")
        streamd.umount(place.mountpoint, force=False)
    return Harvest(before, _learned(request, check=False), loading)


@dataclass(frozen=True, slots=True)
class _Place:
    """Directories of one harvest, and a runsc with a root of its own."""

    directory: Path
    runsc: Runsc

    @property
    def mountpoint(self) -> Path:
        return self.directory / "mnt"

    @property
    def bundle(self) -> Path:
        return self.directory / "bundle"


def _read_spec(bundle: Path) -> dict[str, object]:
    try:
        spec = json.loads((bundle / "config.json").read_bytes())
    except FileNotFoundError as error:
        raise NotFound(f"{bundle}: no OCI bundle (a directory with a config.json) is there") from error
    except (OSError, ValueError, RecursionError) as error:
        raise Refused(f"{bundle}: its config.json can't be read: {error}") from error
    if not isinstance(spec, dict):
        raise Refused(f"{bundle}: its config.json is not the spec of a container")
    return spec


def _learned(request: HarvestRequest, *, check: bool) -> Trace | None:
    """Look up what is learned so far; with `check`, whether the snapshot can be restored here at all."""
    store_url, snapshot_id = split_snapshot_url(request.snapshot_url)
    store = retrying(open_store(store_url, is_used=True), deadline_s=request.store_timeout_s)
    try:
        pinned = open_snapshot(store, snapshot_id)
        gvisor = pinned.manifest.gvisor
        if check and len(gvisor.container_names) != 1:
            raise Refused(
                f"{request.snapshot_url} has {len(gvisor.container_names)} containers; only a snapshot of one can be "
                "harvested so far"
            )
        if check and gvisor.network == "host":
            raise Refused(
                f"{request.snapshot_url} was saved with the host's network, and gVisor restores it with nothing else"
            )
        return LearnedOrder(store, pinned).load()
    finally:
        store.close()


@contextlib.contextmanager
def _place(request: HarvestRequest, streamd: StreamdCommand, interrupts: Interrupts) -> Iterator[_Place]:
    """Make the directories and the runsc root, and take everything away in the end."""
    with contextlib.ExitStack() as stack:
        interrupts.hold()
        directory = Path(tempfile.mkdtemp(prefix="snapagent-harvest-", dir="/var/tmp"))
        stack.callback(shutil.rmtree, directory)
        options = GlobalOptions(
            root=directory / "runsc",
            network="none",
            ignore_cgroups=True,
            debug_log_dir=directory / "log",
            extra=request.runsc_flags,
        )
        place = _Place(directory, Runsc(request.runsc, options))
        for path in (place.mountpoint, place.bundle, directory / "log"):
            path.mkdir()
        stack.callback(place.runsc.remove_root)
        stack.callback(_unmounted, streamd, place.mountpoint)
        stack.callback(interrupts.hold)
        # An interrupt unwinds the stack from here, in reverse order.
        interrupts.release()
        yield place


def _unmounted(streamd: StreamdCommand, mountpoint: Path) -> None:
    if os.path.ismount(mountpoint):
        streamd.umount(mountpoint, force=True)


def _run(
    request: HarvestRequest, place: _Place, container_id: str, *, say: Callable[[str], None]
) -> PageLoading | None:
    """Restore, run the commands, wait until it is loaded or its time is over, and end the sandbox."""
    until = time.monotonic() + request.limit_s
    with _Pipes(request.stdin) as pipes:
        try:
            place.runsc.restore(container_id, place.bundle, place.mountpoint, pipes.stdio)
            pipes.connected()
            for argv in request.commands:
                say(f"running {' '.join(argv)}")
                _execute(place.runsc, container_id, argv, timeout_s=until - time.monotonic())
            say("waiting until its memory is loaded")
            try:
                place.runsc.wait_restore(container_id, timeout_s=max(until - time.monotonic(), 0.0))
            except RunscTimeout as error:
                if request.must_load:
                    raise AgentError(
                        f"the sandbox was not loaded after {request.limit_s:g} s (--for says when that is no failure)"
                    ) from error
        except RunscError as error:
            # The sandbox may have ended by itself, and have said why.
            said = pipes.last_words()
            raise AgentError(f"{error}" + (f"; it said: {said}" if said else "")) from error
        place.runsc.delete(container_id, force=True, timeout_s=_KILL_S)
    return find_completed(place.runsc.debug_log(container_id))


class _Pipes:
    """The container's standard streams: pipes, as its runtime gave it, since a restore needs the same kind of file."""

    def __init__(self, stdin: bytes) -> None:
        inner_in, self._to = os.pipe()
        from_container, inner_out = os.pipe()
        self.stdio = Stdio(inner_in, inner_out, inner_out)
        self._inner = {inner_in, inner_out}
        self._said = bytearray()
        fcntl.fcntl(self._to, fcntl.F_SETPIPE_SZ, STDIN_MAX_BYTES)
        os.write(self._to, stdin)
        # It ends with the container, which may be after us.
        threading.Thread(target=self._listen, args=(from_container,), daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.connected()
        os.close(self._to)

    def connected(self) -> None:
        """Close the container's ends here, once runsc has them; twice is once."""
        while self._inner:
            os.close(self._inner.pop())

    def last_words(self) -> str:
        """Give the end of what the container has said so far."""
        return self._said.decode(errors="replace").strip()

    def _listen(self, from_container: int) -> None:
        with open(from_container, "rb", buffering=0) as stream:
            while piece := stream.read(1 << 16):
                self._said += piece
                del self._said[:-_CHATTER_BYTES]


def _execute(runsc: Runsc, container_id: str, argv: Sequence[str], *, timeout_s: float) -> None:
    if timeout_s <= 0:
        raise AgentError(f"no time is left for {' '.join(argv)} (--for)")
    done = runsc.exec(container_id, argv, timeout_s=timeout_s)
    if done.exit_code:
        said = done.stderr.decode(errors="replace").strip()[-_CHATTER_BYTES:]
        raise AgentError(f"{' '.join(argv)} ended with exit code {done.exit_code} in the container: {said}")
