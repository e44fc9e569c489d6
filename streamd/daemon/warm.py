"""The process of a warm mount: the sealed files of the node cache, bound read-only at the mountpoint.

Beside holding the files (`holding.py`) it answers the control socket, and takes the bind away in the end.
"""

import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence

import structlog
import trio

from streamd.daemon.control import ControlSocket, FailSelector, Opener
from streamd.daemon.holding import Holding, hold_files
from streamd.daemon.options import MountOptions
from streamd.errors import NotFound, Refused, StreamdError
from streamd.fuse import binding, mounting, openers
from streamd.fuse.binding import BindMount
from streamd.fuse.mount_paths import Mountpoint
from streamd.serve.node_cache import NodeCache
from streamd.store.catalog import Pinned
from streamd.store.port import Store

log = structlog.get_logger()

# The kernel takes a mount away at once, or says no.
_UNMOUNT_TIMEOUT_S = 5.0
_RELEASE_LOOK_S = 0.1
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


async def bind_sealed(
    cache: NodeCache, pinned: Pinned, directory: Mountpoint, options: MountOptions
) -> BindMount | None:
    """Bind the image's files if they are sealed, and that is wanted; else take the seal away, for a mount that serves.

    None, too, when the disk doesn't answer in time, or the kernel can't.
    """
    files_fd = await hold_files(cache, pinned, options, is_wanted=options.warm)
    if files_fd is None:
        return None
    try:
        return binding.bind(files_fd, directory)
    except BaseException as error:
        os.close(files_fd)
        if not isinstance(error, StreamdError | OSError):
            raise
        log.info("the mount is not warm", reason=str(error))
        return None


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
        self._holding = Holding(options, store, pinned, bind)
        self._policy = options.config.policy
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
                await self._holding.run(lambda: self._ready(self.status()))
                nursery.cancel_scope.cancel()
        finally:
            mounting.abort(self._bind.mountpoint, self._bind.device)
            os.close(self._bind.fd)
            self._cache.close()

    async def _end_on_signals(self, signals: AsyncIterator[int]) -> None:
        """Let the first signal wait a while for files to be closed, a second one not; then detach the bind."""
        async for number in signals:
            self.is_interrupted = number == signal.SIGINT
            log.info("ending on a signal", signal=signal.Signals(number).name)
            break
        with trio.move_on_after(self._policy.umount_wait_s):
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
        """Describe the mount (README: status)."""
        return self._holding.status()

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
