"""The kernel's table of mounts, read without touching any of them (proc_pid_mountinfo(5))."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

MOUNTINFO = "/proc/self/mountinfo"
_ESCAPE = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class MountEntry:
    """One line. `options` are the mount's own (`ro`, `nosuid`, …), `super_options` the file system's.

    `root` is the directory of the file system that the mount shows: `/` but for binds.
    """

    mount_id: int
    device: tuple[int, int]  # major, minor
    root: str
    mountpoint: str
    options: frozenset[str]
    filesystem: str
    source: str
    super_options: frozenset[str]


def unescape(text: str) -> str:
    """Undo the octal escapes of space, tab, newline, backslash and #; bytes that are not UTF-8 stay as surrogates."""
    if "\\" not in text:
        return text
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), text)


def parse(lines: Iterable[str]) -> list[MountEntry]:
    """Read the table, in mount order: of two entries with one mountpoint, the later one lies on top.

    A line that is not understood is left out: a mount that we did not make must not break ours.
    """
    entries = []
    for line in lines:
        before, separator, after = line.rstrip("\n").partition(" - ")
        left, right = before.split(" "), after.split(" ")
        if not separator or len(left) < 6 or len(right) < 3:
            continue
        major, _, minor = left[2].partition(":")
        if not (left[0].isdecimal() and major.isdecimal() and minor.isdecimal()):
            continue
        entries.append(
            MountEntry(
                mount_id=int(left[0]),
                device=(int(major), int(minor)),
                root=unescape(left[3]),
                mountpoint=unescape(left[4]),
                options=frozenset(left[5].split(",")),
                filesystem=unescape(right[0]),
                source=unescape(right[1]),
                super_options=frozenset(right[2].split(",")),
            )
        )
    return entries


def read() -> list[MountEntry]:
    """Read this process's mount table."""
    with open(MOUNTINFO, encoding="utf-8", errors="surrogateescape") as table:
        return parse(table)


def topmost(mountpoint: str, entries: Iterable[MountEntry] | None = None) -> MountEntry | None:
    """Give the mount that `mountpoint` shows: the last one made there, or None."""
    found = None
    for entry in read() if entries is None else entries:
        if entry.mountpoint == mountpoint:
            found = entry
    return found


def with_id(mount_id: int) -> MountEntry | None:
    """Give the mount that has an id, or None when this process's table doesn't show it."""
    return next((entry for entry in read() if entry.mount_id == mount_id), None)


def id_of(fd: int | str, process: int | str = "self") -> int:
    """Give the id of the mount that an open file or directory is on, without asking its file system. Raises: OSError.

    `fd` is a descriptor of `process`.
    """
    with open(f"/proc/{process}/fdinfo/{fd}", encoding="ascii") as facts:
        return next(int(line.split()[1]) for line in facts if line.startswith("mnt_id:"))
