"""Where the daemon's and the mounts' Unix sockets lie, who may bind them, who is at their other end, who should be.

A bound socket is also a lock: while one process answers at it, no other takes its place. Clients import this, so it
stays small.
"""

import fcntl
import hashlib
import os
import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from streamd.errors import Refused, StreamdError

_SUN_PATH_MAX_BYTES = 107  # unix(7)
_FLOCK = struct.Struct("hhqqi4x")  # fcntl(2), on 64-bit Linux: type, whence, start, length, pid
_UCRED = struct.Struct("3i")  # unix(7): pid, uid, gid


def sockets_directory(run_directory: Path) -> Path:
    """Give the directory of all control sockets of mounts."""
    return run_directory / "mounts"


def socket_path(run_directory: Path, mountpoint: str) -> Path:
    """Give the path of a mount's control socket, for a resolved mountpoint."""
    name = hashlib.sha256(os.fsencode(mountpoint)).hexdigest()[:16]
    return sockets_directory(run_directory) / f"{name}.sock"


def api_socket_path(run_directory: Path) -> Path:
    """Give the path of the daemon's control API."""
    return run_directory / "api.sock"


def images_directory(run_directory: Path) -> Path:
    """Give the directory of the daemon's mountpoints."""
    return run_directory / "images"


def lock_path(run_directory: Path) -> Path:
    """Give the path of the file that the daemon of a run directory has locked."""
    return run_directory / "daemon.lock"


def lock_holder(run_directory: Path) -> int | None:
    """Give the process that has the daemon's lock; None when none has, or when that can't be seen from here."""
    try:
        with open(lock_path(run_directory), "rb") as file:
            asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, *_, pid = _FLOCK.unpack(fcntl.fcntl(file, fcntl.F_GETLK, asked))
    except OSError:
        return None
    return pid if kind != fcntl.F_UNLCK else None


def is_served(path: Path) -> bool:
    """Tell whether a process listens at the socket. Never waits: a full queue (EAGAIN) means yes."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(os.fspath(path))
        except (BlockingIOError, PermissionError):
            return True
        except OSError:
            return False
        return True


class Peer(NamedTuple):  # a dataclass costs 10 ms, and clients import this
    """The process that connected, as the kernel noted it at that moment; pid 0 when it is in another namespace."""

    pid: int
    uid: int
    gid: int


def peer_of(credentials: bytes) -> Peer:
    """Read what `getsockopt(SOL_SOCKET, SO_PEERCRED, PEER_BYTES)` gave."""
    return Peer(*_UCRED.unpack(credentials))


PEER_BYTES = _UCRED.size


class BoundSocket:
    """A listening socket (0600, in a directory of ours, 0700): while this is entered, no other process has its path.

    `refusal` is what to say when another one has it already.
    """

    def __init__(self, path: Path, *, backlog: int, refusal: str) -> None:
        self.path = path
        self._backlog = backlog
        self._refusal = refusal

    def __enter__(self) -> socket.socket:
        """Bind. Raises: `Refused` when another process answers there, `StreamdError`."""
        try:
            self._listener = self._listen()
        except OSError as error:
            raise StreamdError(f"control socket {self.path}: {error.strerror or error}") from error
        return self._listener

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        # Only ours: once closed, another process may have taken the place over.
        with self._directory, suppress(FileNotFoundError):
            if os.path.samestat(self._directory.stat(self.path.name), self._bound_at):
                self._directory.unlink(self.path.name)

    def is_in_place(self) -> bool:
        """Whether who connects to the path gets to this socket."""
        try:
            return os.path.samestat(os.stat(self.path, follow_symlinks=False), self._bound_at)
        except OSError:
            return False

    def _listen(self) -> socket.socket:
        """Bind; a socket that a dead process left is replaced, one that answers is respected.

        Two processes that start at once are kept apart by a lock on the directory, held for the moment of binding.
        Raises: `Refused`, also for a directory that others can change or replace; `OSError`.
        """
        from streamd.safe_paths import SafeDirectory  # clients need not pay for it

        if len(os.fsencode(self.path)) > _SUN_PATH_MAX_BYTES:
            raise Refused(f"{self.path} is too long for a Unix socket ({_SUN_PATH_MAX_BYTES} bytes): set run_directory")
        self._directory = SafeDirectory.open(self.path.parent, make=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            os.fchmod(self._directory.fd, 0o700)  # before there is a socket in it
            fcntl.flock(self._directory.fd, fcntl.LOCK_EX)
            if is_served(self.path):
                raise Refused(self._refusal)
            self._directory.unlink(self.path.name, missing_ok=True)
            # bind(2) and connect(2) take paths only; nobody else can change what this one leads to.
            listener.bind(os.fspath(self.path))
            self.path.chmod(0o600)
            self._bound_at = self._directory.stat(self.path.name)
            listener.listen(self._backlog)
            fcntl.flock(self._directory.fd, fcntl.LOCK_UN)
        except BaseException:
            listener.close()
            self._directory.close()
            raise
        return listener
