"""Descriptors that outlive this process: systemd's fd store (sd_notify(3), "FDSTORE").

The manager keeps duplicates and hands them to the next life of the daemon, which also keeps them stored: what is not
needed any more must be removed, else it stays. What a store is emptied by: `remove`; a `systemctl stop`, or the unit
failing for good (not a restart, however long it takes); the machine. FDPOLL=0 goes with every message: without it
systemd drops a descriptor that polls as an error, and /dev/fuse does so before it is mounted and after an abort.

Three limits, each of which the manager passes over in silence, so that we count:

- `FileDescriptorStoreMax` of the unit: what is beyond is closed.
- All names come back in one environment variable, and the kernel takes 32 pages for one (MAX_ARG_STRLEN, execve(2)):
  with one name too many **the unit can't be started again**. `NAME_MAX_CHARACTERS` × `FD_STORE_MAX` stays below.
- A descriptor of an open file that is in the store is dropped, also when it comes under another name (kcmp(2)).

A value that changes is stored under a new name before its old one is removed: removal is by name, and takes all.
"""

import re
from collections import Counter
from collections.abc import Sequence

from streamd.daemon.service_manager import NotifyChannel
from streamd.errors import StreamdError

# FileDescriptorStoreMax in systemd/streamd.service.
FD_STORE_MAX = 2048
NAME_MAX_CHARACTERS = 62
# 32 pages of 4 KiB, less `LISTEN_FDNAMES=` and the zero at its end.
NAMES_MAX_BYTES = (32 << 12) - len("LISTEN_FDNAMES=") - 1
# SCM_MAX_FD (unix(7)): descriptors in one message.
_MESSAGE_MAX_FDS = 253
# PID 1 may be busy for a moment (daemon-reload). What is not stored is lost, so this is waited for, and no longer.
SEND_WAIT_S = 2.0
# systemd allows more; a colon would split a name on its way back.
_NAME = re.compile(rf"[A-Za-z0-9._-]{{1,{NAME_MAX_CHARACTERS}}}", re.ASCII)


class FdStoreError(StreamdError):
    """The manager did not take descriptors or forgets none; a restart would lose or find what it shouldn't."""

    kind = "fd-store"


class FdStoreFull(FdStoreError):
    """There is no room for more descriptors; nothing was sent."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"fd store has no room for {name}: {reason}")


class FdStore:
    """The store, as far as this process knows it. Not for several threads at once."""

    def __init__(
        self, channel: NotifyChannel, received: Sequence[tuple[str, int]] = (), *, capacity: int | None = None
    ) -> None:
        """Take over what came back at start; `capacity` None: the unit's, not known, is taken for ours."""
        self._channel = channel
        self._received: list[tuple[str, int]] | None = list(received)
        self._capacity = FD_STORE_MAX if capacity is None else capacity
        self._stored = Counter(name for name, _ in received)

    @property
    def is_there(self) -> bool:
        """Whether anything can be stored."""
        return self._channel.is_open and self._capacity > 0

    @property
    def count(self) -> int:
        """How many descriptors the manager should hold (the unit's `NFileDescriptorStore`), if no two are alike."""
        return self._stored.total()

    def take(self) -> dict[str, list[int]]:
        """Give the descriptors of a former life by name, those of one name in any order; once.

        They are the caller's to close, and stay stored. Names are as the manager gives them: unchecked.
        """
        assert self._received is not None, "taken before"
        taken: dict[str, list[int]] = {}
        for name, fd in self._received:
            taken.setdefault(name, []).append(fd)
        self._received = None
        return taken

    def store(self, name: str, fds: Sequence[int]) -> bool:
        """Have descriptors kept under a name, beside what it has; false without a manager or a store.

        The manager takes them a moment later: `flush` before an exit. May wait for `SEND_WAIT_S`. Raises:
        `FdStoreFull`, `FdStoreError`, `ValueError` for a name that can't be one.
        """
        _check(name)
        if not self.is_there:
            return False
        if self.count + len(fds) > self._capacity:
            raise FdStoreFull(name, f"{self.count} of {self._capacity} are stored (FileDescriptorStoreMax=)")
        names_bytes = sum((len(stored) + 1) * count for stored, count in self._stored.items())
        if names_bytes + (len(name) + 1) * len(fds) > NAMES_MAX_BYTES:
            raise FdStoreFull(name, "with more names the unit could not be started again")
        for start in range(0, len(fds), _MESSAGE_MAX_FDS):
            batch = fds[start : start + _MESSAGE_MAX_FDS]
            self._send(f"FDSTORE=1\nFDNAME={name}\nFDPOLL=0", name, batch)
            self._stored[name] += len(batch)
        return True

    def remove(self, name: str) -> None:
        """Have all descriptors of a name closed. Raises: `FdStoreError`, `ValueError`."""
        _check(name)
        if not self.is_there:
            return
        self._send(f"FDSTOREREMOVE=1\nFDNAME={name}", name)
        del self._stored[name]

    def flush(self, timeout_s: float) -> bool:
        """Wait until the manager has taken in what was stored and removed; false when that isn't known in time."""
        return self._channel.barrier(timeout_s)

    def _send(self, message: str, name: str, fds: Sequence[int] = ()) -> None:
        try:
            self._channel.send(message, fds, timeout_s=SEND_WAIT_S)
        except OSError as error:
            raise FdStoreError(f"service manager did not take {name}: {error.strerror}") from error


def _check(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a stored descriptor")
