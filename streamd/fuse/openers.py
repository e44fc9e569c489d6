"""Which processes have files of a mount open, by what /proc says: for a mount that no server of ours is asked about.

A look through /proc sees only what is open in its moment, and what it can read; so it is for messages, never for
safety: whether a mount is in use is the kernel's to say.
"""

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from streamd.fuse import mountinfo
from streamd.serve.handles import Opener

# A node has a thousand processes with some dozen descriptors each, at 2 µs a descriptor; and a command waits.
_LOOK_S = 2.0


def find(mountpoint: str, mount_id: int) -> list[tuple[str, Opener]]:
    """Give (file name, who) of every open file of a mount, as far as that is found within two seconds.

    Nothing is asked of the mount itself: links in /proc are texts (proc_pid_fd(5)).
    """
    until_s = time.monotonic() + _LOOK_S
    found = []
    for entry in os.scandir("/proc"):
        if time.monotonic() > until_s:
            break
        if entry.name.isdecimal():
            pid = int(entry.name)
            with suppress(OSError):  # it ended meanwhile
                found += [(name, describe(pid)) for name in sorted(set(_names(pid, f"{mountpoint}/", mount_id)))]
    return found


def describe(pid: int) -> Opener:
    """Say who a process is, by its command line; empty when it has ended. It can wait for the process's memory lock."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]
    except OSError:
        return Opener(pid, "", None)
    texts = [word.decode(errors="replace") for word in words]
    command = texts[0].rpartition("/")[2] if texts else ""
    # `runsc … restore … CONTAINER-ID`, `start`, and the sandbox's `boot`: the id is the last word.
    restores = "runsc" in command and any(verb in texts for verb in ("restore", "start", "boot"))
    return Opener(pid, command[:64], texts[-1][:256] if restores else None)


def _names(pid: int, prefix: str, mount_id: int) -> Iterator[str]:
    for number in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):
            path = os.readlink(f"/proc/{pid}/fd/{number}")
            # The name alone may be another mount's that lies on top.
            if path.startswith(prefix) and mountinfo.id_of(number, pid) == mount_id:
                yield path.removeprefix(prefix)
