"""A service like the daemon's supervisor, as far as systemd is concerned: keeper.py PLACE.

It takes back what its former life stored, and says what that was: one JSON object a life in PLACE/lives. When nothing
came back it mounts a FUSE file system, stores the descriptor and the kernel's INIT message, and starts a worker. Files
in PLACE change what it does. `broken`: it fails at start; `look`: it only looks; the others: see there.
"""

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import trio

from streamd.daemon.fd_store import FD_STORE_MAX, NAME_MAX_CHARACTERS, FdStore, FdStoreFull
from streamd.daemon.memfds import bytes_of, memfd_of
from streamd.daemon.service_manager import Notifier, NotifyChannel, take_environment
from streamd.daemon.unit_check import check_unit
from streamd.fuse import mountinfo, mounting
from streamd.fuse.mount_paths import open_mountpoint

_REQUEST_BYTES = (1 << 20) + 8192
_MOUNTPOINT = Path("/run/streamd-test")
_RESTRICTIONS = ("CapBnd:", "NoNewPrivs:", "Seccomp:")


def main(place: Path) -> None:
    """Live once."""
    if (place / "broken").exists():
        with (place / "failures").open("a") as failures:
            failures.write("x\n")
        sys.exit(1)
    environment = take_environment(os.environ, os.getpid())
    channel = NotifyChannel(environment.notify_socket)
    notifier = Notifier(channel, watchdog_s=environment.watchdog_s)
    store = FdStore(channel, environment.received, capacity=environment.fd_store_max)
    taken = store.take()
    life: dict[str, object] = {
        "pid": os.getpid(),
        "problems": environment.problems,
        "findings": [finding.kind for finding in check_unit(environment)],
        "names": {name: len(fds) for name, fds in taken.items()},
        "is_inheritable": any(os.get_inheritable(fd) for fds in taken.values() for fd in fds),
        "left_in_environment": [
            name for name in os.environ if name in ("NOTIFY_SOCKET", "LISTEN_FDS", "WATCHDOG_USEC")
        ],
        "first_namespace": _link("/proc/1/ns/mnt"),
        "namespace": _link("/proc/self/ns/mnt"),
        "units_mounts": [entry.mountpoint for entry in mountinfo.read() if mounting.is_own(entry)],
        "restrictions": [line for line in _text("/proc/self/status").splitlines() if line.startswith(_RESTRICTIONS)],
        "first_mounts": _text("/proc/1/mountinfo").count(mounting.FILESYSTEM),
    }
    if "fuse-1" in taken:
        life |= _taken_back(taken)
    elif not (place / "look").exists():
        life |= _begun(store)
    if (place / "fill").exists() and "x" * NAME_MAX_CHARACTERS not in taken:
        life |= _filled(store)
    if (place / "remove").exists():
        store.remove("bare")
    if (place / "twice").exists() and taken:
        store.store("again", taken["fuse-1"])
    if (place / "apart").exists() and not taken:
        life |= _set_apart(life["worker"])
    if (place / "serve").exists():
        life |= _served(json.loads((place / "serve").read_text()))
    life["flushed"] = store.flush(10)
    life["count"] = store.count
    with (place / "lives").open("a") as lives:
        lives.write(json.dumps(life) + "\n")
    notifier.ready(f"life of {os.getpid()}\nWATCHDOG=trigger")
    trio.run(_wait_for_end, notifier)
    notifier.stopping()
    notifier.barrier(5)


async def _wait_for_end(notifier: Notifier) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(notifier.keep_alive)
        with trio.open_signal_receiver(signal.SIGTERM) as signals:
            async for _ in signals:
                nursery.cancel_scope.cancel()
                return


def _link(path: str) -> str:
    with suppress(PermissionError):
        return os.readlink(path)
    return ""


def _text(path: str) -> str:
    with suppress(PermissionError):
        return Path(path).read_text()
    return ""


def _begun(store: FdStore) -> dict[str, object]:
    """Mount, store, and start a worker that has the descriptor too."""
    _MOUNTPOINT.mkdir(exist_ok=True)
    directory = open_mountpoint(str(_MOUNTPOINT))
    mount = mounting.mount(directory)
    os.close(directory.fd)
    message = os.read(mount.fd, _REQUEST_BYTES)  # the kernel's INIT
    worker = subprocess.Popen(["sleep", "1000"], pass_fds=[mount.fd])
    state = json.dumps({"worker": worker.pid, "init": hashlib.sha256(message).hexdigest()}).encode()
    bare = os.open(mounting.DEVICE, os.O_RDWR | os.O_CLOEXEC)  # never mounted: it polls as an error
    for name, fds in (
        ("fuse-1", [mount.fd]),
        ("init-1", [memfd_of(message)]),
        ("state-1", [memfd_of(state)]),
        ("bare", [bare]),
    ):
        assert store.store(name, fds)
    return {"worker": worker.pid}


def _taken_back(taken: dict[str, list[int]]) -> dict[str, object]:
    state = json.loads(bytes_of(taken["state-1"][0]))
    message = bytes_of(taken["init-1"][0])
    worker = int(state["worker"])
    lives = False
    with suppress(ProcessLookupError):
        os.kill(worker, 0)
        lives = True
    return {
        "worker": worker,
        "worker_lives": lives,
        "same_init": hashlib.sha256(message).hexdigest() == state["init"],
        "connection": _connection_state(taken["fuse-1"][0]),
    }


def _connection_state(fuse: int) -> str:
    """Say how a read of the device ends: EAGAIN while it is mounted, ENODEV once it is not."""
    os.set_blocking(fuse, False)
    try:
        os.read(fuse, _REQUEST_BYTES)
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return "request"


def _filled(store: FdStore) -> dict[str, object]:
    """Fill the store, with names as long as they may be; one more must be refused."""
    name = "x" * NAME_MAX_CHARACTERS

    def memfds(count: int) -> Sequence[int]:
        return [memfd_of(b"%d" % number) for number in range(count)]

    store.store(name, memfds(FD_STORE_MAX - store.count))
    try:
        store.store(name, memfds(1))
    except FdStoreFull:
        return {"full": True}
    return {"full": False}


def _set_apart(worker: object) -> dict[str, object]:
    """Move the worker into a cgroup of its own below the unit's."""
    unified = next(line for line in _text("/proc/self/cgroup").splitlines() if line.startswith("0::/"))
    cgroup = Path("/sys/fs/cgroup", unified.removeprefix("0::/"), "worker-1")
    cgroup.mkdir()
    (cgroup / "cgroup.procs").write_text(str(worker))
    return {"cgroup": str(cgroup)}


def _served(what: dict[str, str]) -> dict[str, object]:
    """Serve a snapshot by a child process, and read it: what the unit forbids would show here."""
    mountpoint = Path(what["mountpoint"])
    command = [sys.executable, "-m", "streamd.cli", "--config", what["config"], "mount", what["url"], str(mountpoint)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        return {"mount_failed": done.stderr}
    with (mountpoint / "pages.img").open("rb") as pages:
        digest = hashlib.file_digest(pages, "sha256").hexdigest()
    return {"digest": digest}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
