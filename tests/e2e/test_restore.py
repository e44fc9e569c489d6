"""A real sandbox comes back from a mount, with everything that it had."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from agent.runtime.loading import find_completed
from agent.runtime.runsc import Runsc
from bench.commands import Streamd
from bench.pods import Image, restored

_LOAD_S = 120.0
# Ten times what it takes on a busy machine; less than the command's own patience with a mount that doesn't end.
_UNMOUNT_S = 12.0

Images = Callable[[int, str], Image]
Push = Callable[[Image, str], str]
Mount = Callable[[str], Path]


@pytest.mark.parametrize("rootfs", ["ro", "rw"])
@pytest.mark.parametrize("containers", [1, 2])
@pytest.mark.parametrize("direct", [False, True], ids=["cached", "direct"])
@pytest.mark.parametrize("store", ["file", "gs"])
def test_a_pod_restored_from_a_mount_goes_on_where_it_was_saved(
    store: str,
    direct: bool,
    containers: int,
    rootfs: str,
    images: Images,
    push: Push,
    mount: Mount,
    runsc: Runsc,
    streamd: Streamd,
    tmp_path: Path,
) -> None:
    image = images(containers, rootfs)
    mountpoint = mount(push(image, store))
    with restored(runsc, tmp_path, image.shape, mountpoint, direct=direct) as pod, runsc.waiter(pod.first) as waiter:
        answers_while_it_loads = pod.ask_all("touch 1")
        runsc.wait_restore(pod.first, timeout_s=_LOAD_S)
        # A writable root pins copies of the mount in the sandbox's namespace; the command must not wait for those.
        streamd.unmount(mountpoint, timeout_s=_UNMOUNT_S)
        assert not mountpoint.is_mount()
        assert pod.ask_all("touch 1") == answers_while_it_loads
        assert tuple(pod.ask_all("hash")) == image.memory_hashes
        if rootfs == "rw":
            assert pod.ask_all("read /kept") == ["as it was"] * containers
        loading = find_completed(runsc.debug_log(pod.first))
        assert loading is not None
        assert loading.loaded_bytes == (image.directory / "pages.img").stat().st_size
        pod.servers[0].send("exit 7")
        assert waiter.result(timeout_s=60) == 7
        assert pod.servers[0].errors() == "bye\n"


def test_two_restores_at_once_from_one_mount_fetch_the_snapshot_once(
    images: Images, push: Push, mount: Mount, runsc: Runsc, streamd: Streamd, tmp_path: Path
) -> None:
    image = images(1, "ro")
    mountpoint = mount(push(image, "file") + "?latency=15ms&rate=50MB/s")

    def restore_and_hash(name: str) -> tuple[str, ...]:
        with restored(runsc, tmp_path / name, image.shape, mountpoint) as pod:
            runsc.wait_restore(pod.first, timeout_s=_LOAD_S)
            return tuple(pod.ask_all("hash"))

    with ThreadPoolExecutor(2) as pool:
        hashes = list(pool.map(restore_and_hash, ["one", "two"]))
    assert hashes == [image.memory_hashes] * 2
    status = streamd.status(mountpoint)
    assert status["origin_bytes"] <= 1.02 * status["stored_bytes"]


def test_failing_the_reads_of_one_container_kills_its_sandbox_and_not_the_other(
    images: Images, push: Push, mount: Mount, runsc: Runsc, streamd: Streamd, tmp_path: Path
) -> None:
    image = images(1, "ro")
    # Some 60 MB are stored: both sandboxes load for seconds after they run.
    mountpoint = mount(push(image, "file") + "?rate=10MB/s")
    with (
        restored(runsc, tmp_path / "doomed", image.shape, mountpoint) as doomed,
        restored(runsc, tmp_path / "other", image.shape, mountpoint) as other,
        runsc.waiter(doomed.first) as waiter,
    ):
        streamd.run("fail", str(mountpoint), "--container", doomed.first)
        assert waiter.result(timeout_s=60) == 128 + 9
        runsc.wait_restore(other.first, timeout_s=_LOAD_S)
        assert tuple(other.ask_all("hash")) == image.memory_hashes


def test_an_application_that_frees_its_memory_at_once_is_loaded_and_the_mount_can_go(
    images: Images, push: Push, mount: Mount, runsc: Runsc, streamd: Streamd, tmp_path: Path
) -> None:
    image = images(1, "ro")
    mountpoint = mount(push(image, "file") + "?rate=20MB/s")
    with restored(runsc, tmp_path, image.shape, mountpoint) as pod:
        assert pod.ask_all("free") == ["90"]
        runsc.wait_restore(pod.first, timeout_s=_LOAD_S)
        streamd.unmount(mountpoint, timeout_s=_UNMOUNT_S)
        assert len(pod.ask_all("hash")) == 1
