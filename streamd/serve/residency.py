"""Where each chunk's verified bytes are right now: in memory, in the cache file, or nowhere. State of the Trio thread.

A chunk arrives verified and is *held* in memory. With a cache it is queued for writing and becomes *resident* once it
is in the file; without one, or when the disk falls behind, it stays held until room is needed: chunks that were read
leave first, the longest unread first. A chunk that the file has from a former life is *cached*: it has to be verified
first.

For an image that is larger than its room in the cache, the file keeps what came first, which is what the next mount
needs first. Only when memory gets short is it a *window*: what was read longest ago leaves it for what waits unread.
A chunk leaves in this order: its place becomes absent here, then its bit is cleared and its bytes go, in the writer's
thread. So nothing can be read from a hole: what this thread reads, it reads in the step in which it looked; and chunks
that another thread reads are counted (`_reading`) from that look on, and stay.

All changes are synchronous, so whoever finds a chunk here may use it until its next `await`, and has to look again
after. The cache never hurts: its errors end its use and cost a fetch, and nothing here waits for its disk.
"""

import errno
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import IntEnum

import numpy as np
import structlog
import trio

from streamd.serve.cache_policy import ReadChunks
from streamd.serve.held import Held
from streamd.serve.memory import Accountant
from streamd.serve.node_cache import NodeCache
from streamd.serve.plan import Layout
from streamd.serve.stats import ServeStats
from streamd.serve.write_behind import QUEUE_BYTES_MAX, Leaving, WriteBehind
from streamd.store.port import Buffer

log = structlog.get_logger()

# A healthy disk answers within milliseconds; a reader that waits this long is better served by the store.
CACHE_TIMEOUT_S = 2.0
# A write may wait for others' write-back; it blocks nobody until the queue is full.
WRITE_STALL_S = 10.0


# The disk, or a limit on it, is full; the file system can't punch holes. What is in the file is as good as before.
_NO_MORE_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EOPNOTSUPP)


class Place(IntEnum):
    """What the cache file has of a chunk."""

    ABSENT = 0
    RESIDENT = 1  # verified in this worker's life
    CACHED = 2  # not yet
    ZERO = 3  # needs no place


class Residency:
    """The places of one image's chunks. `on_room` is called when held bytes were given back, or could be."""

    def __init__(
        self,
        layout: Layout,
        accountant: Accountant,
        stats: ServeStats,
        *,
        cache: NodeCache | None,
        on_room: Callable[[], None],
    ) -> None:
        self._layout = layout
        self._accountant = accountant
        self._stats = stats
        self._on_room = on_room
        self._cache = cache
        self._cache_room_bytes = 0 if cache is None else cache.room_bytes
        places = np.full(len(layout), Place.ZERO, np.uint8)
        places[layout.is_stored] = Place.ABSENT
        if cache is not None:
            cached = layout.cached(cache.bits())
            places[cached] = Place.CACHED
            self._cache_room_bytes -= layout.bytes_of(cached)
        self._places = bytearray(places)
        # Of what the file has, what was read; None if everything fits. Never the small files: every mount needs them.
        self._leavable: ReadChunks | None = None
        if cache is not None and cache.room_bytes < layout.data_bytes:
            self._leavable = ReadChunks()
            self._first_leavable = layout.chunks(cache.first_pages_byte, cache.first_pages_byte + 1)[0]
        self.evicted_chunks = 0
        self._writing: dict[int, Buffer] = {}
        self._read_while_writing: set[int] = set()
        self._reading: dict[int, int] = {}  # by threads: how many times each
        self._held = Held()
        # Half of what prefetch may hold: enough in memory to go on while the disk takes the rest.
        self._spill_bytes = (accountant.cap_bytes - accountant.reserve_bytes) // 2
        self._writer: WriteBehind | None = None
        self._disk_limiter = trio.CapacityLimiter(16)

    def start(self) -> None:
        """Begin to write to the cache; call it within the Trio run that uses this object."""
        if self._cache is None:
            return
        token = trio.lowlevel.current_trio_token()

        def written(chunks: Sequence[int], error: OSError | None) -> None:
            with suppress(trio.RunFinishedError):
                token.run_sync_soon(self._written, chunks, error)

        self._writer = WriteBehind(self._cache, written)

    async def finish(self, timeout_s: float) -> None:
        """Write what is queued, within `timeout_s`, and let go of the cache."""
        cache, writer = self._cache, self._writer
        if cache is None:
            return
        with trio.move_on_after(timeout_s + 1) as scope:
            scope.shield = True
            if writer is not None:
                await trio.to_thread.run_sync(writer.finish, timeout_s, abandon_on_cancel=True)
            await trio.to_thread.run_sync(_let_go, cache, abandon_on_cancel=True)

    @property
    def is_caching(self) -> bool:
        """Whether chunks that arrive now can still go to the cache file."""
        return self._writer is not None

    @property
    def is_behind(self) -> bool:
        """Whether the disk has enough to do: what nobody waits for should not be fetched faster than it is written."""
        return self.writing_bytes > QUEUE_BYTES_MAX // 2

    @property
    def writing_bytes(self) -> int:
        """Bytes that the disk was given and has not confirmed yet."""
        return 0 if self._writer is None else self._writer.pending_bytes

    @property
    def cached_chunks(self) -> int:
        """Chunks in the cache file, verified or not."""
        return self._places.count(Place.RESIDENT) + self._places.count(Place.CACHED)

    def place(self, chunk: int) -> Place:
        """What the cache file has of a chunk."""
        return Place(self._places[chunk])

    def is_resident(self, chunk: int) -> bool:
        """Whether the cache file has it, verified."""
        return self._places[chunk] == Place.RESIDENT

    def is_in_place(self, chunk: int) -> bool:
        """Whether the cache file has it, verified, or it is zeros and needs none."""
        return self._places[chunk] in (Place.RESIDENT, Place.ZERO)

    def is_here(self, chunk: int) -> bool:
        """Whether a read of the chunk can be answered without waiting for the store."""
        return self.is_in_place(chunk) or self.held(chunk) is not None

    def is_absent(self, chunk: int) -> bool:
        """Whether only the store has it."""
        return self._places[chunk] == Place.ABSENT and self.held(chunk) is None

    def next_absent(self, chunk: int) -> int:
        """Give the first chunk, from this one on, that the cache file doesn't have; the number of chunks for none."""
        found = self._places.find(Place.ABSENT, chunk)
        return len(self._places) if found < 0 else found

    def held(self, chunk: int) -> Buffer | None:
        """Give a chunk's bytes if they are in memory."""
        data = self._writing.get(chunk)
        return self._held.get(chunk) if data is None else data

    def touched(self, chunk: int) -> None:
        """Note that a held chunk was read, so that it may leave before others."""
        if self._held.touched(chunk):
            self._note_movable()
        elif chunk in self._writing:
            self._read_while_writing.add(chunk)

    def keep(self, chunk: int, data: Buffer) -> None:
        """Take a verified chunk whose bytes the accountant has counted already."""
        self._spill()
        if not self._write(chunk, data):
            self._held.unread.put(chunk, data)

    def _write(self, chunk: int, data: Buffer) -> bool:
        """Queue a chunk for the cache file, if there is one with room for it and the disk keeps up."""
        size = len(data)
        if self._writer is None or size > self._cache_room_bytes:
            return False
        if not self._writer.offer(chunk, data, self._layout.start[chunk]):
            return False
        self._cache_room_bytes -= size
        self._writing[chunk] = data
        return True

    def _write_more(self) -> None:
        """Queue held chunks that found the queue full, now that it has room."""
        for pool in (self._held.unread, self._held.read):
            while pool:
                chunk, data = pool.first()
                if not self._write(chunk, data):
                    return
                pool.pop(chunk)
                if pool is self._held.read:
                    self._read_while_writing.add(chunk)

    def _spill(self) -> None:
        """Write what waits unread in memory in the place of what was read, if memory gets short: furthest ahead first.

        Never in a step in which somebody reads. Before a chunk comes, not after: only then is it known whether the last
        one was read.
        """
        unread = self._held.unread
        while self._leavable is not None and unread.size > self._spill_bytes:
            chunk, data = unread.last()
            if self._writer is None or not self._writer.has_room(len(data)):
                return
            if not self._evict(len(data) - self._cache_room_bytes) or not self._write(chunk, data):
                return
            unread.pop(chunk)

    def _evict(self, size: int) -> bool:
        """Make room for `size` more bytes in the file: let chunks go that were read; False when there are too few."""
        assert self._leavable is not None
        assert self._writer is not None
        if size <= 0:
            return True
        chunks = self._leavable.take(size, length=self._layout.length, busy=self._reading)
        for chunk in chunks:
            self._places[chunk] = Place.ABSENT
            self._cache_room_bytes += self._layout.length[chunk]
        self._writer.evict([Leaving(c, self._layout.start[c], self._layout.length[c]) for c in chunks])
        self.evicted_chunks += len(chunks)
        return bool(chunks)

    def _note_read(self, chunks: Iterable[int]) -> None:
        """Count chunks that the file has as read: they may leave it, the small files' apart."""
        if self._leavable is None:
            return
        for chunk in chunks:
            if chunk >= self._first_leavable and self._places[chunk] == Place.RESIDENT:
                self._leavable.note(chunk)
        self._note_movable()

    def _note_movable(self) -> None:
        """Let the scheduler look for room if it may lack some: what was read can be given up.

        Nothing is given up here: whoever reads may have looked at the places of other chunks in this very step.
        """
        if self._accountant.held_bytes > self._spill_bytes:
            self._on_room()

    def verified(self, chunk: int) -> None:
        """Note that a cached chunk turned out right."""
        if self._places[chunk] == Place.CACHED:
            self._stats.cache_hits_verified += 1
            self._places[chunk] = Place.RESIDENT
            self._note_read((chunk,))

    def corrupt(self, chunk: int) -> None:
        """Note that a cached chunk is not what it should be; it will be fetched and written again."""
        if self._places[chunk] == Place.CACHED:
            self._stats.cache_corrupt += 1
            self._cache_room_bytes += self._layout.length[chunk]
            self._places[chunk] = Place.ABSENT
            log.warning("cached chunk is damaged, fetching it again", chunk=chunk)

    def shed(self, size: int, *, unread_too: bool) -> None:
        """Give back at least `size` held bytes, as far as that is possible: what was read first (`held.py`)."""
        for given in self._held.shed(size, unread_too=unread_too):
            self._stats.cache_dropped_chunks += self._cache is not None
            self._accountant.give(given)
        self._spill()

    def read_nowait(self, view: memoryview, offset: int) -> bool:
        """Fill `view` from the cache file if that needs no disk; `offset` is in the image."""
        if self._cache is None or self._cache.read_nowait(view, offset) != len(view):
            return False
        if self._leavable is not None:
            # One that was read in part only, before its end, is not done with: the next read begins there.
            end = offset + len(view)
            self._note_read(c for c in self._layout.chunks(offset, end) if self._layout.start[c + 1] <= end)
        return True

    async def read_slow(self, chunks: list[int]) -> dict[int, Buffer]:
        """Read resident chunks from the disk. When it fails or hangs, caching is over and the result is what it got."""
        found: dict[int, Buffer] = {}
        cache = self._cache
        if cache is None:
            return found
        with self._counted(chunks):
            for chunk in chunks:
                size, offset = self._layout.length[chunk], self._layout.start[chunk]
                async with self._disk_limiter:  # waiting for a turn says nothing about the disk
                    with trio.move_on_after(CACHE_TIMEOUT_S) as scope:
                        try:
                            found[chunk] = await trio.to_thread.run_sync(
                                cache.read, size, offset, abandon_on_cancel=True, limiter=trio.CapacityLimiter(1)
                            )
                        except Exception as error:  # OSError, or no thread to be had: a cache never hurts
                            self.lose_cache(str(error))
                            return found
                if scope.cancelled_caught:
                    self.lose_cache(f"a read took longer than {CACHE_TIMEOUT_S} s")
                    return found
            self._note_read(chunks)
        return found

    @contextmanager
    def _counted(self, chunks: Sequence[int]) -> Iterator[None]:
        """Keep chunks in the file while threads read them. (One that is abandoned may read a hole; nobody looks.)"""
        for chunk in chunks:
            self._reading[chunk] = self._reading.get(chunk, 0) + 1
        try:
            yield
        finally:
            for chunk in chunks:
                self._reading[chunk] -= 1
                if not self._reading[chunk]:
                    del self._reading[chunk]

    def check_writer(self) -> None:
        """Give up a cache whose disk hangs."""
        if self._writer is not None and self._writer.stalled_s() > WRITE_STALL_S:
            self.lose_cache(f"a write takes longer than {WRITE_STALL_S} s")

    @property
    def cache(self) -> NodeCache | None:
        """The cache in use, None when there is none (any more)."""
        return self._cache

    def stop_writing(self, reason: str) -> None:
        """Cache nothing more; what is in the file is used on."""
        if self._writer is None:
            return
        self._writer.stop()
        self._writer = None
        self._stats.cache_failure = reason
        log.warning("caching ended", reason=reason)
        for chunk, data in self._writing.items():
            self._hold(chunk, data)
        self._writing.clear()
        self._read_while_writing.clear()
        self._on_room()

    def _hold(self, chunk: int, data: Buffer) -> None:
        """Keep in memory what couldn't be written; what was read may leave first."""
        (self._held.read if chunk in self._read_while_writing else self._held.unread).put(chunk, data)

    def lose_cache(self, reason: str) -> None:
        """Use the cache file no more, neither way."""
        self.stop_writing(reason)
        if self._cache is None:
            return
        self._cache = None
        self._stats.cache_failure = reason
        self._places = bytearray(0 if p in (Place.RESIDENT, Place.CACHED) else p for p in self._places)
        log.warning("cache is not used any more", reason=reason)

    def _written(self, chunks: Sequence[int], error: OSError | None) -> None:
        for chunk in chunks:
            data = self._writing.pop(chunk, None)
            if data is None:  # caching ended in the meantime
                continue
            if self._writer is not None:
                self._writer.settled(len(data))
            if error is None:
                self._places[chunk] = Place.RESIDENT
                self._stats.cache_written_bytes += len(data)
                self._accountant.give(len(data))
                if chunk in self._read_while_writing:
                    self._note_read((chunk,))
            else:
                self._hold(chunk, data)
            self._read_while_writing.discard(chunk)
        if error is None:
            self._write_more()
            self._spill()
            self._on_room()
        elif error.errno in _NO_MORE_ROOM:  # what was confirmed before stays
            self.stop_writing(str(error))
        else:
            self.lose_cache(str(error))


def _let_go(cache: NodeCache) -> None:
    with suppress(OSError):
        cache.note_used()
    cache.close()
