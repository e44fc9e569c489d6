"""The routes: each reads its request, asks the node, and gives the answer the form that `openapi` describes.

Handlers run on the Trio thread and use no thread of Starlette's pool, so that none can be missing when all are blocked
elsewhere. What asks a worker or a disk is bounded (`_bounded`).
"""

import math
import re
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

import msgspec
import trio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from streamd.daemon.api import metrics, models, openapi, problems
from streamd.daemon.api.connection import connection_of
from streamd.daemon.api.door import Door
from streamd.daemon.api.events import FellBehind, server_sent
from streamd.daemon.api.idempotency import RequestMemory
from streamd.daemon.api.limits import Limits
from streamd.daemon.api.metrics import ApiCounts
from streamd.daemon.api.models import HealthStatus, ImageStateName
from streamd.daemon.api.port import Node
from streamd.daemon.api.problems import NoAnswerYet, RequestProblem
from streamd.daemon.api.streams import Write, is_unread, send_stream, stream_slot, until_gone
from streamd.errors import NotFound, StreamdError

_IMAGE_ID = re.compile(r"[0-9a-f]{32}")
_T = TypeVar("_T")
_S = TypeVar("_S", bound=msgspec.Struct)


class Ended(NotFound):
    """The image that a request got before is gone."""

    kind = "ended"


def make_app(
    node: Node, counts: ApiCounts, *, limits: Limits, version: str, requests: RequestMemory | None = None
) -> ASGIApp:
    """Put the API together; `requests` None: it remembers none of before. Call what it gives under Trio only."""
    requests = RequestMemory(kept=limits.request_ids) if requests is None else requests
    api = _Api(node, counts, limits, version, requests)
    routes = [
        Route(operation.path, getattr(api, operation.name), methods=[operation.method])
        for operation in openapi.OPERATIONS
    ]
    app = Starlette(
        routes=[_merged(path, routes) for path in dict.fromkeys(route.path for route in routes)],
        exception_handlers={StreamdError: _on_error, HTTPException: _on_http_error, Exception: _on_bug},
    )
    app.router.redirect_slashes = False
    return Door(app, limits, counts)


def _merged(path: str, routes: list[Route]) -> Route:
    """Make one route of those with the same path, so that a wrong method's answer names all that are right."""
    endpoints = {
        method: route.endpoint for route in routes if route.path == path for method in sorted(route.methods or ())
    }

    async def endpoint(request: Request) -> Response:
        answer: Response = await endpoints[request.method](request)
        return answer

    return Route(path, endpoint, methods=list(endpoints))


async def _on_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, StreamdError)
    return problems.response(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Answer what Starlette found: no such path, or no such method there."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        wrong = RequestProblem("wrong-method", f"{request.method[:20]} is not possible here")
        allow = ", ".join(sorted((error.headers or {}).get("Allow", "").split(", ")))
        return problems.response(wrong, {"allow": allow})
    return problems.response(RequestProblem("no-such-path", "there is nothing at this path; see /openapi.json"))


async def _on_bug(_request: Request, _error: Exception) -> Response:
    return problems.response(RequestProblem("internal", "internal error; the daemon's log has the details"))


def _json(answer: msgspec.Struct, status: int = 200) -> Response:
    headers = {"cache-control": "no-store"}
    return Response(msgspec.json.encode(answer), status_code=status, media_type=openapi.JSON, headers=headers)


class _Api:
    """The handlers, named as in `openapi.OPERATIONS`."""

    def __init__(self, node: Node, counts: ApiCounts, limits: Limits, version: str, requests: RequestMemory) -> None:
        self._node = node
        self._counts = counts
        self._limits = limits
        self._requests = requests
        self._document = msgspec.json.encode(openapi.document(version))

    # Images

    async def request_image(self, request: Request) -> Response:
        """Give the request's image, which is noted in the step in which it is given."""
        _only(request)
        asked = await _body(request, models.ImageRequest, needed=True)
        known = self._requests.image_of(asked)
        if known is not None:
            try:
                return _json(self._node.image(known))
            except NotFound as error:
                raise Ended(f"image {known} of request {asked.request_id} has ended") from error
        image = await self._bounded(partial(self._node.request_image, asked))
        self._requests.image_of(asked)  # another one of this id may have been answered meanwhile
        self._requests.note(asked, image.id)
        return _json(image)

    async def list_images(self, request: Request) -> Response:
        _only(request)
        return _json(models.ImageList(images=list(self._node.images())))

    async def get_image(self, request: Request) -> Response:
        _only(request, "wait_s")
        image_id = _image_id(request)
        wait_s = _number(request, "wait_s", 0.0, high=self._limits.image_wait_s)
        image = self._node.image(image_id)
        if not wait_s or image.state is not ImageStateName.PREPARING:
            return _json(image)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_end_when_gone, request.receive, nursery.cancel_scope)
            with trio.move_on_after(wait_s):
                while self._state(image_id) is ImageStateName.PREPARING:
                    await self._node.events.changed()
            nursery.cancel_scope.cancel()
        return _json(self._node.image(image_id))

    def _state(self, image_id: str) -> ImageStateName:
        try:
            return self._node.image(image_id).state
        except NotFound:
            return ImageStateName.GONE

    async def release_image(self, request: Request) -> Response:
        _only(request)
        asked = await _body(request, models.ReleaseRequest)
        return _json(self._node.release(_image_id(request), force=asked.force))

    async def fail_reads(self, request: Request) -> Response:
        _only(request)
        chosen = await _body(request, models.FailRequest)
        image_id = _image_id(request)
        return _json(models.Failed(failed=await self._bounded(partial(self._node.fail, image_id, chosen))))

    async def hold_lease(self, request: Request) -> Response:
        _only(request)
        asked = await _body(request, models.LeaseRequest, needed=True)
        return _Streamed(partial(self._send_lease, _image_id(request), asked))

    async def _send_lease(
        self, image_id: str, asked: models.LeaseRequest, scope: Scope, receive: Receive, send: Send
    ) -> None:
        connection = connection_of(scope)
        with stream_slot(self._counts, self._limits.streams):
            lease = self._node.add_lease(image_id, asked, pid=0 if connection is None else connection.peer.pid)

            async def produce(write: Write) -> None:
                await write(_line(models.LeaseLine(lease=lease)))
                while True:
                    with trio.move_on_after(self._limits.heartbeat_s):
                        while (ended := self._why_ended(image_id, lease.id)) is None:
                            await self._node.events.changed()
                        break
                    # A holder needs not read: its connection alone is the lease, and must not end by what piles up.
                    if not is_unread(scope, self._limits.unread_bytes):
                        await write(_line(models.LeaseLine()))
                await write(_line(models.LeaseLine(ended=ended)))

            try:
                await send_stream(scope, receive, send, media_type=openapi.NDJSON, produce=produce)
            finally:
                self._node.end_lease(image_id, lease.id)

    def _why_ended(self, image_id: str, lease_id: str) -> str | None:
        try:
            image = self._node.image(image_id)
        except NotFound:
            return "the image is gone"
        if image.state in (ImageStateName.FAILED, ImageStateName.GONE):
            return f"the image is {image.state}"
        return None if any(lease.id == lease_id for lease in image.leases) else "the lease was ended"

    # The node

    async def get_cache(self, request: Request) -> Response:
        _only(request)
        return _json(await self._bounded(self._node.cache))

    async def list_records(self, request: Request) -> Response:
        _only(request, "limit")
        limit = _number(request, "limit", 100.0, low=1, high=1000)
        if limit != int(limit):
            raise RequestProblem("invalid", "limit must be a whole number")
        found = await self._bounded(partial(self._node.records, limit=int(limit)))
        return _json(models.RecordList(records=list(found)))

    async def get_health(self, request: Request) -> Response:
        _only(request)
        health = self._node.health()
        return _json(health, 200 if health.status is HealthStatus.OK else 503)

    async def follow_events(self, request: Request) -> Response:
        _only(request)
        return _Streamed(partial(self._send_events, request.headers.get("last-event-id")))

    async def _send_events(self, last_id: str | None, scope: Scope, receive: Receive, send: Send) -> None:
        follower = self._node.events.follow(last_id)

        async def produce(write: Write) -> None:
            # An id alone: whoever is cut off before the first event can come back to this place.
            await write(b"id: %s\n\n" % follower.last_id.encode())
            while True:
                events = None
                with trio.move_on_after(self._limits.heartbeat_s):
                    try:
                        events = await follower.next()
                    except FellBehind:
                        self._counts.dropped_readers += 1
                        return
                await write(b"".join(map(server_sent, events)) if events else b":\n\n")

        with stream_slot(self._counts, self._limits.streams):
            await send_stream(scope, receive, send, media_type=openapi.EVENT_STREAM, produce=produce)

    async def drain(self, request: Request) -> Response:
        _only(request)
        self._node.drain()
        return _json(models.DrainState(is_draining=self._node.is_draining))

    async def end_drain(self, request: Request) -> Response:
        _only(request)
        self._node.end_drain()
        return _json(models.DrainState(is_draining=self._node.is_draining))

    async def get_drain(self, request: Request) -> Response:
        _only(request)
        return _json(models.DrainState(is_draining=self._node.is_draining))

    async def get_metrics(self, _request: Request) -> Response:
        return Response(metrics.render(self._node, self._counts), headers={"content-type": metrics.MEDIA_TYPE})

    async def get_openapi(self, request: Request) -> Response:
        _only(request)
        return Response(self._document, media_type=openapi.JSON)

    async def _bounded(self, ask: Callable[[], Awaitable[_T]]) -> _T:
        """Ask what may take a while. Raises: `NoAnswerYet`, and what it raises."""
        wait_s = self._limits.answer_wait_s
        with trio.move_on_after(wait_s):
            return await ask()
        raise NoAnswerYet(f"no answer within {wait_s:g} s")


class _Streamed(Response):
    """An answer that sends itself."""

    def __init__(self, send_itself: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        super().__init__()
        self._send_itself = send_itself

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._send_itself(scope, receive, send)


def _line(line: models.LeaseLine) -> bytes:
    return msgspec.json.encode(line) + b"\n"


async def _end_when_gone(receive: Receive, waiting: trio.CancelScope) -> None:
    await until_gone(receive)
    waiting.cancel()


# Reading a request


async def _body(request: Request, struct: type[_S], *, needed: bool = False) -> _S:
    """Read a request's body; without one, what the struct is by default. Raises: `RequestProblem`."""
    body = await request.body()
    if not body and not needed:
        return struct()
    if not body:
        raise RequestProblem("bad-request", "the request needs a JSON object as its body")
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != openapi.JSON:
        raise RequestProblem("wrong-media-type", f"a body must be {openapi.JSON}")
    try:
        return msgspec.json.decode(body, type=struct)
    except msgspec.ValidationError as error:
        raise RequestProblem("invalid", str(error)) from None  # its message names places, not values
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestProblem("bad-request", "the body is not JSON") from error


def _image_id(request: Request) -> str:
    image_id: str = request.path_params["id"]
    if not _IMAGE_ID.fullmatch(image_id):
        raise NotFound("no image has such an id")
    return image_id


def _only(request: Request, *allowed: str) -> None:
    """Refuse query parameters that aren't allowed, or come twice."""
    names = [name for name, _ in request.query_params.multi_items()]
    for name in names:
        if name not in allowed or names.count(name) > 1:
            raise RequestProblem("invalid", f"query parameter {name[:40]!r} is unknown here, or given twice")


def _number(request: Request, name: str, default: float, *, low: float = 0.0, high: float) -> float:
    text = request.query_params.get(name)
    if text is None:
        return default
    try:
        value = float(text) if "_" not in text else math.nan
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        raise RequestProblem("invalid", f"{name} must be a number from {low:g} to {high:g}")
    return value
