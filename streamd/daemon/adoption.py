"""What of an image outlives the supervisor, in systemd's fd store, and comes back with the next one.

By name, `ID` being the image's id and N a number that grows (a value that changes is stored under a new name before
its old one is removed, `fd_store.py`). One descriptor a name: systemd gives several of one name back in any order.

    ID.device.N    the connection; of a warm image, what is bound (its lock lives with it)
    ID.state.N     a memfd with `MountState` as JSON
    ID.snapshot.N  a memfd with the pinned snapshot (`keepsake.py`)
    ID.wire.N      the way to the worker
    ID.process.N   the worker's process (a pidfd)
    node.notes     a memfd of what isn't an image's (`notes.py`)

An image of which only a part came back is not lost: without its worker's two, the worker is found gone or made so,
and replaced. Without one of the first three nothing can be done; its worker serves on until the mount ends.
"""

import base64
import json
import os
import re
import select
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import structlog

from streamd.daemon.fd_store import FdStore, FdStoreError
from streamd.daemon.life import REAP_S, Life
from streamd.daemon.memfds import BadMemfd, bytes_of, memfd_of
from streamd.daemon.notes import Notes
from streamd.daemon.spawning import WorkerProcess
from streamd.daemon.wire import Wire
from streamd.fuse.binding import BindMount
from streamd.fuse.mounting import FuseMount

log = structlog.get_logger()

_NAME = re.compile(r"([0-9a-f]{32})\.(device|state|snapshot|wire|process)\.(\d{1,9})", re.ASCII)
_NOTES = "node.notes"
_OF_MOUNT = ("device", "state", "snapshot")
_OF_WORKER = ("wire", "process")


@dataclass(frozen=True, slots=True)
class _Stored:
    """A descriptor that came back."""

    number: int
    name: str
    fd: int


@dataclass(frozen=True, slots=True)
class MountState:
    """What the next supervisor must know of a mount.

    `init`: the kernel's first request, base64, empty for a bind; `bind_id`: the number of a bind, None for FUSE.
    """

    snapshot_url: str
    tenant: str
    prefetch: str
    credentials: Mapping[str, Any] | None
    mountpoint: str
    device: tuple[int, int]
    created_s: float
    restarts: int
    version: str
    init: str
    bind_id: int | None = None

    def first_request(self) -> bytes:
        """Give the kernel's first request."""
        return base64.b64decode(self.init)


@dataclass(slots=True)
class Kept:
    """What came back of one image. `worker`: the way to its worker, if that lives."""

    image_id: str
    state: MountState
    device_fd: int
    keepsake_fd: int
    worker: WorkerProcess | None

    def mount(self) -> FuseMount | BindMount:
        """Give the mount, which takes over the descriptor."""
        state = self.state
        if state.bind_id is None:
            return FuseMount(self.device_fd, state.mountpoint, state.device)
        return BindMount(self.device_fd, state.mountpoint, state.device, state.bind_id)


class FdKeeper:
    """Keeps in an fd store, where there is one. An error costs the restart, never the mount."""

    def __init__(self, store: FdStore, *, version: str) -> None:
        self._store = store
        self._version = version
        self._names: dict[str, dict[str, str]] = {}
        self._numbers = 0
        self._notes_fd: int | None = None

    @property
    def is_there(self) -> bool:
        """Whether anything is kept."""
        return self._store.is_there

    def keep_mount(self, life: Life) -> None:
        """Keep the mount's descriptor and what is known of it; to be called again when that has changed."""
        image, mount = life.image, life.mount
        assert mount is not None
        state = MountState(
            snapshot_url=image.snapshot_url,
            tenant=image.tenant,
            prefetch=image.prefetch.value,
            credentials=image.credentials,
            mountpoint=mount.mountpoint,
            device=mount.device,
            created_s=image.created_s,
            restarts=image.restarts,
            version=self._version,
            init=base64.b64encode(life.init).decode(),
            bind_id=mount.mount_id if isinstance(mount, BindMount) else None,
        )
        state_fd = memfd_of(json.dumps(asdict(state)).encode(), "mount")
        try:
            parts = {"state": state_fd}
            # What doesn't change is kept once: an open file under a second name is dropped (`fd_store.py`).
            if "device" not in self._names.get(image.id, {}):
                parts |= {"device": mount.fd, "snapshot": life.keepsake_fd}
            self._keep(image.id, parts)
        finally:
            os.close(state_fd)

    def keep_worker(self, life: Life) -> None:
        """Keep the way to the worker that serves now, in place of the last one's."""
        assert life.worker is not None
        self._keep(life.image.id, {"wire": life.worker.wire.fileno(), "process": life.worker.process_fd})

    def forget(self, life: Life) -> None:
        """Keep nothing of it any more."""
        for name in self._names.pop(life.image.id, {}).values():
            self._remove(name)

    def _keep(self, image_id: str, parts: Mapping[str, int]) -> None:
        self._numbers += 1
        names = self._names.setdefault(image_id, {})
        former = [names[part] for part in parts if part in names]
        try:
            for part, fd in parts.items():
                name = f"{image_id}.{part}.{self._numbers}"
                self._store.store(name, [fd])
                names[part] = name
        except (FdStoreError, OSError) as error:
            log.warning("a restart would lose this image's mount", image=image_id, reason=str(error))
            return
        for name in former:
            self._remove(name)

    def _remove(self, name: str) -> None:
        try:
            self._store.remove(name)
        except (FdStoreError, ValueError) as error:
            log.warning("the fd store keeps what is not needed any more", name=name, reason=str(error))

    def take(self) -> list[Kept]:
        """Give what the last supervisor has left; what makes no sense is removed, logged."""
        found: dict[str, dict[str, _Stored]] = {}
        for name, fds in self._store.take().items():
            if name == _NOTES and len(fds) == 1:
                self._notes_fd = fds[0]
                continue
            match = _NAME.fullmatch(name)
            if match is None or len(fds) != 1:
                self._drop(name, fds)
                continue
            image_id, part, number = match[1], match[2], int(match[3])
            self._numbers = max(self._numbers, number)
            parts = found.setdefault(image_id, {})
            other = parts.get(part)
            if other is not None and other.number > number:
                self._drop(name, fds)
                continue
            if other is not None:
                self._drop(other.name, [other.fd])
            parts[part] = _Stored(number, name, fds[0])
        return [kept for image_id, parts in found.items() if (kept := self._kept(image_id, parts)) is not None]

    def open_notes(self) -> Notes | None:
        """Give the notes of the last supervisor, or new ones; after `take`. None without a store. Raises: `OSError`."""
        if not self.is_there:
            return None
        if self._notes_fd is not None:
            try:
                return Notes(self._notes_fd)
            except BadMemfd as error:
                log.warning("what the last supervisor has noted is lost", reason=str(error))
                self._drop(_NOTES, [self._notes_fd])
        notes = Notes.make()
        try:
            self._store.store(_NOTES, [notes.fd])
        except (FdStoreError, OSError) as error:
            log.warning("a restart would forget a drain, and request ids", reason=str(error))
        return notes

    def _kept(self, image_id: str, parts: dict[str, _Stored]) -> Kept | None:
        state = self._state(parts["state"].fd) if all(part in parts for part in _OF_MOUNT) else None
        if state is None:
            for stored in parts.values():
                self._drop(stored.name, [stored.fd])
            log.warning("an image of the last life can't be taken over", image=image_id)
            return None
        os.close(parts["state"].fd)
        self._names[image_id] = {part: stored.name for part, stored in parts.items()}
        worker = _living({part: parts[part].fd for part in _OF_WORKER if part in parts})
        return Kept(image_id, state, parts["device"].fd, parts["snapshot"].fd, worker)

    def _state(self, fd: int) -> MountState | None:
        try:
            values = json.loads(bytes_of(fd))
            return MountState(**{**values, "device": tuple(values["device"])})
        except (BadMemfd, ValueError, TypeError, LookupError) as error:
            log.warning("what is known of a mount can't be read", reason=str(error))
            return None

    def _drop(self, name: str, fds: Sequence[int]) -> None:
        for fd in fds:
            os.close(fd)
        self._remove(name)


def _living(fds: Mapping[str, int]) -> WorkerProcess | None:
    """Take up the wire and the process of a worker that lives; one that can't be spoken to is ended.

    There must never be two readers of one connection.
    """
    process_fd, wire_fd = fds.get("process"), fds.get("wire")
    if process_fd is not None and not _is_gone(process_fd, 0.0):
        if wire_fd is not None:
            return WorkerProcess(_pid(process_fd), process_fd, Wire(socket.socket(fileno=wire_fd)))
        signal.pidfd_send_signal(process_fd, signal.SIGKILL)
        if not _is_gone(process_fd, REAP_S):
            log.warning("a worker of the last life can't be ended", pid=_pid(process_fd))
    for fd in fds.values():
        os.close(fd)
    return None


def _is_gone(process_fd: int, wait_s: float) -> bool:
    poll = select.poll()
    poll.register(process_fd, select.POLLIN)
    return bool(poll.poll(wait_s * 1000))


def _pid(process_fd: int) -> int:
    """Give the number of a process, 0 when it can't be seen (pidfd_open(2))."""
    with open(f"/proc/self/fdinfo/{process_fd}") as facts:
        for line in facts:
            name, _, value = line.partition(":")
            if name == "Pid":
                return max(0, int(value))
    return 0
