"""A snapshot that is whole on the node, and sealed, is mounted itself: its reads are the disk's, and nothing serves."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from bench.mounts import LIMIT_S, LiveMount, Mounts
from streamd.errors import Exit, StreamdError
from streamd.fuse import binding, mount_calls, mount_paths, mountinfo, mounting
from streamd.serve import sealing
from streamd.serve.cache_directory import list_images
from streamd.serve.node_cache import FILES, SEALED, NodeCache, open_image
from streamd.serve.plan import Layout
from streamd.serve.sealing import FileFacts, Seal
from streamd.snapshot.manifest import decode
from streamd.snapshot.names import IMAGE_FILES, PAGES

if TYPE_CHECKING:
    from tests.fuse.conftest import Saved


def image_path(mounts: Mounts) -> Path:
    """The one image in the cache."""
    (path,) = (mounts.cache_directory / "images").iterdir()
    return path


def open_idle(image: Path) -> tuple[NodeCache, Any, Layout]:
    manifest = (image / "manifest").read_bytes()
    decoded = decode(manifest)
    layout = Layout(decoded.table)
    return open_image(image, manifest, decoded.files, layout, owner="a test"), decoded, layout


def seal(image: Path) -> None:
    """Seal an image that no process owns."""
    cache, manifest, layout = open_idle(image)
    try:
        sealing.seal(cache, manifest.files, layout)
    finally:
        cache.close()


def load(mounts: Mounts, saved: "Saved") -> Path:
    """Bring the whole snapshot into the cache, by a mount that serves, and seals it; give its place there."""
    with mounts.start(saved.url, prefetch="all") as mount:
        assert mount.ready["mode"] == "fuse"
        mount.until(lambda _: (image_path(mounts) / SEALED).exists())
        assert mounts.run("umount", mount.mountpoint).returncode == 0
        mount.wait()
    return image_path(mounts)


@pytest.fixture(scope="session")
def loaded(saved: "Saved", tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Load the snapshot once; gives a copy of its place in the cache."""
    with Mounts() as mounts:
        image = load(mounts, saved)
        copy = tmp_path_factory.mktemp("loaded") / image.name
        return Path(shutil.copytree(image, copy))


@pytest.fixture
def warm_image(mounts: Mounts, loaded: Path) -> Path:
    """Put the snapshot into the cache and seal it; gives its place there."""
    for directory in (mounts.cache_directory, mounts.cache_directory / "images"):
        directory.mkdir(mode=0o700)
    image = Path(shutil.copytree(loaded, mounts.cache_directory / "images" / loaded.name))
    seal(image)
    return image


def shown(mount: LiveMount) -> mountinfo.MountEntry:
    entry = mountinfo.topmost(str(mount.mountpoint))
    assert entry is not None
    return entry


def is_whole(mount: LiveMount, saved: "Saved") -> bool:
    """Whether a reader gets every file, right."""
    outcomes = [mount.reader(saved.image / name, file=name).outcome() for name in IMAGE_FILES]
    sizes = [(saved.image / name).stat().st_size for name in IMAGE_FILES]
    return all(outcome.is_clean for outcome in outcomes) and [o.right_bytes for o in outcomes] == sizes


def test_a_sealed_snapshot_is_a_read_only_bind_with_the_right_bytes(
    mounts: Mounts, saved: "Saved", warm_image: Path
) -> None:
    with mounts.start(saved.url) as mount:
        assert mount.ready["mode"] == "warm"
        entry = shown(mount)
        assert entry.filesystem != mounting.FILESYSTEM
        assert entry.options >= {"ro", "nosuid", "nodev", "noexec"}
        assert entry.root.endswith(f"/images/{warm_image.name}/{FILES}")
        assert is_whole(mount, saved)
        assert sorted(os.listdir(mount.mountpoint)) == sorted(IMAGE_FILES)  # no gcs_opts.json
        for path in mount.mountpoint.iterdir():
            assert path.stat().st_mode & 0o7777 == 0o400
            with pytest.raises(OSError, match="Read-only file system"):
                path.chmod(0o600)
            with pytest.raises(OSError, match="Read-only file system"):
                os.open(path, os.O_RDWR)
        assert mounts.run("umount", mount.mountpoint).returncode == 0
        assert mount.wait() == 0
        assert not mount.is_mounted()
        assert not mount.complaints()
    # Reading changed nothing: it is warm again.
    with mounts.start(saved.url) as mount:
        assert mount.ready["mode"] == "warm"


def test_a_warm_mount_ends_though_its_number_is_anothers_by_then(
    mounts: Mounts, saved: "Saved", warm_image: Path, tmp_path: Path
) -> None:
    with mounts.start(saved.url) as mount:
        number = shown(mount).mount_id
        others: list[Path] = []
        mount.signal(signal.SIGSTOP)
        try:
            subprocess.run(["umount", mount.mountpoint], check=True)
            while mountinfo.with_id(number) is None:  # the kernel gives the lowest that is free
                assert len(others) < 100
                others.append(tmp_path / str(len(others)))
                others[-1].mkdir()
                subprocess.run(["mount", "-t", "tmpfs", "none", others[-1]], check=True)
            mount.signal(signal.SIGCONT)
            assert mount.wait() == 0
        finally:
            with suppress(ProcessLookupError):
                mount.signal(signal.SIGCONT)
            for other in others:
                subprocess.run(["umount", other], check=True)


def test_a_mount_that_serves_a_whole_snapshot_seals_it(mounts: Mounts, saved: "Saved", warm_image: Path) -> None:
    (warm_image / SEALED).unlink()
    with mounts.start(saved.url) as mount:  # it fetches nothing: what the cache has is checked where it is
        assert mount.ready["mode"] == "fuse"
        mount.until(lambda _: (warm_image / SEALED).exists())
        assert mount.status()["origin_bytes"] == 0
    with mounts.start(saved.url) as mount:
        assert mount.ready["mode"] == "warm"


def test_verifying_the_cache_seals_what_is_whole(mounts: Mounts, saved: "Saved", warm_image: Path) -> None:
    (warm_image / SEALED).unlink()
    assert mounts.run("cache", "verify").returncode == 0
    with mounts.start(saved.url) as mount:
        assert mount.ready["mode"] == "warm"


def test_a_whole_snapshot_with_a_damaged_chunk_is_not_sealed(mounts: Mounts, saved: "Saved", warm_image: Path) -> None:
    (warm_image / SEALED).unlink()
    bend_a_byte(warm_image)
    with mounts.start(saved.url) as mount:
        mount.until(lambda _: any(line.get("event", "").startswith("the image was not sealed") for line in mount.log()))
        assert not (warm_image / SEALED).exists()
        assert is_whole(mount, saved)


def forget_a_chunk(image: Path) -> None:
    cache, _, _ = open_idle(image)
    cache.forget(5)
    cache.close()


def other_boot(image: Path) -> None:
    record = json.loads((image / SEALED).read_bytes())
    (image / SEALED).write_text(json.dumps(record | {"boot_id": "00000000-0000-0000-0000-000000000000"}))


def bend_a_byte(image: Path, name: str = "pages.img") -> None:
    """Change the last byte that isn't zero: of pages.img nothing reads it before the readers of these tests do."""
    path = image / FILES / name
    last = len(path.read_bytes().rstrip(b"\0")) - 1
    with path.open("r+b") as file:
        file.seek(last)
        bent = file.read(1)[0] ^ 0x80
        file.seek(last)
        file.write(bytes([bent]))


def seal_unseen(image: Path) -> None:
    """Write down the files as they are, as if what happened to them had happened to the disk."""
    infos = {name: (image / FILES / name).stat() for name in IMAGE_FILES}
    facts = {n: FileFacts(i.st_size, i.st_mode & 0o7777, i.st_ctime_ns, i.st_ino) for n, i in infos.items()}
    boot_id = sealing.decode((image / SEALED).read_bytes()).boot_id
    (image / SEALED).write_bytes(sealing.encode(Seal(boot_id, facts)))


BREAKS: dict[str, Callable[[Path], object]] = {
    "a file was changed": bend_a_byte,
    "the machine was started anew": other_boot,
    "a chunk is missing": forget_a_chunk,
    "a mode was changed": lambda image: (image / FILES / "pages.img").chmod(0o600),
    "a file lies beside them": lambda image: (image / FILES / "gcs_opts.json").write_text("{}"),
    "the seal can't be read": lambda image: (image / SEALED).write_bytes(b"\xff"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_whatever_breaks_the_seal_the_snapshot_is_served_and_right(
    mounts: Mounts, saved: "Saved", warm_image: Path, name: str
) -> None:
    BREAKS[name](warm_image)
    with mounts.start(saved.url) as mount:
        assert mount.ready["mode"] == "fuse"
        assert shown(mount).filesystem == mounting.FILESYSTEM
        assert is_whole(mount, saved)
        assert any(line.get("event") == "the mount is not warm" for line in mount.log())


def test_no_warm_serves_a_sealed_snapshot(mounts: Mounts, saved: "Saved", warm_image: Path) -> None:
    mountpoint = mounts.mountpoint()
    result = mounts.run("mount", "--no-warm", saved.url, mountpoint, "--json")
    assert json.loads(result.stdout)["mode"] == "fuse"
    entry = mountinfo.topmost(str(mountpoint))
    assert entry is not None
    assert entry.filesystem == mounting.FILESYSTEM
    assert mounts.run("umount", mountpoint).returncode == 0


def test_a_mount_that_serves_checks_what_is_sealed_too_and_leaves_it_right(
    mounts: Mounts, saved: "Saved", warm_image: Path
) -> None:
    bend_a_byte(warm_image, "checkpoint.img")  # every mount reads it
    seal_unseen(warm_image)
    with mounts.start(saved.url, options=["--no-warm"]) as mount:
        assert mount.status()["cache_corrupt_chunks"] == 1
        assert is_whole(mount, saved)
    with mounts.start(saved.url) as mount:
        assert is_whole(mount, saved)


def test_a_warm_mount_in_the_background_is_listed_and_described(
    mounts: Mounts, saved: "Saved", warm_image: Path
) -> None:
    mountpoint = mounts.mountpoint()
    result = mounts.run("mount", saved.url, mountpoint, "--json")
    assert result.returncode == 0, result.stderr
    facts = json.loads(result.stdout)
    assert (facts["mode"], facts["mountpoint"]) == ("warm", str(mountpoint))
    status = json.loads(mounts.run("status", mountpoint, "--json").stdout)
    assert status["mode"] == "warm"
    assert status["pid"] == facts["pid"]
    assert status["cached_chunks"] == status["chunks"] - status["zero_chunks"]
    assert (status["origin_bytes"], status["handles"]) == (0, [])
    listed = mounts.run("status")
    assert (listed.returncode, str(mountpoint) in listed.stdout) == (0, True), listed.stderr
    assert json.loads(mounts.run("status", "--json").stdout)["dead_mountpoints"] == []
    # Nothing waits, so nothing fails; and what is meant by name isn't there.
    assert json.loads(mounts.run("fail", mountpoint, "--json").stdout)["failed_handles"] == 0
    assert mounts.refused("fail", mountpoint, "--container", "web")[0] == Exit.NOT_FOUND
    assert json.loads(mounts.run("umount", mountpoint, "--json").stdout)["how"] == "asked"
    assert mountinfo.topmost(str(mountpoint)) is None


HOLDER = (
    "import os, sys\nfd = os.open(sys.argv[1], os.O_RDONLY)\nprint('open', flush=True)\nsys.stdin.readline()\n"
    "import hashlib\nprint(hashlib.sha256(os.pread(fd, 1 << 30, 0)).hexdigest(), flush=True)"
)


class Holder:
    """A process that has a file open and reads it when told to."""

    def __init__(self, path: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "open\n"
        self.pid = self._process.pid

    def digest(self) -> str:
        out, _ = self._process.communicate("go on\n", timeout=LIMIT_S)
        return out.strip()


@pytest.fixture
def hold() -> Iterator[Callable[[Path], Holder]]:
    """Give what opens a file in a process of its own, which is gone after the test."""
    holders: list[Holder] = []

    def opened(path: Path) -> Holder:
        holders.append(Holder(path))
        return holders[-1]

    yield opened
    for holder in holders:
        holder._process.kill()
        holder._process.communicate(timeout=LIMIT_S)


def sha256(path: Path) -> str:
    return subprocess.run(["sha256sum", path], capture_output=True, text=True, check=True).stdout.split()[0]


def test_an_unmount_is_refused_while_a_file_is_open_and_says_who_has_it(
    mounts: Mounts, saved: "Saved", warm_image: Path, hold: Callable[[Path], Holder]
) -> None:
    with mounts.start(saved.url) as mount:
        holder = hold(mount.pages)
        code, message = mounts.refused("umount", mount.mountpoint)
        assert code == Exit.REFUSED
        assert f"(pid {holder.pid}) has pages.img open" in message
        assert holder.digest() == sha256(saved.pages)
        assert mounts.run("umount", mount.mountpoint).returncode == 0
        mount.wait()


def test_a_forced_unmount_leaves_what_is_open_readable_whatever_the_cache_does_next(
    mounts: Mounts, saved: "Saved", warm_image: Path, hold: Callable[[Path], Holder]
) -> None:
    with mounts.start(saved.url) as mount:
        holder = hold(mount.pages)
        assert mounts.run("umount", "--force", mount.mountpoint).returncode == 0
        assert mount.wait() == 0
        assert not mount.is_mounted()
        assert mounts.run("cache", "clear").returncode == 0
        assert not warm_image.exists()
        assert holder.digest() == sha256(saved.pages)


def test_a_working_directory_in_it_does_not_hold_an_unmount_up(
    mounts: Mounts, saved: "Saved", warm_image: Path
) -> None:
    with mounts.start(saved.url) as mount:
        sitter = subprocess.Popen(["sleep", "1000"], cwd=mount.mountpoint)
        try:
            assert mounts.run("umount", mount.mountpoint).returncode == 0
            mount.wait()
        finally:
            sitter.kill()
            sitter.wait()


def test_a_signal_waits_for_open_files_and_a_second_one_does_not(
    mounts: Mounts, saved: "Saved", warm_image: Path, hold: Callable[[Path], Holder]
) -> None:
    mounts.configure(umount_wait="1000s")
    with mounts.start(saved.url) as mount:
        mount.signal(signal.SIGTERM)
        assert mount.wait() == 0
        assert not mount.is_mounted()
    with mounts.start(saved.url) as mount:
        holder = hold(mount.pages)
        mount.signal(signal.SIGINT)
        mount.until(lambda _: any(line.get("event") == "ending on a signal" for line in mount.log()))
        assert mount.is_mounted()
        mount.signal(signal.SIGINT)
        assert mount.wait() == Exit.INTERRUPTED
        assert not mount.is_mounted()
        assert holder.digest() == sha256(saved.pages)


def test_the_process_ends_when_somebody_else_unmounts(mounts: Mounts, saved: "Saved", warm_image: Path) -> None:
    with mounts.start(saved.url) as mount:
        subprocess.run(["umount", mount.mountpoint], check=True, timeout=LIMIT_S)
        assert mount.wait() == 0


def test_a_warm_mount_holds_its_image_and_its_lease(mounts: Mounts, copied: "Saved") -> None:
    assert copied.directory is not None
    shutil.rmtree(copied.directory / "small" / "lease", ignore_errors=True)  # of mounts that other tests killed
    image = load(mounts, copied)
    with mounts.start(copied.url) as mount:
        mount.until(lambda _: list(copied.store.list("small/lease/")))
        (listed,) = list_images(mounts.cache_directory)
        assert str(mount.mountpoint) in (listed.owner or "")
        result = mounts.run("cache", "clear", "--json")
        assert image.exists(), result.stdout
        code, message = mounts.refused("mount", "--foreground", copied.url, mounts.mountpoint())
        assert code == Exit.REFUSED
        assert str(mount.mountpoint) in message
        assert mounts.run("umount", mount.mountpoint).returncode == 0
        mount.wait()
    assert not list(copied.store.list("small/lease/"))
    assert list_images(mounts.cache_directory)[0].owner is None


# What a process that died leaves


def kill(mount: LiveMount) -> None:
    mount.signal(signal.SIGKILL)
    assert mount.wait() == -signal.SIGKILL
    assert mount.is_mounted()


def test_a_bind_left_behind_is_replaced_by_the_next_mount(mounts: Mounts, saved: "Saved", warm_image: Path) -> None:
    with mounts.start(saved.url) as dead:
        kill(dead)
        assert json.loads(mounts.run("status", "--json").stdout)["dead_mountpoints"] == [str(dead.mountpoint)]
        with mounts.start(saved.url, mountpoint=dead.mountpoint) as mount:
            assert mount.ready["mode"] == "warm"
            assert [e.mountpoint for e in mountinfo.read()].count(str(mount.mountpoint)) == 1
            assert is_whole(mount, saved)


@pytest.mark.parametrize("cleared", [False, True], ids=["image there", "image cleared"])
def test_a_bind_left_behind_is_taken_away_by_umount(
    mounts: Mounts, saved: "Saved", warm_image: Path, cleared: bool
) -> None:
    with mounts.start(saved.url) as dead:
        kill(dead)
        if cleared:
            assert mounts.run("cache", "clear").returncode == 0
            assert not warm_image.exists()
        result = mounts.run("umount", dead.mountpoint, "--json")
        assert json.loads(result.stdout)["how"] == "stale"
        assert not dead.is_mounted()


def test_a_bind_of_a_living_process_is_respected_whatever_its_run_directory(
    mounts: Mounts, saved: "Saved", warm_image: Path
) -> None:
    with mounts.start(saved.url) as mount, Mounts() as others:
        code, message = others.refused("mount", "--foreground", "--no-cache", saved.url, mount.mountpoint)
        assert (code, "in use" in message) == (Exit.REFUSED, True)
        assert mount.is_mounted()
        assert not mounting.is_dead(str(mount.mountpoint))


def test_binds_that_others_made_are_never_taken_for_ours(mounts: Mounts, warm_image: Path, tmp_path: Path) -> None:
    somewhere = tmp_path / "images" / "x" / FILES
    somewhere.mkdir(parents=True)
    cases = {  # what is bound, and how
        "not of a cache": (somewhere, "ro,nosuid,nodev,noexec"),
        "not as we do": (warm_image / FILES, "ro"),
        "another directory": (warm_image, "ro,nosuid,nodev,noexec"),
    }
    for name, (source, options) in cases.items():
        mountpoint = mounts.mountpoint()
        subprocess.run(["mount", "--bind", source, mountpoint], check=True)
        subprocess.run(["mount", "-o", f"remount,bind,{options}", mountpoint], check=True)
        try:
            entry = mountinfo.topmost(str(mountpoint))
            assert entry is not None
            assert not mounting.clean_stale(str(mountpoint), server_lives=lambda _: False), name
            mounting.abort(str(mountpoint), entry.device)
            assert mounts.run("umount", mountpoint).returncode == Exit.NOT_FOUND
            assert mountinfo.topmost(str(mountpoint)) == entry
            assert str(mountpoint) not in mounting.own_mountpoints()
        finally:
            mount_calls.umount(str(mountpoint), mount_calls.MNT_DETACH)


def test_a_symlink_among_bound_files_leads_nowhere(tmp_path: Path) -> None:
    """A worker that was broken into gives what is bound, and root opens it."""
    secret, path = tmp_path / "secret", tmp_path / "mnt"
    secret.write_text("root's")
    path.mkdir()
    files = tmp_path / "images" / ("0" * 64) / FILES
    files.mkdir(parents=True)
    (files / PAGES).symlink_to(secret)
    with mount_paths.open_mountpoint(str(path)) as directory:
        bind = binding.bind(os.open(files, os.O_RDONLY | os.O_DIRECTORY), directory)
    try:
        with pytest.raises(OSError, match="Too many levels of symbolic links"):
            (path / PAGES).read_text()
    finally:
        mounting.abort(bind.mountpoint, bind.device)
        os.close(bind.fd)
    assert mountinfo.topmost(str(path)) is None


def test_a_bind_whose_mountpoint_was_moved_meanwhile_is_undone(warm_image: Path, tmp_path: Path) -> None:
    path = tmp_path / "mnt"
    path.mkdir()
    before = mountinfo.read()
    files_fd = os.open(warm_image / FILES, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with mount_paths.open_mountpoint(str(path)) as directory:
            path.rename(tmp_path / "elsewhere")
            with pytest.raises(StreamdError, match="another mount than asked for"):
                binding.bind(files_fd, directory)
    finally:
        os.close(files_fd)
    assert mountinfo.read() == before
