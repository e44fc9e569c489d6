"""A real sandbox loads from a daemon's mount while the workers that serve it are killed; it notices a pause.

Another reader asks for one page after another of what is there, all along: the longest time in which it got no answer
is what the kill cost whoever read then. It is measured and printed; only a hang fails.
102 kills with STREAMD_STRESS=full, else 12.
"""

import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.runtime.loading import find_completed
from agent.runtime.runsc import Runsc
from bench.daemons import Daemon
from bench.mount_users import pause_s
from bench.pods import Image, restored
from bench.workload import touch_crc

_LOAD_S = 120.0
_KILLS = 3
_SEEDS = range(17) if os.environ.get("STREAMD_STRESS") == "full" else range(2)
# Some 60 MB are stored: it loads for as long as all the kills take, and longer.
_SLOW = "?rate=5MB/s"
# Pages that the other reader goes over while the kills go on, which takes seconds, and tens without a cache.
_PROBED_BYTES, _PROBED_PASSES = 1 << 20, 200
_PAUSE_MAX_S = 10.0

Images = Callable[[int, str], Image]
Push = Callable[[Image, str], str]


@pytest.mark.parametrize("has_cache", [True, False], ids=["cache", "no-cache"])
@pytest.mark.parametrize("seed", _SEEDS)
def test_a_sandbox_whose_workers_are_killed_while_it_loads_comes_back_whole(
    images: Images, push: Push, runsc: Runsc, tmp_path: Path, seed: int, has_cache: bool
) -> None:
    image = images(1, "ro")
    [heap] = image.shape.heaps
    url = push(image, "file") + _SLOW
    dice = random.Random(seed)
    pages = image.directory / "pages.img"
    with Daemon(has_cache=has_cache) as daemon:
        served = daemon.image(url, prefetch="all")
        with (
            daemon.client.lease(served.id, owner="test", purpose="restore"),
            restored(runsc, tmp_path, image.shape, served.mountpoint) as pod,
        ):
            [server] = pod.servers
            before = served.mounts()
            probe = served.reader(pages, slots=1, read_bytes=4096, end=_PROBED_BYTES, passes=_PROBED_PASSES)
            served.until_open(probe)
            kills: list[float] = []
            for number in range(1, _KILLS + 1):
                time.sleep(dice.uniform(0.0, 0.5))
                assert find_completed(runsc.debug_log(pod.first)) is None, "it has loaded before the kill"
                if not probe.is_done():
                    kills.append(time.monotonic())
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
            assert loading.loaded_bytes == pages.stat().st_size
            assert served.mounts() == before
            assert served.state()["restarts"] == _KILLS
            outcome = probe.outcome()
            assert outcome.is_clean
        assert daemon.complaints() == []
    pauses = [pause_s(outcome.gaps, at_s) for at_s in kills]
    print("pauses of kills that a reader met, s:", json.dumps([round(each, 3) for each in pauses]))
    assert kills
    assert min(pauses) > 0
    assert max(pauses) <= _PAUSE_MAX_S
