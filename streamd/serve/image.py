"""One snapshot, served: files, open handles, reads.

A read goes through here once: classified, found in memory or in the cache file or waited for, put together, answered.
It is never short inside a file, never wrong, and fails only by the policy's last step or when somebody asks for it.
All state belongs to the Trio thread that runs `run`.
"""

import itertools
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import structlog
import trio

from streamd.config import Config
from streamd.serve.handles import Handle, Opener, PendingRead, ReadFailed
from streamd.serve.memory import Accountant
from streamd.serve.node_cache import NodeCache
from streamd.serve.order import Want
from streamd.serve.plan import Layout
from streamd.serve.reply import ReplyBuffer
from streamd.serve.residency import Residency
from streamd.serve.scheduler import RunBlocking, Scheduler
from streamd.serve.stats import ServeStats
from streamd.snapshot.manifest import Codec
from streamd.snapshot.names import IMAGE_FILES, PAGES
from streamd.store.catalog import Pinned
from streamd.store.port import Buffer, Store

log = structlog.get_logger()

_ZEROS = memoryview(bytes(1 << 20))
_WATCH_S = 0.5
_LOAD_BYTES = 1 << 20
# Kept for reads that somebody waits for, whatever prefetch does: both halves of one window of 128 × 256 KiB.
_DEMAND_RESERVE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class ServedFile:
    """A file of the image; `base` is its first byte in the concatenation of the files, which chunks are numbered by."""

    name: str
    size: int
    base: int


class ServedImage:
    """A pinned snapshot of a store, with a node cache or without."""

    def __init__(
        self,
        store: Store,
        pinned: Pinned,
        config: Config,
        *,
        cache: NodeCache | None,
        ahead: bool,
        run_blocking: RunBlocking = trio.to_thread.run_sync,
    ) -> None:
        manifest = pinned.manifest
        self.manifest = manifest
        self.digest = pinned.digest
        self._policy = config.policy
        self._layout = Layout(manifest.table)
        self.files = {
            file.name: ServedFile(file.name, file.size, self._layout.start[file.first_chunk])
            for file in manifest.files
            if file.name in IMAGE_FILES
        }
        cap_bytes = config.memory_max_bytes
        self._accountant = Accountant(cap_bytes, reserve_bytes=min(_DEMAND_RESERVE_BYTES, cap_bytes // 2))
        self.stats = ServeStats()
        self._residency = Residency(
            self._layout,
            self._accountant,
            self.stats,
            cache=cache,
            on_room=self._on_room,
        )
        self._scheduler = Scheduler(
            store,
            pinned.packs,
            self._layout,
            self._residency,
            self._accountant,
            self.stats,
            fetch=config.fetch,
            policy=config.policy,
            ahead=ahead,
            run_blocking=run_blocking,
        )
        self._whole: dict[str, bytearray] = {}
        self._handles: dict[int, Handle] = {}
        # Handle numbers are never used twice in a mount's life, whichever process serves it: file | epoch | serial.
        self._epoch = secrets.randbits(23)
        self._serials = itertools.count(1)
        self._reply = ReplyBuffer()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled. Every read that still waits then has failed when this returns."""
        self._residency.start()
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(self._scheduler.run)
                nursery.start_soon(self._watch)
                task_status.started()
        finally:
            self.fail(lambda _: True, "the mount is going away")
            await self._residency.finish(timeout_s=2.0)

    async def load_small_files(self) -> None:
        """Bring everything but pages.img here: gVisor reads it serially, before anything can run.

        It is kept in memory as long as it is small against the cap, as any gVisor kernel's state is.
        """
        for file in self.files.values():
            if file.name == PAGES:
                continue
            keep = file.size <= self._accountant.cap_bytes // 8
            if keep:
                self._accountant.take(file.size)
            content = bytearray()
            handle = Handle(0, file.name, Opener(0, "mount", None), trio.current_time())  # 0: nobody's, not counted
            for offset in range(0, file.size, _LOAD_BYTES):
                end = min(offset + _LOAD_BYTES, file.size)
                piece = await self._answer(handle, file.base + offset, file.base + end, Want.FAULT)
                if keep:
                    content += piece
                await trio.lowlevel.checkpoint()  # a claim of a terabyte of zeros must not hold up anything else
            if keep:
                self._whole[file.name] = content

    # Files

    def open(self, name: str, opener: Opener) -> Handle:
        """Open a file of the image."""
        file_index = IMAGE_FILES.index(name)
        number = (next(self._serials) << 31 | self._epoch << 8 | file_index) & ((1 << 64) - 1)
        handle = Handle(number, name, opener, trio.current_time())
        self._handles[number] = handle
        return handle

    def handle(self, number: int) -> Handle:
        """Give an open handle. Raises: `KeyError`."""
        return self._handles[number]

    def release(self, number: int) -> None:
        """Close a handle; reads of it that still wait are failed."""
        handle = self._handles.pop(number, None)
        if handle is not None:
            handle.fail(ReadFailed("the file was closed"))
            log.info("file closed", file=handle.file_name, handle=number, reads=handle.reads)

    def openers(self, name: str = PAGES) -> list[Handle]:
        """Handles of a file that are open."""
        return [handle for handle in self._handles.values() if handle.file_name == name]

    def fail(self, chosen: Callable[[Handle], bool], reason: str) -> int:
        """Fail the reads of the chosen handles, those that wait and all to come; give how many handles that were."""
        handles = [handle for handle in self._handles.values() if chosen(handle)]
        for handle in handles:
            waiting = handle.fail(ReadFailed(reason))
            level = log.warning if waiting else log.info
            level("reads of a handle are failed", handle=handle.number, waiting=waiting, reason=reason)
        return len(handles)

    # Reads

    async def read(self, handle: Handle, offset: int, size: int) -> Buffer:
        """Give bytes [offset, offset + size) of the handle's file, cut at its end.

        The result may be a shared buffer: it is valid until the caller's next `await`.
        Raises: `ReadFailed`.
        """
        file = self.files[handle.file_name]
        end = min(offset + size, file.size)
        if handle.failure is not None:
            raise handle.failure
        if offset >= end:
            return b""
        handle.reads += 1
        handle.read_bytes += end - offset
        whole = self._whole.get(file.name)
        if whole is not None:
            return memoryview(whole)[offset:end]
        want = handle.classifier.classify(offset, end)
        return await self._answer(handle, file.base + offset, file.base + end, want)

    async def _answer(self, handle: Handle, start: int, end: int, want: Want) -> Buffer:
        """Wait for the bytes [start, end) of the image and put the reply together.

        What is in memory is kept hold of from the first look on. What is in the cache file is looked at again after
        every wait: nothing may be awaited between the last look and the reply.
        """
        began_s = trio.current_time()
        waited = False
        arrived: dict[int, Buffer] = {}
        chunks = self._layout.chunks(start, end)
        while True:
            missing = []
            for chunk in chunks:
                if chunk in arrived or self._residency.is_in_place(chunk):
                    continue
                data = self._residency.held(chunk)
                if data is None:
                    missing.append(chunk)
                else:
                    arrived[chunk] = data
                    self._residency.touched(chunk)
            if missing:
                waited = True
                arrived |= await self._wait(handle, missing, want, began_s)
                continue
            reply = self._fill(start, end, chunks, arrived)
            if reply is not None:
                if handle.number:
                    self.stats.classes[want].note(end - start, trio.current_time() - began_s if waited else None)
                return reply
            # In the cache file, but not in the page cache. What can't be read from there is fetched in the next round.
            waited = True
            slow = [c for c in chunks if c not in arrived and self._residency.is_resident(c)]
            arrived |= await self._residency.read_slow(slow)
            if handle.failure is not None:
                raise handle.failure

    async def _wait(self, handle: Handle, missing: list[int], want: Want, began_s: float) -> dict[int, Buffer]:
        pending = PendingRead(want, set(missing), began_s)
        handle.pending.add(pending)
        for chunk in missing:
            self._scheduler.want(chunk, want, pending)
        try:
            await pending.done.wait()
        finally:
            handle.pending.discard(pending)
            self._scheduler.leave(missing, pending)
        if pending.failure is not None:
            self.stats.failed_reads += 1
            raise pending.failure
        return pending.arrived

    def _fill(self, start: int, end: int, chunks: range, arrived: dict[int, Buffer]) -> Buffer | None:
        """Put [start, end) together of what has arrived or is in place; None when a disk would have to be read."""
        starts = self._layout.start
        if len(chunks) == 1 and (data := arrived.get(chunks[0])) is not None:
            base = starts[chunks[0]]
            return memoryview(data)[start - base : end - base]
        view = self._reply.view(end - start)
        if not arrived and all(self._residency.is_resident(c) for c in chunks):
            return view if self._residency.read_nowait(view, start) else None
        for chunk in chunks:
            low, high = max(start, starts[chunk]), min(end, starts[chunk + 1])
            piece = view[low - start : high - start]
            data = arrived.get(chunk)
            if data is not None:
                piece[:] = memoryview(data)[low - starts[chunk] : high - starts[chunk]]
            elif self._layout.is_zero(chunk):
                _zero(piece)
            else:
                # A hole in the cache file reads as zeros: only what is resident may be read from there.
                assert self._residency.is_resident(chunk)
                if not self._residency.read_nowait(piece, low):
                    return None
        return view

    # Watching

    def _on_room(self) -> None:
        self._scheduler.kick()

    async def _watch(self) -> None:
        """Notice a cache disk that hangs, and say so when reads wait for long."""
        reported_s = 0.0
        while True:
            await trio.sleep(_WATCH_S)
            self._residency.check_writer()
            waiting = [read for handle in self._handles.values() for read in handle.pending]
            now_s = trio.current_time()
            oldest_s = max((now_s - read.began_s for read in waiting), default=0.0)
            if oldest_s >= self._policy.event_after_s and now_s - reported_s >= self._policy.event_after_s:
                reported_s = now_s
                log.warning(
                    "reads wait for the store",
                    reads=len(waiting),
                    oldest_s=round(oldest_s, 1),
                    last_failure=self._scheduler.last_failure,
                )

    def status(self) -> dict[str, Any]:
        """Describe the image and what was served of it, for `streamd status --json` (README names the fields)."""
        layout, stats, now_s = self._layout, self.stats, trio.current_time()
        stored_bytes = sum(layout.frame_bytes)
        return {
            "snapshot": self.manifest.snapshot_id,
            "digest": self.digest.hex(),
            "image_bytes": layout.start[-1],
            "stored_bytes": stored_bytes,
            "chunks": len(layout),
            "zero_chunks": layout.codec.count(Codec.ZERO),
            "cached_chunks": self._residency.cached_chunks,
            "is_caching": self._residency.is_caching,
            "cache_failure": stats.cache_failure,
            "cache_corrupt_chunks": stats.cache_corrupt,
            "cache_dropped_chunks": stats.cache_dropped_chunks,
            "cache_verified_chunks": stats.cache_hits_verified,
            "cache_written_bytes": stats.cache_written_bytes,
            "origin_bytes": stats.origin_bytes + self._scheduler.arriving_bytes,
            "origin_requests": stats.origin_requests,
            "fetched_chunks": stats.fetched_chunks,
            "fetched_bytes": stats.fetched_bytes,
            "duplicate_chunks": stats.duplicate_chunks,
            "store_failures": dict(stats.store_failures),
            "last_failure": self._scheduler.last_failure,
            "waiting_chunks": self._scheduler.waiting_chunks,
            "prefetch_waits_for": self._scheduler.ahead_waits_for,
            "failed_reads": stats.failed_reads,
            "memory_bytes": self._accountant.held_bytes,
            "memory_peak_bytes": self._accountant.peak_bytes,
            "memory_max_bytes": self._accountant.cap_bytes,
            "reads": {
                want.name.lower(): {
                    "reads": waits.reads,
                    "bytes": waits.read_bytes,
                    "waited": waits.waited,
                    "wait_s": round(waits.wait_s, 6),
                    "longest_s": round(waits.longest_s, 6),
                }
                for want, waits in stats.classes.items()
            },
            "handles": [
                {
                    "handle": handle.number,
                    "file": handle.file_name,
                    "pid": handle.opener.pid,
                    "command": handle.opener.command,
                    "container": handle.opener.container,
                    "age_s": round(now_s - handle.opened_s, 3),
                    "reads": handle.reads,
                    "read_bytes": handle.read_bytes,
                    "waiting": len(handle.pending),
                    "failed": handle.failure is not None,
                }
                for handle in self._handles.values()
            ],
        }


def _zero(piece: memoryview) -> None:
    for low in range(0, len(piece), len(_ZEROS)):
        part = piece[low : low + len(_ZEROS)]
        part[:] = _ZEROS[: len(part)]
