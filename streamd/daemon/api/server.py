"""The listening side: takes connections, checks who they are, and lets hypercorn speak HTTP over them.

Hypercorn's own server hides the socket from the application, has no bound on connections and none on how long a client
may take to read. So its part for one connection is used without the rest: `TCPServer`, which is no public interface;
`tests/daemon/api/test_server.py` holds what is relied on. The protocol, the parsing and their bounds are its own.
"""

import logging
import os
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import structlog
import trio
from hypercorn.config import Config
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from hypercorn.utils import wrap_app
from starlette.types import ASGIApp

from streamd.daemon.api import problems
from streamd.daemon.api.connection import Connection
from streamd.daemon.api.limits import Limits
from streamd.daemon.api.metrics import ApiCounts
from streamd.daemon.api.problems import RequestProblem
from streamd.daemon.sockets import Peer

log = structlog.get_logger(__name__)

# A fresh connection takes a kilobyte at once.
_TURN_AWAY_S = 1.0
# Whoever tries without end shall not fill the log.
_REPORT_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class Allowed:
    """Who may ask: users, or members of groups (by their primary one, which is all that the kernel notes)."""

    uids: frozenset[int] = field(default_factory=lambda: frozenset({0, os.geteuid()}))
    gids: frozenset[int] = frozenset()

    def __contains__(self, peer: Peer) -> bool:
        return peer.uid in self.uids or peer.gid in self.gids


async def _never() -> socket.socket:
    await trio.sleep_forever()


async def serve(
    listener: socket.socket,
    app: ASGIApp,
    counts: ApiCounts,
    *,
    limits: Limits,
    allowed: Allowed,
    renewed: Callable[[], Awaitable[socket.socket]] = _never,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Answer clients until cancelled; then every connection is cut. The listener stays open, and the caller's.

    `renewed` gives the listener that takes the last one's place, once there is one; connections stay. Nothing that a
    client does ends this.
    """
    server = _Server(app, counts, limits, allowed)
    async with trio.open_nursery() as nursery:
        try:
            while True:
                # A duplicate, because Trio closes what it serves.
                listening = trio.SocketListener(trio.socket.from_stdlib_socket(listener.dup()))
                async with trio.open_nursery() as accepting:
                    accept = partial(trio.serve_listeners, server.handle, [listening], handler_nursery=nursery)
                    await accepting.start(accept)
                    task_status.started()
                    task_status = trio.TASK_STATUS_IGNORED
                    listener = await renewed()
                    accepting.cancel_scope.cancel()
        finally:
            server.cut_all()
            nursery.cancel_scope.cancel()


class _Server:
    def __init__(self, app: ASGIApp, counts: ApiCounts, limits: Limits, allowed: Allowed) -> None:
        self._app = wrap_app(cast(Any, app), 0, "asgi")
        self._counts = counts
        self._limits = limits
        self._allowed = allowed
        self._config = _config(limits)
        self._context = WorkerContext(None)
        self._connections: set[Connection] = set()
        self._reported_s = -_REPORT_EVERY_S

    async def handle(self, stream: trio.SocketStream) -> None:
        """Serve one connection; whatever goes wrong with it stays in here."""
        try:
            async with stream:
                await self._admit(Connection(stream, self._counts, write_wait_s=self._limits.write_wait_s))
        except* Exception:
            log.exception("connection failed")

    async def _admit(self, connection: Connection) -> None:
        if connection.peer not in self._allowed:
            await self._turn_away(connection, "peer", RequestProblem("wrong-peer", "this user may not ask here"))
        elif len(self._connections) >= self._limits.connections:
            busy = f"{self._limits.connections} connections are the most at once; try again later"
            await self._turn_away(connection, "limit", RequestProblem("busy", busy))
        elif self._connections_of(connection.peer) >= self._limits.connections_a_process:
            busy = f"{self._limits.connections_a_process} connections are the most of one process"
            await self._turn_away(connection, "limit", RequestProblem("busy", busy))
        else:
            with self._listed(connection), connection.scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(connection.cut_when_idle, self._limits.idle_s)
                    state = ConnectionState(connection.state())
                    # It calls what `Connection` has, and looks for `do_handshake` to find out that there is no TLS.
                    await TCPServer(self._app, self._config, self._context, cast(Any, state), cast(Any, connection))
                    nursery.cancel_scope.cancel()

    def _connections_of(self, peer: Peer) -> int:
        return sum(connection.peer.pid == peer.pid for connection in self._connections)

    @contextmanager
    def _listed(self, connection: Connection) -> Iterator[None]:
        self._connections.add(connection)
        self._counts.connections = len(self._connections)
        try:
            yield
        finally:
            self._connections.discard(connection)
            self._counts.connections = len(self._connections)

    async def _turn_away(self, connection: Connection, reason: str, error: RequestProblem) -> None:
        self._counts.refused[reason] += 1
        if trio.current_time() - self._reported_s >= _REPORT_EVERY_S:
            self._reported_s = trio.current_time()
            peer = connection.peer
            log.warning("API client refused", reason=reason, uid=peer.uid, pid=peer.pid)
        with trio.move_on_after(_TURN_AWAY_S), suppress(trio.BrokenResourceError):  # it may not wait for the answer
            await connection.send_all(problems.raw_response(error))

    def cut_all(self) -> None:
        """End all connections, those too that wait for a client to read."""
        for connection in self._connections:
            connection.cut()


def _config(limits: Limits) -> Config:
    config = Config()
    config.keep_alive_timeout = limits.idle_s  # as `Connection.cut_when_idle`, which knows no protocol
    config.h11_max_incomplete_size = limits.body_bytes
    config.websocket_max_message_size = limits.body_bytes
    config.max_app_queue_size = 1  # parts of a body; `Door` takes them as they come
    config.include_server_header = False
    config.accesslog = None
    config.errorlog = logging.getLogger("streamd.api")  # the daemon's own log, not hypercorn's handler
    return config
