"""The commands' side: every call, every error, and leases that end with their holder."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import trio
import trio.testing
from msgspec.structs import replace

from streamd.daemon.api.connection import Connection
from streamd.daemon.api.limits import Limits
from streamd.daemon.api.metrics import ApiCounts
from streamd.daemon.api.models import ImageStateName, Opener
from streamd.daemon.api.server import Allowed
from streamd.daemon.client import DaemonClient, Lease, NoAnswer, NoDaemon
from streamd.daemon.relay import RelayedError
from streamd.daemon.sockets import api_socket_path
from streamd.errors import Exit, NotPermitted
from tests.daemon.api.fake_node import LIMIT_S, URL, InProcess, Running

Run = Callable[..., Running]
ROOT = Path(__file__).parents[3]


@pytest.fixture
def client(running: Running) -> DaemonClient:
    return DaemonClient(running.run_directory)


def _image(client: DaemonClient) -> str:
    return str(client.request_image(URL)["id"])


def test_every_call_gives_what_the_node_says(running: Running, client: DaemonClient) -> None:
    image = client.request_image(URL, tenant="shop", credentials={"token_file": "/t"}, prefetch="hot", request_id="r")
    image_id = str(image["id"])
    assert (image["state"], image["tenant"], image["prefetch"]) == ("preparing", "shop", "hot")
    assert client.request_image(URL, tenant="shop", credentials={"token_file": "/t"}, prefetch="hot", request_id="r")
    assert client.images() == [image] == [client.image(image_id)]
    assert client.fail(image_id) == 1
    assert client.fail(image_id, handle=1 << 63) == 1
    assert client.fail(image_id, container="web") == 1
    assert [chosen.handle for chosen in running.node.failed][1] == 1 << 63
    assert client.cache()["directory"] == "/cache"
    assert [record["name"] for record in client.records(limit=1)] == ["0.record"]
    assert client.health()["status"] == "ok"
    running.node.warnings.append("the disk is full")
    assert client.health()["warnings"] == ["the disk is full"]
    assert 'streamd_images{state="preparing"} 1.0' in client.metrics()
    assert client.openapi()["openapi"] == "3.1.0"
    assert not client.is_draining()
    client.drain()
    assert client.is_draining()
    client.end_drain()
    assert not client.is_draining()
    assert client.release(image_id)["state"] == "draining"


def test_the_daemons_errors_are_raised_as_they_were(running: Running, client: DaemonClient) -> None:
    image_id = _image(client)
    with pytest.raises(RelayedError) as missing:
        client.image("f" * 32)
    assert (missing.value.kind, missing.value.exit_code) == ("not-found", Exit.NOT_FOUND)
    opener = Opener(handle=3, file="pages.img", pid=17, command="runsc")
    running.call(lambda: running.node.known.update({image_id: replace(running.node.image(image_id), openers=[opener])}))
    with pytest.raises(RelayedError, match="runsc") as in_use:
        client.release(image_id)
    assert (in_use.value.kind, in_use.value.exit_code) == ("in-use", Exit.REFUSED)
    assert in_use.value.facts["openers"] == [
        {"handle": 3, "file": "pages.img", "pid": 17, "command": "runsc", "container": None}
    ]
    with pytest.raises(RelayedError) as wrong:
        client.request_image("ftp://x")
    assert (wrong.value.kind, wrong.value.exit_code) == ("invalid", Exit.USAGE)
    with pytest.raises(RelayedError):
        client.image("../../v1/drain")
    assert not client.is_draining()


def test_waiting_for_an_image_returns_when_it_serves(running: Running, client: DaemonClient) -> None:
    image_id = _image(client)
    states: list[object] = []
    waiting = threading.Thread(target=lambda: states.append(client.image(image_id, wait_s=60)["state"]))
    waiting.start()
    running.wait_for(lambda: running.counts.connections == 1)
    running.call(lambda: running.node.set_state(image_id, ImageStateName.SERVING))
    waiting.join(LIMIT_S)
    assert states == ["serving"]


def test_without_a_daemon_there_is_an_error_that_says_so(tmp_path: Path) -> None:
    client = DaemonClient(tmp_path)
    with pytest.raises(NoDaemon, match="no streamd daemon"):
        client.images()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(os.fspath(api_socket_path(tmp_path)))
    with pytest.raises(NoDaemon):
        client.images()


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"garbage\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n[]",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n{",
        b"HTTP/1.1 500 No\r\ncontent-type: text/plain\r\ncontent-length: 1\r\n\r\n{",
        b"HTTP/1.1 500 No\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_an_answer_that_cannot_be_read_is_an_error_of_ours(tmp_path: Path, answer: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(api_socket_path(tmp_path)))
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answer)

        serving = threading.Thread(target=serve)
        serving.start()
        with pytest.raises(NoAnswer):
            DaemonClient(tmp_path, wait_s=LIMIT_S).images()
        serving.join(LIMIT_S)


@pytest.mark.parametrize("backlog", [8, 0])
def test_a_daemon_that_hangs_is_given_up(tmp_path: Path, backlog: int) -> None:
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as first:
        listener.bind(os.fspath(api_socket_path(tmp_path)))
        listener.listen(backlog)
        first.connect(os.fspath(api_socket_path(tmp_path)))  # with a backlog of 0 the queue is full now
        with pytest.raises(NoAnswer):
            DaemonClient(tmp_path, wait_s=0.1).images()


def test_another_user_is_told_to_use_sudo(run: Run) -> None:
    running = run(allowed=Allowed(uids=frozenset()))
    with pytest.raises(NotPermitted, match="sudo"):
        DaemonClient(running.run_directory).request_image(URL)


def test_a_request_is_sent_again_while_the_daemon_restarts(tmp_path: Path) -> None:
    running = Running(tmp_path, Limits(), Allowed())
    answers: list[object] = []
    asking = threading.Thread(
        target=lambda: answers.append(DaemonClient(tmp_path).request_image(URL, again_for_s=LIMIT_S)["state"])
    )
    asking.start()
    with running.started():
        asking.join(LIMIT_S)
    assert answers == ["preparing"]


# Leases


def test_a_lease_lasts_as_long_as_it_is_held(running: Running, client: DaemonClient) -> None:
    image_id = _image(client)
    with client.lease(image_id, owner="pod web-1", purpose="restore") as lease:
        assert lease.is_held()
        (held,) = running.call(lambda: running.node.image(image_id).leases)
        assert (held.id, held.owner, held.purpose, held.pid) == (lease.id, "pod web-1", "restore", os.getpid())
    running.wait_for(lambda: not running.node.image(image_id).leases)
    assert running.counts.streams == 0


def test_leases_of_one_image_are_told_apart(running: Running, client: DaemonClient) -> None:
    image_id = _image(client)
    with client.lease(image_id, owner="a", purpose="restore"):
        with client.lease(image_id, owner="b", purpose="restore"), pytest.raises(RelayedError, match="b holds a lease"):
            client.release(image_id)
        running.wait_for(lambda: [lease.owner for lease in running.node.image(image_id).leases] == ["a"])


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_lease_ends_with_its_holder_whoever_kills_it(
    running: Running, client: DaemonClient, how: signal.Signals
) -> None:
    image_id = _image(client)
    program = (
        "import sys, time; from pathlib import Path; from streamd.daemon.client import DaemonClient\n"
        f"client = DaemonClient(Path({str(running.run_directory)!r}))\n"
        f"with client.lease({image_id!r}, owner='pod', purpose='restore') as lease:\n"
        "    print(lease.id, flush=True); time.sleep(3600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=ROOT, text=True) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline().strip() == "lease-1"
            assert [held.pid for held in running.call(lambda: running.node.image(image_id).leases)] == [holder.pid]
            holder.send_signal(how)
            running.wait_for(lambda: not running.node.image(image_id).leases)
        finally:
            holder.kill()
    assert running.counts.streams == 0


def test_a_lease_that_was_passed_on_lasts_as_long_as_its_new_holder(running: Running, client: DaemonClient) -> None:
    image_id = _image(client)
    lease = client.take_lease(image_id, owner="pod", purpose="restore")
    program = "import sys; print('up', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[lease.fileno()],
    ) as heir:
        try:
            assert heir.stdout is not None
            assert heir.stdout.readline()
            lease.abandon()
            assert client.health()  # whatever closing did has arrived before this
            assert running.call(lambda: running.node.image(image_id).leases)
        finally:
            heir.kill()
    running.wait_for(lambda: not running.node.image(image_id).leases)


def test_a_holder_learns_that_its_lease_has_ended(running: Running, client: DaemonClient) -> None:
    image_id = _image(client)
    with closing(client.take_lease(image_id, owner="pod", purpose="restore")) as lease:
        running.call(lambda: running.node.set_state(image_id, ImageStateName.FAILED))
        running.wait_for(lambda: running.counts.streams == 0)
        assert _ends(lease)
    assert running.call(lambda: running.node.image(image_id).leases) == []
    with pytest.raises(RelayedError, match="failed"):
        client.take_lease(image_id, owner="pod", purpose="restore")


def test_a_lease_ends_with_the_daemon(run: Run) -> None:
    running = run()
    client = DaemonClient(running.run_directory)
    with closing(client.take_lease(_image(client), owner="pod", purpose="restore")) as lease:
        running.stop()
        assert _ends(lease)


def _ends(lease: Lease) -> bool:
    """Wait for the lease's end, as a holder does that has other things to do: its descriptor is readable."""
    with socket.socket(fileno=os.dup(lease.fileno())) as connection:
        connection.settimeout(LIMIT_S)
        while connection.recv(1 << 12):
            pass
    return not lease.is_held()


async def test_a_holder_that_reads_nothing_keeps_its_lease(autojump_clock: trio.testing.MockClock) -> None:
    """An hour of heartbeats would fill the socket, and the client would be cut off as one that takes nothing."""
    api = InProcess()
    await api.image()
    ours, theirs = trio.socket.socketpair()
    with ours, theirs:
        connection = Connection(trio.SocketStream(ours), ApiCounts(), write_wait_s=1.0)
        body = [{"type": "http.request", "body": b'{"owner":"pod","purpose":"restore"}', "more_body": False}]
        sent: list[bytes] = []

        async def receive() -> object:
            if body:
                return body.pop()
            await trio.sleep_forever()
            raise AssertionError

        async def send(message: dict[str, object]) -> None:
            if message["type"] == "http.response.body":
                sent.append(b"")
                await connection.send_all(b"{}\n")

        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "path": f"/v1/images/{1:032x}/leases",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "state": connection.state(),
        }
        with trio.move_on_after(4 * 3600) as hours:
            await api.app(scope, receive, send)  # type: ignore[arg-type]
        assert hours.cancelled_caught, "the lease ended"
        assert api.node.leases_taken == 1
        assert 2 < len(sent) < 4 * 360, "heartbeats pause"


def test_importing_the_client_loads_no_server() -> None:
    program = "import sys, streamd.daemon.client; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True
    ).stdout
    heavy = {"msgspec", "starlette", "hypercorn", "trio", "anyio", "structlog", "http.client", "ssl", "dataclasses"}
    assert not heavy & set(loaded.split())


# Events


def test_events_come_as_they_happen_and_go_on_where_they_were_left(running: Running, client: DaemonClient) -> None:
    running.call(lambda: running.node.events.publish("before"))
    with closing(client.events()) as events:
        got: list[object] = []
        reading = threading.Thread(target=lambda: got.extend(next(events)["kind"] for _ in range(2)))
        reading.start()
        running.wait_for(lambda: running.counts.streams == 1)
        for kind in ("one", "two", "three"):
            running.call(partial(running.node.events.publish, kind))
        reading.join(LIMIT_S)
        assert got == ["one", "two"]
    running.wait_for(lambda: running.counts.streams == 0)
    with closing(client.events(last_id=running.node.events.id_of(3))) as events:
        assert [next(events)["kind"] for _ in range(1)] == ["three"]
    with closing(client.events(last_id="00000000-1")) as events:
        assert [next(events)["kind"] for _ in range(2)] == ["lost", "before"]


def test_the_newest_events_id_is_known_before_there_is_one(running: Running, client: DaemonClient) -> None:
    assert client.last_event_id() == running.node.events.id_of(0)
    running.call(partial(running.node.events.publish, "one"))
    assert client.last_event_id() == running.node.events.id_of(1)


def test_silence_of_the_daemon_is_an_error(running: Running, client: DaemonClient) -> None:
    with closing(client.events(silence_wait_s=0.1)) as events, pytest.raises(NoAnswer, match=r"within 0\.1 s"):
        next(events)
