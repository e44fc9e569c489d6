"""mount(2) and umount2(2) on real mounts whose server is the test itself, or nobody. No FUSE library."""

import errno
import os
import select
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamd.errors import Exit, NotFound, NotPermitted, Refused, StreamdError
from streamd.fuse import mount_calls, mount_paths, mountinfo, mounting
from streamd.fuse.mounting import FILESYSTEM, FuseMount

INIT, DESTROY = 26, 38  # linux/fuse.h
READ_BYTES = 1 << 17  # the kernel wants room for its largest request, even if it has a small one
# Far more than any of this takes: it tells a hang.
LIMIT_S = 60.0


def nobody(_: str) -> bool:
    """No server answers."""
    return False


def mount_at(path: str) -> FuseMount:
    """Mount on whatever is at the path."""
    with mount_paths.open_mountpoint(path) as directory:
        return mounting.mount(directory)


def has_ended(mount: FuseMount) -> bool:
    """Whether the kernel has ended its connection."""
    poll = select.poll()
    poll.register(mount.fd, 0)
    return bool(poll.poll(0))


def mount_tmpfs(path: str) -> None:
    """Mount something that isn't ours."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", path], check=True)


@pytest.fixture
def mountpoint(tmp_path: Path) -> Iterator[str]:
    directory = tmp_path / "a mount\\point"
    directory.mkdir()
    yield str(directory)
    while top := mountinfo.topmost(str(directory)):
        mount_calls.umount(top.mountpoint, mount_calls.MNT_FORCE | mount_calls.MNT_DETACH)


def answer_init(mount: FuseMount) -> None:
    """Answer the kernel's first request as a server that can nothing."""
    request = os.read(mount.fd, READ_BYTES)
    _, opcode, unique = struct.unpack_from("IIQ", request)
    assert opcode == INIT
    body = struct.pack("IIIIHHIIHHI", 7, 31, 0, 0, 12, 9, 1 << 16, 1, 32, 0, 0).ljust(64, b"\0")
    os.write(mount.fd, struct.pack("IiQ", 16 + len(body), 0, unique) + body)


def start_reader(mountpoint: str) -> tuple[threading.Thread, list[int | None]]:
    """Ask for something that only the server can answer, in a thread; its errno ends up in the list."""
    result: list[int | None] = []

    def read() -> None:
        try:
            os.stat(f"{mountpoint}/pages.img")
            result.append(None)
        except OSError as error:
            result.append(error.errno)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread, result


def test_the_mount_is_what_was_asked_for(mountpoint: str) -> None:
    mount = mount_at(mountpoint)
    entry = mountinfo.topmost(mountpoint)
    assert entry is not None
    assert (entry.filesystem, entry.source, entry.device) == (FILESYSTEM, "streamd", mount.device)
    assert entry.options >= {"ro", "nosuid", "nodev", "noexec", "nosymfollow"}
    assert entry.super_options >= {"ro", "allow_other", "default_permissions", "user_id=0", "group_id=0"}
    answer_init(mount)
    mounting.unmount(mountpoint, mount.device)
    assert mountinfo.topmost(mountpoint) is None
    os.close(mount.fd)


def test_an_unmount_with_an_open_directory_is_refused_and_an_abort_is_not(mountpoint: str) -> None:
    mount = mount_at(mountpoint)
    answer_init(mount)
    held = os.open(mountpoint, os.O_PATH | os.O_DIRECTORY)  # the server isn't asked for that
    with pytest.raises(Refused, match="is in use"):
        mounting.unmount(mountpoint, mount.device)
    mounting.abort(mountpoint, mount.device)
    assert mountinfo.topmost(mountpoint) is None
    with pytest.raises(OSError, match="No such device"):
        os.read(mount.fd, READ_BYTES)
    os.close(held)
    os.close(mount.fd)


@pytest.mark.parametrize("answered", [False, True], ids=["INIT unanswered", "request unanswered"])
def test_an_abort_frees_whoever_waits(mountpoint: str, answered: bool) -> None:
    mount = mount_at(mountpoint)
    if answered:
        answer_init(mount)
    readers = [start_reader(mountpoint) for _ in range(8)]
    if answered:
        os.read(mount.fd, READ_BYTES)  # a lookup: the reader is beyond where a signal would free it
    mounting.abort(mountpoint, mount.device)
    for thread, result in readers:
        thread.join(LIMIT_S)
        # Those that came after the end saw the empty directory below.
        assert result
        assert result[0] in (errno.ENOTCONN, errno.ECONNABORTED, errno.ENOENT)
    assert mountinfo.topmost(mountpoint) is None
    mounting.abort(mountpoint, mount.device)  # a second time: nothing to do
    os.close(mount.fd)


def test_fusectl_aborts_a_connection_and_leaves_no_mount_of_its_own(mountpoint: str) -> None:
    mount = mount_at(mountpoint)
    before = len(mountinfo.read())
    assert mounting.abort_connection(mount.connection_id)
    assert len(mountinfo.read()) == before
    with pytest.raises(OSError, match="No such device"):
        os.read(mount.fd, READ_BYTES)
    os.close(mount.fd)
    assert not mounting.abort_connection(999_999)


def test_a_mount_whose_server_died_is_cleaned_and_the_mountpoint_usable_again(mountpoint: str) -> None:
    with mount_paths.open_mountpoint(mountpoint) as directory:
        for _ in range(2):  # one on top of the other
            os.close(mounting.mount(directory).fd)
    with pytest.raises(OSError, match="not connected"):
        os.listdir(mountpoint)
    with mounting.check(mountpoint, server_lives=nobody):
        pass
    assert mountinfo.topmost(mountpoint) is None
    assert os.listdir(mountpoint) == []


def test_a_mount_that_is_served_is_respected(mountpoint: str) -> None:
    os.close(mount_at(mountpoint).fd)  # so that only the server's word speaks for it
    with pytest.raises(Refused, match="in use"):
        mounting.check(mountpoint, server_lives=lambda _: True)
    assert mountinfo.topmost(mountpoint) is not None


def test_a_mount_that_does_not_answer_at_all_is_not_taken_for_dead(mountpoint: str) -> None:
    mount = mount_at(mountpoint)  # INIT unanswered: statfs waits
    with pytest.raises(Refused, match="in use"):
        mounting.check(mountpoint, server_lives=nobody)
    mounting.abort(mountpoint, mount.device)
    os.close(mount.fd)


def test_who_ends_a_connection_that_is_gone_ends_no_other_one_that_got_its_number(mountpoint: str) -> None:
    first = mount_at(mountpoint)
    with mounting.ending_connection(first):
        mounting.unmount(mountpoint, first.device)
        second = mount_at(mountpoint)  # gets the lowest number that is free
    assert not has_ended(second)
    with mounting.ending_connection(first):  # of old: it isn't looked for by its number
        pass
    assert not has_ended(second)
    with mounting.ending_connection(second):
        pass
    assert has_ended(second)
    for mount in (first, second):
        os.close(mount.fd)
    mounting.abort(mountpoint, second.device)


def test_mounts_of_others_are_never_touched(mountpoint: str) -> None:
    mount_tmpfs(mountpoint)
    entry = mountinfo.topmost(mountpoint)
    assert entry is not None
    with pytest.raises(NotFound):
        mounting.unmount(mountpoint)
    mounting.abort(mountpoint, entry.device)
    assert not mounting.clean_stale(mountpoint, server_lives=nobody)
    assert mountinfo.topmost(mountpoint) == entry
    # Nor is a later mount of ours, when an earlier one is meant.
    mount = mount_at(mountpoint)
    mounting.abort(mountpoint, entry.device)
    with pytest.raises(NotFound):
        mounting.unmount(mountpoint, entry.device)
    assert mounting.own_mountpoints().count(mountpoint) == 1
    mounting.abort(mountpoint, mount.device)
    os.close(mount.fd)
    assert mountinfo.topmost(mountpoint) == entry


def test_bad_mountpoints_are_refused_by_name(tmp_path: Path) -> None:
    full, file = tmp_path / "full", tmp_path / "file"
    full.mkdir()
    (full / "x").touch()
    file.touch()
    expected = {
        tmp_path / "missing": (Exit.NOT_FOUND, "does not exist"),
        tmp_path / "missing" / "below": (Exit.NOT_FOUND, "does not exist"),
        file: (Exit.USAGE, "is not a directory"),
        file / "below": (Exit.USAGE, "not a directory"),
        full: (Exit.REFUSED, "is not empty"),
    }
    for path, (exit_code, text) in expected.items():
        with pytest.raises(StreamdError, match=text) as refused:
            mounting.check(mount_paths.resolve(str(path)), server_lives=nobody)
        assert refused.value.exit_code == exit_code, path


def test_without_root_nothing_is_tried(tmp_path: Path) -> None:
    program = (
        "import os\n"
        "from streamd.fuse import mounting\n"
        "os.setuid(65534)\n"
        "try: mounting.check('/', server_lives=lambda _: False)\n"
        "except mounting.NotPermitted as error: print(error)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=LIMIT_S, cwd="/")
    assert result.stdout == "mount needs root: run it with sudo\n"
    assert issubclass(NotPermitted, StreamdError)


def test_a_symlink_to_a_mountpoint_is_followed_once_and_not_into_the_mount(tmp_path: Path, mountpoint: str) -> None:
    link, chain, loop = tmp_path / "link", tmp_path / "chain", tmp_path / "loop"
    link.symlink_to(mountpoint)
    chain.symlink_to("link")
    loop.symlink_to("loop")
    assert mount_paths.resolve(str(chain)) == mountpoint
    assert mount_paths.resolve(f"{chain}/") == mountpoint
    assert mount_paths.resolve(f"{mountpoint}/../link/.") == mountpoint
    mount = mount_at(mount_paths.resolve(str(chain)))
    # Nobody answers this mount: whoever looked at it would wait for ever.
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(mount_paths.resolve(str(chain))), daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    assert found == [mountpoint]
    mounting.abort(mountpoint, mount.device)
    os.close(mount.fd)
    with pytest.raises(Refused, match="symbolic links"):
        mount_paths.resolve(str(loop))
    with pytest.raises(NotFound):
        mount_paths.resolve("a\0b")


@pytest.fixture
def tenants(tmp_path: Path) -> Iterator[Path]:
    """Give a directory with an empty `mnt` that a tenant can change, beside `victim`, whose `mnt` has a tmpfs."""
    for name in ("tenant", "victim"):
        (tmp_path / name / "mnt").mkdir(parents=True)
    victim = str(tmp_path / "victim" / "mnt")
    mount_tmpfs(victim)
    yield tmp_path / "tenant"
    while mountinfo.topmost(victim):
        mount_calls.umount(victim, mount_calls.MNT_DETACH)
    for path in mounting.own_mountpoints():
        if path.startswith(f"{tmp_path}/"):
            mount_calls.umount(path, mount_calls.MNT_DETACH)


def swap(tenants: Path) -> None:
    """Put the victim's directory in the place of the tenant's own."""
    tenants.rename(tenants.parent / "away")
    tenants.symlink_to("victim")


@pytest.mark.parametrize(
    ("trick", "what"),
    [("removed", "No such file"), ("moved", "the directory was moved"), ("parent moved", "the directory was moved")],
)
def test_a_directory_that_is_replaced_after_the_check_leaves_no_mount_anywhere(
    tenants: Path, trick: str, what: str
) -> None:
    before = mountinfo.read()
    with mounting.check(str(tenants / "mnt"), server_lives=nobody) as directory:
        match trick:
            case "removed":
                (tenants / "mnt").rmdir()
                (tenants / "mnt").symlink_to("../victim/mnt")
            case "moved":
                (tenants / "mnt").rename(tenants / "gone")
                (tenants / "mnt").symlink_to("../victim/mnt")
            case _:
                swap(tenants)
        with pytest.raises(StreamdError, match=what):
            mounting.mount(directory)
    assert mountinfo.read() == before


def test_a_symlink_that_is_put_above_a_resolved_mountpoint_is_not_followed(tenants: Path) -> None:
    path = mount_paths.resolve(str(tenants / "mnt"))
    mount_calls.umount(str(tenants.parent / "victim" / "mnt"), 0)  # so that an empty directory is there, too
    swap(tenants)
    with pytest.raises(Refused, match="was replaced"):
        mounting.check(path, server_lives=nobody)
    tenants.unlink()
    (tenants.parent / "away").rename(tenants)
    (tenants / "mnt").rmdir()
    (tenants / "mnt").symlink_to("../victim/mnt")
    with pytest.raises(Refused, match="was replaced"):
        mounting.check(path, server_lives=nobody)


@pytest.mark.parametrize("by_force", [False, True], ids=["unmount", "abort"])
def test_an_unmount_never_takes_what_a_swapped_directory_leads_to(
    tenants: Path, by_force: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount = mount_at(str(tenants / "mnt"))
    answer_init(mount)
    umount = mount_calls.umount

    def umount_too_late(target: str, flags: int) -> None:
        if not tenants.is_symlink():
            swap(tenants)
        umount(target, flags)

    monkeypatch.setattr(mount_calls, "umount", umount_too_late)
    if by_force:
        mounting.abort(mount.mountpoint, mount.device)
    else:
        mounting.unmount(mount.mountpoint, mount.device)
    monkeypatch.undo()
    os.close(mount.fd)
    assert mountinfo.topmost(str(tenants.parent / "victim" / "mnt")) is not None
    assert not [path for path in mounting.own_mountpoints() if path.startswith(f"{tenants.parent}/")]


def test_an_unmount_looks_whether_the_mount_there_is_the_one_in_the_table(
    tenants: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount = mount_at(str(tenants / "mnt"))
    answer_init(mount)
    topmost = mountinfo.topmost

    def topmost_then_swap(path: str) -> mountinfo.MountEntry | None:
        found = topmost(path)
        if not tenants.is_symlink():
            swap(tenants)
        return found

    monkeypatch.setattr(mountinfo, "topmost", topmost_then_swap)
    mounting.abort(mount.mountpoint, mount.device)
    monkeypatch.undo()
    os.close(mount.fd)
    assert mountinfo.topmost(str(tenants.parent / "victim" / "mnt")) is not None


def escape(path: str) -> str:
    """Write a path as the kernel does (fs/proc_namespace.c: mangle)."""
    return "".join(f"\\{ord(char):03o}" if char in " \t\n\\#" else char for char in path)


@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1), max_size=5))
def test_mountpoints_are_read_as_the_kernel_wrote_them(paths: list[str]) -> None:
    # Lines end with \n alone; str.splitlines would end them elsewhere, too.
    lines = [
        f"{index} 1 0:{index + 30} / {escape(path)} ro,nosuid shared:1 master:2 - fuse.streamd streamd ro,user_id=0\n"
        for index, path in enumerate(paths)
    ]
    entries = mountinfo.parse(lines)
    assert [entry.mountpoint for entry in entries] == paths
    assert [entry.device for entry in entries] == [(0, index + 30) for index in range(len(paths))]
    for path in paths:
        last = max(index for index, other in enumerate(paths) if other == path)
        assert mountinfo.topmost(path, entries) == entries[last]


@given(st.text())
def test_a_line_that_makes_no_sense_is_left_out(line: str) -> None:
    good = "36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue"
    assert mountinfo.parse([line, good])[-1].mountpoint == "/mnt2"
