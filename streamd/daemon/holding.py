"""Holding sealed files for whoever reads them natively: what the process of a warm mount and a worker of the daemon
have in common.

Reads are the disk's own, so there is nothing to serve. What the holder is for: it owns the image in the cache (the
lock that keeps others from changing or evicting it), holds the snapshot's lease in the store, leaves a record that says
who mounted what, and knows when the bind has gone. Whoever has a file open when it goes reads on: the cache never
shortens or punches a file that was sealed once (`serve/sealing.py`).

Whether a mount is warm is decided once, when it is made. What stands in the way of it is logged, and the snapshot is
served as ever.
"""

import os
import select
from collections.abc import Callable

import structlog
import trio

from streamd.daemon.caching import Late
from streamd.daemon.lease import hold_lease
from streamd.daemon.options import MountOptions
from streamd.daemon.records import RecordKeeper, record_head
from streamd.daemon.worker_user import as_owner, records_directory
from streamd.errors import StreamdError
from streamd.fuse import binding, mountinfo
from streamd.fuse.binding import BindMount
from streamd.serve.node_cache import NodeCache
from streamd.serve.record import Recorder
from streamd.serve.sealing import NotSealed, open_sealed
from streamd.snapshot.manifest import Codec
from streamd.store.catalog import Pinned
from streamd.store.port import Store

log = structlog.get_logger()

# A healthy disk answers in milliseconds; a hung one must not keep a pod from starting.
_OPEN_TIMEOUT_S = 5.0
_TABLE_LOOK_S = 2.0


async def hold_files(cache: NodeCache, pinned: Pinned, options: MountOptions, *, is_wanted: bool) -> int | None:
    """Give the directory of the image's files, open and held (`binding.hold`), if they are sealed and that is wanted.

    Else take the seal away, for a mount that serves. None, too, when the disk doesn't answer in time.
    """
    reason = f"the disk did not answer within {_OPEN_TIMEOUT_S:g} s"
    files = Late[int](os.close)
    with trio.move_on_after(_OPEN_TIMEOUT_S):
        try:
            return await files.call(_open_and_hold, cache, pinned, options, is_wanted)
        except (StreamdError, OSError) as error:
            reason = str(error)
    log.info("the mount is not warm", reason=reason)
    return None


def _open_and_hold(cache: NodeCache, pinned: Pinned, options: MountOptions, is_wanted: bool) -> int:
    assert options.cache_dir is not None
    try:
        if not is_wanted:
            raise NotSealed("it shall be served")
        with as_owner(options.cache_dir, options.config):
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


class Holding:
    """A bind from when it was made to its end, as its holder knows it. Descriptors stay the caller's."""

    def __init__(
        self, options: MountOptions, store: Store, pinned: Pinned, bind: BindMount, *, cache_problem: str | None = None
    ) -> None:
        """`options.mountpoint` is where the bind is; `cache_problem` says why the cache's lock isn't held."""
        self._options = options
        self._store = store
        self._pinned = pinned
        self._bind = bind
        self._cache_problem = cache_problem
        facts = {"mode": "warm", "prefetch": options.prefetch.value, "cache": "True"}
        recorder = Recorder(record_head(options, pinned, facts=facts), origin_s=trio.current_time())
        records = records_directory(options.config)
        self._records = RecordKeeper(recorder, directory=records, as_owner=lambda: as_owner(records, options.config))

    async def run(self, ready: Callable[[], None]) -> None:
        """Hold on until the bind is gone, whoever takes it away; `ready` is called before anything is waited for."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(hold_lease, self._store, self._pinned.manifest.snapshot_id, self._bind.mountpoint)
            self._records.write_soon()  # it won't have more than its head
            nursery.start_soon(self._records.run)
            ready()
            log.info("warm mount is there", mountpoint=self._bind.mountpoint, snapshot=self._options.snapshot_url)
            await self._until_gone()
            nursery.cancel_scope.cancel()
        log.info("warm mount ended", mountpoint=self._bind.mountpoint)

    async def _until_gone(self) -> None:
        """Wait until the kernel's table has the bind no more.

        The table tells of its changes by POLLPRI (proc_pid_mountinfo(5)), which Trio can't wait for; it can wait for
        an epoll that does. Whoever asks after a change makes the kernel forget it (fs/proc_namespace.c:mounts_poll),
        the epoll itself among them when it is waited for anew: so it is looked again after a while.
        """
        with open(mountinfo.MOUNTINFO, "rb") as table, select.epoll() as changes:
            changes.register(table, select.EPOLLPRI)
            while binding.is_there(self._bind):
                with trio.move_on_after(_TABLE_LOOK_S):
                    await trio.lowlevel.wait_readable(changes.fileno())

    def status(self) -> dict[str, object]:
        """Describe the mount (README: status). It neither fetches nor serves, so those counts are 0."""
        layout = self._pinned.manifest.table
        zero_chunks = int((layout.codec == Codec.ZERO).sum())
        return {
            "mountpoint": self._bind.mountpoint,
            "mode": "warm",
            "pid": os.getpid(),
            "snapshot_url": self._options.snapshot_url,
            "cache_dir": str(self._options.cache_dir),
            "cache_problem": self._cache_problem,
            "prefetch": self._options.prefetch.value,
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
