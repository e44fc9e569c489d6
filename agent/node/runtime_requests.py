"""The agent's end of the OCI wrapper's questions (`agent.wrapper.protocol`): a Unix socket, and who answers.

One connection is one question. What can't be read is answered with `Failed`, at which the wrapper does as runsc would;
so is what an answer met, and nothing that a client sends or does ends the server. Questions, their size and the waits
for them are bounded; those above the bound wait their turn in the order in which Trio wakes them.

A wrapper that gives up (its deadline has passed, or containerd has killed it) closes its connection; then the answer is
cancelled, since the container starts plainly or not at all. An answer that was sent may still not have arrived: that a
restore was really tried is known from its `Report` only.
"""

import os
import socket
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Protocol

import structlog
import trio

from agent.errors import AgentError
from agent.wrapper.protocol import (
    LINE_MAX_BYTES,
    Answer,
    Create,
    Failed,
    Finished,
    Join,
    Noted,
    Plain,
    Refused,
    Report,
    Request,
    Restore,
    Start,
    decode_request,
    encode_answer,
)
from streamd.daemon.sockets import PEER_BYTES, BoundSocket, Peer, peer_of

# A node starts some tens of pods at once at most; each question takes some milliseconds, or waits for a mount.
CONNECTIONS_MAX = 256
# Those that find all of them taken wait here, and not in a loop of their own (net.core.somaxconn is 4096).
_BACKLOG = 1024
# A wrapper sends its line at once, and reads the answer at once.
_LINE_WAIT_S = 10.0

log = structlog.get_logger(__name__)


class Decisions(Protocol):
    """Who decides; may raise any `AgentError`, which the wrapper logs before it goes on as runsc would.

    A method may be cancelled at any checkpoint: the wrapper doesn't wait any more.
    """

    async def create(self, request: Create) -> Plain | Finished | Refused:
        """Say how a container is to be created."""
        ...

    async def start(self, request: Start) -> Plain | Restore | Join:
        """Say how a created container is to be started."""
        ...

    async def report(self, report: Report) -> None:
        """Note how a restore has ended; for a pod of several containers, each one's."""
        ...

    def given_up(self, request: Request) -> None:
        """Note that the wrapper didn't wait, and that the method was cancelled. Raises nothing."""
        ...


class RuntimeRequests:
    """The socket, bound while this is entered: no other process can answer the wrappers of this node."""

    def __init__(self, path: Path) -> None:
        self.path = path
        refusal = f"{path} is in use: another agent answers there"
        self._bound = BoundSocket(path, backlog=_BACKLOG, refusal=refusal)

    def __enter__(self) -> "RuntimeRequests":
        """Bind. Raises: `streamd.errors.Refused` when another process answers there, `StreamdError`."""
        self._listener = self._bound.__enter__()
        return self

    def __exit__(self, *details: object) -> None:
        self._bound.__exit__(*details)

    async def serve(self, decisions: Decisions, *, connections_max: int = CONNECTIONS_MAX) -> None:
        """Answer until cancelled."""
        limit = trio.CapacityLimiter(connections_max)
        # A duplicate, because Trio closes what it serves, and the claim lasts longer than the serving.
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(self._listener.dup()))
        await trio.serve_listeners(partial(_serve, decisions, limit), [listener])


async def _serve(decisions: Decisions, limit: trio.CapacityLimiter, stream: trio.SocketStream) -> None:
    async with stream:
        peer = _peer(stream)
        if peer.uid not in (0, os.geteuid()):
            log.warning("runtime request refused", uid=peer.uid)
            return
        try:
            async with limit:
                await _answer_one(decisions, stream)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            log.warning("runtime request without a reader of its answer", pid=peer.pid)


async def _answer_one(decisions: Decisions, stream: trio.SocketStream) -> None:
    line = await _line(stream)
    if line is None:
        return
    answer: Answer | None
    try:
        request = decode_request(line)
    except AgentError as error:
        log.warning("runtime request failed", reason=str(error))
        answer = Failed(str(error))
    else:
        answer = await _decided_in_time(decisions, request, stream)
    if answer is not None:
        with trio.move_on_after(_LINE_WAIT_S):
            await stream.send_all(encode_answer(answer))


async def _decided_in_time(decisions: Decisions, request: Request, stream: trio.SocketStream) -> Answer | None:
    """Give the answer, or None when nobody waits for it any more."""
    answers: list[Answer] = []

    async def until_given_up() -> None:
        with suppress(trio.BrokenResourceError):
            await stream.receive_some(1)  # nothing more is to come, so this is its end
        waiting.cancel_scope.cancel()

    async with trio.open_nursery() as waiting:
        waiting.start_soon(until_given_up)
        answers.append(await _decided(decisions, request))
        waiting.cancel_scope.cancel()
    if answers:
        return answers[0]
    decisions.given_up(request)
    return None


async def _line(stream: trio.SocketStream) -> bytes | None:
    """Receive a line; None when none comes."""
    received = b""
    with trio.move_on_after(_LINE_WAIT_S):
        while not received.endswith(b"\n") and len(received) <= LINE_MAX_BYTES:
            part = await stream.receive_some(LINE_MAX_BYTES)
            if not part:
                return None
            received += part
        return received
    return None


async def _decided(decisions: Decisions, request: Request) -> Answer:
    try:
        answer = await _dispatch(decisions, request)
        encode_answer(answer)  # one that is too long is the decider's error
    except AgentError as error:
        log.warning("runtime request failed", container=request.container.container_id, reason=str(error))
        return Failed(str(error))
    except Exception:
        # The door stays open: pods go on starting.
        log.exception("runtime request failed")
        return Failed("internal error; the agent's log has the details")
    return answer


async def _dispatch(decisions: Decisions, request: Request) -> Answer:
    match request:
        case Create():
            return await decisions.create(request)
        case Start():
            return await decisions.start(request)
        case Report():
            await decisions.report(request)
            return Noted()


def _peer(stream: trio.SocketStream) -> Peer:
    credentials = stream.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER_BYTES)
    assert isinstance(credentials, bytes)
    return peer_of(credentials)
