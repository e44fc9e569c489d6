"""Asks the agent one question, within a deadline.

By `_socket`, the C half of `socket`, whose other half takes 13 of the 50 ms that a decision would take: each pod would
wait for it twice.
"""

import struct
import time
from _socket import AF_UNIX, SO_RCVTIMEO, SO_SNDTIMEO, SOCK_STREAM, SOL_SOCKET, socket

from agent.errors import AgentError
from agent.wrapper.protocol import LINE_MAX_BYTES, Answer, Request, decode_answer, encode_request


class NoAnswer(AgentError):
    """The agent isn't there, is silent, or breaks off."""


def ask(agent_socket: str, request: Request, *, deadline_s: float) -> Answer:
    """Ask, and give the answer. Raises: `NoAnswer`, `BadMessage`."""
    line = encode_request(request)
    until_s = time.monotonic() + deadline_s
    received = b""
    connection = socket(AF_UNIX, SOCK_STREAM)
    try:
        _limit(connection, until_s)
        connection.connect(agent_socket)
        connection.sendall(line)
        while b"\n" not in received:
            _limit(connection, until_s)
            part = connection.recv(LINE_MAX_BYTES)
            received += part
            if not part or len(received) > LINE_MAX_BYTES:
                raise NoAnswer("the agent broke off its answer" if not part else "the agent's answer has no end")
    except BlockingIOError as error:
        raise NoAnswer(f"the agent at {agent_socket} gave no answer within {deadline_s:g} s") from error
    except OSError as error:
        raise NoAnswer(f"no agent at {agent_socket}: {error.strerror or error}") from error
    finally:
        connection.close()
    return decode_answer(received)


def _limit(connection: socket, until_s: float) -> None:
    """Let the next call end in time, with EAGAIN.

    By the kernel's time-outs: with Python's own a connect to a queue that is full, as when many pods start at once,
    would fail at once instead of waiting (unix(7)).
    """
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise BlockingIOError
    limit = struct.pack("ll", int(left_s), max(1, int(left_s % 1 * 1e6)))
    connection.setsockopt(SOL_SOCKET, SO_SNDTIMEO, limit)
    connection.setsockopt(SOL_SOCKET, SO_RCVTIMEO, limit)
