"""The process that serves one mount: puts store, cache, image, kernel and control socket together.

Order: everything that can be refused is refused before the mount exists; the small files are in memory before it is
announced. At the end the kernel's side goes first (nobody can ask any more), then the reads that wait, then the rest;
every step is bounded, whatever the store or a disk does.
"""

import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import structlog
import trio

from streamd.daemon import allocator, hardening
from streamd.daemon.caching import open_node_cache, seal_when_whole
from streamd.daemon.control import ControlSocket, FailSelector, Opener
from streamd.daemon.learner import Learner
from streamd.daemon.lease import hold_lease
from streamd.daemon.options import MountOptions
from streamd.daemon.records import RecordKeeper
from streamd.daemon.sockets import is_served, socket_path
from streamd.daemon.warm import WarmMount, bind_sealed
from streamd.errors import NotFound, Refused, StreamdError, Unreachable
from streamd.fuse import mounting
from streamd.fuse.mount_paths import Mountpoint
from streamd.fuse.mounting import FuseMount
from streamd.fuse.session import Session
from streamd.serve.handles import Handle
from streamd.serve.image import ServedImage
from streamd.serve.node_cache import NodeCache
from streamd.serve.record import RecordedFile, Recorder, RecordHead
from streamd.snapshot.trace import Sample
from streamd.store.catalog import Pinned, open_snapshot
from streamd.store.opening import open_store, split_snapshot_url
from streamd.store.port import Store
from streamd.store.retry import retrying
from streamd.store.traces import LearnedOrder

log = structlog.get_logger()

_MEMORY_LOOK_S = 2.0
_MEMORY_STEP_BYTES = 32 << 20
# An unmount or an abort needs nothing of the server; longer than this, and the kernel is stuck.
_END_TIMEOUT_S = 5.0
# Of the kernel's time-out for a request: what is left is for noticing it, and for the reply.
_REQUEST_TIMEOUT_SHARE = 0.75
_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# How long the calls that keep the learned order are tried again.
_LEARN_TIMEOUT_S = 10.0
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
    run_directory = options.config.run_directory
    store_url, snapshot_id = split_snapshot_url(options.snapshot_url)
    with (
        mounting.check(
            options.mountpoint, server_lives=lambda path: is_served(socket_path(run_directory, path))
        ) as directory,
        ControlSocket(run_directory, options.mountpoint) as control_socket,
    ):
        store = open_store(store_url)
        try:
            pinned = open_snapshot(retrying(store, deadline_s=options.store_timeout_s), snapshot_id)
            if trio.run(_serve, options, directory, store, pinned, control_socket, ready):
                raise KeyboardInterrupt
        finally:
            store.close()


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
            bind = await bind_sealed(cache, pinned, directory, is_wanted=options.warm)
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
        self._image: ServedImage
        self._mount: FuseMount

    async def run(self) -> None:
        learner = Learner(LearnedOrder(retrying(self._store, deadline_s=_LEARN_TIMEOUT_S), self._pinned))
        recorder = Recorder(self._record_head(), origin_s=trio.current_time())
        records = RecordKeeper(recorder, directory=self._options.config.log_directory / "records")

        def on_sample(sample: Sample) -> None:  # a restore has loaded
            learner.add(sample)
            records.write_soon()

        self._image = ServedImage(
            self._store,
            self._pinned,
            self._options.config,
            cache=self._cache,
            prefetch=self._options.prefetch,
            recorder=recorder,
            on_sample=on_sample,
            read_limit_s=_read_limit_s(),
        )
        with ExitStack() as handlers:
            async with trio.open_nursery() as nursery:
                await nursery.start(self._image.run)
                async with trio.open_nursery() as preparing:
                    preparing.start_soon(self._load_small_files)
                    preparing.start_soon(learner.prepare, self._image)
                # From before there is a mount until all has ended: a mount must not outlive its server.
                signals = handlers.enter_context(trio.open_signal_receiver(*_ENDING_SIGNALS))
                self._mount = mounting.mount(self._directory)
                try:
                    session = Session(self._image, self._mount)
                    nursery.start_soon(self._end_on_signals, signals)
                    nursery.start_soon(self._control_socket.serve, self)
                    nursery.start_soon(self._give_memory_back)
                    if self._cache is not None:
                        nursery.start_soon(seal_when_whole, self._cache, self._pinned, lambda: self._image.is_whole)
                    nursery.start_soon(learner.run)
                    nursery.start_soon(records.run)
                    nursery.start_soon(
                        hold_lease, self._store, self._pinned.manifest.snapshot_id, self._options.mountpoint
                    )
                    self._ready(self.status())
                    log.info("mount serves", mountpoint=self._options.mountpoint, snapshot=self._options.snapshot_url)
                    await session.serve()
                finally:
                    mounting.abort(self._mount.mountpoint, self._mount.device)
                    self._image.fail(_every, "the mount is going away")
                    self._image.learn()
                    nursery.cancel_scope.cancel()
        session.end()
        os.close(self._mount.fd)
        log.info("mount ended", mountpoint=self._options.mountpoint)

    def _record_head(self) -> RecordHead:
        manifest, options = self._pinned.manifest, self._options
        base = 0
        files = []
        for file in manifest.files:
            files.append(RecordedFile(file.name, file.size, base))
            base += file.size
        return RecordHead(
            snapshot=manifest.snapshot_id,
            digest=self._pinned.digest.hex(),
            snapshot_url=options.snapshot_url,
            mountpoint=options.mountpoint,
            pid=os.getpid(),
            started_s=time.time(),
            chunk_bytes=manifest.chunk_bytes,
            stored_bytes=int(manifest.table.frame_bytes.sum()),
            files=tuple(files),
            facts={"prefetch": options.prefetch.value, "cache": str(self._cache is not None)},
        )

    async def _load_small_files(self) -> None:
        with trio.move_on_after(self._options.store_timeout_s) as scope:
            await self._image.load_small_files()
        if scope.cancelled_caught:
            last = self._image.status()["last_failure"] or "no answer"
            raise Unreachable(
                f"the store did not give the snapshot's small files within {self._options.store_timeout_s:g} s ({last})"
            )

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

    async def _give_memory_back(self) -> None:
        """Return memory that a load has used and freed, while it goes on and once it is over."""
        given_back_at_bytes = 0
        while True:
            await trio.sleep(_MEMORY_LOOK_S)
            fetched_bytes = self._image.stats.fetched_bytes
            if fetched_bytes - given_back_at_bytes > _MEMORY_STEP_BYTES:
                given_back_at_bytes = fetched_bytes
                with suppress(RuntimeError):  # no thread to be had
                    await trio.to_thread.run_sync(allocator.give_back, abandon_on_cancel=True)

    async def _until_released(self, done: trio.CancelScope) -> None:
        while self._image.openers():
            await trio.sleep(0.05)
        done.cancel()

    def _unmount(self) -> None:
        """Take the mount away, in a thread, and end the connection. Raises: `Refused` when something is open.

        A mount namespace that was made meanwhile holds a copy of the mount (a sandbox with a writable rootfs does, for
        as long as it lives), and with it the connection.
        """
        mounting.unmount(self._mount.mountpoint, self._mount.device)
        self._end_connection()

    def _take_away(self) -> None:
        """Abort the connection and take the mount away, in a thread, also when it was detached by somebody else."""
        mounting.abort(self._mount.mountpoint, self._mount.device)
        self._end_connection()

    def _end_connection(self) -> None:
        try:
            mounting.abort_connection(self._mount.connection_id)
        except StreamdError as error:
            log.warning("the connection lives on in other mount namespaces", reason=str(error))

    async def _abort(self) -> None:
        self._image.fail(_every, "the mount is going away")
        # The answers first: a read that the abort finds unanswered ends in ECONNABORTED, which says less than EIO.
        with trio.move_on_after(_ANSWER_TIMEOUT_S, shield=True):
            while any(handle.pending for name in self._image.files for handle in self._image.openers(name)):
                await trio.sleep(0.001)
        with trio.move_on_after(_END_TIMEOUT_S, shield=True):
            await trio.to_thread.run_sync(self._take_away, abandon_on_cancel=True)
        self._image.fail(_every, "the mount is going away")  # what was opened in between

    # What the control socket asks for

    def status(self) -> dict[str, object]:
        """Describe the mount (README: status)."""
        mount: dict[str, Any] = {
            "mountpoint": self._options.mountpoint,
            "mode": "fuse",
            "pid": os.getpid(),
            "snapshot_url": self._options.snapshot_url,
            "cache_dir": str(self._options.cache_dir) if self._options.cache_dir else None,
            "cache_problem": self._cache_problem,
            "prefetch": self._options.prefetch.value,
        }
        return mount | self._image.status()

    def fail(self, selector: FailSelector) -> int:
        """Fail the reads of the selected handles. Raises: `NotFound` when no open file is meant."""

        def chosen(handle: Handle) -> bool:
            if selector.handle is not None:
                return handle.number == selector.handle
            return selector.container is None or handle.opener.container == selector.container

        failed = self._image.fail(chosen, "failed by an operator")
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


def _read_limit_s() -> float | None:
    """Say when reads are to fail, since the kernel would end the mount, and all its sandboxes, soon after."""
    timeout_s = mounting.request_timeout_s()
    if timeout_s is None:
        return None
    limit_s = _REQUEST_TIMEOUT_SHARE * timeout_s
    log.warning(
        "the kernel ends mounts whose requests wait (fs.fuse.*_request_timeout): reads that wait are failed first",
        request_timeout_s=timeout_s,
        read_limit_s=limit_s,
    )
    return limit_s


def _every(_: Handle) -> bool:
    return True
