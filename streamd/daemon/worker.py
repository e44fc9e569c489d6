"""The process that serves one image, on a mount that is the supervisor's; or holds it, while it is warm.

What is said on the wire (`wire.py`), all of it in this order:

    supervisor → worker  {"do": "serve", …}          an assignment (`Assignment`); with the descriptors [device, INIT,
                                                     snapshot] when it takes over a mount that another one has served
    worker → supervisor  {"is": "opened", "tables_bytes"}
                                                     what the manifest's tables take of its memory
                         {"is": "proven"}            the store lets these credentials read the snapshot; where the
                                                     assignment asks for no more (`proof.py`), the process ends
                         {"is": "prepared"}          it can serve; with [snapshot], what a next worker needs. Or with
                                                     [snapshot, files]: these are sealed (`holding.py`), bind them
                         {"is": "refused", "error"}  it can't, and ends
    supervisor → worker  {"do": "connect"}           with [device, INIT], when it doesn't take over
                         {"do": "hold", "bind"}      instead, when it has bound the files; the place in "mountpoint"
    worker → supervisor  {"is": "serving"}
                         {"is": "beat", "status"}    every second: it lives; before it serves, now and then
                         {"is": "ended"}             the connection is over (unmounted, aborted), and so is this process
    supervisor → worker  {"do": "fail", "id", …}     → {"is": "answer", "id", "failed"}
                         {"do": "rate", "bytes_per_s"}
                                                     what it may fetch from now on (0: no bound)
                         {"do": "hand-over"}         end, leaving what waits to the next worker

Of a warm image the device is the files' directory, and INIT empty. A worker asks for the snapshot with its tenant's
credentials before it looks into the cache, and goes on asking: whoever may not read it gets no warm image either.

A worker that has no mount yet dies with its supervisor, whatever it hangs in. One that has one serves on: the next
supervisor finds the wire in its fd store; without one, the worker ends with the mount.

A tenant's tokens are this process's only, and that of who fetches them for it (`token_process.py`). It drops what a
server doesn't need: root, capabilities, programs, mounts, namespaces. Memory that replies come from is touched before
(`fuse/connection.py`).
"""

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import structlog
import trio

from streamd import config as configuration
from streamd.config import Config, Prefetch
from streamd.daemon import allocator, hardening, seccomp
from streamd.daemon.assignment import BEAT_S, Assignment
from streamd.daemon.caching import open_node_cache
from streamd.daemon.holding import Holding, hold_files
from streamd.daemon.keepsake import MAX_BYTES, decode_pinned, encode_pinned
from streamd.daemon.memfds import bytes_of, memfd_of
from streamd.daemon.options import MountOptions
from streamd.daemon.relay import error_record, single_error
from streamd.daemon.serving import Serving
from streamd.daemon.token_process import ForkedSource
from streamd.daemon.wire import Wire
from streamd.errors import NotPermitted, Refused, StoreError, StoreErrorKind, StreamdError
from streamd.fuse.binding import BindMount
from streamd.logs import configure
from streamd.serve.handles import BY_OPERATOR, Handle, Opener
from streamd.serve.node_cache import NodeCache
from streamd.snapshot.manifest import TablesTooLarge
from streamd.snapshot.names import manifest_key
from streamd.store.catalog import Pinned, open_snapshot
from streamd.store.credentials import DefaultToken
from streamd.store.identity import Identity
from streamd.store.opening import open_store, split_snapshot_url, wants_default_credentials
from streamd.store.port import Store
from streamd.store.retry import retrying
from streamd.store.token_sources import TokenSource, parse_credentials

log = structlog.get_logger()

_ACCESS_LOOK_S = 2.0
# What of the openers goes into a beat: a message is bounded, and an image has a handful.
_OPENERS_MAX = 64


def main(end: socket.socket) -> int:
    """Serve what is assigned over a socket, to its end; gives an exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # its end is the supervisor's to say, and `systemctl kill` isn't meant so
    # The spawner, which ends with the supervisor. Until there is a mount nobody else would miss this process.
    hardening.die_with_parent(is_on=True)
    allocator.limit_arenas()
    hardening.keep_memory_private()
    hardening.raise_descriptor_limit()
    hardening.dump_stacks_on_request()
    wire = Wire(end)
    received = wire.receive_first()
    if received is None:
        return 0
    message, fds = received
    assignment = Assignment(**message["assignment"])
    config = configuration.parse_text(assignment.config_text, source="the daemon's configuration")
    configure(assignment.log_level)
    hardening.mark_io_flusher()
    try:
        source = _token_source(assignment, lambda: _close(wire, fds))
        hardening.favour_this_thread()
        if assignment.may_harden:  # while there is one thread, and nothing was asked of anybody
            _confine(assignment.user)
        hardening.die_with_parent(is_on=not fds)
    except StreamdError as error:
        wire.send_nowait({"is": "refused", "error": error_record(error)})
        return 1
    return trio.run(_Worker(wire, assignment, config, source).run, fds)


def _token_source(assignment: Assignment, close_in_child: Callable[[], None]) -> TokenSource | None:
    """Give where the image's tokens come from, None when its store wants none. Raises: `StreamdError`."""
    source = parse_credentials(assignment.credentials)
    if source is None:
        if not wants_default_credentials(assignment.snapshot_url):
            return None
        source = DefaultToken()
    return ForkedSource(source, may_harden=assignment.may_harden, close_in_child=close_in_child)


def _close(wire: Wire, fds: Sequence[int]) -> None:
    wire.close()
    for fd in fds:
        os.close(fd)


def _confine(user: tuple[int, int] | None) -> None:
    """Give up what a server doesn't need. Raises: `StreamdError`."""
    if user is None:
        hardening.drop_capabilities()
    else:
        uid, gid = user
        hardening.drop_privileges(uid, gid)
    seccomp.deny_dangerous_calls()


class _Worker:
    """One worker's life."""

    def __init__(self, wire: Wire, assignment: Assignment, config: Config, source: TokenSource | None) -> None:
        self._wire = wire
        self._assignment = assignment
        self._config = config
        self._tokens = None if source is None else Identity(source)
        self._serving: Serving | None = None
        self._status_of: Callable[[], dict[str, object]] | None = None
        self._connected = trio.Event()
        self._mountpoint = assignment.mountpoint
        self._bind = None if assignment.bind is None else _bind_facts(assignment.bind)
        self._is_taken_over = False
        self._device_fd = -1
        self._init = b""
        self._fetch_bytes_per_s = assignment.fetch_bytes_per_s
        self._tables_bytes = 0

    async def run(self, fds: list[int]) -> int:
        assignment, config = self._assignment, self._config
        structlog.contextvars.bind_contextvars(image=assignment.image)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._listen)
                await self._serve(assignment, config, fds)
                nursery.cancel_scope.cancel()
        except (StreamdError, BaseExceptionGroup) as error:
            lone = single_error(error)
            if not isinstance(lone, StreamdError):
                raise
            log.warning("the image is not served", reason=str(lone))
            self._wire.send_nowait({"is": "refused", "error": error_record(lone)})
            return 1
        if self._status_of is not None:
            self._say_beat(self._status())  # what has failed at the end is told of, too
        self._wire.send_nowait({"is": "ended"})
        return 0

    async def _serve(self, assignment: Assignment, config: Config, fds: list[int]) -> None:
        self._is_taken_over = bool(fds)
        store_url, snapshot_id = split_snapshot_url(assignment.snapshot_url)
        store = open_store(store_url, tokens=self._tokens, is_used=True)
        try:
            if assignment.only_proves:
                await self._prove_once(store, snapshot_id)
                return
            if self._is_taken_over:
                self._device_fd, init_fd, pinned_fd = fds
                self._init = bytes_of(init_fd)
                pinned = decode_pinned(bytes_of(pinned_fd, max_bytes=MAX_BYTES))
                os.close(init_fd)
                os.close(pinned_fd)
                self._connected.set()
            else:
                began_s = trio.current_time()

                def say_that_it_waits(error: StoreError, _delay_s: float) -> None:
                    """Say so in a beat, from the thread that waits."""
                    wait_s = round(trio.from_thread.run_sync(trio.current_time) - began_s, 3)
                    trio.from_thread.run_sync(self._say_beat, {"store_wait_s": wait_s, "last_failure": str(error)})

                patient = retrying(store, deadline_s=assignment.store_timeout_s, on_retry=say_that_it_waits)
                try:
                    pinned = await trio.to_thread.run_sync(
                        partial(open_snapshot, tables_max_bytes=assignment.tables_max_bytes),
                        patient,
                        snapshot_id,
                        abandon_on_cancel=True,
                    )
                except StoreError as error:
                    raise _explained(error, store_url) from error
                except TablesTooLarge as error:
                    raise Refused(f"{error}: the node's memory is daemon.memory_max_bytes") from error
                self._wire.send_nowait({"is": "opened", "tables_bytes": pinned.tables_bytes})
            self._tables_bytes = pinned.tables_bytes
            options = MountOptions(
                snapshot_url=assignment.snapshot_url,
                mountpoint=assignment.mountpoint,
                cache_dir=config.cache.directory,
                cache_max_bytes=config.cache.max_bytes,
                prefetch=Prefetch(assignment.prefetch),
                config=config,
                store_timeout_s=assignment.store_timeout_s,
                tenant=assignment.tenant,
            )
            await self._run(options, store, pinned)
        finally:
            store.close()

    async def _prove_once(self, store: Store, snapshot_id: str) -> None:
        """Say whether these credentials may read the snapshot. Raises: why they may not."""
        patient = retrying(store, deadline_s=self._assignment.store_timeout_s)
        await trio.to_thread.run_sync(patient.head, manifest_key(snapshot_id), abandon_on_cancel=True)
        self._wire.send_nowait({"is": "proven"})

    async def _run(self, options: MountOptions, store: Store, pinned: Pinned) -> None:
        cache, cache_problem = await self._open_cache(options, store, pinned)
        async with trio.open_nursery() as nursery:
            if self._tokens is not None and self._assignment.credentials is not None:
                nursery.start_soon(self._prove_access, self._tokens, store, pinned)
            files_fd = await self._files_to_hold(options, cache, pinned)
            if files_fd is None:
                await self._serve_requests(options, store, pinned, nursery, cache=cache, cache_problem=cache_problem)
            else:
                try:
                    await self._hold(options, store, pinned, nursery, files_fd, cache_problem=cache_problem)
                finally:
                    os.close(files_fd)
                    if cache is not None:
                        cache.close()
            nursery.cancel_scope.cancel()

    async def _open_cache(
        self, options: MountOptions, store: Store, pinned: Pinned
    ) -> tuple[NodeCache | None, str | None]:
        """Open the snapshot's place in the node cache, or do without, and say why.

        A worker of a former life may have it, for as long as its sandboxes load: a pod doesn't wait for that.
        """
        try:
            return await open_node_cache(options, store, pinned)
        except Refused as error:
            log.warning("no cache on disk, serving from memory", reason=str(error))
            return None, str(error)

    async def _files_to_hold(self, options: MountOptions, cache: NodeCache | None, pinned: Pinned) -> int | None:
        """Give the image's files when it is warm, or can be; None when its mount is served."""
        if self._is_taken_over:  # a seal that is there was made by the worker before, and is good until a byte changes
            return None if self._bind is None else self._device_fd
        if cache is None:
            return None
        return await hold_files(cache, pinned, options, is_wanted=self._assignment.may_be_warm)

    async def _hold(
        self,
        options: MountOptions,
        store: Store,
        pinned: Pinned,
        nursery: trio.Nursery,
        files_fd: int,
        *,
        cache_problem: str | None,
    ) -> None:
        if not self._is_taken_over:
            self._say_prepared(pinned, files_fd)
            await self._connected.wait()
        assert self._bind is not None
        mount_id, device = self._bind
        options = replace(options, mountpoint=self._mountpoint)
        bind = BindMount(files_fd, options.mountpoint, device, mount_id)
        holding = Holding(options, store, pinned, bind, cache_problem=cache_problem)
        self._begin_to_beat(nursery, holding.status)
        await holding.run(self._say_serving)

    async def _serve_requests(
        self,
        options: MountOptions,
        store: Store,
        pinned: Pinned,
        nursery: trio.Nursery,
        *,
        cache: NodeCache | None,
        cache_problem: str | None,
    ) -> None:
        openers = {
            number: Opener(pid, command, container) for number, pid, command, container in self._assignment.openers
        }
        serving = self._serving = Serving(
            options,
            store,
            pinned,
            cache=cache,
            cache_problem=cache_problem,
            former_openers=openers if self._is_taken_over else None,
        )
        serving.image.share_link(self._fetch_bytes_per_s)

        async def connect() -> tuple[int, bytes]:
            if not self._is_taken_over:
                self._say_prepared(pinned)
            await self._connected.wait()
            return self._device_fd, self._init

        self._begin_to_beat(nursery, serving.status)
        await serving.run(connect, self._say_serving)

    def _say_prepared(self, pinned: Pinned, *files_fd: int) -> None:
        keepsake = memfd_of(encode_pinned(pinned), "snapshot", max_bytes=MAX_BYTES)
        self._wire.send_nowait({"is": "prepared"}, [keepsake, *files_fd])
        os.close(keepsake)

    def _say_serving(self) -> None:
        self._wire.send_nowait({"is": "serving"})

    def _begin_to_beat(self, nursery: trio.Nursery, status: Callable[[], dict[str, object]]) -> None:
        self._status_of = status
        nursery.start_soon(self._beat)

    async def _prove_access(self, identity: Identity, store: Store, pinned: Pinned) -> None:
        """Ask the store again whether this tenant may read the snapshot, whenever the token has become another.

        What is cached outlives neither the right to it nor credentials that can prove it. A store that doesn't answer
        is no answer; a refusal, of the tenant or of its credentials, is held as long as that of a read.
        Raises: `NotPermitted`: the image ends, for whoever opens it next as well.
        """
        policy = self._config.policy
        held_s = {StoreErrorKind.FORBIDDEN: policy.hold_s, StoreErrorKind.CREDENTIALS: policy.credentials_wait_s}
        proven = None if self._is_taken_over else identity.epoch
        refused_s: float | None = None
        while True:
            await trio.sleep(_ACCESS_LOOK_S)
            epoch = proven
            try:
                # Nobody else may ask for a token: all may be cached.
                await trio.to_thread.run_sync(identity.fresh, abandon_on_cancel=True)
                epoch = identity.epoch
                if epoch != proven:
                    await trio.to_thread.run_sync(store.head, pinned.manifest_info.key, abandon_on_cancel=True)
            except StoreError as error:
                if error.store_kind is StoreErrorKind.GONE:  # it might be read; the pins have a policy of their own
                    proven, refused_s = epoch, None
                elif error.store_kind in held_s:
                    if refused_s is None:
                        refused_s = trio.current_time()
                        log.warning("the tenant's access can't be proven", reason=str(error))
                    if trio.current_time() - refused_s >= held_s[error.store_kind]:
                        raise NotPermitted(f"this tenant may not read the snapshot any more: {error}") from error
            else:
                proven, refused_s = epoch, None

    async def _beat(self) -> None:
        """Say that this thread runs, and what it has done."""
        while True:
            self._say_beat(self._status())
            await trio.sleep(BEAT_S)

    def _say_beat(self, status: Mapping[str, object]) -> None:
        self._wire.send_nowait({"is": "beat", "at_s": time.time(), "status": status})

    def _status(self) -> dict[str, object]:
        assert self._status_of is not None
        status = self._status_of()
        status.pop("handles", None)  # as many as there may be; below, in short
        status["tables_bytes"] = self._tables_bytes  # for a supervisor that has come after this worker
        if self._serving is None:
            return status
        openers = [handle for name in self._serving.image.files for handle in self._serving.image.openers(name)]
        status["openers"] = [
            [h.number, h.file_name, h.opener.pid, h.opener.command, h.opener.container] for h in openers[:_OPENERS_MAX]
        ]
        return status

    async def _listen(self) -> None:
        """Do what the supervisor says; when it has gone, nothing: the mount's end is ours."""
        while True:
            received = await self._wire.receive()
            if received is None:
                if not self._connected.is_set():
                    os._exit(0)  # there is no mount, and won't be
                log.warning("the supervisor has gone: serving on")
                return
            message, fds = received
            match message.get("do"):
                case "connect" if len(fds) == 2:
                    self._device_fd, init_fd = fds
                    self._init = bytes_of(init_fd)
                    os.close(init_fd)
                    self._begin_to_live_on()
                case "hold":
                    self._mountpoint, self._bind = str(message["mountpoint"]), _bind_facts(message["bind"])
                    self._begin_to_live_on()
                case "fail":
                    self._fail(message)
                case "rate" if isinstance(message.get("bytes_per_s"), int) and message["bytes_per_s"] >= 0:
                    self._fetch_bytes_per_s = message["bytes_per_s"]
                    if self._serving is not None:
                        self._serving.image.share_link(self._fetch_bytes_per_s)
                case "hand-over":
                    log.info("handing over to the next worker")
                    if self._serving is not None:
                        self._serving.hand_over()
                    await self._leave()
                case other:
                    log.warning("an unknown message of the supervisor", do=str(other))
                    for fd in fds:
                        os.close(fd)

    def _begin_to_live_on(self) -> None:
        """Serve a mount, from now on also without a supervisor."""
        hardening.die_with_parent(is_on=False)
        self._connected.set()

    def _fail(self, message: Mapping[str, Any]) -> None:
        handle_number, container = message.get("handle"), message.get("container")

        def chosen(handle: Handle) -> bool:
            if handle_number is not None:
                return bool(handle.number == handle_number)
            return bool(container is None or handle.opener.container == container)

        failed = 0
        if self._serving is not None:
            failed = self._serving.image.fail(chosen, "failed by an operator", kind=BY_OPERATOR)
        self._wire.send_nowait({"is": "answer", "id": message.get("id"), "failed": failed})

    async def _leave(self) -> None:
        """End this process, without a word to those who wait: they are the next worker's."""
        if self._serving is not None:
            with suppress(Exception):
                await self._serving.settle()
        sys.stderr.flush()
        os._exit(0)


def _bind_facts(told: Sequence[Any]) -> tuple[int, tuple[int, int]]:
    """Read a bind's number and device from a message."""
    mount_id, (major, minor) = told
    return int(mount_id), (int(major), int(minor))


def _explained(error: StoreError, store_url: str) -> StreamdError:
    """Say what is to be done about a directory that is another user's."""
    if error.store_kind is not StoreErrorKind.FORBIDDEN or not store_url.startswith("file:") or not os.geteuid():
        return error
    return NotPermitted(
        f"{error}: workers run as uid {os.geteuid()}, gid {os.getegid()} (daemon.worker_user), which must be able to "
        f"read all of {store_url} and to pass through the directories above it"
    )
