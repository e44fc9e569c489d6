"""A mounted snapshot is leased in its store, so that whoever removes it hears who reads it."""

import json
from pathlib import Path

from bench.images import make_image
from bench.mounts import Mounts
from streamd.save.push import push
from streamd.store.opening import open_store


def test_a_mount_is_known_to_whoever_removes_its_snapshot(tmp_path: Path) -> None:
    make_image(tmp_path / "image", 1 << 20)
    url = f"file://{tmp_path}/store"
    store = open_store(url)
    push(tmp_path / "image", store, snapshot_id="leased", push_id="p")
    with Mounts() as mounts:
        with mounts.start(f"{url}/leased") as mount:
            mount.until(lambda _: list(store.list("leased/lease/")))
            result = mounts.run("rm", f"{url}/leased", "--json")
            assert result.returncode == 0
            assert len(json.loads(result.stdout)["leases"]) == 1
            collected = mounts.run("gc", url, "--grace", "0s")
            assert collected.returncode == 0
            # What the mount reads is still there.
            assert list(store.list("leased/packs/"))
            assert mount.reader(tmp_path / "image" / "pages.img").outcome().is_clean
            assert mounts.run("umount", mount.mountpoint).returncode == 0
            mount.wait()
        assert not list(store.list("leased/lease/"))


def test_a_store_that_can_only_be_read_is_mounted_all_the_same(tmp_path: Path) -> None:
    make_image(tmp_path / "image", 1 << 20)
    store = open_store(f"file://{tmp_path}/store")
    push(tmp_path / "image", store, snapshot_id="leased", push_id="p")
    # A directory in the lease's way: root ignores permissions, and this refuses root's writes, too.
    (tmp_path / "store" / "leased" / "lease").write_text("")
    with Mounts() as mounts, mounts.start(f"file://{tmp_path}/store/leased") as mount:
        assert mount.reader(tmp_path / "image" / "pages.img").outcome().is_clean
        assert any("no lease" in line.get("event", "") for line in mount.log())
        assert not mount.complaints()
