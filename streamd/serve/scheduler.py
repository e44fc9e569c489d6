"""The in-flight table and the fetches: whoever wants a chunk, it is fetched once, and every wait ends.

One `Flight` a chunk that is wanted, from the first want to its delivery or its failure; reads join it. A fetch is a
task of the scheduler's nursery, never of the reader that started it, so a reader that leaves takes nothing with it.
Decisions are pure functions elsewhere: what comes first (`order`), how much one GET brings and whether a fault joins
one (`plan`), how much memory may be used (`memory`), what a failure gets (`policy`). All state belongs to the Trio
thread.
"""

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import structlog
import trio

from streamd.config import FetchConfig, PolicyConfig
from streamd.errors import StoreError, StoreErrorKind, StreamdError
from streamd.serve import fetch as fetching
from streamd.serve.handles import PendingRead, ReadFailed
from streamd.serve.memory import Accountant
from streamd.serve.order import Key, Want, WantQueue
from streamd.serve.plan import FrameSpan, GetPlan, Layout, joins
from streamd.serve.policy import Fail, Trouble
from streamd.serve.residency import CACHE_TIMEOUT_S, Place, Residency
from streamd.serve.stats import ServeStats
from streamd.snapshot.frames import FrameCorrupt
from streamd.snapshot.manifest import Codec
from streamd.store.port import Buffer, ObjectInfo, Store
from streamd.store.retry import Backoff

log = structlog.get_logger()

# A fault's GET takes in neighbours that faults wait for as well, up to this: 1 MiB is a few ms of any link worth
# having.
FAULT_GET_BYTES = 1 << 20
# Decoded bytes of one background GET: bounds what one well compressed range can claim of the memory.
RAW_BYTES_MAX = 32 << 20
# Cached chunks that are verified in one thread hop.
CHECK_CHUNKS = 16
# Longest pause between two tries while a store is down: its return should be noticed soon.
BACKOFF = Backoff(first_s=0.1, limit_s=5.0)


# How a blocking call is made: `trio.to_thread.run_sync`, or in place where a test's virtual time has to know of it.
RunBlocking: TypeAlias = Callable[..., Awaitable[object]]


@dataclass(slots=True, eq=False)
class Flight:
    """A chunk that is wanted and not here: who waits, why, how many fetches are bringing it and how far one is."""

    chunk: int
    want: Want
    readers: set[PendingRead] = field(default_factory=set)
    fetches: int = 0
    progress: fetching.Progress | None = None
    trouble: Trouble = field(default_factory=Trouble)


class Scheduler:
    """Brings chunks of one image from the store into its `Residency`, most urgent first."""

    def __init__(
        self,
        store: Store,
        packs: Sequence[ObjectInfo],
        layout: Layout,
        residency: Residency,
        accountant: Accountant,
        stats: ServeStats,
        *,
        fetch: FetchConfig,
        policy: PolicyConfig,
        ahead: bool,
        run_blocking: RunBlocking = trio.to_thread.run_sync,
    ) -> None:
        self._run_blocking = run_blocking
        self._store = store
        self._packs = packs
        self._layout = layout
        self._residency = residency
        self._accountant = accountant
        self._stats = stats
        self._fetch = fetch
        self._policy = policy
        self._ahead = ahead
        self._ahead_cursor = 0
        self._ahead_paused = False
        self._ahead_failures = 0
        # Never again ahead of a read: what came once, was read and left memory, and what can't be had.
        self._not_ahead = bytearray(len(layout))
        self.ahead_waits_for: str | None = None
        self._flights: dict[int, Flight] = {}
        self._queue = WantQueue()
        self._arrivals = 0
        self._faults_running = 0
        self._background_running = 0
        self._kicked = trio.Event()
        self._nursery: trio.Nursery | None = None
        self._limiter = trio.CapacityLimiter(fetch.fault_gets + fetch.background_gets)
        self._check_limiter = trio.CapacityLimiter(16)
        self._running: set[fetching.Progress] = set()
        self._bytes_per_s = 0.0
        self._round_trip_s = 0.0
        self.last_failure: str | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Fetch until cancelled; fetches under way are abandoned then and their threads end by themselves."""
        try:
            async with trio.open_nursery() as self._nursery:
                task_status.started()
                while True:
                    self._kicked = trio.Event()
                    while self._start_next():
                        pass
                    await self._kicked.wait()
        finally:
            self._nursery = None
            for progress in self._running:
                progress.stop = True

    def kick(self) -> None:
        """Look again for what can be started: something is wanted, or some room or capacity came free."""
        self._kicked.set()

    @property
    def waiting_chunks(self) -> int:
        """Chunks that a read waits for."""
        return sum(1 for flight in self._flights.values() if flight.readers)

    @property
    def arriving_bytes(self) -> int:
        """Bytes that the store sent for fetches that are not over yet."""
        return sum(progress.origin_bytes for progress in self._running)

    def want(self, chunk: int, want: Want, reader: PendingRead | None) -> None:
        """Join, raise or begin the flight of a chunk that isn't here."""
        flight = self._flights.get(chunk)
        self._arrivals += 1
        key = Key(want, self._arrivals)
        if flight is None:
            flight = self._flights[chunk] = Flight(chunk, want)
            self._queue.push(chunk, key)
        elif want < flight.want:
            flight.want = want
            if chunk in self._queue or self._is_too_far(flight):
                self._queue.push(chunk, key)
        if reader is not None:
            flight.readers.add(reader)
        self.kick()

    def leave(self, chunks: Sequence[int], reader: PendingRead) -> None:
        """Take a reader off the flights that it still waits for; what is under way goes on, for others."""
        for chunk in chunks:
            flight = self._flights.get(chunk)
            if flight is not None:
                flight.readers.discard(reader)

    def _is_too_far(self, flight: Flight) -> bool:
        """Whether a fault fetches a chunk itself although a fetch under way will bring it."""
        if flight.want != Want.FAULT or flight.fetches == 0 or flight.progress is None:
            return False
        due_bytes = self._layout.frame(flight.chunk).end - flight.progress.received
        return not joins(due_bytes, bytes_per_s=self._bytes_per_s, round_trip_s=self._round_trip_s)

    # What is started next

    def _start_next(self) -> bool:
        first = self._queue.first(self._has_capacity)
        if first is None:
            return len(self._queue) == 0 and self._start_ahead()
        chunk, key = first
        if self._residency.place(chunk) == Place.CACHED:
            return self._start_check(chunk)
        if key.want == Want.FAULT:
            plan = self._plan(chunk, wanted=self._is_fault, get_bytes=FAULT_GET_BYTES)
        else:
            plan = self._plan(chunk, wanted=self._is_wanted, get_bytes=self._fetch.get_bytes)
        size = plan.raw_bytes + plan.transit_bytes
        if not self._accountant.has_room_for_demand(size):
            self._residency.shed(self._accountant.shortage_for_demand(size), unread_too=True)
            if not self._accountant.has_room_for_demand(size):
                return False
        self._start_fetch(plan, demand=True, fault=key.want == Want.FAULT)
        return True

    def _has_capacity(self, want: Want) -> bool:
        if want == Want.FAULT:
            return self._faults_running < self._fetch.fault_gets
        return self._background_running < self._fetch.background_gets

    def _start_ahead(self) -> bool:
        if not self._ahead or not self._has_capacity(Want.AHEAD):
            return False
        while self._ahead_cursor < len(self._layout) and not self._may_go_ahead(self._ahead_cursor):
            self._ahead_cursor += 1
        if self._ahead_cursor == len(self._layout):
            self.ahead_waits_for = None
            return False
        plan = self._plan(self._ahead_cursor, wanted=self._may_go_ahead, get_bytes=self._fetch.get_bytes)
        self.ahead_waits_for = self._obstacle_ahead(plan)
        if self.ahead_waits_for is not None:
            return False
        for frame in plan.frames:
            self._flights[frame.chunk] = Flight(frame.chunk, Want.AHEAD)
        self._ahead_cursor = plan.frames[-1].chunk + 1
        self._start_fetch(plan, demand=False, fault=False)
        return True

    def _obstacle_ahead(self, plan: GetPlan) -> str | None:
        """Say what what nobody has asked for has to wait for, None for nothing."""
        if self._ahead_paused:
            return "the store"
        if self._residency.is_behind:
            return "the cache disk"
        size = plan.raw_bytes + plan.transit_bytes
        if not self._accountant.has_room_ahead(size):
            self._residency.shed(self._accountant.shortage_ahead(size), unread_too=False)
            if not self._accountant.has_room_ahead(size):
                return "memory: what was fetched has to be read first"
        return None

    def _plan(self, chunk: int, *, wanted: Callable[[int], bool], get_bytes: int) -> GetPlan:
        return self._layout.plan(chunk, wanted=wanted, get_bytes=get_bytes, raw_bytes=RAW_BYTES_MAX)

    def _may_go_ahead(self, chunk: int) -> bool:
        return self._residency.is_absent(chunk) and chunk not in self._flights and not self._not_ahead[chunk]

    def _is_fault(self, chunk: int) -> bool:
        key = self._queue.key(chunk)
        return key is not None and key.want == Want.FAULT and self._residency.is_absent(chunk)

    def _is_wanted(self, chunk: int) -> bool:
        if chunk in self._queue:
            return not self._is_fault(chunk) and self._residency.is_absent(chunk)
        return self._ahead and self._may_go_ahead(chunk)

    # Fetches

    def _start_fetch(self, plan: GetPlan, *, demand: bool, fault: bool) -> None:
        assert self._nursery is not None
        progress = fetching.Progress(received=plan.start)
        flights = [self._flights.setdefault(frame.chunk, Flight(frame.chunk, Want.AHEAD)) for frame in plan.frames]
        for flight in flights:
            flight.fetches += 1
            flight.progress = progress
            self._queue.remove(flight.chunk)
        self._accountant.take(plan.raw_bytes + plan.transit_bytes)
        if demand:
            self._accountant.start_demand()
        if fault:
            self._faults_running += 1
        else:
            self._background_running += 1
        self._running.add(progress)
        self._nursery.start_soon(self._run_fetch, plan, flights, progress, demand, fault)

    async def _run_fetch(
        self, plan: GetPlan, flights: list[Flight], progress: fetching.Progress, demand: bool, fault: bool
    ) -> None:
        token = trio.lowlevel.current_trio_token()
        left = {frame.chunk: frame.length for frame in plan.frames}

        def deliver(frame: FrameSpan, data: Buffer) -> None:
            try:
                token.run_sync_soon(self._delivered, frame.chunk, data, left)
            except trio.RunFinishedError:
                progress.stop = True

        failure: StoreError | None = None
        try:
            await self._run_blocking(
                fetching.fetch,
                self._store,
                self._packs[plan.pack],
                plan,
                progress,
                deliver,
                abandon_on_cancel=True,
                limiter=self._limiter,
            )
        except StoreError as error:
            failure = error
        except Exception as error:  # a bug must not lose the reads that wait: they get the policy's last step
            log.exception("fetch failed in an unforeseen way", pack=plan.pack)
            failure = StoreError(StoreErrorKind.FORBIDDEN, self._packs[plan.pack].key, f"internal error: {error!r}")
        finally:
            progress.stop = True
            self._running.discard(progress)
            missing = [flight for flight in flights if flight.chunk in left]
            self._accountant.give(sum(left.values()) + plan.transit_bytes)
            left.clear()  # an abandoned thread may still deliver: nothing is accounted for it any more
            if demand:
                self._accountant.end_demand()
            if fault:
                self._faults_running -= 1
            else:
                self._background_running -= 1
            self._note_fetch(plan, progress)
        if failure is None:
            self._ahead_failures = 0
        else:
            self._failed(missing, failure)
        self.kick()

    def _delivered(self, chunk: int, data: Buffer, left: dict[int, int]) -> None:
        if left.pop(chunk, None) is None:  # the fetch was abandoned
            return
        flight = self._flights.pop(chunk, None)
        self._queue.remove(chunk)
        self._stats.fetched_chunks += 1
        self._stats.fetched_bytes += len(data)
        if self._residency.is_here(chunk):
            self._stats.duplicate_chunks += 1
            self._accountant.give(len(data))
        else:
            self._residency.keep(chunk, data)
        self._not_ahead[chunk] = 1
        if flight is not None:
            _arrive(flight, data)
            if flight.readers:
                self._residency.touched(chunk)

    def _note_fetch(self, plan: GetPlan, progress: fetching.Progress) -> None:
        self._stats.origin_bytes += progress.origin_bytes
        self._stats.origin_requests += progress.requests
        flowing_s = progress.took_s - progress.first_byte_s
        if progress.took_s and progress.first_byte_s:
            self._round_trip_s = _smooth(self._round_trip_s, progress.first_byte_s)
            if flowing_s > 0 and progress.origin_bytes >= 256 << 10:
                self._bytes_per_s = _smooth(self._bytes_per_s, progress.origin_bytes / flowing_s)

    # Failures

    def _failed(self, flights: list[Flight], error: StoreError) -> None:
        kind = error.store_kind
        self.last_failure = f"{kind}: {error}"
        self._stats.store_failures[kind] = self._stats.store_failures.get(kind, 0) + 1
        log.info("fetch failed", kind=kind.value, error=str(error), chunks=len(flights))
        now_s = trio.current_time()
        jitter = random.random()  # one for all chunks of a fetch, so that they come back as one
        again: dict[float, list[int]] = {}
        for position, flight in enumerate(flights):
            chunk = flight.chunk
            if self._flights.get(chunk) is not flight:  # another fetch brought it; who wants it now began anew
                continue
            flight.fetches -= 1
            if flight.fetches or chunk in self._queue:
                continue
            if kind == StoreErrorKind.CORRUPT and position:
                # Only the first was looked at; those behind it are good as far as anyone knows.
                if flight.readers:
                    again.setdefault(0.0, []).append(chunk)
                else:
                    self._drop(chunk, StoreErrorKind.TRANSIENT)
                continue
            if not flight.readers:
                self._drop(chunk, kind)
                continue
            backoff_s = BACKOFF.delay_s(flight.trouble.attempts, jitter)
            step = flight.trouble.after(kind, now_s=now_s, backoff_s=backoff_s, policy=self._policy)
            if isinstance(step, Fail):
                self._fail(flight, error)
            else:
                again.setdefault(step.delay_s, []).append(chunk)
        for delay_s, waiting in again.items():
            self._later(delay_s, self._ask_again, waiting)

    def _drop(self, chunk: int, kind: StoreErrorKind) -> None:
        """Give up a chunk that nobody waits for; go ahead from it again, later, if that may help."""
        del self._flights[chunk]
        if kind not in _PASSING:
            self._not_ahead[chunk] = 1
            return
        self._ahead_cursor = min(self._ahead_cursor, chunk)
        if not self._ahead_paused:
            self._ahead_paused = True
            self._later(BACKOFF.delay_s(self._ahead_failures, random.random()), self._resume_ahead, [])
            self._ahead_failures += 1

    def _resume_ahead(self, _: list[int]) -> None:
        self._ahead_paused = False

    def _ask_again(self, chunks: list[int]) -> None:
        for chunk in chunks:
            flight = self._flights.get(chunk)
            if flight is None or flight.fetches or chunk in self._queue:
                continue
            if flight.readers:
                self._arrivals += 1
                self._queue.push(chunk, Key(flight.want, self._arrivals))
            else:
                self._drop(chunk, StoreErrorKind.TRANSIENT)

    def _fail(self, flight: Flight, error: StreamdError) -> None:
        log.error("reads fail", chunk=flight.chunk, reads=len(flight.readers), error=str(error))
        del self._flights[flight.chunk]
        for reader in flight.readers:
            reader.fail(ReadFailed(str(error)))

    def _later(self, delay_s: float, act: Callable[[list[int]], None], chunks: list[int]) -> None:
        assert self._nursery is not None

        async def wait() -> None:
            await trio.sleep(delay_s)
            act(chunks)
            self.kick()

        self._nursery.start_soon(wait)

    # Cached chunks of a former life

    def _start_check(self, first: int) -> bool:
        assert self._nursery is not None
        chunks = [first]
        for chunk in range(first + 1, min(first + CHECK_CHUNKS, len(self._layout))):
            if self._residency.place(chunk) != Place.CACHED or (chunk in self._flights and chunk not in self._queue):
                break
            chunks.append(chunk)
        for chunk in chunks:
            flight = self._flights.setdefault(chunk, Flight(chunk, Want.AHEAD))
            flight.fetches += 1
            self._queue.remove(chunk)
        self._nursery.start_soon(self._run_check, chunks)
        return True

    async def _run_check(self, chunks: list[int]) -> None:
        found: dict[int, Buffer | None] = {}
        with trio.move_on_after(CACHE_TIMEOUT_S) as scope:
            try:
                await self._run_blocking(
                    self._check, chunks, found, abandon_on_cancel=True, limiter=self._check_limiter
                )
            except OSError as error:
                self._residency.lose_cache(str(error))
        if scope.cancelled_caught:
            self._residency.lose_cache(f"a read took longer than {CACHE_TIMEOUT_S} s")
        for chunk in chunks:
            flight = self._flights.pop(chunk)
            data = found.get(chunk)
            if data is not None:
                self._residency.verified(chunk)
                _arrive(flight, data)
                continue
            if chunk in found:
                self._residency.corrupt(chunk)
            if flight.readers:
                flight.fetches -= 1
                self._flights[chunk] = flight
                self._ask_again([chunk])
            else:
                self._ahead_cursor = min(self._ahead_cursor, chunk)
        self.kick()

    def _check(self, chunks: list[int], found: dict[int, Buffer | None]) -> None:
        """Read and verify cached chunks, in a thread; a wrong one is None and its bit is cleared. Raises: OSError."""
        cache = self._residency.cache
        if cache is None:
            return
        for chunk in chunks:
            length, digest = self._layout.length[chunk], self._layout.digest(chunk)
            data = cache.read(length, self._layout.start[chunk])
            try:
                found[chunk] = fetching.decoder().decode(data, codec=Codec.RAW, length=length, digest=digest)
            except FrameCorrupt:
                found[chunk] = None
                cache.forget(chunk)


_PASSING = (StoreErrorKind.TRANSIENT, StoreErrorKind.THROTTLED, StoreErrorKind.CREDENTIALS)


def _arrive(flight: Flight, data: Buffer) -> None:
    for reader in flight.readers:
        reader.arrive(flight.chunk, data)


def _smooth(old: float, new: float) -> float:
    return new if not old else 0.8 * old + 0.2 * new
