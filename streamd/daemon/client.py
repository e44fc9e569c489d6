"""Asks the daemon's control API: blocking calls with explicit time-outs, from the standard library alone.

Commands import this, so it must load in no time; what the API sends comes as plain dictionaries (`daemon/api/models.py`
has the types, `/openapi.json` the description). An error of the daemon is raised here as it was there.

A call that asks for an image carries a request id, so it can be sent again when its answer was lost, as while the
daemon restarts: nothing is asked for twice.
"""

import json
import os
import socket
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, urlencode

from streamd.daemon.relay import relayed
from streamd.daemon.sockets import api_socket_path
from streamd.errors import NotFound, NotPermitted, StreamdError

if TYPE_CHECKING:
    from http.client import HTTPResponse

    from streamd.daemon.unix_http import UnixConnection

# The daemon answers from memory, or within 10 s.
ANSWER_WAIT_S = 20.0
# A stream sends something every 10 s.
SILENCE_WAIT_S = 40.0
REPLY_MAX_BYTES = 16 << 20
_LINE_MAX_BYTES = 64 << 10
_AGAIN_S = 0.25
_PROBLEM = "urn:streamd:problem:"

Answer = dict[str, object]


class NoDaemon(NotFound):
    """No daemon listens at the socket."""


class NoAnswer(StreamdError):
    """The daemon gives no answer, or none that can be read."""

    kind = "no-answer"


class Lease:
    """A lease that was taken: it lasts until `close`, or until every process that has its descriptor has ended."""

    def __init__(self, connection: socket.socket, facts: Answer) -> None:
        self.facts = facts
        self._socket = connection
        self._socket.setblocking(False)

    @property
    def id(self) -> str:
        """The lease's id."""
        return str(self.facts.get("id"))

    def fileno(self) -> int:
        """Give the descriptor that is the lease; a child that inherits it holds the lease too.

        It is readable when the daemon says that it lives, and when the lease has ended: `is_held` tells them apart.
        """
        return self._socket.fileno()

    def is_held(self) -> bool:
        """Look, without waiting, whether the daemon has ended the lease or is gone."""
        try:
            while self._socket.recv(1 << 12):  # what it says now and then
                pass
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def close(self) -> None:
        """End the lease, for other holders of the descriptor too."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self.abandon()

    def abandon(self) -> None:
        """Close this process's descriptor only; who else has it goes on holding the lease."""
        self._socket.close()


class DaemonClient:
    """Asks the daemon of one run directory.

    Every call may raise `NoDaemon`, `NoAnswer`, `NotPermitted`, and what the daemon met.
    """

    def __init__(self, run_directory: Path, *, wait_s: float = ANSWER_WAIT_S) -> None:
        self.path = api_socket_path(run_directory)
        self._wait_s = wait_s

    # Images

    def request_image(
        self,
        snapshot_url: str,
        *,
        tenant: str = "",
        credentials: Mapping[str, object] | None = None,
        prefetch: str = "all",
        request_id: str | None = None,
        again_for_s: float = 0.0,
    ) -> Answer:
        """Ask for a snapshot on this node; its image may still be preparing.

        `credentials` is `{"token_file": PATH}` or `{"command": [PATH, …]}`. While there is no daemon, or no answer,
        it is asked again for `again_for_s`.
        """
        request: Answer = {
            "snapshot_url": snapshot_url,
            "request_id": request_id or os.urandom(16).hex(),
            "tenant": tenant,
            "prefetch": prefetch,
        }
        if credentials is not None:
            request["credentials"] = dict(credentials)
        until_s = time.monotonic() + again_for_s
        while True:
            try:
                return self._ask("POST", "/v1/images", request)
            except (NoDaemon, NoAnswer):
                if time.monotonic() + _AGAIN_S > until_s:
                    raise
                time.sleep(_AGAIN_S)

    def images(self) -> list[Answer]:
        """All images, oldest first."""
        return _dicts(self._ask("GET", "/v1/images"), "images")

    def image_at(self, mountpoint: str) -> Answer | None:
        """Give the image that is mounted there; None when there is none, or no daemon."""
        try:
            return next((image for image in self.images() if image.get("mountpoint") == mountpoint), None)
        except NoDaemon:
            return None

    def image(self, image_id: str, *, wait_s: float = 0.0) -> Answer:
        """One image; with `wait_s` (60 at most) as soon as it isn't preparing any more. Raises: `NotFound`."""
        query = {"wait_s": f"{wait_s:g}"} if wait_s else {}
        return self._ask("GET", self._image(image_id), query=query, wait_s=self._wait_s + wait_s)

    def release(self, image_id: str, *, force: bool = False) -> Answer:
        """Begin to end an image. Raises: as the daemon does when it is in use; `leases` and `openers` are facts."""
        return self._ask("POST", f"{self._image(image_id)}/release", {"force": force})

    def fail(self, image_id: str, *, handle: int | None = None, container: str | None = None) -> int:
        """Fail reads that wait: of a handle, of a container, or all; how many handles."""
        chosen: Answer = {"handle": handle, "container": container}
        asked = {key: value for key, value in chosen.items() if value is not None}
        failed = self._ask("POST", f"{self._image(image_id)}/fail", asked).get("failed")
        if not isinstance(failed, int):
            raise _unreadable()
        return failed

    @contextmanager
    def lease(self, image_id: str, *, owner: str, purpose: str) -> Iterator[Lease]:
        """Hold a lease while this is entered, and as long as this process lives."""
        lease = self.take_lease(image_id, owner=owner, purpose=purpose)
        try:
            yield lease
        finally:
            lease.close()

    def take_lease(self, image_id: str, *, owner: str, purpose: str) -> Lease:
        """Take a lease; whoever gets it closes or abandons it."""
        asked: Answer = {"owner": owner, "purpose": purpose}
        with self._answer("POST", f"{self._image(image_id)}/leases", asked) as (response, connection):
            facts = _object(response.readline(_LINE_MAX_BYTES)).get("lease")
            if not isinstance(facts, dict):
                raise _unreadable()
            # A second descriptor of the connection: the lease outlives what http.client makes of the first.
            return Lease(connection.dup(), facts)

    @staticmethod
    def _image(image_id: str) -> str:
        return f"/v1/images/{quote(image_id, safe='')}"

    # The node

    def cache(self) -> Answer:
        """The node cache."""
        return self._ask("GET", "/v1/cache")

    def records(self, *, limit: int = 100) -> list[Answer]:
        """Records of restores, newest first."""
        return _dicts(self._ask("GET", "/v1/records", query={"limit": str(limit)}), "records")

    def health(self) -> Answer:
        """Say what the node can't do; a degraded node is an answer, too."""
        return self._ask("GET", "/v1/health", also=503)

    def drain(self) -> None:
        """Let it take no new images."""
        self._ask("POST", "/v1/drain")

    def end_drain(self) -> None:
        """Let it take new images again."""
        self._ask("DELETE", "/v1/drain")

    def is_draining(self) -> bool:
        """Whether it takes no new images."""
        return self._ask("GET", "/v1/drain").get("is_draining") is True

    def metrics(self) -> str:
        """Everything for Prometheus, as it is."""
        return self._read("GET", "/metrics").decode()

    def openapi(self) -> Answer:
        """The API's description."""
        return self._ask("GET", "/openapi.json")

    def events(self, *, last_id: str | None = None, silence_wait_s: float = SILENCE_WAIT_S) -> Generator[Answer]:
        """Give what happens, as it does; ends when the daemon drops this reader. Close it to stop.

        `last_id`: go on behind this event's `id`; one of kind `lost` comes first where that can't be.
        """
        headers = {"last-event-id": last_id} if last_id else {}
        data = b""
        with self._answer("GET", "/v1/events", headers=headers, wait_s=silence_wait_s) as (response, _):
            while line := response.readline(_LINE_MAX_BYTES):
                if line.startswith(b"data: "):
                    data = line[len(b"data: ") :]
                elif line == b"\n" and data:
                    event, data = _object(data), b""
                    yield event

    def last_event_id(self) -> str:
        """Give the id of the newest event, `EPOCH-NUMBER`; before the first one its number is 0."""
        with self._answer("GET", "/v1/events") as (response, _):
            line = response.readline(_LINE_MAX_BYTES)
        if not line.startswith(b"id: "):
            raise _unreadable()
        return line[len(b"id: ") :].decode("ascii", "replace").strip()

    # How it is asked

    def _ask(
        self,
        method: str,
        path: str,
        body: Answer | None = None,
        *,
        query: Mapping[str, str] | None = None,
        wait_s: float | None = None,
        also: int = 200,
    ) -> Answer:
        return _object(self._read(method, path, body, query=query, wait_s=wait_s, also=also))

    def _read(
        self,
        method: str,
        path: str,
        body: Answer | None = None,
        *,
        query: Mapping[str, str] | None = None,
        wait_s: float | None = None,
        also: int = 200,
    ) -> bytes:
        target = f"{path}?{urlencode(query)}" if query else path
        with self._answer(method, target, body, wait_s=wait_s, also=also) as (response, _):
            content = response.read(REPLY_MAX_BYTES + 1)
        if len(content) > REPLY_MAX_BYTES:
            raise _unreadable()
        return content

    @contextmanager
    def _answer(
        self,
        method: str,
        target: str,
        body: Answer | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        wait_s: float | None = None,
        also: int = 200,
    ) -> "Iterator[tuple[HTTPResponse, socket.socket]]":
        """Send a request; give its answer, to read from, and the connection. Raises: the daemon's problem."""
        from streamd.daemon.unix_http import HTTPException, UnixConnection

        wait_s = self._wait_s if wait_s is None else wait_s
        content = None if body is None else json.dumps(body).encode()
        sent = dict(headers or {}) | ({} if content is None else {"content-type": "application/json"})
        connection = UnixConnection(self.path, wait_s)
        try:
            self._connect(connection)
            # http.client lets go of it when the answer is to be the last, and the answer goes on.
            transport = connection.sock
            response = connection.ask(method, target, content, sent)
            with response:
                if response.status not in (200, also) or _is_problem(response):
                    raise _problem(response)
                yield response, transport
        except TimeoutError as error:
            raise NoAnswer(f"the daemon did not answer within {wait_s:g} s") from error
        except (HTTPException, OSError) as error:
            raise NoAnswer("the daemon broke off its answer, or it can't be read") from error
        finally:
            connection.close()

    def _connect(self, connection: "UnixConnection") -> None:
        try:
            connection.connect()
        except (FileNotFoundError, ConnectionRefusedError) as error:
            raise NoDaemon(f"no streamd daemon at {self.path}") from error
        except PermissionError as error:
            raise NotPermitted(f"{self.path}: the daemon belongs to another user; run it with sudo") from error
        except OSError as error:
            raise NoAnswer(f"the daemon can't be asked: {error.strerror or 'no answer in time'}") from error


def _is_problem(response: "HTTPResponse") -> bool:
    return (response.getheader("content-type") or "").startswith("application/problem+json")


def _problem(response: "HTTPResponse") -> StreamdError:
    """Give the error that an answer describes."""
    members = _object(response.read(REPLY_MAX_BYTES))
    kind = members.pop("type", None)
    if not isinstance(kind, str) or not kind.startswith(_PROBLEM):
        return NoAnswer(f"the daemon answered {response.status}")
    members.pop("title", None)
    record = members | {"kind": kind.removeprefix(_PROBLEM), "message": members.pop("detail", None)}
    error = relayed(record)
    # People are told what to do, not that they are the wrong peer.
    if error.kind == "wrong-peer":
        return NotPermitted("the daemon doesn't answer this user; run it with sudo")
    return error


def _object(text: bytes) -> Answer:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _unreadable() from error
    if not isinstance(value, dict):
        raise _unreadable()
    return value


def _dicts(answer: Answer, name: str) -> list[Answer]:
    items = answer.get(name)
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise _unreadable()
    return items


def _unreadable() -> NoAnswer:
    return NoAnswer("the daemon gave an answer that can't be read")
