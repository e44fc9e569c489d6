"""The workload trigger, from the application's write to the snapshot, with the races of gVisor's events."""

import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio
import trio.testing

from agent.node.checkpoint import Saver, StoreUploader
from agent.node.course import Ending, Origin, Phase, Step
from agent.node.jobs import JobDirectory
from agent.node.sandbox import RunscSandbox
from agent.node.workload_trigger import PREFIX, TriggerEnded, armed_annotations, await_written
from agent.runtime import bundle
from agent.runtime.arguments import GpuTool
from agent.runtime.bundle import CONTAINER_TYPE
from agent.runtime.control_socket import ControlError, ControlSocket, ControlTimeout, Process
from agent.runtime.failures import FailureKind, RuntimeFailure
from agent.runtime.runsc import Runsc
from bench.server import NoAnswer
from streamd.save.pull import pull
from streamd.store.opening import open_store
from tests.node.conftest import NewJob, Pod, Programs, small_disk

DOCUMENTED = Path(__file__).parents[2] / "docs" / "workload"

# Asks for a save at each line that it reads, and says what it got.
ASKING = """
import os, sys
print("ready")
for line in sys.stdin:
    fd = os.open("/proc/gvisor/checkpoint", os.O_RDWR)
    try:
        os.write(fd, b"1")
    except OSError as error:
        print(error.errno)
    print(os.read(fd, 16).decode().strip())
"""


def armed(programs: Programs, source: str, image: Path | None, **other: object) -> bundle.Container:
    return programs.container(source, annotations=armed_annotations({}, image), **other)


def test_the_trigger_is_set_up_for_the_first_container_and_allowed_for_the_others() -> None:
    image = Path("/var/lib/x/image")
    first = armed_annotations({CONTAINER_TYPE: "sandbox", "other": "kept"}, image)
    assert first == {
        CONTAINER_TYPE: "sandbox",
        "other": "kept",
        f"{PREFIX}enable": "true",
        f"{PREFIX}path": "/var/lib/x/image",
        f"{PREFIX}resume": "true",
        f"{PREFIX}compression": "none",
        f"{PREFIX}exclude-committed-zero-pages": "true",
    }
    second = armed_annotations({CONTAINER_TYPE: "container"}, image)
    assert second == {CONTAINER_TYPE: "container", f"{PREFIX}enable": "true"}
    tool = armed_annotations({}, image, gpu_tool=GpuTool("/bin/cuda-checkpoint", sequential=True))
    assert tool[f"{PREFIX}cuda-checkpoint-path"] == "/bin/cuda-checkpoint"
    assert tool[f"{PREFIX}cuda-checkpoint-sequential"] == "true"


def test_a_pod_s_author_chooses_no_path_on_the_node() -> None:
    hostile = {f"{PREFIX}path": "/etc", f"{PREFIX}save-restore-exec-argv": "/bin/sh", f"{PREFIX}enable": "true"}
    assert armed_annotations(hostile, None) == {}
    assert armed_annotations(hostile, Path("/i"))[f"{PREFIX}path"] == "/i"
    assert f"{PREFIX}save-restore-exec-argv" not in armed_annotations(hostile, Path("/i"))


@pytest.mark.parametrize("ending", Ending)
async def test_an_application_that_asks_is_saved_and_a_copy_knows_that_it_is_one(
    ending: Ending, programs: Programs, runsc: Runsc, new_job: NewJob, tmp_path: Path
) -> None:
    jobs = JobDirectory(tmp_path / "jobs")
    job = new_job(ending=ending, origin=Origin.WORKLOAD, phase=Phase.ARMED)
    pod = programs.start(armed(programs, ASKING, jobs.arm(job)))
    assert pod.server.receive(timeout_s=60) == "ready"
    sandbox = RunscSandbox(runsc, pod.sandbox_id)
    with runsc.waiter(pod.sandbox_id) as waiter:
        pod.server.send("now")
        assert await await_written(sandbox, jobs.image(job)) == TriggerEnded(True)
        saver = Saver(jobs, StoreUploader(open_store), has_whole_state=runsc.has_whole_state)
        outcome = await saver.save(job, sandbox)
        assert (outcome.course.step, outcome.course.failure, outcome.job.attempt) == (Step.DONE, None, 0)
        assert pod.server.receive(timeout_s=60) == "resume"
        if ending is Ending.STOP:
            assert waiter.result(timeout_s=60) == 0
            with pytest.raises(NoAnswer, match="ended"):
                pod.server.receive(timeout_s=60)
        else:
            # Once in a life: then the application is told.
            assert pod.server.request("now") == ""
            assert pod.server.receive(timeout_s=60) == "error"
    store = open_store(job.store_url)
    pull(store, job.snapshot_id, tmp_path / "pulled")
    store.close()
    again = new_job(origin=Origin.WORKLOAD, phase=Phase.ARMED)
    copy = programs.restore(armed(programs, ASKING, jobs.arm(again)), tmp_path / "pulled")
    # A restored kernel counts the save that it came from: that must not pass for one of its own.
    with trio.move_on_after(0.5):
        await await_written(RunscSandbox(runsc, copy.sandbox_id), jobs.image(again))
        raise AssertionError("nothing was asked for")
    assert copy.server.receive(timeout_s=60) == "restore"
    copy.server.send("again")
    assert await await_written(RunscSandbox(runsc, copy.sandbox_id), jobs.image(again)) == TriggerEnded(True)
    assert copy.server.receive(timeout_s=60) == "resume"


# Long enough for a wait to be attached in the sandbox, which nothing tells; where it isn't, a test shows less.
_ATTACHED_S = 0.3


async def wait(sandbox: RunscSandbox, image: Path, into: list[TriggerEnded]) -> None:
    into.append(await await_written(sandbox, image))


async def test_a_save_by_runsc_s_command_line_is_not_taken_for_the_application_s(
    programs: Programs, runsc: Runsc, tmp_path: Path
) -> None:
    image = tmp_path / "image"
    image.mkdir()
    pod = programs.start(armed(programs, ASKING, image))
    assert pod.server.receive(timeout_s=60) == "ready"
    ended: list[TriggerEnded] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait, RunscSandbox(runsc, pod.sandbox_id), image, ended)
        await trio.sleep(_ATTACHED_S)
        await trio.to_thread.run_sync(runsc.checkpoint, pod.sandbox_id, tmp_path / "manual")
        await trio.sleep(_ATTACHED_S)
        assert ended == []
        pod.server.send("now")
    assert ended == [TriggerEnded(True)]


async def test_a_save_that_ended_before_anybody_waited_is_found(
    programs: Programs, runsc: Runsc, tmp_path: Path
) -> None:
    image = tmp_path / "image"
    image.mkdir()
    pod = programs.start(armed(programs, ASKING, image))
    assert pod.server.receive(timeout_s=60) == "ready"
    pod.server.send("now")
    assert pod.server.receive(timeout_s=60) == "resume"
    sandbox = RunscSandbox(runsc, pod.sandbox_id)
    assert await await_written(sandbox, image) == TriggerEnded(True)
    runsc.delete(pod.sandbox_id, force=True)
    assert await await_written(sandbox, image) == TriggerEnded(True)


async def test_a_pod_that_ends_without_having_asked_ends_the_wait(
    programs: Programs, runsc: Runsc, tmp_path: Path
) -> None:
    image = tmp_path / "image"
    image.mkdir()
    pod = programs.start(armed(programs, ASKING, image))
    assert pod.server.receive(timeout_s=60) == "ready"
    ended: list[TriggerEnded] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait, RunscSandbox(runsc, pod.sandbox_id), image, ended)
        await trio.sleep(_ATTACHED_S)
        await trio.to_thread.run_sync(runsc.end_sandbox, pod.sandbox_id)
    assert ended == [TriggerEnded(False)]


async def test_a_full_disk_is_told_to_the_application_and_to_us_and_nothing_is_pushed(
    programs: Programs, runsc: Runsc, new_job: NewJob, tmp_path: Path
) -> None:
    with small_disk(tmp_path / "small", 1 << 20) as disk:
        jobs = JobDirectory(disk / "jobs")
        job = new_job(origin=Origin.WORKLOAD, phase=Phase.ARMED)
        pod = programs.start(armed(programs, ASKING, jobs.arm(job)))
        assert pod.server.receive(timeout_s=60) == "ready"
        ended: list[TriggerEnded] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait, RunscSandbox(runsc, pod.sandbox_id), jobs.image(job), ended)
            await trio.sleep(_ATTACHED_S)
            pod.server.send("now")
        assert pod.server.receive(timeout_s=60) == "error"
        assert ended[0].asked
        assert ended[0].failure is not None
        assert ended[0].failure.kind is FailureKind.NO_SPACE
        runsc.delete(pod.sandbox_id, force=True)


@dataclass(slots=True)
class Leaking(RunscSandbox):
    """A sandbox whose files are this process's: after a failed save gVisor's own are closed sooner or later.

    It answers so many waits, each in no time of its own.
    """

    clock: trio.testing.MockClock = field(default_factory=trio.testing.MockClock)
    waits_left: int = 200
    failures: int = 0
    kind: FailureKind = FailureKind.NO_SPACE
    grows: Path | None = None

    @property
    def control(self) -> ControlSocket:
        return self  # type: ignore[return-value]

    async def pid(self) -> int:
        return os.getpid()

    async def tools(self) -> tuple[tuple[str, Process], ...]:
        return ()

    async def wait_checkpoint(self, *, timeout_s: float) -> None:
        if self.failures:
            self.failures -= 1
            raise ControlError("WaitCheckpoint", RuntimeFailure(self.kind, "it failed"))
        self.waits_left -= 1
        if not self.waits_left:
            await trio.sleep_forever()
        self.clock.jump(timeout_s)
        if self.grows is not None:
            self.grows.write_bytes(self.grows.read_bytes() + b"x")
        raise ControlTimeout("WaitCheckpoint", RuntimeFailure(FailureKind.UNKNOWN, "no answer"))


@pytest.mark.parametrize(
    ("failures", "kind", "grows", "has_ended"),
    [
        (1, FailureKind.NO_SPACE, False, True),
        (1, FailureKind.NO_SPACE, True, False),  # that failure was another save's
        (1, FailureKind.SANDBOX_GONE, False, False),  # it wasn't heard of the save, but instead
        (0, FailureKind.NO_SPACE, False, False),
    ],
)
async def test_a_save_that_failed_has_ended_though_its_file_stays_open(
    failures: int,
    kind: FailureKind,
    grows: bool,
    has_ended: bool,
    runsc: Runsc,
    tmp_path: Path,
    mock_clock: trio.testing.MockClock,
) -> None:
    mock_clock.rate = 1
    state = tmp_path / "checkpoint.img"
    state.write_bytes(b"half")
    ended: list[TriggerEnded] = []
    sandbox = Leaking(runsc, "x", clock=mock_clock, failures=failures, kind=kind, grows=state if grows else None)
    with state.open("rb"):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait, sandbox, tmp_path, ended)
            while not ended and sandbox.waits_left:
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
    assert [(each.asked, each.failure is not None) for each in ended] == ([(True, True)] if has_ended else [])


@pytest.mark.parametrize("program", ["signal_ready.py", "signal_ready.sh"])
async def test_the_documented_examples_do_what_they_say(
    program: str, programs: Programs, runsc: Runsc, tmp_path: Path
) -> None:
    image, rootfs = tmp_path / "image", bundle.make_rootfs(tmp_path / "rootfs")
    image.mkdir()
    (rootfs.path / program).write_bytes((DOCUMENTED / program).read_bytes())
    interpreter = (str(bundle.python_interpreter()), "-IS") if program.endswith(".py") else ("/bin/sh",)

    def container(pod_name: str, annotations: dict[str, str]) -> bundle.Container:
        return bundle.Container(
            args=(*interpreter, f"/{program}"),
            rootfs=rootfs,
            env={"PATH": "/usr/bin:/bin", "POD_NAME": pod_name},
            hostname=f"host-{pod_name}",
            annotations=annotations,
        )

    def said(pod: Pod) -> list[str]:
        return pod.server.receive(timeout_s=60).split()

    original = programs.start(container("web-0", armed_annotations({}, image)))
    became, name, host, token, *_ = said(original)
    assert (became, name, host) == ("resume", "web-0", "host-web-0")
    again = tmp_path / "again"
    again.mkdir()
    copy = programs.restore(container("web-1", armed_annotations({}, again)), image)
    became, name, host, new_token, *_ = said(copy)
    assert (became, name, host) == ("restore", "web-1", "host-web-1")
    assert new_token != token
    assert len(new_token) == 32
    alone = programs.start(container("web-2", {}))
    assert said(alone)[:3] == ["none", "web-2", "host-web-2"]
