"""Real daemons for tests and benchmarks: `streamd daemon` with its spawner and workers, and sure to go away.

    with Daemon() as daemon:
        image = daemon.image("file:///store/web-1")       # asked for, and served
        reader = image.reader(saved / "pages.img")        # 128 reads in flight, in a process of its own
        image.kill_worker()
        assert reader.outcome().is_clean
        daemon.tape.until("worker-replaced", image=image.id)

As in `bench/mounts.py` nothing here looks at a mount from this process: what asks a mount runs as a process with a
deadline, what asks the daemon goes to its socket. A daemon's processes are known by a variable in their environment,
which forks inherit: a worker has no parent any more once the supervisor was killed. When a `Daemon` ends, the
connections of its mounts were aborted and the mounts detached, all of its processes are gone, and then the readers.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from bench.event_tape import Tape, until
from bench.mount_users import Command, FileHolder
from bench.mounts import LIMIT_S, Reader
from bench.service_manager import ServiceManager
from bench.slot_reader import READ_BYTES, SLOTS
from streamd.daemon.client import DaemonClient, NoAnswer, NoDaemon
from streamd.fuse import mountinfo, mounting
from streamd.fuse.mountinfo import MountEntry

_MARK = "STREAMD_BENCH_DAEMON"

State = dict[str, Any]


class _Child(Protocol):
    def end(self) -> None: ...


_C = TypeVar("_C", bound=_Child)


class ServedImage:
    """One image of a daemon. `mountpoint` is what it is as a rule, until it is known."""

    def __init__(self, daemon: "Daemon", image_id: str) -> None:
        self.daemon = daemon
        self.id = image_id
        self.mountpoint = daemon.run_directory / "images" / image_id

    @property
    def pages(self) -> Path:
        """The mounted pages.img."""
        return self.mountpoint / "pages.img"

    def state(self) -> State:
        """Ask the daemon."""
        return self.daemon.client.image(self.id)

    def until(self, condition: Callable[[State], object], what: str, *, limit_s: float = LIMIT_S) -> State:
        """Ask until the state meets a condition. Raises: `TimeoutError`."""
        last: list[State] = []

        def asked() -> bool:
            last[:] = [self.state()]
            return bool(condition(last[0]))

        until(asked, f"{what} of image {self.id}", limit_s=limit_s)
        return last[0]

    def until_served(self, *, limit_s: float = LIMIT_S) -> State:
        """Wait until a worker answers. Raises: `RuntimeError` with the log when it failed, `TimeoutError`."""
        state = self.daemon.client.image(self.id, wait_s=min(limit_s, 60.0))
        if state["state"] == "preparing":
            raise TimeoutError(f"image {self.id} is not served after {limit_s:g} s: {self.daemon.tail()}")
        if state["state"] not in ("serving", "warm"):
            raise RuntimeError(f"image {self.id} is {state['state']}: {state['last_error']}\n{self.daemon.tail()}")
        self.mountpoint = Path(str(state["mountpoint"]))
        self.daemon.tape.until("image-serving", image=self.id, limit_s=limit_s)
        return state

    def worker_pid(self) -> int:
        """Give the worker that there is, or wait for the next one."""
        return int(self.until(lambda state: state["worker_pid"], "a worker")["worker_pid"])

    def kill_worker(self, number: signal.Signals = signal.SIGKILL) -> int:
        """Send its worker a signal; give its pid."""
        pid = self.worker_pid()
        self.daemon.send(pid, number)
        return pid

    def until_replaced(self, pid: int, *, limit_s: float = LIMIT_S) -> int:
        """Wait for the worker that comes after `pid`, from its first moment on, and give it."""

        def is_another(state: State) -> bool:
            return state["worker_pid"] not in (None, pid)

        return int(self.until(is_another, f"a worker after {pid}", limit_s=limit_s)["worker_pid"])

    def until_cached(self, end: int, *, limit_s: float = LIMIT_S) -> None:
        """Wait until bytes of the image, so many and those that are zero, are in the cache."""
        self.until(lambda state: state["progress"]["resident_bytes"] >= end, f"{end} bytes cached", limit_s=limit_s)

    def reader(
        self,
        expected: Path,
        *,
        slots: int = SLOTS,
        read_bytes: int = READ_BYTES,
        start: int = 0,
        end: int | None = None,
        passes: int = 1,
        go_on: bool = False,
    ) -> Reader:
        """Start to read pages.img, whose right bytes are in `expected`, so many times over."""
        options = ["--slots", str(slots), "--read-bytes", str(read_bytes), "--start", str(start)]
        options += ["--passes", str(passes)] + ([] if end is None else ["--end", str(end)])
        options += ["--go-on"] if go_on else []
        return self.daemon.own(Reader(self.pages, expected, options))

    def until_open(self, *readers: Reader, limit_s: float = LIMIT_S) -> None:
        """Wait until the daemon knows that these have a file open, or they are done."""

        def opened(state: State) -> bool:
            pids = {opener["pid"] for opener in state["openers"]}
            return all(reader.pid in pids or reader.is_done() for reader in readers)

        self.until(opened, "openers", limit_s=limit_s)

    def holder(self) -> FileHolder:
        """Start a process that opens pages.img when it is told to."""
        return self.daemon.own(FileHolder(self.pages))

    def mounts(self) -> list[MountEntry]:
        """Ask the kernel's table, not the mount."""
        return [entry for entry in mountinfo.read() if entry.mountpoint == str(self.mountpoint)]

    def until_unmounted(self, *, limit_s: float = LIMIT_S) -> None:
        """Wait until nothing is mounted there. Raises: `TimeoutError`."""
        until(lambda: not self.mounts(), f"the end of {self.mountpoint}", limit_s=limit_s)


class Daemon:
    """A `streamd daemon` below a directory of its own; started when entered, and at the end nothing is left.

    `settings` are lines of the configuration: keys of its top, then tables; `policy` and `cache` are lines of
    these. `log_path` has what all its processes log.
    `wrapper` goes before the command line; it must become the command (exec), not start it.
    `has_manager`: a stand-in for systemd keeps its descriptors, so that a next life has the mounts of the last one.
    """

    def __init__(
        self,
        settings: str = "",
        *,
        policy: str = "",
        cache: str = "",
        has_cache: bool = True,
        has_manager: bool = False,
        env: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
        wrapper: Sequence[str | Path] = (),
    ) -> None:
        # Not a test's own directory: the path of a socket must be short.
        self.base = Path(tempfile.mkdtemp(prefix="streamd-daemon-"))
        self.run_directory = self.base / "run"
        self.cache_directory = self.base / "cache"
        self.config = self.base / "streamd.toml"
        self.log_path = self.base / "daemon.log"
        self.client = DaemonClient(self.run_directory)
        self.tape = Tape(self.client)
        self._env = {**os.environ, **(env or {}), _MARK: str(self.base)}
        self._options = options
        self._wrapper = wrapper
        self.manager = ServiceManager(self.base) if has_manager else None
        self._process: subprocess.Popen[bytes] | None = None
        self._children: list[_Child] = []
        cache = f'directory = "{self.cache_directory}"\n{cache}' if has_cache else "enabled = false"
        self.config.write_text(
            f'run_directory = "{self.run_directory}"\nlog_directory = "{self.base}/log"\n'
            f'{settings}\n[cache]\n{cache}\n[policy]\numount_wait_s = "1s"\n{policy}\n'
        )

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    # The supervisor's process

    def start(self) -> None:
        """Start it (again), and wait until it answers. Raises: `RuntimeError` with its log when it ends instead."""
        vector = [sys.executable, "-m", "streamd.cli", "--config", str(self.config), "daemon", *self._options]
        vector = [*map(str, self._wrapper), *vector]
        env, stored = self._env, list[tuple[str, int]]()
        if self.manager is not None:
            env, stored = env | self.manager.environment(), self.manager.stored()
            vector = self.manager.command(vector, stored)
        with self.log_path.open("ab") as log:
            process = self._process = subprocess.Popen(
                vector,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env,
                pass_fds=[fd for _, fd in stored],
                start_new_session=True,
            )

        def answers() -> bool:
            if process.poll() is not None:
                raise RuntimeError(f"the daemon has ended with {process.returncode}: {self.tail()}")
            try:
                return self.client.health()["pid"] == process.pid
            except (NoDaemon, NoAnswer):
                return False

        until(answers, "the daemon's first answer")
        self.tape.follow()

    @property
    def pid(self) -> int:
        """The supervisor."""
        assert self._process is not None
        return self._process.pid

    def stop(self, number: signal.Signals, *, limit_s: float = LIMIT_S) -> int:
        """Send the supervisor a signal that ends it, and give its exit code."""
        assert self._process is not None
        self._process.send_signal(number)
        return self._process.wait(limit_s)

    def is_running(self) -> bool:
        """Whether the supervisor runs."""
        return self._process is not None and self._process.poll() is None

    # All of its processes

    def spawner_pid(self) -> int:
        """Give the process that workers are forked from."""
        for pid in self.process_ids():
            with contextlib.suppress(OSError):
                process = Path(f"/proc/{pid}")
                parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
                if int(parent) == self.pid and (process / "comm").read_text() == "streamd-spawner\n":
                    return pid
        raise LookupError("the daemon has no spawner now")

    def until_spawner(self) -> int:
        """Wait until workers can be forked, as on a node whose daemon has run for a while; give who forks them."""
        found: list[int] = []

        def is_there() -> bool:
            with contextlib.suppress(LookupError):
                found[:] = [self.spawner_pid()]
            return bool(found)

        until(is_there, "the spawner")
        return found[0]

    def process_ids(self) -> list[int]:
        """Give all that live: supervisor, spawner, workers, also those that nobody knows any more."""
        mark = f"{_MARK}={self.base}".encode()
        found = []
        for entry in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                if entry.isdigit() and mark in Path("/proc", entry, "environ").read_bytes().split(b"\0"):
                    found.append(int(entry))
        return found

    def send(self, pid: int, number: signal.Signals) -> None:
        """Send a signal to a process of this daemon; done when it has ended. Raises: `LookupError` if it isn't ours."""
        with contextlib.suppress(ProcessLookupError):
            process_fd = os.pidfd_open(pid)
            try:
                # Looked at with the process held: its number can't be another's by now.
                mark = f"{_MARK}={self.base}".encode()
                environment = Path(f"/proc/{pid}/environ").read_bytes()
                if environment and mark not in environment.split(b"\0"):
                    raise LookupError(f"process {pid} is none of this daemon's")
                signal.pidfd_send_signal(process_fd, number)
            finally:
                os.close(process_fd)

    # What is asked of it

    def request(
        self, url: str, *, tenant: str = "", prefetch: str = "none", credentials: Mapping[str, object] | None = None
    ) -> ServedImage:
        """Ask for an image, and don't wait for it."""
        state = self.client.request_image(url, tenant=tenant, prefetch=prefetch, credentials=credentials)
        return ServedImage(self, str(state["id"]))

    def image(
        self, url: str, *, tenant: str = "", prefetch: str = "none", credentials: Mapping[str, object] | None = None
    ) -> ServedImage:
        """Ask for an image and wait until it is served. Raises: `RuntimeError` with the log, `TimeoutError`."""
        image = self.request(url, tenant=tenant, prefetch=prefetch, credentials=credentials)
        image.until_served()
        return image

    def run(self, *vector: str | Path) -> Command:
        """Start a command that may have to wait for a mount."""
        return self.own(Command(vector))

    def streamd(self, *arguments: str) -> Command:
        """Start a `streamd` command with this daemon's configuration."""
        return self.run(sys.executable, "-m", "streamd.cli", "--config", self.config, *arguments)

    def own(self, child: _C) -> _C:
        """End it with this daemon, once no mount can hold it."""
        self._children.append(child)
        return child

    # What it leaves

    def log(self) -> list[State]:
        """Give what was logged so far; a line that isn't JSON (a traceback) as `{"text": …}`."""
        lines = self.log_path.read_text(errors="replace").splitlines()
        return [json.loads(line) if line.startswith("{") else {"text": line} for line in lines]

    def complaints(self) -> list[State]:
        """What must never be in a log: exceptions that nobody foresaw, and text of an interpreter or a C library."""
        return [line for line in self.log() if "exception" in line or line.get("text")]

    def tail(self) -> str:
        """Give the end of the log, for a message."""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-30:]) if self.log_path.exists() else ""

    def _mounts(self) -> Iterator[MountEntry]:
        return (entry for entry in mountinfo.read() if entry.mountpoint.startswith(f"{self.base}/"))

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()  # before its workers: it would replace them
            self._process.wait(LIMIT_S)
        self._take_mounts_away()

        def is_over() -> bool:
            left = self.process_ids()
            for pid in left:
                self.send(pid, signal.SIGKILL)
            return not left

        until(is_over, "the end of all processes")
        self._take_mounts_away()  # what they mounted in their last moments
        if self.manager is not None:
            self.manager.close()
        for child in self._children:
            child.end()
        self.tape.join()
        left = [entry.mountpoint for entry in self._mounts() if mounting.is_own(entry)]
        shutil.rmtree(self.base, ignore_errors=True)
        assert not left, f"still mounted: {left}"

    def _take_mounts_away(self) -> None:
        """Free whoever waits for them; of two on one mountpoint the upper one goes first."""
        for entry in reversed(list(self._mounts())):
            if mounting.is_own(entry):
                mounting.abort(entry.mountpoint, entry.device)
