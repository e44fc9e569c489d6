"""One image's life in the supervisor: prepared, mounted, served by one worker after another, taken away.

The supervisor owns the mount: it made it, has the connection's descriptor and the kernel's first request, and nobody
else unmounts it. A worker that dies is replaced within the second:

1. Its process is gone, with all its threads (its pidfd says so): never two readers of one connection.
2. The kernel is told to give out again what was read and not answered (FUSE_NOTIFY_RESEND, Linux 6.9).
3. The next worker gets the descriptor, the first request and the pinned snapshot; the store isn't asked.

A worker that doesn't beat in time is killed and replaced the same way. One that can't be killed (its thread waits for
a disk, uninterruptibly) is not replaced, since it may come back: the connection is aborted, so its reads fail. So they
do when workers die one after another, and when the kernel is older. Nothing here opens or stats what is on a mount.

An image that is whole on the node and sealed (`holding.py`) needs no server: its worker finds that out, and gives the
files' directory instead of asking for a connection; it is bound read-only. The worker stays: it holds the cache's lock
and the lease, and proves the tenant's access. Its death is nothing to readers; the next one holds the same bind.
"""

import errno
import os
import signal
import time
from collections.abc import Callable, Mapping
from enum import Enum, auto
from functools import partial
from typing import Any, Protocol

import structlog
import trio

from streamd.config import Config
from streamd.daemon.api.models import ErrorFacts, ImageStateName
from streamd.daemon.assignment import Assignment
from streamd.daemon.image_mount import (
    AnyMount,
    WorkerLost,
    first_request,
    have_sent_again,
    is_mounted,
    make_mount,
    take_away,
)
from streamd.daemon.images import Image
from streamd.daemon.memfds import memfd_of
from streamd.daemon.relay import relayed, single_error
from streamd.daemon.shares import Demand
from streamd.daemon.spawning import Spawner, WorkerProcess
from streamd.daemon.worker_user import WorkerUser
from streamd.errors import Exit, NotFound, Refused, StreamdError
from streamd.fuse import binding, mounting
from streamd.fuse.binding import BindMount
from streamd.fuse.mount_paths import Mountpoint
from streamd.fuse.mounting import FuseMount

log = structlog.get_logger()

# A worker beats every second; its Trio thread never waits for anything, but a node may be busy.
HANG_S = 5.0
# A wait that ends so much too late: this process stood still, say with its machine, and the other side may have, too.
_STOOD_STILL_S = 1.0
# From SIGKILL to the end of the last thread: milliseconds, or a disk that hangs.
REAP_S = 3.0
_HAND_OVER_S = 5.0
_SERVING_S = 30.0
# On top of the store's time-out.
_PREPARE_S = 30.0
_IDLE_LOOK_S = 0.5
# From the unmount to the end of a worker, with what it has for the disk and the store. One whose connection couldn't be
# ended, and lives on with copies of the mount in other mount namespaces, doesn't end by itself.
_END_S = 10.0
_ANSWER_S = 5.0
# A worker is told of a greater share when it is so much greater; of a smaller one always, since they add up.
_NOTABLE_SHARE = 1.05


class Ending(Enum):
    """Why a worker serves no more."""

    OVER = auto()  # the connection has ended
    DIED = auto()
    HUNG = auto()
    UNREAPED = auto()  # it hangs, and can't be killed


class Keeper(Protocol):
    """Where what must outlive the supervisor is kept (`adoption.py`); any of it may be kept nowhere."""

    def keep_mount(self, life: "Life") -> None:
        """Keep the mount's descriptor and what is known of it."""
        ...

    def keep_worker(self, life: "Life") -> None:
        """Keep the way to the worker that serves now, in place of the last one's."""
        ...

    def forget(self, life: "Life") -> None:
        """Keep nothing of it any more."""
        ...


class Life:
    """Runs one image; state of the Trio thread. `tell(kind, **facts)` publishes an event of the image.

    `tables_room_bytes()` is what the tables of its manifest may take of the node's memory, None for anything.
    """

    def __init__(
        self,
        image: Image,
        config: Config,
        spawner: Spawner,
        keeper: Keeper,
        tell: Callable[..., None],
        *,
        config_text: str,
        tables_room_bytes: Callable[[], int | None] = lambda: None,
        store_timeout_s: float = 60.0,
        may_harden: bool = True,
        user: WorkerUser | None = None,
    ) -> None:
        self.image = image
        self.mount: FuseMount | BindMount | None = None
        self.init = b""
        self.keepsake_fd = -1
        self.worker: WorkerProcess | None = None
        self._config = config
        self._spawner = spawner
        self._keeper = keeper
        self._tell = tell
        self._config_text = config_text
        self._tables_room_bytes = tables_room_bytes
        self._store_timeout_s = store_timeout_s
        self._may_harden = may_harden
        self._may_be_warm = True
        self._user = user
        self._answers: dict[int, int | None] = {}
        self._answered = trio.Event()
        self._questions = 0
        self._is_handing_over = False
        self._preparing: trio.CancelScope | None = None
        self._share: int | None = None  # of the link, that the worker was told, or the next one will be

    def adopt(self, mount: FuseMount | BindMount, init: bytes, keepsake_fd: int, worker: WorkerProcess | None) -> None:
        """Take over a mount that a former supervisor has made, and its worker, if that lives; before `run`."""
        self.mount, self.init, self.keepsake_fd, self.worker = mount, init, keepsake_fd, worker
        self.image.is_warm = isinstance(mount, BindMount)
        self.image.state = self.image.mounted_state
        self.image.has_served = True

    async def run(self) -> None:
        """Live; returns when the image is gone or has failed. A cancellation leaves the mount and its worker alone."""
        image, end = self.image, ImageStateName.GONE
        try:
            if self.mount is None:
                with trio.CancelScope() as self._preparing:
                    await self._begin()
                if self._preparing.cancelled_caught:
                    raise WorkerLost("it was released before it was mounted")
                self._preparing = None
            else:
                image.is_ending = not await trio.to_thread.run_sync(is_mounted, self.mount)
                if self.worker is None:
                    await self._take_over()
                else:
                    image.worker_pid = self.worker.pid
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._end_when_idle)
                await self._serve()
                nursery.cancel_scope.cancel()
        except (StreamdError, OSError, BaseExceptionGroup) as error:
            lone = single_error(error)
            if not isinstance(lone, StreamdError | OSError):
                raise
            self._note_error(lone)
            end = ImageStateName.FAILED
        with trio.CancelScope(shield=True):
            await self._clean_up()
        image.state = end  # not before: whoever asks again then begins anew, at the same mountpoint
        if image.wanted is None:  # else they are the next one's
            for lease_id in image.end_leases():
                self._tell("lease-ended", lease=lease_id)
        self._tell("image-gone" if image.state is ImageStateName.GONE else "image-failed", reason=self._reason())

    # The beginning

    async def _begin(self) -> None:
        """Have a worker prepare, mount, and let it serve. Raises: `StreamdError`, `OSError`."""
        while True:
            worker = self.worker = await self._new_worker()
            worker.wire.send_nowait(self._assignment().message())
            answer = await self._expect(worker, "prepared", self._store_timeout_s + _PREPARE_S)
            if answer is not None:
                self.keepsake_fd, *files = answer
                if not files or await self._bind(files[0]):
                    break
                self._may_be_warm = False
                os.close(self.keepsake_fd)
                self.keepsake_fd = -1
            await self._bury()
            self._count_death()
        if self.mount is None:
            self.mount = await self._make_mount(mounting.mount)
            self.init = await first_request(self.mount.fd)
        mount = self.mount
        self._keeper.keep_mount(self)
        self._keeper.keep_worker(self)
        if isinstance(mount, BindMount):
            worker.wire.send_nowait({"do": "hold", "mountpoint": mount.mountpoint, "bind": _bind_facts(mount)})
        else:
            init_fd = memfd_of(self.init)
            try:
                worker.wire.send_nowait({"do": "connect"}, [mount.fd, init_fd])
            finally:
                os.close(init_fd)
        self.image.state = self.image.mounted_state
        if await self._expect(worker, "serving", _SERVING_S) is None:
            if await self._bury() is Ending.UNREAPED:
                raise WorkerLost("its worker hangs and can't be killed: its reads fail")
            await self._take_over()
        self.image.has_served = True
        self._tell("image-serving", mountpoint=mount.mountpoint, mode="warm" if self.image.is_warm else "fuse")

    async def _bind(self, files_fd: int) -> bool:
        """Bind sealed files, whose descriptor is the mount's then; false when that can't be."""
        try:
            self.mount = await self._make_mount(partial(binding.bind, files_fd))
        except BaseException as error:
            os.close(files_fd)
            if not isinstance(error, StreamdError | OSError):
                raise
            log.warning("an image that is whole can't be bound, and is served", image=self.image.id, reason=str(error))
            return False
        self.image.is_warm = True
        return True

    async def _make_mount(self, mount: Callable[[Mountpoint], AnyMount]) -> AnyMount:
        def say_where(mountpoint: str) -> None:
            self.image.mountpoint = mountpoint

        return await trio.to_thread.run_sync(make_mount, self.image.mountpoint, mount, say_where)

    def _assignment(self) -> Assignment:
        image = self.image
        openers = tuple((o.handle, o.pid, o.command, o.container) for o in image.known_openers.values())
        return Assignment(
            image=image.id,
            snapshot_url=image.snapshot_url,
            mountpoint=image.mountpoint,
            prefetch=image.prefetch.value,
            tenant=image.tenant,
            credentials=image.credentials,
            config_text=self._config_text,
            log_level=self._config.log_level,
            store_timeout_s=self._store_timeout_s,
            may_harden=self._may_harden,
            tables_max_bytes=self._tables_room_bytes(),
            fetch_bytes_per_s=self._share or 0,
            openers=openers,
            bind=_bind_facts(self.mount) if isinstance(self.mount, BindMount) else None,
            may_be_warm=self._may_be_warm,
            user=None if self._user is None else (self._user.uid, self._user.gid),
        )

    async def _new_worker(self) -> WorkerProcess:
        worker = await self._spawner.spawn()
        self.image.worker_pid, self.image.worker_started_s = worker.pid, time.time()
        return worker

    async def _expect(self, worker: WorkerProcess, what: str, limit_s: float) -> list[int] | None:
        """Wait for a message; give its descriptors, None when the worker died or hung instead.

        Raises: what the worker was refused by.
        """
        with trio.move_on_after(limit_s):
            while (received := await worker.wire.receive()) is not None:
                message, fds = received
                if message.get("is") == "refused":
                    raise relayed(message.get("error"))
                if message.get("is") == what:
                    return fds
                self._note(message)
        return None

    # Serving

    async def _serve(self) -> None:
        """Watch workers until the connection is over. Raises: `WorkerLost`, `StreamdError`."""
        while True:
            pid = self.image.worker_pid
            ending = await self._watch()
            if ending is Ending.OVER or self.image.is_unmounted:
                return
            if self._is_handing_over:
                self._is_handing_over = False
            else:
                log.warning("worker lost", image=self.image.id, pid=pid, how=ending.name.lower())
                self._tell("worker-lost", how=ending.name.lower(), pid=pid)
                self._count_death()
            if ending is Ending.UNREAPED:
                raise WorkerLost("its worker hangs and can't be killed (a disk that doesn't answer?): its reads fail")
            await self._take_over()

    async def _watch(self) -> Ending:
        worker = self.worker
        assert worker is not None
        while True:
            with trio.move_on_after(HANG_S) as scope:
                received = await worker.wire.receive()
            if _stood_still(scope):
                continue
            if scope.cancelled_caught:
                return await self._bury(Ending.HUNG)
            if received is None:
                return await self._bury()
            message, fds = received
            for fd in fds:
                os.close(fd)
            match message.get("is"):
                case "ended":
                    self.image.is_ending = True
                    await self._bury()
                    return Ending.OVER
                case "refused":
                    raise relayed(message.get("error"))
            self._note(message)

    def _note(self, message: Mapping[str, Any]) -> None:
        match message.get("is"):
            case "opened":
                self._admit_tables(int(message["tables_bytes"]))
            case "beat":
                had_problem = self.image.cache_problem is not None
                self.image.take_status(message["status"])
                if self.image.cache_problem is not None and not had_problem:
                    self._tell("cache-lost", reason=self.image.cache_problem)
                self._note_troubles()
            case "answer":
                if message.get("id") in self._answers:
                    self._answers[message["id"]] = int(message["failed"])
                    self._answered.set()
                    self._answered = trio.Event()

    def _admit_tables(self, needed_bytes: int) -> None:
        """Note what the tables take. Raises: `Refused`, when others have taken the room that the worker was told of."""
        room_bytes = self._tables_room_bytes()
        if room_bytes is not None and needed_bytes > room_bytes:
            raise Refused(
                f"the manifest's tables take {needed_bytes / 1e6:.0f} MB of memory, and this node has "
                f"{room_bytes / 1e6:.0f} MB for them (daemon.memory_max_bytes)"
            )
        self.image.tables_bytes = needed_bytes

    def _note_troubles(self) -> None:
        """Tell of reads that failed, and of a store that has gone away or is back."""
        image, now_s = self.image, time.time()
        for failed in image.newly_failed(now_s):
            self._tell("reads-failed", cause=failed.kind, reads=failed.reads, reason=failed.reason)
        before = image.store_away
        if image.look_at_store(now_s, after_s=self._config.policy.event_after_s):
            if image.store_away is not None:
                self._tell("store-away", reason=image.store_away.reason)
            elif before is not None:
                self._tell("store-back", after_s=round(now_s - before.since_s, 1))

    async def _bury(self, ending: Ending = Ending.DIED) -> Ending:
        """End what is left of the worker; it is no reader of the connection any more, unless it can't be killed.

        Of a bind nobody but the kernel is a reader, so it may be left behind.
        """
        worker, self.worker = self.worker, None
        assert worker is not None
        worker.signal(signal.SIGKILL)
        while True:
            with trio.move_on_after(REAP_S) as scope:
                await worker.gone()
            if not _stood_still(scope):
                break
        worker.close()
        self.image.worker_is_gone()
        return Ending.UNREAPED if scope.cancelled_caught and not self.image.is_warm else ending

    async def _take_over(self) -> None:
        """Put a new worker in the last one's place. Raises: `WorkerLost`, `StreamdError`, `OSError`."""
        image, mount = self.image, self.mount
        assert mount is not None
        while True:
            if not self.image.is_warm:
                have_sent_again(mount.fd)
            worker = self.worker = await self._new_worker()
            self._keeper.keep_worker(self)  # before it can read: the next supervisor must know of every reader
            init_fd = memfd_of(self.init)
            try:
                worker.wire.send_nowait(self._assignment().message(), [mount.fd, init_fd, self.keepsake_fd])
            finally:
                os.close(init_fd)
            if await self._expect(worker, "serving", _SERVING_S) is not None:
                image.restarts += 1
                self._keeper.keep_mount(self)  # by now it is this version's
                self._tell("worker-replaced", pid=worker.pid, restarts=image.restarts)
                return
            if await self._bury() is Ending.UNREAPED:
                raise WorkerLost("its worker hangs and can't be killed: its reads fail")
            self._count_death()

    def _count_death(self) -> None:
        """Raises: `WorkerLost` when it was one too many."""
        if not self.image.deaths.note(trio.current_time()):
            raise WorkerLost("its workers die one after another: its reads fail; `streamd events` has each")

    async def hand_over(self) -> None:
        """Have the worker replaced by one of this version; whoever reads notices a pause."""
        worker = self.worker
        if worker is None:
            return
        self._is_handing_over = True
        worker.wire.send_nowait({"do": "hand-over"})
        await trio.sleep(_HAND_OVER_S)
        if self.worker is worker:
            worker.signal(signal.SIGKILL)

    @property
    def demand(self) -> Demand:
        """What its worker would take of the node's link."""
        return self.image.demand

    def share_link(self, bytes_per_s: int) -> None:
        """Bound what its worker takes, and those that come after it (0: no bound)."""
        if self._share is not None and self._share <= bytes_per_s <= _NOTABLE_SHARE * self._share:
            return
        # One that doesn't read what it is told is told the next time, or is replaced.
        if self.worker is None or self.worker.wire.send_nowait({"do": "rate", "bytes_per_s": bytes_per_s}):
            self._share = bytes_per_s

    async def fail(self, *, handle: int | None, container: str | None) -> int:
        """Fail reads; how many handles'. Raises: `NotFound` when nobody serves."""
        if self.worker is None:
            raise NotFound(f"image {self.image.id} has no worker now")
        self._questions += 1
        number = self._questions
        self._answers[number] = None
        try:
            self.worker.wire.send_nowait({"do": "fail", "id": number, "handle": handle, "container": container})
            with trio.move_on_after(_ANSWER_S):
                while (failed := self._answers[number]) is None:
                    await self._answered.wait()
                return failed
        finally:
            del self._answers[number]
        raise StreamdError(f"the worker of image {self.image.id} does not answer")

    # The end

    async def _end_when_idle(self) -> None:
        while True:
            await trio.sleep(_IDLE_LOOK_S)
            if self.image.is_idle(trio.current_time(), grace_s=self._config.daemon.grace_s):
                await self._unmount()

    async def _unmount(self) -> None:
        """Unmount if the kernel agrees; the worker then finds its connection ended, or its bind gone."""
        image, mount = self.image, self.mount
        assert mount is not None
        image.is_ending = True  # from before the kernel is asked: who asks for it meanwhile must not get what goes away
        try:
            await trio.to_thread.run_sync(take_away, mount)
        except (StreamdError, OSError) as error:
            if not isinstance(error, Refused):  # opened in this moment, or a working directory
                log.warning("an image that nobody uses can't be unmounted", image=image.id, reason=str(error))
            if image.stay():
                self._tell("image-serving", mountpoint=mount.mountpoint)
            return
        image.is_unmounted = True
        await trio.sleep(_END_S)
        if self.worker is not None:
            log.warning("a worker is killed whose mount is gone", image=image.id, pid=self.worker.pid)
            self.worker.signal(signal.SIGKILL)

    async def abort(self) -> None:
        """End the connection, whoever waits for it; and an image that isn't mounted yet."""
        self.image.is_ending = True
        if self._preparing is not None:
            self._preparing.cancel()
        if self.mount is not None:
            try:
                await trio.to_thread.run_sync(mounting.abort, self.mount.mountpoint, self.mount.device)
            except (StreamdError, OSError) as error:
                log.warning("a mount is left behind", image=self.image.id, reason=str(error))

    async def _clean_up(self) -> None:
        await self.abort()
        if self.worker is not None:
            await self._bury()
        self._keeper.forget(self)
        self.close()
        try:
            os.rmdir(self.image.mountpoint)
        except OSError as error:
            if error.errno != errno.ENOENT:
                log.info("a mountpoint is left behind", image=self.image.id, reason=error.strerror)

    def close(self) -> None:
        """Let go of the descriptors, and of nothing else."""
        if self.mount is not None:
            trio.lowlevel.notify_closing(self.mount.fd)
            os.close(self.mount.fd)
            self.mount = None
        if self.keepsake_fd >= 0:
            os.close(self.keepsake_fd)
            self.keepsake_fd = -1
        if self.worker is not None:
            self.worker.close()
            self.worker = None

    def _note_error(self, error: StreamdError | OSError) -> None:
        log.warning("image failed", image=self.image.id, reason=str(error))
        kind = error.kind if isinstance(error, StreamdError) else "failed"
        code = error.exit_code if isinstance(error, StreamdError) else Exit.FAILED
        self.image.last_error = ErrorFacts(
            kind=kind, message=str(error)[:1000], exit_code=int(code), at_s=round(time.time(), 3)
        )

    def _reason(self) -> str:
        return self.image.last_error.message if self.image.last_error else ""


def _bind_facts(bind: BindMount) -> tuple[int, tuple[int, int]]:
    """Give what a worker knows a bind by."""
    return bind.mount_id, bind.device


def _stood_still(scope: trio.CancelScope) -> bool:
    """Whether a wait was ended by its deadline, and only long after it: it says nothing of who was waited for."""
    return scope.cancelled_caught and trio.current_time() - scope.deadline > _STOOD_STILL_S
