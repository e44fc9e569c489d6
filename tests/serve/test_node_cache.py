"""The cache directory has what it says it has, through restarts, damage, limits and other processes."""

import contextlib
import errno
import fcntl
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest
import trio
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from bench.faults import FaultyStore
from streamd.errors import NotFound, Refused
from streamd.safe_paths import SafeDirectory
from streamd.serve import node_cache
from streamd.serve.cache_directory import (
    clear_images,
    list_images,
    open_cache,
    pin_image,
    unpin_image,
    verify_images,
)
from streamd.serve.handles import Opener
from streamd.serve.image import ServedImage
from streamd.serve.node_cache import CacheUnusable, NodeCache, lock_image
from streamd.serve.plan import Layout
from streamd.serve.sealing import NotSealed, is_sealed, seal
from streamd.serve.write_behind import WriteBehind
from streamd.snapshot.names import IMAGE_FILES

MIB = 1 << 20
# A hang shows as a failure.
LIMIT_S = 60.0


@pytest.fixture
def manifest(saved: Any) -> bytes:
    data: bytes = saved.pinned.data
    return data


@pytest.fixture
def layout(saved: Any) -> Layout:
    return Layout(saved.pinned.manifest.table)


def stored_bytes(layout: Layout) -> int:
    return sum(layout.length[chunk] for chunk in range(len(layout)) if not layout.is_zero(chunk))


def pages_base(saved: Any, layout: Layout) -> int:
    """First byte of pages.img in the image."""
    first: int = saved.pinned.manifest.files[-1].first_chunk
    return layout.start[first]


def chunk_bytes(layout: Layout, chunk: int) -> bytes:
    return bytes([chunk % 251 + 1]) * layout.length[chunk]


def test_a_second_owner_is_refused_and_told_who_has_it(manifest: bytes, layout: Layout, tmp_path: Path) -> None:
    first = open_cache(
        tmp_path / "c", manifest, layout, source="s", owner="the mount at /mnt/a (pid 7)", max_bytes=None
    )
    with pytest.raises(Refused, match=r"/mnt/a \(pid 7\)"):
        open_cache(tmp_path / "c", manifest, layout, source="s", owner="second", max_bytes=None)
    first.close()
    open_cache(tmp_path / "c", manifest, layout, source="s", owner="second", max_bytes=None).close()


def test_chunks_survive_a_process_that_was_killed(manifest: bytes, layout: Layout, tmp_path: Path) -> None:
    (tmp_path / "manifest").write_bytes(manifest)
    writer = textwrap.dedent(
        f"""
        import os, signal
        from pathlib import Path
        from streamd.serve.cache_directory import open_cache
        from streamd.serve.plan import Layout
        from streamd.snapshot.manifest import decode
        manifest = Path({str(tmp_path / "manifest")!r}).read_bytes()
        layout = Layout(decode(manifest).table)
        cache = open_cache(Path({str(tmp_path / "c")!r}), manifest, layout, source="s", owner="writer", max_bytes=None)
        for chunk in (3, 9, 200):
            cache.write(bytes([chunk % 251 + 1]) * layout.length[chunk], layout.start[chunk])
            cache.confirm([chunk])
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    assert subprocess.run([sys.executable, "-c", writer], check=False).returncode == -9
    cache = open_cache(tmp_path / "c", manifest, layout, source="s", owner="reader", max_bytes=None)
    assert [chunk for chunk in range(len(layout)) if cache.has(chunk)] == [3, 9, 200]
    for chunk in (3, 9, 200):
        assert cache.read(layout.length[chunk], layout.start[chunk]) == chunk_bytes(layout, chunk)
    cache.close()


@pytest.mark.parametrize("damage", ["other format", "not json", "other manifest", "missing head", "short bitmap"])
def test_a_directory_that_is_not_understood_is_begun_anew(
    manifest: bytes, layout: Layout, tmp_path: Path, damage: str
) -> None:
    cache = open_cache(tmp_path / "c", manifest, layout, source="s", owner="a", max_bytes=None)
    cache.write(chunk_bytes(layout, 5), layout.start[5])
    cache.confirm([5])
    cache.close()
    match damage:
        case "other format":
            head = json.loads((cache.path / "head").read_text())
            (cache.path / "head").write_text(json.dumps(head | {"format": node_cache.CACHE_FORMAT + 1}))
        case "not json":
            (cache.path / "head").write_bytes(b"\xff")
        case "other manifest":
            (cache.path / "manifest").write_bytes(b"x")
        case "missing head":
            (cache.path / "head").unlink()
        case "short bitmap":
            os.truncate(cache.path / "resident", 0)
    again = open_cache(tmp_path / "c", manifest, layout, source="s", owner="b", max_bytes=None)
    assert not any(again.has(chunk) for chunk in range(len(layout)))
    again.close()


def test_a_directory_that_others_could_write_to_is_not_used(manifest: bytes, layout: Layout, tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c").chmod(0o777)
    with pytest.raises(CacheUnusable, match="writable by nobody else"):
        open_cache(tmp_path / "c", manifest, layout, source="s", owner="a", max_bytes=None)


@pytest.fixture
def foreign() -> Iterator[Path]:
    """A directory of another user, in one like /tmp."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "theirs"
        path.mkdir()
        os.chown(path, 65534, 65534)
        yield path


def test_a_cache_in_another_users_directory_is_not_used(manifest: bytes, layout: Layout, foreign: Path) -> None:
    for directory in (foreign, foreign / "c", foreign / "c" / "d"):
        with pytest.raises(CacheUnusable, match="belongs to uid 65534"):
            open_cache(directory, manifest, layout, source="s", owner="a", max_bytes=None)
    (foreign / "c").mkdir(mode=0o700)  # ours, but whoever owns what it is in can replace it
    with pytest.raises(CacheUnusable, match="belongs to uid 65534"):
        open_cache(foreign / "c", manifest, layout, source="s", owner="a", max_bytes=None)
    assert list((foreign / "c").iterdir()) == []


@pytest.mark.parametrize("planted", ["a directory of theirs", "a symlink"])
def test_an_operator_is_not_led_elsewhere_by_a_cache_of_another_user(
    foreign: Path, tmp_path: Path, planted: str
) -> None:
    key = "0" * 64
    victim = tmp_path / "victim"
    plant(victim, key)
    if planted == "a symlink":
        (foreign / "images").symlink_to(victim / "images")
    else:
        shutil.copytree(victim / "images", foreign / "images")
    before = sorted(path.relative_to(foreign) for path in foreign.rglob("*"))
    calls: list[Callable[[], object]] = [
        lambda: list_images(foreign),
        lambda: clear_images(foreign),
        lambda: clear_images(foreign, key),
        lambda: verify_images(foreign),
        lambda: pin_image(foreign, key),
        lambda: unpin_image(foreign, key),
    ]
    for call in calls:
        with pytest.raises(CacheUnusable, match="belong"):
            call()
    assert sorted(path.relative_to(foreign) for path in foreign.rglob("*")) == before
    assert [image.key for image in list_images(victim)] == [key]


@pytest.mark.parametrize("name", ["images", "images/KEY"])
def test_a_part_of_a_cache_that_others_may_write_to_is_not_used(
    manifest: bytes, layout: Layout, tmp_path: Path, name: str
) -> None:
    cache = open_cache(tmp_path / "c", manifest, layout, source="s", owner="a", max_bytes=None)
    cache.close()
    (tmp_path / "c" / name.replace("KEY", cache.path.name)).chmod(0o777)
    uses: dict[str, Callable[[], object]] = {
        "images": lambda: list_images(tmp_path / "c"),
        "images/KEY": lambda: open_cache(tmp_path / "c", manifest, layout, source="s", owner="a", max_bytes=None),
    }
    with pytest.raises(CacheUnusable, match="writable by nobody else"):
        uses[name]()


@pytest.mark.parametrize("use", ["ls", "clear", "verify", "look", "a mount"])
@pytest.mark.parametrize(
    ("name", "kind"),
    # A directory of images is never moved away, but refused by name.
    [*itertools.product(("pins", "images"), ("fifo", "link", "loop", "file")), ("pins", "everybody's")],
)
def test_what_has_the_name_of_a_part_of_the_cache_disables_nothing(
    manifest: bytes, layout: Layout, tmp_path: Path, name: str, kind: str, use: str
) -> None:
    place = tmp_path / "c"
    cache = open_cache(place, manifest, layout, source="s", owner="a", max_bytes=None)
    cache.close()
    freed(cache)
    if name == "pins":
        pin_image(place, cache.path.name)
    shutil.rmtree(place / name)
    match kind:
        case "fifo":
            os.mkfifo(place / name)
        case "link":
            (tmp_path / "elsewhere").mkdir(mode=0o777)
            (tmp_path / "elsewhere").chmod(0o777)
            (place / name).symlink_to(tmp_path / "elsewhere")
        case "loop":
            (place / name).symlink_to(name)
        case "file":
            (place / name).write_bytes(bytes(100))
        case "everybody's":
            (place / name).mkdir()
            (place / name).chmod(0o777)
            (place / name / cache.path.name).touch()
    images = [cache.path.name] if name == "pins" else []
    match use:
        case "ls":
            found = in_time(lambda: list_images(place))
            assert [(image.key, image.is_pinned) for image in found] == [(key, False) for key in images]
        case "clear":
            removed, left = in_time(lambda: clear_images(place))
            assert ([image.key for image in removed], left) == (images, [])
            assert os.listdir(place) == (["images"] if name == "pins" else [])
        case "verify" | "look":
            found = in_time(lambda: verify_images(place, repair=use == "verify"))
            assert [(image.key, image.bad_chunks) for image in found] == [(key, ()) for key in images]
            assert os.path.lexists(place / name) == (use == "look")
        case "a mount":
            again = in_time(lambda: open_cache(place, manifest, layout, source="s", owner="a", max_bytes=None))
            again.close()
            freed(again)
            pin_image(place, again.path.name)
            assert sorted(os.listdir(place)) == ["images", "pins"]


def test_a_planted_symlink_is_not_followed(manifest: bytes, layout: Layout, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    cache = open_cache(tmp_path / "c", manifest, layout, source="s", owner="a", max_bytes=None)
    cache.close()
    for name in ("files/pages.img", "resident", "lock"):
        (cache.path / name).unlink()
        (cache.path / name).symlink_to(victim)
        open_cache(tmp_path / "c", manifest, layout, source="s", owner="a", max_bytes=None).close()
        assert not (cache.path / name).is_symlink()
    assert victim.read_text() == "precious"


# Every name of an image in the cache, and itself.
NAMES = ["", "head", "manifest", "resident", "promised", "sealed", "sealed.new", "lock", "files"]
NAMES += [f"files/{name}" for name in IMAGE_FILES]


def put_in_the_place(path: Path, kind: str, secret: Path) -> None:
    """Do to one path of a cache what a worker that was broken into could; the secret is a copy of what was there."""
    if path.exists():
        if path.is_dir():
            shutil.copytree(path, secret)
        else:
            shutil.copy(path, secret)
        path.rename(secret.with_name("gone"))  # to where its owner, who has it open, goes on with it
    else:
        secret.write_text("secret")
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "link":
            path.symlink_to(secret)
        case "directory":
            path.mkdir(mode=0o700)
            (path / "x").mkdir()
        case "socket":
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(str(secret.with_name("socket")))  # a socket's own path must be short
            secret.with_name("socket").rename(path)


def facts(path: Path) -> dict[Path, tuple[int, int, int, bytes]]:
    """What reading or changing a tree would change (a directory is read by whoever lists it)."""
    found = {}
    for one in sorted([path, *path.rglob("*")]):
        info = one.stat()
        content = b"" if one.is_dir() else one.read_bytes()
        atime_ns = 0 if one.is_dir() else info.st_atime_ns
        found[one] = (info.st_mode, atime_ns, info.st_mtime_ns, content)
    return found


def in_time(call: Callable[[], object]) -> Any:
    """Make a call that takes milliseconds, unless it waits for somebody who never comes."""
    results: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive(), "it hangs"
    if errors:
        raise errors[0]
    return results[0]


@pytest.fixture
def short() -> Iterator[Path]:
    """A directory whose paths are short enough for a socket's name."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="c") as name:
        yield Path(name)


@pytest.mark.parametrize("use", ["ls", "verify", "look", "clear", "another image", "the image", "seal"])
@pytest.mark.parametrize("kind", ["fifo", "link", "directory", "socket"])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_put_in_the_place_of_a_file_costs_its_image_alone(
    manifest: bytes, layout: Layout, short: Path, saved: Any, name: str, kind: str, use: str
) -> None:
    place, secret = short / "c", short / "secret"

    def opened(source: str) -> NodeCache:
        return open_cache(place, manifest, layout, source=source, owner="a", max_bytes=None)

    opened("other").close()
    (other,) = keys(place)
    cache = opened("s")
    if use != "seal":
        cache.close()
    put_in_the_place(cache.path / name, kind, secret)
    for one in (secret, *secret.rglob("*")):
        os.utime(one, (1, 2))  # older than the last change, so that a file system with relatime tells of a read
    before = facts(secret)
    for one in (secret, *secret.rglob("*")):
        os.utime(one, (1, 2))
    match use:
        case "ls":
            assert other in {image.key for image in in_time(lambda: list_images(place))}
        case "verify" | "look":
            found = {one.key: one for one in in_time(lambda: verify_images(place, repair=use == "verify"))}
            assert found[other].bad_chunks == ()
            if name:
                assert found[cache.path.name].bad_chunks
                assert os.path.lexists(cache.path) == (use == "look")
        case "clear":
            assert {image.key for image in in_time(lambda: clear_images(place))[0]} >= {other}
            assert not (name and os.path.lexists(cache.path))
        case "another image":
            in_time(lambda: opened("third")).close()
            in_time(lambda: opened("other")).close()
        case "the image":
            again = in_time(lambda: opened("s"))
            again.write(chunk_bytes(layout, 3), layout.start[3])
            again.confirm([3])
            again.close()
        case "seal":
            chunks = [chunk for chunk in range(len(layout)) if not layout.is_zero(chunk)]
            files = saved.pinned.manifest.files
            cache.confirm(chunks)  # that they are wrong is found when they are read back
            with contextlib.suppress(NotSealed, CacheUnusable, OSError):
                in_time(lambda: seal(cache, files, layout))
            assert not in_time(lambda: is_sealed(cache, files))
            with contextlib.suppress(OSError):
                in_time(cache.promise)
            cache.close()
    assert facts(secret) == before


@pytest.mark.parametrize("kind", ["fifo", "link", "directory", "socket"])
@pytest.mark.parametrize("name", ["pins", "pins/KEY", "trash-0"])
def test_what_is_put_beside_the_images_holds_nobody_up(
    manifest: bytes, layout: Layout, short: Path, name: str, kind: str
) -> None:
    place, secret = short / "c", short / "secret"
    cache = open_cache(place, manifest, layout, source="s", owner="a", max_bytes=None)
    cache.close()
    if name != "pins":
        (place / "pins").mkdir(mode=0o700)
    put_in_the_place(place / name.replace("KEY", cache.path.name), kind, secret)
    os.utime(secret, (1, 1))
    with contextlib.suppress(CacheUnusable):
        in_time(lambda: pin_image(place, cache.path.name))
    assert (secret.read_text(), secret.stat().st_mtime) == ("secret", 1)
    again = in_time(lambda: open_cache(place, manifest, layout, source="t", owner="a", max_bytes=None))
    again.close()
    freed(again)
    with contextlib.suppress(CacheUnusable):  # by the name of what is in the way
        in_time(lambda: clear_images(place))
    assert (secret.read_text(), secret.stat().st_mtime) == ("secret", 1)


def plant(
    directory: Path, key: str, *, size: int = MIB, used_s: float = 1.0, form: int = node_cache.CACHE_FORMAT
) -> Path:
    """Put an idle image into a cache directory, used a long time ago."""
    path = directory / "images" / key
    (path / "files").mkdir(mode=0o700, parents=True)
    (path / "files/pages.img").write_bytes(bytes([1]) * size)
    (path / "lock").touch()
    (path / "head").write_text(json.dumps({"format": form}))
    os.utime(path / "head", (used_s, used_s))
    return path


def keys(directory: Path) -> set[str]:
    """Names of the images that a cache directory has."""
    return {image.key for image in list_images(directory)}


def freed(cache: NodeCache) -> None:
    """Wait for the thread that frees what left."""
    assert cache.freeing is not None
    cache.freeing.join(60)
    assert not cache.freeing.is_alive()


def test_idle_images_leave_for_a_new_one_and_used_ones_stay(manifest: bytes, layout: Layout, tmp_path: Path) -> None:
    place = tmp_path / "c"
    place.mkdir(mode=0o700)
    plant(place, "old", used_s=1)
    plant(place, "new", used_s=2)
    limit = stored_bytes(layout) + MIB + MIB // 2
    cache = open_cache(place, manifest, layout, source="s", owner="b", max_bytes=limit)
    assert keys(place) == {"new", cache.path.name}
    assert cache.room_bytes == stored_bytes(layout)
    removed, in_use = clear_images(place)
    assert [image.key for image in removed] == ["new"]
    assert [image.key for image in in_use] == [cache.path.name]
    assert in_use[0].owner == "b"
    cache.close()
    clear_images(place)
    assert list_images(place) == []
    assert sorted(p.name for p in place.iterdir()) == ["images"]


def test_what_dead_processes_left_goes_and_their_chunks_stay(manifest: bytes, layout: Layout, tmp_path: Path) -> None:
    place = tmp_path / "c"
    place.mkdir(mode=0o700)
    cache = open_cache(place, manifest, layout, source="s", owner="a", max_bytes=None)
    freed(cache)
    plant(place, "of another version", form=node_cache.CACHE_FORMAT + 1)
    half_made = plant(place, "half made")
    (half_made / "head").unlink()
    (place / "images" / "just begun").mkdir()
    plant(place, "good")
    shutil.copytree(half_made, place / "trash-1")
    other = open_cache(place, manifest, layout, source="t", owner="b", max_bytes=None)
    freed(other)
    assert keys(place) == {"good", cache.path.name, other.path.name}
    assert sorted(entry.name for entry in place.iterdir()) == ["images"]
    cache.close()
    other.close()


def test_a_pinned_image_stays_until_it_is_unpinned(manifest: bytes, layout: Layout, tmp_path: Path) -> None:
    place, key = tmp_path / "c", "ab" * 32
    place.mkdir(mode=0o700)
    with pytest.raises(NotFound):
        pin_image(place, key)
    plant(place, key)
    pin_image(place, key)
    limit = stored_bytes(layout)
    cache = open_cache(place, manifest, layout, source="s", owner="a", max_bytes=limit)
    assert keys(place) == {key, cache.path.name}
    assert 0 < cache.room_bytes < limit
    cache.close()
    removed, left = clear_images(place)
    assert [image.key for image in removed] == [cache.path.name]
    assert [(image.key, image.is_pinned) for image in left] == [(key, True)]
    unpin_image(place, key)
    with pytest.raises(NotFound):
        unpin_image(place, key)
    cache = open_cache(place, manifest, layout, source="s", owner="a", max_bytes=limit)
    assert keys(place) == {cache.path.name}
    cache.close()


def test_an_image_whose_files_are_mounted_stays_though_nobody_owns_it(
    manifest: bytes, layout: Layout, tmp_path: Path
) -> None:
    place = tmp_path / "c"
    place.mkdir(mode=0o700)
    files_fd = os.open(plant(place, "mounted") / "files", os.O_RDONLY)
    fcntl.flock(files_fd, fcntl.LOCK_SH)
    cache = open_cache(place, manifest, layout, source="s", owner="a", max_bytes=stored_bytes(layout))
    assert keys(place) == {"mounted", cache.path.name}
    cache.close()
    assert [image.key for image in clear_images(place)[1]] == ["mounted"]
    os.close(files_fd)
    open_cache(place, manifest, layout, source="s", owner="a", max_bytes=stored_bytes(layout)).close()
    assert keys(place) == {cache.path.name}


@pytest.mark.parametrize("key", ["../images", "", "a/b", "\0", "ab" * 31])
def test_a_name_that_is_no_key_pins_nothing(tmp_path: Path, key: str) -> None:
    (tmp_path / "images" / "x").mkdir(parents=True)
    for call in (pin_image, unpin_image):
        with pytest.raises(NotFound):
            call(tmp_path, key)


def test_the_reserve_of_a_disk_bounds_what_an_image_gets_and_what_is_written(
    manifest: bytes, layout: Layout, tmp_path: Path
) -> None:
    disk = os.statvfs(tmp_path)
    free_bytes = disk.f_bavail * disk.f_frsize
    cache = open_cache(
        tmp_path / "c", manifest, layout, source="s", owner="a", max_bytes=None, reserve_bytes=2 * free_bytes
    )
    assert cache.room_bytes == 0
    with pytest.raises(OSError, match="reserve") as caught:
        cache.check_reserve()
    assert caught.value.errno == errno.ENOSPC
    cache.close()
    cache = open_cache(tmp_path / "c", manifest, layout, source="s", owner="a", max_bytes=1 << 40, reserve_bytes=0)
    assert cache.room_bytes == stored_bytes(layout)
    cache.check_reserve()
    cache.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a disk of 16 MiB, and take it away again."""
    place = tmp_path / "disk"
    place.mkdir(mode=0o700)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m,mode=0700", "tmpfs", place], check=True)
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


def fill(place: Path, *, free_bytes: int = 0) -> None:
    """Have others take what is free of a disk, but so much."""
    disk = os.statvfs(place)
    with open(place / "of others", "ab") as file:
        file.write(bytes(disk.f_bavail * disk.f_frsize - free_bytes))


def test_what_a_full_disk_did_not_let_begin_is_no_damage_and_takes_no_room(
    manifest: bytes, layout: Layout, small_disk: Path
) -> None:
    failed = 0
    for free_bytes in range(0, 256 << 10, 4 << 10):  # it ends at each step on the way
        (small_disk / "of others").unlink(missing_ok=True)
        clear_images(small_disk)
        fill(small_disk, free_bytes=free_bytes)
        try:
            open_cache(small_disk, manifest, layout, source="s", owner="a", max_bytes=1 << 40, reserve_bytes=0).close()
        except CacheUnusable:
            failed += 1
            if not verify_images(small_disk, repair=False):  # it wasn't even begun: the owner's name may be there
                assert sum(image.disk_bytes for image in list_images(small_disk)) <= 4 << 10
        for repair in (False, True):
            assert [image.bad_chunks for image in verify_images(small_disk, repair=repair)] in ([], [()])
    assert 0 < failed < 64
    assert [image.bad_chunks for image in verify_images(small_disk)] == [()]  # the last one was begun


def test_an_image_that_was_never_begun_is_no_damage(tmp_path: Path) -> None:
    for content in (None, "", "{", "[]"):
        path = plant(tmp_path, "half made")
        (path / "head").unlink()
        if content is not None:
            (path / "head").write_text(content)
        assert verify_images(tmp_path, repair=False) == []
        assert keys(tmp_path) == {"half made"}
        assert verify_images(tmp_path) == []
        assert keys(tmp_path) == set()


def test_an_idle_image_leaves_a_full_disk_for_one_that_begins(
    manifest: bytes, layout: Layout, small_disk: Path
) -> None:
    plant(small_disk, "idle", size=8 * MIB)
    fill(small_disk)
    cache = open_cache(small_disk, manifest, layout, source="s", owner="a", max_bytes=1 << 40, reserve_bytes=0)
    assert keys(small_disk) == {cache.path.name}
    assert cache.room_bytes == stored_bytes(layout)
    cache.close()


@pytest.mark.parametrize("other", ["idle", "pinned", "recent", "in use"])
@pytest.mark.parametrize("reserve_bytes", [0, MIB], ids=["no reserve", "a reserve"])
def test_idle_images_leave_a_disk_that_others_have_filled_and_what_must_stay_stays(
    saved: Any, manifest: bytes, layout: Layout, small_disk: Path, other: str, reserve_bytes: int
) -> None:
    path = plant(small_disk, "0" * 64, size=8 * MIB, used_s=time.time() if other == "recent" else 1)
    if other == "pinned":
        pin_image(small_disk, path.name)
    with ExitStack() as stack:
        if other == "in use":
            lock = stack.enter_context((path / "lock").open("r+"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        cache = open_cache(
            small_disk, manifest, layout, source="s", owner="a", max_bytes=1 << 40, reserve_bytes=reserve_bytes
        )
        fill(small_disk)
        image = saved.serve(cache=cache, inline=False)
        assert serve_everything(saved, image) == saved.content
        assert keys(small_disk) == {cache.path.name} | (set() if other == "idle" else {path.name})
        assert (image.stats.cache_failure is None) == (other == "idle")
        assert image.stats.cache_written_bytes == (image.stats.fetched_bytes if other == "idle" else 0)
    [found] = [image for image in verify_images(small_disk) if image.key == cache.path.name]
    assert found.bad_chunks == ()


class FullDisk:
    """A cache whose disk is full now and then, and gets room whenever that is asked for."""

    def __init__(self, full_at: Sequence[int]) -> None:
        self._full_at = full_at
        self._writes = 0
        self.asked = 0

    def check_reserve(self) -> None:
        """Find enough."""

    def write(self, data: bytes, offset: int) -> None:
        """Fail when its turn has come."""
        self._writes += 1
        if self._writes - 1 in self._full_at:
            raise OSError(errno.ENOSPC, "full")

    def confirm(self, chunks: Sequence[int]) -> None:
        """Confirm all."""

    def make_room(self) -> bool:
        """Have something leave."""
        self.asked += 1
        return True


@pytest.mark.parametrize(("full_at", "written"), [((), 4), ((2,), 4), ((0, 1), 0), ((2, 4), 3)])
def test_others_leave_a_full_disk_once_and_then_caching_ends(full_at: Sequence[int], written: int) -> None:
    disk = FullDisk(full_at)
    told: list[tuple[list[int], OSError | None]] = []
    writer = WriteBehind(cast(NodeCache, disk), lambda chunks, error: told.append((list(chunks), error)))
    for chunk in range(4):
        assert writer.offer(chunk, b"x", chunk)
    writer.finish(LIMIT_S)
    assert sum(len(chunks) for chunks, error in told if error is None) == written
    assert [error.errno for _, error in told if error is not None] == ([] if written == 4 else [errno.ENOSPC])
    assert disk.asked == bool(full_at)


def test_an_image_is_used_when_a_mount_begins_and_when_it_lets_go(saved: Any, make_cache: Any, tmp_path: Path) -> None:
    cache: NodeCache = make_cache()
    os.utime(cache.path / "head", (5, 5))
    assert serve_everything(saved, saved.serve(cache=cache, inline=False)) == saved.content
    [image] = list_images(tmp_path / "cache")
    assert image.used_s > 5
    os.utime(cache.path / "head", (5, 5))
    cache = make_cache()
    [image] = list_images(tmp_path / "cache")
    assert image.used_s > 5
    cache.close()


def test_a_check_of_the_cache_is_no_use_of_it(manifest: bytes, layout: Layout, tmp_path: Path) -> None:
    place = tmp_path / "c"
    cache = open_cache(place, manifest, layout, source="s", owner="a", max_bytes=None)
    cache.close()
    os.utime(cache.path / "head", (5, 5))
    assert [image.bad_chunks for image in verify_images(place)] == [()]
    assert [image.used_s for image in list_images(place)] == [5]


def test_a_chunk_that_leaves_gives_its_bytes_back_and_is_gone_in_the_next_life(
    manifest: bytes, layout: Layout, tmp_path: Path
) -> None:
    place = tmp_path / "c"
    cache = open_cache(place, manifest, layout, source="s", owner="a", max_bytes=None)
    for chunk in (40, 41, 42):
        cache.write(chunk_bytes(layout, chunk), layout.start[chunk])
    cache.confirm([40, 41, 42])
    (before,) = list_images(place)
    cache.evict(41, layout.start[41], layout.length[41])
    (after,) = list_images(place)
    assert before.disk_bytes - after.disk_bytes == layout.length[41]
    assert cache.read(layout.length[41], layout.start[41]) == bytes(layout.length[41])
    cache.close()
    cache = open_cache(place, manifest, layout, source="s", owner="a", max_bytes=None)
    assert [chunk for chunk in range(len(layout)) if cache.has(chunk)] == [40, 42]
    for chunk in (40, 42):
        assert cache.read(layout.length[chunk], layout.start[chunk]) == chunk_bytes(layout, chunk)
    cache.close()


@pytest.mark.parametrize("change", ["write", "forget", "evict"])
def test_a_seal_goes_before_anything_changes(manifest: bytes, layout: Layout, tmp_path: Path, change: str) -> None:
    cache = open_cache(tmp_path / "c", manifest, layout, source="s", owner="a", max_bytes=None)
    (cache.path / node_cache.SEALED).touch()
    match change:
        case "write":
            cache.write(chunk_bytes(layout, 5), layout.start[5])
        case "forget":
            cache.forget(5)
        case "evict":
            cache.evict(5, layout.start[5], layout.length[5])
    assert not (cache.path / node_cache.SEALED).exists()
    cache.close()


def test_the_files_are_the_snapshots_own(saved: Any, make_cache: Any, tmp_path: Path) -> None:
    cache: NodeCache = make_cache()
    assert serve_everything(saved, saved.serve(cache=cache, ahead=True, inline=False)) == saved.content
    files = cache.path / "files"
    assert sorted(path.name for path in files.iterdir()) == sorted(IMAGE_FILES)
    assert {path.stat().st_mode & 0o7777 for path in files.iterdir()} == {0o600}
    assert (files / "pages.img").read_bytes() == saved.content
    for file in saved.pinned.manifest.files:
        assert (files / file.name).stat().st_size == file.size


def serve_everything(saved: Any, image: ServedImage) -> bytes:
    async def test() -> bytes:
        async with trio.open_nursery() as nursery:
            await nursery.start(image.run)
            handle = image.open("pages.img", Opener(1, "test", None))
            got = [bytes(await image.read(handle, o, 100_000)) for o in range(0, len(saved.content), 100_000)]
            nursery.cancel_scope.cancel()
            return b"".join(got)

    return trio.run(test)


def test_a_second_life_fetches_nothing_again_and_verifies_what_it_finds(saved: Any, make_cache: Any) -> None:
    assert serve_everything(saved, saved.serve(cache=make_cache(), inline=False)) == saved.content
    store: FaultyStore = saved.faulty()
    image: ServedImage = saved.serve(store, cache=make_cache(), inline=False)
    assert serve_everything(saved, image) == saved.content
    assert store.bytes_read == 0
    assert image.stats.cache_hits_verified > 0


def test_a_flipped_bit_in_the_cache_is_never_served_and_is_fetched_again(
    saved: Any, make_cache: Any, layout: Layout
) -> None:
    cache = make_cache()
    assert serve_everything(saved, saved.serve(cache=cache, inline=False)) == saved.content
    stored = [c for c in range(30, len(layout)) if not layout.is_zero(c)]
    hurt = [stored[0], stored[40], stored[-1]]
    with (cache.path / "files/pages.img").open("r+b") as file:
        for chunk in hurt:
            at = layout.start[chunk] - pages_base(saved, layout) + 77
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 4]))
    store: FaultyStore = saved.faulty()
    image: ServedImage = saved.serve(store, cache=make_cache(), inline=False)
    assert serve_everything(saved, image) == saved.content
    assert image.stats.cache_corrupt == len(hurt)
    assert store.bytes_read == sum(layout.frame_bytes[chunk] for chunk in hurt)
    # And what was fetched again was written again.
    last: ServedImage = saved.serve(store, cache=make_cache(), inline=False)
    assert serve_everything(saved, last) == saved.content
    assert last.stats.cache_corrupt == 0
    assert store.bytes_read == sum(layout.frame_bytes[chunk] for chunk in hurt)


def test_cache_verify_finds_and_forgets_damaged_chunks(
    saved: Any, make_cache: Any, layout: Layout, tmp_path: Path
) -> None:
    cache = make_cache()
    assert serve_everything(saved, saved.serve(cache=cache, inline=False)) == saved.content
    chunk = next(c for c in range(30, len(layout)) if not layout.is_zero(c))
    with (cache.path / "files/pages.img").open("r+b") as file:
        file.seek(layout.start[chunk] - pages_base(saved, layout))
        file.write(b"wrong")
    (found,) = verify_images(tmp_path / "cache")
    assert found.bad_chunks == (chunk,)
    (again,) = verify_images(tmp_path / "cache")
    assert (again.bad_chunks, again.cached_chunks) == ((), found.cached_chunks - 1)


def test_a_limit_smaller_than_the_image_bounds_what_is_written(saved: Any, make_cache: Any) -> None:
    image: ServedImage = saved.serve(cache=make_cache(MIB), inline=False, memory_max_bytes=MIB)
    assert serve_everything(saved, image) == saved.content
    assert 0 < image.stats.cache_written_bytes <= MIB
    assert image.stats.cache_dropped_chunks > 0


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=["full", "faulty"])
def test_what_the_disk_has_not_confirmed_is_never_read_from_it(saved: Any, make_cache: Any, number: int) -> None:
    cache: NodeCache = make_cache()
    confirmed = cache.confirm
    calls: list[int] = []

    def confirm(chunks: Sequence[int]) -> None:
        """The second write-back fails, and what the kernel had taken reads as zeros from then on."""
        calls.append(len(chunks))
        if len(calls) < 2:
            confirmed(chunks)
            return
        layout = Layout(saved.pinned.manifest.table)
        for chunk in chunks:
            cache.write(bytes(layout.length[chunk]), layout.start[chunk])
        raise OSError(number, os.strerror(number))

    cache.confirm = confirm  # type: ignore[method-assign]
    image: ServedImage = saved.serve(cache=cache, inline=False, memory_max_bytes=MIB)

    async def test() -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(image.run)
            handle = image.open("pages.img", Opener(1, "test", None))

            async def check(start: int, end: int) -> None:
                for low in range(start, end, 100_000):
                    got = bytes(await image.read(handle, low, 100_000))
                    assert got == saved.content[low : low + 100_000]

            with trio.fail_after(20):
                await check(0, MIB)
                while len(calls) < 1:
                    await trio.sleep(0.01)
                await check(MIB, len(saved.content))
                while image.stats.cache_failure is None:
                    await trio.sleep(0.01)
                await check(0, len(saved.content))
            nursery.cancel_scope.cancel()

    trio.run(test)
    assert len(calls) == 2


def test_mounts_that_begin_together_stay_within_the_limit_together(
    manifest: bytes, layout: Layout, tmp_path: Path
) -> None:
    limit = 2 * stored_bytes(layout) + MIB
    caches = [
        open_cache(tmp_path / "c", manifest, layout, source=str(n), owner=str(n), max_bytes=limit) for n in range(4)
    ]
    assert [cache.room_bytes for cache in caches][:2] == [stored_bytes(layout)] * 2
    assert sum(cache.room_bytes for cache in caches) <= limit
    for cache in caches:
        cache.close()


def test_images_of_different_sources_share_no_byte(manifest: bytes, layout: Layout, tmp_path: Path) -> None:
    first = open_cache(tmp_path / "c", manifest, layout, source="file:///a", owner="a", max_bytes=None)
    first.write(chunk_bytes(layout, 5), layout.start[5])
    first.confirm([5])
    # Beside the first, not instead of it: another tenant's copy neither sees nor blocks it.
    second = open_cache(tmp_path / "c", manifest, layout, source="file:///b", owner="b", max_bytes=None)
    assert not second.has(5)
    second.close()
    first.close()


def test_a_claim_of_zeros_takes_no_room_from_others(manifest: bytes, layout: Layout, tmp_path: Path) -> None:
    place = tmp_path / "c"
    place.mkdir(mode=0o700)
    other = plant(place, "other")
    zeros = layout.start[-1] - stored_bytes(layout)
    assert zeros > 4 * 64 * 1024
    limit = stored_bytes(layout) + MIB + 64 * 1024
    cache = open_cache(place, manifest, layout, source="s", owner="a", max_bytes=limit)
    assert other.exists()
    cache.close()


class CacheMachine(RuleBasedStateMachine):
    """One image's directory against a dictionary, with restarts in between."""

    def __init__(self) -> None:
        super().__init__()
        self.model: dict[int, bytes] = {}
        self.cache = open_cache(PLACE, MANIFEST, LAYOUT, source="s", owner="machine", max_bytes=None)

    @rule(chunk=st.integers(0, 255), fill=st.integers(1, 255))
    def write(self, chunk: int, fill: int) -> None:
        data = bytes([fill]) * LAYOUT.length[chunk]
        self.cache.write(data, LAYOUT.start[chunk])
        self.cache.confirm([chunk])
        self.model[chunk] = data

    @rule(chunk=st.integers(0, 255))
    def forget(self, chunk: int) -> None:
        self.cache.forget(chunk)
        self.model.pop(chunk, None)

    @rule(chunk=st.integers(0, 255))
    def evict(self, chunk: int) -> None:
        self.cache.evict(chunk, LAYOUT.start[chunk], LAYOUT.length[chunk])
        self.model.pop(chunk, None)

    @rule()
    def reopen(self) -> None:
        self.cache.close()
        self.cache = open_cache(PLACE, MANIFEST, LAYOUT, source="s", owner="machine", max_bytes=None)

    @rule(chunk=st.integers(0, 255))
    def read(self, chunk: int) -> None:
        if chunk in self.model:
            assert self.cache.read(LAYOUT.length[chunk], LAYOUT.start[chunk]) == self.model[chunk]
            view = memoryview(bytearray(LAYOUT.length[chunk]))
            assert self.cache.read_nowait(view, LAYOUT.start[chunk]) in (0, len(view))

    @invariant()
    def same_chunks(self) -> None:
        assert {c for c in range(len(LAYOUT)) if self.cache.has(c)} == set(self.model)

    def teardown(self) -> None:
        self.cache.close()
        clear_images(PLACE)


PLACE: Path
MANIFEST: bytes
LAYOUT: Layout


def test_a_directory_behaves_as_a_dictionary_of_chunks(manifest: bytes, layout: Layout, tmp_path: Path) -> None:
    global PLACE, MANIFEST, LAYOUT
    PLACE, MANIFEST, LAYOUT = tmp_path / "machine", manifest, layout
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(CacheMachine, settings=settings(max_examples=25, deadline=None, stateful_step_count=30))


def test_who_finds_an_image_locked_is_told_what_else_can_be_done(tmp_path: Path) -> None:
    with SafeDirectory.open(tmp_path) as directory:
        fd = lock_image(tmp_path, directory.fd, "a daemon's image")
        try:
            with pytest.raises(Refused, match=r"by a daemon's image; mount it with --no-cache.*streamd image"):
                lock_image(tmp_path, directory.fd, "m")
        finally:
            os.close(fd)
