"""An agent that saves a fake pod and dies at a point: run as a process by test_agent_killed.py.

Arguments: directory, image, ending, point.
"""

import sys
from pathlib import Path

import trio

from agent.node.checkpoint import Saver, StoreUploader
from agent.node.course import Ending, Origin
from agent.node.jobs import Job
from streamd.store.opening import open_store
from streamd.store.port import Store
from tests.node.fake_pod import DyingJobs, FakePod, dies_at

IDS = ("11111111-1111-4111-8111-111111111111", "22222222-2222-4222-8222-222222222222")


def main() -> None:
    """Save, and die."""
    directory, image, ending, point = Path(sys.argv[1]), Path(sys.argv[2]), Ending(sys.argv[3]), sys.argv[4]

    def opened(url: str) -> Store:
        dies_at("push", point)
        return open_store(url)

    def whole(_: Path) -> bool:
        dies_at("verify", point)
        return True

    job = Job(
        job_id=IDS[0],
        sandbox_id="sandbox",
        origin=Origin.MANUAL,
        ending=ending,
        store_url=f"file://{directory / 'store'}",
        snapshot_id=IDS[1],
        push_id=IDS[1],
    )
    pod = FakePod(directory / "pod", image, dies=point)
    saver = Saver(DyingJobs(directory / "jobs", dies=point), StoreUploader(opened), has_whole_state=whole)
    trio.run(saver.save, job, pod)


if __name__ == "__main__":
    main()
