"""The in-flight table and the fetches: whoever wants a chunk, it is fetched once, and every wait ends.

One `Flight` a chunk that is wanted, from the first want to its delivery or its failure; reads join it. A fetch is a
task of the scheduler's nursery, never of the reader that started it, so a reader that leaves takes nothing with it.
Decisions are pure functions elsewhere: what comes first (`order`), how much one GET brings and whether a fault joins
one (`plan`), how much memory may be used (`memory`), what a failure gets (`policy`). All state belongs to the Trio
thread.
"""

import math
import random
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import structlog
import trio

from streamd.config import FetchConfig, PolicyConfig
from streamd.errors import StoreError, StoreErrorKind, StreamdError
from streamd.serve import fetch as fetching
from streamd.serve.gets import SECOND_TRIES_MAX, Get, Gets, Progress
from streamd.serve.handles import PendingRead, ReadFailed
from streamd.serve.learning import Trust
from streamd.serve.limit import BackgroundLimit
from streamd.serve.memory import Accountant
from streamd.serve.order import WANTS, Key, Want, WantQueue
from streamd.serve.plan import FrameSpan, GetPlan, Layout, joins
from streamd.serve.policy import Fail, Trouble
from streamd.serve.rate import FetchRate
from streamd.serve.record import Recorder
from streamd.serve.residency import CACHE_TIMEOUT_S, Place, Residency
from streamd.serve.stats import ServeStats
from streamd.serve.windows import FaultRuns
from streamd.snapshot.frames import FrameCorrupt
from streamd.snapshot.manifest import Codec
from streamd.store.port import Buffer, ObjectInfo, Store
from streamd.store.retry import Backoff

log = structlog.get_logger()

# The GET of a fault takes in so much of what follows: a few ms of any link worth having.
FAULT_GET_BYTES = 1 << 20
# The GET of the rest of its window, which nobody has asked for yet: a round trip at 5 Gbit/s.
WINDOW_GET_BYTES = 4 << 20
# Of the GETs for faults, so many are kept for reads that wait.
FAULT_GETS_RESERVED = 4
# What is fetched for the oldest stream read while the learned order has the link: a slot comes free, and the first read
# of a fault can be made.
TRICKLE_BYTES = 256 << 10
# Decoded bytes of one background GET: bounds what one well compressed range can claim of the memory.
RAW_BYTES_MAX = 32 << 20
# Of the learned order, so many chunks are wanted: all of `trace.HOT_BYTES` in chunks of 32 KiB or more. Each costs 0.8
# KB while it is, and an image may have chunks of a page.
HOT_CHUNKS_MAX = 16384
# Cached chunks that are verified in one thread hop, and how many such hops may run for what nobody has asked for.
CHECK_CHUNKS = 16
HOT_CHECKS_MAX = 2
# Longest pause between two tries while a store is down: its return should be noticed soon.
BACKOFF = Backoff(first_s=0.1, limit_s=5.0)
# A store that is down refuses hundreds of requests a second: so often one of these is logged, with their number.
_TELL_S = 1.0
# How often GETs that stand still are looked for, while there are any.
_WATCH_S = 0.1
# Chunks that no stopped thread waits for are taken over so often: at 800 Mbit/s two at a time, at one wake-up. Whoever
# brings the next one looks at the time, since a timer of Trio's for each would cost as much again as taking them.
GATHER_S = 0.005

_STREAM_BEFORE_HOT = (Want.FAULT, Want.WINDOW, Want.STREAM, Want.HOT, Want.AHEAD)

# How a blocking call is made: `trio.to_thread.run_sync`, or in place where a test's virtual time has to know of it.
RunBlocking: TypeAlias = Callable[..., Awaitable[object]]


@dataclass(slots=True, eq=False)
class Flight:
    """A chunk that is wanted and not here: who waits, why, how many fetches are bringing it and the last of them."""

    chunk: int
    want: Want
    readers: set[PendingRead] = field(default_factory=set)
    fetches: int = 0
    get: Get | None = None
    trouble: Trouble = field(default_factory=Trouble)


class Scheduler:
    """Brings chunks of one image from the store into its `Residency`, most urgent first.

    `foresees`: the windows of faults are fetched before they are asked for; `ahead`: so is everything else.
    """

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
        foresees: bool,
        ahead: bool,
        recorder: Recorder | None = None,
        run_blocking: RunBlocking = trio.to_thread.run_sync,
    ) -> None:
        self._recorder = recorder
        self._run_blocking = run_blocking
        self._store = store
        self._packs = packs
        self._layout = layout
        self._residency = residency
        self._accountant = accountant
        self._stats = stats
        self._fetch = fetch
        self._policy = policy
        self._fault_runs = FaultRuns() if foresees else None
        self._ahead = ahead
        self._ahead_cursor = 0
        self._ahead_paused = False
        self._ahead_failures = 0
        self._has_cache = residency.cache is not None
        # Never again ahead of a read: what came once, was read and left memory, and what can't be had.
        self._not_ahead = bytearray(len(layout))
        self.ahead_waits_for: str | None = None
        self._flights: dict[int, Flight] = {}
        self._queue = WantQueue()
        self._trust = Trust.UNTRIED
        self._arrivals = 0
        self._hot_checks = 0
        # From the fetches' threads: what a GET has still to bring, one of its chunks, that chunk's bytes.
        self._arrived: deque[tuple[dict[int, int], int, Buffer]] = deque()
        self._is_told = False
        self._taken_s = -math.inf
        self._gets = Gets()
        self.limit = BackgroundLimit(get_bytes_max=fetch.get_bytes)
        self._limit_binds = False
        self.rate = FetchRate(fetch.max_bytes_per_s)
        self._stream_is_due = False
        self._pace_timer = False
        self._timers = 0
        self._kicked = trio.Event()
        self._nursery: trio.Nursery | None = None
        self._limiter = trio.CapacityLimiter(fetch.fault_gets + fetch.background_gets + SECOND_TRIES_MAX)
        self._check_limiter = trio.CapacityLimiter(16)
        self.last_failure: str | None = None
        self._failures_told_s = -math.inf
        self._untold_failures = 0

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Fetch until cancelled; fetches under way are abandoned then and their threads end by themselves."""
        try:
            async with trio.open_nursery() as self._nursery:
                self._nursery.start_soon(self._watch)
                task_status.started()
                while True:
                    self._kicked = trio.Event()
                    self._limit_binds = False
                    while self._start_next():
                        pass
                    await self._kicked.wait()
        finally:
            self._nursery = None
            for get in self._gets:
                get.progress.stop = True

    def kick(self) -> None:
        """Look again for what can be started: something is wanted, or some room or capacity came free."""
        self._kicked.set()

    def share_link(self, bytes_per_s: int) -> None:
        """Bound what is fetched for anything but stopped threads from now on (0: no bound), whatever is configured."""
        self.rate.set(bytes_per_s, trio.current_time())
        self.kick()

    @property
    def waiting_chunks(self) -> int:
        """Chunks that a read waits for."""
        return sum(1 for flight in self._flights.values() if flight.readers)

    @property
    def is_asking(self) -> bool:
        """Whether the store is asked for something, or will be again after a failure."""
        return bool(len(self._gets)) or self._timers > self._pace_timer

    @property
    def arriving_bytes(self) -> int:
        """Bytes that the store sent for fetches that are not over yet."""
        return self._gets.arrived_bytes

    # What is wanted

    def want(self, chunk: int, want: Want, reader: PendingRead | None) -> None:
        """Join, raise or begin the flight of a chunk that isn't here."""
        flight = self._flights.get(chunk)
        if flight is None:
            flight = self._flights[chunk] = Flight(chunk, want)
            self._queue_up(flight)
        elif want < flight.want:
            flight.want = want
            if chunk in self._queue or self._is_too_far(flight):
                self._queue_up(flight)
        if reader is not None:
            flight.readers.add(reader)
            if chunk in self._queue:
                self._arrivals += 1
                self._queue.ask(chunk, self._arrivals)
                if self._nursery is not None and self._residency.place(chunk) == Place.CACHED:
                    self._start_check(chunk, want)  # at once: it must not wait behind what comes from the store
        if chunk in self._queue:
            self.kick()

    def _queue_up(self, flight: Flight) -> None:
        self._arrivals += 1
        self._queue.push(flight.chunk, Key(flight.want, self._arrivals))
        if flight.readers:
            self._queue.ask(flight.chunk, self._arrivals)

    def note_fault(self, start: int, end: int, *, file_end: int) -> None:
        """Want the rest of the window of a fault that reads [start, end) of a file that ends at `file_end`.

        To be told of every such read, also of those whose bytes are here.
        """
        ahead = None if self._fault_runs is None else self._fault_runs.note(start, end)
        if ahead is not None:
            self._foresee(ahead[0], min(ahead[1], file_end), Want.WINDOW)

    def want_hot(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Want the learned order: ranges of the image, in that order."""
        left = HOT_CHUNKS_MAX
        for start, end in ranges:
            left -= self._foresee(start, end, Want.HOT, chunks_max=left)

    def trust_hot(self, trust: Trust) -> None:
        """Fetch the learned order before what the stream waits for, in turns with it, or after it."""
        self._trust = trust

    def forget_hot(self) -> None:
        """Want no more of the learned order than others want as well."""
        while (chunk := self._queue.first(Want.HOT)) is not None:
            self._queue.remove(chunk)
            flight = self._flights[chunk]
            if flight.readers:
                flight.want = Want.STREAM
                self._queue_up(flight)
            elif not flight.fetches:
                del self._flights[chunk]
                self._ahead_cursor = min(self._ahead_cursor, chunk)
        self.kick()

    def _foresee(self, start: int, end: int, want: Want, *, chunks_max: int | None = None) -> int:
        """Want what is not here of the first chunks of a range; give how many there were."""
        chunks = self._layout.chunks(start, end)[:chunks_max] if start < end else range(0)
        for chunk in chunks:
            if not self._residency.is_here(chunk):
                self.want(chunk, want, None)
        return len(chunks)

    def leave(self, chunks: Iterable[int], reader: PendingRead) -> None:
        """Take a reader off the flights that it still waits for; what is under way goes on, for others."""
        for chunk in chunks:
            flight = self._flights.get(chunk)
            if flight is not None:
                flight.readers.discard(reader)

    def _is_too_far(self, flight: Flight) -> bool:
        """Whether a fault fetches a chunk itself although a fetch under way will bring it."""
        get = flight.get
        if flight.want != Want.FAULT or flight.fetches == 0 or get is None or get.is_urgent:
            return False
        due_bytes = self._layout.frame(flight.chunk).end - get.progress.received
        return not joins(due_bytes, bytes_per_s=self.limit.bytes_per_s, round_trip_s=self.limit.round_trip_s)

    # What is started next

    def _start_next(self) -> bool:
        is_stream_first = self._stream_is_due or self._trust == Trust.IN_DOUBT
        # Of AHEAD, what is to be asked for a second time; the rest goes by the cursor.
        for want in _STREAM_BEFORE_HOT if is_stream_first else WANTS:
            chunk = self._queue.first(want)
            if chunk is None:
                continue
            if self._residency.place(chunk) == Place.CACHED:
                if want in (Want.FAULT, Want.STREAM) or self._hot_checks < HOT_CHECKS_MAX:
                    return self._start_check(chunk, want)
            elif self._start_wanted(chunk, want):
                return True
        return self._start_ahead()

    def _start_wanted(self, chunk: int, want: Want) -> bool:
        """Start the GET of a chunk of the queue, with its neighbours, if it may start now."""
        get_bytes = self._get_bytes(want)
        if not get_bytes:
            return False
        wanted = self._is_urgent if want <= Want.WINDOW else self._is_wanted
        plan = self._plan(chunk, wanted=wanted, get_bytes=get_bytes)
        demand = want in (Want.FAULT, Want.STREAM)
        if demand:
            if shortage := self._accountant.shortage_for_demand(plan.held_bytes):
                self._residency.shed(shortage, unread_too=True)
            if self._accountant.shortage_for_demand(plan.held_bytes):
                # The only one may go beyond the cap, with as little as can be.
                plan = self._plan(chunk, wanted=wanted, get_bytes=1)
                if not self._accountant.has_room_for_demand(plan.held_bytes):
                    return False
        elif self._obstacle_ahead(plan) is not None:
            return False
        self._start_fetch(plan, want, demand=demand)
        return True

    def _get_bytes(self, want: Want) -> int:
        """How large a GET of that class may start now, 0 for none."""
        match want:
            case Want.FAULT:
                return FAULT_GET_BYTES if self._gets.urgent < self._fetch.fault_gets else 0
            case Want.WINDOW:
                has_capacity = self._gets.urgent < self._fetch.fault_gets - FAULT_GETS_RESERVED
                return WINDOW_GET_BYTES if has_capacity else 0
        if self._gets.background >= self._fetch.background_gets:
            return 0
        size = self._background_size()
        if want == Want.STREAM and self._stream_is_due and self._trust != Trust.UNTRIED:
            size = min(size, TRICKLE_BYTES)
        if not self._is_time(size):
            return 0
        if self._has_link(size):
            return size
        self._limit_binds = True
        # The learned order may have the link for long, and a fault needs a slot as well; those in flight have one.
        if want == Want.STREAM and not self._gets.has(Want.STREAM) and not self._is_urgent_moving():
            return min(size, TRICKLE_BYTES)
        return 0

    def _background_size(self) -> int:
        """How large a background GET should be, whenever it may go."""
        return min(self.limit.get_bytes, self.rate.get_bytes)

    def _has_link(self, size: int) -> bool:
        """Whether so little is outstanding that a background GET of that size may be, too."""
        outstanding_bytes = self._gets.outstanding_bytes
        return not outstanding_bytes or outstanding_bytes + size <= self._background_limit_bytes()

    def _is_urgent_moving(self) -> bool:
        """Whether something for a fault is on its way; not when all of that stands still."""
        return self._gets.is_urgent_moving(trio.current_time(), round_trip_s=self.limit.round_trip_s)

    def _background_limit_bytes(self) -> int:
        """The limit; while a fault's window is on its way, only what the link would otherwise idle for.

        And what will have arrived when that is looked at again.
        """
        soon_bytes = int(self.limit.bytes_per_s * GATHER_S)
        if not self._gets.urgent:
            return self.limit.bytes + soon_bytes
        return min(self.limit.bytes, max(self.limit.needed_bytes, FAULT_GET_BYTES)) + soon_bytes

    def _is_time(self, size: int) -> bool:
        """Whether a background request of that size may go now, by the pace that the store has asked for and the rate.

        If not, look again then.
        """
        now_s = trio.current_time()
        delay_s = max(self.limit.delay_s(now_s), self.rate.delay_s(size, now_s))
        if delay_s and not self._pace_timer:
            self._pace_timer = True
            self._later(delay_s, self._end_pace_timer, [])
        return not delay_s

    def _end_pace_timer(self, _: list[int]) -> None:
        self._pace_timer = False

    def _start_ahead(self) -> bool:
        if not self._ahead:
            return False
        if self._has_cache and self._residency.cache is None:  # lost: what it had is to be fetched
            self._has_cache, self._ahead_cursor = False, 0
        # Past millions of zero chunks in one step.
        self._ahead_cursor = self._residency.next_absent(self._ahead_cursor)
        while self._ahead_cursor < len(self._layout) and not self._may_go_ahead(self._ahead_cursor):
            self._ahead_cursor = self._residency.next_absent(self._ahead_cursor + 1)
        if self._ahead_cursor == len(self._layout):
            self.ahead_waits_for = None
            return False
        get_bytes = self._get_bytes(Want.AHEAD)
        if not get_bytes:
            return False
        plan = self._plan(self._ahead_cursor, wanted=self._may_go_ahead, get_bytes=get_bytes)
        self.ahead_waits_for = self._obstacle_ahead(plan)
        if self.ahead_waits_for is not None:
            return False
        self._ahead_cursor = plan.frames[-1].chunk + 1
        self._start_fetch(plan, Want.AHEAD, demand=False)
        return True

    def _obstacle_ahead(self, plan: GetPlan) -> str | None:
        """Say what what nobody has asked for has to wait for, None for nothing."""
        if self._ahead_paused:
            return "the store"
        if self._residency.is_behind:
            return "the cache disk"
        size = plan.held_bytes
        if not self._accountant.has_room_ahead(size):
            self._residency.shed(self._accountant.shortage_ahead(size), unread_too=False)
            if not self._accountant.has_room_ahead(size):
                return "memory: what was fetched has to be read first"
        return None

    def _plan(self, chunk: int, *, wanted: Callable[[int], bool], get_bytes: int) -> GetPlan:
        return self._layout.plan(chunk, wanted=wanted, get_bytes=get_bytes, raw_bytes=RAW_BYTES_MAX)

    def _may_go_ahead(self, chunk: int) -> bool:
        return self._residency.is_absent(chunk) and chunk not in self._flights and not self._not_ahead[chunk]

    def _is_urgent(self, chunk: int) -> bool:
        key = self._queue.key(chunk)
        return key is not None and key.want <= Want.WINDOW and self._residency.is_absent(chunk)

    def _is_wanted(self, chunk: int) -> bool:
        if chunk in self._queue:
            return not self._is_urgent(chunk) and self._residency.is_absent(chunk)
        return self._ahead and self._may_go_ahead(chunk)

    # Fetches

    def _start_fetch(self, plan: GetPlan, want: Want, *, demand: bool) -> None:
        assert self._nursery is not None
        now_s = trio.current_time()
        get = Get(plan, Progress(received=plan.start), want, demand, began_s=now_s, moved_s=now_s, moved_to=plan.start)
        flights = [self._flights.setdefault(frame.chunk, Flight(frame.chunk, want)) for frame in plan.frames]
        get.is_second = any(flight.fetches for flight in flights)
        for flight in flights:
            flight.fetches += 1
            flight.get = get
            self._queue.remove(flight.chunk)
        self._accountant.take(plan.held_bytes)
        if demand:
            self._accountant.start_demand()
        if not get.is_urgent:
            self.limit.started(now_s)
            # An order that nobody knows yet takes turns with the stream. One that has the rate for long, too: every
            # other GET is then a small one.
            self._stream_is_due = want == Want.HOT and (self._trust == Trust.UNTRIED or self.rate.is_held_back(now_s))
        self.rate.charge(plan.end - plan.start, now_s, is_urgent=get.is_urgent)
        self._gets.add(get)
        self._nursery.start_soon(self._run_fetch, get, flights)

    async def _run_fetch(self, get: Get, flights: list[Flight]) -> None:
        token, clock = trio.lowlevel.current_trio_token(), trio.lowlevel.current_clock()
        plan, progress = get.plan, get.progress
        left = {frame.chunk: frame.length for frame in plan.frames}

        def deliver(frame: FrameSpan, data: Buffer) -> None:
            """Hand a chunk to the Trio thread."""
            self._arrived.append((left, frame.chunk, data))
            if self._is_told or not (get.is_urgent or clock.current_time() - self._taken_s >= GATHER_S):
                return
            self._is_told = True
            try:
                token.run_sync_soon(self._take_arrived)
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
            self._take_arrived()
            self._gets.discard(get)
            if not len(self._gets):
                self._stats.release_gaps.pause()
            missing = [flight for flight in flights if flight.chunk in left]
            self._accountant.give(sum(left.values()) + plan.transit_bytes)
            left.clear()  # an abandoned thread may still deliver: nothing is accounted for it any more
            if get.demand:
                self._accountant.end_demand()
            self._note_get(get, failure)
        if failure is not None:
            self._failed(missing, failure)
        else:  # or stopped, since other GETs had brought all of it
            self._ahead_failures = 0
        self.kick()

    def _take_arrived(self) -> None:
        """Take the verified chunks that are here."""
        self._is_told = False
        if not self._arrived:
            return
        self._taken_s = now_s = trio.current_time()
        while self._arrived:
            left, chunk, data = self._arrived.popleft()
            if left.pop(chunk, None) is not None:  # else its fetch was abandoned
                self._take_chunk(chunk, data, now_s)
        total_bytes = self._stats.origin_bytes + self._gets.arrived_bytes
        self.limit.received(total_bytes, now_s, is_full=self._limit_binds)
        if self._limit_binds and self._has_link(self._background_size()):  # less is outstanding now
            self.kick()

    def _take_chunk(self, chunk: int, data: Buffer, now_s: float) -> None:
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
        self._stats.release_gaps.released(now_s)
        if self._recorder is not None:
            self._recorder.released(now_s, len(data))

    def _note_get(self, get: Get, failure: StoreError | None) -> None:
        plan, progress = get.plan, get.progress
        self._stats.origin_bytes += progress.origin_bytes
        self._stats.origin_requests += progress.requests
        uncharged = progress.origin_bytes - (plan.end - plan.start)  # less than 0 where it was cut off
        self.rate.charge(uncharged, trio.current_time(), is_urgent=get.is_urgent)
        if progress.first_byte_s:
            self.limit.first_byte(progress.first_byte_s)
        if self._recorder is not None:
            self._recorder.get(
                plan.pack,
                get.want,
                None if failure is None else failure.store_kind,
                start=plan.start,
                end=plan.end,
                began_s=get.began_s,
                first_byte_s=progress.first_byte_s,
                took_s=trio.current_time() - get.began_s,
                requests=progress.requests,
                origin_bytes=progress.origin_bytes,
            )

    async def _watch(self) -> None:
        """Ask a second time for what a GET that stands still should have brought.

        And take what came right before all of them did: nothing that comes later tells of it.
        """
        while True:
            await trio.sleep(_WATCH_S)
            self._take_arrived()
            if not len(self._gets):
                await self._kicked.wait()
                continue
            slow = self._gets.standing_still(
                trio.current_time(), bytes_per_s=self.limit.bytes_per_s, round_trip_s=self.limit.round_trip_s
            )
            for get in slow:
                self._try_twice(get)
            for get in self._gets:
                if get.tried_twice and not self._missing_of(get):
                    get.progress.stop = True

    def _missing_of(self, get: Get) -> list[Flight]:
        flights = [self._flights.get(frame.chunk) for frame in get.plan.frames]
        return [flight for flight in flights if flight is not None]

    def _try_twice(self, get: Get) -> None:
        missing = self._missing_of(get)
        if not missing:
            return
        get.tried_twice = True
        log.info("asking a second time for what a slow request should have brought", chunks=len(missing))
        self._stats.second_tries += 1
        if self._recorder is not None:
            self._recorder.event(trio.current_time(), "second-try", f"{len(missing)} chunks of a GET that stands still")
        for flight in missing:
            if flight.get is get and flight.chunk not in self._queue:
                self._queue_up(flight)
        self.kick()

    # Failures

    def _failed(self, flights: list[Flight], error: StoreError) -> None:
        kind = error.store_kind
        self.last_failure = f"{kind}: {error}"
        self._stats.store_failures[kind] = self._stats.store_failures.get(kind, 0) + 1
        now_s = trio.current_time()
        self._untold_failures += 1
        if now_s - self._failures_told_s >= _TELL_S:
            log.info("fetch failed", kind=kind.value, error=str(error), failures=self._untold_failures)
            self._failures_told_s, self._untold_failures = now_s, 0
        if kind == StoreErrorKind.THROTTLED:
            self.limit.throttled(now_s)
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
        flight = self._flights.pop(chunk)
        if kind not in _PASSING:
            self._not_ahead[chunk] = 1
            return
        if flight.want == Want.HOT and not self._ahead:
            self._later(BACKOFF.delay_s(flight.trouble.attempts, random.random()), self._want_hot_again, [chunk])
            return
        self._ahead_cursor = min(self._ahead_cursor, chunk)
        # What the store asks for when it is asked too often is another pace, and that is kept anyway.
        if not self._ahead_paused and kind != StoreErrorKind.THROTTLED:
            self._ahead_paused = True
            self._later(BACKOFF.delay_s(self._ahead_failures, random.random()), self._resume_ahead, [])
            self._ahead_failures += 1

    def _want_hot_again(self, chunks: list[int]) -> None:
        for chunk in chunks:
            if not self._residency.is_here(chunk):
                self.want(chunk, Want.HOT, None)

    def _resume_ahead(self, _: list[int]) -> None:
        self._ahead_paused = False

    def _ask_again(self, chunks: list[int]) -> None:
        for chunk in chunks:
            flight = self._flights.get(chunk)
            if flight is None or flight.fetches or chunk in self._queue:
                continue
            if flight.readers:
                self._queue_up(flight)
            else:
                self._drop(chunk, StoreErrorKind.TRANSIENT)

    def _fail(self, flight: Flight, error: StreamdError) -> None:
        log.error("reads fail", chunk=flight.chunk, reads=len(flight.readers), error=str(error))
        del self._flights[flight.chunk]
        for reader in list(flight.readers):
            reader.fail(ReadFailed(str(error), kind=error.kind, exit_code=error.exit_code))

    def _later(self, delay_s: float, act: Callable[[list[int]], None], chunks: list[int]) -> None:
        assert self._nursery is not None

        async def wait() -> None:
            await trio.sleep(delay_s)
            self._timers -= 1
            act(chunks)
            self.kick()

        self._timers += 1
        self._nursery.start_soon(wait)

    # Cached chunks of a former life

    def _start_check(self, first: int, want: Want) -> bool:
        assert self._nursery is not None
        chunks = [first]
        for chunk in range(first + 1, min(first + CHECK_CHUNKS, len(self._layout))):
            if self._residency.place(chunk) != Place.CACHED or (chunk in self._flights and chunk not in self._queue):
                break
            chunks.append(chunk)
        for chunk in chunks:
            flight = self._flights.setdefault(chunk, Flight(chunk, want))
            flight.fetches += 1
            self._queue.remove(chunk)
        is_asked = want in (Want.FAULT, Want.STREAM)
        self._hot_checks += not is_asked
        self._nursery.start_soon(self._run_check, chunks, is_asked)
        return True

    async def _run_check(self, chunks: list[int], is_asked: bool) -> None:
        found: dict[int, Buffer | None] = {}
        async with self._check_limiter:  # waiting for a turn says nothing about the disk
            with trio.move_on_after(CACHE_TIMEOUT_S * len(chunks)) as scope:
                try:
                    await self._run_blocking(
                        self._check, chunks, found, abandon_on_cancel=True, limiter=trio.CapacityLimiter(1)
                    )
                except Exception as error:  # OSError, or no thread to be had: a cache never hurts
                    self._residency.lose_cache(str(error))
        if scope.cancelled_caught:
            self._residency.lose_cache(f"{len(chunks)} reads took longer than {CACHE_TIMEOUT_S} s each")
        self._hot_checks -= not is_asked
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
    for reader in list(flight.readers):  # which may go on, and want more
        reader.arrive(flight.chunk, data)
