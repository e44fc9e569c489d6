"""One client's connection: what hypercorn reads from and writes to, with bounds that it hasn't.

It stands where hypercorn expects Trio's stream. A client that doesn't take its bytes is cut off; `cut` also ends what
hypercorn shields from cancellation, by taking the socket away. What is said over it, the code of the API learns by
the ASGI scope's state (`connection_of`).
"""

import fcntl
import os
import socket
import struct
import termios
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from typing import Any

import trio

from streamd.daemon.api.metrics import ApiCounts
from streamd.daemon.sockets import PEER_BYTES, Peer, peer_of

_KEY = "connection"
_INT = struct.Struct("i")


class Connection:
    """A client and its stream. `scope` is what serves it."""

    def __init__(self, stream: trio.SocketStream, counts: ApiCounts, *, write_wait_s: float) -> None:
        self._stream = stream
        self._counts = counts
        self._write_wait_s = write_wait_s
        credentials = stream.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER_BYTES)
        assert isinstance(credentials, bytes)
        self.peer: Peer = peer_of(credentials)
        self.scope = trio.CancelScope()
        self._running = 0
        self._idle_since_s = trio.current_time()

    def state(self) -> dict[str, object]:
        """Give the state that hypercorn puts into the scope of every request of this connection."""
        return {_KEY: self}

    def cut(self) -> None:
        """End the connection now. What was sent before, the client can still read."""
        with suppress(OSError):  # it went away
            self._stream.socket.shutdown(socket.SHUT_RDWR)
        self.scope.cancel()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Serve a request meanwhile."""
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            self._idle_since_s = trio.current_time()

    async def cut_when_idle(self, idle_s: float) -> None:
        """End the connection once no request has run for so long, whatever its protocol makes of it.

        Hypercorn does the same for HTTP/1, but not for a client that only says that it speaks HTTP/2.
        """
        while (left_s := idle_s if self._running else self._idle_since_s + idle_s - trio.current_time()) > 0:
            await trio.sleep(left_s)
        self.cut()

    async def cut_when_heard(self) -> None:
        """End the connection as soon as the client goes, or says anything: while it is answered without end.

        Hypercorn reads no further once the next request has begun to come, and so would not notice the first one's end.
        """
        if self._stream.socket.fileno() < 0:
            return  # closed already
        fd = os.dup(self._stream.socket.fileno())  # two tasks can't wait for the same descriptor
        try:
            await trio.lowlevel.wait_readable(fd)
        finally:
            os.close(fd)
        self.cut()

    def unread_bytes(self) -> int:
        """Say how much the client has not read yet (SIOCOUTQ, unix(7): with the kernel's own cost of each piece)."""
        fd = self._stream.socket.fileno()
        if fd < 0:  # closed, and what serves it is about to be cancelled
            return 0
        return int(_INT.unpack(fcntl.ioctl(fd, termios.TIOCOUTQ, _INT.pack(0)))[0])

    # What hypercorn calls

    @property
    def socket(self) -> trio.socket.SocketType:
        """The socket."""
        return self._stream.socket

    async def receive_some(self, max_bytes: int) -> bytes:
        """Receive; nothing at the end, and then all that serves the client ends.

        Left to itself hypercorn holds the connection on until it has been idle for long enough.
        """
        data = bytes(await self._stream.receive_some(max_bytes))
        if not data:
            self.scope.cancel()
        return data

    async def send_all(self, data: bytes) -> None:
        """Send; hypercorn shields this from cancellation, so it has its own end."""
        with trio.move_on_after(self._write_wait_s) as waiting:
            await self._stream.send_all(data)
        if waiting.cancelled_caught:
            self._counts.dropped_readers += 1
            self.cut()
            raise trio.BrokenResourceError("the client takes nothing")

    async def send_eof(self) -> None:
        """Say that nothing more comes."""
        await self._stream.send_eof()

    async def aclose(self) -> None:
        """Close, for good."""
        await self._stream.aclose()
        self.scope.cancel()


def connection_of(scope: MutableMapping[str, Any]) -> Connection | None:
    """Give the connection of a request; None when the application is called without a server."""
    connection = scope.get("state", {}).get(_KEY)
    assert connection is None or isinstance(connection, Connection)
    return connection
