"""cuda-checkpoint, as gVisor really calls it, by a stand-in: at each step it works, fails, hangs, or answers nonsense.

gVisor calls the tool for processes that have a device of NVIDIA's open. There is no such device here, and none is
needed: runsc runs in a mount namespace of its own whose /dev has a `nvidia-uvm` that is another device under that name,
the application opens it, and gVisor asks nothing of it. What can't be driven so: /dev/nvidiactl and /dev/nvidia0
(gVisor asks them which GPUs they are), GPU memory, and what the real tool does.
"""

import dataclasses
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from agent.node.checkpoint import Saver, StoreUploader
from agent.node.course import Ending, Origin, Phase, Reason, Step
from agent.node.jobs import JobDirectory
from agent.node.restore import NotRestored, Restored, observe
from agent.node.sandbox import RunscSandbox, SandboxLimits
from agent.node.workload_trigger import armed_annotations, await_written
from agent.runtime import bundle
from agent.runtime.arguments import GlobalOptions, GpuTool
from agent.runtime.control_socket import ControlSocket
from agent.runtime.runsc import Runsc
from bench.pods import runsc_binary
from bench.server import Server
from streamd.save.pull import pull
from streamd.store.opening import open_store
from tests.node.conftest import NewJob

TOOL = GpuTool("/var/tool/cuda-checkpoint")
# One that runsc knows, and from 555 on gVisor asks each process's state first.
DRIVER = "580.65.06"
UVM = {"path": "/dev/nvidia-uvm", "type": "c", "major": 500, "minor": 0, "fileMode": 0o666}
CTL = {"path": "/dev/nvidiactl", "type": "c", "major": 195, "minor": 255, "fileMode": 0o666}

# It notes each call, with the number of the call of that kind, and does then what a file of that name tells it.
STAND_IN = """#!/bin/sh
n=$(($(grep -c -e "$1" /var/tool/calls 2>/dev/null) + 1))
echo "$@" >>/var/tool/calls
case $(cat "/var/tool/$1-$n" 2>/dev/null) in
fail) echo "told to fail"; exit 3 ;;
hang) mkfifo /tmp/never && read -r line </tmp/never ;;
nonsense) head -c 100000 /dev/urandom ;;
*) [ "$1" = --get-state ] && echo running ;;
esac
exit 0
"""

APPLICATION = """
import os, sys
device = os.open("/dev/nvidia-uvm", os.O_RDWR)
print("ready", flush=True)
for line in sys.stdin:
    answer = line.strip()
    if answer == "save":
        trigger = os.open("/proc/gvisor/checkpoint", os.O_RDWR)
        os.write(trigger, b"1")
        answer = os.read(trigger, 16).decode().strip()
    print("still", answer, flush=True)
"""


@dataclasses.dataclass(frozen=True, slots=True)
class GpuPod:
    """A sandbox with a stand-in for a GPU, and the directory through which its tool is told what to do."""

    runsc: Runsc
    bundle: Path
    tool: Path
    server: Server

    @property
    def calls(self) -> list[str]:
        """What the tool was called with, as far as that is, in order."""
        path = self.tool / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def tell(self, what: str, *, kind: str, call: int) -> None:
        """Tell the tool what to do at its n-th call of a kind."""
        (self.tool / f"--{kind}-{call}").write_text(what)

    def start(self) -> None:
        """Run it."""
        self.runsc.run("gpu-pod", self.bundle, self.server.stdio)
        self.server.connected()
        assert self.server.receive(timeout_s=60) == "ready"

    def sandbox(self, *, gpu_tool_s: float = 60.0) -> RunscSandbox:
        return RunscSandbox(self.runsc, "gpu-pod", TOOL, SandboxLimits(gpu_tool_s=gpu_tool_s, save_s=30.0))


@pytest.fixture
def made(tmp_path: Path) -> Iterator[GpuPod]:
    """Give a pod that isn't started yet."""
    tool = tmp_path / "tool"
    tool.mkdir()
    (tool / "cuda-checkpoint").write_text(STAND_IN)
    (tool / "cuda-checkpoint").chmod(0o755)
    rootfs = bundle.make_rootfs(tmp_path / "rootfs")
    (rootfs.path / "var" / "tool").mkdir(parents=True)
    mounts = (*rootfs.mounts, bundle.Mount("/var/tool", str(tool), options=("rbind", "rw")))
    container = bundle.Container(
        args=(str(bundle.python_interpreter()), "-IS", "-c", APPLICATION),
        rootfs=dataclasses.replace(rootfs, mounts=mounts),
    )
    spec = bundle.container_spec(container)
    spec["linux"]["devices"] = [UVM, CTL]
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "config.json").write_text(json.dumps(spec))
    (tmp_path / "log").mkdir()
    options = GlobalOptions(
        root=tmp_path / "root",
        network="none",
        ignore_cgroups=True,
        debug_log_dir=tmp_path / "log",
        extra=(f"--nvproxy-driver-version={DRIVER}",),
    )
    runsc = Runsc(runsc_with_devices(tmp_path), options)
    with Server() as server:
        try:
            yield GpuPod(runsc, tmp_path / "bundle", tool, server)
        finally:
            runsc.remove_root()


@pytest.fixture
def pod(made: GpuPod) -> GpuPod:
    made.start()
    return made


def runsc_with_devices(directory: Path) -> Path:
    """Make a runsc that sees a /dev of ours, and nobody else does."""
    devices = make_devices(directory / "dev")
    program = directory / "runsc-with-devices"
    program.write_text(
        "#!/bin/sh\n"
        f"""exec unshare -m sh -c 'mount --bind {devices} /dev && exec {runsc_binary()} "$@"' runsc "$@"\n"""
    )
    program.chmod(0o755)
    return program


def make_devices(directory: Path) -> Path:
    """Make a /dev with what sandboxes, and streamd, need, and with a stand-in for a GPU."""
    directory.mkdir()
    # The device must be one that can be polled, as gVisor does: that is the random one.
    names = {"null": 3, "zero": 5, "full": 7, "random": 8, "urandom": 9, "nvidia-uvm": 8, "nvidiactl": 8}
    numbers = {name: os.makedev(1, minor) for name, minor in names.items()} | {"fuse": os.makedev(10, 229)}
    for name, number in numbers.items():
        os.mknod(directory / name, stat.S_IFCHR | 0o666, number)
        (directory / name).chmod(0o666)
    for name in ("pts", "shm", "mqueue"):
        (directory / name).mkdir()
    return directory


def saver(pod: GpuPod, directory: Path) -> Saver:
    jobs = JobDirectory(directory / "jobs")
    return Saver(jobs, StoreUploader(open_store), has_whole_state=pod.runsc.has_whole_state)


STATE, TOGGLE = "--get-state --pid 1", "--toggle --pid 1"


@pytest.mark.parametrize("ending", Ending)
async def test_the_gpu_s_state_is_moved_before_the_save_and_back_after_it_and_again_in_a_copy(
    ending: Ending, pod: GpuPod, new_job: NewJob, tmp_path: Path
) -> None:
    job = new_job("gpu-pod", ending=ending)
    outcome = await saver(pod, tmp_path).save(job, pod.sandbox())
    assert (outcome.course.step, outcome.course.failure) == (Step.DONE, None)
    # Of a pod that is to stop the state is moved although it is paused, and never back.
    assert pod.calls == ([STATE, TOGGLE, TOGGLE] if ending is Ending.RESUME else [STATE, TOGGLE])
    store = open_store(job.store_url)
    pull(store, job.snapshot_id, tmp_path / "pulled")
    store.close()
    with Server() as server:
        pod.runsc.restore("gpu-copy", pod.bundle, tmp_path / "pulled", server.stdio)
        server.connected()
        control = ControlSocket(pod.runsc.options.root, "gpu-copy")
        assert isinstance(await observe(control, {"app": "gpu-copy"}, None, timeout_s=60), Restored)
        assert server.request("here") == "here"
    assert pod.calls[-1] == TOGGLE
    assert len(pod.calls) == (4 if ending is Ending.RESUME else 3)


@pytest.mark.parametrize("what", ["fail", "hang"])
@pytest.mark.parametrize("ending", Ending)
async def test_a_tool_that_fails_or_hangs_on_the_way_out_fails_the_save_and_the_pod_goes_on(
    ending: Ending, what: str, pod: GpuPod, new_job: NewJob, tmp_path: Path
) -> None:
    pod.tell(what, kind="toggle", call=1)
    outcome = await saver(pod, tmp_path).save(
        new_job("gpu-pod", ending=ending), pod.sandbox(gpu_tool_s=1.0), max_attempts=1
    )
    assert outcome.course.failure is not None
    assert (outcome.course.step, outcome.course.failure.reason) == (
        Step.FAILED,
        Reason.GPU_TOOL if what == "fail" else Reason.GPU_TOOL_HUNG,
    )
    assert pod.server.request("here") == "here"
    assert pod.runsc.state("gpu-pod").status == "running"
    assert list((tmp_path / "jobs").iterdir()) == []


@pytest.mark.parametrize("what", ["fail", "hang"])
async def test_a_tool_that_fails_or_hangs_when_the_application_has_asked_ends_the_wait_and_the_pod_goes_on(
    what: str, made: GpuPod, new_job: NewJob, tmp_path: Path
) -> None:
    # Nobody but the wait bounds such a save: gVisor runs the tool by itself, and without an end.
    jobs = JobDirectory(tmp_path / "jobs")
    job = new_job("gpu-pod", origin=Origin.WORKLOAD, phase=Phase.ARMED)
    config = made.bundle / "config.json"
    spec = json.loads(config.read_text())
    spec["annotations"] = armed_annotations({}, jobs.arm(job), gpu_tool=TOOL)
    config.write_text(json.dumps(spec))
    made.start()
    made.tell(what, kind="toggle", call=1)
    made.server.send("save")
    with trio.fail_after(60):
        ended = await await_written(made.sandbox(gpu_tool_s=1.0), jobs.image(job))
    assert ended.asked
    assert made.server.receive(timeout_s=60) == "still error"
    assert made.server.request("here") == "here"
    assert made.calls == [STATE, TOGGLE]


async def test_a_tool_that_failed_once_is_asked_again(pod: GpuPod, new_job: NewJob, tmp_path: Path) -> None:
    pod.tell("fail", kind="toggle", call=1)
    outcome = await saver(pod, tmp_path).save(new_job("gpu-pod"), pod.sandbox())
    assert (outcome.course.step, outcome.job.attempt) == (Step.DONE, 1)


@pytest.mark.parametrize("what", ["fail", "hang"])
async def test_a_tool_that_does_not_bring_the_state_back_is_told_of(
    what: str, pod: GpuPod, new_job: NewJob, tmp_path: Path
) -> None:
    pod.tell(what, kind="toggle", call=2)
    outcome = await saver(pod, tmp_path).save(new_job("gpu-pod"), pod.sandbox(gpu_tool_s=1.0), max_attempts=1)
    assert outcome.course.failure is not None
    assert outcome.course.failure.reason is (Reason.GPU_TOOL if what == "fail" else Reason.GPU_TOOL_HUNG)
    assert pod.server.request("here") == "here"


async def test_a_process_without_state_of_its_own_is_left_alone_and_so_is_one_whose_state_is_nonsense(
    pod: GpuPod, new_job: NewJob, tmp_path: Path
) -> None:
    pod.tell("fail", kind="get-state", call=1)
    pod.tell("nonsense", kind="get-state", call=2)
    for calls in ([STATE], [STATE, STATE, TOGGLE, TOGGLE]):
        outcome = await saver(pod, tmp_path).save(new_job("gpu-pod"), pod.sandbox())
        assert outcome.course.step is Step.DONE
        assert pod.calls == calls


async def test_a_copy_whose_gpu_state_does_not_come_back_does_not_count_as_restored(
    pod: GpuPod, tmp_path: Path
) -> None:
    pod.runsc.begin_checkpoint("gpu-pod", tmp_path / "image", gpu_tool=TOOL).result(timeout_s=60)
    pod.tell("fail", kind="toggle", call=3)
    with Server() as server:
        pod.runsc.restore("gpu-copy", pod.bundle, tmp_path / "image", server.stdio)
        server.connected()
        control = ControlSocket(pod.runsc.options.root, "gpu-copy")
        assert isinstance(await observe(control, {"app": "gpu-copy"}, None, timeout_s=60), NotRestored)


async def test_a_copy_whose_tool_hangs_is_given_up_at_the_deadline(pod: GpuPod, tmp_path: Path) -> None:
    pod.runsc.begin_checkpoint("gpu-pod", tmp_path / "image", gpu_tool=TOOL).result(timeout_s=60)
    pod.tell("hang", kind="toggle", call=3)
    with Server() as server:
        pod.runsc.restore("gpu-copy", pod.bundle, tmp_path / "image", server.stdio)
        server.connected()
        control = ControlSocket(pod.runsc.options.root, "gpu-copy")
        outcome = await observe(control, {"app": "gpu-copy"}, None, timeout_s=1.0)
        assert isinstance(outcome, NotRestored)
        assert "not loaded" in outcome.failure.message


def test_this_runsc_knows_the_driver_that_is_pretended(pod: GpuPod) -> None:
    assert DRIVER in pod.runsc.supported_gpu_drivers()
