"""The commands' side of the control socket: blocking calls with explicit time-outs.

A command never looks at a mount to learn about it, since a stuck server would hang it: it asks the socket.
"""

import json
import os
import select
import signal
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from streamd.daemon.relay import relayed
from streamd.daemon.sockets import is_served, socket_path, sockets_directory
from streamd.errors import NotFound, NotPermitted, StreamdError
from streamd.fuse import mountinfo, mounting

# Status and fail are answered from memory; ten seconds of silence is a stopped or overloaded process.
ANSWER_WAIT_S = 10.0
# An unmount waits for a thread that calls umount2, a forced one for handlers to end.
UMOUNT_WAIT_S = 30.0
# After the unmount the process writes what its cache needs and closes it.
EXIT_WAIT_S = 15.0
REPLY_MAX_BYTES = 16 << 20
_ASK_AT_ONCE = 8


class NoServer(NotFound):
    """No process serves a mount at that socket."""


class NoAnswer(StreamdError):
    """A process has the socket, but gives no answer, or none that can be read."""

    kind = "no-answer"


@dataclass(frozen=True, slots=True)
class MountClient:
    """Asks the process that serves one mountpoint (resolved)."""

    run_directory: Path
    mountpoint: str

    @property
    def path(self) -> Path:
        """The socket."""
        return socket_path(self.run_directory, self.mountpoint)

    def is_served(self) -> bool:
        """Tell, without waiting, whether a process listens."""
        return is_served(self.path)

    def status(self) -> dict[str, object]:
        """Describe the mount. Raises: `NoServer`, `NoAnswer`, `NotPermitted`."""
        return self._ask({"method": "status"}, wait_s=ANSWER_WAIT_S)

    def fail(self, *, handle: int | None = None, container: str | None = None) -> int:
        """Fail reads of a handle, of a container, or all; how many handles. Raises: as `status`, and the server's."""
        selector: dict[str, object] = {"handle": handle, "container": container}
        request = {"method": "fail"} | {key: value for key, value in selector.items() if value is not None}
        failed = self._ask(request, wait_s=ANSWER_WAIT_S).get("failed")
        if not isinstance(failed, int):
            raise NoAnswer("the mount process gave an answer that can't be read")
        return failed

    def umount(self, *, force: bool) -> None:
        """Unmount, and wait for the process to end, so that its cache is free. Raises: as `status`, the server's."""
        self._ask({"method": "umount", "force": force}, wait_s=UMOUNT_WAIT_S, then_gone=True)

    def end_server(self) -> None:
        """Kill the process that holds the socket, answering or not (stopped, say), and wait for its end."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 2, 0))
            with suppress(OSError):
                connection.connect(os.fspath(self.path))
                server = _open_server(connection)
                if server is None:
                    return
                try:
                    signal.pidfd_send_signal(server, signal.SIGKILL)
                    _wait_for_end(server)
                finally:
                    os.close(server)

    def _ask(self, request: dict[str, object], *, wait_s: float, then_gone: bool = False) -> dict[str, object]:
        try:
            return ask(self.path, request, wait_s=wait_s, then_gone=then_gone)
        except NoServer as error:
            top = mountinfo.topmost(self.mountpoint)
            if top is not None and mounting.is_own(top):
                raise NoServer(f"{self.mountpoint}: its process is dead (streamd umount {self.mountpoint})") from error
            raise NoServer(f"no streamd mount at {self.mountpoint}: no process serves it") from error
        except NoAnswer as error:
            raise NoAnswer(f"{self.mountpoint}: {error}") from error


def ask(path: Path, request: dict[str, object], *, wait_s: float, then_gone: bool = False) -> dict[str, object]:
    """Send one request and give its result; with `then_gone` also wait for the server's end (`EXIT_WAIT_S` at most).

    `wait_s` bounds the connection and every wait for a part of the answer. Raises: what the server raised, `NoServer`,
    `NoAnswer`, `NotPermitted`.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        # With settimeout() a full queue would be an error at once; a blocking connect waits for a place in it.
        connection.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(wait_s), int(wait_s % 1 * 1e6))
        )
        try:
            connection.connect(os.fspath(path))
            connection.settimeout(wait_s)
        except (FileNotFoundError, ConnectionRefusedError) as error:
            raise NoServer("no streamd process serves it") from error
        except PermissionError as error:
            raise NotPermitted(f"{path}: the mount belongs to another user; run it with sudo") from error
        except OSError as error:
            raise NoAnswer(f"the mount process can't be asked: {error.strerror or 'no answer in time'}") from error
        server = _open_server(connection) if then_gone else None
        try:
            result = _result(_exchange(connection, request))
            if server is not None:
                _wait_for_end(server)
        finally:
            if server is not None:
                os.close(server)
    return result


def _exchange(connection: socket.socket, request: dict[str, object]) -> bytes:
    """Send the request and give the answer's line."""
    try:
        connection.sendall(json.dumps(request).encode() + b"\n")
        received = bytearray()
        while not received.endswith(b"\n"):
            piece = connection.recv(1 << 16)
            if not piece or len(received) > REPLY_MAX_BYTES:
                raise NoAnswer("the mount process broke off its answer")
            received += piece
    except TimeoutError as error:
        raise NoAnswer(f"the mount process did not answer within {connection.gettimeout():g} s") from error
    except OSError as error:
        raise NoAnswer(f"the mount process can't be asked: {error.strerror}") from error
    return bytes(received)


def _result(line: bytes) -> dict[str, object]:
    try:
        reply = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise NoAnswer("the mount process gave an answer that can't be read") from error
    match reply:
        case {"ok": dict(result)}:
            return {str(key): value for key, value in result.items()}
        case {"error": record}:
            raise relayed(record)
        case _:
            raise NoAnswer("the mount process gave an answer that can't be read")


def _open_server(connection: socket.socket) -> int | None:
    """Give a pidfd of the process at the other end, None when it is this process or in another pid namespace."""
    pid, _uid, _gid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if pid in (0, os.getpid()):
        return None
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def _wait_for_end(pidfd: int) -> None:
    """Wait until the process has ended; a pidfd is readable then (pidfd_open(2))."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.poll(EXIT_WAIT_S * 1000)


def all_statuses(run_directory: Path) -> list[dict[str, object]]:
    """Ask every mount process of this host, some at once; one that doesn't answer has `error` and `socket` only.

    Sockets of dead processes are passed over. Raises: `NotPermitted`, `StreamdError` when they can't be listed.
    """
    directory = sockets_directory(run_directory)
    try:
        sockets = sorted(directory / name for name in os.listdir(directory) if name.endswith(".sock"))
    except FileNotFoundError:
        return []
    except PermissionError as error:
        raise NotPermitted(f"{directory}: the mounts belong to another user; run it with sudo") from error
    except OSError as error:
        raise StreamdError(f"{directory}: {error.strerror}") from error
    with ThreadPoolExecutor(_ASK_AT_ONCE) as pool:
        answers = pool.map(_status_or_error, sockets)
        return [answer for answer in answers if answer is not None]


def _status_or_error(path: Path) -> dict[str, object] | None:
    try:
        return ask(path, {"method": "status"}, wait_s=ANSWER_WAIT_S)
    except NoServer:
        return None
    except StreamdError as error:
        return {"socket": str(path), "error": str(error)}
