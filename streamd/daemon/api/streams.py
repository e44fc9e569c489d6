"""Answers without an end: they go on until the client goes, or until what they tell of is over."""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import trio
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from streamd.daemon.api.connection import connection_of
from streamd.daemon.api.metrics import ApiCounts
from streamd.daemon.api.problems import RequestProblem

Write = Callable[[bytes], Awaitable[None]]
HEADERS = {"cache-control": "no-store", "connection": "close"}


async def until_gone(receive: Receive) -> None:
    """Wait until the client has gone. Only once the request's body was received."""
    while (await receive())["type"] != "http.disconnect":
        pass


@contextmanager
def stream_slot(counts: ApiCounts, most: int) -> Iterator[None]:
    """Take one of the streams that may be open at once. Raises: `RequestProblem` when there is none left."""
    if counts.streams >= most:
        raise RequestProblem("busy", f"{most} leases and followers of events are the most at once; try again later")
    counts.streams += 1
    try:
        yield
    finally:
        counts.streams -= 1


async def send_stream(
    scope: Scope, receive: Receive, send: Send, *, media_type: str, produce: Callable[[Write], Awaitable[None]]
) -> None:
    """Send what `produce` writes, until it returns or the client goes; then it is cancelled."""
    head = Response(headers=HEADERS, media_type=media_type)
    del head.headers["content-length"]
    await send({"type": "http.response.start", "status": head.status_code, "headers": head.raw_headers})
    is_over = scope["method"] == "HEAD"
    connection = connection_of(scope)

    async def write(data: bytes) -> None:
        await send({"type": "http.response.body", "body": data, "more_body": True})

    async def watch(serving: trio.CancelScope) -> None:
        await until_gone(receive)
        serving.cancel()

    if not is_over:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch, nursery.cancel_scope)
            if connection is not None:
                nursery.start_soon(connection.cut_when_heard)
            await produce(write)
            is_over = True
            nursery.cancel_scope.cancel()
    if is_over:
        # Outside of what the client's going cancels: the server must not be stopped in the middle of this.
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def is_unread(scope: Scope, most_bytes: int) -> bool:
    """Say whether the client leaves what it was sent unread."""
    connection = connection_of(scope)
    return connection is not None and connection.unread_bytes() > most_bytes
