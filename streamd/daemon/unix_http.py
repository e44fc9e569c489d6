"""HTTP over a Unix socket, by the standard library's client. Imported when something is asked: it takes 20 ms."""

import os
import socket
import struct
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path

__all__ = ["HTTPException", "HTTPResponse", "UnixConnection"]


class UnixConnection(HTTPConnection):
    """A connection to the socket at `path`. `wait_s` bounds connecting and every wait for a part of the answer."""

    def __init__(self, path: Path, wait_s: float) -> None:
        super().__init__("streamd", timeout=wait_s)
        self._path = path
        self._wait_s = wait_s

    def connect(self) -> None:
        """Connect. Raises: `OSError`; EAGAIN when the server takes no connection in time."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # With settimeout() a full queue would be an error at once; a blocking connect waits for a place in it.
            limit = struct.pack("ll", int(self._wait_s), int(self._wait_s % 1 * 1e6))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            connection.connect(os.fspath(self._path))
            connection.settimeout(self._wait_s)
        except BaseException:
            connection.close()
            raise
        self.sock = connection

    def ask(self, method: str, target: str, body: bytes | None, headers: dict[str, str]) -> HTTPResponse:
        """Send a request and give the beginning of its answer. Raises: `OSError`, `HTTPException`."""
        # A server that refuses this process, or so much, answers before it has read all, and hangs up.
        with suppress(BrokenPipeError):
            self.request(method, target, body, headers)
        return self.getresponse()
