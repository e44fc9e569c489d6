"""What the tests of `snapagent`'s commands about pods share: a web server's manifest, and snapshots of its pods."""

import contextlib
import io
import json
import signal
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from agent.cli import run
from agent.interrupts import Interrupts
from agent.kube.conditions import Step, after_step
from agent.kube.directory import ObjectDirectory
from agent.kube.objects import PodSnapshot, PodSnapshotPolicy, new_snapshot
from agent.kube.origin import Origin
from agent.matching.facts import Architecture, Gpus, MachineFacts
from agent.podspec.distil import distil
from agent.podspec.identity import pod_hash

NOW = "2026-11-30T12:00:00Z"
NODE = MachineFacts(
    architecture=Architecture.AMD64,
    machine_type="n2-standard-4",
    cpu_vendor="GenuineIntel",
    cpu_model="Xeon",
    cpu_features=frozenset({"avx2", "fpu"}),
    cache_line_bytes=64,
    runsc_version="release-20260101.0",
    runsc_sha256="a" * 64,
    platform="systrap",
    network="sandbox",
)
GPU_NODE = replace(NODE, machine_type="g2-standard-8", gpus=(Gpus("NVIDIA L4", 1, "580.65.06"),))
POLICY = """
apiVersion: podsnapshot.gke.io/v1
kind: PodSnapshotPolicy
metadata: {name: web}
spec:
  storageConfigName: store
  selector: {matchLabels: {app: web}}
  triggerConfig: {type: manual}
"""
DEPLOYMENT: dict[str, Any] = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"name": "web"},
    "spec": {
        "template": {
            "metadata": {"labels": {"app": "web"}},
            "spec": {
                "runtimeClassName": "gvisor",
                "containers": [
                    {
                        "name": "server",
                        "image": "example.com/web:1",
                        "args": ["--port", "80", "--threads=4"],
                        "env": [{"name": "LEVEL", "value": "info"}],
                        "ports": [{"containerPort": 80}],
                        "volumeMounts": [{"name": "cache", "mountPath": "/cache"}],
                    }
                ],
                "volumes": [{"name": "cache", "emptyDir": {}}],
            },
        }
    },
}


def deployment(change: Callable[[Any], object] = lambda pod: None) -> dict[str, Any]:
    """Give the manifest after `change` was done to its pod template."""
    made = deepcopy(DEPLOYMENT)
    change(made["spec"]["template"])
    return made


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@dataclass(frozen=True, slots=True)
class Place:
    """Directories as on a node, with a policy for the web server."""

    base: Path

    @property
    def files(self) -> Path:
        return self.base / "objects"

    @property
    def state(self) -> Path:
        return self.base / "state"

    @property
    def directory(self) -> ObjectDirectory:
        return ObjectDirectory(self.files, self.state, now=lambda: NOW)

    def prepare(self) -> "Place":
        for each in (self.files, self.state):
            each.mkdir(mode=0o700)
        (self.files / "policy.yaml").write_text(POLICY)
        return self

    def write(self, name: str, *manifests: dict[str, Any]) -> str:
        """Write manifests to a file; give its path."""
        path = self.base / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(yaml.safe_dump_all(manifests))
        return str(path)

    def write_node(self, facts: MachineFacts) -> str:
        path = self.base / "node.json"
        path.write_text(json.dumps(facts.to_mapping()))
        return str(path)

    def snapshot(
        self,
        name: str,
        pod: Any = None,
        *,
        pod_name: str = "web-6d4b75cb6d-x7k2p",
        node: MachineFacts = NODE,
        gpus: int = 0,
        steps: tuple[Step, ...] = (Step.BEGUN, Step.CHECKPOINTED, Step.REPLICATED),
    ) -> str:
        """Keep a snapshot of a pod (of the web server's) as the agent keeps it; give its name."""
        distilled = distil(pod or DEPLOYMENT["spec"]["template"])
        policy = self.directory.get(PodSnapshotPolicy, "web", "default")
        new = new_snapshot(name, policy, pod_name=pod_name, pod_labels={"app": "web"}, node_name="node-1", trigger="")
        created = self.directory.create(new)
        conditions = created.status.conditions
        for step in steps:
            conditions = after_step(conditions, step, now=NOW)
        origin = Origin(
            pod_name=pod_name,
            pod_uid="u",
            pod_hash=pod_hash(distilled),
            distilled=distilled,
            containers=("server",),
            gpus=gpus,
            node_name="node-1",
            node_facts=node.to_mapping(),
        )
        status = replace(created.status, conditions=conditions, origin=origin)
        updated: PodSnapshot = self.directory.update_status(replace(created, status=status))
        return updated.metadata.name

    def run(self, *arguments: str) -> Ended:
        """Run `snapagent` in this process; stdout and stderr are caught, signals are as before afterwards."""
        out, err = io.StringIO(), io.StringIO()
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = run(arguments, Interrupts())
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return Ended(int(code), out.getvalue(), err.getvalue())

    def explain(self, manifest: dict[str, Any], *arguments: str) -> Ended:
        """Run `snapagent explain --json` with a manifest and this place's directories."""
        where = ("--files", str(self.files), "--snapshots", str(self.state), "--json")
        return self.run("explain", self.write("pod.yaml", manifest), *where, *arguments)
