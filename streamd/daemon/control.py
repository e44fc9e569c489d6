"""The control socket of a mount process: how commands ask it, without touching its mount.

`RUN_DIR/mounts/<first 16 hex digits of SHA-256(mountpoint)>.sock`, a Unix stream socket, directory 0700, socket 0600,
open to root and to the user of the process (SO_PEERCRED). One JSON object a line each way:

    {"method": "status"}                                    → {"ok": {…}}
    {"method": "fail", "handle": 3 | "container": "…"}      → {"ok": {"failed": 1}}     neither: all handles
    {"method": "umount", "force": false}                    → {"ok": {}}                  or the error `InUse`

An error is `{"error": {"kind": "refused", "message": …, "exit_code": 7, …}}`.


What is refused, or not understood, is answered with an error; nothing that a client sends ends the server or becomes a
path. Lines, connections and waits are bounded. The answer to `umount` is sent when the kernel has let go of the mount;
the process ends a moment later, and clients wait for that (`control_client`).
"""

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import structlog
import trio

from streamd.daemon.relay import error_record
from streamd.daemon.sockets import PEER_BYTES, BoundSocket, Peer, peer_of, socket_path
from streamd.errors import Refused, StreamdError

LINE_MAX_BYTES = 4096
CONNECTIONS_MAX = 32
# A client sends its line at once; one that doesn't is not waited for.
REQUEST_WAIT_S = 10.0
REPLY_WAIT_S = 5.0
_OPENERS_NAMED = 5  # in a message; the error's facts have all

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Opener:
    """Who holds a file of the mount open."""

    handle: int
    file: str
    pid: int
    command: str
    container: str | None = None


@dataclass(frozen=True, slots=True)
class FailSelector:
    """Which handles' waiting reads shall fail; neither given: all."""

    handle: int | None = None
    container: str | None = None


class MountControl(Protocol):
    """What a mount process can be asked for. May raise any `StreamdError`, which the client gets."""

    def status(self) -> dict[str, object]:
        """Describe the mount, in what JSON can hold; from memory, at once. Has `mountpoint` and `pid`."""
        ...

    def fail(self, selector: FailSelector) -> int:
        """Fail the reads of the selected handles with EIO, those that wait and those to come; how many handles."""
        ...

    async def umount(self, *, force: bool) -> Sequence[Opener]:
        """Unmount, and arrange for the process to end; return who has files open instead, when not forced."""
        ...


class InUse(Refused):
    """The mount has open files; `openers` holds whose."""

    def __init__(self, mountpoint: str, openers: Sequence[Opener]) -> None:
        named = openers[:_OPENERS_NAMED]
        who = ", ".join(f"{o.command or 'a process'} (pid {o.pid}) has {o.file} open" for o in named)
        if len(openers) > len(named):
            who += f", and {len(openers) - len(named)} more"
        super().__init__(f"{mountpoint} is in use: {who}; wait for it, or use --force, which fails its reads")
        self.openers = [asdict(opener) for opener in openers]


class _BadRequest(StreamdError):
    kind = "bad-request"


class ControlSocket:
    """The socket of one mountpoint, bound: while this is entered, no other process can serve the mountpoint.

    Bound before the mount is made and served after, so that the socket also is the mountpoint's lock; clients that come
    in between wait.
    """

    def __init__(self, run_directory: Path, mountpoint: str) -> None:
        self.path = socket_path(run_directory, mountpoint)
        refusal = f"mountpoint {mountpoint} is in use: another streamd process serves it"
        self._bound = BoundSocket(self.path, backlog=CONNECTIONS_MAX, refusal=refusal)

    def __enter__(self) -> "ControlSocket":
        """Bind. Raises: `Refused` when another process serves the mountpoint, `StreamdError`."""
        self._listener = self._bound.__enter__()
        return self

    def __exit__(self, *details: object) -> None:
        self._bound.__exit__(*details)

    async def serve(self, control: MountControl) -> None:
        """Answer clients until cancelled."""
        limit = trio.Semaphore(CONNECTIONS_MAX)
        # A duplicate, because Trio closes what it serves, and the claim lasts longer than the serving.
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(self._listener.dup()))
        await trio.serve_listeners(partial(_serve, control, limit), [listener])


def _peer(stream: trio.SocketStream) -> Peer:
    credentials = stream.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER_BYTES)
    assert isinstance(credentials, bytes)
    return peer_of(credentials)


async def _serve(control: MountControl, limit: trio.Semaphore, stream: trio.SocketStream) -> None:
    """Answer one client's lines until it goes. Whatever goes wrong stays in here."""
    async with stream:
        peer = _peer(stream)
        if peer.uid not in (0, os.geteuid()):
            log.warning("control client refused", uid=peer.uid)
            return
        try:
            limit.acquire_nowait()
        except trio.WouldBlock:
            log.warning("control client refused, too many connections", pid=peer.pid, most=CONNECTIONS_MAX)
            return
        try:
            await _conversation(control, stream)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the client went away
        finally:
            limit.release()


async def _conversation(control: MountControl, stream: trio.SocketStream) -> None:
    pending = bytearray()
    while True:
        with trio.move_on_after(REQUEST_WAIT_S) as waiting:
            while b"\n" not in pending and len(pending) <= LINE_MAX_BYTES:
                received = await stream.receive_some(LINE_MAX_BYTES)
                if not received:
                    return
                pending += received
        if waiting.cancelled_caught:
            return
        line, newline, rest = bytes(pending).partition(b"\n")
        pending = bytearray(rest)
        too_long = len(line) > LINE_MAX_BYTES or not newline
        reply = {"error": error_record(_BadRequest("request too long"))} if too_long else await _answer(control, line)
        # Shielded: an unmount ends the process, and with it the scope that we run in, before its answer is out.
        with trio.move_on_after(REPLY_WAIT_S, shield=True):
            await stream.send_all(json.dumps(reply).encode() + b"\n")
        if too_long:
            return


async def _answer(control: MountControl, line: bytes) -> dict[str, object]:
    """Do what one line asks for."""
    try:
        return {"ok": await _dispatch(control, _request(line))}
    except StreamdError as error:
        return {"error": error_record(error)}
    except Exception:
        # The door stays open: a bug in one answer must not end the mount.
        log.exception("control request failed")
        return {"error": error_record(StreamdError("internal error; the mount's log has the details"))}


def _request(line: bytes) -> dict[str, object]:
    try:
        request = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _BadRequest("request is not JSON") from error
    if not isinstance(request, dict):
        raise _BadRequest("request is not a JSON object")
    return request


async def _dispatch(control: MountControl, request: dict[str, object]) -> dict[str, object]:
    match request:
        case {"method": "status", **rest} if not rest:
            return control.status()
        case {"method": "fail", **rest} if rest.keys() <= {"handle", "container"}:
            return {"failed": control.fail(_selector(rest.get("handle"), rest.get("container")))}
        case {"method": "umount", "force": bool(force), **rest} if not rest:
            openers = await control.umount(force=force)
            if openers:
                raise InUse(str(control.status().get("mountpoint", "the mount")), openers)
            return {}
        case {"method": "status" | "fail" | "umount" as method}:
            raise _BadRequest(f"{method}: unknown or missing arguments")
        case _:
            raise _BadRequest("unknown method")


def _selector(handle: object, container: object) -> FailSelector:
    if handle is not None and container is not None:
        raise _BadRequest("fail: a handle or a container, not both")
    if handle is not None and (isinstance(handle, bool) or not isinstance(handle, int) or not 0 <= handle < 1 << 64):
        raise _BadRequest("fail: handle must be a number")
    if container is not None and (not isinstance(container, str) or not container):
        raise _BadRequest("fail: container must be an id")
    return FailSelector(
        handle=handle if isinstance(handle, int) else None,
        container=container if isinstance(container, str) else None,
    )
