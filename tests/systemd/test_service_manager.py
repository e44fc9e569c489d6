"""The protocol of sd_notify, against a socket that stands in for the manager's (the real one: test_real_systemd.py)."""

import array
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import structlog.testing
import trio
import trio.testing

from streamd.daemon import service_manager
from streamd.daemon.service_manager import ManagerEnvironment, Notifier, NotifyChannel, take_environment

_ROOT = Path(__file__).resolve().parents[2]


class StandIn:
    """The manager's end of the socket; descriptors that it gets are closed at the end."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(f"\0{address[1:]}" if address.startswith("@") else address)
        self._socket.settimeout(10)
        self.fds: list[int] = []

    def message(self) -> str:
        """Receive one message, and keep its descriptors."""
        data, fds, _flags, _address = socket.recv_fds(self._socket, 8192, 253)
        self.fds += fds
        return data.decode()

    def messages(self) -> list[str]:
        """Receive all that is there."""
        self._socket.setblocking(False)
        found = []
        with suppress(BlockingIOError):
            while True:
                found.append(self.message())
        self._socket.settimeout(10)
        return found

    def fill(self) -> None:
        """Have the queue full, as that of a manager that is busy."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
            sender.connect(self._socket.getsockname())
            with suppress(BlockingIOError):
                while True:
                    sender.send(b"X=1")

    def close(self) -> None:
        """Close everything."""
        self._socket.close()
        for fd in self.fds:
            os.close(fd)


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StandIn]:
    """Listen as a manager."""
    address = str(tmp_path / "notify") if request.param == "path" else f"@streamd-test-{os.getpid()}-{tmp_path.name}"
    listening = StandIn(address)
    yield listening
    listening.close()


# --- What is in the environment ---


def test_nothing_is_there_without_a_manager() -> None:
    assert take_environment({"PATH": "/bin"}, 7) == ManagerEnvironment()


def test_the_environment_is_read_and_removed() -> None:
    environment = {
        "PATH": "/bin",
        "NOTIFY_SOCKET": "/run/systemd/notify",
        "WATCHDOG_USEC": "30000000",
        "WATCHDOG_PID": "7",
        "FDSTORE": "2048",
        "LISTEN_PID": "7",
        "LISTEN_FDS": "0",
        "LISTEN_FDNAMES": "",
        "LISTEN_PIDFDID": "99",
    }
    assert take_environment(environment, 7) == ManagerEnvironment(
        notify_socket="/run/systemd/notify", watchdog_s=30.0, fd_store_max=2048
    )
    assert environment == {"PATH": "/bin"}


@pytest.mark.parametrize(
    ("variables", "what"),
    [
        ({"NOTIFY_SOCKET": "vsock:2:1234"}, "NOTIFY_SOCKET"),
        ({"NOTIFY_SOCKET": ""}, "NOTIFY_SOCKET"),
        ({"WATCHDOG_USEC": "soon"}, "WATCHDOG_USEC"),
        ({"WATCHDOG_USEC": "1000", "WATCHDOG_PID": "8"}, "watchdog"),
        ({"FDSTORE": "-1"}, "FDSTORE"),
        ({"FDSTORE": "٣"}, "FDSTORE"),
        ({"LISTEN_FDS": "x", "LISTEN_PID": "7"}, "LISTEN_FDS"),
        ({"LISTEN_FDS": "1", "LISTEN_PID": "8"}, "handed to another process"),
        ({"LISTEN_FDS": "1"}, "handed to another process"),
        ({"LISTEN_FDS": "1000000000000", "LISTEN_PID": "7"}, "LISTEN_FDS"),
    ],
)
def test_what_does_not_add_up_is_said_and_left_aside(variables: dict[str, str], what: str) -> None:
    found = take_environment(dict(variables), 7)
    assert [what in problem for problem in found.problems] == [True]
    assert found == ManagerEnvironment(problems=found.problems)


def test_a_watchdog_without_a_process_is_ours() -> None:
    assert take_environment({"WATCHDOG_USEC": "2000000"}, 7).watchdog_s == 2.0


_CHILD = """
import os, sys
from streamd.daemon.service_manager import take_environment
os.dup2(os.open("/dev/null", os.O_RDONLY), 50)
os.closerange(3, 50)
os.dup2(50, 3, inheritable=True), os.dup2(50, 4, inheritable=True)
found = take_environment({"LISTEN_PID": "7", "LISTEN_FDS": sys.argv[1], "LISTEN_FDNAMES": sys.argv[2]}, 7)
print((found.received, [os.get_inheritable(fd) for _name, fd in found.received], len(found.problems)))
"""


def _with_two_descriptors(count: int, names: str) -> str:
    """Have descriptors 3 and 4 in a process of its own, and give what `take_environment` makes of them."""
    command = [sys.executable, "-c", _CHILD, str(count), names]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60, cwd=_ROOT).stdout.strip()


def test_descriptors_get_their_names_and_are_not_inherited() -> None:
    assert _with_two_descriptors(2, "a:b") == repr(((("a", 3), ("b", 4)), [False, False], 0))


def test_a_descriptor_without_a_name_has_an_empty_one() -> None:
    assert _with_two_descriptors(2, "a") == repr(((("a", 3), ("", 4)), [False, False], 0))


def test_a_descriptor_that_is_not_open_is_left_out_and_said() -> None:
    assert _with_two_descriptors(3, "a:b:c") == repr(((("a", 3), ("b", 4)), [False, False], 1))


# --- What is told ---


def test_messages_are_those_of_the_protocol(manager: StandIn) -> None:
    notifier = Notifier(NotifyChannel(manager.address), watchdog_s=30)
    notifier.extend_timeout(1.5)
    notifier.ready("3 images")
    notifier.status("4 images")
    notifier.ping()
    notifier.stopping()
    assert manager.messages() == [
        "EXTEND_TIMEOUT_USEC=1500000",
        "READY=1\nSTATUS=3 images",
        "STATUS=4 images",
        "WATCHDOG=1",
        "STOPPING=1",
    ]


def test_without_a_watchdog_there_are_no_pings(manager: StandIn) -> None:
    Notifier(NotifyChannel(manager.address)).ping()
    assert manager.messages() == []


def test_a_status_is_one_short_line(manager: StandIn) -> None:
    """A name from outside can't smuggle another field in."""
    Notifier(NotifyChannel(manager.address)).status("evil\nFDSTOREREMOVE=1\0\x1b[31m\u2028" + "x" * 1000)
    (message,) = manager.messages()
    assert message.startswith("STATUS=evil FDSTOREREMOVE=1  [31m xxx")
    assert len(message) == len("STATUS=") + service_manager.STATUS_MAX_CHARACTERS
    assert message.isprintable()


def test_what_was_lost_is_said_with_the_next_message_and_logged_once(tmp_path: Path) -> None:
    address = str(tmp_path / "notify")
    notifier = Notifier(NotifyChannel(address), watchdog_s=30)
    with structlog.testing.capture_logs() as logs:
        notifier.ready("one")  # nobody listens
        notifier.status("two")
        notifier.ping()
    assert [entry["event"] for entry in logs] == ["service manager was not told"]
    manager = StandIn(address)
    try:
        notifier.ping()
        notifier.ping()
        assert manager.messages() == ["READY=1\nSTATUS=two\nWATCHDOG=1", "WATCHDOG=1"]
    finally:
        manager.close()
    with structlog.testing.capture_logs() as logs:
        notifier.ping()  # another outage, another line
    assert len(logs) == 1


def test_a_full_queue_is_not_waited_for(manager: StandIn) -> None:
    manager.fill()
    notifier = Notifier(NotifyChannel(manager.address), watchdog_s=30)
    with structlog.testing.capture_logs() as logs:
        notifier.ready()
    assert len(logs) == 1
    assert set(manager.messages()) == {"X=1"}
    notifier.ping()
    assert manager.messages() == ["READY=1\nWATCHDOG=1"]


def test_nobody_is_told_anything_without_a_manager() -> None:
    channel = NotifyChannel(None)
    notifier = Notifier(channel, watchdog_s=30)
    with structlog.testing.capture_logs() as logs:
        notifier.ready("x")
        notifier.ping()
    assert logs == []
    assert not notifier.barrier(5)
    assert not channel.send("X=1")


def test_another_process_is_silent(manager: StandIn) -> None:
    """A fork has the channel, and another id."""
    channel = NotifyChannel(manager.address, process_id=os.getppid())
    Notifier(channel).ready()
    assert not channel.is_open
    assert not channel.barrier(5)
    assert manager.messages() == []


def test_a_send_waits_for_room_as_long_as_it_may(manager: StandIn) -> None:
    manager.fill()
    channel = NotifyChannel(manager.address)
    with pytest.raises(BlockingIOError):
        channel.send("LATE=1", timeout_s=0.05)
    got: list[str] = []

    def read_on() -> None:
        while "LATE=1" not in got:
            got.append(manager.message())

    reader = threading.Thread(target=read_on)
    reader.start()
    assert channel.send("LATE=1", timeout_s=10)
    reader.join(10)
    assert got[-1] == "LATE=1"


# --- The barrier ---


def test_a_barrier_ends_when_the_manager_closes_its_descriptor(manager: StandIn) -> None:
    channel = NotifyChannel(manager.address)
    channel.send("X=1")
    got: list[str] = []

    def read_on() -> None:
        got.extend([manager.message(), manager.message()])
        (fd,) = manager.fds
        manager.fds.clear()
        os.close(fd)

    reader = threading.Thread(target=read_on)
    reader.start()
    assert channel.barrier(10)
    reader.join(10)
    assert got == ["X=1", "BARRIER=1"]  # alone in its message, or systemd doesn't take it


def test_a_barrier_ends_when_its_time_is_up(manager: StandIn) -> None:
    began_s = time.monotonic()
    assert not NotifyChannel(manager.address).barrier(0.05)
    assert time.monotonic() - began_s < 5
    manager.fill()
    assert not NotifyChannel(manager.address).barrier(0.05)


def test_barriers_leave_no_descriptor_behind(manager: StandIn) -> None:
    before = os.listdir("/proc/self/fd")
    for channel in (NotifyChannel(manager.address), NotifyChannel("/nobody/listens"), NotifyChannel(None)):
        channel.barrier(0)
    manager.messages()
    for fd in manager.fds:
        os.close(fd)
    manager.fds.clear()
    assert os.listdir("/proc/self/fd") == before


# --- The watchdog's loop ---


async def test_the_loop_pings_three_times_a_watchdog_while_all_is_well(
    manager: StandIn, autojump_clock: trio.testing.MockClock
) -> None:
    notifier = Notifier(NotifyChannel(manager.address), watchdog_s=30)
    is_well = True
    async with trio.open_nursery() as nursery:
        nursery.start_soon(notifier.keep_alive, lambda: is_well)
        await trio.sleep(29)
        assert manager.messages() == ["WATCHDOG=1"] * 3
        is_well = False
        await trio.sleep(60)
        assert manager.messages() == []
        nursery.cancel_scope.cancel()


async def test_the_loop_says_again_what_was_lost_without_a_watchdog_too(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    notifier = Notifier(NotifyChannel(str(tmp_path / "notify")))
    with structlog.testing.capture_logs():
        notifier.ready()
    manager = StandIn(str(tmp_path / "notify"))
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(notifier.keep_alive)
            await trio.sleep(25)
            nursery.cancel_scope.cancel()
        assert manager.messages() == ["READY=1"]
    finally:
        manager.close()


def test_descriptors_come_with_the_message(manager: StandIn) -> None:
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 64
    reading, writing = os.pipe()
    try:
        assert NotifyChannel(manager.address).send("FDSTORE=1", array.array("i", [reading]))
        assert manager.messages() == ["FDSTORE=1"]
        os.write(writing, b"x")
        assert os.read(manager.fds[0], 1) == b"x"
    finally:
        os.close(reading)
        os.close(writing)
