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

from streamd.serve.handles import Handle, PendingRead, ReadFailed
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

_ZEROS = memoryview(bytes(1 << 20))


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
        chunks = self._layout.chunks(start, end)
        waited_for: Tier | None = None

        def settled(read: PendingRead) -> None:
            try:
                go_on(read)
            except Exception:  # here the next chunk's delivery would be lost with it
                log.exception("a read failed in an unforeseen way", start=start, end=end)
                read.fail(ReadFailed("internal error"))

        def go_on(read: PendingRead) -> None:
            """Look at every chunk again: what is in the cache file may have left it during a wait."""
            nonlocal waited_for
            if read.failure is not None:
                finish(read.failure)
                return
            missing = self._missing(read, chunks)
            if missing:
                is_cached = all(self._residency.place(chunk) == Place.CACHED for chunk in missing)
                waited_for = max(waited_for or Tier.ZERO, Tier.DISK if is_cached else Tier.STORE)
                read.wait_for(missing)
                for chunk in missing:
                    self._scheduler.want(chunk, want, read)
                return
            parts = self._parts(start, end, chunks, read.arrived)
            if parts is None:
                waited_for = max(waited_for or Tier.ZERO, Tier.DISK)
                assert self._nursery is not None
                self._nursery.start_soon(self._read_slowly, read, chunks, settled)
                return
            if handle.number:
                tier = self._tier(chunks, read.arrived) if waited_for is None else waited_for
                self._note(handle, want, start - base, end - start, read.began_s, tier)
            finish(parts)

        def finish(answer: Parts | ReadFailed) -> None:
            handle.pending.discard(read)
            if read.failure is not None:
                self._scheduler.leave(read.missing, read)
                self._note_failure(handle, want, start - base, end - start, read.began_s)
            on_answer(answer)

        read = PendingRead(want, trio.current_time(), settled)
        handle.pending.add(read)
        settled(read)
        return read

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

    async def _read_slowly(self, read: PendingRead, chunks: range, go_on: Callable[[PendingRead], None]) -> None:
        """Bring what is in the cache file, but not in the page cache; what can't be read is looked for elsewhere."""
        slow = [c for c in chunks if c not in read.arrived and self._residency.is_resident(c)]
        read.arrived |= await self._residency.read_slow(slow)
        if read.failure is None:
            go_on(read)

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

    def _note(self, handle: Handle, want: Want, start: int, size: int, began_s: float, tier: Tier) -> None:
        """Count and record an answered read of `size` bytes from `start` of its file."""
        waited_s = trio.current_time() - began_s if tier >= Tier.DISK else None
        self._stats.classes[want].note(size, waited_s)
        if self._recorder is not None:
            self._recorder.read(
                handle.number, want, tier, start=start, size=size, began_s=began_s, wait_s=waited_s or 0.0
            )

    def _note_failure(self, handle: Handle, want: Want, start: int, size: int, began_s: float) -> None:
        self._stats.failed_reads += 1
        if self._recorder is not None:
            wait_s = trio.current_time() - began_s
            self._recorder.read(
                handle.number, want, Tier.FAILED, start=start, size=size, began_s=began_s, wait_s=wait_s
            )


def _add_zeros(parts: list[Buffer], size: int) -> None:
    while size > 0:
        parts.append(_ZEROS[: min(size, len(_ZEROS))])
        size -= len(_ZEROS)
