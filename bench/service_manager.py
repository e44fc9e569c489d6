"""Stands in for systemd where the real one is too much of a machine (tests/systemd): it keeps a daemon's descriptors.

What a daemon stores (sd_notify(3): FDSTORE, FDSTOREREMOVE, BARRIER) is kept by name and handed to its next life in the
order of the protocol (sd_listen_fds(3)). As with systemd, what a life had sent before it was killed still counts. An
open file that is stored under a second name is kept twice here; systemd drops it.
"""

import os
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

_MESSAGE_BYTES = 8192
_FDS_MAX = 253  # SCM_MAX_FD
_STORE_MAX = 2048
# Gives the descriptors the numbers from 3 on, and becomes the program: LISTEN_PID must be its own.
_HAND_OVER = """
import fcntl, os, sys
names, numbers, *vector = sys.argv[1:]
fds = [int(number) for number in numbers.split(",") if number]
above = 3 + len(fds)
copies = [fcntl.fcntl(fd, fcntl.F_DUPFD, above) for fd in fds]
for place, copy in enumerate(copies, 3):
    os.dup2(copy, place)
os.closerange(above, max([above, *fds, *copies]) + 1)
os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(len(fds)), "LISTEN_FDNAMES": names}
os.execv(vector[0], vector)
"""


class ServiceManager:
    """Listens at a socket in `directory`, which has a short name, until it is closed."""

    def __init__(self, directory: Path) -> None:
        self._address = directory / "notify"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(os.fspath(self._address))
        self._lock = threading.Lock()
        self._stored: dict[str, list[int]] = {}
        self._thread = threading.Thread(target=self._listen, daemon=True, name="service-manager")
        self._thread.start()

    def environment(self) -> dict[str, str]:
        """What the daemon's environment has of it."""
        return {"NOTIFY_SOCKET": os.fspath(self._address), "FDSTORE": str(_STORE_MAX)}

    def stored(self) -> list[tuple[str, int]]:
        """Give name and descriptor of all that is stored; they stay ours. What was sent before counts."""
        self._flush()
        with self._lock:
            return [(name, fd) for name, fds in self._stored.items() for fd in fds]

    @staticmethod
    def command(vector: Sequence[str], stored: Sequence[tuple[str, int]]) -> list[str]:
        """Give the command that hands these descriptors, which it must inherit, to a program."""
        names, fds = ":".join(name for name, _ in stored), ",".join(str(fd) for _, fd in stored)
        return [sys.executable, "-S", "-c", _HAND_OVER, names, fds, *vector]

    def close(self) -> None:
        """Stop, and let go of everything."""
        self._send("END=1")
        self._thread.join()
        self._socket.close()
        for fd in (fd for fds in self._stored.values() for fd in fds):
            os.close(fd)
        self._stored.clear()

    def _flush(self) -> None:
        ours, theirs = os.pipe()
        try:
            self._send("BARRIER=1", [theirs])
            os.close(theirs)
            os.read(ours, 1)
        finally:
            os.close(ours)

    def _send(self, message: str, fds: Sequence[int] = ()) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.connect(os.fspath(self._address))
            socket.send_fds(sender, [message.encode()], list(fds))

    def _listen(self) -> None:
        while True:
            data, fds, _, _ = socket.recv_fds(self._socket, _MESSAGE_BYTES, _FDS_MAX)
            lines = dict(line.split("=", 1) for line in data.decode().splitlines())
            if "END" in lines:
                return
            with self._lock:
                self._take(lines, fds)

    def _take(self, lines: Mapping[str, str], fds: Sequence[int]) -> None:
        if lines.get("FDSTORE") == "1":
            self._stored.setdefault(lines["FDNAME"], []).extend(fds)
            return
        gone = self._stored.pop(lines["FDNAME"], []) if lines.get("FDSTOREREMOVE") == "1" else []
        for fd in [*gone, *fds]:
            os.close(fd)
