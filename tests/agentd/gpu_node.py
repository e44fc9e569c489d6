"""A node with a stand-in for a GPU, in a mount namespace of its own; run as a process by `test_gpu_pods.py`.

What is fake there: /dev/nvidia-uvm, the driver's version in /proc, NVIDIA's library, cuda-checkpoint, and the memory
that the pod's cgroup says. All else is real: agent, streamd, wrapper, runsc. The pod is Kubernetes' kind: a sandbox's
container, and the one with the GPU, in which gVisor runs the tool. Prints what has come of each case, as JSON.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from agent.runtime import bundle
from bench.agent_node import AgentNode, Running
from tests.node.test_gpu import build_nvml
from tests.node.test_gpu_tool import CTL, DRIVER, STAND_IN, TOOL, UVM, make_devices

GIB = 1 << 30
READY_S = 60.0
_ENTER = """
mount --bind $1/dev /dev && mount -t tmpfs tmpfs /proc/driver && mkdir /proc/driver/nvidia && touch \
/proc/driver/nvidia/version && mount --bind $1/cgroup /sys/fs/cgroup && shift && exec "$@"
"""

APPLICATION = """
import os, sys
device = os.open("/dev/nvidia-uvm", os.O_RDWR)
token = os.urandom(8).hex()
print("ready", flush=True)
for line in sys.stdin:
    print("token", token, flush=True)
"""

DEPLOYMENT = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"name": "llm", "namespace": "default"},
    "spec": {
        "template": {
            "metadata": {"labels": {"app": "web"}},
            "spec": {
                "containers": [{"name": "main", "image": "x", "resources": {"limits": {"nvidia.com/gpu": 1}}}],
            },
        }
    },
}


def run_in_namespace(directory: Path) -> dict[str, Any]:
    """Run this module where the machine looks as it should, and give what it printed."""
    make_devices(directory / "dev")
    group = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
    memory = directory / "cgroup" / group.removeprefix("0::").lstrip("/")
    memory.mkdir(parents=True)
    (directory / "tool").mkdir()
    build_nvml(directory)
    argv = ["unshare", "-m", "sh", "-c", _ENTER, "sh", str(directory), sys.executable, "-m", __spec__.name]
    env = {**os.environ, "LD_LIBRARY_PATH": str(directory), "FAKE_NVML": str(directory / "nvml")}
    done = subprocess.run(
        [*argv, str(directory), str(memory)], env=env, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(done.stdout))


class Scenario:
    """The node, its pod, and what is told to the fakes."""

    def __init__(self, node: AgentNode, directory: Path, memory: Path) -> None:
        self.node = node
        self._directory = directory
        self._memory = memory
        self.mend()

    def mend(self) -> None:
        """Have nothing in the way of a save."""
        self.limit("max")
        for path in (self._directory / "tool").iterdir():
            if path.name != TOOL.path.rpartition("/")[2]:
                path.unlink()

    def gpus(self, *, driver: str = DRIVER, mode: int = 0, used: int = GIB) -> None:
        (self._directory / "nvml").write_text(f"{driver}\n{used} {24 * GIB} {mode} NVIDIA L4\n")

    def no_driver(self) -> None:
        (self._directory / "nvml").write_text("")

    def limit(self, limit: object, *, gpu_bytes: int = GIB) -> None:
        self.gpus(used=gpu_bytes)
        (self._memory / "memory.current").write_text(f"{GIB}\n")
        (self._memory / "memory.max").write_text(f"{limit}\n")

    def tell(self, what: str, *calls: int) -> None:
        for call in calls:
            (self._directory / "tool" / f"--toggle-{call}").write_text(what)

    def calls(self) -> list[str]:
        path = self._directory / "tool" / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def start(self, pod: str) -> Running:
        """Run a pod of the Deployment; give its second container."""
        tool = self._directory / "tool"
        (tool / "cuda-checkpoint").write_text(STAND_IN)
        (tool / "cuda-checkpoint").chmod(0o755)
        rootfs = bundle.make_rootfs(self._directory / "rootfs")
        (rootfs.path / "var" / "tool").mkdir(parents=True, exist_ok=True)
        mounts = (*rootfs.mounts, bundle.Mount("/var/tool", str(tool), options=("rbind", "rw")))
        cri = {
            "io.kubernetes.cri.sandbox-namespace": "default",
            "io.kubernetes.cri.sandbox-name": pod,
            "io.kubernetes.cri.sandbox-uid": f"uid-{pod}",
        }
        sandbox = bundle.Container(
            args=("/bin/sleep", "100000"),
            rootfs=rootfs,
            annotations=cri,
            pod=bundle.Pod(sandbox_id=f"{pod}-sandbox", name="", first=True),
        )
        main = bundle.Container(
            args=(str(bundle.python_interpreter()), "-IS", "-c", APPLICATION),
            rootfs=replace(rootfs, mounts=mounts),
            annotations=cri,
            pod=bundle.Pod(sandbox_id=f"{pod}-sandbox", name="main", first=False),
        )
        self.node.run(f"{pod}-sandbox", self._bundle(sandbox))
        return self.node.run(f"{pod}-main", self._bundle(main))

    def _bundle(self, container: bundle.Container) -> Path:
        assert container.pod is not None
        name = "sandbox" if container.pod.first else "main"
        path = bundle.write_bundle(self._directory / f"bundle-{container.pod.sandbox_id}-{name}", container)
        spec = json.loads((path / "config.json").read_text())
        spec["linux"]["devices"] = [UVM, CTL]
        (path / "config.json").write_text(json.dumps(spec))
        return path


REFUSALS: dict[str, Callable[[Scenario], None]] = {
    "partitioned": lambda on: on.gpus(mode=1),
    "another driver": lambda on: on.gpus(driver="999.1"),
    "no driver any more": lambda on: on.no_driver(),
    "no room": lambda on: on.limit(8 * GIB, gpu_bytes=20 * GIB),
    "the tool fails each time": lambda on: on.tell("fail", 1, 2, 3),
    "the tool hangs": lambda on: on.tell("hang", 1),
}


def main() -> None:
    """Go through the cases."""
    directory, memory = Path(sys.argv[1]), Path(sys.argv[2])
    settings = f'gpu_tool = "2s"\n[gpu]\ntool = "{TOOL.path}"\n'
    (directory / "nvml").write_text(f"{DRIVER}\n{GIB} {24 * GIB} 0 NVIDIA L4\n")
    with AgentNode(settings=settings, flags=[f"--nvproxy-driver-version={DRIVER}"]) as node:
        scenario = Scenario(node, directory, memory)
        (node.objects / "pods").mkdir()
        (node.objects / "pods" / "llm.json").write_text(json.dumps(DEPLOYMENT))
        node.write_policy("manual")
        origin = "llm-7d9f8b6c5-aaaaa"
        pod = scenario.start(origin)
        assert pod.server.receive(timeout_s=READY_S) == "ready"
        token = pod.server.request("token", timeout_s=READY_S)
        told = {}
        for name, spoil in REFUSALS.items():
            spoil(scenario)
            done = json.loads(node.snapagent("snapshot", origin, "--json").stdout)
            told[name] = {"said": json.dumps(done), "goes_on": pod.server.request("token", timeout_s=READY_S) == token}
            scenario.mend()
        saved = json.loads(node.snapagent("snapshot", origin, "--json").stdout)
        calls_of_save = scenario.calls()
        copy = scenario.start("llm-7d9f8b6c5-bbbbb")
        same = copy.server.request("token", timeout_s=READY_S) == token
        event = node.until_event("restored")
        print(
            json.dumps(
                {
                    "refusals": told,
                    "saved": saved,
                    "calls_of_save": calls_of_save,
                    "calls_of_restore": scenario.calls()[len(calls_of_save) :],
                    "same_memory": same,
                    "restored": event,
                }
            )
        )


if __name__ == "__main__":
    main()
