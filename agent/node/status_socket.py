"""What people ask the agent, by HTTP on a Unix socket of its own (0600): status, metrics, and triggers by hand.

    GET  /v1/status                        one JSON object
    GET  /metrics                          for Prometheus
    POST /v1/triggers                      {"target": POD or container id, "namespace", "stop"} → {"namespace", "name"}
    GET  /v1/triggers/NAMESPACE/NAME       what has become of it
    DELETE /v1/triggers/NAMESPACE/NAME     takes it back from the files
    DELETE /v1/snapshots/NAMESPACE/NAME    begins to delete a snapshot

One request a connection, answered with its end (`Connection: close`): as much of HTTP/1.1 as curl, Prometheus and the
standard library's client need. Sizes, times and connections are bounded. An error is `{"error": {"kind", "message"}}`.
"""

import json
import os
import socket
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import structlog
import trio

from agent.errors import AgentError
from agent.kube.errors import NotFound
from streamd.daemon.sockets import PEER_BYTES, BoundSocket, peer_of
from streamd.errors import Exit

log = structlog.get_logger(__name__)

CONNECTIONS_MAX = 32
_BACKLOG = 64
_HEAD_MAX_BYTES = 8 << 10
_BODY_MAX_BYTES = 64 << 10
_WAIT_S = 30.0

Json = dict[str, object]


class StatusError(AgentError):
    """A request that can't be answered; `status` is HTTP's."""

    kind = "usage"
    ends_with = Exit.USAGE

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Answers(Protocol):
    """Who answers; may raise `AgentError`."""

    async def status(self) -> Json:
        """Describe the agent."""
        ...

    def metrics(self) -> str:
        """Give the metrics."""
        ...

    async def trigger(self, target: str, namespace: str, *, stop: bool) -> Json:
        """Write a trigger for a pod."""
        ...

    def triggered(self, namespace: str, name: str) -> Json:
        """Say what has become of a trigger."""
        ...

    async def untrigger(self, namespace: str, name: str) -> Json:
        """Remove a trigger that `trigger` has written."""
        ...

    async def remove(self, namespace: str, name: str) -> Json:
        """Begin to delete a snapshot."""
        ...


@dataclass(frozen=True, slots=True)
class _Request:
    method: str
    path: tuple[str, ...]
    body: bytes


class StatusSocket:
    """The socket, bound while this is entered."""

    def __init__(self, path: Path) -> None:
        self._bound = BoundSocket(path, backlog=_BACKLOG, refusal=f"{path} is in use: another agent answers there")

    def __enter__(self) -> "StatusSocket":
        """Bind. Raises: `streamd.errors.Refused`, `StreamdError`."""
        self._listener = self._bound.__enter__()
        return self

    def __exit__(self, *details: object) -> None:
        self._bound.__exit__(*details)

    async def serve(self, answers: Answers) -> None:
        """Answer until cancelled."""
        limit = trio.CapacityLimiter(CONNECTIONS_MAX)
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(self._listener.dup()))
        await trio.serve_listeners(partial(_serve, answers, limit), [listener])


async def _serve(answers: Answers, limit: trio.CapacityLimiter, stream: trio.SocketStream) -> None:
    async with stream:
        credentials = stream.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER_BYTES)
        assert isinstance(credentials, bytes)
        if peer_of(credentials).uid not in (0, os.geteuid()):
            return
        with trio.move_on_after(_WAIT_S):
            try:
                async with limit:
                    await stream.send_all(await _answered(answers, stream))
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass  # who asked has gone


async def _answered(answers: Answers, stream: trio.SocketStream) -> bytes:
    try:
        request = await _received(stream)
        return await _routed(answers, request)
    except StatusError as error:
        return _error(error.status, error)
    except NotFound as error:
        return _error(404, error)
    except AgentError as error:
        return _error(409, error)
    except Exception:
        log.exception("a request failed")
        return _json(500, {"error": {"kind": "internal", "message": "internal error; the agent's log has the details"}})


async def _routed(answers: Answers, request: _Request) -> bytes:
    match request.method, request.path:
        case "GET", ("v1", "status"):
            return _json(200, await answers.status())
        case "GET", ("metrics",):
            return _response(200, "text/plain; version=0.0.4", answers.metrics().encode())
        case "POST", ("v1", "triggers"):
            target, namespace, stop = _wanted(request.body)
            return _json(200, await answers.trigger(target, namespace, stop=stop))
        case "GET", ("v1", "triggers", namespace, name):
            return _json(200, answers.triggered(namespace, name))
        case "DELETE", ("v1", "triggers", namespace, name):
            return _json(200, await answers.untrigger(namespace, name))
        case "DELETE", ("v1", "snapshots", namespace, name):
            return _json(200, await answers.remove(namespace, name))
        case _:
            raise StatusError(404, "there is nothing there; see the agent's documentation")


def _wanted(body: bytes) -> tuple[str, str, bool]:
    try:
        match json.loads(body):
            case {"target": str(target), "namespace": str(namespace), "stop": bool(stop)}:
                return target, namespace, stop
    except (ValueError, RecursionError):
        pass
    raise StatusError(400, "the body must be {target, namespace, stop}")


async def _received(stream: trio.SocketStream) -> _Request:
    data = b""
    while (end := data.find(b"\r\n\r\n")) < 0:
        part = await stream.receive_some()
        data += part
        if not part or len(data) > _HEAD_MAX_BYTES:
            raise StatusError(400, "no request")
    first, *lines = data[:end].decode("latin-1").split("\r\n")
    method, _, rest = first.partition(" ")
    target, _, version = rest.partition(" ")
    if not version.startswith("HTTP/1."):
        raise StatusError(400, "no request of HTTP/1")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    length = headers.get("content-length", "0")
    if not length.isascii() or not length.isdigit() or len(length) > 6 or int(length) > _BODY_MAX_BYTES:
        raise StatusError(413, f"a body of {length[:20]} bytes, more than {_BODY_MAX_BYTES}")
    body = data[end + 4 :]
    while len(body) < int(length):
        part = await stream.receive_some()
        if not part:
            raise StatusError(400, "half a request")
        body += part
    return _Request(method, tuple(filter(None, target.partition("?")[0].split("/"))), body[: int(length)])


def _error(status: int, error: AgentError) -> bytes:
    return _json(status, {"error": {"kind": error.kind, "message": str(error), "exit_code": int(error.ends_with)}})


def _json(status: int, value: Json) -> bytes:
    return _response(status, "application/json", json.dumps(value).encode())


def _response(status: int, content_type: str, body: bytes) -> bytes:
    head = (
        f"HTTP/1.1 {status} -\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n"
    )
    return f"{head}\r\n".encode() + body
