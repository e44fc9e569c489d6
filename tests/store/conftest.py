"""Stores under test: directories, the emulator (one process for the run), and a server that answers as it is told."""

import contextlib
import http.server
import itertools
import socketserver
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from bench.emulator import Emulator
from streamd.store.port import Store
from streamd.store.retry import retrying


@pytest.fixture(scope="session")
def emulator() -> Iterator[Emulator]:
    with Emulator() as running:
        yield running


_numbers = itertools.count()


def _directory(request: pytest.FixtureRequest) -> Store:
    from streamd.store.directory import DirectoryStore

    root: Path = request.getfixturevalue("tmp_path")
    return DirectoryStore(str(root / f"store-{next(_numbers)}"))


def _shaped(request: pytest.FixtureRequest) -> Store:
    from streamd.store.shaped import ShapedStore

    return ShapedStore(_directory(request), latency_s=1e-4, bytes_per_s=1e9)


def _google(request: pytest.FixtureRequest) -> Store:
    from streamd.store.gcs import GoogleStore

    emulator: Emulator = request.getfixturevalue("emulator")
    return GoogleStore(emulator.bucket, f"test/{next(_numbers)}", emulator_host=emulator.address)


_KINDS: dict[str, Callable[[pytest.FixtureRequest], Store]] = {
    "directory": _directory,
    "shaped": _shaped,
    "google": _google,
    "retrying directory": lambda request: retrying(_directory(request), deadline_s=30),
    "retrying google": lambda request: retrying(_google(request), deadline_s=30),
}


@pytest.fixture(params=list(_KINDS))
def new_store(request: pytest.FixtureRequest) -> Iterator[Callable[[], Store]]:
    """Make an empty store of each kind; they are closed after the test."""
    with contextlib.ExitStack() as stack:

        def make() -> Store:
            return stack.enter_context(contextlib.closing(_KINDS[request.param](request)))

        yield make


@pytest.fixture
def store(new_store: Callable[[], Store]) -> Store:
    """An empty store of each kind."""
    return new_store()


@pytest.fixture
def google_store(request: pytest.FixtureRequest) -> Iterator[Store]:
    """An empty prefix of the emulator's bucket."""
    with contextlib.closing(_google(request)) as store:
        yield store


@dataclass(slots=True)
class Answer:
    """What `Puppet` answers one request with.

    `status` None is a 200 or 206 with the part of `body` that the request's Range names. Then `sent` bytes of it are
    sent (None: all; more than there are: zeros beyond), although Content-Length says how many there should be
    (`announced` overrides that). `hang` leaves the rest of the answer out until the test is over; `drop` closes the
    connection without a word.
    """

    status: int | None = None
    body: bytes = b""
    sent: int | None = None
    announced: int | None = None
    hang: bool = False
    drop: bool = False
    headers: dict[str, str] = field(default_factory=dict)


class Puppet:
    """An HTTP server that answers as `script` says: what a request gets, given its method, path and number.

    `requests` are the methods, paths and headers of what came, `on_body` is given each body that came.
    """

    answer = Answer  # for test modules, which can't import it

    def __init__(self) -> None:
        self.on_body: Callable[[bytes], object] = lambda body: None
        self.script: Callable[[str, str, int], Answer] = lambda method, path, number: Answer(status=500)
        self._lock = threading.Lock()
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.over = threading.Event()
        puppet = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def _answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
                with puppet._lock:
                    number = len(puppet.requests)
                    puppet.requests.append((self.command, self.path, dict(self.headers)))
                puppet.on_body(body)
                puppet._send(self, puppet.script(self.command, self.path, number))

            do_GET = do_POST = do_PUT = do_DELETE = _answer  # noqa: N815

        class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
            daemon_threads = True
            block_on_close = False
            request_queue_size = 128

            def handle_error(self, *_: object) -> None:
                pass  # clients go away; that is the point

        self._server = Server(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        self.address = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def _send(self, handler: http.server.BaseHTTPRequestHandler, answer: Answer) -> None:
        handler.close_connection = True
        if answer.drop:
            return
        body, status, headers = answer.body, answer.status, dict(answer.headers)
        if status is None:
            status = 200
            if "Range" in handler.headers:
                first, last = handler.headers["Range"].removeprefix("bytes=").split("-")
                headers["Content-Range"] = f"bytes {first}-{last}/{len(body)}"
                body = body[int(first) : int(last) + 1]
                status = 206
            headers.setdefault("Last-Modified", "Mon, 02 Mar 2026 10:00:00 GMT")
            headers.setdefault("ETag", '"tag"')
            headers.setdefault("x-goog-generation", "7")
        announced = len(body) if answer.announced is None else answer.announced
        if answer.hang and answer.sent is None:
            self.over.wait()
            return
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(announced))
        handler.send_header("Connection", "close")
        handler.end_headers()
        handler.wfile.write(body if answer.sent is None else (body + bytes(answer.sent))[: answer.sent])
        handler.wfile.flush()
        if answer.hang:
            self.over.wait()

    def close(self) -> None:
        self.over.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def puppet() -> Iterator[Puppet]:
    with contextlib.closing(Puppet()) as running:
        yield running
