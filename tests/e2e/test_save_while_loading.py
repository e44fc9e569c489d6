"""A pod that is itself being restored is saved when its memory is there, and not frozen for the rest of its load."""

import uuid
from collections.abc import Callable
from pathlib import Path

import trio
import trio.testing

from agent.node.checkpoint import Outcome, Saver, StoreUploader
from agent.node.course import Ending, Origin, Step
from agent.node.jobs import Job, JobDirectory
from agent.node.sandbox import RunscSandbox
from agent.runtime.runsc import Runsc
from bench.pods import Image, restored
from streamd.store.opening import open_store

Images = Callable[[int, str], Image]
Push = Callable[[Image, str], str]
Mount = Callable[[str], Path]


async def test_a_pod_that_still_loads_answers_while_its_save_waits(
    images: Images, push: Push, mount: Mount, runsc: Runsc, tmp_path: Path
) -> None:
    image = images(1, "ro")
    # Some 60 MB are stored: it loads for seconds after it runs.
    mountpoint = mount(push(image, "file") + "?rate=15MB/s")
    (tmp_path / "saved").mkdir()
    jobs = JobDirectory(tmp_path / "jobs")
    saver = Saver(jobs, StoreUploader(open_store), has_whole_state=runsc.has_whole_state)
    outcomes: list[Outcome] = []
    with restored(runsc, tmp_path, image.shape, mountpoint) as pod:
        ids = [str(uuid.uuid4()) for _ in range(3)]
        job = Job(
            job_id=ids[0],
            sandbox_id=pod.first,
            origin=Origin.MANUAL,
            ending=Ending.RESUME,
            store_url=f"file://{tmp_path / 'saved'}",
            snapshot_id=ids[1],
            push_id=ids[2],
        )

        async def save() -> None:
            outcomes.append(await saver.save(job, RunscSandbox(runsc, pod.first)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(save)
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert not jobs.path.exists(), "the save has begun"
            await trio.to_thread.run_sync(pod.ask_all, "touch 1")
            assert not jobs.path.exists(), "it answered after its load: nothing is shown"
        assert outcomes[0].course.step is Step.DONE
        assert tuple(pod.ask_all("hash")) == image.memory_hashes
