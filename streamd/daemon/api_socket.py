"""The socket of the daemon's API, and the lock that says who the daemon of a run directory is.

The lock is `RUN_DIRECTORY/daemon.lock`, held as long as the process lives. A socket can be removed (by a cleaner of
temporary files, by a mistaken `rm`) while clients need it: whoever holds the lock then binds it anew, and nobody else.
It is a record lock (fcntl(2)): it ends with this very process, and forks don't have it, as they would a flock(2).
"""

import errno
import fcntl
import os
import socket
from collections.abc import Callable
from pathlib import Path

import structlog
import trio

from streamd.daemon.sockets import BoundSocket, api_socket_path, lock_path
from streamd.errors import Refused, StreamdError
from streamd.safe_paths import SafeDirectory

log = structlog.get_logger()

_BACKLOG = 256
# How long clients find nobody; each look costs two stats of a tmpfs.
LOOK_S = 2.0


class ApiSocket:
    """Entered, it is this process's: `listener` is bound at its path. `restored()` is told when it had to be again."""

    def __init__(self, run_directory: Path, *, restored: Callable[[], None]) -> None:
        self.path = api_socket_path(run_directory)
        self._lock_path = lock_path(run_directory)
        self._restored = restored
        self._refusal = f"another streamd daemon runs here ({self.path})"

    def __enter__(self) -> "ApiSocket":
        """Take both. Raises: `Refused` when another process has one of them, `StreamdError`."""
        self._lock_fd = self._lock()
        try:
            self._bound = self._bind()
        except BaseException:
            os.close(self._lock_fd)
            raise
        return self

    def __exit__(self, *details: object) -> None:
        self._bound.__exit__(*details)
        os.close(self._lock_fd)

    async def renewed(self) -> socket.socket:
        """Wait until the socket's path leads elsewhere, or nowhere, and give the one that was bound in its place."""
        told = ""
        while True:
            await trio.sleep(LOOK_S)
            if self._bound.is_in_place() and _is_at(self._lock_path, self._lock_fd):
                told = ""
                continue
            try:
                if not _is_at(self._lock_path, self._lock_fd):
                    former_fd, self._lock_fd = self._lock_fd, self._lock()
                    os.close(former_fd)
                if self._bound.is_in_place():
                    continue
                former, self._bound = self._bound, self._bind()
                former.__exit__()
            except StreamdError as error:
                if str(error) != told:
                    told = str(error)
                    log.error("nobody can ask this daemon: its socket has gone", reason=told, socket=str(self.path))
                continue
            log.warning("the socket of the API had gone, and is there again", socket=str(self.path))
            self._restored()
            return self.listener

    def _bind(self) -> BoundSocket:
        bound = BoundSocket(self.path, backlog=_BACKLOG, refusal=self._refusal)
        self.listener = bound.__enter__()
        return bound

    def _lock(self) -> int:
        try:
            with SafeDirectory.open(self._lock_path.parent, make=True) as directory:
                fd = directory.open_file(self._lock_path.name, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise StreamdError(f"{self._lock_path}: {error.strerror or error}") from error
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise Refused(self._refusal) from error
            raise StreamdError(f"{self._lock_path}: {error.strerror}") from error
        return fd


def _is_at(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(fd))
    except OSError:
        return False
