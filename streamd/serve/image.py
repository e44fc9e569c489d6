"""One snapshot, served: files, open handles, reads.

A read goes through here once: classified, found in memory or in the cache file or waited for, put together, answered.
It is never short inside a file, never wrong, and fails only by the policy's last step or when somebody asks for it.
All state belongs to the Trio thread that runs `run`.
"""

import itertools
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import structlog
import trio

from streamd.config import Config, Prefetch
from streamd.serve.classify import ReadClassifier
from streamd.serve.handles import BY_KERNEL_LIMIT, ENDING, UNHEARD, Handle, Opener, PendingRead, ReadFailed
from streamd.serve.learning import Confidence
from streamd.serve.memory import Accountant
from streamd.serve.node_cache import NodeCache
from streamd.serve.order import Want
from streamd.serve.plan import Layout
from streamd.serve.reads import OnAnswer, Parts, Reads
from streamd.serve.record import Recorder
from streamd.serve.residency import Residency
from streamd.serve.scheduler import RunBlocking, Scheduler
from streamd.serve.stats import ServeStats
from streamd.serve.store_wait import StoreWait
from streamd.snapshot.names import IMAGE_FILES, PAGES
from streamd.snapshot.trace import Sample
from streamd.store.catalog import Pinned
from streamd.store.port import Store

log = structlog.get_logger()

_WATCH_S = 0.5
_LOAD_BYTES = 1 << 20
# Kept for reads that somebody waits for, whatever prefetch does: both halves of one window of 128 × 256 KiB.
_DEMAND_RESERVE_BYTES = 64 << 20
_KERNEL_LIMIT = "the kernel would end the whole mount if this read waited any longer"


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
        prefetch: Prefetch,
        recorder: Recorder | None = None,
        on_sample: Callable[[Sample], None] | None = None,
        read_limit_s: float | None = None,
        is_taken_over: bool = False,
        openers: Mapping[int, Opener] = MappingProxyType({}),
        run_blocking: RunBlocking = trio.to_thread.run_sync,
    ) -> None:
        """Reads that have waited for `read_limit_s` fail.

        `is_taken_over`: another process has served this mount before, so its handles may be any; `openers` says who
        has them, as far as that is known.

        `on_sample` is given what each closed handle of pages.img has taught about the order of reads.
        """
        manifest = pinned.manifest
        self.manifest = manifest
        self.digest = pinned.digest
        self._policy = config.policy
        self._read_limit_s = read_limit_s
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
            foresees=prefetch != Prefetch.NONE,
            ahead=prefetch == Prefetch.ALL,
            recorder=recorder,
            run_blocking=run_blocking,
        )
        self._store_wait = StoreWait()
        self._recorder = recorder
        self._on_sample = on_sample
        self._prefetch = prefetch
        self._confidence: Confidence | None = None
        self._hot_bytes = 0
        self._whole: dict[str, bytearray] = {}
        self._handles: dict[int, Handle] = {}
        self._is_taken_over = is_taken_over
        self._former_openers = openers
        # Handle numbers are never used twice in a mount's life, whichever process serves it: file | epoch | serial.
        self._epoch = secrets.randbits(23)
        self._serials = itertools.count(1)
        self._reads = Reads(self._layout, self._residency, self._scheduler, self.stats, recorder)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled. Every read that still waits then has failed when this returns."""
        self._residency.start()
        try:
            async with trio.open_nursery() as nursery:
                self._reads.start(nursery)
                await nursery.start(self._scheduler.run)
                nursery.start_soon(self._watch)
                task_status.started()
        finally:
            self.fail(lambda _: True, "the mount is going away", kind=ENDING)
            await self._residency.finish(timeout_s=2.0)

    async def settle(self) -> None:
        """Bring to the disk what is on its way there, within a bound. Nothing is cached after it."""
        await self._residency.finish(timeout_s=2.0)

    def share_link(self, bytes_per_s: int) -> None:
        """Bound what is fetched for anything but stopped threads from now on (0: no bound), whatever is configured."""
        self._scheduler.share_link(bytes_per_s)

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
                piece = await self._read_as(handle, offset, end, Want.FAULT)
                if keep:
                    content += piece
                await trio.lowlevel.checkpoint()  # a claim of a terabyte of zeros must not hold up anything else
            if keep:
                self._whole[file.name] = content

    def want_hot(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Fetch the learned order first: ranges of pages.img. No more, once it doesn't fit what faults ask for."""
        if self._prefetch == Prefetch.NONE:
            return
        pages = self.files[PAGES]
        self._confidence = Confidence(ranges)
        self._hot_bytes = sum(end - start for start, end in ranges)
        self._scheduler.want_hot([(pages.base + start, pages.base + min(end, pages.size)) for start, end in ranges])

    # Files

    def open(self, name: str, opener: Opener) -> Handle:
        """Open a file of the image."""
        file_index = IMAGE_FILES.index(name)
        number = (next(self._serials) << 31 | self._epoch << 8 | file_index) & ((1 << 64) - 1)
        handle = Handle(number, name, opener, trio.current_time())
        self._handles[number] = handle
        if self._recorder is not None:
            self._recorder.opened(number, name, handle.opened_s)
        return handle

    def handle(self, number: int) -> Handle:
        """Give an open handle. Raises: `KeyError`."""
        handle = self._handles.get(number)
        return self._taken_over(number) if handle is None else handle

    def _taken_over(self, number: int) -> Handle:
        """Give a handle that a former process has opened: its file is in its number. Raises: `KeyError`."""
        file_index = number & 0xFF
        if not self._is_taken_over or not number or file_index >= len(IMAGE_FILES):
            raise KeyError(number)
        name = IMAGE_FILES[file_index]
        if name not in self.files:
            raise KeyError(number)
        opener = self._former_openers.get(number, Opener(0, "", None))
        handle = Handle(number, name, opener, trio.current_time(), classifier=ReadClassifier(is_continued=True))
        self._handles[number] = handle
        if self._recorder is not None:
            self._recorder.opened(number, name, handle.opened_s)
        log.info("handle taken over", file=name, handle=number)
        return handle

    def release(self, number: int) -> None:
        """Close a handle; reads of it that still wait are failed."""
        handle = self._handles.pop(number, None)
        if handle is not None:
            handle.fail(ReadFailed("the file was closed", kind=UNHEARD))
            self._learn(handle)
            if self._recorder is not None:
                self._recorder.closed(number, trio.current_time())
            log.info("file closed", file=handle.file_name, handle=number, reads=handle.reads)

    def learn(self) -> None:
        """Give the samples of the handles that are still open: nothing more will be read through them."""
        for handle in self._handles.values():
            self._learn(handle)

    def _learn(self, handle: Handle) -> None:
        sample = handle.sampler.take()
        if sample is not None and self._on_sample is not None:
            self._on_sample(sample)

    def openers(self, name: str = PAGES) -> list[Handle]:
        """Handles of a file that are open."""
        return [handle for handle in self._handles.values() if handle.file_name == name]

    def fail(self, chosen: Callable[[Handle], bool], reason: str, *, kind: str) -> int:
        """Fail the reads of the chosen handles, those that wait and all to come; give how many handles that were.

        `kind`: that of their `ReadFailed`.
        """
        handles = [handle for handle in self._handles.values() if chosen(handle)]
        for handle in handles:
            waiting = handle.fail(ReadFailed(reason, kind=kind))
            level = log.warning if waiting else log.info
            level("reads of a handle are failed", handle=handle.number, waiting=waiting, reason=reason)
        return len(handles)

    # Reads

    def begin_read(self, handle: Handle, offset: int, size: int, on_answer: OnAnswer) -> PendingRead | None:
        """Answer a read of [offset, offset + size) of the handle's file, cut at its end, as soon as its bytes are here.

        `on_answer` is called once, perhaps before this returns (then the result is None, or over).
        """
        file = self.files[handle.file_name]
        end = min(offset + size, file.size)
        if handle.failure is not None:
            self.stats.failed(handle.failure)
            on_answer(handle.failure)
            return None
        if offset >= end:
            on_answer([])
            return None
        handle.reads += 1
        handle.read_bytes += end - offset
        whole = self._whole.get(file.name)
        if whole is not None:
            on_answer([memoryview(whole)[offset:end]])
            return None
        want = self._classify(handle, file, offset, end)
        return self._reads.begin(
            handle, start=file.base + offset, end=file.base + end, base=file.base, want=want, on_answer=on_answer
        )

    async def read(self, handle: Handle, offset: int, size: int) -> bytes:
        """Give bytes [offset, offset + size) of the handle's file, cut at its end. Raises: `ReadFailed`."""
        return await self._awaited(lambda on_answer: self.begin_read(handle, offset, size, on_answer))

    async def _read_as(self, handle: Handle, start: int, end: int, want: Want) -> bytes:
        """Read [start, end) of the handle's file, whatever it would be by its place."""
        base = self.files[handle.file_name].base
        return await self._awaited(
            lambda on_answer: self._reads.begin(
                handle, start=base + start, end=base + end, base=base, want=want, on_answer=on_answer
            )
        )

    async def _awaited(self, begin: Callable[[OnAnswer], PendingRead | None]) -> bytes:
        over = trio.Event()
        result: list[bytes | ReadFailed] = []

        def on_answer(answer: Parts | ReadFailed) -> None:
            result.append(answer if isinstance(answer, ReadFailed) else b"".join(answer))
            over.set()

        read = begin(on_answer)
        try:
            await over.wait()
        except trio.Cancelled:
            if read is not None and not result:
                read.fail(ReadFailed("nobody waits for it any more", kind=UNHEARD))
            raise
        if isinstance(result[0], ReadFailed):
            raise result[0]
        return result[0]

    def _classify(self, handle: Handle, file: ServedFile, start: int, end: int) -> Want:
        """Tell what a read is, and whoever looks ahead by it."""
        want = handle.classifier.classify(start, end)
        is_fault = want == Want.FAULT
        handle.sampler.note(start, end, is_fault=is_fault)
        if is_fault:
            self._scheduler.note_fault(file.base + start, file.base + end, file_end=file.base + file.size)
            if self._confidence is not None:
                self._confidence.note(start, end)
                self._scheduler.trust_hot(self._confidence.trust)
                if not self._confidence.holds:
                    self._lose_confidence()
        return want

    def _lose_confidence(self) -> None:
        self._confidence = None
        self._scheduler.forget_hot()
        log.info("the learned order does not fit this restore and is left aside")
        if self._recorder is not None:
            self._recorder.event(trio.current_time(), "order-left-aside", "faults ask for other memory")

    # Watching

    def _on_room(self) -> None:
        self._scheduler.kick()

    async def _watch(self) -> None:
        """Notice a cache disk that hangs, and a store that is away, and say so when reads wait for long."""
        reported_s = 0.0
        is_cache_lost = False
        while True:
            await trio.sleep(_WATCH_S)
            self._residency.check_writer()
            if self._recorder is not None and self.stats.cache_failure is not None and not is_cache_lost:
                is_cache_lost = True
                self._recorder.event(trio.current_time(), "cache-lost", self.stats.cache_failure)
            now_s = trio.current_time()
            self._store_wait.look(now_s, received_bytes=self._received_bytes, is_asked=self._scheduler.is_asking)
            waiting = self._waiting()
            if self._read_limit_s is not None:
                for read in waiting:
                    if now_s - read.began_s >= self._read_limit_s:
                        read.fail(ReadFailed(_KERNEL_LIMIT, kind=BY_KERNEL_LIMIT))
            oldest_s = max((now_s - read.began_s for read in waiting), default=0.0)
            if oldest_s >= self._policy.event_after_s and now_s - reported_s >= self._policy.event_after_s:
                reported_s = now_s
                log.warning(
                    "reads wait for the store",
                    reads=len(waiting),
                    oldest_s=round(oldest_s, 1),
                    last_failure=self._scheduler.last_failure,
                )

    def _waiting(self) -> list[PendingRead]:
        return [read for handle in self._handles.values() for read in handle.pending]

    @property
    def _received_bytes(self) -> int:
        return self.stats.origin_bytes + self._scheduler.arriving_bytes

    @property
    def is_whole(self) -> bool:
        """Whether the node cache has every chunk that isn't zeros, verified or not."""
        return self._residency.cached_chunks == len(self._layout) - self._layout.zero_chunks

    def status(self) -> dict[str, Any]:
        """Describe the image and what was served of it, for `streamd status --json` (README names the fields)."""
        layout, stats, now_s = self._layout, self.stats, trio.current_time()
        long_s = self._policy.event_after_s
        long_waiting = Counter(read.want for read in self._waiting() if now_s - read.began_s >= long_s)
        return {
            "snapshot": self.manifest.snapshot_id,
            "digest": self.digest.hex(),
            "image_bytes": layout.start[-1],
            "stored_bytes": layout.stored_bytes,
            "chunks": len(layout),
            "zero_chunks": layout.zero_chunks,
            "cached_chunks": self._residency.cached_chunks,
            "is_caching": self._residency.is_caching,
            "cache_failure": stats.cache_failure,
            "cache_corrupt_chunks": stats.cache_corrupt,
            "cache_dropped_chunks": stats.cache_dropped_chunks,
            "cache_evicted_chunks": self._residency.evicted_chunks,
            "cache_verified_chunks": stats.cache_hits_verified,
            "cache_written_bytes": stats.cache_written_bytes,
            "origin_bytes": self._received_bytes,
            "origin_requests": stats.origin_requests,
            "fetched_chunks": stats.fetched_chunks,
            "fetched_bytes": stats.fetched_bytes,
            "duplicate_chunks": stats.duplicate_chunks,
            "second_tries": stats.second_tries,
            "background_limit_bytes": self._scheduler.limit.bytes,
            "background_bytes_per_s": round(self._scheduler.limit.bytes_per_s),
            "fetch_max_bytes_per_s": self._scheduler.rate.bytes_per_s,
            "fetch_bytes_per_s": round(self._scheduler.rate.used_per_s(now_s)),
            "fetch_is_held_back": self._scheduler.rate.is_held_back(now_s),
            "first_byte_s": round(self._scheduler.limit.round_trip_s, 6),
            "release_gap_p50_s": round(stats.release_gaps.quantile_s(0.5), 6),
            "release_gap_p99_s": round(stats.release_gaps.quantile_s(0.99), 6),
            "hot_bytes": self._hot_bytes,
            "hot_holds": self._confidence is not None,
            "store_failures": dict(stats.store_failures),
            "last_failure": self._scheduler.last_failure,
            "store_wait_s": round(self._store_wait.seconds(now_s), 3),
            "waiting_chunks": self._scheduler.waiting_chunks,
            "prefetch_waits_for": self._scheduler.ahead_waits_for,
            "failed_reads": stats.failed_reads,
            "failures": {
                kind: {"reads": failures.reads, "message": failures.last.args[0], "exit_code": failures.last.exit_code}
                for kind, failures in stats.failures.items()
            },
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
                    "stalled": waits.durations.at_least(long_s) + long_waiting[want],
                    "wait_p50_s": round(waits.durations.quantile_s(0.5), 6),
                    "wait_p99_s": round(waits.durations.quantile_s(0.99), 6),
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
