"""A containerd of our own, with Debian's `containerd`, `ctr` and runc shim, whose runtime is a program of our choice.

Its root, state, sockets and FIFOs are in one directory, it knows no registry and no CRI, and images are made here from
`server.py`'s root file system (umoci). A task is run by an attached `ctr run`, whose standard streams are the
container's as containerd delivers them: what a `Server` reads has come through the shim, as logs do.

`close` takes everything away whatever has happened: tasks, shims, sandboxes, mounts, and in the end containerd.
"""

import contextlib
import hashlib
import os
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
from agent.runtime.arguments import GlobalOptions
from agent.runtime.bundle import Pod, Rootfs, pod_annotations
from agent.runtime.runsc import Runsc
from bench.pods import runsc_binary
from bench.server import Heap, NoAnswer, Server, server_container, server_rootfs

IMAGE = "podsnap.test/server:latest"
NAMESPACE = "default"
_START_S = 30.0
_CALL_S = 120.0
# Plugins that want a device, a kernel module or a directory of the machine's.
_DISABLED = (
    *("io.containerd.grpc.v1.cri", "io.containerd.internal.v1.opt", "io.containerd.snapshotter.v1.aufs"),
    *("io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.devmapper"),
    *("io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.overlayfs"),
)
# Where the runc shim listens, whatever containerd's state directory is (containerd 1.6, runtime/v2/shim).
_SHIM_SOCKETS = Path("/run/containerd/s")


class ContainerdError(AgentError):
    """containerd, its client or umoci failed; the message has what it said."""


@dataclass(slots=True)
class Task:
    """A container with its process, and the client that is attached to it."""

    task_id: str
    client: subprocess.Popen[bytes]
    server: Server

    def exit_code(self, *, timeout_s: float = _CALL_S) -> int:
        """Wait for its end and give the exit code that containerd says; 1 also when it could not be started."""
        return self.client.wait(timeout_s)

    def output(self, *, timeout_s: float = _CALL_S) -> tuple[list[str], str]:
        """Wait for its end; give the lines that are left of its output, and its errors, among them the client's own."""
        self.client.wait(timeout_s)
        errors = self.server.errors()
        lines = []
        with contextlib.suppress(NoAnswer):
            while True:
                lines.append(self.server.receive(timeout_s=timeout_s))
        return lines, errors


class Containerd:
    """One containerd, from `start` to `close`; or a context manager. Tasks run with `runtime` in place of runc."""

    def __init__(self, directory: Path, runtime: Path) -> None:
        self.directory = directory
        self.address = directory / "containerd.sock"
        self.log = directory / "containerd.log"
        self._runtime = runtime
        self._process: subprocess.Popen[bytes] | None = None
        self._rootfs: Rootfs | None = None
        self._tasks: list[Task] = []

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def runsc(self) -> Runsc:
        """runsc on the root that the tasks' sandboxes are in, for checkpoints and questions."""
        return Runsc(runsc_binary(), GlobalOptions(root=self.directory / "runsc" / NAMESPACE))

    def start(self) -> None:
        """Start it and import the server's image. Raises: `ContainerdError`."""
        config = self.directory / "containerd.toml"
        # A Python list of plain strings is a TOML array.
        config.write_text(
            f'version = 2\nroot = "{self.directory}/root"\nstate = "{self.directory}/state"\n'
            f"disabled_plugins = {list(_DISABLED)}\n"
            f'[grpc]\naddress = "{self.address}"\n[debug]\nlevel = "debug"\n'
        )
        with open(self.log, "wb") as log:
            self._process = subprocess.Popen(
                ["containerd", "--config", config], stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0
            )
        until_s = time.monotonic() + _START_S
        while True:
            try:
                self.ctr("version")
                break
            except ContainerdError:
                if self._process.poll() is not None or time.monotonic() > until_s:
                    raise ContainerdError(f"containerd does not start: {self.log.read_text()[-2000:]}") from None
                time.sleep(0.02)
        self._import_image()

    def run(
        self,
        task_id: str,
        heap: Heap,
        *,
        pod: Pod | None = None,
        annotations: Mapping[str, str] | None = None,
        command: Sequence[str] | None = None,
    ) -> Task:
        """Create and start a container with the server in it, or another command; returns at once.

        Its first line says that it runs: `task.server.receive`. A restored one says nothing by itself.
        """
        assert self._rootfs is not None
        args = server_container(self._rootfs, heap).args if command is None else command
        flags = ["--rm", f"--runc-binary={self._runtime}", f"--runc-root={self.directory}/runsc", "--cgroup="]
        flags += [f"--fifo-dir={self.directory}/fifo", "--snapshotter=native"]
        for mount in self._rootfs.mounts:
            options = ":".join(mount.options)
            flags.append(f"--mount=type={mount.kind},src={mount.source},dst={mount.destination},options={options}")
        for name, value in {**pod_annotations(pod), **(annotations or {})}.items():
            flags.append(f"--annotation={name}={value}")
        server = Server()
        try:
            client = subprocess.Popen(
                ["ctr", f"--address={self.address}", "run", *flags, IMAGE, task_id, *args],
                stdin=server.stdio.stdin,
                stdout=server.stdio.stdout,
                stderr=server.stdio.stderr,
                process_group=0,
            )
        except BaseException:
            server.close()
            raise
        server.connected()
        task = Task(task_id, client, server)
        self._tasks.append(task)
        return task

    def kill(self, task: Task, signal_name: str = "SIGKILL") -> None:
        """Signal a task's process. Raises: `ContainerdError` when there is none."""
        self.ctr("tasks", "kill", f"--signal={signal_name}", task.task_id)

    def status(self, task_id: str) -> str | None:
        """Give what containerd says of a task (RUNNING, STOPPED, …); None when it has none of that id."""
        for line in self.ctr("tasks", "ls").splitlines()[1:]:
            found, _, status = line.split()
            if found == task_id:
                return status
        return None

    def ctr(self, *arguments: str) -> str:
        """Call containerd's client. Raises: `ContainerdError`."""
        return _run("ctr", f"--address={self.address}", *arguments)

    def close(self) -> None:
        """End everything that was started, and raise the first problem after that."""
        with contextlib.ExitStack() as stack:  # in the opposite order
            stack.callback(self._remove_directories)
            stack.callback(self.runsc.remove_root)
            stack.callback(self._end_shims)
            stack.callback(self._end_daemon)
            for task in self._tasks:
                stack.callback(task.server.close)
                stack.callback(task.client.wait)
                stack.callback(task.client.kill)

    # How it is done

    def _import_image(self) -> None:
        """Make an image of the server's root file system, as one layer, and import it."""
        layout, archive = self.directory / "image", self.directory / "image.tar"
        self._rootfs = server_rootfs(self.directory / "rootfs", readonly=False)
        _run("umoci", "init", f"--layout={layout}")
        _run("umoci", "new", f"--image={layout}:latest")
        _run("umoci", "insert", f"--image={layout}:latest", str(self._rootfs.path), "/")
        _run("tar", "-C", str(layout), "-cf", str(archive), ".")
        name = IMAGE.partition(":")[0]
        self.ctr("images", "import", f"--base-name={name}", "--snapshotter=native", str(archive))

    def _end_daemon(self) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(20.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def _end_shims(self) -> None:
        """End the shims that outlived their tasks, and what they adopted."""
        until_s = time.monotonic() + 20.0
        while shims := list(self._shims()):
            for pid in shims:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            assert time.monotonic() < until_s, f"shims {shims} can't be killed"
            time.sleep(0.02)
        for task in self._tasks:
            # The name of a shim's socket (SocketAddress, there).
            name = hashlib.sha256(f"{self.address}/{NAMESPACE}/{task.task_id}".encode()).hexdigest()
            (_SHIM_SOCKETS / name).unlink(missing_ok=True)

    def _shims(self) -> Iterator[int]:
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    vector = (entry / "cmdline").read_bytes().split(b"\0")
                    if b"shim" in vector[0] and os.fsencode(self.address) in vector:
                        yield int(entry.name)

    def _remove_directories(self) -> None:
        mounts = [line.split(" ")[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        for mountpoint in reversed(mounts):
            if Path(mountpoint).is_relative_to(self.directory):
                _run("umount", "--lazy", mountpoint)
        for name in ("root", "state", "runsc", "fifo", "image", "rootfs"):
            shutil.rmtree(self.directory / name, ignore_errors=True)


def _run(*vector: str) -> str:
    """Run a command and give what it printed. Raises: `ContainerdError`."""
    try:
        done = subprocess.run(
            vector, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_CALL_S, check=False
        )
    except FileNotFoundError as error:
        raise ContainerdError(f"{vector[0]} is not installed; ./setup.sh test does that") from error
    if done.returncode:
        raise ContainerdError(f"{' '.join(vector)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
