"""A node in memory, as small as `Node` allows, and ways to ask its API: in-process, or over a real socket."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import trio
from msgspec.structs import replace
from starlette.types import ASGIApp, Message

from streamd.daemon.api import models
from streamd.daemon.api.app import make_app
from streamd.daemon.api.events import EventLog
from streamd.daemon.api.limits import Limits
from streamd.daemon.api.metrics import ApiCounts
from streamd.daemon.api.models import CredentialsKind, HealthStatus, ImageRequest, ImageState, ImageStateName, Lease
from streamd.daemon.api.port import Draining, ImageInUse
from streamd.daemon.api.server import Allowed, serve
from streamd.daemon.sockets import BoundSocket, api_socket_path
from streamd.errors import NotFound, Refused, StreamdError

T = TypeVar("T")
# A hang shows as a failure; nothing takes a tenth of this.
LIMIT_S = 30.0
URL = "gs://bucket/snapshots/web-1"


@dataclass
class FakeNode:
    """Images are numbered; a request is made good by `set_state`. What fails or hangs is set by a test."""

    events: EventLog = field(default_factory=EventLog)
    is_draining: bool = False
    asked: list[ImageRequest] = field(default_factory=list)
    known: dict[str, ImageState] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    fetch_max_bytes_per_s: int = 0
    raises: StreamdError | None = None
    is_hung: bool = False
    failed: list[models.FailRequest] = field(default_factory=list)
    leases_taken: int = 0

    async def request_image(self, request: ImageRequest) -> ImageState:
        await self._maybe_hang()
        return self.begin(request)

    def begin(self, request: ImageRequest) -> ImageState:
        self._maybe_raise()
        for image in self.known.values():
            if (image.snapshot_url, image.tenant) == (request.snapshot_url, request.tenant):
                return image
        if self.is_draining:
            raise Draining
        self.asked.append(request)
        image = ImageState(
            id=f"{len(self.asked):032x}",
            snapshot_url=request.snapshot_url,
            tenant=request.tenant,
            state=ImageStateName.PREPARING,
            created_s=1000.0,
            prefetch=request.prefetch,
            credentials=request.credentials.kind if request.credentials else CredentialsKind.DEFAULT,
        )
        self._put(image)
        return image

    def images(self) -> Sequence[ImageState]:
        return list(self.known.values())

    def image(self, image_id: str) -> ImageState:
        if image_id not in self.known:
            raise NotFound(f"no image {image_id}")
        return self.known[image_id]

    def release(self, image_id: str, *, force: bool) -> ImageState:
        image = self.image(image_id)
        if image.state is ImageStateName.GONE:
            return image
        if not force and (image.leases or image.openers):
            raise ImageInUse(image_id, leases=image.leases, openers=image.openers)
        return self.set_state(image_id, ImageStateName.DRAINING)

    async def fail(self, image_id: str, chosen: models.FailRequest) -> int:
        self.image(image_id)
        await self._maybe_hang()
        self.failed.append(chosen)
        return 1

    def add_lease(self, image_id: str, request: models.LeaseRequest, *, pid: int) -> Lease:
        image = self.image(image_id)
        if image.state in (ImageStateName.GONE, ImageStateName.FAILED):
            raise Refused(f"image {image_id} is {image.state}")
        self.leases_taken += 1
        lease = Lease(
            id=f"lease-{self.leases_taken}", owner=request.owner, purpose=request.purpose, since_s=1001.0, pid=pid
        )
        self._put(replace(image, leases=[*image.leases, lease]))
        return lease

    def end_lease(self, image_id: str, lease_id: str) -> None:
        if (image := self.known.get(image_id)) is not None:
            self._put(replace(image, leases=[lease for lease in image.leases if lease.id != lease_id]))

    async def cache(self) -> models.CacheState:
        await self._maybe_hang()
        image = models.CachedImage(key="ab" * 32, disk_bytes=4096, used_s=999.0, owner="the mount", is_pinned=True)
        return models.CacheState(
            directory="/cache", images=[image], used_bytes=4096, max_bytes=1 << 30, reserve_bytes=1, free_bytes=1 << 20
        )

    async def records(self, *, limit: int) -> Sequence[models.RecordFacts]:
        await self._maybe_hang()
        self._maybe_raise()
        records = [models.RecordFacts(name=f"{n}.record", size_bytes=n, modified_s=1000.0 - n) for n in range(5)]
        return records[:limit]

    def health(self) -> models.Health:
        return models.Health(
            status=HealthStatus.DEGRADED if self.warnings else HealthStatus.OK,
            warnings=self.warnings,
            is_draining=self.is_draining,
            images=len(self.known),
            pid=1,
            started_s=1.0,
            fetch_max_bytes_per_s=self.fetch_max_bytes_per_s,
            version="test",
        )

    def drain(self) -> None:
        self.is_draining = True
        self.events.publish("draining")

    def end_drain(self) -> None:
        self.is_draining = False
        self.events.publish("drain-ended")

    # What tests do to it

    def add(self, snapshot_url: str = URL, **fields: object) -> ImageState:
        """Have an image as if it had been asked for a while ago."""
        return self.change(self.begin(ImageRequest(snapshot_url=snapshot_url, request_id="added")).id, **fields)

    def change(self, image_id: str, **fields: object) -> ImageState:
        image = replace(self.known[image_id], **fields)
        self._put(image)
        return image

    def set_state(self, image_id: str, state: ImageStateName) -> ImageState:
        return self.change(image_id, state=state)

    def forget(self, image_id: str) -> None:
        del self.known[image_id]
        self.events.publish("image", image=image_id)

    def _put(self, image: ImageState) -> None:
        self.known[image.id] = image
        self.events.publish("image", image=image.id, state=image.state.value, leases=len(image.leases))

    def _maybe_raise(self) -> None:
        if self.raises is not None:
            raise self.raises

    async def _maybe_hang(self) -> None:
        if self.is_hung:
            await trio.sleep_forever()


@dataclass(frozen=True)
class Answer:
    """What came back."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.body)

    @property
    def kind(self) -> str:
        """The kind of the problem, which it must be."""
        assert self.headers["content-type"] == "application/problem+json"
        problem = self.json
        assert problem["status"] == self.status
        assert problem["title"]
        assert problem["detail"]
        return str(problem["type"]).removeprefix("urn:streamd:problem:")


class InProcess:
    """The application without a server: what it answers, in whichever order tasks ask."""

    def __init__(self, node: FakeNode | None = None, limits: Limits | None = None) -> None:
        self.node = node or FakeNode()
        self.counts = ApiCounts()
        self.app: ASGIApp = make_app(self.node, self.counts, limits=limits or Limits(), version="test")

    async def ask(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        headers: dict[str, str] | None = None,
        parts: list[bytes] | None = None,
        **scope: Any,
    ) -> Answer:
        """Ask; `body` is JSON unless bytes. A body of `parts` never ends."""
        content = body if isinstance(body, bytes) else b"" if body is None else msgspec.json.encode(body)
        sent = ({"content-type": "application/json"} if content else {}) | (headers or {})
        path, _, query = path.partition("?")
        incoming: list[Message] = [
            {"type": "http.request", "body": part, "more_body": parts is not None} for part in parts or [content]
        ]

        async def receive() -> Message:
            if incoming:
                return incoming.pop(0)
            await trio.sleep_forever()
            raise AssertionError

        out: list[Message] = []

        async def send(message: Message) -> None:
            out.append(message)

        request = {
            "type": "http",
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(name.lower().encode(), value.encode()) for name, value in sent.items()],
        }
        await self.app(request | scope, receive, send)
        start, *rest = out
        headers = {name.decode(): value.decode() for name, value in start["headers"]}
        return Answer(start["status"], headers, b"".join(message["body"] for message in rest))

    async def image(self, request_id: str = "r-1", **fields: object) -> Answer:
        return await self.ask("POST", "/v1/images", {"snapshot_url": URL, "request_id": request_id} | fields)


class Running:
    """The API on a real socket, in a thread of its own."""

    def __init__(self, run_directory: Path, limits: Limits, allowed: Allowed, node: FakeNode | None = None) -> None:
        self.run_directory = run_directory
        self.path = api_socket_path(run_directory)
        self.node = node or FakeNode()
        self.counts = ApiCounts()
        self.limits = limits
        self._allowed = allowed
        self._token: trio.lowlevel.TrioToken
        self._scope: trio.CancelScope
        self._thread: threading.Thread

    def call(self, function: Callable[[], T]) -> T:
        """Call it on the API's thread, where the node's state belongs."""
        return trio.from_thread.run_sync(function, trio_token=self._token)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until it holds, looking after every step of the API."""

        async def look() -> None:
            with trio.fail_after(LIMIT_S):
                while not condition():
                    await trio.sleep(0.002)

        trio.from_thread.run(look, trio_token=self._token)

    @contextmanager
    def started(self) -> Iterator["Running"]:
        ready = threading.Event()
        errors: list[BaseException] = []

        async def main() -> None:
            app = make_app(self.node, self.counts, limits=self.limits, version="test")
            self._token = trio.lowlevel.current_trio_token()
            with BoundSocket(self.path, backlog=256, refusal="in use") as listener, trio.CancelScope() as self._scope:
                async with trio.open_nursery() as nursery:
                    await nursery.start(self._serve, listener, app)
                    ready.set()

        def run() -> None:
            try:
                trio.run(main)
            except BaseException as error:
                errors.append(error)
            finally:
                ready.set()

        self._thread = threading.Thread(target=run)
        self._thread.start()
        assert ready.wait(LIMIT_S)
        try:
            if not errors:
                yield self
        finally:
            if not errors:
                self.stop()
        if errors:
            raise errors[0]

    def stop(self) -> None:
        """End the API; a second time nothing happens."""
        if self._thread.is_alive():
            with suppress(trio.RunFinishedError):
                self.call(self._scope.cancel)
            self._thread.join(LIMIT_S)
        assert not self._thread.is_alive(), "the API did not end"

    async def _serve(self, listener: Any, app: ASGIApp, task_status: trio.TaskStatus[None]) -> None:
        await serve(listener, app, self.counts, limits=self.limits, allowed=self._allowed, task_status=task_status)
