"""The agent is killed at each step of a save and of a restore: what its next life makes of disk, runtime and objects.

Of a save, whatever the moment: the pod is not paused, the trigger is over, the snapshot is Ready and in the store or
Failed and not, no job is left, and a pod that was to stop has ended exactly when there is a snapshot.

Of a restore: what the sandbox says in the end is what is said of the pod, no record and no lease outlives that, an
access counts if and only if the pod is back, and a pod whose restore has failed isn't restored again.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from agent.kube.conditions import Phase
from agent.node.course import Found
from agent.node.events import What
from agent.node.pods_here import State
from agent.node.restore import NotRestored, Restored, Stage
from agent.runtime.control_socket import Savings
from agent.runtime.failures import FailureKind, RuntimeFailure
from agent.wrapper.protocol import Plain, Restore
from bench.pods import Image
from streamd.errors import NotFound
from streamd.store.catalog import open_snapshot
from streamd.store.opening import open_store
from tests.agentd.conftest import Node, until

# Writes: the snapshot is created, begun; the trigger names it; checkpointed; replicated; the trigger is complete.
WRITES = [f"write {number}{mark}" for number in range(1, 7) for mark in ("", "!")]
POD = ["pod save", "pod save-half", "pod save!"]
POINTS = [("resume", point) for point in (*WRITES, *POD, "push", "push!")] + [
    ("stop", point) for point in (*WRITES, *POD, "push", "push!", "pod pause", "pod pause!", "pod end", "pod end!")
]


@pytest.mark.parametrize(("ending", "point"), POINTS)
async def test_the_next_life_finishes_the_save_or_says_that_it_has_failed(
    ending: str, point: str, node: Node, small_image: Image
) -> None:
    dies(node, small_image, ending, point)
    async with node.running():
        await until(lambda: node.triggered("now")[0] in ("True", "False"), "the trigger's end")
        await until(lambda: node.jobs() == [], "the end of the job")
        status, reason, _ = node.triggered("now")
        final = [each for each in node.snapshots() if each.phase is not Phase.FAILED]
        assert (status, reason) == (("True", "Complete") if final else ("False", "Failed"))
        assert [each.phase for each in final] in ([], [Phase.AVAILABLE])
        pod = node.runtime.pod("web").now
        assert pod is (Found.GONE if ending == "stop" and final else Found.RUNNING)
    store = open_store(node.store_url)
    try:
        for snapshot in node.snapshots():
            if snapshot in final:
                open_snapshot(store, snapshot.metadata.name)
            else:
                with pytest.raises(NotFound):
                    open_snapshot(store, snapshot.metadata.name)
    finally:
        store.close()


def dies(node: Node, image: Image, what: str, point: str) -> None:
    """Have an agent killed, and the next one find its pod."""
    argv = [sys.executable, "-m", "tests.agentd.dying_agent", str(node.directory), str(image.directory), what, point]
    died = subprocess.run(argv, capture_output=True, timeout=120, cwd=Path(__file__).parents[2])
    assert died.returncode == 9, died.stdout.decode() + died.stderr.decode()
    node.runtime.bundles["web"] = Path((node.directory / "bundle").read_text())


# Before the wrapper has its answer it starts the pod as runsc would; after that the sandbox knows how it ends.
BEFORE = ("hold", "hold!")
AFTER = ("answer!", "report!", "observe", "observe!", "write 1", "write 1!")
BACK = Restored(Savings(1.0, 2.0))
LOST = NotRestored(Stage.RUNNING, RuntimeFailure(FailureKind.SANDBOX_GONE, "it is gone"))
PLAIN = NotRestored(Stage.RUNNING, RuntimeFailure(FailureKind.NOT_RESTORING, "not restored"))
OUTCOMES: dict[str, tuple[Restored | NotRestored, What]] = {
    "it is back": (BACK, What.RESTORED),
    "it is lost": (LOST, What.RESTORE_FAILED),
    "plain": (PLAIN, What.FALLBACK),
}


@pytest.mark.parametrize("point", BEFORE)
async def test_a_restore_that_was_never_answered_leaves_nothing(point: str, node: Node, small_image: Image) -> None:
    await node.saved()
    dies(node, small_image, "restore", point)
    async with node.running() as agent:
        assert {pod.who.name: pod.state for pod in agent.here}["web"] is State.FOUND
        assert agent.restoring.records.all() == ()
        assert node.images.leases == []
        assert node.snapshots()[0].status.last_access_time == ""


@pytest.mark.parametrize(
    ("point", "name"),
    [
        *((point, "it is back") for point in AFTER),
        *((p, n) for p in ("answer!", "observe") for n in ("it is lost", "plain")),
    ],
)
async def test_the_next_life_follows_a_restore_to_its_end(
    point: str, name: str, node: Node, small_image: Image
) -> None:
    outcome, what = OUTCOMES[name]
    snapshot = await node.saved()
    dies(node, small_image, "restore", point)
    node.runtime.outcome = outcome
    async with node.running() as agent:
        assert (await node.event(what)).snapshot == snapshot
        await until(lambda: not any(lease.is_held for lease in node.images.leases), "the lease's end")
        assert [record.failure for record in agent.restoring.records.all()] == (
            ["it is gone"] if outcome is LOST else []
        )
        is_counted = outcome is BACK or point == "write 1!"  # by the life before
        assert bool(node.snapshots()[0].status.last_access_time) is is_counted
        await agent.decisions.create(node.create("web"))
        answer = await agent.decisions.start(node.start("web"))
        assert isinstance(answer, Plain if outcome is LOST else Restore)
