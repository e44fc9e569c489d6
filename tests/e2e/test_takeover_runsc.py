"""A real sandbox loads from a daemon's mount while the workers that serve it are killed; it notices a pause."""

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.runtime.loading import find_completed
from agent.runtime.runsc import Runsc
from bench.daemons import Daemon
from bench.pods import Image, restored
from bench.workload import touch_crc

_LOAD_S = 120.0
_KILLS = 3
# Some 60 MB are stored: it loads for as long as all the kills take, and longer.
_SLOW = "?rate=8MB/s"

Images = Callable[[int, str], Image]
Push = Callable[[Image, str], str]


@pytest.mark.parametrize("has_cache", [True, False], ids=["cache", "no-cache"])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_sandbox_whose_workers_are_killed_while_it_loads_comes_back_whole(
    images: Images, push: Push, runsc: Runsc, tmp_path: Path, seed: int, has_cache: bool
) -> None:
    image = images(1, "ro")
    [heap] = image.shape.heaps
    url = push(image, "file") + _SLOW
    dice = random.Random(seed)
    with Daemon(has_cache=has_cache) as daemon:
        served = daemon.image(url, prefetch="all")
        with (
            daemon.client.lease(served.id, owner="test", purpose="restore"),
            restored(runsc, tmp_path, image.shape, served.mountpoint) as pod,
        ):
            [server] = pod.servers
            before = served.mounts()
            for number in range(1, _KILLS + 1):
                time.sleep(dice.uniform(0.0, 0.5))
                assert find_completed(runsc.debug_log(pod.first)) is None, "it has loaded before the kill"
                served.kill_worker()
                # It asks for memory that may not be here, while nobody serves.
                server.send(f"touch {number}")
                daemon.tape.until("worker-replaced", image=served.id, count=number)
            for number in range(1, _KILLS + 1):
                right = touch_crc(heap.seed, heap.blocks, number)
                assert server.receive(timeout_s=_LOAD_S) == f"touched {right}"
            runsc.wait_restore(pod.first, timeout_s=_LOAD_S)
            assert tuple(pod.ask_all("hash")) == image.memory_hashes
            loading = find_completed(runsc.debug_log(pod.first))
            assert loading is not None
            assert loading.loaded_bytes == (image.directory / "pages.img").stat().st_size
            assert served.mounts() == before
            assert served.state()["restarts"] == _KILLS
        assert daemon.complaints() == []
