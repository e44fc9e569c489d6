"""Getting workers: the supervisor's side of the spawner, which is started when it is needed and not there."""

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass

import structlog
import trio

from streamd.daemon.wire import Wire, wire_pair
from streamd.errors import StreamdError

log = structlog.get_logger()

# The first one waits for an interpreter with our imports, on a node that may be busy.
_START_S = 60.0
# One that has answered before forks within milliseconds; more than one image may wait for it.
_HANG_S = 5.0
_TRIES = 2
# One that was killed is gone within milliseconds, unless it waits for a disk: everything else waits for it meanwhile.
_DEATH_S = 1.0
# One that ends at once, each time, must not take a core.
_AGAIN_S = 1.0


@dataclass(slots=True, eq=False)
class WorkerProcess:
    """A worker: its process, by number and by descriptor (which polls as readable once it is gone), and its wire."""

    pid: int
    process_fd: int
    wire: Wire

    async def gone(self) -> None:
        """Wait until the process and all its threads have ended: then nobody but us reads its descriptors."""
        await trio.lowlevel.wait_readable(self.process_fd)

    def signal(self, number: int) -> None:
        """Send a signal; nothing happens when it has ended."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.process_fd, number)

    def close(self) -> None:
        """Let go of the descriptors."""
        trio.lowlevel.notify_closing(self.process_fd)
        os.close(self.process_fd)
        self.wire.close()


class Spawner:
    """Where workers come from; state of the Trio thread."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._wire: Wire | None = None
        self._has_answered = False
        self._one_at_a_time = trio.Lock()

    def start(self) -> None:
        """Have it ready for the first that is wanted."""
        ours, its = wire_pair()
        with its:
            its.set_inheritable(True)
            self._process = subprocess.Popen(
                # Without the columns of its lines, which only mark the place in tracebacks, it needs a megabyte less.
                [sys.executable, "-X", "no_debug_ranges", "-m", "streamd.daemon.spawner", str(its.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[its.fileno()],
            )
        self._wire = Wire(ours)
        self._has_answered = False

    async def keep(self) -> None:
        """Start it anew whenever it has ended, so that the next takeover needn't wait for its imports."""
        while True:
            process = self._process
            if process is not None:
                process_fd = os.pidfd_open(process.pid)
                try:
                    await trio.lowlevel.wait_readable(process_fd)
                finally:
                    os.close(process_fd)
                async with self._one_at_a_time:
                    if self._process is process:
                        log.warning("the spawner has ended and is started anew", pid=process.pid)
                        self.end()
                        self.start()
            await trio.sleep(_AGAIN_S)

    async def spawn(self) -> WorkerProcess:
        """Give a new worker. Raises: `StreamdError`."""
        async with self._one_at_a_time:
            for _ in range(_TRIES):
                if self._wire is None:
                    self.start()
                ours, its = wire_pair()
                try:
                    worker = await self._ask(its)
                except BaseException:
                    ours.close()
                    raise
                finally:
                    its.close()
                if worker is not None:
                    pid, process_fd = worker
                    return WorkerProcess(pid, process_fd, Wire(ours))
                ours.close()
                log.warning("the spawner has ended, or hangs, and is started anew")
                self.end()
        raise StreamdError("no worker can be started: the spawner ends at once, or hangs; the log before this has more")

    async def _ask(self, its: socket.socket) -> tuple[int, int] | None:
        """Have one made; None when there is nobody to make it, or it doesn't answer. Raises: `StreamdError`."""
        assert self._wire is not None
        if not self._wire.send_nowait({"do": "spawn"}, [its.fileno()]):
            return None
        answer = None
        # Shielded: an answer that nobody takes would be the next one's.
        with trio.move_on_after(_HANG_S if self._has_answered else _START_S, shield=True):
            answer = await self._wire.receive()
        if answer is None:
            return None
        self._has_answered = True
        message, fds = answer
        if "error" in message or not fds:
            raise StreamdError(f"no worker could be started: {message.get('error', 'no answer')}")
        return int(message["pid"]), fds[0]

    def end(self) -> None:
        """End the spawner; workers live on."""
        if self._wire is not None:
            self._wire.close()
            self._wire = None
        if self._process is not None:
            self._process.kill()
            try:
                self._process.wait(_DEATH_S)
            except subprocess.TimeoutExpired:  # it waits for a disk; subprocess reaps it some time later
                log.warning("the spawner doesn't end, and is left to itself", pid=self._process.pid)
            self._process = None
