"""Processes that outlive the wrapper's `create`.

**A keeper** keeps the standard streams that a pod's further container was created with until its `start`, which hands
them to runsc: gVisor takes such a container's streams from `start`, and containerd's runc shim gives them to `create`,
and to `start` a pipe of its own for messages. (Its runsc shim does it the other way round: see `is_captured`.)

**A stand-in** is the process of a container that has finished before the snapshot was taken: containerd learns from its
death that the container has ended, and how. Its record, `answered/ID`, makes front.c send all commands about ID here.

Both are forks that hold nothing else: no descriptors, no directory; and both end when the process that they were
inherited by ends (containerd's shim adopts orphans), so none is left behind.

`socket`, `signal` and `select` are imported where they are needed: most commands don't, and would wait 20 ms for them.
"""

import binascii
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise

from agent.errors import AgentError
from agent.wrapper.record import TYPE_CHECKING, Record

if TYPE_CHECKING:
    import socket

_HAND_OVER_S = 5.0
_SUN_PATH_MAX_BYTES = 107  # unix(7)


class CantKeep(AgentError):
    """A keeper or a stand-in could not be made, or has nothing to give."""


class StandIn(Record):
    """A container that was answered for. `pid` and `start_time` (of proc(5), field 22) are its process: a pid alone may
    be another's by now."""

    container_id: str
    runsc_root: str
    bundle: str
    pid: int
    start_time: str

    def signal(self, number: int) -> bool:
        """Signal its process, or with 0 only look; False when it has ended."""
        import signal

        try:
            process = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        try:
            if _start_time(self.pid) != self.start_time:
                return False
            signal.pidfd_send_signal(process, number)
        finally:
            os.close(process)
        return True


def is_captured(stdout: int, stderr: int) -> bool:
    """Whether what is written there is collected by the caller, for its own messages.

    containerd's shims give one pipe for both then, and two to a container (go-runc, cmdOutput and NewPipeIO; gVisor's
    shim gives such a pipe to the `create` of further containers, and to `start` their streams: pkg/shim/v1/proc).
    """
    try:
        one, other = os.readlink(f"/proc/self/fd/{stdout}"), os.readlink(f"/proc/self/fd/{stderr}")
    except OSError:
        return False
    return one == other and one.startswith("pipe:")


def keep_streams(run_directory: str, runsc_root: str, container_id: str, streams: Sequence[int]) -> None:
    """Keep three descriptors for `take_streams`. Raises: `CantKeep`."""
    import socket

    path = _keeper_path(run_directory, runsc_root, container_id)
    try:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        with suppress(FileNotFoundError):
            os.unlink(path)  # of a container with the same id that was never started
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(path)
        listener.listen(1)
        inode = os.stat(path).st_ino
    except OSError as error:
        raise CantKeep(f"{path}: {error.strerror}") from error
    creator = os.getpid()
    _end_well()
    if os.fork():
        listener.close()
        return
    try:
        _let_go(keep=(listener.fileno(), *streams))
        _until_taken(creator, listener, streams)
    finally:
        with suppress(OSError):
            if os.stat(path).st_ino == inode:
                os.unlink(path)
        os._exit(0)


def take_streams(run_directory: str, runsc_root: str, container_id: str) -> tuple[int, ...] | None:
    """Give the descriptors that are kept for a container; None when none are. Raises: `CantKeep`."""
    import socket

    path = _keeper_path(run_directory, runsc_root, container_id)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_HAND_OVER_S)
            connection.connect(path)
            _, streams, _, _ = socket.recv_fds(connection, 1, 3)
    except (FileNotFoundError, ConnectionRefusedError):
        return None
    except OSError as error:
        raise CantKeep(f"{path}: {error.strerror or error}") from error
    if len(streams) != 3:
        raise CantKeep(f"{path}: the streams were not handed over")
    return tuple(streams)


def stand_in(run_directory: str, container_id: str, runsc_root: str, bundle: str, pid_file: str | None) -> None:
    """Make a container's stand-in, its record, and the pid file that its creator reads. Raises: `CantKeep`."""
    creator = os.getpid()
    _end_well()
    pid = os.fork()
    if pid == 0:
        try:
            _let_go(keep=())
            _until_orphaned(creator)
        finally:
            os._exit(0)
    made = StandIn(container_id, runsc_root, bundle, pid, _start_time(pid))
    path = _record_path(run_directory, container_id)
    try:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        if pid_file is not None:
            with open(pid_file, "w") as file:
                file.write(str(pid))
        with open(f"{path}.{creator}", "w") as file:
            json.dump(made._asdict(), file)
        os.rename(file.name, path)
    except OSError as error:
        made.signal(9)
        raise CantKeep(f"{container_id}: no stand-in: {error.strerror}: {error.filename}") from error


def find_stand_in(run_directory: str, container_id: str, runsc_root: str) -> StandIn | None:
    """Give the stand-in of a container of this root, if it has one."""
    if not container_id or container_id.startswith(".") or "/" in container_id:
        return None
    try:
        with open(_record_path(run_directory, container_id)) as file:
            found = StandIn(**json.load(file))
    except (OSError, ValueError, TypeError):
        return None
    return found if found.runsc_root == runsc_root else None


def forget(run_directory: str, made: StandIn) -> None:
    """Remove a stand-in's record."""
    with suppress(FileNotFoundError):
        os.unlink(_record_path(run_directory, made.container_id))


def _record_path(run_directory: str, container_id: str) -> str:
    return os.path.join(run_directory, "answered", container_id)


def _keeper_path(run_directory: str, runsc_root: str, container_id: str) -> str:
    """Name a keeper's socket: ids may be the same in two roots, as in two namespaces of containerd.

    Raises: `CantKeep`, when a Unix socket can't have that name.
    """
    path = os.path.join(run_directory, "kept", f"{binascii.crc32(runsc_root.encode()):08x}-{container_id}")
    if "/" in container_id or len(os.fsencode(path)) > _SUN_PATH_MAX_BYTES:
        raise CantKeep(f"{path} can't be a Unix socket's name")
    return path


def _start_time(pid: int) -> str:
    """Give when a process has started, as the kernel counts it; empty for one that has ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]


def _end_well() -> None:
    """Make SIGTERM a good end; before a fork, since it may come before the new process has done anything."""
    import signal

    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _let_go(keep: Sequence[int]) -> None:
    """Let go of everything that was inherited."""
    os.setsid()
    os.chdir("/")
    bounds = sorted({*keep, -1, os.sysconf("SC_OPEN_MAX")})
    for lower, upper in pairwise(bounds):
        os.closerange(lower + 1, upper)


def _until_taken(creator: int, listener: "socket.socket", streams: Sequence[int]) -> None:
    """Hand the streams to the first that connects; or until nobody can want them any more."""
    import socket

    if _until_orphaned(creator, listener.fileno(), streams) == listener.fileno():
        connection, _ = listener.accept()
        connection.settimeout(_HAND_OVER_S)
        socket.send_fds(connection, [b"."], list(streams))


def _until_orphaned(creator: int, readable: int | None = None, broken: Sequence[int] = ()) -> int | None:
    """Wait until `readable` is that or one of `broken` has lost its other end, and give which; or, None, until the
    process has ended that adopted this one after its creator's end."""
    import select

    events = select.poll()
    if readable is not None:
        events.register(readable, select.POLLIN)
    for fd in broken:
        events.register(fd, 0)
    while True:
        parent = os.getppid()
        try:
            watched = os.pidfd_open(parent)
        except ProcessLookupError:  # it ended just now, and another one has adopted us
            continue
        except OSError:  # 0, one outside of our namespace: nobody to watch
            return events.poll()[0][0]
        events.register(watched, select.POLLIN)
        fd = events.poll()[0][0]
        if fd != watched:
            return fd
        if parent != creator:
            return None
        events.unregister(watched)
        os.close(watched)
