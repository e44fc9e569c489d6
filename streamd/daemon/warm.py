"""The process of a warm mount: the sealed files of the node cache, bound read-only at the mountpoint.

Reads are the disk's own, so there is nothing to serve. What the process is for: it owns the image in the cache (the
lock that keeps others from changing or evicting it), holds the snapshot's lease in the store, answers the control
socket, and takes the bind away in the end. Whoever has a file open when it goes reads on: the cache never shortens or
punches a file that was sealed once (`serve/sealing.py`).

Whether a mount is warm is decided once, when it is made. What stands in the way of it is logged, and the snapshot is
served as ever.
"""

import os
import select
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import structlog
import trio

from streamd.daemon.caching import Late
from streamd.daemon.control import ControlSocket, FailSelector, Opener
from streamd.daemon.lease import hold_lease
from streamd.daemon.options import MountOptions
from streamd.errors import NotFound, Refused, StreamdError
from streamd.fuse import binding, mountinfo, mounting, openers
from streamd.fuse.binding import BindMount
from streamd.fuse.mount_paths import Mountpoint
from streamd.serve.node_cache import NodeCache
from streamd.serve.sealing import NotSealed, open_sealed
from streamd.snapshot.manifest import Codec
from streamd.store.catalog import Pinned
from streamd.store.port import Store

log = structlog.get_logger()

# A healthy disk answers in milliseconds; a hung one must not keep a pod from starting.
_OPEN_TIMEOUT_S = 5.0
# The kernel takes a mount away at once, or says no.
_UNMOUNT_TIMEOUT_S = 5.0
_RELEASE_LOOK_S = 0.1
_TABLE_LOOK_S = 2.0
_OPENERS_NAMED = 5


class WarmInUse(Refused):
    """Files of a warm mount are open; `openers` says whose, as far as /proc shows it."""

    def __init__(self, mountpoint: str, openers: Sequence[dict[str, object]]) -> None:
        who = ", ".join(
            f"{o['command'] or 'a process'} (pid {o['pid']}) has {o['file']} open" for o in openers[:_OPENERS_NAMED]
        )
        if len(openers) > _OPENERS_NAMED:
            who += f", and {len(openers) - _OPENERS_NAMED} more"
        super().__init__(f"{mountpoint} is in use: {who}; wait for it, or use --force: what is open can be read on")
        self.openers = list(openers)


async def bind_sealed(cache: NodeCache, pinned: Pinned, directory: Mountpoint, *, is_wanted: bool) -> BindMount | None:
    """Bind the image's files if they are sealed, and that is wanted; else take the seal away, for a mount that serves.

    None, too, when the disk doesn't answer in time, or the kernel can't.
    """
    reason = f"the disk did not answer within {_OPEN_TIMEOUT_S:g} s"
    files = Late[int](os.close)
    with trio.move_on_after(_OPEN_TIMEOUT_S):
        try:
            files_fd = await files.call(_open_and_hold, cache, pinned, is_wanted)
            try:
                return binding.bind(files_fd, directory)
            except BaseException:
                os.close(files_fd)
                raise
        except (StreamdError, OSError) as error:
            reason = str(error)
    log.info("the mount is not warm", reason=reason)
    return None


def _open_and_hold(cache: NodeCache, pinned: Pinned, is_wanted: bool) -> int:
    try:
        if not is_wanted:
            raise NotSealed("it shall be served")
        files_fd = open_sealed(cache, pinned.manifest.files)
    except NotSealed:
        cache.unseal()
        raise
    try:
        binding.hold(files_fd)
    except BaseException:
        os.close(files_fd)
        raise
    return files_fd


class WarmMount:
    """A bind from when it was made to its end; also what the control socket asks (`MountControl`).

    It takes over the image's place in the cache and the bind.
    """

    def __init__(
        self,
        options: MountOptions,
        store: Store,
        pinned: Pinned,
        control_socket: ControlSocket,
        ready: Callable[[dict[str, object]], None],
        *,
        cache: NodeCache,
        bind: BindMount,
    ) -> None:
        self._options = options
        self._store = store
        self._pinned = pinned
        self._control_socket = control_socket
        self._ready = ready
        self._cache = cache
        self._bind = bind
        self.is_interrupted = False

    async def run(self, signals: AsyncIterator[int]) -> None:
        """Answer until the bind is gone, whoever takes it away; `signals` are those that are to end it."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._end_on_signals, signals)
                nursery.start_soon(self._control_socket.serve, self)
                nursery.start_soon(hold_lease, self._store, self._pinned.manifest.snapshot_id, self._bind.mountpoint)
                self._ready(self.status())
                log.info("warm mount is there", mountpoint=self._bind.mountpoint, snapshot=self._options.snapshot_url)
                await self._until_gone()
                nursery.cancel_scope.cancel()
        finally:
            mounting.abort(self._bind.mountpoint, self._bind.device)
            os.close(self._bind.files_fd)
            self._cache.close()
        log.info("warm mount ended", mountpoint=self._bind.mountpoint)

    async def _until_gone(self) -> None:
        """Wait until the kernel's table has the bind no more.

        The table tells of its changes by POLLPRI (proc_pid_mountinfo(5)), which Trio can't wait for; it can wait for
        an epoll that does. Whoever asks after a change makes the kernel forget it (fs/proc_namespace.c:mounts_poll),
        the epoll itself among them when it is waited for anew: so it is looked again after a while.
        """
        with open(mountinfo.MOUNTINFO, "rb") as table, select.epoll() as changes:
            changes.register(table, select.EPOLLPRI)
            while self._is_there():
                with trio.move_on_after(_TABLE_LOOK_S):
                    await trio.lowlevel.wait_readable(changes.fileno())

    def _is_there(self) -> bool:
        """Whether the bind is in the table: numbers of mounts are used again, at once, by whoever mounts next."""
        entry = mountinfo.with_id(self._bind.mount_id)
        return entry is not None and entry.device == self._bind.device and binding.is_bind(entry)

    async def _end_on_signals(self, signals: AsyncIterator[int]) -> None:
        """Let the first signal wait a while for files to be closed, a second one not; then detach the bind."""
        async for number in signals:
            self.is_interrupted = number == signal.SIGINT
            log.info("ending on a signal", signal=signal.Signals(number).name)
            break
        with trio.move_on_after(self._options.config.policy.umount_wait_s):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._until_released, nursery.cancel_scope)
                async for _ in signals:
                    break
                nursery.cancel_scope.cancel()
        await self._detach()

    async def _until_released(self, done: trio.CancelScope) -> None:
        while not await self._unmount():
            await trio.sleep(_RELEASE_LOOK_S)
        done.cancel()

    async def _unmount(self) -> bool:
        """Take the bind away; false when it is in use. Shielded: its end is this process's."""
        with trio.move_on_after(_UNMOUNT_TIMEOUT_S, shield=True):
            try:
                await trio.to_thread.run_sync(
                    mounting.unmount, self._bind.mountpoint, self._bind.device, abandon_on_cancel=True
                )
            except NotFound:
                return True
            except Refused:
                return False
            return True
        return False

    async def _detach(self) -> None:
        with trio.move_on_after(_UNMOUNT_TIMEOUT_S, shield=True):
            await trio.to_thread.run_sync(
                mounting.abort, self._bind.mountpoint, self._bind.device, abandon_on_cancel=True
            )

    # What the control socket asks for

    def status(self) -> dict[str, object]:
        """Describe the mount (README: status). It neither fetches nor serves, so those counts are 0."""
        layout = self._pinned.manifest.table
        zero_chunks = int((layout.codec == Codec.ZERO).sum())
        status: dict[str, Any] = {
            "mountpoint": self._bind.mountpoint,
            "mode": "warm",
            "pid": os.getpid(),
            "snapshot_url": self._options.snapshot_url,
            "cache_dir": str(self._options.cache_dir),
            "cache_problem": None,
            "prefetch": str(self._options.prefetch),
            "snapshot": self._pinned.manifest.snapshot_id,
            "digest": self._pinned.digest.hex(),
            "image_bytes": int(layout.start[-1]),
            "stored_bytes": int(layout.frame_bytes.sum()),
            "chunks": len(layout),
            "zero_chunks": zero_chunks,
            "cached_chunks": len(layout) - zero_chunks,
            "is_caching": False,
            "origin_bytes": 0,
            "origin_requests": 0,
            "waiting_chunks": 0,
            "prefetch_waits_for": None,
            "failed_reads": 0,
            "handles": [],
        }
        return status

    def fail(self, selector: FailSelector) -> int:
        """Fail nothing: no read waits here. Raises: `NotFound` when a certain file was meant."""
        if selector.handle is not None or selector.container is not None:
            raise NotFound("this mount is warm: it has no reads that wait, the disk answers them")
        return 0

    async def umount(self, *, force: bool) -> Sequence[Opener]:
        """Unmount; without `force` only when no file is open. Raises: `WarmInUse`."""
        if not force and not await self._unmount():
            found = await trio.to_thread.run_sync(
                openers.find, self._bind.mountpoint, self._bind.mount_id, abandon_on_cancel=True
            )
            if found:
                raise WarmInUse(
                    self._bind.mountpoint,
                    [
                        {"file": name, "pid": who.pid, "command": who.command, "container": who.container}
                        for name, who in found
                    ],
                )
        # A working directory in it, or a file that was closed in this moment: nobody loses a read.
        await self._detach()
        return ()
