"""What a directory promises beyond the contract: modes, links, foreign files, writers that die, full disks."""

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from streamd.errors import Exit, StoreError, StoreErrorKind
from streamd.store.directory import DirectoryStore
from streamd.store.port import Condition


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(root: Path) -> DirectoryStore:
    return DirectoryStore(str(root))


def refused(call: Callable[[], object]) -> StoreError:
    with pytest.raises(StoreError) as caught:
        call()
    return caught.value


def test_only_its_owner_can_read_what_is_stored(store: DirectoryStore, root: Path) -> None:
    before = os.umask(0)
    try:
        store.put("id/packs/p/0", b"x", condition=Condition.ABSENT)
    finally:
        os.umask(before)
    modes = {str(path.relative_to(root)): path.stat().st_mode & 0o777 for path in root.rglob("*")}
    assert modes == {
        ".streamd": 0o700,
        ".streamd/lock": 0o600,
        "id": 0o700,
        "id/packs": 0o700,
        "id/packs/p": 0o700,
        "id/packs/p/0": 0o600,
    }
    assert root.stat().st_mode & 0o777 == 0o700


def test_a_missing_directory_is_gone_when_all_of_it_is_listed_and_made_by_the_first_put(
    store: DirectoryStore, root: Path
) -> None:
    assert refused(lambda: list(store.list(""))).store_kind is StoreErrorKind.GONE
    assert list(store.list("id/packs/")) == []
    assert not root.exists()
    store.put("k", b"", condition=Condition.ABSENT)
    assert [info.key for info in store.list("")] == ["k"]


def _nothing(root: Path) -> None:
    """Leave the directory missing."""


AWAY: dict[str, Callable[[Path], object]] = {"missing": _nothing, "not mounted": Path.mkdir, "a file": Path.touch}


@pytest.mark.parametrize("make", AWAY.values(), ids=AWAY)
def test_a_store_that_was_used_and_is_not_there_is_away_and_nothing_is_put_in_its_place(
    root: Path, make: Callable[[Path], object]
) -> None:
    make(root)
    store = DirectoryStore(str(root), is_used=True)
    calls: list[Callable[[], object]] = [
        lambda: list(store.list("")),
        lambda: list(store.list("id/")),
        lambda: store.head("id/manifest"),
        lambda: list(store.read("id/manifest", generation="1-1-1", start=0, end=1)),
        lambda: store.put("id/lease/1", b"", condition=Condition.ANY),
        lambda: store.delete("id/manifest", generation="1-1-1"),
        store.now_s,
    ]
    for call in calls:
        error = refused(call)
        assert (error.store_kind, error.exit_code) == (StoreErrorKind.TRANSIENT, Exit.UNREACHABLE)
        assert f"there is no store at {root}" in str(error)
    assert not root.is_dir() or not any(root.iterdir())


def test_what_is_not_in_a_store_that_is_there_is_gone(root: Path, store: DirectoryStore) -> None:
    info = store.put("k", b"", condition=Condition.ABSENT)
    store.delete("k", generation=info.generation)
    used = DirectoryStore(str(root), is_used=True)
    assert list(used.list("")) == list(used.list("id/")) == []
    assert refused(lambda: used.head("id/manifest")).store_kind is StoreErrorKind.GONE


def test_deleting_the_last_object_removes_the_directories_that_held_it(store: DirectoryStore, root: Path) -> None:
    one = store.put("id/packs/p/0", b"", condition=Condition.ABSENT)
    store.put("id/manifest", b"", condition=Condition.ABSENT)
    store.delete(one.key, generation=one.generation)
    assert sorted(path.name for path in root.iterdir()) == [".streamd", "id"]
    assert [path.name for path in (root / "id").iterdir()] == ["manifest"]


@pytest.mark.parametrize("link", ["id", "id/packs", "id/packs/0"])
def test_no_link_below_the_root_is_followed(store: DirectoryStore, root: Path, tmp_path: Path, link: str) -> None:
    info = store.put("id/packs/0", b"secret", condition=Condition.ABSENT)
    elsewhere = tmp_path / "elsewhere"
    (root / link).rename(elsewhere)
    (root / link).symlink_to(elsewhere)
    for call in (
        lambda: store.head(info.key),
        lambda: list(store.read(info.key, generation=info.generation, start=0, end=1)),
    ):
        error = refused(call)
        assert error.store_kind is StoreErrorKind.FORBIDDEN
        assert "symbolic link" in str(error)
    assert list(store.list("")) == []
    refused(lambda: store.delete(info.key, generation=info.generation))
    refused(lambda: store.put("id/packs/0", b"", condition=Condition.ABSENT))
    refused(lambda: store.put("id/packs/0", b"", condition=info.generation))
    assert b"secret" in [path.read_bytes() for path in [elsewhere, *elsewhere.rglob("*")] if path.is_file()]


def test_a_put_that_replaces_a_link_replaces_the_link_not_what_it_points_to(
    store: DirectoryStore, root: Path, tmp_path: Path
) -> None:
    store.put("id/manifest", b"", condition=Condition.ABSENT)
    (tmp_path / "other").write_bytes(b"other")
    (root / "id/manifest").unlink()
    (root / "id/manifest").symlink_to(tmp_path / "other")
    store.put("id/manifest", b"new", condition=Condition.ANY)
    assert (tmp_path / "other").read_bytes() == b"other"
    assert store.head("id/manifest").size == 3


def test_the_root_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    store = DirectoryStore(str(tmp_path / "link"))
    info = store.put("k", b"x", condition=Condition.ABSENT)
    assert list(store.list("")) == [info]


def test_foreign_files_are_no_objects(store: DirectoryStore, root: Path) -> None:
    info = store.put("id/manifest", b"", condition=Condition.ABSENT)
    (root / "id/.hidden").write_bytes(b"")
    os.mkfifo(root / "id/fifo")
    (root / "link").symlink_to("id")
    with open(os.fsencode(root) + b"/\xff", "wb"):
        pass
    assert list(store.list("")) == [info]
    assert refused(lambda: store.head("id/fifo")).store_kind is StoreErrorKind.GONE  # and doesn't wait for a writer
    assert refused(lambda: store.head("id")).store_kind is StoreErrorKind.GONE
    assert refused(lambda: store.head("id/manifest/x")).store_kind is StoreErrorKind.GONE


SIZE = 3 << 20


def test_a_file_written_in_place_under_a_read_is_an_error_not_a_mixture(store: DirectoryStore, root: Path) -> None:
    info = store.put("k", bytes(SIZE), condition=Condition.ABSENT)
    pieces = store.read("k", generation=info.generation, start=0, end=SIZE)
    assert set(next(pieces)) == {0}
    with open(root / "k", "r+b") as file:
        file.write(b"\1" * SIZE)
    os.utime(root / "k", ns=(0, 1))  # the write's own time may lie in the same tick of the kernel's clock
    assert refused(lambda: list(pieces)).store_kind is StoreErrorKind.CHANGED


def test_a_file_truncated_under_a_read_is_an_error(store: DirectoryStore, root: Path) -> None:
    info = store.put("k", bytes(SIZE), condition=Condition.ABSENT)
    pieces = store.read("k", generation=info.generation, start=0, end=SIZE)
    next(pieces)
    os.truncate(root / "k", SIZE // 2)
    assert refused(lambda: list(pieces)).store_kind is StoreErrorKind.CHANGED


def test_a_read_under_way_ends_with_the_old_bytes_of_an_object_that_is_replaced(store: DirectoryStore) -> None:
    info = store.put("k", bytes(SIZE), condition=Condition.ABSENT)
    pieces = store.read("k", generation=info.generation, start=0, end=SIZE)
    body = bytes(next(pieces))
    store.put("k", b"\1" * SIZE, condition=info.generation)
    assert body + b"".join(pieces) == bytes(SIZE)


def test_what_dead_writers_left_is_never_listed_and_is_swept_by_a_later_store(
    store: DirectoryStore, root: Path
) -> None:
    store.put("k", b"", condition=Condition.ABSENT)
    own = root / ".streamd"
    for name in ("put-dead", "put-alive", "put-young"):
        (own / name).write_bytes(b"half")
    for name in ("put-dead", "put-alive"):
        os.utime(own / name, (0, 0))
    with open(own / "put-alive", "rb") as alive:
        fcntl.flock(alive, fcntl.LOCK_EX)
        assert [info.key for info in store.list("")] == ["k"]
        DirectoryStore(str(root)).put("l", b"", condition=Condition.ABSENT)
    assert sorted(path.name for path in own.iterdir()) == ["lock", "put-alive", "put-young"]


def test_a_sweep_leaves_a_young_file_to_its_writer_who_is_about_to_lock_it(
    store: DirectoryStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("k", b"", condition=Condition.ABSENT)
    young = root / ".streamd" / "put-young"
    young.write_bytes(b"")
    locked: list[int] = []
    flock = fcntl.flock

    def noting(fd: int, operation: int) -> None:
        locked.append(os.fstat(fd).st_ino)
        flock(fd, operation)

    monkeypatch.setattr("streamd.store.directory.fcntl.flock", noting)
    DirectoryStore(str(root)).put("l", b"", condition=Condition.ABSENT)
    assert locked
    assert young.stat().st_ino not in locked


WRITER = """
import sys
from streamd.store.directory import DirectoryStore
from streamd.store.port import Condition
store = DirectoryStore(sys.argv[1])
for number in range(10**9):
    store.put(f"{number % 50:04}", bytes([number % 251]) * 400_000, condition=Condition.ANY)
    print(number, flush=True)
"""


def test_a_writer_that_is_killed_leaves_only_whole_objects(store: DirectoryStore, root: Path) -> None:
    for puts in (1, 60):
        with subprocess.Popen([sys.executable, "-c", WRITER, str(root)], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            for _ in range(puts):
                writer.stdout.readline()
            writer.send_signal(signal.SIGKILL)
        infos = list(store.list("0"))
        assert infos
        for info in infos:
            body = b"".join(store.read(info.key, generation=info.generation, start=0, end=info.size))
            assert (len(body), len(set(body))) == (400_000, 1)
        store.put("after", b"", condition=Condition.ANY)  # the lock died with its holder


def test_a_lock_that_is_held_for_too_long_is_an_error_that_names_it(root: Path) -> None:
    store = DirectoryStore(str(root), lock_timeout_s=0.02)
    info = store.put("k", b"", condition=Condition.ABSENT)
    with open(root / ".streamd/lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for call in (
            lambda: store.put("l", b"", condition=Condition.ABSENT),
            lambda: store.delete("k", generation=info.generation),
        ):
            error = refused(call)
            assert error.store_kind is StoreErrorKind.TRANSIENT
            assert str(root / ".streamd/lock") in str(error)
        assert list(store.list("")) == [info]  # reading takes no lock
    store.put("l", b"", condition=Condition.ABSENT)


def test_many_writers_of_one_key_replace_each_other_one_after_the_other(store: DirectoryStore) -> None:
    first = store.put("k", b"0", condition=Condition.ABSENT)
    wins: list[str] = []

    def replace() -> None:
        with contextlib.suppress(StoreError):
            wins.append(store.put("k", b"1", condition=first.generation).generation)

    threads = [threading.Thread(target=replace) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wins == [store.head("k").generation]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k,mode=0700", "store-test", disk], check=True)
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def test_a_full_disk_fails_the_put_says_so_and_leaves_nothing(small_disk: Path) -> None:
    store = DirectoryStore(str(small_disk / "store"))
    store.put("small", b"x", condition=Condition.ABSENT)
    error = refused(lambda: store.put("large", bytes(1 << 20), condition=Condition.ABSENT))
    assert (error.store_kind, error.exit_code) == (StoreErrorKind.FORBIDDEN, Exit.FAILED)
    assert "No space left on device" in str(error)
    assert [info.key for info in store.list("")] == ["small"]
    assert [path.name for path in (small_disk / "store/.streamd").iterdir()] == ["lock"]
    store.put("large", bytes(100_000), condition=Condition.ABSENT)


def test_a_read_only_file_system_is_not_permitted(small_disk: Path) -> None:
    store = DirectoryStore(str(small_disk / "store"))
    info = store.put("k", b"x", condition=Condition.ABSENT)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    for call in (
        lambda: store.put("l", b"", condition=Condition.ABSENT),
        lambda: store.delete("k", generation=info.generation),
    ):
        assert refused(call).exit_code is Exit.NOT_PERMITTED
    assert list(store.read("k", generation=info.generation, start=0, end=1)) == [b"x"]


def test_a_question_or_a_deletion_makes_no_store(store: DirectoryStore, root: Path) -> None:
    for call in (store.now_s, lambda: store.delete("k", generation="1"), lambda: store.head("k")):
        assert refused(call).store_kind is StoreErrorKind.GONE
    assert not root.exists()


def test_a_file_or_a_directory_where_another_belongs_is_an_error_of_ours(store: DirectoryStore, root: Path) -> None:
    root.write_text("")
    for call in (
        store.now_s,
        lambda: list(store.list("")),
        lambda: store.head("k"),
        lambda: store.put("k", b"", condition=Condition.ANY),
        lambda: store.delete("k", generation="1"),
    ):
        assert refused(call).store_kind in (StoreErrorKind.FORBIDDEN, StoreErrorKind.GONE)
    root.unlink()
    (root / "_clock" / "below").mkdir(parents=True)
    error = refused(store.now_s)
    assert (error.store_kind, error.key) == (StoreErrorKind.FORBIDDEN, "_clock")
    (root / ".streamd" / "lock").unlink()
    (root / ".streamd" / "lock").mkdir()
    refused(store.now_s)
    (root / ".streamd" / "lock").rmdir()
    (root / ".streamd").rmdir()
    (root / ".streamd").write_text("")
    refused(store.now_s)


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
@pytest.mark.parametrize("closed", [".", "a", "a/packs", "a/packs/p", "a/manifest"])
@pytest.mark.parametrize("mode", [0o000, 0o444, 0o111])
def test_whatever_is_closed_to_the_caller_is_forbidden_and_no_crash(closed: str, mode: int) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch, "store")
        store = DirectoryStore(str(root))
        for key in ("a/manifest", "a/packs/p/0"):
            store.put(key, b"x", condition=Condition.ABSENT)
        infos = {info.key: info for info in store.list("")}
        for path in (Path(scratch), root, *root.rglob("*")):
            path.chmod(0o755)
        (root / closed).chmod(mode)
        calls: list[Callable[[], object]] = [
            lambda: list(store.list("")),
            lambda: list(store.list("a/")),
            store.now_s,
            lambda: store.put("a/manifest", b"", condition=Condition.ANY),
        ]
        for key in infos:
            calls += [
                lambda key=key: store.head(key),  # type: ignore[misc]
                lambda key=key: store.delete(key, generation=infos[key].generation),  # type: ignore[misc]
                lambda key=key: list(store.read(key, generation=infos[key].generation, start=0, end=1)),  # type: ignore[misc]
            ]
        os.seteuid(65534)
        try:
            errors = []
            for call in calls:
                try:
                    call()
                except StoreError as error:
                    errors.append(error.store_kind)
        finally:
            os.seteuid(0)
        assert set(errors) == {StoreErrorKind.FORBIDDEN}


def test_a_store_that_is_not_mounted_is_out_of_reach_and_not_empty(tmp_path: Path) -> None:
    store = DirectoryStore(str(tmp_path / "store"))
    info = store.put("a/b", b"data", condition=Condition.ABSENT)
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    for is_mountpoint_left in (False, True):
        if is_mountpoint_left:
            (tmp_path / "store").mkdir()
        with pytest.raises(StoreError) as caught:
            list(store.read("a/b", generation=info.generation, start=0, end=4))
        assert caught.value.store_kind is StoreErrorKind.TRANSIENT
    (tmp_path / "store").rmdir()
    (tmp_path / "elsewhere").rename(tmp_path / "store")
    assert b"".join(store.read("a/b", generation=info.generation, start=0, end=4)) == b"data"
