"""A directory of ours stays ours: whatever another user plants, nothing elsewhere is followed, written or removed."""

import contextlib
import ctypes
import errno
import os
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from streamd import safe_paths
from streamd.errors import NotPermitted
from streamd.safe_paths import (
    SafeDirectory,
    UnsafePath,
    acting_as,
    open_beneath,
    open_trusted,
    stat_trusted,
    walk_beneath,
)

NOBODY = 65534

# The children of these forks do a few system calls and end.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


def as_nobody(call: Callable[[], object]) -> bool:
    """Do something as another user, in a forked child; tell whether it could."""
    pid = os.fork()
    if not pid:
        status = 1
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            call()
            status = 0
        except OSError:
            pass
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that everybody reaches, as none of pytest's own."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o711)
        yield Path(name)


@pytest.fixture
def outside(place: Path) -> Path:
    """What must stay as it is: a directory of ours, with a file."""
    path = place / "outside"
    path.mkdir(0o700)
    (path / "file").write_text("precious")
    return path


@pytest.fixture
def sticky(place: Path) -> Path:
    """A directory like /tmp."""
    path = place / "sticky"
    path.mkdir()
    path.chmod(0o1777)
    return path


def is_untouched(outside: Path) -> bool:
    return os.listdir(outside) == ["file"] and (outside / "file").read_text() == "precious"


def unsafe(path: Path, *, make: bool = True) -> UnsafePath:
    with pytest.raises(UnsafePath) as caught:
        SafeDirectory.open(path, make=make).close()
    return caught.value


def test_a_directory_is_made_for_us_alone_whatever_the_umask(place: Path) -> None:
    before = os.umask(0)
    try:
        with SafeDirectory.open(place / "a" / "b", make=True) as directory, directory.open_directory("c", make=True):
            directory.make_directory("c")
            os.close(directory.open_file("f", os.O_WRONLY | os.O_CREAT))
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((place / name).stat().st_mode) for name in ("a", "a/b", "a/b/c", "a/b/f")]
    assert modes == [0o700, 0o700, 0o700, 0o600]


def test_what_is_not_there_is_not_made_unasked(place: Path) -> None:
    with pytest.raises(FileNotFoundError, match="a/b"):
        SafeDirectory.open(place / "a" / "b")
    (place / "file").touch()
    with pytest.raises(NotADirectoryError):
        SafeDirectory.open(place / "file" / "b", make=True)
    assert os.listdir(place) == ["file"]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_symlink_that_another_user_planted_at_any_level_is_not_followed(
    sticky: Path, outside: Path, depth: int
) -> None:
    """`depth` components below a world-writable directory are theirs already, then comes the link."""

    def plant() -> None:
        at = sticky
        for level in range(depth):
            at /= f"d{level}"
            at.mkdir(mode=0o755)
        (at / f"d{depth}").symlink_to(outside)

    assert as_nobody(plant)
    wanted = sticky / "d0" / "d1" / "d2" / "d3"
    error = unsafe(wanted)
    assert str(sticky / "d0") in error.path
    assert is_untouched(outside)


def test_a_directory_that_another_user_made_first_is_refused(sticky: Path) -> None:
    assert as_nobody(lambda: (sticky / "streamd").mkdir(mode=0o777))
    assert "belongs to uid 65534" in str(unsafe(sticky / "streamd"))
    assert os.listdir(sticky / "streamd") == []


@pytest.mark.parametrize(("mode", "is_refused"), [(0o777, True), (0o1777, False), (0o775, False), (0o757, True)])
def test_a_directory_on_the_way_that_everybody_may_write_to_must_be_sticky(
    place: Path, mode: int, is_refused: bool
) -> None:
    (place / "way").mkdir()
    (place / "way").chmod(mode)
    (place / "way" / "d").mkdir(mode=0o700)
    if is_refused:
        assert unsafe(place / "way" / "d").path == str(place / "way")
    else:
        SafeDirectory.open(place / "way" / "d").close()


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o1777])
def test_the_directory_itself_is_nobody_elses_to_write(place: Path, mode: int) -> None:
    (place / "d").mkdir()
    (place / "d").chmod(mode)
    assert "writable by nobody else" in str(unsafe(place / "d"))


def test_a_directory_of_root_s_on_the_way_is_fine_and_ours_must_be_ours(place: Path) -> None:
    (place / "d").mkdir()
    os.chown(place / "d", NOBODY, NOBODY)
    assert "must belong to this user" in str(unsafe(place / "d"))

    def open_own() -> None:
        SafeDirectory.open(place / "d").close()

    assert as_nobody(open_own)
    assert not as_nobody(lambda: SafeDirectory.open(place).close())


def test_links_of_the_administrator_are_followed(place: Path) -> None:
    (place / "disk" / "x").mkdir(parents=True)
    (place / "disk" / "up").symlink_to("../disk/./x")
    (place / "link").symlink_to(place / "disk")
    with SafeDirectory.open(place / "link" / "up" / "new", make=True) as directory:
        assert os.readlink(f"/proc/self/fd/{directory.fd}") == str(place / "disk" / "x" / "new")
    (place / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="symbolic") as caught:
        SafeDirectory.open(place / "loop" / "x")
    assert caught.value.errno == errno.ELOOP


def test_a_link_of_the_administrator_to_a_place_of_another_user_is_refused(place: Path, sticky: Path) -> None:
    assert as_nobody(lambda: (sticky / "theirs").mkdir(mode=0o755))
    (place / "link").symlink_to(sticky / "theirs")
    assert unsafe(place / "link" / "new").path == str(sticky / "theirs")
    assert os.listdir(sticky / "theirs") == []


@pytest.fixture
def held(place: Path) -> Iterator[SafeDirectory]:
    """A directory that was checked, and that the test then gives away, as no directory that passes the check can be."""
    with SafeDirectory.open(place / "held", make=True) as directory:
        (place / "held").chmod(0o777)
        yield directory


OPERATIONS: dict[str, Callable[[SafeDirectory], object]] = {
    "read": lambda held: os.close(held.open_file("x", os.O_RDONLY)),
    "write": lambda held: os.close(held.open_file("x", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)),
    "open a directory": lambda held: held.open_directory("x").close(),
    "make and open": lambda held: held.open_directory("x", make=True).close(),
    "make": lambda held: held.make_directory("x"),
    "unlink": lambda held: held.unlink("x"),
    "rename": lambda held: held.rename("x", "y"),
    "replace": lambda held: held.rename("y", "x"),
    "stat": lambda held: held.stat("x"),
    "remove a tree": lambda held: held.remove_tree("x"),
}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("target", ["outside", "outside/file"])
def test_no_operation_follows_a_symlink_in_the_directory(
    held: SafeDirectory, place: Path, outside: Path, name: str, target: str
) -> None:
    assert as_nobody(lambda: (place / "held" / "x").symlink_to(place / target))
    (place / "held" / "y").touch()
    with contextlib.suppress(OSError):
        OPERATIONS[name](held)
    assert is_untouched(outside)
    if name in ("read", "write", "open a directory", "make and open"):
        with pytest.raises(OSError, match=r"symbolic|Not a directory"):
            OPERATIONS[name](held)
    if name == "stat":
        assert stat.S_ISLNK(held.stat("x").st_mode)


def test_a_directory_that_another_user_put_there_is_not_ours(held: SafeDirectory, place: Path) -> None:
    assert as_nobody(lambda: (place / "held" / "x").mkdir())
    with pytest.raises(UnsafePath, match="belongs to uid 65534"):
        held.open_directory("x", make=True)


@pytest.mark.parametrize("level", ["parent", "own"])
def test_what_is_renamed_between_check_and_use_changes_nothing(place: Path, outside: Path, level: str) -> None:
    """The directory, or the one above it, is replaced by a link; the descriptor stays where it was."""
    (place / "a").mkdir()
    (place / "a").chmod(0o711)
    with (
        SafeDirectory.open(place / "a" / "b", make=True) as directory,
        directory.open_directory("c", make=True) as below,
    ):
        moved = place / "a" if level == "parent" else place / "a" / "b"
        moved.parent.chmod(0o777)
        os.chown(moved, NOBODY, NOBODY)  # who owns it, and what it is in, may move it
        (outside / "b").mkdir()

        def swap() -> None:
            moved.rename(moved.with_name("gone"))
            moved.symlink_to(outside)

        assert as_nobody(swap)
        (outside / "b").rmdir()
        os.close(directory.open_file("new", os.O_WRONLY | os.O_CREAT))
        os.close(below.open_file("new", os.O_WRONLY | os.O_CREAT))
        directory.rename("new", "newer")
        directory.remove_tree("c")
        directory.unlink("file", missing_ok=True)
        assert directory.names() == ["newer"]
    assert is_untouched(outside)


def test_a_fifo_is_not_waited_for(held: SafeDirectory, place: Path) -> None:
    assert as_nobody(lambda: os.mkfifo(place / "held" / "x", 0o666))
    fd = held.open_file("x", os.O_RDONLY)
    assert not stat.S_ISREG(os.fstat(fd).st_mode)
    os.close(fd)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "../a", "a\0b"])
def test_names_are_single_components(held: SafeDirectory, name: str) -> None:
    calls: list[Callable[[], object]] = [
        lambda: held.open_file(name, os.O_RDONLY),
        lambda: held.open_directory(name),
        lambda: held.make_directory(name),
        lambda: held.unlink(name),
        lambda: held.rename(name, "x"),
        lambda: held.rename("x", name),
        lambda: held.stat(name),
        lambda: held.remove_tree(name),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="is not a name"):
            call()


@pytest.fixture(params=["openat2", "walk"])
def beneath(request: pytest.FixtureRequest) -> Callable[..., int]:
    """Both ways to open a path of several components."""
    if request.param == "walk":
        return walk_beneath
    assert safe_paths._has_openat2(), "this kernel should have it"
    return open_beneath


@pytest.mark.parametrize("planted", ["a", "b", "c"])
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY | os.O_CREAT, os.O_RDONLY | os.O_DIRECTORY])
def test_a_path_with_a_symlink_at_any_component_is_refused(
    beneath: Callable[..., int], held: SafeDirectory, place: Path, outside: Path, planted: str, flags: int
) -> None:
    at = place / "held"
    for part in ("a", "b", "c"):
        if part == planted:
            at.chmod(0o777)
            link = at / part
            assert as_nobody(lambda link=link: link.symlink_to(outside))  # type: ignore[misc]
            break
        at /= part
        at.mkdir()
    with pytest.raises(OSError, match=r"symbolic|Not a directory"):
        beneath(held.fd, "a/b/c", flags)
    assert is_untouched(outside)


@pytest.mark.parametrize("path", ["..", "../outside/file", "a/../../outside/file", "/etc/passwd"])
def test_a_path_does_not_lead_out(beneath: Callable[..., int], held: SafeDirectory, outside: Path, path: str) -> None:
    held.make_directory("a")
    with pytest.raises(OSError, match="cross-device") as caught:
        beneath(held.fd, path, os.O_RDONLY)
    assert caught.value.errno == errno.EXDEV


def test_a_path_beneath_is_opened(beneath: Callable[..., int], held: SafeDirectory) -> None:
    with held.open_directory("a", make=True) as a:
        a.make_directory("b")
    fd = beneath(held.fd, "a/b/c", os.O_WRONLY | os.O_CREAT, 0o640)
    assert not os.get_inheritable(fd)
    assert stat.S_IMODE(os.fstat(fd).st_mode) == 0o640 & ~0o022
    os.close(fd)
    with pytest.raises(FileNotFoundError):
        beneath(held.fd, "a/x/c", os.O_RDONLY)
    with pytest.raises(NotADirectoryError):
        beneath(held.fd, "a/b/c/d", os.O_RDONLY)
    with pytest.raises(ValueError, match="null"):
        beneath(held.fd, "a\0b", os.O_RDONLY)


def test_a_component_that_is_swapped_all_the_time_never_leads_out(
    beneath: Callable[..., int], held: SafeDirectory, place: Path, outside: Path
) -> None:
    """A race on purpose: every open gets the file beneath, or an error."""
    (place / "held" / "a").mkdir()
    (place / "held" / "a" / "file").write_text("beneath")
    is_over = threading.Event()

    def swap() -> None:
        os.symlink(outside, place / "held" / "link")
        while not is_over.is_set():
            os.rename(place / "held" / "a", place / "held" / "b")
            os.rename(place / "held" / "link", place / "held" / "a")
            os.rename(place / "held" / "a", place / "held" / "link")
            os.rename(place / "held" / "b", place / "held" / "a")

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        for _ in range(2000):
            try:
                fd = beneath(held.fd, "a/file", os.O_RDONLY)
            except OSError:
                continue
            assert os.read(fd, 100) == b"beneath"
            os.close(fd)
    finally:
        is_over.set()
        thread.join()
    assert is_untouched(outside)


# Files that are believed, or run, wherever they are


@pytest.fixture(params=["read", "run"])
def reach(request: pytest.FixtureRequest) -> Callable[[str], object]:
    """Each way to such a file."""
    return stat_trusted if request.param == "run" else lambda path: os.close(open_trusted(path))


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize(
    ("owner", "group", "mode", "said"),
    [
        (0, 0, 0o777, "writable by everybody"),
        (0, NOBODY, 0o770, f"writable by group {NOBODY}"),
        (NOBODY, NOBODY, 0o755, "must belong to root or this user"),
        (0, 0, 0o1777, None),
        (0, NOBODY, 0o1770, None),
        (0, 0, 0o775, None),
        (0, NOBODY, 0o755, None),
    ],
)
def test_a_file_is_trusted_only_if_nobody_else_can_put_another_in_the_place_of_it_or_of_its_directories(
    place: Path, reach: Callable[[str], object], level: int, owner: int, group: int, mode: int, said: str | None
) -> None:
    path = place / "0" / "1" / "file"
    path.parent.mkdir(parents=True, mode=0o755)
    path.touch(mode=0o600)
    changed = path.parents[level]
    os.chown(changed, owner, group)
    changed.chmod(mode)
    with pytest.raises(UnsafePath, match=said) if said else contextlib.nullcontext():
        reach(str(path))


def test_a_trusted_file_is_reached_by_links_of_ours_only_and_run_by_one_but_not_read(place: Path, sticky: Path) -> None:
    (place / "real").mkdir()
    (place / "real" / "file").touch(mode=0o600)
    (place / "link").symlink_to("real")
    (place / "name").symlink_to("link/../link/file")
    (place / "loop").symlink_to("loop")
    os.close(open_trusted(str(place / "link" / "file")))
    assert stat_trusted(str(place / "name")).st_ino == (place / "real" / "file").stat().st_ino
    with pytest.raises(OSError, match="symbolic"):
        open_trusted(str(place / "name"))
    with pytest.raises(OSError, match="symbolic"):
        stat_trusted(str(place / "loop"))
    planted = sticky / "planted"
    assert as_nobody(lambda: planted.symlink_to(place / "real"))
    for path in (str(planted / "file"), str(planted)):
        with pytest.raises(UnsafePath, match="must belong to root or this user"):
            stat_trusted(path)


def test_no_descriptor_is_left(place: Path, sticky: Path) -> None:
    assert as_nobody(lambda: (sticky / "theirs").mkdir())
    (place / "loop").symlink_to("loop")
    (place / "file").touch()
    before = set(os.listdir("/proc/self/fd"))
    for path in (place / "new", sticky / "theirs", place / "loop", place / "file", sticky / "theirs" / "x"):
        with contextlib.suppress(OSError, UnsafePath), SafeDirectory.open(path, make=True) as directory:
            with pytest.raises(FileNotFoundError):
                directory.open_directory("none")
            directory.open_directory("some", make=True).close()
    assert set(os.listdir("/proc/self/fd")) == before


def test_root_acts_as_another_user_for_a_while_in_this_thread_and_those_it_starts(place: Path) -> None:
    (place / "roots").touch(0o600)
    (place / "theirs").mkdir(0o700)
    os.chown(place / "theirs", NOBODY, NOBODY)
    elsewhere: list[bytes] = []
    answers: list[object] = []

    def read() -> object:
        try:
            return (place / "roots").read_bytes()
        except PermissionError:
            return None

    with pytest.raises(UnsafePath):
        SafeDirectory.open(place / "theirs")
    go = threading.Event()
    dumpable = ctypes.CDLL(None).prctl(3, 0, 0, 0, 0)  # PR_GET_DUMPABLE

    def read_later() -> None:
        go.wait(30)
        elsewhere.append((place / "roots").read_bytes())

    before = threading.Thread(target=read_later)
    before.start()
    with acting_as(NOBODY, NOBODY):
        assert read() is None
        within = threading.Thread(target=lambda: answers.append(read()))
        within.start()
        within.join()
        go.set()
        before.join()
        with SafeDirectory.open(place / "theirs") as directory:
            directory.make_directory("made")
            assert ctypes.CDLL(None).prctl(3, 0, 0, 0, 0) == dumpable
    assert ctypes.CDLL(None).prctl(3, 0, 0, 0, 0) == dumpable
    assert answers == [None]
    assert elsewhere == [b""]
    assert read() == b""
    made = (place / "theirs" / "made").stat()
    assert (made.st_uid, made.st_gid) == (NOBODY, NOBODY)
    with pytest.raises(UnsafePath):
        SafeDirectory.open(place / "theirs")


def test_nobody_acts_as_another_user_without_the_right_to(place: Path) -> None:
    def acted() -> None:
        with contextlib.suppress(NotPermitted), acting_as(1, 1):
            raise PermissionError
        Path("/dev/null").open().close()

    assert as_nobody(acted)
