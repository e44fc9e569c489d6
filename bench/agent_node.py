"""A node of our own with all that is real: `snapagent daemon`, `streamd daemon`, the wrapper, runsc, a store.

    with AgentNode() as node:
        node.write(POLICY)
        pod = node.run("web-1", bundle)              # `streamd-runsc create` and `start`, by hand
        node.until_event("snapshot ready")

Everything is below one directory, and goes with it: sandboxes, daemons, mounts.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from agent.kube.directory import ObjectDirectory
from agent.kube.objects import PodSnapshot
from agent.runtime.arguments import GlobalOptions, Network
from agent.runtime.runsc import Runsc
from agent.wrapper.building import build
from bench.daemons import Daemon
from bench.pods import runsc_binary
from bench.server import Server

_HANG_S = 120.0

Facts = dict[str, Any]

STORAGE = """
apiVersion: podsnapshot.gke.io/v1
kind: PodSnapshotStorageConfig
metadata: {{name: here}}
spec: {{snapshotStorageConfig: {location}}}
"""
POLICY = """
---
apiVersion: podsnapshot.gke.io/v1
kind: PodSnapshotPolicy
metadata: {{name: {trigger}, namespace: {namespace}}}
spec:
  storageConfigName: here
  selector: {{matchLabels: {{app: web}}}}
  triggerConfig: {{type: {trigger}, postCheckpoint: {post_checkpoint}}}
"""


# Has a token that is made once and a heap that takes its time, and asks for a save when it is told to. It answers each
# line; after a restore it first says what it has become, since it was in the middle of its request.
ASKING_SERVER = """
import os, sys, hashlib
mib = int(sys.argv[1])
heap, block = [], b"seed"
for n in range(mib):
    block = hashlib.sha512(block).digest()
    heap.append(hashlib.shake_128(block).digest(1 << 20))
token = os.urandom(8).hex()
print("ready " + token, flush=True)
for line in sys.stdin:
    if line.strip() == "save":
        fd = os.open("/proc/gvisor/checkpoint", os.O_RDWR)
        os.write(fd, b"1")
        print("was " + os.read(fd, 16).decode().strip(), flush=True)
        os.close(fd)
    elif line.strip() == "token":
        print("token " + token, flush=True)
    else:
        print("memory " + token + " " + hashlib.sha256(b"".join(heap)).hexdigest(), flush=True)
"""
LABELS = {"podsnapshot.gke.io/pod-labels": "app=web"}


@dataclass(slots=True)
class Running:
    """A container that was started by the wrapper, and its pipes."""

    container_id: str
    server: Server


class AgentNode:
    """See the module's text. `root_below`: runsc's root, below the node's directory.

    `gcs`: the address of a Google Cloud Storage of one's own, whose bucket `bucket` is the store; else it is a
    directory. `settings`: more of the agent's configuration, its `[deadlines]` first. `flags`: more global ones of
    runsc's, as containerd would give it.
    """

    def __init__(
        self,
        *,
        network: Network = "none",
        root_below: str = "runsc",
        gcs: str = "",
        settings: str = "",
        flags: Sequence[str] = (),
    ) -> None:
        # A short name: there are Unix sockets in it.
        self.directory = Path(tempfile.mkdtemp(prefix="agent-node-", dir="/var/tmp"))
        self.objects = self.directory / "objects"
        self.store = self.directory / "store"
        self.root = self.directory / root_below
        self.config = self.directory / "snapagent.toml"
        self.log = self.directory / "agent.log"
        self.wrapper = self.directory / "streamd-runsc"
        self.wrapper_config = self.directory / "runsc.toml"
        self._env = {**os.environ, **({"STORAGE_EMULATOR_HOST": gcs} if gcs else {})}
        self.location = "{gcs: {bucket: bucket, path: snapshots}}" if gcs else f"{{file: {{directory: {self.store}}}}}"
        self.streamd = Daemon(env=self._env)
        self.runsc = Runsc(runsc_binary(), GlobalOptions(root=self.root, network=network, ignore_cgroups=True))
        self._agent: subprocess.Popen[bytes] | None = None
        self._running: list[Running] = []
        for path in (self.objects, self.store, self.root.parent):
            path.mkdir(parents=True, exist_ok=True)
        self.config.write_text(
            f'objects_directory = "{self.objects}"\nstate_directory = "{self.directory}/state"\n'
            f'run_directory = "{self.directory}/run"\nstreamd_run_directory = "{self.streamd.run_directory}"\n'
            f'log_level = "debug"\n[runtime]\nrunsc = "{runsc_binary()}"\nroots = ["{self.root}"]\n'
            f'network = "{network}"\nignore_cgroups = true\n[node]\nname = "node-1"\n'
            f'[deadlines]\nimage = "20s"\nstop = "5s"\n{settings}'
        )
        self._flags = flags
        self.wrapper_config.write_text(
            f'runsc = "{runsc_binary()}"\nagent_socket = "{self.directory}/run/runtime.sock"\n'
            f'run_directory = "{self.directory}/wrapper"\nlog_socket = "{self.directory}/log.sock"\n'
            "deadline_ms = 30000\n"
        )

    def __enter__(self) -> Self:
        try:
            self.streamd.__enter__()
            build(self.wrapper, config=self.wrapper_config)
            self.start_agent()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    # The agent

    def start_agent(self) -> None:
        """Start it (again), and wait until it answers."""
        with self.log.open("ab") as log:
            self._agent = subprocess.Popen(
                [sys.executable, "-m", "agent.cli", "daemon", "--config", str(self.config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._env,
                start_new_session=True,
            )
        agent = self._agent

        def answers() -> bool:
            assert agent.poll() is None, self.tail()
            return bool(self.status_or_nothing().get("is_synced"))

        self.until(answers, "the agent's first answer")

    @property
    def agent_pid(self) -> int:
        """The agent's process, the last one that was started."""
        assert self._agent is not None
        return self._agent.pid

    def kill_agent(self, number: signal.Signals = signal.SIGKILL) -> int:
        """End it, and give its exit code."""
        assert self._agent is not None
        self._agent.send_signal(number)
        return self._agent.wait(_HANG_S)

    def snapagent(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Call one of its commands."""
        return subprocess.run(
            [sys.executable, "-m", "agent.cli", *arguments, "--config", str(self.config)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_HANG_S,
            check=False,
        )

    def status(self) -> Facts:
        """Ask it. Raises: `AssertionError` when it has no answer."""
        done = self.snapagent("status", "--json")
        assert done.returncode == 0, done.stdout + self.tail()
        return dict(json.loads(done.stdout))

    def status_or_nothing(self) -> Facts:
        """Ask it; nothing while it has no answer."""
        done = self.snapagent("status", "--json")
        return dict(json.loads(done.stdout)) if done.returncode == 0 else {}

    def events(self, what: str) -> list[Facts]:
        """Give the events of a kind, oldest first."""
        return [event for event in self.status()["events"] if event["what"] == what]

    def until_event(self, what: str, *, count: int = 1, limit_s: float = _HANG_S) -> Facts:
        """Wait for the so-many-th event of a kind, and give it."""
        self.until(lambda: len(self.events(what)) >= count, f"{count} × {what}", limit_s=limit_s)
        return self.events(what)[count - 1]

    def until(self, condition: Callable[[], bool], what: str, *, limit_s: float = _HANG_S) -> None:
        """Wait for what must come. Raises: `AssertionError` with the agent's log."""
        until_s = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < until_s, f"{what} did not come\n{self.tail()}"
            time.sleep(0.1)

    def tail(self) -> str:
        """Give the end of the agent's log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-40:]) if self.log.exists() else ""

    # What people and containerd do

    def write(self, name: str, text: str) -> None:
        """Put a file into the objects directory, whole, and wait until the agent can have read it."""
        temporary = self.objects / f".{name}.new"
        temporary.write_text(text)
        temporary.replace(self.objects / name)

    def write_policy(self, trigger: str, post_checkpoint: str = "resume", *, namespaces: str = "default") -> None:
        """Write a storage config, and for each namespace a policy for pods with app=web; wait until they are known."""
        text = STORAGE.format(location=self.location)
        for namespace in namespaces.split():
            text += POLICY.format(trigger=trigger, post_checkpoint=post_checkpoint, namespace=namespace)
        self.write("policy.yaml", text)
        wanted = {(namespace, trigger) for namespace in namespaces.split()}
        self.until(
            lambda: wanted <= {(each["namespace"], each["name"]) for each in self.status()["policies"]}, "the policies"
        )

    def objects_of_agent(self) -> ObjectDirectory:
        """Open the agent's objects, beside it."""
        return ObjectDirectory(self.objects, self.directory / "state")

    def snapshot_url(self, name: str, namespace: str = "default") -> str:
        """Give where a snapshot's data is, as its object says."""
        return self.objects_of_agent().get(PodSnapshot, name, namespace).status.snapshot_url

    def run(self, container_id: str, bundle: Path) -> Running:
        """Create and start a container as containerd does."""
        running = Running(container_id, Server())
        self._running.append(running)
        stdio = running.server.stdio
        self._call("create", f"--bundle={bundle}", container_id, streams=(stdio.stdin, stdio.stdout, stdio.stderr))
        self._call("start", container_id)
        running.server.connected()
        return running

    def delete(self, running: Running) -> None:
        """Remove a container."""
        self._call("delete", "--force", running.container_id)
        running.server.close()

    def _call(
        self, verb: str, *rest: str, streams: tuple[int | None, int | None, int | None] = (None, None, None)
    ) -> None:
        stdin, stdout, stderr = (subprocess.DEVNULL if each is None else each for each in streams)
        log = self.directory / f"{verb}.log"
        options = [
            f"--root={self.root}",
            f"--log={log}",
            "--log-format=json",
            "--network=none",
            "--ignore-cgroups=true",
            *self._flags,
        ]
        vector = [str(self.wrapper), *options, verb, *rest]
        done = subprocess.run(vector, stdin=stdin, stdout=stdout, stderr=stderr, timeout=_HANG_S, check=False)
        assert done.returncode == 0, f"{verb}: {log.read_text() if log.exists() else ''}\n{self.tail()}"

    def _end(self) -> None:
        if self._agent is not None and self._agent.poll() is None:
            self._agent.kill()
            self._agent.wait()
        for running in self._running:
            running.server.close()
        try:
            self.runsc.remove_root()
        finally:
            self.streamd.__exit__(None, None, None)
            shutil.rmtree(self.directory, ignore_errors=True)
