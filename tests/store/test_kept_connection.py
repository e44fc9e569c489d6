"""Large reads of a kept connection: a body of several pieces, then answers of a few bytes."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from streamd.store.gcs import PIECE_BYTES
from streamd.store.google_http import GoogleHttp

_LARGE = bytes(range(256)) * (PIECE_BYTES * 5 // 2 // 256)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    connections: ClassVar[set[object]] = set()

    def do_GET(self) -> None:
        self.connections.add(self.client_address)
        body = _LARGE if self.path == "/large" else b"small"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        pass


@pytest.fixture
def address() -> Iterator[str]:
    """Serve on the loopback."""
    _Handler.connections = set()
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def _exchange(address: str, answers: list[bytes]) -> None:
    http = GoogleHttp(address, token=lambda: "", connect_s=5, silence_s=60)
    try:
        for _ in range(2):
            with http.asked("GET", "/large") as answer:
                body = bytearray(len(_LARGE))
                for start in range(0, len(body), PIECE_BYTES):
                    answer.readinto(memoryview(body)[start : start + PIECE_BYTES])
            answers.append(bytes(body))
            with http.asked("GET", "/small") as answer:
                answers.append(answer.read())
    finally:
        http.close()


def test_a_kept_connection_gives_small_answers_after_large_ones(address: str) -> None:
    """At once: who waited for as much as before would wait for silence, a minute each time."""
    answers: list[bytes] = []
    exchange = threading.Thread(target=_exchange, args=(address, answers), daemon=True)
    exchange.start()
    exchange.join(20)
    assert answers == [_LARGE, b"small"] * 2
    assert len(_Handler.connections) == 1
