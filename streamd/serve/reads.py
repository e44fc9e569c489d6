"""One read, from its arrival to its reply: what is here is put together at once, what isn't is waited for.

A read is no task: the chunk that was the last one missing, delivered to the Trio thread, continues it there and then,
so a reply leaves as soon as its bytes are verified, and 128 reads that wait cost 128 small objects. Only what has to
come from a disk gets a task of its own.

A reply is a list of buffers, written to the kernel one after another: what is held in memory is never copied together.
All state belongs to the Trio thread.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import structlog
import trio

from streamd.serve.handles import INTERNAL, UNHEARD, Handle, PendingRead, ReadFailed
from streamd.serve.order import Want
from streamd.serve.plan import Layout
from streamd.serve.record import Recorder, Tier
from streamd.serve.reply import ReplyBuffer
from streamd.serve.residency import Place, Residency
from streamd.serve.scheduler import Scheduler
from streamd.serve.stats import ServeStats
from streamd.store.port import Buffer

log = structlog.get_logger()

Parts: TypeAlias = Sequence[Buffer]
# Told of a read's end: the reply's bytes, valid until the call returns, or why there are none. It doesn't raise.
OnAnswer: TypeAlias = Callable[[Parts | ReadFailed], None]

_ZEROS = memoryview(b"\0" * (1 << 20))  # every page touched (fuse/connection.py)


class Reads:
    """The reads of one image. `start` gives it the nursery for those that need a disk."""

    def __init__(
        self,
        layout: Layout,
        residency: Residency,
        scheduler: Scheduler,
        stats: ServeStats,
        recorder: Recorder | None,
    ) -> None:
        self._layout = layout
        self._residency = residency
        self._scheduler = scheduler
        self._stats = stats
        self._recorder = recorder
        self._reply = ReplyBuffer()
        self._nursery: trio.Nursery | None = None

    def start(self, nursery: trio.Nursery) -> None:
        """Use `nursery`, which ends all that it holds with the image."""
        self._nursery = nursery

    def begin(self, handle: Handle, *, start: int, end: int, base: int, want: Want, on_answer: OnAnswer) -> PendingRead:
        """Answer a read of the bytes [start, end) of the image, `end > start`, perhaps before this returns.

        `base` is the first byte of the handle's file in the image. A handle with the number 0 is the mount's own and
        isn't counted.
        """
        read = _Read(self, handle, start=start, end=end, base=base, want=want, on_answer=on_answer)
        handle.pending.add(read)
        self.go_on(read)
        return read

    def go_on(self, read: "_Read") -> None:
        """Continue a read whose chunks are here, or that has failed."""
        try:
            self._go_on(read)
        except Exception:  # here the next chunk's delivery would be lost with it
            log.exception("a read failed in an unforeseen way", start=read.start, end=read.end)
            read.fail(ReadFailed("internal error; the log has the details", kind=INTERNAL))

    def _go_on(self, read: "_Read") -> None:
        """Look at every chunk again: what is in the cache file may have left it during a wait."""
        if read.failure is not None:
            self._finish(read, read.failure)
            return
        chunks = read.chunks
        missing = self._missing(read, chunks)
        if missing:
            is_cached = all(self._residency.place(chunk) == Place.CACHED for chunk in missing)
            read.waited_for = max(read.waited_for or Tier.ZERO, Tier.DISK if is_cached else Tier.STORE)
            read.wait_for(missing)
            for chunk in missing:
                self._scheduler.want(chunk, read.want, read)
            return
        parts = self._parts(read.start, read.end, chunks, read.arrived)
        if parts is None:
            read.waited_for = max(read.waited_for or Tier.ZERO, Tier.DISK)
            assert self._nursery is not None
            self._nursery.start_soon(self._read_slowly, read)
            return
        if read.handle.number:
            tier = self._tier(chunks, read.arrived) if read.waited_for is None else read.waited_for
            self._note(read, tier)
        self._finish(read, parts)

    def _finish(self, read: "_Read", answer: Parts | ReadFailed) -> None:
        read.handle.pending.discard(read)
        if read.failure is not None:
            self._scheduler.leave(read.missing, read)
            self._note_failure(read, read.failure)
        read.on_answer(answer)

    def chunks(self, start: int, end: int) -> range:
        """Give the chunks that hold [start, end) of the image."""
        return self._layout.chunks(start, end)

    def _missing(self, read: PendingRead, chunks: range) -> list[int]:
        """Give the chunks that have to be waited for; keep hold of those that are in memory."""
        missing = []
        for chunk in chunks:
            if chunk in read.arrived or self._residency.is_in_place(chunk):
                continue
            data = self._residency.held(chunk)
            if data is None:
                missing.append(chunk)
            else:
                read.arrived[chunk] = data
                self._residency.touched(chunk)
        return missing

    async def _read_slowly(self, read: "_Read") -> None:
        """Bring what is in the cache file, but not in the page cache; what can't be read is looked for elsewhere."""
        slow = [c for c in read.chunks if c not in read.arrived and self._residency.is_resident(c)]
        read.arrived |= await self._residency.read_slow(slow)
        if read.failure is None:
            self.go_on(read)

    def _parts(self, start: int, end: int, chunks: range, arrived: dict[int, Buffer]) -> list[Buffer] | None:
        """Put [start, end) together of what has arrived or is in place; None when a disk would have to be read.

        Nothing may be awaited between this and the reply.
        """
        starts = self._layout.start
        parts: list[Buffer] = []
        reply: memoryview | None = None
        for chunk in chunks:
            low, high = max(start, starts[chunk]), min(end, starts[chunk + 1])
            data = arrived.get(chunk)
            if data is not None:
                parts.append(memoryview(data)[low - starts[chunk] : high - starts[chunk]])
            elif self._layout.is_zero(chunk):
                _add_zeros(parts, high - low)
            else:
                # A hole in the cache file reads as zeros: only what is resident may be read from there.
                assert self._residency.is_resident(chunk)
                if reply is None:
                    reply = self._reply.view(end - start)
                piece = reply[low - start : high - start]
                if not self._residency.read_nowait(piece, low):
                    return None
                parts.append(piece)
        return parts

    def _tier(self, chunks: range, arrived: dict[int, Buffer]) -> Tier:
        """Where the bytes of a reply that didn't wait have come from."""
        places = {
            Tier.MEMORY if chunk in arrived else Tier.ZERO if self._layout.is_zero(chunk) else Tier.CACHE
            for chunk in chunks
        }
        return max(places)

    def _note(self, read: "_Read", tier: Tier) -> None:
        """Count and record an answered read."""
        size = read.end - read.start
        waited_s = trio.current_time() - read.began_s if tier >= Tier.DISK else None
        self._stats.classes[read.want].note(size, waited_s)
        self._record(read, tier, waited_s or 0.0)

    def _note_failure(self, read: "_Read", failure: ReadFailed) -> None:
        wait_s = trio.current_time() - read.began_s
        if read.handle.number and failure.kind != UNHEARD:
            self._stats.failed(failure)
            self._stats.classes[read.want].note(0, wait_s)
        self._record(read, Tier.FAILED, wait_s)

    def _record(self, read: "_Read", tier: Tier, wait_s: float) -> None:
        if self._recorder is not None:
            self._recorder.read(
                read.handle.number,
                read.want,
                tier,
                start=read.start - read.base,
                size=read.end - read.start,
                began_s=read.began_s,
                wait_s=wait_s,
            )


class _Read(PendingRead):
    """A read under way: what was asked for, and what it had to wait for so far (None: nothing)."""

    __slots__ = ("_reads", "base", "chunks", "end", "handle", "on_answer", "start", "waited_for")

    def __init__(
        self, reads: Reads, handle: Handle, *, start: int, end: int, base: int, want: Want, on_answer: OnAnswer
    ) -> None:
        super().__init__(want, trio.current_time())
        self._reads = reads
        self.handle = handle
        self.start = start
        self.end = end
        self.base = base
        self.on_answer = on_answer
        self.chunks = reads.chunks(start, end)
        self.waited_for: Tier | None = None

    def settled(self) -> None:
        self._reads.go_on(self)


def _add_zeros(parts: list[Buffer], size: int) -> None:
    while size > 0:
        parts.append(_ZEROS[: min(size, len(_ZEROS))])
        size -= len(_ZEROS)
