"""What stands before the routes: a request comes in whole, small and in time, or not at all.

Hypercorn bounds a request's head; here it is the body. That it is read before anything else also matters to the server:
its queue of body parts is bounded, and a request whose body nobody reads would keep the connection's tasks for ever.
Whatever the routes leave uncaught ends here.
"""

from collections.abc import MutableMapping
from contextlib import nullcontext
from typing import Any

import structlog
import trio
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from streamd.daemon.api import problems
from streamd.daemon.api.connection import connection_of
from streamd.daemon.api.limits import Limits
from streamd.daemon.api.metrics import ApiCounts
from streamd.daemon.api.problems import RequestProblem

log = structlog.get_logger(__name__)

_METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "QUERY")
_NO_ROUTE = "none"
_LENGTHS = {b"content-length", b"transfer-encoding"}


class Door:
    """The outermost ASGI application."""

    def __init__(self, routes: ASGIApp, limits: Limits, counts: ApiCounts) -> None:
        self._routes = routes
        self._limits = limits
        self._counts = counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close"})
            return
        assert scope["type"] == "http", scope["type"]
        status = 0

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        connection = connection_of(scope)
        try:
            with nullcontext() if connection is None else connection.running():
                await self._serve(scope, receive, counted)
        except Exception:
            # The routes have answered 500 if they still could (Starlette does, and then raises).
            log.exception("request failed", method=scope["method"][:20], path=scope["path"][:200])
            if connection is not None:
                connection.cut()
        finally:
            self._count(scope, status)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["http_version"] not in ("1.0", "1.1"):
            # Its requests share a connection, which a lease must not.
            await self._turn_away(scope, send, RequestProblem("wrong-version", "only HTTP/1 is spoken here"))
            return
        body = bytearray()
        with trio.move_on_after(self._limits.body_wait_s) as reading:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return
                body += message.get("body", b"")
                if len(body) > self._limits.body_bytes:
                    too_large = f"a request's body has {self._limits.body_bytes} bytes at most"
                    await self._turn_away(scope, send, RequestProblem("too-large", too_large))
                    return
                if not message.get("more_body", False):
                    break
        if reading.cancelled_caught:
            too_slow = f"the request's body did not come within {self._limits.body_wait_s:g} s"
            await self._turn_away(scope, send, RequestProblem("too-slow", too_slow))
            return
        if {name.lower() for name, _ in scope["headers"]} >= _LENGTHS:
            # The chunks were taken for the body. Who is in between may take the length (RFC 9112, 6.1): what follows is
            # then the body's rest to one, and a request to the other. All else that is said twice h11 refuses or joins.
            both = RequestProblem("bad-request", "a body has a content-length or a transfer-encoding, not both")
            await problems.response(both, {"connection": "close"})(scope, receive, send)
            return
        whole: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def receive_whole() -> Message:
            return whole.pop() if whole else await receive()

        await self._routes(scope, receive_whole, send)

    async def _turn_away(self, scope: Scope, send: Send, error: RequestProblem) -> None:
        """Answer without having read all, and hang up.

        The last step of an answer waits for a place in the queue, and that may be full of what nobody reads any more.
        So it is left out: the client has everything that its `content-length` says.
        """
        response = problems.response(error, {"connection": "close"})
        await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
        connection = connection_of(scope)
        await send({"type": "http.response.body", "body": response.body, "more_body": connection is not None})
        if connection is not None:
            connection.cut()

    def _count(self, scope: MutableMapping[str, Any], status: int) -> None:
        method = scope.get("method", "")
        route = getattr(scope.get("route"), "path", _NO_ROUTE)
        self._counts.requests[method if method in _METHODS else "other", route, str(status or "none")] += 1
