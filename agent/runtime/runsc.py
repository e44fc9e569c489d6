"""Drive runsc: one method per command, explicit time-outs, failures as `RunscError` with runsc's own words.

The shell around `arguments.py`: it starts processes and reads what they say; it decides nothing. What a caller must
know:

- **Standard streams.** The process that calls `create`, `run` or `restore` gives the container its standard streams.
  Containers of a restored sandbox other than the first take theirs from `start`. Use pipes: with a regular file the
  offset of the saved container is kept.
- **Ids.** runsc takes any unambiguous prefix for an id. Each method here first asks for the container's state and
  refuses when the answer is another container's. Ids of one root must not be prefixes of each other (take UUIDs).
- **Interrupts.** runsc gets its own process group, so a Ctrl-C on the terminal reaches the caller alone. A call that
  changes something is never abandoned half-way: an exception in the caller waits `_SETTLE_S` for it first. What is left
  after a killed call (a sandbox without a state file) is found by `remove_root`.

All methods block; call them from a thread where a Trio loop runs.
"""

import contextlib
import ctypes
import json
import os
import re
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from agent.errors import AgentError
from agent.runtime import arguments
from agent.runtime.arguments import GlobalOptions, GpuTool
from agent.runtime.calling import (
    NO_STDIO,
    Done,
    NoSuchContainer,
    RunningCall,
    RunscError,
    RunscTimeout,
    Stdio,
    parsed_object,
    start_call,
)

__all__ = [
    "ContainerState",
    "ExecResult",
    "NoSuchContainer",
    "Runsc",
    "RunscError",
    "RunscTimeout",
    "Saving",
    "Stdio",
    "Waiter",
]

# A verb that creates or changes a sandbox took up to 1 s in trials, a checkpoint of 0.5 GB 2–4 s; a hang is what these
# detect.
_QUICK_S = 30.0
_CHANGE_S = 120.0
_SAVE_S = 900.0
# How long an interrupted caller waits for a runsc command that is in the middle of a change.
_SETTLE_S = 10.0
_AGAIN_S = 0.1
_MNT_DETACH = 2

_CONTAINER_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,254}")


@dataclass(frozen=True, slots=True)
class ContainerState:
    """What `runsc state` says: `status` (creating, created, running, paused, stopped), the sandbox's `pid` or 0."""

    container_id: str
    status: str
    pid: int
    bundle: Path


@dataclass(frozen=True, slots=True)
class ExecResult:
    """How a command that was executed in a container ended."""

    exit_code: int
    stdout: bytes
    stderr: bytes


@dataclass(frozen=True, slots=True)
class Runsc:
    """runsc at `binary`, with the options that hold for all of its containers."""

    binary: Path
    options: GlobalOptions

    # What this binary is

    def version(self) -> str:
        """Give the version that runsc writes into images: a release label; `VERSION_MISSING` from `go install`."""
        first = self._call("--version", arguments.version(), timeout_s=_QUICK_S).stdout.decode().partition("\n")[0]
        return first.removeprefix("runsc version ").strip()

    def has_background(self) -> bool:
        """Say whether this runsc can restore in the background."""
        done = self._call("help", arguments.help_for("restore"), timeout_s=_QUICK_S, check=False)
        return b"-background" in done.stdout + done.stderr

    def cpu_features(self) -> frozenset[str]:
        """Give the CPU features of this host, as an image records them."""
        said = self._call("cpu-features", arguments.cpu_features(), timeout_s=_QUICK_S).stdout.decode()
        return frozenset(name.strip() for name in said.replace("\n", ",").split(",") if name.strip())

    def supported_gpu_drivers(self) -> frozenset[str]:
        """Give the versions of NVIDIA's driver that this runsc knows; with any other a GPU can't be used in it."""
        said = self._call("nvproxy", arguments.supported_gpu_drivers(), timeout_s=_QUICK_S).stdout.decode()
        return frozenset(re.findall(r"\b\d{3,}\.\d+(?:\.\d+)?\b", said))

    def has_whole_state(self, checkpoint_img: Path, *, timeout_s: float = _CHANGE_S) -> bool:
        """Say whether the object graph in a checkpoint.img is whole; reading it needs no sandbox.

        Its length stands nowhere, so a cut one shows only so.
        """
        vector = arguments.print_state_file(checkpoint_img)
        with open(os.devnull, "wb") as nowhere:
            stdio = Stdio(stdout=nowhere.fileno(), stderr=nowhere.fileno())
            return not self._call("statefile", vector, stdio=stdio, timeout_s=timeout_s, check=False).returncode

    # The life of a container

    def create(self, container_id: str, bundle: Path, stdio: Stdio = NO_STDIO, *, timeout_s: float = _CHANGE_S) -> None:
        """Create a sandbox, or a container in the sandbox that the bundle names; nothing runs in it yet."""
        self._call("create", arguments.create(container_id, bundle), container_id, stdio=stdio, timeout_s=timeout_s)

    def start(self, container_id: str, stdio: Stdio = NO_STDIO, *, timeout_s: float = _CHANGE_S) -> None:
        """Start a created container.

        In a sandbox that is being restored this restores it, and the pod's last one sets the whole pod going.
        """
        self._require("start", container_id)
        self._call("start", arguments.start(container_id), container_id, stdio=stdio, timeout_s=timeout_s)

    def run(self, container_id: str, bundle: Path, stdio: Stdio = NO_STDIO, *, timeout_s: float = _CHANGE_S) -> None:
        """Create and start, and return while it runs."""
        vector = arguments.run(container_id, bundle, detach=True)
        self._call("run", vector, container_id, stdio=stdio, timeout_s=timeout_s)

    def checkpoint(
        self,
        container_id: str,
        image_dir: Path,
        *,
        leave_running: bool = True,
        exclude_committed_zero_pages: bool = True,
        direct: bool = False,
        timeout_s: float = _SAVE_S,
    ) -> None:
        """Save the container's whole sandbox into `image_dir`, which runsc makes; its files must not exist.

        Without `leave_running` the sandbox is killed even when the save fails. Nothing is synced to disk.
        """
        call = self.begin_checkpoint(
            container_id,
            image_dir,
            leave_running=leave_running,
            exclude_committed_zero_pages=exclude_committed_zero_pages,
            direct=direct,
        )
        call.result(timeout_s=timeout_s)

    def begin_checkpoint(
        self,
        container_id: str,
        image_dir: Path,
        *,
        leave_running: bool = True,
        exclude_committed_zero_pages: bool = True,
        direct: bool = False,
        gpu_tool: GpuTool | None = None,
    ) -> "Saving":
        """Begin a save as `checkpoint`, whose end the caller waits for."""
        self._require("checkpoint", container_id)
        vector = arguments.checkpoint(
            container_id,
            image_dir,
            leave_running=leave_running,
            exclude_committed_zero_pages=exclude_committed_zero_pages,
            direct=direct,
            gpu_tool=gpu_tool,
        )
        return Saving(self._start("checkpoint", vector, container_id))

    def restore(
        self,
        container_id: str,
        bundle: Path,
        image_dir: Path,
        stdio: Stdio = NO_STDIO,
        *,
        background: bool = True,
        direct: bool = False,
        timeout_s: float = _SAVE_S,
    ) -> None:
        """Restore a new or a created container and return when it runs; with `background`, while its memory still
        loads.

        The first container of a pod of several returns at once, and nothing runs until the last of the others was
        started. A failure kills the sandbox: this container can't be started any more.
        """
        vector = arguments.restore(container_id, bundle, image_dir, background=background, direct=direct, detach=True)
        self._call("restore", vector, container_id, stdio=stdio, timeout_s=timeout_s)

    def wait(self, container_id: str, *, timeout_s: float) -> int:
        """Wait for the container's process and give its exit code (128 + n for signal n); see `waiter`."""
        with self.waiter(container_id) as waiter:
            return waiter.result(timeout_s=timeout_s)

    def waiter(self, container_id: str) -> "Waiter":
        """Start to wait for the container's process, now.

        The exit code of a sandbox's first process is lost when nobody waits for it while it ends: start the waiter when
        it runs.
        """
        self._require("wait", container_id)
        call = self._start("wait", arguments.wait(container_id), container_id)
        try:
            call.until_connected()
        except BaseException:
            call.end()
            raise
        return Waiter(container_id, call)

    def wait_restore(self, container_id: str, *, timeout_s: float) -> None:
        """Wait until all memory is loaded: from then on the image is not needed any more and its files are closed."""
        self._require("wait --restore", container_id)
        vector = arguments.wait_restore(container_id)
        self._call("wait --restore", vector, container_id, timeout_s=timeout_s, settle_s=0)

    def wait_checkpoint(self, container_id: str, *, timeout_s: float) -> None:
        """Wait for the next checkpoint to end, whoever asks for it; a failed one raises."""
        self._require("wait --checkpoint", container_id)
        vector = arguments.wait_checkpoint(container_id)
        self._call("wait --checkpoint", vector, container_id, timeout_s=timeout_s, settle_s=0)

    def pause(self, container_id: str, *, timeout_s: float = _CHANGE_S) -> None:
        """Stop all tasks of the sandbox."""
        self._require("pause", container_id)
        self._call("pause", arguments.pause(container_id), container_id, timeout_s=timeout_s)

    def resume(self, container_id: str, *, timeout_s: float = _CHANGE_S) -> None:
        """Let a paused sandbox go on."""
        self._require("resume", container_id)
        self._call("resume", arguments.resume(container_id), container_id, timeout_s=timeout_s)

    def kill(
        self, container_id: str, signal_name: str = "KILL", *, everything: bool = False, timeout_s: float = _CHANGE_S
    ) -> None:
        """Signal the container's first process, or all; a sandbox that waits for a read of its image dies after it."""
        self._require("kill", container_id)
        vector = arguments.kill(container_id, signal_name, everything=everything)
        self._call("kill", vector, container_id, timeout_s=timeout_s)

    def end_sandbox(self, container_id: str, *, timeout_s: float = _CHANGE_S) -> None:
        """Kill the process of the container's sandbox, paused or not, and wait for its end; one that ended is fine.

        `runsc kill` refuses a paused container, and a resumed one would run on for a moment. runsc's records stay for
        whoever made the container: its shim sees the process end.
        Raises: RunscTimeout when the process waits for a read of its image, so that it can't end yet; it never runs on.
        """
        with self._sandbox_process(container_id) as pidfd:
            if pidfd is None:
                return
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            if not _has_ended(pidfd, within_s=timeout_s):
                raise RunscTimeout("kill", container_id, -1, [f"its sandbox did not end in {timeout_s:g} s"])

    def ends_within(self, container_id: str, *, timeout_s: float) -> bool:
        """Wait for the end of the process of the container's sandbox, and say whether it came."""
        with self._sandbox_process(container_id) as pidfd:
            return pidfd is None or _has_ended(pidfd, within_s=timeout_s)

    @contextlib.contextmanager
    def _sandbox_process(self, container_id: str) -> Iterator[int | None]:
        """Give a descriptor of the sandbox's process; None when it has ended."""
        found = self._require("kill", container_id)
        if found.status == "stopped" or not found.pid:
            yield None
            return
        try:
            pidfd = os.pidfd_open(found.pid)
        except ProcessLookupError:
            yield None
            return
        try:
            # The number may have become another process's before it was opened; after that it can't.
            yield pidfd if self._require("kill", container_id).pid == found.pid else None
        finally:
            os.close(pidfd)

    def delete(self, container_id: str, *, force: bool = False, timeout_s: float = _CHANGE_S) -> None:
        """Remove a stopped container; with `force`, stop it first, and a container that isn't there is no error."""
        try:
            found = self._require("delete", container_id)
        except NoSuchContainer:
            if force:
                return
            raise
        vector = arguments.delete(container_id, force=force)
        until_s = time.monotonic() + _SETTLE_S
        while True:
            try:
                self._call("delete", vector, container_id, timeout_s=timeout_s)
            except RunscError:
                # The sandbox may be ending by itself: runsc still sees its process, and can't talk to it any more. Of a
                # further container that has ended, it doesn't tell that process.
                is_late = time.monotonic() > until_s
                if not force or is_late or (found.pid and not _ends(found.pid, within_s=_SETTLE_S)):
                    raise
                time.sleep(_AGAIN_S)
            else:
                return

    def exec(
        self,
        container_id: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout_s: float = _CHANGE_S,
    ) -> ExecResult:
        """Run a command in a running container and give how it ended.

        Raises: RunscError when runsc could not run it; the command's own exit code is a result.
        """
        self._require("exec", container_id)
        vector = arguments.execute(container_id, argv, env=env or {}, cwd=cwd)
        done = self._call("exec", vector, container_id, timeout_s=timeout_s, check=False)
        if done.returncode and done.messages:
            raise RunscError("exec", container_id, done.returncode, done.messages)
        return ExecResult(done.returncode, done.stdout, done.stderr)

    # What there is

    def state(self, container_id: str) -> ContainerState:
        """Say how a container is.

        Raises: NoSuchContainer, also when `container_id` is only a prefix of another's.
        """
        return self._require("state", container_id)

    def list(self) -> tuple[ContainerState, ...]:
        """Give all containers of this root, in no order."""
        said = self._call("list", arguments.list_containers(), timeout_s=_QUICK_S).stdout
        found = json.loads(said or b"null") or []
        return tuple(ContainerState(c["id"], c["status"], c["pid"], Path(c["bundle"])) for c in found)

    def debug_log(self, container_id: str) -> str:
        """Give what the sandbox `container_id` has written to the debug log so far; empty without a debug log
        directory.

        runsc names those files after time and command only, so the sandbox's is known by its first lines, which hold
        its arguments.
        """
        if self.options.debug_log_dir is None:
            return ""
        logs = []
        for path in sorted(self.options.debug_log_dir.glob("*.boot.txt")):
            text = path.read_text(errors="replace")
            if re.search(rf"(?<![\w.+-]){re.escape(container_id)}(?![\w.+-])", text[:16384]):
                logs.append(text)
        return "".join(logs)

    def remove_root(self, *, deadline_s: float = 30.0) -> None:
        """Remove everything that belongs to this root: containers, stray sandbox processes, runsc's namespace mount,
        the directory.

        Does what can be done, in an order that works after any interruption, and then raises the first problem.
        """
        problems: list[Exception] = []
        root = self.options.root
        if root.is_dir():
            try:
                for container in self.list():
                    with _collect(problems):
                        self.delete(container.container_id, force=True, timeout_s=deadline_s)
            except AgentError as error:
                problems.append(error)
        until = time.monotonic() + deadline_s
        # A sandbox whose `create` was killed has no state file; its command line names the root (gVisor
        # config.ToFlags).
        while strays := list(_processes_of(root)):
            for pid in strays:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > until:
                problems.append(AgentError(f"{root}: processes {strays} can't be killed"))
                break
            time.sleep(0.02)
        # `--network=none` binds an empty network namespace to this file, once or (started at the same time) several
        # times on top of each other (gVisor specutils/namespace.go).
        while _unmount(root / "null-netns"):
            pass
        with _collect(problems):
            if root.exists():
                shutil.rmtree(root)
        if problems:
            raise problems[0]

    # The shell itself

    def _require(self, verb: str, container_id: str) -> ContainerState:
        done = self._call("state", arguments.state(container_id), container_id, timeout_s=_QUICK_S, check=False)
        if done.returncode:
            absent = any("does not exist" in m or "not exist" in m for m in done.messages)
            kind = NoSuchContainer if absent else RunscError
            raise kind(verb, container_id, done.returncode, done.messages)
        found = parsed_object("state", container_id, done.stdout)
        if found["id"] != container_id:
            raise NoSuchContainer(verb, container_id, 1, [f"no such container (but {found['id']})"])
        return ContainerState(found["id"], found["status"], found["pid"], Path(found["bundle"]))

    def _call(
        self,
        verb: str,
        vector: Sequence[str],
        container_id: str = "",
        *,
        stdio: Stdio | None = None,
        timeout_s: float,
        settle_s: float = _SETTLE_S,
        check: bool = True,
    ) -> Done:
        """Run runsc once. `stdio`: given, the container's; None, nothing on stdin and the output is captured."""
        call = self._start(verb, vector, container_id, stdio=stdio)
        try:
            done = call.finish(timeout_s=timeout_s)
        except RunscTimeout:
            raise
        except BaseException:
            with contextlib.suppress(subprocess.TimeoutExpired):
                call.process.wait(settle_s)
            raise
        finally:
            call.end()
        if check and done.returncode:
            said = done.messages or tuple(filter(None, [done.stderr.decode(errors="replace").strip()]))
            raise RunscError(verb, container_id, done.returncode, said)
        return done

    def _start(self, verb: str, vector: Sequence[str], container_id: str, *, stdio: Stdio | None = None) -> RunningCall:
        if container_id and not _CONTAINER_ID.fullmatch(container_id):
            raise ValueError(f"not a container id: {container_id!r}")
        return start_call(self.binary, self.options, verb, vector, container_id, stdio=stdio)


class Saving:
    """A `runsc checkpoint` under way. Without its process the save goes on inside the sandbox, to its end."""

    def __init__(self, call: RunningCall) -> None:
        self._call = call

    def result(self, *, timeout_s: float) -> None:
        """Wait for the end of the save; once. Raises: RunscError, RunscTimeout."""
        try:
            done = self._call.finish(timeout_s=timeout_s)
        finally:
            self._call.end()
        if done.returncode:
            raise RunscError("checkpoint", self._call.container_id, done.returncode, done.messages)

    def abandon(self) -> None:
        """Kill the process, from any thread, so that `result` ends."""
        self._call.process.kill()

    def close(self) -> None:
        """Let go of the process, when nobody waits for it any more; twice is once."""
        self._call.end()


class Waiter:
    """Waits for a container's process from the moment on that it was made; a context manager."""

    def __init__(self, container_id: str, call: RunningCall) -> None:
        self._container_id = container_id
        self._call = call

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._call.end()

    def result(self, *, timeout_s: float) -> int:
        """Give the exit code (128 + n for signal n); once.

        Raises: RunscTimeout while the process runs on, RunscError when the sandbox took the exit code with it.
        """
        done = self._call.finish(timeout_s=timeout_s)
        if done.returncode:
            raise RunscError("wait", self._container_id, done.returncode, done.messages)
        return int(parsed_object("wait", self._container_id, done.stdout)["exitStatus"])


def _has_ended(pidfd: int, *, within_s: float) -> bool:
    poll = select.poll()  # a descriptor above 1023 is too much for select
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(within_s * 1000))


def _ends(pid: int, *, within_s: float) -> bool:
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


def _processes_of(root: Path) -> Iterator[int]:
    wanted = f"--root={root}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                vector = (entry / "cmdline").read_bytes().split(b"\0")
                if wanted in vector and vector[0].rpartition(b"/")[2].startswith(b"runsc"):
                    yield int(entry.name)


def _unmount(path: Path) -> bool:
    """Detach the topmost mount at `path`; False when nothing is mounted there."""
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.umount2(os.fsencode(path), _MNT_DETACH) == 0)


@contextlib.contextmanager
def _collect(problems: list[Exception]) -> Iterator[None]:
    try:
        yield
    except (AgentError, OSError) as error:
        problems.append(error)
