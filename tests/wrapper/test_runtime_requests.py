"""The agent's end of the wrapper's questions: whoever asks badly, or leaves, the next one is answered."""

import json
import os
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import trio
import trio.testing

from agent.errors import AgentError
from agent.node.runtime_requests import RuntimeRequests
from agent.wrapper.protocol import (
    LINE_MAX_BYTES,
    Answer,
    Container,
    Create,
    Failed,
    Finished,
    Join,
    Noted,
    Plain,
    Refused,
    Report,
    Request,
    Restore,
    Start,
    decode_answer,
    encode_request,
)
from streamd.errors import Refused as AddressRefused
from tests.wrapper.conftest import Wrapped

_HANG_S = 60.0
_CONTAINER = Container("abc", "/runsc", "/run/x")


@dataclass(slots=True)
class Scripted:
    """Decides as it was told, and remembers what it was asked."""

    starting: Plain | Restore | Join | Exception = field(default_factory=Plain)
    asked: list[Request] = field(default_factory=list)
    cancelled: trio.Event = field(default_factory=trio.Event)
    not_waited_for: list[Request] = field(default_factory=list)
    told: trio.Event = field(default_factory=trio.Event)
    waits: bool = False

    async def create(self, request: Create) -> Plain | Finished | Refused:
        self.asked.append(request)
        return Plain({"dev.gvisor.x": "y"})

    async def start(self, request: Start) -> Plain | Restore | Join:
        self.asked.append(request)
        if self.waits:
            try:
                await trio.sleep_forever()
            finally:
                self.cancelled.set()
        if isinstance(self.starting, Exception):
            raise self.starting
        return self.starting

    async def report(self, report: Report) -> None:
        self.asked.append(report)

    def given_up(self, request: Request) -> None:
        self.not_waited_for.append(request)
        self.told.set()


@asynccontextmanager
async def _serving(path: Path, decisions: Scripted, connections_max: int = 16) -> AsyncIterator[None]:
    with trio.fail_after(_HANG_S), RuntimeRequests(path) as requests:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(requests.serve, decisions, connections_max=connections_max))
            yield
            nursery.cancel_scope.cancel()


async def _said(path: Path, data: bytes) -> bytes:
    """Send bytes and receive until the end."""
    async with await trio.open_unix_socket(path) as stream:
        await stream.send_all(data)
        received = b""
        while part := await stream.receive_some():
            received += part
        return received


async def _asked(path: Path, request: Request) -> Answer:
    return decode_answer(await _said(path, encode_request(request)))


@pytest.fixture
def path() -> Iterator[Path]:
    """Give a socket's path: short, in a directory of its own."""
    with tempfile.TemporaryDirectory(prefix="requests-", dir="/var/tmp") as directory:
        yield Path(directory) / "s"


async def test_each_question_reaches_its_method_and_its_answer_the_asker(path: Path) -> None:
    decisions = Scripted(Restore("/image"))
    async with _serving(path, decisions):
        assert await _asked(path, Start(_CONTAINER)) == Restore("/image")
        assert await _asked(path, Report(_CONTAINER, 128, "no")) == Noted()
    assert decisions.asked == [Start(_CONTAINER), Report(_CONTAINER, 128, "no")]


async def test_what_an_answer_meets_is_told_and_the_next_one_is_answered(path: Path) -> None:
    class StoreDown(AgentError):
        pass

    decisions = Scripted(StoreDown("the store is down"))
    async with _serving(path, decisions):
        assert await _asked(path, Start(_CONTAINER)) == Failed("the store is down")
        decisions.starting = RuntimeError("a secret")
        answer = await _asked(path, Start(_CONTAINER))
        assert answer == Failed("internal error; the agent's log has the details")
        decisions.starting = Restore("/" + "x" * LINE_MAX_BYTES)
        assert isinstance(await _asked(path, Start(_CONTAINER)), Failed)
        decisions.starting = Plain()
        assert await _asked(path, Start(_CONTAINER)) == Plain()


@pytest.mark.parametrize(
    "line", [b"\n", b"{}\n", b"[1]\n", b"\xff\n", b"[" * 10000 + b"\n", b'{"version": 2, "request": "start"}\n']
)
async def test_a_line_that_is_no_question_is_answered_with_why(path: Path, line: bytes) -> None:
    async with _serving(path, Scripted()):
        assert isinstance(decode_answer(await _said(path, line)), Failed)


async def test_an_endless_line_is_refused_at_its_bound(path: Path) -> None:
    async with _serving(path, Scripted()):
        answer = await _said(path, b"x" * (LINE_MAX_BYTES + 1))
    assert isinstance(decode_answer(answer), Failed)


async def test_a_client_that_leaves_without_a_line_is_nobody(path: Path) -> None:
    decisions = Scripted()
    async with _serving(path, decisions):
        async with await trio.open_unix_socket(path) as stream:
            await stream.send_all(b'{"version"')
        assert await _asked(path, Start(_CONTAINER)) == Plain()
    assert decisions.asked == [Start(_CONTAINER)]


async def test_who_gives_up_waiting_has_the_answer_cancelled_which_is_told(path: Path) -> None:
    decisions = Scripted(waits=True)
    async with _serving(path, decisions):
        async with await trio.open_unix_socket(path) as stream:
            await stream.send_all(encode_request(Start(_CONTAINER)))
            while not decisions.asked:
                await trio.sleep(0.001)
        await decisions.cancelled.wait()
        await decisions.told.wait()
        assert decisions.not_waited_for == [Start(_CONTAINER)]
        decisions.waits = False
        assert await _asked(path, Start(_CONTAINER)) == Plain()
    assert decisions.not_waited_for == [Start(_CONTAINER)]


async def test_the_socket_is_roots_alone_and_only_one_process_answers(path: Path) -> None:
    async with _serving(path, Scripted()):
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == 0o700
        with pytest.raises(AddressRefused, match="another agent answers there"), RuntimeRequests(path):
            pass
    assert not path.exists()


async def test_another_user_is_not_answered(path: Path) -> None:
    async with _serving(path, Scripted()):
        # It could only come in by a descriptor, or if somebody had opened the way: open it.
        path.chmod(0o666)
        path.parent.chmod(0o755)
        program = (
            "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); "
            "s.sendall(sys.argv[2].encode()); print(s.recv(100))"
        )
        vector = ["python3", "-c", program, str(path), encode_request(Start(_CONTAINER)).decode()]
        done = await trio.run_process(vector, capture_stdout=True, capture_stderr=True, check=False)
    # Closed without a word, before or after the line was read.
    assert done.stdout == b"b''\n" or b"ConnectionResetError" in done.stderr or b"BrokenPipe" in done.stderr


async def test_the_real_wrapper_and_the_real_server_understand_each_other(wrapped: Wrapped) -> None:
    decisions = Scripted(Restore(str(wrapped.directory)))
    (wrapped.directory / "checkpoint.img").touch()
    bundle = wrapped.bundle()
    async with _serving(wrapped.agent_socket, decisions):
        for arguments in (("create", f"--bundle={bundle}", "abc"), ("start", "abc")):
            vector = [str(wrapped.wrapper), "--root", "/run/x", *arguments]
            done = await trio.run_process(vector, stdin=subprocess.DEVNULL, check=False)
            assert done.returncode == 0
    assert [type(request) for request in decisions.asked] == [Create, Start, Report]
    assert json.loads((bundle / "config.json").read_text())["annotations"] == {"dev.gvisor.x": "y"}
    assert [vector[2] for vector in wrapped.vectors()] == ["create", "restore"]


async def test_more_connections_than_are_served_wait_their_turn(path: Path) -> None:
    decisions = Scripted()
    idle = [socket.socket(socket.AF_UNIX) for _ in range(2)]
    async with _serving(path, decisions, connections_max=2):
        for connection in idle:
            await trio.to_thread.run_sync(partial(connection.connect, os.fspath(path)))
        answers: list[Answer] = []

        async def ask() -> None:
            answers.append(await _asked(path, Start(_CONTAINER)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await trio.testing.wait_all_tasks_blocked()
            assert answers == []
            for connection in idle:
                connection.close()
        assert answers == [Plain()]
