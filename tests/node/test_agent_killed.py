"""The agent is killed at every step of a save: what its next life finds on the disk, and what it makes of it."""

import subprocess
import sys
from pathlib import Path

import pytest

from agent.node.checkpoint import Saver, StoreUploader
from agent.node.course import Ending, Found, Step
from agent.node.jobs import JobDirectory
from bench.pods import Image
from streamd.errors import NotFound
from streamd.store.catalog import open_snapshot
from streamd.store.opening import open_store
from tests.node.dying_agent import IDS
from tests.node.fake_pod import FakePod

_BOTH = ("begun", "begun!", "save", "save-half", "save!", "verify", "committed", "committed!", "push", "discard")
POINTS = [(Ending.RESUME, point) for point in _BOTH] + [
    (Ending.STOP, point) for point in (*_BOTH, "pause", "pause!", "end", "end!", "discard!")
]
# From the commit on the save is finished; before it, undone.
FINISHED = ("committed!", "end", "end!", "push", "discard", "discard!")


@pytest.mark.parametrize(("ending", "point"), POINTS)
async def test_the_next_life_finishes_or_undoes_it(
    ending: Ending, point: str, small_image: Image, tmp_path: Path
) -> None:
    (tmp_path / "store").mkdir()
    argv = [sys.executable, "-m", "tests.node.dying_agent", str(tmp_path), str(small_image.directory), ending, point]
    died = subprocess.run(argv, capture_output=True, timeout=120, cwd=Path(__file__).parents[2])
    assert died.returncode == 9, died.stderr.decode()

    pod = FakePod(tmp_path / "pod", small_image.directory)
    jobs = JobDirectory(tmp_path / "jobs")
    saver = Saver(jobs, StoreUploader(open_store, deadline_s=5), has_whole_state=lambda _: True)

    outcomes = await saver.recover(lambda _: pod)
    assert await saver.recover(lambda _: pod) == ()
    assert not jobs.path.exists() or list(jobs.path.iterdir()) == []
    assert pod.now is (Found.GONE if ending is Ending.STOP and point in FINISHED else Found.RUNNING)
    store = open_store(f"file://{tmp_path / 'store'}")
    try:
        if point in FINISHED:
            assert open_snapshot(store, IDS[1]).manifest.snapshot_id == IDS[1]
            assert all(outcome.course.step is Step.DONE for outcome in outcomes)
        else:
            with pytest.raises(NotFound):
                open_snapshot(store, IDS[1])
    finally:
        store.close()
