"""One image served over one connection: what the process of a mount and a worker of the daemon have in common.

Whose the mount is, who is told, and what ends it, is theirs: they give `connect`, which is called once the image can
answer, and they end the connection. Order: the small files are in memory before `connect`, unless another process has
served this connection before; at the end the reads that wait fail first, then the rest goes, every step bounded.
"""

import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress

import structlog
import trio

from streamd.daemon import allocator
from streamd.daemon.caching import seal_when_whole
from streamd.daemon.learner import Learner
from streamd.daemon.lease import hold_lease
from streamd.daemon.options import MountOptions
from streamd.daemon.records import RecordKeeper, record_head
from streamd.daemon.worker_user import as_owner, records_directory
from streamd.errors import Unreachable
from streamd.fuse import mounting
from streamd.fuse.session import Session
from streamd.serve.handles import ENDING, Handle, Opener
from streamd.serve.image import ServedImage
from streamd.serve.node_cache import NodeCache
from streamd.serve.record import Recorder
from streamd.snapshot.trace import Sample
from streamd.store.catalog import Pinned
from streamd.store.port import Store
from streamd.store.retry import retrying
from streamd.store.traces import LearnedOrder

log = structlog.get_logger()

_MEMORY_LOOK_S = 2.0
_MEMORY_STEP_BYTES = 32 << 20
# Of the kernel's time-out for a request: what is left is for noticing it, and for the reply.
_REQUEST_TIMEOUT_SHARE = 0.75
# How long the calls that keep the learned order are tried again.
_LEARN_TIMEOUT_S = 10.0


class Serving:
    """An image, from the first thing it needs to the end of its connection.

    `former_openers`: who had which handle open when another process served this connection; None when none has.
    """

    def __init__(
        self,
        options: MountOptions,
        store: Store,
        pinned: Pinned,
        *,
        cache: NodeCache | None,
        cache_problem: str | None,
        former_openers: Mapping[int, Opener] | None = None,
    ) -> None:
        self._options = options
        self._store = store
        self._pinned = pinned
        self._cache = cache
        self._cache_problem = cache_problem
        self._is_taken_over = former_openers is not None
        self._is_handed_over = False
        self._session: Session | None = None
        self._learner = Learner(LearnedOrder(retrying(store, deadline_s=_LEARN_TIMEOUT_S), pinned))
        facts = {"mode": "fuse", "prefetch": options.prefetch.value, "cache": str(cache is not None)}
        recorder = Recorder(record_head(options, pinned, facts=facts), origin_s=trio.current_time())
        records = records_directory(options.config)
        self._records = RecordKeeper(recorder, directory=records, as_owner=lambda: as_owner(records, options.config))
        self.image = ServedImage(
            store,
            pinned,
            options.config,
            cache=cache,
            prefetch=options.prefetch,
            recorder=recorder,
            on_sample=self._on_sample,
            read_limit_s=_read_limit_s(),
            is_taken_over=self._is_taken_over,
            openers=former_openers or {},
        )

    async def run(self, connect: Callable[[], Awaitable[tuple[int, bytes | None]]], ready: Callable[[], None]) -> None:
        """Serve the connection that `connect` gives, until the kernel ends it.

        `connect` gives the device's descriptor, which stays its own, and the kernel's first request where that was
        read already. `ready` is called when requests are answered. Raises: `Unreachable`; what the two raise.
        """
        async with trio.open_nursery() as nursery:
            await nursery.start(self.image.run)
            async with trio.open_nursery() as preparing:
                if self._is_taken_over:
                    nursery.start_soon(self._load_small_files_later)
                else:
                    preparing.start_soon(self._load_small_files)
                preparing.start_soon(self._learner.prepare, self.image)
            device_fd, init = await connect()
            try:
                self._session = Session(self.image, device_fd, init=init)
                nursery.start_soon(self._give_memory_back)
                if self._cache is not None and self._options.seals:
                    nursery.start_soon(
                        seal_when_whole, self._cache, self._pinned, self._options, lambda: self.image.is_whole
                    )
                nursery.start_soon(self._learner.run)
                nursery.start_soon(self._records.run)
                nursery.start_soon(hold_lease, self._store, self._pinned.manifest.snapshot_id, self._options.mountpoint)
                ready()
                log.info("serving", mountpoint=self._options.mountpoint, snapshot=self._options.snapshot_url)
                await self._session.serve()
                if self._is_handed_over:
                    await trio.sleep_forever()
            finally:
                if not self._is_handed_over:
                    self.image.fail(_every, "the mount is going away", kind=ENDING)
                self.image.learn()
                nursery.cancel_scope.cancel()
        self._session.end()
        log.info("serving ended", mountpoint=self._options.mountpoint)

    def hand_over(self) -> None:
        """Answer nothing any more: the connection is another process's, and so is whoever waits."""
        self._is_handed_over = True
        if self._session is not None:
            self._session.let_go()

    async def settle(self) -> None:
        """Bring to the disk what is on its way there, within a bound; the last thing before the process goes."""
        self.image.learn()
        await self.image.settle()

    def status(self) -> dict[str, object]:
        """Describe the mount (README: status)."""
        mount: dict[str, object] = {
            "mountpoint": self._options.mountpoint,
            "mode": "fuse",
            "pid": os.getpid(),
            "snapshot_url": self._options.snapshot_url,
            "cache_dir": str(self._options.cache_dir) if self._options.cache_dir else None,
            "cache_problem": self._cache_problem,
            "prefetch": self._options.prefetch.value,
        }
        return mount | self.image.status()

    def _on_sample(self, sample: Sample) -> None:  # a restore has loaded
        self._learner.add(sample)
        self._records.write_soon()

    async def _load_small_files(self) -> None:
        with trio.move_on_after(self._options.store_timeout_s) as scope:
            await self.image.load_small_files()
        if scope.cancelled_caught:
            last = self.image.status()["last_failure"] or "no answer"
            raise Unreachable(
                f"the store did not give the snapshot's small files within {self._options.store_timeout_s:g} s ({last})"
            )

    async def _load_small_files_later(self) -> None:
        """Have them in memory again; until then, and if that fails, they are read like pages.img."""
        with suppress(Unreachable):
            await self._load_small_files()

    async def _give_memory_back(self) -> None:
        """Return memory that a load has used and freed, while it goes on and once it is over."""
        given_back_at_bytes = 0
        while True:
            await trio.sleep(_MEMORY_LOOK_S)
            fetched_bytes = self.image.stats.fetched_bytes
            if fetched_bytes - given_back_at_bytes > _MEMORY_STEP_BYTES:
                given_back_at_bytes = fetched_bytes
                with suppress(RuntimeError):  # no thread to be had
                    await trio.to_thread.run_sync(allocator.give_back, abandon_on_cancel=True)


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
