"""The listening side: who may come in, how many, how slowly, and that none of them disturbs the others.

These also hold what is relied on of hypercorn's `TCPServer`, which is no public interface: that it takes a stream of
ours, passes a connection's state on to the application, and ends with its connection.
"""

import os
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import msgspec
import pytest
import structlog.testing

from streamd.daemon.api.limits import Limits
from streamd.daemon.api.server import Allowed
from streamd.daemon.client import DaemonClient
from streamd.daemon.sockets import BoundSocket, api_socket_path
from streamd.errors import Refused
from tests.daemon.api.fake_node import LIMIT_S, URL, Running

Run = Callable[..., Running]
HEALTH = b"GET /v1/health HTTP/1.1\r\nhost: streamd\r\n\r\n"


@contextmanager
def connected(running: Running) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(LIMIT_S)
        connection.connect(os.fspath(running.path))
        yield connection


def received(connection: socket.socket) -> bytes:
    """Everything up to the connection's end."""
    data = b""
    try:
        while piece := connection.recv(1 << 16):
            data += piece
    except ConnectionResetError:
        pass
    return data


def answered(connection: socket.socket, request: bytes) -> bytes:
    """One answer, whole."""
    connection.sendall(request)
    data = b""
    while not data.endswith(b'"version":"test"}'):
        piece = connection.recv(1 << 16)
        assert piece, data
        data += piece
    return data


def make_noise(running: Running) -> None:
    for _ in range(40):
        running.node.events.publish("noise", text="x" * 900)


def is_idle(running: Running) -> bool:
    return running.counts.connections == 0


def test_the_socket_is_for_its_owner_alone_and_goes_with_the_server(run: Run) -> None:
    running = run()
    assert stat.S_IMODE(running.path.lstat().st_mode) == 0o600
    assert stat.S_IMODE(running.path.parent.lstat().st_mode) == 0o700
    assert running.path == api_socket_path(running.run_directory)
    with pytest.raises(Refused, match="already"), BoundSocket(running.path, backlog=1, refusal="there is one already"):
        pass
    assert DaemonClient(running.run_directory).health()["status"] == "ok"


def test_a_socket_that_a_dead_process_left_is_replaced(tmp_path: Path) -> None:
    path = api_socket_path(tmp_path)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(os.fspath(path))
    with BoundSocket(path, backlog=1, refusal="in use") as listener, socket.socket(socket.AF_UNIX) as client:
        client.connect(os.fspath(path))
        listener.accept()[0].close()
    assert not path.exists()


def test_a_run_directory_of_others_is_made_private_or_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with BoundSocket(api_socket_path(tmp_path), backlog=1, refusal=""):
        assert stat.S_IMODE(tmp_path.lstat().st_mode) == 0o700
    tmp_path.chmod(0o777)
    with pytest.raises(Refused), BoundSocket(api_socket_path(tmp_path), backlog=1, refusal=""):
        pass


def _ask_as(uid: int, gid: int, path: Path) -> bytes:
    """Ask for /v1/health as another user."""
    program = (
        "import os, socket, sys\n"
        f"os.setgroups([]); os.setgid({gid}); os.setuid({uid})\n"
        f"s = socket.socket(socket.AF_UNIX); s.connect({str(path)!r})\n"
        f"try: s.sendall({HEALTH!r})\n"
        "except BrokenPipeError: pass\n"
        "sys.stdout.buffer.write(s.recv(65536))\n"
    )
    return subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=LIMIT_S, check=True).stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root to become another user")
def test_another_user_is_refused_even_where_the_socket_is_open_to_it(run: Run) -> None:
    running = run(allowed=Allowed(gids=frozenset({4711})))
    running.path.parent.chmod(0o711)
    running.path.chmod(0o666)
    with structlog.testing.capture_logs() as logged:
        for _ in range(3):
            assert _ask_as(65534, 65534, running.path).startswith(b"HTTP/1.1 403")
    assert [entry["uid"] for entry in logged if entry["event"] == "API client refused"] == [65534]  # one for all three
    assert running.counts.refused == {"peer": 3}
    assert _ask_as(65534, 4711, running.path).startswith(b"HTTP/1.1 200")
    assert running.counts.requests == {("GET", "/v1/health", "200"): 1}


def test_so_many_connections_are_served_and_the_next_is_told(run: Run) -> None:
    most = Limits().connections
    running = run(Limits(connections_a_process=most + 1))
    with ExitStack() as stack:
        held = [stack.enter_context(connected(running)) for _ in range(most)]
        for connection in held:
            assert answered(connection, HEALTH).startswith(b"HTTP/1.1 200")
        refused = stack.enter_context(connected(running))
        head, _, body = received(refused).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503")
        assert msgspec.json.decode(body)["type"] == "urn:streamd:problem:busy"
        for connection in held:  # they go on
            assert answered(connection, HEALTH).startswith(b"HTTP/1.1 200")
        held[0].close()
        running.wait_for(lambda: running.counts.connections < most)
        assert answered(stack.enter_context(connected(running)), HEALTH).startswith(b"HTTP/1.1 200")
    running.wait_for(lambda: is_idle(running))


def test_one_process_leaves_connections_to_the_others(run: Run) -> None:
    running = run(Limits(connections=4, connections_a_process=3))
    with ExitStack() as stack:
        for _ in range(3):
            assert answered(stack.enter_context(connected(running)), HEALTH).startswith(b"HTTP/1.1 200")
        with connected(running) as one_more:
            assert b"the most of one process" in received(one_more)
        assert b"HTTP/1.1 200" in _ask_as(os.geteuid(), os.getegid(), running.path)
        assert running.counts.refused == {"limit": 1}
    running.wait_for(lambda: is_idle(running))
    with connected(running) as again:
        assert answered(again, HEALTH).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "head",
    [
        b"content-length: 2\r\ncontent-length: 2\r\n",
        b"content-length: 2, 2\r\n",
        b"content-length:\r\n 2\r\n",
        b"transfer-encoding:\r\n chunked\r\n",
    ],
    ids=["a length twice", "a length in a list", "a length on the next line", "chunks on the next line"],
)
def test_what_is_said_twice_or_on_two_lines_is_one_body_and_what_follows_the_next_request(
    running: Running, head: bytes
) -> None:
    """As RFC 9110 (8.6) and 9112 (5.2) allow; no byte of a body is ever taken for a request, or the reverse."""
    body = b"0\r\n\r\n" if b"chunked" in head else b"{}"
    with connected(running) as client:
        client.sendall(b"GET /v1/health HTTP/1.1\r\nhost: s\r\n" + head + b"\r\n" + body + HEALTH)
        data = b""
        while data.count(b'"version":"test"') < 2:
            data += client.recv(1 << 16)
        assert data.count(b"HTTP/1.1 ") == data.count(b"HTTP/1.1 200") == 2


def test_who_sends_a_head_slowly_is_cut_off_and_holds_nobody_up(run: Run) -> None:
    running = run(Limits(idle_s=0.5))
    with connected(running) as slow:
        for byte in HEALTH[:20]:
            slow.sendall(bytes([byte]))
        with connected(running) as other:
            assert answered(other, HEALTH).startswith(b"HTTP/1.1 200")
        assert received(slow) == b""


def test_who_sends_a_body_slowly_is_cut_off(run: Run) -> None:
    running = run(Limits(body_wait_s=0.2))
    with connected(running) as slow:
        slow.sendall(b"POST /v1/images HTTP/1.1\r\nhost: s\r\ncontent-length: 100\r\n\r\n{")
        assert received(slow).startswith(b"HTTP/1.1 408")
        running.wait_for(lambda: is_idle(running))


@pytest.mark.parametrize("path", [b"/v1/images", b"/v1/drain", b"/nothing"])
def test_a_body_without_end_is_refused_and_leaves_nothing_behind(run: Run, path: bytes) -> None:
    # More pieces than hypercorn's queue has places, in one go: whoever leaves them there waits for ever.
    running = run(Limits(idle_s=3600))
    chunks = b"400\r\n" + b"x" * 1024 + b"\r\n"
    with connected(running) as client:
        client.sendall(b"POST " + path + b" HTTP/1.1\r\nhost: s\r\ntransfer-encoding: chunked\r\n\r\n" + chunks * 60)
        answer = received(client)
        assert answer.startswith(b"HTTP/1.1 413")
        assert b"urn:streamd:problem:too-large" in answer
        running.wait_for(lambda: is_idle(running))


def test_who_asks_for_events_and_reads_none_is_cut_off(run: Run) -> None:
    running = run(Limits(write_wait_s=0.2))
    with connected(running) as slow:
        slow.sendall(b"GET /v1/events HTTP/1.1\r\nhost: s\r\n\r\n")
        running.wait_for(lambda: running.counts.streams == 1)
        for _ in range(20):
            running.call(partial(make_noise, running))
            with connected(running) as other:
                assert answered(other, HEALTH).startswith(b"HTTP/1.1 200")
        running.wait_for(lambda: running.counts.streams == 0 and is_idle(running))
        assert running.counts.dropped_readers == 1


def test_the_server_ends_while_a_client_reads_nothing(run: Run) -> None:
    running = run(Limits(write_wait_s=3600))
    slow = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with slow:
        slow.connect(os.fspath(running.path))
        slow.sendall(b"GET /v1/events HTTP/1.1\r\nhost: s\r\n\r\n")
        running.wait_for(lambda: running.counts.streams == 1)
        for _ in range(20):
            running.call(partial(make_noise, running))
            running.wait_for(lambda: True)
        running.stop()  # fails when it takes longer than LIMIT_S
        assert b"event: noise" in received(slow)


# What is no HTTP/1 request for us → the beginning of the answer
ODD_REQUESTS = {
    "garbage": (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", b"HTTP/1.1 400"),
    "a head without end": (b"GET / HTTP/1.1\r\nx: " + b"x" * (17 << 10), b"HTTP/1.1 431"),
    "two lengths": (b"POST / HTTP/1.1\r\nhost: s\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n", b"HTTP/1.1 400"),
    "no host": (b"GET / HTTP/1.1\r\n\r\n", b"HTTP/1.1 400"),
    "a bad chunk": (
        b"POST /v1/drain HTTP/1.1\r\nhost: s\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 400",
    ),
    # What a proxy and this server could take for two things (RFC 9112): refused, or read as that says it must be.
    "a length and chunks": (
        b"POST /v1/drain HTTP/1.1\r\nhost: s\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
        + HEALTH,
        b"HTTP/1.1 400",
    ),
    "a list of codings": (b"POST / HTTP/1.1\r\nhost: s\r\ntransfer-encoding: x, chunked\r\n\r\n", b"HTTP/1.1 501"),
    "a folded length": (b"POST / HTTP/1.1\r\nhost: s\r\ncontent-length: 1\r\n 0\r\n\r\n", b"HTTP/1.1 400"),
    "a space before a colon": (b"POST / HTTP/1.1\r\nhost: s\r\ncontent-length : 1\r\n\r\n", b"HTTP/1.1 400"),
    "a carriage return alone": (b"GET / HTTP/1.1\r\nhost: s\r\nx: a\rcontent-length: 1\r\n\r\n", b"HTTP/1.1 400"),
    "lines of carriage returns alone": (b"GET /v1/health HTTP/1.1\rhost: s\r\r", b""),
    "HTTP/1.0": (b"GET /v1/health HTTP/1.0\r\n\r\n", b"HTTP/1.1 200"),
    "another server's address": (
        b"GET http://example.org/v1/health HTTP/1.1\r\nhost: s\r\nconnection: close\r\n\r\n",
        b"HTTP/1.1 404",
    ),
    "a web socket": (
        b"GET /v1/events HTTP/1.1\r\nhost: s\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
        b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n",
        b"HTTP/1.1 403",
    ),
    "an upgrade to HTTP/2": (
        b"GET /v1/health HTTP/1.1\r\nhost: s\r\nconnection: upgrade, http2-settings\r\nupgrade: h2c\r\n"
        b"http2-settings: \r\n\r\n",
        b"HTTP/1.1 101",
    ),
    "HTTP/2 at once": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00", b""),
}


@pytest.mark.parametrize("case", ODD_REQUESTS)
def test_an_odd_request_ends_its_own_connection_and_nothing_else(run: Run, case: str) -> None:
    request, beginning = ODD_REQUESTS[case]
    running = run(Limits(idle_s=1.0))
    with connected(running) as odd:
        with suppress(BrokenPipeError):
            odd.sendall(request)
        answer = received(odd)
        assert answer.startswith(beginning)
        assert answer.count(b"HTTP/1.1 200") <= 1
    with connected(running) as other:
        assert answered(other, HEALTH).startswith(b"HTTP/1.1 200")
    running.wait_for(lambda: is_idle(running))


@pytest.mark.parametrize("said", [b"", HEALTH], ids=["nothing", "another request"])
def test_a_lease_ends_with_its_connection_whatever_was_said_after_it(run: Run, said: bytes) -> None:
    running = run(Limits(heartbeat_s=3600))
    image_id = str(DaemonClient(running.run_directory).request_image(URL)["id"])
    body = b'{"owner":"a","purpose":"b"}'
    head = f"POST /v1/images/{image_id}/leases HTTP/1.1\r\nhost: s\r\ncontent-type: application/json\r\n"
    with connected(running) as client:
        client.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body + said)
        running.wait_for(lambda: running.node.leases_taken == 1)
    running.wait_for(lambda: not running.node.image(image_id).leases)


def test_who_says_something_while_it_is_answered_without_end_is_cut_off(running: Running) -> None:
    with connected(running) as client:
        client.sendall(b"GET /v1/events HTTP/1.1\r\nhost: s\r\n\r\n")
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")
        client.sendall(HEALTH)
        assert b"version" not in received(client)
    running.wait_for(lambda: is_idle(running))


@pytest.mark.parametrize("path", ["/v1/images", "/v1/events", "/v1/cache", "/nothing", "/metrics"])
def test_clients_that_go_at_any_moment_leave_no_error(
    running: Running, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    request = f"GET {path} HTTP/1.1\r\nhost: s\r\n\r\n".encode()
    with structlog.testing.capture_logs() as logged:
        for length in [*range(0, len(request), 7), *[len(request)] * 8]:
            with connected(running) as client:
                client.sendall(request[:length])
                if length == len(request):
                    client.sendall(request)
        running.wait_for(lambda: is_idle(running))
    assert logged == []
    assert [record for record in caplog.records if record.name.startswith(("streamd", "hypercorn"))] == []


@pytest.mark.parametrize("requests", [0, 1])
def test_a_client_that_goes_leaves_its_place_at_once(running: Running, requests: int) -> None:
    with connected(running) as client:
        running.wait_for(lambda: running.counts.connections == 1)
        for _ in range(requests):
            answered(client, HEALTH)
    began_s = time.monotonic()
    running.wait_for(lambda: is_idle(running))
    assert time.monotonic() - began_s < running.limits.idle_s / 2


def test_a_connection_serves_one_request_after_the_other(running: Running) -> None:
    with connected(running) as client:
        client.sendall(HEALTH * 3)
        data = b""
        while data.count(b'"version":"test"') < 3:
            data += client.recv(1 << 16)
        assert data.count(b"HTTP/1.1 200") == 3


def test_a_client_that_goes_before_its_answer_leaves_nothing_behind(running: Running) -> None:
    image_id = DaemonClient(running.run_directory).request_image(URL)["id"]
    with connected(running) as client:
        client.sendall(f"GET /v1/images/{image_id}?wait_s=60 HTTP/1.1\r\nhost: s\r\n\r\n".encode())
        running.wait_for(lambda: running.counts.connections == 1)
    running.wait_for(lambda: is_idle(running))
