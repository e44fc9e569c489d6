"""An HTTP proxy that misbehaves on demand, between a client of the store and the emulator; loopback only.

    with Emulator() as emulator, FaultProxy(emulator.port) as proxy:
        os.environ["STORAGE_EMULATOR_HOST"] = proxy.address
        proxy.add(Rule(Status(503), times=5))              # the next five object reads
        hang = proxy.add(Rule(Hang(at_byte=4096)));  …;  proxy.remove(hang)      # whoever hangs by it goes on
        proxy.refuse();  …;  proxy.accept()                # connections are refused; then, on the same port, taken
        proxy.reads, proxy.read_bytes                      # what was asked for and what was sent

Where `bench/faults.py` fails the calls of a store in this process, this fails them on the wire, so that real clients,
their time-outs and their connection pools are part of what is tried. Rules may change at any time, from any thread. A
request obeys the first rule that matches it and still has `times` left.
"""

import contextlib
import fnmatch
import http.client
import http.server
import socket
import threading
import urllib.parse
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypeAlias

from streamd.store.shaped import Link

# Of the emulator, which keeps its objects in memory.
_UPSTREAM_LIMIT_S = 30.0
# A forgotten hang ends a test run with an error, not never.
_HANG_LIMIT_S = 300.0
_PIECE_BYTES = 64 << 10
# Headers of one connection, not of the message (RFC 9110, 7.6.1), and those that the proxy writes itself.
_OWN_HEADERS = {"connection", "keep-alive", "transfer-encoding", "content-length", "date", "server"}


@dataclass(frozen=True, slots=True)
class Status:
    """Answer with that status and text, without asking the store."""

    code: int
    text: str = "injected"


@dataclass(frozen=True, slots=True)
class Cut:
    """Send the body's first `at_byte` bytes, then close the connection. A negative count is from the body's end."""

    at_byte: int


@dataclass(frozen=True, slots=True)
class Extra:
    """Send `count` bytes more than were asked for; Content-Length counts them in."""

    count: int = 1


@dataclass(frozen=True, slots=True)
class Flip:
    """Flip one bit of that byte of the body, or of the last one when it is shorter."""

    at_byte: int = 0


@dataclass(frozen=True, slots=True)
class Delay:
    """Wait at that byte of the body; at byte 0, before the headers."""

    seconds: float
    at_byte: int = 0


@dataclass(frozen=True, slots=True)
class Hang:
    """Wait at that byte of the body (at byte 0, before the headers) until the rule is removed; then go on."""

    at_byte: int = 0


Action: TypeAlias = Status | Cut | Extra | Flip | Delay | Hang


@dataclass(slots=True, eq=False)
class Rule:
    """`action` for requests whose object name (the path, unquoted) matches the shell pattern `name`; with a `token`,
    only for those that are signed with it.

    It starts with the `nth` such request (0 is the next one) and is used up after `times` (None: never). Only reads of
    objects are meant, unless `reads_only` is false: then every request is. `skipped` and `fired` count.
    """

    action: Action
    name: str = "*"
    nth: int = 0
    times: int | None = 1
    reads_only: bool = True
    token: str | None = None
    skipped: int = 0
    fired: int = 0
    removed: threading.Event = field(default_factory=threading.Event)


class FaultProxy:
    """A running proxy to 127.0.0.1:`upstream_port`; see the module's text. `link`: what all bodies pass, if set."""

    def __init__(self, upstream_port: int) -> None:
        self._upstream_port = upstream_port
        self.link: Link | None = None
        self._lock = threading.Lock()
        self._rules: list[Rule] = []
        self._connections: set[socket.socket] = set()
        self._listener: socket.socket | None = None
        self.port = 0
        self.requests = 0
        self.reads = 0  # requests for an object's bytes
        self.read_bytes = 0  # of their bodies, sent
        self.hanging = 0  # requests that wait by a rule right now
        self.refused_reads = 0  # answered with a status by a rule

    @property
    def address(self) -> str:
        """`http://127.0.0.1:PORT`, for STORAGE_EMULATOR_HOST."""
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self.accept()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.clear()
        self.refuse()

    def accept(self) -> None:
        """Take connections, on the port that was used before if there was one."""
        if self._listener is not None:
            return
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        listener.listen(256)
        self.port = listener.getsockname()[1]
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), daemon=True, name="fault-proxy").start()

    def refuse(self) -> None:
        """Close the listener and every connection: who connects is refused."""
        listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # close() alone would leave accept() waiting
            listener.close()
        with self._lock:
            connections = tuple(self._connections)
        for connection in connections:
            _hang_up(connection)

    def add(self, rule: Rule) -> Rule:
        """Add a rule, after those that are there, and give it back for `remove`."""
        with self._lock:
            self._rules.append(rule)
        return rule

    def remove(self, rule: Rule) -> None:
        """Take a rule away (it may be gone already) and let the requests that wait by it go on."""
        with self._lock:
            if rule in self._rules:
                self._rules.remove(rule)
        rule.removed.set()

    def clear(self) -> None:
        """Remove all rules."""
        with self._lock:
            rules = tuple(self._rules)
        for rule in rules:
            self.remove(rule)

    # One connection, one request.

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, address = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection, address), daemon=True).start()

    def _serve(self, connection: socket.socket, address: Any) -> None:
        with self._lock:
            self._connections.add(connection)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with contextlib.suppress(OSError):  # the client goes away; that is the point
                _Handler(connection, address, self)  # type: ignore[arg-type]  # a server only to its base class
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def note(self, method: str, path: str, authorization: str = "") -> tuple[bool, Rule | None]:
        """Count a request; say whether it is a read, and which rule it has to obey."""
        is_read = _is_read(method, path)
        name = urllib.parse.unquote(urllib.parse.urlsplit(path).path)
        with self._lock:
            self.requests += 1
            self.reads += is_read
            for rule in self._rules:
                if (rule.reads_only and not is_read) or not fnmatch.fnmatchcase(name, rule.name):
                    continue
                if rule.token is not None and authorization != f"Bearer {rule.token}":
                    continue
                if rule.skipped < rule.nth:
                    rule.skipped += 1
                elif rule.times is None or rule.fired < rule.times:
                    rule.fired += 1
                    self.refused_reads += is_read and isinstance(rule.action, Status)
                    return is_read, rule
        return is_read, None

    def sent(self, count: int) -> None:
        """Count bytes of a read's body."""
        with self._lock:
            self.read_bytes += count

    def wait(self, rule: Rule) -> None:
        """Do what `Delay` and `Hang` say."""
        limit_s = rule.action.seconds if isinstance(rule.action, Delay) else _HANG_LIMIT_S
        with self._lock:
            self.hanging += 1
        try:
            rule.removed.wait(limit_s)
        finally:
            with self._lock:
                self.hanging -= 1

    def ask_upstream(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, list[tuple[str, str]], bytes]:
        """Ask the emulator; it answers to its own name only, so it is called by that."""
        upstream = http.client.HTTPConnection("127.0.0.1", self._upstream_port, timeout=_UPSTREAM_LIMIT_S)
        try:
            upstream.request(method, path, body, headers | {"Host": f"127.0.0.1:{self._upstream_port}"})
            response = upstream.getresponse()
            return response.status, response.getheaders(), response.read()
        finally:
            upstream.close()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultProxy  # type: ignore[assignment]

    def log_message(self, *_: object) -> None:
        pass

    def _pass_on(self) -> None:
        proxy = self.server
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        is_read, rule = proxy.note(self.command, self.path, self.headers.get("Authorization", ""))
        action = rule.action if rule else None
        match action:
            case Status(code, text):
                self._answer(code, [("Content-Type", "text/plain")], text.encode(), announced=len(text.encode()))
                return
            case Delay(_, at_byte=0) | Hang(at_byte=0):
                assert rule
                proxy.wait(rule)
                rule = action = None
        headers = {name: value for name, value in self.headers.items() if name.lower() not in ("host", "connection")}
        try:
            status, answer_headers, content = proxy.ask_upstream(self.command, self.path, headers, body)
        except (OSError, http.client.HTTPException):  # the emulator ended
            self.close_connection = True
            return
        announced = len(content)
        match action:
            case Extra(count):
                content += bytes(count)
                announced += count
            case Flip(at) if content:
                flipped = bytearray(content)
                flipped[min(at, len(flipped) - 1)] ^= 1
                content = bytes(flipped)
        stop_at = action.at_byte if isinstance(action, Cut | Delay | Hang) else len(content)
        stop_at = max(0, stop_at + len(content) if stop_at < 0 else min(stop_at, len(content)))
        self._answer(status, answer_headers, content[:stop_at], announced=announced, is_read=is_read)
        if isinstance(action, Cut):
            self.close_connection = True
            _hang_up(self.connection)
        elif stop_at < len(content):
            assert rule
            proxy.wait(rule)
            self._send(content[stop_at:], is_read=is_read)

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = _pass_on  # noqa: N815

    def _answer(
        self, status: int, headers: list[tuple[str, str]], content: bytes, *, announced: int, is_read: bool = False
    ) -> None:
        self.send_response(status)
        for name, value in headers:
            if name.lower() not in _OWN_HEADERS:
                self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(announced))
        self.end_headers()
        if self.command != "HEAD":
            self._send(content, is_read=is_read)

    def _send(self, content: bytes, *, is_read: bool) -> None:
        for at in range(0, len(content), _PIECE_BYTES):
            piece = content[at : at + _PIECE_BYTES]
            if (link := self.server.link) is not None:
                link.pass_bytes(len(piece))
            self.wfile.write(piece)
            if is_read:
                self.server.sent(len(piece))


def _is_read(method: str, path: str) -> bool:
    """Tell requests for objects' bytes: the XML interface's, and the JSON interface's with `alt=media`."""
    return method == "GET" and (not path.startswith("/storage/v1/") or "alt=media" in path)


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
