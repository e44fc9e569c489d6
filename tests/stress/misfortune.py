"""What happens to a node in an hour of chaos, move by move, as dice say: processes, store, images beside, the cache.

Each move stays within what the policy puts up with, so that none of them may cost a sandbox.
"""

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from bench.daemons import Daemon, ServedImage
from bench.emulator import Emulator
from bench.fault_proxy import Action, Cut, Delay, Extra, FaultProxy, Flip, Hang, Rule, Status
from bench.images import make_image
from streamd.daemon.client import NoAnswer, NoDaemon
from streamd.daemon.relay import RelayedError
from streamd.save.push import push
from streamd.store.gcs import GoogleStore
from streamd.store.shaped import Link
from tests.stress.process_facts import Facts
from tests.stress.sandbox_lives import LIMIT_S, held, patiently

MIB = 1 << 20
MEMORY_BYTES = 64 * MIB
CHURNS = 2
BYTES_PER_S = 25e6
_SLOW_BYTES_PER_S = 2e6
_CHURN_MIB = 4
_CHURN_GENERATIONS = 20
# Half of what the daemon puts up with, for each image (`images.DEATHS_MAX` in `DEATHS_WITHIN_S`).
_DEATHS_MAX, _DEATHS_WITHIN_S = 10, 30.0
# A silent connection is given up after 10 s.
_HANG_MAX_S = 12.0
# A refusal of the store is held for 60 s.
_REFUSAL_MAX_S = 3.0
# Not the first: it has the small files, and the preparation of an image is given up after 60 s, too.
_NOT_FIRST_PACK = "*/packs/*[1-9]"
# What a supervisor may have. Descriptors: some dozens of its own, nine an image, one a client. Threads: for unmounts.
_SUPERVISOR = (120, 30, 90 * MIB)
# As in `test_chaos.py`.
_WORKER = (150, 110, 160 * MIB + MEMORY_BYTES)
_LOOK_S = 2.0


class Churn:
    """Images beside those of the sandboxes: asked for, read in part, and released; each of a snapshot of its own."""

    def __init__(self, daemon: Daemon, emulator: Emulator, directory: Path) -> None:
        self._daemon = daemon
        self._emulator = emulator
        self._directory = directory
        self._places: dict[str, tuple[str, Path]] = {}

    def _place(self, number: int, generation: int) -> tuple[str, Path]:
        """Push a snapshot, unless it is there, and give its address and the right bytes of its pages.img."""
        name = f"churn-{number}-{generation % _CHURN_GENERATIONS}"
        if name not in self._places:
            image = self._directory / name
            make_image(image, _CHURN_MIB * MIB, seed=1000 + len(self._places), zero=0.1)
            store = GoogleStore(self._emulator.bucket, "chaos", emulator_host=self._emulator.address)
            with contextlib.closing(store):
                push(image, store, snapshot_id=name, push_id="p")
                self._places[name] = f"{store.url}/{name}", image / "pages.img"
        return self._places[name]

    def run(self, number: int, generation: int, *, force: bool, hold_s: float) -> None:
        """Ask, read and release; with `force` after a while: who reads gets the right bytes, or that it is gone."""
        url, pages = self._place(number, generation)
        daemon = self._daemon
        with held(daemon, url, owner=f"churn {number}", prefetch="hot") as (image_id, mountpoint):
            image = ServedImage(daemon, image_id)
            image.mountpoint = mountpoint
            reader = image.reader(pages, slots=16)
            patiently(lambda: image.until_open(reader))
            if force:
                time.sleep(hold_s)
                self._release(image_id, force=True)
            outcome = reader.outcome(LIMIT_S)
        assert outcome.wrong == outcome.short == [], f"{url}: {outcome}"
        if not force:
            assert outcome.is_clean, f"{url}: {outcome}"
            assert outcome.right_bytes == pages.stat().st_size
            self._release(image_id, force=False)

    def _release(self, image_id: str, *, force: bool) -> None:
        with contextlib.suppress(RelayedError):  # in use still, or gone
            patiently(lambda: self._daemon.client.release(image_id, force=force))


class Schedule:
    """What happens when; its moves follow from the dice, and what was begun is undone when its time is up."""

    def __init__(
        self, dice: random.Random, daemon: Daemon, proxy: FaultProxy, churn: Churn, threads: ThreadPoolExecutor
    ) -> None:
        self.lines: list[str] = []
        self.working: list[Future[None]] = []
        self._dice = dice
        self._daemon = daemon
        self._proxy = proxy
        self._churn = churn
        self._threads = threads
        self._began_s = time.monotonic()
        self._undo: list[tuple[float, Callable[[], object]]] = []
        self._kills: dict[str, list[float]] = {}
        self._generation = 0
        self._flipped_s = 0.0
        self._counts: dict[str, int] = {}
        self._moves: dict[Callable[[], object], int] = {
            self._kill_worker: 8,
            self._kill_worker_twice: 2,
            self._kill_all_workers: 1,
            self._stop_worker: 2,
            self._kill_spawner: 1,
            self._kill_spawner_and_worker: 1,
            self._stop_spawner: 1,
            self._stop_supervisor: 1,
            self._kill_supervisor: 2,
            self._restart_supervisor: 1,
            self._kill_everybody: 1,
            self._fault: 10,
            self._refuse: 2,
            self._slow_down: 2,
            self._begin_churn: 4,
            self._clear_cache: 2,
            self._verify_cache: 1,
            self._forget_pages: 1,
        }

    def run(self, duration_s: float, working: list[Future[None]]) -> None:
        """Make moves until the time is up, or somebody has failed; then let everything be well.

        In the last third no supervisor dies: what grows would be seen.
        """
        ends_s = self._began_s + duration_s
        looked_s = 0.0
        try:
            while (now_s := time.monotonic()) < ends_s and not any(
                future.done() and future.exception() for future in [*working, *self.working]
            ):
                self._undo_until(now_s)
                move = self._dice.choices(list(self._moves), list(self._moves.values()))[0]
                is_last_third = now_s > ends_s - duration_s / 3
                if not (
                    is_last_third and move in (self._kill_supervisor, self._restart_supervisor, self._kill_everybody)
                ):
                    with contextlib.suppress(NoDaemon, NoAnswer, LookupError):  # stopped, or just gone
                        move()
                if now_s - looked_s > _LOOK_S:
                    looked_s = now_s
                    self._look()
                time.sleep(self._dice.uniform(0.1, 1.5))
        finally:
            self._undo_until(float("inf"))
            self._proxy.clear()

    def counts(self) -> str:
        """Say how often what was done."""
        return ", ".join(f"{count} × {what}" for what, count in sorted(self._counts.items()))

    def _undo_until(self, now_s: float) -> None:
        for pair in [pair for pair in self._undo if pair[0] <= now_s]:
            self._undo.remove(pair)
            with contextlib.suppress(LookupError):  # another process has the number by now
                pair[1]()

    def _later(self, after_s: float, undo: Callable[[], object]) -> None:
        self._undo.append((time.monotonic() + after_s, undo))

    def _note(self, what: str, facts: object = "") -> None:
        self.lines.append(f"{time.monotonic() - self._began_s:8.2f} {what} {facts}")
        self._counts[what] = self._counts.get(what, 0) + 1

    def _look(self) -> None:
        """Compare what the daemon's processes have with what they may have."""
        Facts.of(self._daemon.pid).check(_SUPERVISOR, "the supervisor")
        with contextlib.suppress(NoDaemon, NoAnswer):
            for state in self._daemon.client.images():
                if state["worker_pid"]:
                    Facts.of(int(str(state["worker_pid"]))).check(_WORKER, f"the worker of {state['snapshot_url']}")

    # Workers

    def _targets(self, *, only_serving: bool = False) -> list[tuple[str, int]]:
        """Give image and worker of those that may lose one more."""
        now_s = time.monotonic()
        found = []
        for state in self._daemon.client.images():
            image_id, pid = str(state["id"]), state["worker_pid"]
            kills = self._kills[image_id] = [
                at_s for at_s in self._kills.get(image_id, []) if now_s - at_s < _DEATHS_WITHIN_S
            ]
            is_meant = not only_serving or state["state"] == "serving"
            if isinstance(pid, int) and is_meant and len(kills) < _DEATHS_MAX:
                found.append((image_id, pid))
        return found

    def _send(self, what: str, target: tuple[str, int], number: signal.Signals) -> None:
        image_id, pid = target
        self._kills.setdefault(image_id, []).append(time.monotonic())
        self._note(what, f"{pid} of {image_id[:8]}")
        self._daemon.send(pid, number)

    def _kill_worker(self) -> None:
        if targets := self._targets():
            self._send("kill worker", self._dice.choice(targets), signal.SIGKILL)

    def _kill_worker_twice(self) -> None:
        """The next one dies in its first moment, as soon as it is seen."""
        if targets := self._targets():
            image_id, pid = self._dice.choice(targets)
            self._send("kill worker", (image_id, pid), signal.SIGKILL)
            with contextlib.suppress(TimeoutError, RelayedError):  # it goes, or nobody is there to replace it
                after = ServedImage(self._daemon, image_id).until_replaced(pid, limit_s=2.0)
                self._send("kill its successor", (image_id, after), signal.SIGKILL)

    def _kill_all_workers(self) -> None:
        for target in self._targets():
            self._send("kill all workers", target, signal.SIGKILL)

    def _stop_worker(self) -> None:
        """It is killed, for it doesn't beat. One that prepares would be nobody's, if its supervisor died now."""
        if targets := self._targets(only_serving=True):
            self._send("stop worker", self._dice.choice(targets), signal.SIGSTOP)

    # Spawner and supervisor

    def _kill_spawner(self) -> None:
        self._note("kill spawner")
        self._daemon.send(self._daemon.spawner_pid(), signal.SIGKILL)

    def _kill_spawner_and_worker(self) -> None:
        self._kill_spawner()
        self._kill_worker()

    def _stop_spawner(self) -> None:
        """For so long, now and then, that it is replaced."""
        for_s, pid = self._dice.uniform(0.1, 12.0), self._daemon.spawner_pid()
        self._note("stop spawner", f"for {for_s:.1f} s")
        self._daemon.send(pid, signal.SIGSTOP)
        self._later(for_s, lambda: self._daemon.send(pid, signal.SIGCONT))

    def _stop_supervisor(self) -> None:
        """While it is stopped a worker dies, now and then."""
        for_s, targets = self._dice.uniform(0.1, 4.0), self._targets()
        self._note("stop supervisor", f"for {for_s:.1f} s")
        self._daemon.send(self._daemon.pid, signal.SIGSTOP)
        if targets and self._dice.random() < 0.5:
            self._send("kill worker", self._dice.choice(targets), signal.SIGKILL)
        time.sleep(for_s)
        self._daemon.send(self._daemon.pid, signal.SIGCONT)

    def _next_life(self, number: signal.Signals) -> None:
        self._daemon.stop(number)
        time.sleep(self._dice.choice([0.0, 0.0, self._dice.uniform(0.0, 2.0)]))
        self._daemon.start()

    def _kill_supervisor(self) -> None:
        self._note("kill supervisor")
        self._next_life(signal.SIGKILL)

    def _restart_supervisor(self) -> None:
        self._note("restart supervisor")
        self._next_life(signal.SIGTERM)

    def _kill_everybody(self) -> None:
        """The connections are nobody's any more but the fd store's."""
        targets = self._targets()
        self._note("kill everybody")
        self._daemon.send(self._daemon.pid, signal.SIGKILL)
        for target in targets:
            self._send("kill everybody's worker", target, signal.SIGKILL)
        self._next_life(signal.SIGKILL)

    # The store

    def _fault(self) -> None:
        rule, for_s = self._rule()
        self._note("fault", f"{rule.action} of {rule.name}, {rule.times} times, for {for_s:.1f} s")
        self._proxy.add(rule)
        self._later(for_s, lambda: self._proxy.remove(rule))

    def _rule(self) -> tuple[Rule, float]:
        dice = self._dice
        at = dice.choice([0, 1, -1, dice.randrange(1, 4 * MIB)])
        if dice.random() < 0.15:
            refusal = Status(dice.choice([401, 403, 404]))
            return Rule(refusal, _NOT_FIRST_PACK, times=None), dice.uniform(0.1, _REFUSAL_MAX_S)
        if dice.random() < 0.1 and time.monotonic() - self._flipped_s > _REFUSAL_MAX_S:
            self._flipped_s = time.monotonic()
            return Rule(Flip(max(0, at)), "*/packs/*"), _REFUSAL_MAX_S
        actions: list[Action] = [
            Status(dice.choice([500, 502, 503, 504, 429, 408])),
            Cut(at),
            Extra(dice.randint(1, 100_000)),
            Hang(max(0, at)),
            Delay(dice.uniform(0.01, 1.0), max(0, at)),
        ]
        action = dice.choice(actions)
        for_s = dice.uniform(0.1, _HANG_MAX_S if isinstance(action, Hang) else 4.0)
        return Rule(action, times=dice.choice([1, 4, 20, None]), reads_only=dice.random() < 0.7), for_s

    def _refuse(self) -> None:
        for_s = self._dice.uniform(0.1, _REFUSAL_MAX_S)
        self._note("refuse connections", f"for {for_s:.1f} s")
        self._proxy.refuse()
        self._later(for_s, self._proxy.accept)

    def _slow_down(self) -> None:
        for_s = self._dice.uniform(1.0, 5.0)
        self._note("slow link", f"for {for_s:.1f} s")
        self._proxy.link = Link(_SLOW_BYTES_PER_S)
        self._later(for_s, lambda: setattr(self._proxy, "link", Link(BYTES_PER_S)))

    # Other images, and the cache

    def _begin_churn(self) -> None:
        """Use an image beside, unless enough are in use."""
        for future in [future for future in self.working if future.done()]:
            future.result()
            self.working.remove(future)
        if len(self.working) < CHURNS:
            self._generation += 1
            force, hold_s = self._dice.random() < 0.5, self._dice.uniform(0.0, 3.0)
            number = self._generation % CHURNS
            self._note("churn", f"{number}-{self._generation}, force {force} after {hold_s:.1f} s")
            run = self._churn.run
            self.working.append(self._threads.submit(run, number, self._generation, force=force, hold_s=hold_s))

    def _cache_command(self, verb: str) -> None:
        self._note(f"cache {verb}")
        done = self._daemon.streamd("cache", verb).result()
        assert done.returncode == 0, f"cache {verb}: {done.stdout}{done.stderr}"

    def _clear_cache(self) -> None:
        self._cache_command("clear")

    def _verify_cache(self) -> None:
        self._cache_command("verify")

    def _forget_pages(self) -> None:
        """Drop what the kernel holds of the cache's files: it is read from the disk then."""
        self._note("drop the page cache of the cache")
        for path in self._daemon.cache_directory.rglob("files/*.img"):
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
