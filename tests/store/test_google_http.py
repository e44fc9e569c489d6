"""Connections that are kept, and that turn out to be closed; proxies. Against a server of plain sockets."""

import base64
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from streamd.errors import StoreError, StoreErrorKind
from streamd.store.gcs import GoogleStore, Timeouts
from streamd.store.google_http import GoogleHttp

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Server:
    """Accepts connections; `serve(number, connection)` has each, in a thread of its own, and then it is closed."""

    def __init__(self, serve: Callable[[int, socket.socket], None]) -> None:
        self._serve = serve
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"
        self.requests: list[bytes] = []
        self.connections = 0
        self._threads: list[threading.Thread] = []
        self._accepting = threading.Thread(target=self._accept)
        self._accepting.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._threads.append(threading.Thread(target=self._have, args=(self.connections, connection)))
            self.connections += 1
            self._threads[-1].start()

    def _have(self, number: int, connection: socket.socket) -> None:
        with connection, contextlib.suppress(ConnectionError):
            connection.settimeout(20)
            self._serve(number, connection)

    def request(self, connection: socket.socket) -> bytes:
        """Take one request without a body; empty when the client has gone."""
        head = b""
        while b"\r\n\r\n" not in head:
            received = connection.recv(4096)
            if not received:
                return b""
            head += received
        self.requests.append(head)
        return head

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._accepting.join()
        for thread in self._threads:
            thread.join()


@contextlib.contextmanager
def serving(serve: Callable[[int, socket.socket], None]) -> Iterator[Server]:
    with contextlib.closing(Server(serve)) as server:
        yield server


@contextlib.contextmanager
def client(endpoint: str) -> Iterator[GoogleHttp]:
    with contextlib.closing(GoogleHttp(endpoint, token=lambda: "", connect_s=5, silence_s=5)) as http:
        yield http


def get(http: GoogleHttp, method: str = "GET") -> bytes:
    with http.asked(method, "/x") as answer:
        return answer.read()


def test_a_connection_is_kept_after_an_answer_that_was_read_to_its_end() -> None:
    def serve(_: int, connection: socket.socket) -> None:
        while server.request(connection):
            connection.sendall(ANSWER)

    with serving(serve) as server, client(server.address) as http:
        assert [get(http) for _ in range(3)] == [b"ok"] * 3
        assert server.connections == 1
        with http.asked("GET", "/x") as answer:
            assert answer.read(1) == b"o"  # and no more
        get(http)
        assert server.connections == 2


def test_a_connection_that_was_closed_while_it_was_idle_is_not_used() -> None:
    closed = threading.Event()

    def serve(number: int, connection: socket.socket) -> None:
        server.request(connection)
        connection.sendall(ANSWER)
        if number == 0:
            connection.shutdown(socket.SHUT_RDWR)
            closed.set()

    with serving(serve) as server, client(server.address) as http:
        assert get(http) == b"ok"
        assert closed.wait(10)
        assert get(http, "POST") == b"ok"
        assert (server.connections, len(server.requests)) == (2, 2)


def test_a_kept_connection_that_ends_without_an_answer_costs_a_reading_request_nothing() -> None:
    def serve(number: int, connection: socket.socket) -> None:
        server.request(connection)
        connection.sendall(ANSWER)
        if number == 0:
            server.request(connection)  # and goes without a word

    with serving(serve) as server, client(server.address) as http:
        assert [get(http), get(http)] == [b"ok", b"ok"]
        assert (server.connections, len(server.requests)) == (2, 3)


def test_a_request_that_writes_is_not_sent_twice() -> None:
    def serve(number: int, connection: socket.socket) -> None:
        server.request(connection)
        connection.sendall(ANSWER)
        if number == 0:
            server.request(connection)

    with serving(serve) as server, client(server.address) as http:
        assert get(http) == b"ok"
        with pytest.raises(ConnectionError):
            get(http, "DELETE")
        assert (server.connections, len(server.requests)) == (1, 2)


def test_a_refusal_is_ours_and_its_connection_goes_on() -> None:
    def serve(_: int, connection: socket.socket) -> None:
        while server.request(connection):
            connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\nnope")

    with serving(serve) as server, client(server.address) as http:
        for _ in range(2):
            with pytest.raises(StoreError) as caught:
                get(http)
            assert caught.value.store_kind is StoreErrorKind.GONE
        assert server.connections == 1


def test_the_proxy_of_the_environment_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def serve(_: int, connection: socket.socket) -> None:
        server.request(connection)
        connection.sendall(ANSWER)

    with serving(serve) as server:
        monkeypatch.setenv("http_proxy", f"http://who:s%40y@127.0.0.1:{server.port}")
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        with client("http://store.example") as http:
            assert get(http) == b"ok"
        [request] = server.requests
        assert request.startswith(b"GET http://store.example/x HTTP/1.1\r\nHost: store.example\r\n")
        assert b"Proxy-Authorization: Basic " + base64.b64encode(b"who:s@y") in request
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        with client(server.address) as http:
            get(http)
        assert server.requests[1].startswith(b"GET /x ")


def test_a_secure_store_is_reached_through_a_tunnel_and_a_proxy_that_refuses_is_transient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def serve(_: int, connection: socket.socket) -> None:
        server.request(connection)
        connection.sendall(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n")

    with serving(serve) as server:
        monkeypatch.setenv("https_proxy", f"127.0.0.1:{server.port}")
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        timeouts = Timeouts(connect_s=5, silence_s=5)
        store = GoogleStore("bucket", emulator_host="https://store.example", timeouts=timeouts)
        with contextlib.closing(store), pytest.raises(StoreError) as caught:
            store.head("k")
        assert caught.value.store_kind is StoreErrorKind.TRANSIENT
        assert server.requests[0].startswith(b"CONNECT store.example:443 HTTP/1.")
