"""Messages between the supervisor and its processes: a JSON object each, and descriptors with it.

Over SOCK_SEQPACKET, which keeps boundaries: a message is there whole or not at all, whoever dies while it is sent.
What a process receives with `receive` is its own to close. A message that is no JSON object, or too long, ends the
conversation as if the other side had gone: only processes of ours are at the other end.
"""

import array
import json
import os
import select
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import trio

# The kernel's default for what a socket holds is 208 KiB, and a message must fit into that.
MESSAGE_MAX_BYTES = 128 << 10
FDS_MAX = 8
_FD_BYTES = array.array("i").itemsize


def wire_pair() -> tuple[socket.socket, socket.socket]:
    """Make two ends."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class Wire:
    """One end of a conversation; state of the Trio thread."""

    def __init__(self, end: socket.socket) -> None:
        """Take over a connected socket."""
        end.setblocking(False)
        self._socket = end

    def fileno(self) -> int:
        """Give the descriptor of this end."""
        return self._socket.fileno()

    def close(self) -> None:
        """End the conversation, as far as nobody else holds this end (an fd store may)."""
        self._socket.close()

    def send_nowait(self, message: Mapping[str, object], fds: Sequence[int] = ()) -> bool:
        """Send, unless the other side doesn't read what it gets; false then, and when it has gone."""
        data = json.dumps(message).encode()
        if len(data) > MESSAGE_MAX_BYTES:
            raise ValueError(f"a message of {len(data)} bytes (at most {MESSAGE_MAX_BYTES})")
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self._socket.sendmsg([data], ancillary)
        except OSError:  # EAGAIN: full; EPIPE, ECONNRESET: gone
            return False
        return True

    def receive_first(self) -> tuple[dict[str, Any], list[int]] | None:
        """Wait for a message before there is a loop, as long as it takes."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.poll()
        return self._receive()

    async def receive(self) -> tuple[dict[str, Any], list[int]] | None:
        """Wait for a message; None when the other side has gone."""
        while True:
            try:
                return self._receive()
            except BlockingIOError:
                await trio.lowlevel.wait_readable(self._socket)

    def _receive(self) -> tuple[dict[str, Any], list[int]] | None:
        room = socket.CMSG_SPACE(FDS_MAX * _FD_BYTES)
        try:
            data, ancillary, flags, _ = self._socket.recvmsg(MESSAGE_MAX_BYTES, room, socket.MSG_CMSG_CLOEXEC)
        except ConnectionError:
            return None
        fds: list[int] = []
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds += array.array("i", content[: len(content) - len(content) % _FD_BYTES])
        try:
            message = json.loads(data) if data and not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) else None
        except ValueError:
            message = None
        if isinstance(message, dict):
            return message, fds
        for fd in fds:
            os.close(fd)
        return None
