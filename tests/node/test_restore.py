"""Restores of real sandboxes, good and bad: what is observed, and that only a real one counts."""

import os
from pathlib import Path

import pytest
import trio

from agent.node.restore import Canary, NotRestored, Restored, Stage, canary_text, observe, read_canary, saved_canary
from agent.runtime.control_socket import ControlSocket, Process, Savings
from agent.runtime.failures import FailureKind, classify
from agent.runtime.runsc import Runsc, RunscError
from tests.node.conftest import Programs

SLEEPER = """
import time
heap = [bytes([1 + n % 255]) * (1 << 20) for n in range(16)]
print("ready")
while True:
    time.sleep(0.01)
"""


async def save(programs: Programs, runsc: Runsc, image: Path) -> Canary:
    pod = programs.start(programs.container(SLEEPER))
    assert pod.server.receive(timeout_s=60) == "ready"
    control = ControlSocket(runsc.options.root, pod.sandbox_id)
    canary = await saved_canary(control, {"web": pod.sandbox_id})
    assert [process.command for process in canary.processes["web"]]
    await trio.to_thread.run_sync(runsc.checkpoint, pod.sandbox_id, image)
    return canary


async def test_a_restored_pod_is_proven_by_its_sandbox_and_its_memory(
    programs: Programs, runsc: Runsc, tmp_path: Path
) -> None:
    canary = await save(programs, runsc, tmp_path / "image")
    copy = programs.restore(programs.container(SLEEPER), tmp_path / "image")
    control = ControlSocket(runsc.options.root, copy.sandbox_id)
    outcome = await observe(control, {"web": copy.sandbox_id}, canary, timeout_s=60)
    assert isinstance(outcome, Restored)
    assert outcome.savings.wall_s != 0
    stranger = Canary({"web": (Process(77, "stranger"),)})
    outcome = await observe(control, {"web": copy.sandbox_id}, stranger, timeout_s=60)
    assert isinstance(outcome, NotRestored)
    assert outcome.reached is Stage.LOADED
    assert "no process of the saved container web" in outcome.failure.message


@pytest.mark.parametrize(
    ("savings", "said"),
    [
        (Savings(cpu_s=0.96, wall_s=28.3), "28.3 s older than this one is now, and had used 1.0 s more of CPU"),
        (Savings(cpu_s=-0.04, wall_s=-1.25), "1.2 s younger than this one is now, and had used 0.0 s more of CPU"),
    ],
)
def test_what_gvisor_calls_saved_time_is_told_as_what_it_is(savings: Savings, said: str) -> None:
    assert str(Restored(savings)) == f"at its save the saved sandbox was {said}"


def test_a_canary_is_kept_as_text_and_what_is_none_is_none() -> None:
    canary = Canary({"web": (Process(1, "python3"), Process(7, "worker")), "log": ()})
    assert read_canary(canary_text(canary)) == canary
    many = Canary({"web": tuple(Process(pid, "x") for pid in range(1000))})
    assert len(canary_text(many)) < 1000
    for hostile in ("", "[]", "{", '{"web": 7}', '{"web": [[1]]}', '{"web": [["x", "y"]]}', "[" * 100_000):
        assert read_canary(hostile) is None


async def test_a_pod_that_was_started_cold_is_never_taken_for_restored(programs: Programs, runsc: Runsc) -> None:
    pod = programs.start(programs.container(SLEEPER))
    assert pod.server.receive(timeout_s=60) == "ready"
    control = ControlSocket(runsc.options.root, pod.sandbox_id)
    canary = await saved_canary(control, {"web": pod.sandbox_id})
    outcome = await observe(control, {"web": pod.sandbox_id}, canary, timeout_s=60)
    assert isinstance(outcome, NotRestored)
    assert (outcome.reached, outcome.failure.kind) == (Stage.RUNNING, FailureKind.NOT_RESTORING)


async def test_pages_that_end_too_early_are_a_failed_restore_and_not_a_running_pod(
    programs: Programs, runsc: Runsc, tmp_path: Path
) -> None:
    image = tmp_path / "image"
    await save(programs, runsc, image)
    os.truncate(image / "pages.img", (image / "pages.img").stat().st_size - (1 << 20))
    try:
        copy = programs.restore(programs.container(SLEEPER), image)
    except RunscError:  # it may show before the RPC is answered
        return
    control = ControlSocket(runsc.options.root, copy.sandbox_id)
    outcome = await observe(control, {"web": copy.sandbox_id}, None, timeout_s=60)
    assert isinstance(outcome, NotRestored)
    assert outcome.failure.kind in (
        FailureKind.SHORT_IMAGE,
        FailureKind.LOAD_FAILED,
        FailureKind.SANDBOX_GONE,
        FailureKind.NOT_RESTORING,
    )


# What is done to an image, and what runsc says then. A state file that can't be read makes this gVisor panic (it wakes
# those who wait for the restore before they can), so that only the sandbox's death is told: the checks before the RPC
# (restore_check.py) are what names it.
HARMS = {
    "bad magic": FailureKind.SANDBOX_GONE,
    "empty state": FailureKind.SANDBOX_GONE,
    "another version": FailureKind.VERSION_MISMATCH,
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_refused_restore_says_why(harm: str, programs: Programs, runsc: Runsc, image_copy: Path) -> None:
    state = image_copy / "checkpoint.img"
    content = state.read_bytes()
    match harm:
        case "bad magic":
            state.write_bytes(b"gVisorXX" + content[8:])
        case "empty state":
            state.write_bytes(b"")
        case "another version":
            said = b'"runsc_version":"' + runsc.version().encode()
            assert content.count(said) == 1
            state.write_bytes(content.replace(said, said[:-1] + b"!"))
    with pytest.raises(RunscError) as caught:
        programs.restore(programs.container(SLEEPER), image_copy)
    failure = classify(caught.value.messages)
    assert failure.kind is HARMS[harm], failure.message
