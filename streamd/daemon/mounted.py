"""The process that serves one mount: puts store, cache, image, kernel and control socket together.

Order: everything that can be refused is refused before the mount exists; the small files are in memory before it is
announced. At the end the kernel's side goes first (nobody can ask any more), then the reads that wait, then the rest;
every step is bounded, whatever the store or a disk does.
"""

import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack

import structlog
import trio

from streamd.daemon import allocator, hardening
from streamd.daemon.caching import open_node_cache
from streamd.daemon.control import ControlSocket, FailSelector, Opener
from streamd.daemon.options import MountOptions
from streamd.daemon.serving import Serving
from streamd.daemon.sockets import is_served, socket_path
from streamd.daemon.warm import WarmMount, bind_sealed
from streamd.errors import NotFound, Refused, StoreError
from streamd.fuse import mounting
from streamd.fuse.mount_paths import Mountpoint
from streamd.fuse.mounting import FuseMount
from streamd.serve.handles import BY_OPERATOR, ENDING, Handle
from streamd.serve.image import ServedImage
from streamd.serve.node_cache import NodeCache
from streamd.store.catalog import Pinned, open_snapshot
from streamd.store.opening import open_store, split_snapshot_url
from streamd.store.port import Store
from streamd.store.retry import retrying

log = structlog.get_logger()

# An unmount or an abort needs nothing of the server; longer than this, and the kernel is stuck.
_END_TIMEOUT_S = 5.0
_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# Reads that were failed are answered in milliseconds, 128 of them, too.
_ANSWER_TIMEOUT_S = 1.0


def run_mount(options: MountOptions, ready: Callable[[dict[str, object]], None]) -> None:
    """Mount a snapshot and serve it until it is unmounted or a signal ends it; `ready` is called once it serves.

    Ends with `KeyboardInterrupt`, after the unmount, when the signal was SIGINT.
    Raises: `NotPermitted`, `NotFound`, `Refused`, `Damaged`, `Unreachable`, `StoreError`; what a task met comes in an
    exception group (`daemon.relay.single_error` takes it out).
    """
    allocator.limit_arenas()
    hardening.keep_memory_private()
    hardening.raise_descriptor_limit()
    hardening.favour_this_thread()
    run_directory = options.config.run_directory
    store_url, snapshot_id = split_snapshot_url(options.snapshot_url)
    with (
        mounting.check(
            options.mountpoint, server_lives=lambda path: is_served(socket_path(run_directory, path))
        ) as directory,
        ControlSocket(run_directory, options.mountpoint) as control_socket,
    ):
        store = open_store(store_url, is_used=True)
        try:
            patient = retrying(store, deadline_s=options.store_timeout_s, on_retry=_say_that_it_waits)
            pinned = open_snapshot(patient, snapshot_id)
            if trio.run(_serve, options, directory, store, pinned, control_socket, ready):
                raise KeyboardInterrupt
        finally:
            store.close()


def _say_that_it_waits(error: StoreError, delay_s: float) -> None:
    log.info("the store fails, asking it again", reason=str(error), delay_s=round(delay_s, 3))


async def _serve(
    options: MountOptions,
    directory: Mountpoint,
    store: Store,
    pinned: Pinned,
    control_socket: ControlSocket,
    ready: Callable[[dict[str, object]], None],
) -> bool:
    """Serve warm where that can be, else by FUSE; true when SIGINT ended it."""
    cache, cache_problem = await open_node_cache(options, store, pinned)
    if cache is not None:
        # From before there is a mount: it must not outlive its server. What comes meanwhile is delivered after all.
        with trio.open_signal_receiver(*_ENDING_SIGNALS) as signals:
            bind = await bind_sealed(cache, pinned, directory, options)
            if bind is not None:
                warm = WarmMount(options, store, pinned, control_socket, ready, cache=cache, bind=bind)
                await warm.run(signals)
                return warm.is_interrupted
    mount = _Mount(options, directory, store, pinned, control_socket, ready, cache=cache, cache_problem=cache_problem)
    await mount.run()
    return mount.is_interrupted


class _Mount:
    """One mount from its first step to its last; also what the control socket asks (`MountControl`)."""

    def __init__(
        self,
        options: MountOptions,
        directory: Mountpoint,
        store: Store,
        pinned: Pinned,
        control_socket: ControlSocket,
        ready: Callable[[dict[str, object]], None],
        *,
        cache: NodeCache | None,
        cache_problem: str | None,
    ) -> None:
        self._cache = cache
        self._cache_problem = cache_problem
        self._options = options
        self._directory = directory
        self._store = store
        self._pinned = pinned
        self._control_socket = control_socket
        self._ready = ready
        self.is_interrupted = False
        self._serving: Serving
        self._image: ServedImage
        self._mount: FuseMount

    async def run(self) -> None:
        serving = Serving(
            self._options, self._store, self._pinned, cache=self._cache, cache_problem=self._cache_problem
        )
        self._serving, self._image = serving, serving.image
        with ExitStack() as stack:

            async def connect() -> tuple[int, None]:
                # From before there is a mount until all has ended: a mount must not outlive its server.
                signals = stack.enter_context(trio.open_signal_receiver(*_ENDING_SIGNALS))
                self._mount = mounting.mount(self._directory)
                stack.callback(os.close, self._mount.fd)
                stack.callback(mounting.abort, self._mount.mountpoint, self._mount.device)
                nursery.start_soon(self._end_on_signals, signals)
                return self._mount.fd, None

            def ready() -> None:
                nursery.start_soon(self._control_socket.serve, self)
                self._ready(self.status())

            async with trio.open_nursery() as nursery:
                await serving.run(connect, ready)
                nursery.cancel_scope.cancel()
        log.info("mount ended", mountpoint=self._options.mountpoint)

    async def _end_on_signals(self, signals: AsyncIterator[int]) -> None:
        """Let the first signal wait a while for files to be closed, a second one not; then fail what still waits."""
        async for number in signals:
            self.is_interrupted = number == signal.SIGINT
            openers = self._image.openers()
            log.info("ending on a signal", signal=signal.Signals(number).name, openers=len(openers))
            if openers:
                log.warning(
                    "in use: waiting for the files to be closed; a second signal fails the reads that wait",
                    wait_s=self._options.config.policy.umount_wait_s,
                    commands=sorted({f"{h.opener.command} (pid {h.opener.pid})" for h in openers}),
                )
            break
        with trio.move_on_after(self._options.config.policy.umount_wait_s):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._until_released, nursery.cancel_scope)
                async for _ in signals:
                    break
                nursery.cancel_scope.cancel()
        await self._abort()

    async def _until_released(self, done: trio.CancelScope) -> None:
        while self._image.openers():
            await trio.sleep(0.05)
        done.cancel()

    def _unmount(self) -> None:
        """Take the mount away, in a thread, and end the connection. Raises: `Refused` when something is open.

        A mount namespace that was made meanwhile holds a copy of the mount (a sandbox with a writable rootfs does, for
        as long as it lives), and with it the connection.
        """
        with mounting.ending_connection(self._mount):
            mounting.unmount(self._mount.mountpoint, self._mount.device)

    def _take_away(self) -> None:
        """Abort the connection and take the mount away, in a thread, also when it was detached by somebody else."""
        with mounting.ending_connection(self._mount):
            mounting.abort(self._mount.mountpoint, self._mount.device)

    async def _abort(self) -> None:
        self._image.fail(_every, "the mount is going away", kind=ENDING)
        # The answers first: a read that the abort finds unanswered ends in ECONNABORTED, which says less than EIO.
        with trio.move_on_after(_ANSWER_TIMEOUT_S, shield=True):
            while any(handle.pending for name in self._image.files for handle in self._image.openers(name)):
                await trio.sleep(0.001)
        with trio.move_on_after(_END_TIMEOUT_S, shield=True):
            await trio.to_thread.run_sync(self._take_away, abandon_on_cancel=True)
        self._image.fail(_every, "the mount is going away", kind=ENDING)  # what was opened in between

    # What the control socket asks for

    def status(self) -> dict[str, object]:
        """Describe the mount (README: status)."""
        return self._serving.status()

    def fail(self, selector: FailSelector) -> int:
        """Fail the reads of the selected handles. Raises: `NotFound` when no open file is meant."""

        def chosen(handle: Handle) -> bool:
            if selector.handle is not None:
                return handle.number == selector.handle
            return selector.container is None or handle.opener.container == selector.container

        failed = self._image.fail(chosen, "failed by an operator", kind=BY_OPERATOR)
        if not failed and (selector.handle is not None or selector.container is not None):
            raise NotFound("no open file of this mount matches")
        return failed

    async def umount(self, *, force: bool) -> Sequence[Opener]:
        """Unmount; without `force` only when nothing is open, else the openers are the answer."""
        if force:
            await self._abort()
            return ()
        open_handles = [handle for name in self._image.files for handle in self._image.openers(name)]
        if not open_handles:
            try:
                # Shielded: the unmount ends `pyfuse3.main`, and with it everything here, before it has returned.
                with trio.move_on_after(_END_TIMEOUT_S, shield=True):
                    await trio.to_thread.run_sync(self._unmount, abandon_on_cancel=True)
            except Refused:  # a working directory in it, a descriptor without reads, or a file opened in this moment
                open_handles = [handle for name in self._image.files for handle in self._image.openers(name)]
                if not open_handles:  # nobody loses a read, and anyone can hold a directory for ever
                    await self._abort()
        return [Opener(h.number, h.file_name, h.opener.pid, h.opener.command, h.opener.container) for h in open_handles]


def _every(_: Handle) -> bool:
    return True
