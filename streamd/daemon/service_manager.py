"""What the service manager hands us at start, and what we tell it: the protocol of sd_notify(3), without libsystemd.

`take_environment` reads what systemd left in the environment and removes it, so that no child takes it for its own.
`NotifyChannel` sends datagrams to the manager; `Notifier` says what the unit is doing; `fd_store.FdStore` keeps
descriptors with the manager. Without a manager everything here does nothing, and says so by what it returns.

Rules: nothing here waits unless a time-out is given, and a lost notification never ends the daemon: what must arrive
(READY, STATUS) is said again with the next message. Only the process that took the environment speaks: a fork is
silent, because the manager would refuse it anyway (NotifyAccess=main) and log each try.

Needs systemd 246 or later (FDPOLL, BARRIER); from 254 on it tells the store's size (FDSTORE).
"""

import array
import os
import select
import socket
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass

import structlog
import trio

log = structlog.get_logger(__name__)

_FIRST_FD = 3  # SD_LISTEN_FDS_START
# More than any fd store we ask for (`fd_store.FD_STORE_MAX`); a number beyond it is no number of descriptors.
_RECEIVED_MAX = 1 << 16
# Status text is one line of `systemctl status`.
STATUS_MAX_CHARACTERS = 200
# A ping may be lost, and the next one late, before the manager thinks that we hang (sd_notify(3) advises a half).
_PINGS_PER_WATCHDOG = 3
# Without a watchdog: how often something that was lost is said again.
_REPEAT_S = 10.0
_VARIABLES = (
    "NOTIFY_SOCKET",
    "WATCHDOG_PID",
    "WATCHDOG_USEC",
    "LISTEN_PID",
    "LISTEN_PIDFDID",
    "LISTEN_FDS",
    "LISTEN_FDNAMES",
    "FDSTORE",
)


@dataclass(frozen=True, slots=True)
class ManagerEnvironment:
    """What the manager said at start.

    `fd_store_max` None: it didn't say (systemd before 254). `received` has the descriptors that came back, with their
    names, close-on-exec; they are the holder's to close. `problems` says in words what was wrong.
    """

    notify_socket: str | None = None
    watchdog_s: float | None = None
    fd_store_max: int | None = None
    received: tuple[tuple[str, int], ...] = ()
    problems: tuple[str, ...] = ()


def take_environment(environment: MutableMapping[str, str], process_id: int) -> ManagerEnvironment:
    """Read what the manager left for `process_id`, and remove it. Call it once, before descriptors are opened.

    Names are not checked here: they are the manager's account of what a former life of this daemon stored.
    """
    found = {name: environment.pop(name) for name in _VARIABLES if name in environment}
    problems: list[str] = []
    address = found.get("NOTIFY_SOCKET")
    if address is not None and not address.startswith(("/", "@")):
        problems.append("NOTIFY_SOCKET is neither a path nor an abstract socket: the manager is not told anything")
        address = None
    watchdog_us = _number(found, "WATCHDOG_USEC", problems)
    if watchdog_us is not None and found.get("WATCHDOG_PID", str(process_id)) != str(process_id):
        problems.append("the watchdog waits for another process than this one: start streamd without a wrapper")
        watchdog_us = None
    return ManagerEnvironment(
        notify_socket=address,
        watchdog_s=watchdog_us / 1e6 if watchdog_us else None,
        fd_store_max=_number(found, "FDSTORE", problems),
        received=_received(found, process_id, problems),
        problems=tuple(problems),
    )


def _number(found: Mapping[str, str], name: str, problems: list[str]) -> int | None:
    text = found.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 20):
        problems.append(f"{name} is not a number")
        return None
    return int(text)


def _received(found: Mapping[str, str], process_id: int, problems: list[str]) -> tuple[tuple[str, int], ...]:
    count = _number(found, "LISTEN_FDS", problems)
    if not count:
        return ()
    if found.get("LISTEN_PID") != str(process_id):
        # They are open here all the same, and their mounts can't be served: no small thing.
        problems.append("the stored descriptors were handed to another process: start streamd without a wrapper")
        return ()
    if count > _RECEIVED_MAX:
        problems.append(f"LISTEN_FDS is {count}: no such number of descriptors is passed")
        return ()
    names = found.get("LISTEN_FDNAMES", "").split(":")
    received = []
    for index in range(count):
        fd = _FIRST_FD + index
        try:
            os.set_inheritable(fd, False)
        except OSError:
            problems.append(f"stored descriptor {index + 1} of {count} is not open")
            continue
        received.append((names[index] if index < len(names) else "", fd))
    return tuple(received)


class NotifyChannel:
    """Datagrams to the manager; `address` is a path, or an abstract name after `@`; None: there is no manager.

    Only the process with `process_id` speaks, the one that makes this if None.
    """

    def __init__(self, address: str | None, *, process_id: int | None = None) -> None:
        self._address = f"\0{address[1:]}" if address is not None and address.startswith("@") else address
        self._owner = os.getpid() if process_id is None else process_id

    @property
    def is_open(self) -> bool:
        """Whether there is a manager, and this is the process that speaks to it."""
        return self._address is not None and os.getpid() == self._owner

    def send(self, message: str, fds: Sequence[int] = (), *, timeout_s: float = 0.0) -> bool:
        """Send one datagram, with descriptors; false without a manager. The manager gets duplicates.

        A manager that is busy (PID 1 reloads its units) has a full queue after some hundred datagrams, or after ten
        (net.unix.max_dgram_qlen): `timeout_s` is how long to wait for room. Raises: `OSError`, `BlockingIOError`.
        """
        if not self.is_open or self._address is None:
            return False
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        until_s = time.monotonic() + timeout_s
        # A socket a message: it is connected, so that poll(2) can say when the manager has room again.
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
            sender.connect(self._address)
            while True:
                try:
                    sender.sendmsg([message.encode()], ancillary)
                except BlockingIOError:
                    left_s = until_s - time.monotonic()
                    if left_s <= 0:
                        raise
                    _wait(sender.fileno(), select.POLLOUT, left_s)
                else:
                    return True

    def barrier(self, timeout_s: float) -> bool:
        """Wait until the manager has taken in all that was sent before; false when that isn't known in time.

        For the last message before an exit: the manager finds out whose a datagram is by the sender's process, and
        drops what a process that is gone has sent (sd_notify_barrier(3)).
        """
        until_s = time.monotonic() + timeout_s
        ours, theirs = os.pipe()
        try:
            try:
                if not self.send("BARRIER=1", [theirs], timeout_s=timeout_s):
                    return False
            finally:
                os.close(theirs)
            return _wait(ours, 0, max(0.0, until_s - time.monotonic()))
        except OSError:
            return False
        finally:
            os.close(ours)


def _wait(fd: int, events: int, timeout_s: float) -> bool:
    """Wait for events, or for the other end to go (POLLHUP is always reported)."""
    poll = select.poll()
    poll.register(fd, events)
    return bool(poll.poll(timeout_s * 1000))


class Notifier:
    """Says what the unit is doing. Never waits (but for `barrier`), never raises; a lost message is logged once.

    For one thread at a time.
    """

    def __init__(self, channel: NotifyChannel, *, watchdog_s: float | None = None) -> None:
        self._channel = channel
        self._has_watchdog = watchdog_s is not None
        self.interval_s = _REPEAT_S if watchdog_s is None else watchdog_s / _PINGS_PER_WATCHDOG
        self._owed: dict[str, str] = {}  # what was lost and must still be said
        self._is_silent = False

    def ready(self, status: str = "") -> None:
        """Say that start-up is over: `systemctl start` returns now."""
        self._tell(lasting={"READY": "1"} | _status(status))

    def stopping(self, status: str = "") -> None:
        """Say that the daemon is going."""
        self._tell(lasting={"STOPPING": "1"} | _status(status))

    def status(self, text: str) -> None:
        """Set the line that `systemctl status` shows. Cut to one line: a line break would begin another message."""
        self._tell(lasting=_status(text))

    def extend_timeout(self, seconds: float) -> None:
        """Ask for more time for the start or stop that is going on, counted from now."""
        self._tell(passing={"EXTEND_TIMEOUT_USEC": str(round(seconds * 1e6))})

    def ping(self) -> None:
        """Tell the watchdog that we live, and say again what was lost."""
        self._tell(passing={"WATCHDOG": "1"} if self._has_watchdog else {})

    def barrier(self, timeout_s: float) -> bool:
        """Wait until all that was said has arrived (`NotifyChannel.barrier`)."""
        return self._channel.barrier(timeout_s)

    async def keep_alive(self, is_well: Callable[[], bool] = lambda: True) -> None:
        """Ping until cancelled, while `is_well`; run it in the loop whose standstill the watchdog is to notice."""
        while True:
            if is_well():
                self.ping()
            await trio.sleep(self.interval_s)

    def _tell(self, *, lasting: Mapping[str, str] | None = None, passing: Mapping[str, str] | None = None) -> None:
        """Send fields; of those that get lost, the lasting ones are sent again with the next message."""
        self._owed |= lasting or {}
        fields = self._owed | dict(passing or {})
        if not fields or not self._channel.is_open:
            return
        try:
            self._channel.send("\n".join(f"{key}={value}" for key, value in fields.items()))
        except OSError as error:
            if not self._is_silent:
                log.warning("service manager was not told", fields=sorted(fields), reason=error.strerror)
            self._is_silent = True
            return
        self._owed.clear()
        self._is_silent = False


def _status(text: str) -> dict[str, str]:
    """Make the field of a status: one line, printable, short; nothing for an empty text."""
    line = "".join(character if character.isprintable() else " " for character in text[:STATUS_MAX_CHARACTERS])
    return {"STATUS": line} if line else {}
