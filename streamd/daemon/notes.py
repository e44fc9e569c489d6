"""What the supervisor knows beside its mounts, and the next one must know whenever it ends: a drain, and request ids.

It is noted in a memfd that lies in systemd's fd store from the start (`adoption.py`): the manager needn't hear of a
change, and what is noted is there also when this process is killed. It ends with that store: by a `systemctl stop`, or
with the machine. Without a store it is this process's.

A request id comes back with its image. One whose image is gone, or was never served, is forgotten: who sends that
request again has it made good, since nobody knows any more what became of it.
"""

import errno
import fcntl
import os
import struct
from collections.abc import Container

import msgspec
import structlog

from streamd.daemon.api.idempotency import RequestMemory
from streamd.daemon.memfds import BadMemfd, new_memfd

log = structlog.get_logger()

# Two places take turns, so that one is always whole; the head, written last and in one piece, says which one counts.
_HEAD = struct.Struct("<II")  # where, how many bytes
_HEAD_BYTES = 4096
# 4096 request ids of 64 characters, each with a digest and an image, are 0.6 MB.
PLACE_BYTES = 1 << 20
_BYTES = _HEAD_BYTES + 2 * PLACE_BYTES
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class Noted(msgspec.Struct, frozen=True, kw_only=True):
    """What is noted. `requests`: by id, the digest and the image; who was used longest ago comes first."""

    is_draining: bool = False
    request_key: bytes = b""
    requests: dict[str, tuple[bytes, str]] = msgspec.field(default_factory=dict)


class Notes:
    """The memfd: read once, written whenever something changes."""

    def __init__(self, fd: int) -> None:
        """Take over a descriptor. Raises: `BadMemfd`, when it isn't one of ours; it is the caller's then."""
        try:
            is_ours = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS and os.fstat(fd).st_size == _BYTES
        except OSError as error:  # EINVAL: not a memfd
            raise BadMemfd(f"what was noted is no memfd: {error.strerror}") from error
        if not is_ours:
            raise BadMemfd("what was noted has another size, or could have")
        self.fd = fd
        self._is_second = False

    @classmethod
    def make(cls) -> "Notes":
        """Begin empty ones. Raises: `OSError`."""
        fd = new_memfd("notes")
        try:
            os.ftruncate(fd, _BYTES)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return cls(fd)
        except BaseException:
            os.close(fd)
            raise

    def read(self) -> Noted:
        """Give what was noted last. Raises: `BadMemfd`."""
        place, size = _HEAD.unpack(os.pread(self.fd, _HEAD.size, 0))
        if place > 1 or size > PLACE_BYTES:
            raise BadMemfd("what was noted has no place")
        self._is_second = place == 1
        if not size:
            return Noted()
        try:
            return msgspec.json.decode(os.pread(self.fd, size, _HEAD_BYTES + place * PLACE_BYTES), type=Noted)
        except (msgspec.DecodeError, RecursionError) as error:
            raise BadMemfd(f"what was noted can't be read: {error}") from error

    def write(self, noted: Noted) -> None:
        """Note it in the place of what there was. Raises: `OSError`."""
        data = msgspec.json.encode(noted)
        if len(data) > PLACE_BYTES:
            raise OSError(errno.ENOSPC, f"{len(data)} bytes are too many to note")
        place = int(not self._is_second)
        view = memoryview(data)
        while view:
            at = _HEAD_BYTES + place * PLACE_BYTES + len(data) - len(view)
            view = view[os.pwrite(self.fd, view, at) :]
        os.pwrite(self.fd, _HEAD.pack(place, len(data)), 0)
        self._is_second = place == 1


class NodeMemory:
    """The drain and the request ids of this node; state of the Trio thread."""

    def __init__(self, *, kept_requests: int) -> None:
        self.is_draining = False
        self.requests = RequestMemory(kept=kept_requests, on_change=self._write)
        self._notes: Notes | None = None

    def recall(self, notes: Notes | None, images: Container[str]) -> None:
        """Take up what the last supervisor has noted, of these images, and note on. None: nothing can be kept."""
        self._notes = notes
        if notes is None:
            return
        try:
            noted = notes.read()
            known = {number: request for number, request in noted.requests.items() if request[1] in images}
            self.requests.recall(noted.request_key, known)
            self.is_draining = noted.is_draining
        except (BadMemfd, ValueError) as error:
            log.warning("what the last supervisor has noted is lost", reason=str(error))
        if self.is_draining:
            log.info("draining, as before: no new images are taken")
        self._write()

    def drain(self, *, is_on: bool) -> None:
        """Note whether new images are taken."""
        self.is_draining = is_on
        self._write()

    def _write(self) -> None:
        if self._notes is None:
            return
        requests = self.requests
        try:
            self._notes.write(
                Noted(is_draining=self.is_draining, request_key=requests.key, requests=dict(requests.known))
            )
        except OSError as error:
            log.warning("a restart would forget a drain, or request ids", reason=error.strerror)
