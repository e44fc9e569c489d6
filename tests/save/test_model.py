"""Pushes, gc and rm run through each other, one store call at a time.

The code under test is the real one, in threads that stop before each store call, before each look at the clock, and
while a listing's answer is under way, until the schedule lets them go on. The schedule may let a call fail, let its
answer be lost, and let time pass. An actor may stand still for days; only calls that change something end by a time-out
when they were asked for and have not taken effect, as the clients' do (`Store`: every wait has an explicit time-out).
After every step the store is looked at: what is visible must be whole. Some schedules are written down, one for each
rule of `commit` and `lifecycle`; others are found by search.
"""

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.memory_store import MemoryStore
from streamd.errors import NotFound, Refused, StoreError, StoreErrorKind
from streamd.save.commit import Commit, SnapshotWriter
from streamd.save.lifecycle import collect, remove
from streamd.snapshot.manifest import Manifest, decode, decode_tombstone
from streamd.snapshot.names import manifest_key, pack_key

ID = "snap"
MANIFEST = manifest_key(ID)
HOUR_S = 3600.0
DAY_S = 24 * HOUR_S
# Clients give up on a call after this, retries included. What TOMBSTONE_LIFE_S allows for, and more than they have.
CALL_S = 1200.0
# Below a call's limit; between the commit's window and a tombstone's life; beyond an hour; beyond the day's grace.
JUMPS_S = (200.0, 1000.0, 2 * HOUR_S, DAY_S + HOUR_S)


class Actor:
    """A thread that does `script`, stopping where the module's text says. Only one of them runs at any time."""

    def __init__(self, name: str, script: Callable[[], object]) -> None:
        self.name = name
        self.at = ("", "")  # what it is about to do: operation and key
        self.since_s = 0.0  # when it stopped there
        self.timed_out = False
        self.fail = False
        self.lose_answer = False
        self.result: Any = None
        self.done = False
        self._script = script
        self._go = threading.Semaphore(0)
        self._stopped = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()
        assert self._stopped.acquire(timeout=10)

    def step(self) -> None:
        """Let it go on to its next stop, or to its end."""
        self._go.release()
        assert self._stopped.acquire(timeout=10)

    def stop(self, operation: str, key: str, clock_s: float) -> None:
        """Called in the thread: wait until the schedule goes on."""
        self.at, self.since_s = (operation, key), clock_s
        self._stopped.release()
        assert self._go.acquire(timeout=10)

    def _run(self) -> None:
        try:
            self.result = self._script()
        except BaseException as error:
            self.result = error
        self.done = True
        self._stopped.release()


class World:
    """A store, the actors, and what must be true of them."""

    def __init__(self, grace_s: float = DAY_S) -> None:
        self.grace_s = grace_s
        self.store = MemoryStore(before=self._before, after=self._after)
        self.actors: list[Actor] = []
        self.contents: dict[str, tuple[bytes, bytes]] = {}  # by push id
        self.winners: set[str] = set()
        self._wrong = ""
        self._decoded: dict[str, Manifest | None] = {}
        self._current: Actor | None = None

    # --- what runs in the actors' threads

    def _before(self, operation: str, key: str) -> None:
        actor = self._current
        if actor is None:
            return
        actor.stop(operation, key, self.store.clock_s)
        if actor.timed_out or actor.fail:
            actor.timed_out = actor.fail = False
            raise StoreError(StoreErrorKind.TRANSIENT, key, "timed out")
        if operation == "delete" and "/packs/" in key and key in self.store.objects:
            self._check_delete(actor.name, key)

    def _after(self, operation: str, key: str) -> None:
        actor = self._current
        if actor is None:
            return
        if operation == "list":
            actor.stop("listed", key, self.store.clock_s)
        elif actor.lose_answer:
            actor.lose_answer = False
            raise StoreError(StoreErrorKind.TRANSIENT, key, "the answer got lost")

    def monotonic(self) -> float:
        if self._current is not None:
            self._current.stop("clock", "", self.store.clock_s)
        return self.store.clock_s

    def _check_delete(self, name: str, key: str) -> None:
        """Note a pack that goes too early (raising here would only be the actor's own trouble)."""
        there = self.store.objects.get(MANIFEST)
        tombstone = decode_tombstone(there[1]) if there else None
        of_removed = tombstone is not None and f"/packs/{tombstone.push_id}/" in key
        age_s = self.store.clock_s - self.store.objects[key][0].updated_s
        if name == "gc" and age_s < self.grace_s and not of_removed:
            self._wrong = f"{name} deletes {key}, which is younger than the grace"
        if name.startswith("push") and f"/packs/{name.removeprefix('push ')}/" not in key:
            self._wrong = f"{name} deletes {key}, another's pack"
        if name != "rm now" and of_removed and age_s < HOUR_S:
            self._wrong = f"{name} deletes {key}, which was removed less than an hour ago"

    # --- the schedule

    def start(self, name: str, script: Callable[[], object]) -> Actor:
        actor = Actor(name, script)
        self.actors.append(actor)
        self._current = actor
        actor.start()
        self._current = None
        return actor

    def step(self, actor: Actor) -> None:
        self._current = actor
        actor.step()
        self._current = None
        self.check()

    def until(self, actor: Actor, operation: str, key: str, *, times: int = 1) -> None:
        """Let an actor go on until it is about to do that, for the nth time from here on."""
        if actor.at == (operation, key):
            times -= 1
        while times or actor.at != (operation, key):
            self.step(actor)
            assert not actor.done, f"{actor.name} ended with {actor.result!r}"
            times -= actor.at == (operation, key)

    def end(self, actor: Actor) -> Any:
        """Let an actor go on to its end."""
        while not actor.done:
            self.step(actor)
        return actor.result

    def jump(self, seconds: float) -> None:
        """Let time pass; calls that change something time out."""
        self.store.clock_s += seconds
        for actor in self.actors:
            changes = actor.at[0] == "delete" or (actor.at[0] == "put" and actor.name.startswith("push"))
            if not actor.done and changes and self.store.clock_s - actor.since_s > CALL_S:
                actor.timed_out = True

    # --- what must be true

    def live(self) -> Manifest | None:
        there = self.store.objects.get(MANIFEST)
        if there is None:
            return None
        generation = there[0].generation
        if generation not in self._decoded:
            self._decoded[generation] = None if decode_tombstone(there[1]) else decode(there[1])
        return self._decoded[generation]

    def packs(self) -> set[str]:
        return {key for key in self.store.objects if "/packs/" in key}

    def check(self) -> None:
        assert not self._wrong, self._wrong
        manifest = self.live()
        if manifest is not None:
            self.winners.add(manifest.push_id)
            for index, pack in enumerate(self.contents[manifest.push_id]):
                key = pack_key(ID, manifest.push_id, index)
                assert key in self.store.objects, f"{key} is missing under a visible manifest"
                assert self.store.objects[key][1] == pack
        if not any(actor.name.startswith("rm") for actor in self.actors):
            assert len(self.winners) <= 1, "two pushes won"
            assert manifest is not None or not self.winners, "a snapshot vanished that nobody removed"

    def check_end(self) -> None:
        """Let everyone finish; then gc brings the store to a state where nothing is left that is to go."""
        for actor in self.actors:
            self.end(actor)
        visible = self.live()
        for _ in range(4):
            self.jump(DAY_S + HOUR_S)
            collect(self.store, grace_s=self.grace_s, monotonic=self.monotonic, threads=1)
            self.check()
        if visible is None:
            assert not self.store.objects
        else:
            assert self.live() is visible, "gc removed a snapshot"
            assert set(self.store.objects) == {MANIFEST, *packs_of(visible.push_id)}


def packs_of(push_id: str) -> set[str]:
    return {pack_key(ID, push_id, index) for index in range(2)}


SmallMaker = Callable[[str, str], Any]  # conftest's `small`


def push(world: World, small: SmallMaker, push_id: str, *, runs: int = 2) -> Actor:
    """Start a push that is run again, to resume, when the store fails it."""
    snapshot = small(ID, push_id)
    world.contents[push_id] = snapshot.packs
    serial = len(world.actors)

    def script() -> object:
        for run in itertools.count(1):
            try:
                writer = SnapshotWriter(world.store, snapshot_id=ID, push_id=push_id, monotonic=world.monotonic)
                writer.begin()
                packs = tuple(writer.put_pack(index, data)[0] for index, data in enumerate(snapshot.packs))
                return writer.commit(snapshot.manifest(packs, created_s=float(10 * serial + run)))
            except StoreError:
                if run == runs:
                    return None
            except Refused as error:
                return error
        return None

    return world.start(f"push {push_id}", script)


def gc(world: World, *, passes: int = 3) -> Actor:
    """Start some passes of gc, one after the other."""

    def script() -> None:
        for _ in range(passes):
            with contextlib.suppress(StoreError):
                collect(world.store, grace_s=world.grace_s, monotonic=world.monotonic, threads=1)

    return world.start("gc", script)


def rm(world: World, *, now: bool = False) -> Actor:
    """Start a removal."""

    def script() -> object:
        try:
            return remove(world.store, ID, now=now, monotonic=world.monotonic, threads=1)
        except (NotFound, Refused, StoreError) as error:
            return error

    return world.start("rm now" if now else "rm", script)


# --- schedules that are written down: each breaks something when one line of the rules is taken away


def test_a_push_that_stood_still_while_its_packs_were_collected_is_refused(small: SmallMaker) -> None:
    world = World()
    pushing = push(world, small, "a")
    world.until(pushing, "list", f"{ID}/packs/a/", times=2)
    for _ in range(2):  # claimed; a day later the tombstone goes, too
        world.jump(DAY_S)
        world.end(gc(world))
    assert not world.store.objects
    assert "gone from the store" in str(world.end(pushing))
    world.check_end()


def test_a_push_that_stood_still_after_it_listed_its_packs_lists_them_again(small: SmallMaker) -> None:
    world = World()
    pushing = push(world, small, "a")
    world.until(pushing, "listed", f"{ID}/packs/a/", times=2)
    for _ in range(2):
        world.jump(DAY_S)
        world.end(gc(world))
    assert "gone from the store" in str(world.end(pushing))
    world.check_end()


def test_a_tombstone_outlives_a_commit_that_is_under_way_whatever_the_grace(small: SmallMaker) -> None:
    world = World(grace_s=0)
    pushing = push(world, small, "a")
    world.until(pushing, "put", MANIFEST)
    world.end(gc(world))
    assert not world.packs()
    assert "being collected" in str(world.end(pushing))
    world.check_end()


def test_an_old_tombstone_is_renewed_before_packs_are_deleted_under_it(small: SmallMaker) -> None:
    world = World()
    pushing = push(world, small, "a")
    world.until(pushing, "list", f"{ID}/packs/a/", times=2)
    world.jump(DAY_S)
    dying = gc(world, passes=1)
    world.until(dying, "delete", pack_key(ID, "a", 0))  # it has claimed the id; its deletes time out
    world.jump(DAY_S)
    world.end(dying)
    assert world.packs() == packs_of("a")
    world.until(pushing, "put", MANIFEST)
    world.end(gc(world))
    assert not world.packs()
    assert "being collected" in str(world.end(pushing))
    world.check_end()


def test_gc_that_stood_still_looks_again_before_it_deletes(small: SmallMaker) -> None:
    world = World()
    pushing = push(world, small, "a")
    world.until(pushing, "list", f"{ID}/packs/a/", times=2)
    world.jump(DAY_S)
    slow = gc(world, passes=1)
    world.until(slow, "put", MANIFEST)
    world.until(slow, "clock", "")
    world.jump(DAY_S)
    world.until(pushing, "put", MANIFEST)
    world.end(slow)
    world.end(gc(world))
    assert "being collected" in str(world.end(pushing))
    world.check_end()


def test_gc_does_not_claim_an_id_that_was_committed_a_moment_ago(small: SmallMaker) -> None:
    world = World()
    pushing = push(world, small, "a")
    world.until(pushing, "list", f"{ID}/packs/a/", times=2)
    world.jump(DAY_S)
    claiming = gc(world)
    world.until(claiming, "put", MANIFEST)
    assert world.end(pushing) is Commit.WRITTEN
    world.end(claiming)
    world.check_end()


def test_the_packs_of_a_removed_snapshot_stay_an_hour_even_if_their_push_runs_twice(small: SmallMaker) -> None:
    world = World()
    first, second = push(world, small, "a"), push(world, small, "a")
    world.until(first, "put", MANIFEST)
    world.until(second, "put", MANIFEST)
    assert world.end(first) is Commit.WRITTEN
    world.end(rm(world))
    assert "being removed" in str(world.end(second))
    assert world.packs() == packs_of("a")
    world.end(gc(world))
    assert world.packs() == packs_of("a")
    world.jump(HOUR_S)
    world.end(gc(world))
    assert not world.packs()
    world.check_end()


def test_a_push_that_runs_twice_at_once_succeeds_twice(small: SmallMaker) -> None:
    world = World()
    first, second = push(world, small, "a"), push(world, small, "a")
    world.until(first, "put", MANIFEST)
    world.until(second, "put", MANIFEST)
    assert world.end(first) is Commit.WRITTEN
    assert world.end(second) is Commit.WAS_THERE
    world.check_end()


def test_a_commit_whose_answer_got_lost_is_found_when_the_push_runs_again(small: SmallMaker) -> None:
    world = World()
    pushing = push(world, small, "a")
    world.until(pushing, "put", MANIFEST)
    pushing.lose_answer = True
    assert world.end(pushing) is Commit.WAS_THERE
    world.check_end()


def test_rm_does_not_touch_a_snapshot_that_was_pushed_under_the_id_meanwhile(small: SmallMaker) -> None:
    world = World()
    world.end(push(world, small, "a"))
    slow = rm(world)
    world.until(slow, "put", MANIFEST)
    world.end(rm(world, now=True))
    world.jump(DAY_S)
    world.end(gc(world))
    assert world.end(push(world, small, "b")) is Commit.WRITTEN
    assert "try again" in str(world.end(slow))
    assert world.live()
    world.check_end()


def test_rm_now_that_stood_still_leaves_the_packs_to_gc(small: SmallMaker) -> None:
    world = World()
    world.end(push(world, small, "a"))
    slow = rm(world, now=True)
    world.until(slow, "clock", "", times=2)
    world.jump(DAY_S)
    world.end(slow)
    assert world.packs() == packs_of("a")
    world.check_end()


def orders(counts: list[int]) -> Iterator[list[int]]:
    """Give every order in which actors can make that many steps each."""
    if not any(counts):
        yield []
    for index, count in enumerate(counts):
        if count:
            counts[index] -= 1
            for rest in orders(counts):
                yield [index, *rest]
            counts[index] += 1


def test_of_two_pushes_one_wins_in_every_order_and_the_other_is_told(small: SmallMaker) -> None:
    for order in orders([5, 5]):
        world = World()
        pushes = push(world, small, "a"), push(world, small, "b")
        for pushing in pushes:  # up to the last pack neither sees anything of the other
            world.until(pushing, "put", pack_key(ID, pushing.name[-1], 1))
        for index in order:
            if not pushes[index].done:
                world.step(pushes[index])
        results = [world.end(pushing) for pushing in pushes]
        assert sum(result is Commit.WRITTEN for result in results) == 1
        assert sum(isinstance(result, Refused) and "it exists" in str(result) for result in results) == 1
        assert world.packs() == packs_of(*world.winners)


# --- schedules that are searched for

CASTS = {
    "push × push": ("a", "b"),
    "push × gc × gc": ("a", "gc", "gc"),
    "push × push × gc × rm": ("a", "b", "gc", "rm"),
    "push × the same push × gc × rm": ("a", "a", "gc", "rm"),
    "push × push × gc × rm now": ("a", "b", "gc", "rm now"),
    "push × gc × gc × rm": ("a", "gc", "gc", "rm"),
}


@pytest.mark.parametrize("grace_s", [DAY_S, 0.0], ids=["grace 24 h", "grace 0"])
@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
def test_in_any_order_what_is_visible_is_whole_and_leftovers_go(
    cast: tuple[str, ...], grace_s: float, small: SmallMaker
) -> None:
    # A schedule is a row of turns: who, how many steps, and what happens then. Long turns and few changes find more
    # than steps drawn one by one.
    turn = st.tuples(st.integers(0, 3), st.integers(1, 16), st.integers(0, 9))

    @settings(max_examples=120, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.lists(turn, max_size=14))
    def run(turns: list[tuple[int, int, int]]) -> None:
        world = World(grace_s)
        for role in cast:
            match role:
                case "gc":
                    gc(world)
                case "rm" | "rm now":
                    rm(world, now=role == "rm now")
                case push_id:
                    push(world, small, push_id)
        for who, steps, then in turns:
            actor = world.actors[who % len(world.actors)]
            for _ in range(steps):
                if not actor.done:
                    world.step(actor)
            if then < len(JUMPS_S):
                world.jump(JUMPS_S[then])
            elif then == 8:
                actor.fail = True
            elif then == 9:
                actor.lose_answer = True
        for actor in world.actors:
            actor.fail = actor.lose_answer = False
        world.check_end()

    run()
