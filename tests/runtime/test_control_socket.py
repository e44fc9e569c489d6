"""The control socket: of a real sandbox, and of ones that answer as no sandbox should."""

import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import trio
import trio.testing

from agent.runtime.bundle import Container, make_rootfs, write_bundle
from agent.runtime.control_socket import (
    METHODS,
    ControlError,
    ControlSocket,
    ControlTimeout,
    Process,
    RuntimeState,
    Savings,
)
from agent.runtime.failures import FailureKind
from agent.runtime.runsc import Runsc
from bench.pods import runsc_below

SANDBOX = "a-sandbox"


@pytest.fixture
def runsc(tmp_path: Path) -> Iterator[Runsc]:
    runsc = runsc_below(tmp_path)
    yield runsc
    runsc.remove_root()


@pytest.fixture
def running(runsc: Runsc, tmp_path: Path) -> ControlSocket:
    """Give the socket of a sandbox that sleeps."""
    container = Container(args=["/bin/sleep", "1000"], rootfs=make_rootfs(tmp_path / "r"))
    runsc.run(SANDBOX, write_bundle(tmp_path / "b", container))
    return ControlSocket(runsc.options.root, SANDBOX)


async def test_a_sandbox_says_how_it_is_and_ends_with_exit_code_0_when_it_is_to_complete(
    running: ControlSocket, runsc: Runsc
) -> None:
    assert await running.state(SANDBOX) is RuntimeState.RUNNING
    assert await running.state("another") is RuntimeState.STOPPED
    assert await running.savings() == Savings(0.0, 0.0)
    assert await running.processes(SANDBOX) == (Process(1, "sleep"),)
    with runsc.waiter(SANDBOX) as waiter:
        runsc.pause(SANDBOX)
        await running.complete()
        runsc.resume(SANDBOX)
        assert await trio.to_thread.run_sync(lambda: waiter.result(timeout_s=60)) == 0


async def test_a_signal_reaches_the_process(running: ControlSocket, runsc: Runsc) -> None:
    await running.signal(SANDBOX, 1, signal.SIGKILL)
    assert await trio.to_thread.run_sync(lambda: runsc.ends_within(SANDBOX, timeout_s=60))


async def test_a_save_ends_the_wait_for_it_and_a_fresh_sandbox_has_no_restore_to_wait_for(
    running: ControlSocket, runsc: Runsc, tmp_path: Path
) -> None:
    with pytest.raises(ControlError) as caught:
        await running.wait_restore(timeout_s=60)
    assert caught.value.failure.kind is FailureKind.NOT_RESTORING
    ended = trio.Event()

    async def wait() -> None:
        await running.wait_checkpoint(timeout_s=60)
        ended.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        for number in range(20):  # the wait counts from when gVisor has it, which nothing tells
            image = tmp_path / f"image-{number}"
            await trio.to_thread.run_sync(lambda image=image: runsc.checkpoint(SANDBOX, image))  # type: ignore[misc]
            with trio.move_on_after(0.2):
                await ended.wait()
            if ended.is_set():
                break
    assert ended.is_set()


async def test_a_sandbox_that_dies_ends_every_wait(running: ControlSocket, runsc: Runsc) -> None:
    async with trio.open_nursery() as nursery:

        async def wait() -> None:
            with pytest.raises(ControlError) as caught:
                await running.wait_checkpoint(timeout_s=60)
            assert caught.value.failure.kind is FailureKind.SANDBOX_GONE

        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked(0.05)
        runsc.end_sandbox(SANDBOX)
    with pytest.raises(ControlError) as caught:
        await running.state(SANDBOX)
    assert caught.value.failure.kind is FailureKind.SANDBOX_GONE


Answering = Callable[[bytes], ControlSocket]


@pytest.fixture
async def answering(tmp_path: Path) -> "Iterator[Answering]":  # type: ignore[misc]
    """Give a socket behind which somebody answers each call with these bytes and hangs up; nothing: he waits."""
    async with trio.open_nursery() as nursery:

        def begin(answer: bytes) -> ControlSocket:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(os.fspath(tmp_path / f"runsc-{SANDBOX}.sock"))
            listener.listen()

            async def handle(stream: trio.SocketStream) -> None:
                await stream.receive_some()
                if not answer:
                    await trio.sleep_forever()
                with suppress(trio.BrokenResourceError):  # who has read enough hangs up first
                    await stream.send_all(answer)
                await stream.aclose()

            serving = trio.SocketListener(trio.socket.from_stdlib_socket(_nonblocking(listener)))
            nursery.start_soon(trio.serve_listeners, handle, [serving])
            return ControlSocket(tmp_path, SANDBOX)

        yield begin
        nursery.cancel_scope.cancel()


def _nonblocking(listener: socket.socket) -> socket.socket:
    listener.setblocking(False)
    return listener


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b'{"success":true,"err":"","result":99}', "99"),
        (b'{"success":true,"err":"","result":"2"}', "2"),
        (b'{"success":false,"err":"","result":null}', "without a reason"),
        (b'{"success":1}', "without a reason"),
        (b"[1,2]", "is gone"),
        (b"{", "is gone"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "is gone"),
        (b"{}" * 3_000_000, "more than"),
    ],
)
async def test_an_answer_that_is_none_is_an_error(answer: bytes, said: str, answering: Answering) -> None:
    with pytest.raises(ControlError, match=said):
        await answering(answer).state(SANDBOX)


async def test_an_answer_that_never_comes_is_a_timeout_that_says_so(answering: Answering) -> None:
    with pytest.raises(ControlTimeout, match=r"no answer in 0\.1 s"):
        await answering(b"").wait_restore(timeout_s=0.1)


async def test_a_refusal_is_classified(answering: Answering) -> None:
    said = {"success": False, "err": "async MemoryFile loading failed: EOF", "result": None}
    with pytest.raises(ControlError) as caught:
        await answering(json.dumps(said).encode()).wait_restore()
    assert caught.value.failure.kind is FailureKind.LOAD_FAILED


@pytest.mark.parametrize("what", ["a link", "a file", "nothing"])
async def test_what_is_no_socket_of_ours_is_not_asked(what: str, tmp_path: Path) -> None:
    path = tmp_path / f"runsc-{SANDBOX}.sock"
    match what:
        case "a file":
            path.write_text("")
        case "a link":
            real = socket.socket(socket.AF_UNIX)
            real.bind(os.fspath(tmp_path / "elsewhere.sock"))
            real.close()
            path.symlink_to(tmp_path / "elsewhere.sock")
    with pytest.raises(ControlError, match="is gone"):
        await ControlSocket(tmp_path, SANDBOX).state(SANDBOX)


async def test_a_socket_of_another_user_is_not_asked(answering: Answering, tmp_path: Path) -> None:
    control = answering(b'{"success":true,"err":"","result":2}')
    assert await control.state(SANDBOX) is RuntimeState.RUNNING
    os.chown(tmp_path / f"runsc-{SANDBOX}.sock", 65534, 65534)
    with pytest.raises(ControlError, match="is gone"):
        await control.state(SANDBOX)


def test_the_methods_that_are_used_are_few_and_named() -> None:
    assert all(name.startswith("containerManager.") for name in METHODS)
