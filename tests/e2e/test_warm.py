"""A real sandbox comes back from a snapshot that is whole on the node: from its files, with nobody who serves them."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent.runtime.loading import find_completed
from agent.runtime.runsc import Runsc
from bench.commands import Streamd
from bench.pods import Image, restored
from streamd.fuse import mountinfo, mounting
from streamd.serve.node_cache import SEALED

_LOAD_S = 120.0

Images = Callable[[int, str], Image]
Push = Callable[[Image, str], str]


@pytest.fixture
def mountpoint(streamd: Streamd, tmp_path: Path) -> Iterator[Path]:
    """Give a directory to mount on; what is mounted there in the end is taken away by force."""
    path = tmp_path / "mnt"
    path.mkdir()
    yield path
    streamd.unmount(path, force=True)


def load(streamd: Streamd, runsc: Runsc, directory: Path, image: Image, url: str, mountpoint: Path) -> None:
    """Restore once from a mount that serves, until it has sealed what it brought here."""
    assert streamd.run("mount", url, str(mountpoint))["mode"] == "fuse"
    with restored(runsc, directory, image.shape, mountpoint) as pod:
        runsc.wait_restore(pod.first, timeout_s=_LOAD_S)
        while not list((streamd.directory / "cache" / "images").glob(f"*/{SEALED}")):
            assert streamd.status(mountpoint)["is_caching"]
        streamd.unmount(mountpoint)


@pytest.mark.parametrize("rootfs", ["ro", "rw"])
@pytest.mark.parametrize("direct", [False, True], ids=["cached", "direct"])
def test_a_pod_is_restored_from_a_warm_mount(
    direct: bool,
    rootfs: str,
    images: Images,
    push: Push,
    mountpoint: Path,
    runsc: Runsc,
    streamd: Streamd,
    tmp_path: Path,
) -> None:
    image = images(1, rootfs)
    url = push(image, "file")
    load(streamd, runsc, tmp_path / "first", image, url, mountpoint)
    assert streamd.run("mount", url, str(mountpoint))["mode"] == "warm"
    top = mountinfo.topmost(str(mountpoint))
    assert top is not None
    assert top.filesystem != mounting.FILESYSTEM
    with restored(runsc, tmp_path / "second", image.shape, mountpoint, direct=direct) as pod:
        answers_while_it_loads = pod.ask_all("touch 1")
        runsc.wait_restore(pod.first, timeout_s=_LOAD_S)
        streamd.unmount(mountpoint)
        assert mountinfo.topmost(str(mountpoint)) is None
        assert pod.ask_all("touch 1") == answers_while_it_loads
        assert tuple(pod.ask_all("hash")) == image.memory_hashes
        loading = find_completed(runsc.debug_log(pod.first))
        assert loading is not None
        assert loading.loaded_bytes == (image.directory / "pages.img").stat().st_size
