"""The control socket: what a client asks is answered, whatever else a client sends ends nothing."""

import json
import os
import shutil
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
import trio
import trio.testing

from streamd.daemon.control import CONNECTIONS_MAX, LINE_MAX_BYTES, ControlSocket, FailSelector, Opener
from streamd.daemon.control_client import MountClient, NoAnswer, NoServer, all_statuses, ask
from streamd.daemon.relay import RelayedError
from streamd.daemon.sockets import is_served, socket_path
from streamd.errors import Exit, Refused

MOUNTPOINT = "/mnt/a b"
T = TypeVar("T")


class Mount:
    """A mount process's answers, and what it was asked for."""

    def __init__(self) -> None:
        self.failed: list[FailSelector] = []
        self.forced: list[bool] = []
        self.openers: Sequence[Opener] = ()
        self.gone: Callable[[], None] = lambda: None

    def status(self) -> dict[str, object]:
        return {"mountpoint": MOUNTPOINT, "pid": os.getpid(), "origin_bytes": 1 << 60, "text": "ü\n"}

    def fail(self, selector: FailSelector) -> int:
        if selector.container == "bug":
            raise ZeroDivisionError
        self.failed.append(selector)
        return len(self.failed)

    async def umount(self, *, force: bool) -> Sequence[Opener]:
        self.forced.append(force)
        if self.openers and not force:
            return self.openers
        self.gone()
        return ()


@pytest.fixture
def run_directory() -> Iterator[Path]:
    # Not tmp_path: a control socket's path must be short.
    base = Path(tempfile.mkdtemp(prefix="streamd-run-"))
    yield base
    shutil.rmtree(base)


@asynccontextmanager
async def served(mount: Mount, run_directory: Path) -> AsyncIterator[MountClient]:
    with ControlSocket(run_directory, MOUNTPOINT) as control:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(control.serve, mount)
            yield MountClient(run_directory, MOUNTPOINT)
            nursery.cancel_scope.cancel()


async def in_thread(call: Callable[[], T]) -> T:
    with trio.fail_after(60):
        return await trio.to_thread.run_sync(call, abandon_on_cancel=True)


async def test_status_comes_as_it_was_said(run_directory: Path) -> None:
    mount = Mount()
    async with served(mount, run_directory) as client:
        assert await in_thread(client.status) == mount.status()
        assert await in_thread(partial(all_statuses, run_directory)) == [mount.status()]


@pytest.mark.parametrize(
    ("arguments", "selector"),
    [
        ({}, FailSelector()),
        ({"handle": 0}, FailSelector(handle=0)),
        ({"handle": (1 << 64) - 1}, FailSelector(handle=(1 << 64) - 1)),
        ({"container": "web"}, FailSelector(container="web")),
    ],
    ids=["all", "handle 0", "largest handle", "container"],
)
async def test_fail_reaches_the_mount(
    run_directory: Path, arguments: dict[str, object], selector: FailSelector
) -> None:
    mount = Mount()
    async with served(mount, run_directory) as client:
        answer = await in_thread(lambda: ask(client.path, {"method": "fail", **arguments}, wait_s=60))
    assert answer == {"failed": 1}
    assert mount.failed == [selector]


async def test_umount_with_open_files_is_refused_and_names_who_has_them(run_directory: Path) -> None:
    mount = Mount()
    mount.openers = [Opener(handle=3, file="pages.img", pid=77, command="runsc-sandbox", container="web")]
    async with served(mount, run_directory) as client:
        with pytest.raises(RelayedError, match=r"runsc-sandbox \(pid 77\) has pages\.img open") as refused:
            await in_thread(partial(client.umount, force=False))
        assert refused.value.exit_code == Exit.REFUSED
        assert refused.value.facts["openers"] == [
            {"handle": 3, "file": "pages.img", "pid": 77, "command": "runsc-sandbox", "container": "web"}
        ]
        await in_thread(partial(client.umount, force=True))
    assert mount.forced == [False, True]


async def test_the_answer_to_an_umount_arrives_though_the_process_is_ending(run_directory: Path) -> None:
    mount = Mount()
    with ControlSocket(run_directory, MOUNTPOINT) as control:
        async with trio.open_nursery() as nursery:
            mount.gone = nursery.cancel_scope.cancel
            nursery.start_soon(control.serve, mount)
            client = MountClient(run_directory, MOUNTPOINT)
            with trio.CancelScope(shield=True):
                await in_thread(partial(client.umount, force=False))


BAD_REQUESTS = {
    "not JSON": b"status\n",
    "not an object": b'["status"]\n',
    "no method": b"{}\n",
    "unknown method": b'{"method": "exec"}\n',
    "method is no text": b'{"method": {"a": 1}}\n',
    "status with an argument": b'{"method": "status", "path": "/etc/passwd"}\n',
    "unknown selector": b'{"method": "fail", "mountpoint": "../.."}\n',
    "handle and container": b'{"method": "fail", "handle": 1, "container": "a"}\n',
    "handle is text": b'{"method": "fail", "handle": "1"}\n',
    "handle is a truth value": b'{"method": "fail", "handle": true}\n',
    "handle below zero": b'{"method": "fail", "handle": -1}\n',
    "handle beyond 64 bits": b'{"method": "fail", "handle": 18446744073709551616}\n',
    "container is empty": b'{"method": "fail", "container": ""}\n',
    "container is a list": b'{"method": "fail", "container": ["a"]}\n',
    "umount without force": b'{"method": "umount"}\n',
    "force is a number": b'{"method": "umount", "force": 1}\n',
    "deeply nested": b"[" * 2000 + b"\n",
    "not UTF-8": b'{"method": "\xff\xfe"}\n',
    "empty line": b"\n",
    "a number too long for Python": b'{"method": "fail", "handle": ' + b"9" * 4000 + b"}\n",
    "too long a line": b'{"method": "status"' + b" " * LINE_MAX_BYTES + b"}\n",
    "no end of line": b"x" * (LINE_MAX_BYTES + 1),
}


@pytest.mark.parametrize("request_bytes", BAD_REQUESTS.values(), ids=BAD_REQUESTS.keys())
async def test_what_is_not_understood_is_answered_with_an_error_and_hurts_nothing(
    run_directory: Path, request_bytes: bytes
) -> None:
    mount = Mount()

    def converse() -> bytes:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(60)
            connection.connect(str(client.path))
            connection.sendall(request_bytes)
            return connection.makefile("rb").readline()

    async with served(mount, run_directory) as client:
        error = json.loads(await in_thread(converse))["error"]
        assert (error["kind"], error["exit_code"]) == ("bad-request", Exit.FAILED)
        assert await in_thread(client.status) == mount.status()
    assert not mount.failed
    assert not mount.forced


async def test_a_bug_in_an_answer_is_an_error_of_that_answer_only(
    run_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with served(Mount(), run_directory) as client:
        with pytest.raises(RelayedError, match="internal error"):
            await in_thread(partial(client.fail, container="bug"))
        assert (await in_thread(client.status))["mountpoint"] == MOUNTPOINT
    assert "ZeroDivisionError" in capsys.readouterr().out


async def test_several_requests_may_come_on_one_connection_in_any_pieces(run_directory: Path) -> None:
    def converse() -> list[bytes]:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(60)
            connection.connect(str(client.path))
            for piece in (b'{"method": "sta', b'tus"}\n{"method":', b' "fail"}\n'):
                connection.sendall(piece)
            answers = connection.makefile("rb")
            return [answers.readline(), answers.readline()]

    async with served(Mount(), run_directory) as client:
        first, second = await in_thread(converse)
    assert json.loads(first)["ok"]["mountpoint"] == MOUNTPOINT
    assert json.loads(second) == {"ok": {"failed": 1}}


async def test_a_client_that_breaks_off_in_the_middle_is_nothing_to_the_next(run_directory: Path) -> None:
    def break_off() -> None:
        for _ in range(CONNECTIONS_MAX + 5):
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(str(client.path))
                connection.sendall(b'{"meth')
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    async with served(Mount(), run_directory) as client:
        await in_thread(break_off)
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert (await in_thread(client.status))["mountpoint"] == MOUNTPOINT


async def test_the_socket_is_for_its_owner_only(run_directory: Path) -> None:
    async with served(Mount(), run_directory) as client:
        assert stat.S_IMODE(client.path.stat().st_mode) == 0o600
        assert stat.S_IMODE(client.path.parent.stat().st_mode) == 0o700
        # Were the modes widened by hand, the peer's user would still decide.
        client.path.chmod(0o666)
        client.path.parent.chmod(0o755)
        run_directory.chmod(0o755)
        program = (
            f"import os, socket; os.setuid(65534); s = socket.socket(socket.AF_UNIX); s.connect({str(client.path)!r})\n"
            's.sendall(b\'{"method": "status"}\\n\'); print(s.recv(1000))'
        )
        asked = await in_thread(
            partial(subprocess.run, [sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
        )
        # Closed without a word, maybe before the line was out.
        assert asked.stdout.strip() == "b''" or "BrokenPipe" in asked.stderr or "ConnectionReset" in asked.stderr


@pytest.mark.parametrize("planted", ["a directory", "a symlink", "the one above", "everybody's"])
def test_a_directory_that_others_can_change_gets_no_socket(run_directory: Path, tmp_path: Path, planted: str) -> None:
    mounts = socket_path(run_directory, MOUNTPOINT).parent
    match planted:
        case "a directory":
            mounts.mkdir()
            os.chown(mounts, 65534, 65534)
        case "a symlink":
            mounts.symlink_to(tmp_path)
            os.chown(mounts, 65534, 65534, follow_symlinks=False)
        case "the one above":
            os.chown(run_directory, 65534, 65534)
        case "everybody's":
            mounts.mkdir()
            mounts.chmod(0o777)
    with pytest.raises(Refused, match=str(run_directory)), ControlSocket(run_directory, MOUNTPOINT):
        pass
    assert list(tmp_path.iterdir()) == []
    assert not mounts.is_dir() or list(mounts.iterdir()) == []


def test_no_descriptor_of_a_socket_is_left(run_directory: Path) -> None:
    with ControlSocket(run_directory, MOUNTPOINT):
        pass
    before = set(os.listdir("/proc/self/fd"))
    with ControlSocket(run_directory, MOUNTPOINT), pytest.raises(Refused), ControlSocket(run_directory, MOUNTPOINT):
        pass
    assert set(os.listdir("/proc/self/fd")) == before


def test_one_process_serves_a_mountpoint_and_a_dead_ones_socket_is_replaced(run_directory: Path) -> None:
    path = socket_path(run_directory, MOUNTPOINT)
    with ControlSocket(run_directory, MOUNTPOINT):
        assert is_served(path)
        with pytest.raises(Refused, match="another streamd process"), ControlSocket(run_directory, MOUNTPOINT):
            pass
    assert not path.exists()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert not is_served(path)
    with pytest.raises(NoServer):
        MountClient(run_directory, MOUNTPOINT).status()
    assert all_statuses(run_directory) == []
    with ControlSocket(run_directory, MOUNTPOINT):
        assert is_served(path)


def test_a_process_that_does_not_answer_is_told_from_a_dead_one(run_directory: Path) -> None:
    bound_but_not_served = ControlSocket(run_directory, MOUNTPOINT)
    with bound_but_not_served as control, pytest.raises(NoAnswer, match=r"did not answer within 0\.05 s"):
        ask(control.path, {"method": "status"}, wait_s=0.05)


ODD_REPLIES = {
    "nothing": b"",
    "half a line": b'{"ok": {',
    "not JSON": b"hello\n",
    "neither ok nor error": b'{"fine": {}}\n',
    "ok is no object": b'{"ok": 3}\n',
    "nested too deep": b"[" * 100_000 + b"\n",
}


@pytest.mark.parametrize("reply", ODD_REPLIES.values(), ids=ODD_REPLIES.keys())
def test_a_reply_that_makes_no_sense_is_no_answer(tmp_path: Path, reply: bytes) -> None:
    path = Path(tempfile.mkdtemp(prefix="streamd-run-")) / "s"

    def server() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1000)
            connection.sendall(reply)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=server)
        thread.start()
        with pytest.raises(NoAnswer):
            ask(path, {"method": "status"}, wait_s=60)
        thread.join()
    shutil.rmtree(path.parent)


@pytest.mark.parametrize(
    ("record", "exit_code", "message"),
    [
        ({"kind": "damaged", "message": "m", "exit_code": 4}, Exit.DAMAGED, "m"),
        ({"kind": "x", "message": "m", "exit_code": 0}, Exit.FAILED, "m"),  # an error never is success
        ({"kind": "x", "message": "m", "exit_code": 99}, Exit.FAILED, "m"),
        ({"kind": "x", "message": "m", "exit_code": "7"}, Exit.FAILED, "m"),
        ({"message": 3}, Exit.FAILED, "no message"),
        ("text", Exit.FAILED, "the other process reported an error that can't be read"),
    ],
)
def test_a_relayed_error_is_an_error_whatever_the_record_says(record: object, exit_code: Exit, message: str) -> None:
    from streamd.daemon.relay import relayed

    error = relayed(record)
    assert (error.exit_code, str(error)) == (exit_code, message)
