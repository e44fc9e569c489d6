"""The node's daemon: which images there are, who uses them, and how the process begins and ends.

One process, one Trio thread, no data: workers serve (`worker.py`), each image has a life (`life.py`), clients ask over
HTTP (`api/`). Whatever the store, a disk or a worker does, this answers.

When it ends while a manager keeps its descriptors, mounts and workers stay as they are, for the next one. Without a
manager (in a terminal, in a container) it ends as `streamd mount` does: it waits for files to be closed, then aborts.
"""

import gc
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from functools import partial
from importlib import metadata

import msgspec
import structlog
import trio

from streamd.config import Config, Prefetch
from streamd.daemon import allocator, hardening
from streamd.daemon.admission import check_room, tables_room_bytes
from streamd.daemon.adoption import FdKeeper, Kept
from streamd.daemon.api.app import make_app
from streamd.daemon.api.events import EventLog
from streamd.daemon.api.limits import Limits
from streamd.daemon.api.metrics import ApiCounts
from streamd.daemon.api.models import (
    CacheState,
    FailRequest,
    Health,
    HealthStatus,
    ImageRequest,
    ImageState,
    ImageStateName,
    Lease,
    LeaseRequest,
    RecordFacts,
)
from streamd.daemon.api.port import Draining, ImageInUse
from streamd.daemon.api.server import Allowed, serve
from streamd.daemon.api_socket import ApiSocket
from streamd.daemon.assignment import BEAT_S, Assignment
from streamd.daemon.fd_store import FdStore
from streamd.daemon.images import Image, credentials_of, image_id
from streamd.daemon.life import Life
from streamd.daemon.node_disk import cache_state, newest_records
from streamd.daemon.notes import NodeMemory
from streamd.daemon.proof import Proofs
from streamd.daemon.service_manager import ManagerEnvironment, Notifier, NotifyChannel
from streamd.daemon.shares import divide_link
from streamd.daemon.sockets import images_directory
from streamd.daemon.spawning import Spawner
from streamd.daemon.strays import Strays
from streamd.daemon.unit_check import UnitFacts, findings
from streamd.daemon.worker_user import WorkerUser, prepare_worker_user, records_directory
from streamd.errors import NotFound, Refused
from streamd.fuse import mounting
from streamd.store.opening import split_snapshot_url

log = structlog.get_logger()

# Ended images that are still told of.
_ENDED_MAX = 64
# How long one that failed before it served, as by a mistyped address, is told of: who waits for it asks once a second
# or so. Longer would show up in the metrics of a node that has nothing.
FORGET_FAILED_S = 60.0
_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_FLUSH_S = 5.0
_STRAYS_LOOK_S = 10.0
# Each worker is given it, in one message (`wire.py`).
_CONFIG_MAX_CHARACTERS = 16 << 10
_NO_NAMESPACE = "mount-namespace"
# Questions to disks that may hang, at once: their threads must not be those that mounts are made in.
_DISK_LOOKS_MAX = 4


def version() -> str:
    """Give this program's version."""
    try:
        return metadata.version("podsnap")
    except metadata.PackageNotFoundError:
        return "unknown"


class Supervisor:
    """The images of this node; implements `api.port.Node`. State of the Trio thread."""

    def __init__(
        self,
        config: Config,
        keeper: FdKeeper,
        *,
        config_text: str,
        warnings: Sequence[str] = (),
        may_harden: bool = True,
        user: WorkerUser | None = None,
    ) -> None:
        self.events = EventLog()
        self.memory = NodeMemory(kept_requests=Limits().request_ids)
        self._config = config
        self._config_text = config_text
        self._keeper = keeper
        self._warnings = list(warnings)
        self._may_harden = may_harden
        self._user = user
        self._spawner = Spawner()
        self._proofs = Proofs(self._spawner)
        self._images: dict[str, Image] = {}
        self._lives: dict[str, Life] = {}
        self._ended: list[ImageState] = []
        self._strays = Strays(images_directory(config.run_directory))
        self._lease_number = 0
        self._started_s = time.time()
        self._disk_looks = trio.CapacityLimiter(_DISK_LOOKS_MAX)
        self._nursery: trio.Nursery | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep images alive until cancelled, which leaves mounts and workers as they are."""
        try:
            async with trio.open_nursery() as self._nursery:
                self._spawner.start()
                self._nursery.start_soon(self._spawner.keep)
                for kept in self._keeper.take():
                    self._adopt(kept)
                self.memory.recall(self._keeper.open_notes(), self._images)
                await trio.to_thread.run_sync(self._strays.clean_up, self._mountpoints)
                self._nursery.start_soon(self._keep_dividing)
                task_status.started()
                while True:
                    await trio.sleep(_STRAYS_LOOK_S)
                    await trio.to_thread.run_sync(self._strays.clean_up, self._mountpoints)
        finally:
            self._nursery = None
            self._spawner.end()

    async def end(self) -> None:
        """End all images: those in use once their files are closed, or after a while."""
        self.memory.drain(is_on=True)
        for image in list(self._images.values()):
            image.ends_when_unused = True
            image.wanted = None
            self._end_leases(image)
        wait_s = self._config.policy.umount_wait_s
        log.info("images end with this process; open files are waited for", images=len(self._lives), wait_s=wait_s)
        with trio.move_on_after(wait_s):
            while self._lives:
                await trio.sleep(0.05)
        for life in list(self._lives.values()):
            await life.abort()
        with trio.move_on_after(wait_s):
            while self._lives:
                await trio.sleep(0.05)

    @property
    def is_draining(self) -> bool:
        """Whether new images are refused."""
        return self.memory.is_draining

    def summary(self) -> str:
        """Say in a line what is going on."""
        states = [image.state.value for image in self._images.values()]
        counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)) or "no images"
        return f"{counts}{'; draining' if self.is_draining else ''}"

    def _adopt(self, kept: Kept) -> None:
        state = kept.state
        image = Image(
            id=kept.image_id,
            snapshot_url=state.snapshot_url,
            tenant=state.tenant,
            prefetch=Prefetch(state.prefetch),
            credentials=state.credentials,
            mountpoint=state.mountpoint,
            created_s=state.created_s,
            restarts=state.restarts,
        )
        life = self._life(image)
        life.adopt(kept.mount(), state.first_request(), kept.keepsake_fd, kept.worker)
        self._begin(image, life)
        self.events.publish("image-adopted", image=image.id, has_worker=kept.worker is not None)
        if kept.worker is not None and state.version != version():
            assert self._nursery is not None
            self._nursery.start_soon(life.hand_over)

    def _tables(self, *, but: Image | None = None) -> list[int]:
        """Give what each image takes for its manifest's tables."""
        return [life.image.tables_bytes for life in self._lives.values() if life.image is not but]

    def _mountpoints(self) -> set[str]:
        return {life.image.mountpoint for life in list(self._lives.values())}

    def _life(self, image: Image) -> Life:
        return Life(
            image,
            self._config,
            self._spawner,
            self._keeper,
            partial(self.events.publish, image=image.id),
            config_text=self._config_text,
            tables_room_bytes=lambda: tables_room_bytes(self._tables(but=image), self._config),
            may_harden=self._may_harden,
            user=self._user,
        )

    def _begin(self, image: Image, life: Life) -> None:
        assert self._nursery is not None
        self._images[image.id] = image
        self._lives[image.id] = life
        divide_link(self._lives.values(), self._config)
        self._nursery.start_soon(self._live, image, life)

    async def _keep_dividing(self) -> None:
        while True:
            await trio.sleep(BEAT_S)
            divide_link(self._lives.values(), self._config)

    async def _live(self, image: Image, life: Life) -> None:
        await life.run()
        del self._lives[image.id]
        if image.state is ImageStateName.GONE and self._images.get(image.id) is image:
            del self._images[image.id]
            self._ended = [*self._ended, image.describe()][-_ENDED_MAX:]
        if image.wanted is not None:
            self._prepare(image.wanted, image.leases)
        elif image.state is ImageStateName.FAILED and not image.has_served:
            await trio.sleep(FORGET_FAILED_S)
            if self._images.get(image.id) is image:
                del self._images[image.id]

    def _end_leases(self, image: Image) -> None:
        self._tell_ended(image.id, image.end_leases())

    def _tell_ended(self, image_id: str, lease_ids: Sequence[str]) -> None:
        for lease_id in lease_ids:
            self.events.publish("lease-ended", image=image_id, lease=lease_id)

    def _prepare(self, request: ImageRequest, leases: dict[str, Lease]) -> Image:
        """Begin an image, with leases that were taken of it before."""
        number = image_id(request.snapshot_url, request.tenant)
        image = Image(
            id=number,
            snapshot_url=request.snapshot_url,
            tenant=request.tenant,
            prefetch=request.prefetch,
            credentials=credentials_of(request),
            mountpoint=str(images_directory(self._config.run_directory) / number),
            created_s=round(time.time(), 3),
            leases=leases,
        )
        self._begin(image, self._life(image))
        return image

    # What the API asks (`api.port.Node`)

    async def request_image(self, request: ImageRequest) -> ImageState:
        """Give the image of this snapshot and tenant, and begin to prepare it when there is none, or a failed one."""
        known = self._images.get(image_id(request.snapshot_url, request.tenant))
        if known is not None and self._is_here(known) and not known.has_credentials(credentials_of(request)):
            await self._proofs.prove(
                Assignment(
                    image=known.id,
                    snapshot_url=request.snapshot_url,
                    mountpoint="",
                    prefetch=request.prefetch.value,
                    tenant=request.tenant,
                    credentials=credentials_of(request),
                    config_text=self._config_text,
                    log_level=self._config.log_level,
                    may_harden=self._may_harden,
                    user=None if self._user is None else (self._user.uid, self._user.gid),
                )
            )
        return self._request_image(request)

    def _is_here(self, image: Image) -> bool:
        return image.is_live or image.id in self._lives

    def _request_image(self, request: ImageRequest) -> ImageState:
        """Do it, in one step: its credentials are those of the image, or proven."""
        number = image_id(request.snapshot_url, request.tenant)
        known = self._images.get(number)
        is_here = known is not None and self._is_here(known)
        if known is not None and is_here and not known.is_ending:
            known.ends_when_unused = False
            if known.state is ImageStateName.DRAINING:
                known.state = known.mounted_state
            known.idle_since_s = None
            return known.describe()
        if self.is_draining:
            raise Draining
        if known is not None and is_here:
            image = known
            self._tell_ended(number, image.want_next(request))
        else:
            check_room(self._tables(), self._config)
            split_snapshot_url(request.snapshot_url)
            image = self._prepare(request, {})
        self.events.publish("image-requested", image=number, snapshot_url=request.snapshot_url)
        return image.describe()

    def images(self) -> Sequence[ImageState]:
        """All images, oldest first, and those that ended a while ago."""
        return sorted([*self._ended, *(image.describe() for image in self._images.values())], key=lambda i: i.created_s)

    def image(self, image_id: str) -> ImageState:
        """Give one image. Raises: `NotFound`."""
        found = self._images.get(image_id)
        if found is not None:
            return found.describe()
        for ended in reversed(self._ended):
            if ended.id == image_id:
                return ended
        raise NotFound(f"no image {image_id} on this node")

    def _image(self, image_id: str) -> Image:
        image = self._images.get(image_id)
        if image is None:
            raise NotFound(f"no image {image_id} on this node")
        return image

    def release(self, image_id: str, *, force: bool) -> ImageState:
        """Begin to end an image. Raises: `ImageInUse` without `force`, `NotFound`."""
        image = self._images.get(image_id)
        if image is None:
            return self.image(image_id)
        if not force and image.is_in_use:
            raise ImageInUse(image_id, leases=list(image.leases.values()), openers=image.openers)
        if not image.is_live:
            del self._images[image_id]  # failed: nothing is left of it
            return image.describe()
        image.ends_when_unused = True
        if image.state is image.mounted_state or image.wanted is not None:
            image.state = ImageStateName.DRAINING
        image.wanted = None
        if force:
            self._end_leases(image)
            image.is_ending = True
            assert self._nursery is not None
            self._nursery.start_soon(self._lives[image_id].abort)
        self.events.publish("image-released", image=image_id, force=force)
        return image.describe()

    async def fail(self, image_id: str, chosen: FailRequest) -> int:
        """Fail reads of the chosen handles; how many. Raises: `NotFound`."""
        self._image(image_id)
        life = self._lives.get(image_id)
        if life is None:
            raise NotFound(f"image {image_id} is not served")
        handle = None if chosen.handle is msgspec.UNSET else chosen.handle
        container = None if chosen.container is msgspec.UNSET else chosen.container
        return await life.fail(handle=handle, container=container)

    def add_lease(self, image_id: str, request: LeaseRequest, *, pid: int) -> Lease:
        """Note that somebody uses an image. Raises: `NotFound`, `Refused` when it ends."""
        image = self._image(image_id)
        is_ending = image.is_ending and image.wanted is None
        if is_ending or not image.is_live or image.state is ImageStateName.DRAINING:
            raise Refused(f"image {image_id} is {'ending' if is_ending else image.state}: request it again")
        self._lease_number += 1
        lease = Lease(
            id=str(self._lease_number),
            owner=request.owner,
            purpose=request.purpose,
            since_s=round(time.time(), 3),
            pid=pid,
        )
        image.leases[lease.id] = lease
        image.idle_since_s = None
        self.events.publish("lease-added", image=image_id, lease=lease.id, owner=lease.owner)
        return lease

    def end_lease(self, image_id: str, lease_id: str) -> None:
        """Forget a lease; does nothing when it, or its image, is gone."""
        image = self._images.get(image_id)
        if image is not None and image.leases.pop(lease_id, None) is not None:
            self.events.publish("lease-ended", image=image_id, lease=lease_id)

    async def cache(self) -> CacheState:
        """Describe the node cache."""
        return await trio.to_thread.run_sync(
            cache_state, self._config, abandon_on_cancel=True, limiter=self._disk_looks
        )

    async def records(self, *, limit: int) -> Sequence[RecordFacts]:
        """Give the newest records, newest first."""
        directory = records_directory(self._config)
        return await trio.to_thread.run_sync(
            newest_records, directory, limit, abandon_on_cancel=True, limiter=self._disk_looks
        )

    def health(self) -> Health:
        """Say what this node can't do now."""
        warnings = list(self._warnings)
        warnings += [
            f"image {image.id} failed: {image.last_error.message if image.last_error else ''}"
            for image in self._images.values()
            if image.state is ImageStateName.FAILED and image.has_served  # else it is its address that is wrong
        ]
        problems = Counter(image.cache_problem for image in self._images.values() if image.is_live)
        warnings += [
            f"{'1 image is' if images == 1 else f'{images} images are'} served from memory: {why}"
            for why, images in problems.items()
            if why is not None
        ]
        return Health(
            status=HealthStatus.DEGRADED if warnings else HealthStatus.OK,
            warnings=warnings,
            is_draining=self.is_draining,
            images=len(self._lives),
            pid=os.getpid(),
            started_s=round(self._started_s, 3),
            fetch_max_bytes_per_s=self._config.daemon.fetch_max_bytes_per_s,
            version=version(),
        )

    def drain(self) -> None:
        """Take no new images from now on; those that are here go on."""
        if not self.is_draining:
            self.memory.drain(is_on=True)
            self.events.publish("draining")

    def end_drain(self) -> None:
        """Take new images again."""
        if self.is_draining:
            self.memory.drain(is_on=False)
            self.events.publish("drain-ended")


def run_daemon(
    config: Config,
    environment: ManagerEnvironment,
    facts: UnitFacts,
    *,
    config_text: str,
    may_harden: bool = True,
) -> None:
    """Run the daemon until a signal ends it. Raises: `Refused` where its mounts would be nobody's; `StreamdError`."""
    warnings = findings(facts)
    for finding in warnings:
        log.warning("the unit or the kernel lacks something", kind=finding.kind, reason=finding.message)
        if finding.kind == _NO_NAMESPACE:
            raise Refused(f"{finding}: no sandbox could see the mounts")
    mounting.require_root()
    user, problems = prepare_worker_user(config)
    said = [*map(str, warnings), *problems]
    if len(config_text) > _CONFIG_MAX_CHARACTERS:
        raise Refused(f"the configuration has {len(config_text)} characters: more than {_CONFIG_MAX_CHARACTERS}")
    hardening.keep_memory_private()
    hardening.raise_descriptor_limit()
    hardening.lower_oom_score()
    hardening.dump_stacks_on_request()
    allocator.limit_arenas()
    channel = NotifyChannel(environment.notify_socket)
    store = FdStore(channel, environment.received, capacity=facts.fd_store_max)
    keeper = FdKeeper(store, version=version())
    supervisor = Supervisor(config, keeper, config_text=config_text, warnings=said, may_harden=may_harden, user=user)
    notifier = Notifier(channel, watchdog_s=environment.watchdog_s)
    trio.run(_run, config, supervisor, keeper, store, notifier)


async def _run(config: Config, supervisor: Supervisor, keeper: FdKeeper, store: FdStore, notifier: Notifier) -> None:
    counts, limits = ApiCounts(), Limits()
    app = make_app(supervisor, counts, limits=limits, version=version(), requests=supervisor.memory.requests)
    with (
        trio.open_signal_receiver(*_ENDING_SIGNALS) as signals,
        ApiSocket(config.run_directory, restored=lambda: supervisor.events.publish("api-restored")) as api_socket,
    ):
        async with trio.open_nursery() as nursery:
            await nursery.start(supervisor.run)
            listener, renewed = api_socket.listener, api_socket.renewed
            await nursery.start(
                partial(serve, listener, app, counts, limits=limits, allowed=Allowed(), renewed=renewed)
            )
            nursery.start_soon(notifier.keep_alive)
            nursery.start_soon(_tell_status, supervisor, notifier)
            gc.collect()
            allocator.give_back()  # what imports have used
            notifier.ready(supervisor.summary())
            log.info("daemon serves", socket=str(api_socket.path), pid=os.getpid())
            await _end(signals, supervisor, keeper, notifier)
            nursery.cancel_scope.cancel()
        if store.is_there and not store.flush(_FLUSH_S):
            log.warning("the manager may not have taken all descriptors")


async def _end(signals: AsyncIterator[int], supervisor: Supervisor, keeper: FdKeeper, notifier: Notifier) -> None:
    """Wait for a signal; then, unless somebody keeps the mounts for the next life, end the images."""
    async for number in signals:
        log.info("ending on a signal", signal=signal.Signals(number).name, images=supervisor.summary())
        break
    notifier.stopping()
    if keeper.is_there:
        return
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:

            async def hurry() -> None:
                async for _ in signals:
                    scope.cancel()

            nursery.start_soon(hurry)
            await supervisor.end()
            nursery.cancel_scope.cancel()


async def _tell_status(supervisor: Supervisor, notifier: Notifier) -> None:
    last = ""
    while True:
        summary = supervisor.summary()
        if summary != last:
            notifier.status(summary)
            last = summary
        await supervisor.events.changed()
