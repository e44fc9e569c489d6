"""HTTP to Google Cloud Storage, by the standard library: connections that are kept, one request at a time on each.

`readinto` receives a body straight into the memory that will hold it, without the interpreter's lock. At the speed of a
usual link that costs half of what a client in Rust does that hands over what it received in pieces of its own, each of
which waits for that lock and is copied (`bench/range_reads.py`).

Nothing is retried, but for a request that reads on a kept connection which turns out to be closed: no answer of it has
begun. No redirect is followed. The proxies of the environment are honoured (`urllib.request.getproxies`).
"""

import base64
import contextlib
import http.client
import io
import select
import socket
import ssl
import struct
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from streamd.store.google_errors import refusal

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

# Kept open while idle: as many as a mount has requests under way. Google's servers keep them for some minutes.
_IDLE_MAX = 64
_REFUSAL_BYTES_MAX = 64 << 10
_AGENT = "streamd"
_TIMEVAL = struct.Struct("ll")


@dataclass(frozen=True, slots=True)
class _Proxy:
    """Where to connect instead, and what to tell it about us."""

    host: str
    port: int
    headers: Mapping[str, str]


class _Patient(io.RawIOBase):
    """A connected socket as a file, from which large reads come whole.

    At a usual link's speed a body comes in portions of some 30 KiB, and a wait for each would need the interpreter's
    lock twice. So this thread sleeps until all that it wants is there (SO_RCVLOWAT), or until the kernel runs short of
    memory for it; what is still missing then, the kernel puts together (MSG_WAITALL).
    """

    def __init__(self, raw: io.RawIOBase, connected: socket.socket) -> None:
        self._raw = raw  # counts as a user of the socket
        self._socket = connected
        seconds, microseconds = _TIMEVAL.unpack(
            connected.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.size)
        )
        self._silence_ms = seconds * 1000 + microseconds / 1000
        self._poll = select.poll()
        self._poll.register(connected, select.POLLIN)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer", /) -> int:
        size = memoryview(buffer).nbytes
        flags = 0
        if size > io.DEFAULT_BUFFER_SIZE:
            self._sleep_until(size)
            flags = socket.MSG_WAITALL
        try:
            return self._socket.recv_into(buffer, size, flags)
        except BlockingIOError as error:  # SO_RCVTIMEO
            raise TimeoutError("silence") from error

    def _sleep_until(self, size: int) -> None:
        """Wait for so many bytes, or the connection's end. Raises: TimeoutError."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)
        try:
            if not self._poll.poll(self._silence_ms):
                raise TimeoutError("silence")
        finally:  # whoever waits for the rest of this, or for the next answer, is to see every byte
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _PatientAnswer(http.client.HTTPResponse):
    """An answer that is read through a `_Patient`."""

    def __init__(self, sock: socket.socket, *args: Any, **named: Any) -> None:
        super().__init__(sock, *args, **named)
        # An open file reads from the connection from here on, and nothing was read yet.
        self.fp = io.BufferedReader(_Patient(self.fp.detach(), sock))


class GoogleHttp:
    """The connections to one endpoint, `http://HOST[:PORT]` or `https://…`. Any thread may use it.

    `token` gives what a request is signed with, "" for nothing. `silence_s` bounds the wait for the next bytes.
    """

    def __init__(self, endpoint: str, *, token: Callable[[], str], connect_s: float, silence_s: float) -> None:
        parts = urllib.parse.urlsplit(endpoint)
        self._endpoint = endpoint
        self._secure = parts.scheme == "https"
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if self._secure else 80)
        self._token = token
        self._connect_s = connect_s
        self._silence_s = silence_s
        self._lock = threading.Lock()  # over what follows
        self._idle: list[http.client.HTTPConnection] = []
        self._context: ssl.SSLContext | None = None
        self._proxy: _Proxy | None = None
        self._is_ready = False

    @contextlib.contextmanager
    def asked(
        self, method: str, target: str, *, body: bytes | None = None, headers: Mapping[str, str] = MappingProxyType({})
    ) -> Iterator[http.client.HTTPResponse]:
        """Ask for `target` (path and query) and give the answer, if it is one of success.

        The connection is kept when the answer was read to its end.
        Raises: `StoreError` (a refusal), OSError, http.client.HTTPException.
        """
        sent = {"User-Agent": _AGENT, **headers}
        token = self._token()
        if token:
            sent["Authorization"] = f"Bearer {token}"
        connection, answer = self._answer(method, target, body, sent)
        try:
            if not 200 <= answer.status < 300:
                raise refusal(answer.status, answer.read(_REFUSAL_BYTES_MAX).decode(errors="replace"))
            yield answer
        finally:
            if answer.isclosed() and connection.sock is not None:
                self._keep(connection)
            else:
                answer.close()
                connection.close()

    def close(self) -> None:
        """Close what is idle; what is in use is closed by its user."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _answer(
        self, method: str, target: str, body: bytes | None, headers: Mapping[str, str]
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        while True:
            kept = self._kept()
            connection = kept or self._connected()
            try:
                is_proxied = self._proxy is not None and not self._secure
                if is_proxied and self._proxy is not None:
                    headers = {**headers, **self._proxy.headers}
                connection.request(method, self._endpoint + target if is_proxied else target, body, dict(headers))
                return connection, connection.getresponse()
            except BaseException as error:
                connection.close()
                # Closed by the other side while it was idle: this request was not begun. All kept ones may be so.
                if kept is None or method != "GET" or not isinstance(error, ConnectionError):
                    raise
                self.close()

    def _kept(self) -> http.client.HTTPConnection | None:
        """Give a connection that was used before and seems to be open."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                connection = self._idle.pop()
            poll = select.poll()
            poll.register(connection.sock, select.POLLIN)
            if not poll.poll(0):
                return connection
            connection.close()  # an end, or bytes that nobody asked for

    def _keep(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            if len(self._idle) < _IDLE_MAX:
                self._idle.append(connection)
                return
        connection.close()

    def _connected(self) -> http.client.HTTPConnection:
        with self._lock:
            if not self._is_ready:
                self._proxy = _proxy_for("https" if self._secure else "http", self._host)
                self._context = ssl.create_default_context() if self._secure else None
                self._is_ready = True
        proxy = self._proxy
        host, port = (proxy.host, proxy.port) if proxy else (self._host, self._port)
        if self._context is not None:
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                host, port, timeout=self._connect_s, context=self._context
            )
            if proxy:
                connection.set_tunnel(self._host, self._port, dict(proxy.headers))
        else:
            connection = http.client.HTTPConnection(host, port, timeout=self._connect_s)
            connection.response_class = _PatientAnswer
        try:
            connection.connect()
            if self._context is not None:
                connection.sock.settimeout(self._silence_s)
            else:
                connection.sock.settimeout(None)
                limit = _TIMEVAL.pack(*divmod(int(self._silence_s * 1e6), 1_000_000))
                connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
                connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        except BaseException:
            connection.close()
            raise
        return connection


def _proxy_for(scheme: str, host: str) -> _Proxy | None:
    """Find the proxy of the environment for a host."""
    address = urllib.request.getproxies().get(scheme)
    if not address or urllib.request.proxy_bypass(host):
        return None
    parts = urllib.parse.urlsplit(address if "://" in address else f"http://{address}")
    headers = {}
    if parts.username is not None:
        known_as = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
        headers["Proxy-Authorization"] = f"Basic {base64.b64encode(known_as.encode()).decode()}"
    return _Proxy(parts.hostname or "", parts.port or 80, headers)
