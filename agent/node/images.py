"""Images from streamd's daemon: asked for, waited for, leased, and looked at before a restore; a port and its client.

The client's calls block, so they run in threads, one at a time for each image that is waited for. Nothing is left to
run behind a cancelled caller: a call that is under way is waited for, and all are short, or can be ended.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

import trio

from agent.errors import AgentError
from agent.node.restore_check import ImageFacts
from agent.node.restore_files import image_facts
from agent.node.store_access import StoreAccess
from agent.node.threads import run_endable
from streamd.daemon.client import Answer, DaemonClient
from streamd.errors import Exit, NotFound, StoreError, StoreErrorKind, StreamdError
from streamd.save.lifecycle import CollectResult, remove
from streamd.save.turn import collect_in_turn
from streamd.snapshot.manifest import Manifest
from streamd.store.catalog import open_snapshot
from streamd.store.opening import split_snapshot_url
from streamd.store.port import CLOCK_KEY, Condition, Store
from streamd.store.retry import retrying

T = TypeVar("T")

# A wait in the daemon; a caller that is cancelled waits for its end.
_LOOK_S = 1.0
# How long a store that is away may keep one small call.
_STORE_S = 30.0
# Of somebody who looks at the agent, which hangs no longer than that because streamd does.
_HEALTH_S = 2.0
# While streamd restarts; the requests bear ids, so that nothing is asked for twice.
_AGAIN_S = 2.0
_CALLS = trio.CapacityLimiter(64)
# Of the snapshots that were last asked for. 33 bytes a chunk: 11 MB for an image of 80 GiB.
_MANIFESTS_KEPT = 4
_SERVED = ("serving", "warm")

_Wanted = tuple[str, str]  # a snapshot's address, and the tenant


class ImageUnavailable(AgentError):
    """streamd can't serve an image; `ends_with`: as streamd says what is the matter."""

    kind = "image-unavailable"

    def __init__(self, message: str, ends_with: Exit = Exit.FAILED) -> None:
        super().__init__(message)
        self.ends_with = ends_with


class Lease(Protocol):
    """Holds an image on this node until it is closed."""

    def close(self) -> None:
        """End it."""
        ...


@dataclass(frozen=True, slots=True)
class HeldImage:
    """An image that is served in `directory`, what is known of it, and the lease that keeps it there."""

    directory: Path
    facts: ImageFacts
    lease: Lease


class Images(Protocol):
    """What the agent does with snapshots that are in a store. Each may raise `AgentError` and `StreamdError`."""

    async def hold(self, snapshot_url: str, *, request_id: str, tenant: str, owner: str) -> HeldImage:
        """Ask for an image in the name of a tenant, a namespace; wait until it is served, and take a lease on it."""
        ...

    async def hold_again(self, *, sandbox_pid: int, owner: str) -> Lease | None:
        """Take a lease on the image that a sandbox has open; None: it has none."""
        ...

    async def remove(self, snapshot_url: str, *, tenant: str) -> None:
        """Make a snapshot not exist any more; one that doesn't is no error. Nodes that load from it may go on."""
        ...

    async def collect(self, store_url: str, *, every_s: float) -> CollectResult | None:
        """Remove what pushes and removals have left in a store; None: somebody has begun that within `every_s`."""
        ...

    async def unavailable(self) -> str:
        """Say why no image can be had here at all; empty: nothing is known against it."""
        ...

    async def probe(self, store_url: str) -> None:
        """See whether a store can be written and listed, by a small object that is overwritten."""
        ...


@dataclass(frozen=True, slots=True)
class StreamdImages:
    """The daemon of one run directory, and the stores themselves. Manifests are kept for who has read them."""

    run_directory: Path
    access: StoreAccess = field(default_factory=StoreAccess)
    _client: DaemonClient = field(init=False)
    _manifests: dict[_Wanted, Manifest] = field(init=False, default_factory=dict)
    _reading: dict[_Wanted, trio.Lock] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_client", DaemonClient(self.run_directory))

    async def hold(self, snapshot_url: str, *, request_id: str, tenant: str, owner: str) -> HeldImage:
        asked = await _call(
            partial(
                self._client.request_image,
                snapshot_url,
                request_id=request_id,
                tenant=tenant,
                credentials=self.access.credentials(snapshot_url, tenant),
                again_for_s=_AGAIN_S,
            )
        )
        image_id = str(asked["id"])
        # Read while the image is prepared: it is some KB, which the mount doesn't show.
        manifest = await self._manifest((snapshot_url, tenant))
        while True:
            state = await _call(partial(self._client.image, image_id, wait_s=_LOOK_S))
            if state.get("state") in _SERVED:
                break
            if state.get("state") != "preparing":
                raise _unserved(snapshot_url, state)
        directory = Path(str(state["mountpoint"]))
        lease = await _call(partial(self._client.take_lease, image_id, owner=owner, purpose="restore"))
        try:
            facts = await _call(partial(image_facts, directory, manifest))
        except BaseException:
            lease.close()
            raise
        return HeldImage(directory, facts, lease)

    async def hold_again(self, *, sandbox_pid: int, owner: str) -> Lease | None:
        for state in await _call(self._client.images):
            openers = state.get("openers")
            pids = [each.get("pid") for each in openers if isinstance(each, dict)] if isinstance(openers, list) else []
            if sandbox_pid in pids:
                take = partial(self._client.take_lease, str(state["id"]), owner=owner, purpose="restore")
                return await _call(take)
        return None

    async def _manifest(self, wanted: _Wanted) -> Manifest:
        """Read a snapshot's manifest, once for many pods that start together: a large one takes half a second."""
        lock = self._reading.setdefault(wanted, trio.Lock())
        try:
            async with lock:
                if wanted not in self._manifests:
                    self._manifests[wanted] = await _call(partial(self._read_manifest, *wanted))
                found = self._manifests[wanted]
                while len(self._manifests) > _MANIFESTS_KEPT:
                    del self._manifests[next(iter(self._manifests))]
                return found
        finally:
            if not lock.locked():
                self._reading.pop(wanted, None)

    async def remove(self, snapshot_url: str, *, tenant: str) -> None:
        await _call(partial(self._remove, snapshot_url, tenant))

    async def collect(self, store_url: str, *, every_s: float) -> CollectResult | None:
        ended = threading.Event()
        call = partial(self._collect, store_url, every_s, ended)
        return await run_endable(call, ended.set, limiter=_CALLS)

    async def unavailable(self) -> str:
        try:
            await _call(DaemonClient(self.run_directory, wait_s=_HEALTH_S).health)
        except StreamdError as error:
            return str(error)
        return ""

    async def probe(self, store_url: str) -> None:
        await _call(partial(self._probe, store_url))

    # In threads

    def _read_manifest(self, snapshot_url: str, tenant: str) -> Manifest:
        store_url, snapshot_id = split_snapshot_url(snapshot_url)
        with self._opened(store_url, tenant, is_used=True) as store:
            return open_snapshot(store, snapshot_id).manifest

    def _remove(self, snapshot_url: str, tenant: str) -> None:
        store_url, snapshot_id = split_snapshot_url(snapshot_url)
        with self._opened(store_url, tenant, is_used=True) as store, suppress(NotFound):
            remove(store, snapshot_id)

    def _collect(self, store_url: str, every_s: float, ended: threading.Event) -> CollectResult | None:
        def go_on(_: str) -> None:
            if ended.is_set():
                raise ImageUnavailable("the agent ends")

        with self._opened(store_url, "") as store:
            return collect_in_turn(store, every_s=every_s, progress=go_on)

    def _probe(self, store_url: str) -> None:
        # Google looks at permissions before it looks whether the object is there, and a bucket that retains its objects
        # lets none be overwritten. A directory has to be written to, to know.
        condition = Condition.ANY if store_url.startswith("file:") else Condition.ABSENT
        with self._opened(store_url, "") as store:
            try:
                store.put(CLOCK_KEY, b"", condition=condition)
            except StoreError as error:
                if error.store_kind is not StoreErrorKind.CHANGED:
                    raise
            next(store.list(CLOCK_KEY), None)

    @contextmanager
    def _opened(self, store_url: str, tenant: str, *, is_used: bool = False) -> Iterator[Store]:
        store = retrying(self.access.opened(store_url, tenant, is_used=is_used), deadline_s=_STORE_S)
        try:
            yield store
        finally:
            store.close()


if TYPE_CHECKING:
    _: type[Images] = StreamdImages


async def _call(call: Callable[[], T]) -> T:
    return await trio.to_thread.run_sync(call, limiter=_CALLS)


def _unserved(snapshot_url: str, state: Answer) -> ImageUnavailable:
    error = state.get("last_error")
    facts: Answer = error if isinstance(error, dict) else {"message": state.get("state")}
    code = facts.get("exit_code")
    ends_with = Exit(code) if isinstance(code, int) and code in list(Exit) else Exit.FAILED
    said = f"streamd can't serve {snapshot_url}: {facts.get('message')}"
    return ImageUnavailable(said, ends_with)
