"""Sandboxes that come and go on a node whose daemon is having a bad day: each life is a restore that must come true.

A life: the image is asked for and held by a lease, a real runsc restores from it in the background, the server in it
answers while it loads, and once all is loaded its whole memory is compared. What is asked of the daemon is asked again
while there is none. What a life must see is the right bytes; that it has to wait is not held against anybody.
"""

import contextlib
import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from agent.runtime.loading import find_completed
from bench.daemons import Daemon
from bench.pods import Image, RunningPod, restored, runsc_below
from bench.workload import touch_crc
from streamd.daemon.client import Lease, NoAnswer, NoDaemon
from streamd.daemon.relay import RelayedError
from streamd.errors import StreamdError

# An image, a load: ten times what they take when all goes wrong at once. It tells a hang.
LIMIT_S = 240.0
_LOOK_S = 0.1
# What the daemon says of an image that was forgotten with its supervisor, or that has just been released.
_NOT_NOW = ("not-found", "refused", "ended")
_PREFETCHES = ("none", "hot", "all", "all")

_T = TypeVar("_T")


class Lost(AssertionError):
    """What must not happen: an image that failed, or memory that isn't what it was."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A snapshot in the store, and what it was made of."""

    url: str
    image: Image


class Tally:
    """What all lives together came to, and which snapshots they use now."""

    def __init__(self) -> None:
        self.restored = self.deleted_while_loading = 0
        self.longest_s = 0.0
        self._users: Counter[str] = Counter()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def using(self, url: str) -> Iterator[None]:
        """Note that somebody uses a snapshot."""
        with self._lock:
            self._users[url] += 1
        try:
            yield
        finally:
            with self._lock:
                self._users[url] -= 1

    @contextlib.contextmanager
    def unused(self, url: str) -> Iterator[bool]:
        """Whether nobody uses it; as long as this is entered nobody begins to."""
        with self._lock:
            yield not self._users[url]

    def note(self, *, loaded: bool, took_s: float) -> None:
        """Count one life."""
        with self._lock:
            self.restored += loaded
            self.deleted_while_loading += not loaded
            self.longest_s = max(self.longest_s, took_s)


def patiently(call: Callable[[], _T], *, limit_s: float = LIMIT_S) -> _T:
    """Ask the daemon again until it is there and answers. Raises: `TimeoutError`."""
    until_s = time.monotonic() + limit_s
    while True:
        try:
            return call()
        except (NoDaemon, NoAnswer) as error:
            if time.monotonic() > until_s:
                raise TimeoutError(f"no daemon answers within {limit_s:g} s") from error
            time.sleep(_LOOK_S)


@contextlib.contextmanager
def held(daemon: Daemon, url: str, *, owner: str, prefetch: str) -> Iterator[tuple[str, Path]]:
    """Have an image served, and hold it; gives its id and mountpoint. Raises: `Lost` when it fails."""
    image_id, mountpoint, lease = _taken(daemon, url, owner=owner, prefetch=prefetch)
    over = threading.Event()
    holder = threading.Thread(target=_hold, args=(daemon, image_id, owner, lease, over), name=f"lease {owner}")
    holder.start()
    try:
        yield image_id, mountpoint
    finally:
        over.set()
        holder.join()


def _taken(daemon: Daemon, url: str, *, owner: str, prefetch: str) -> tuple[str, Path, Lease]:
    until_s = time.monotonic() + LIMIT_S
    while time.monotonic() < until_s:
        try:
            image_id = str(daemon.client.request_image(url, prefetch=prefetch)["id"])
            state = daemon.client.image(image_id, wait_s=5.0)
            if state["state"] == "failed":
                raise Lost(f"image {image_id} of {url} failed: {state['last_error']}")
            if state["state"] in ("serving", "warm"):
                lease = daemon.client.take_lease(image_id, owner=owner, purpose="restore")
                return image_id, Path(str(state["mountpoint"])), lease
        except (NoDaemon, NoAnswer):
            pass
        except RelayedError as error:
            if error.kind not in _NOT_NOW:
                raise
        time.sleep(_LOOK_S)
    raise TimeoutError(f"{url} is not served within {LIMIT_S:g} s")


def _hold(daemon: Daemon, image_id: str, owner: str, lease: Lease, over: threading.Event) -> None:
    """Take the lease again whenever it has ended with its supervisor."""
    while not over.wait(_LOOK_S):
        if not lease.is_held():
            lease.close()
            with contextlib.suppress(StreamdError):
                lease = daemon.client.take_lease(image_id, owner=owner, purpose="restore")
    lease.close()


class Lives:
    """One sandbox after another, from one of the snapshots each, until it is told to stop."""

    def __init__(self, daemon: Daemon, saved: list[Saved], directory: Path, tally: Tally, *, seed: str) -> None:
        self._daemon = daemon
        self._saved = saved
        self._directory = directory
        self._tally = tally
        self._dice = random.Random(seed)
        self._name = directory.name
        self.stage = ""

    def run(self, over: threading.Event) -> None:
        """Live. Raises: `Lost`, `AssertionError`, and whatever runsc says when a sandbox died."""
        number = 0
        while not over.is_set():
            number += 1
            began_s = time.monotonic()
            loaded = self._life(self._directory / str(number), f"{self._name}.{number}")
            self._tally.note(loaded=loaded, took_s=time.monotonic() - began_s)
        self.stage = "over"

    def _life(self, directory: Path, name: str) -> bool:
        """Live once; whether it was loaded to the end."""
        saved, dice = self._dice.choice(self._saved), self._dice
        runsc = runsc_below(directory)
        try:
            self.stage = f"{name} asks for {saved.url}"
            prefetch = dice.choice(_PREFETCHES)
            with (
                self._tally.using(saved.url),
                held(self._daemon, saved.url, owner=name, prefetch=prefetch) as (image_id, mountpoint),
            ):
                self.stage = f"{name} restores from {mountpoint}"
                with restored(runsc, directory, saved.image.shape, mountpoint) as pod:
                    self.stage = f"{name} loads from {mountpoint}"
                    _touch(pod, saved.image, dice)
                    if dice.random() < 0.15:  # a pod may be deleted at any time
                        self.stage = f"{name} is deleted while it loads from {mountpoint}"
                        return False
                    runsc.wait_restore(pod.first, timeout_s=LIMIT_S)
                    self.stage = f"{name} has loaded"
                    if (hashes := tuple(pod.ask_all("hash"))) != saved.image.memory_hashes:
                        raise Lost(f"{name}: its memory is {hashes}, not {saved.image.memory_hashes}")
                    loading = find_completed(runsc.debug_log(pod.first))
                    if loading is None or loading.loaded_bytes != (saved.image.directory / "pages.img").stat().st_size:
                        raise Lost(f"{name}: runsc says that it loaded {loading}")
            if dice.random() < 0.3:
                self._release(saved.url, image_id)
            return True
        finally:
            runsc.remove_root()
            shutil.rmtree(directory)

    def _release(self, url: str, image_id: str) -> None:
        """Let the image go, if nobody else wants it: whose lease ended with its supervisor could lose it."""
        with self._tally.unused(url) as is_unused:
            if is_unused:
                with contextlib.suppress(RelayedError):  # it is gone, or its files aren't closed yet
                    patiently(lambda: self._daemon.client.release(image_id))


def _touch(pod: RunningPod, image: Image, dice: random.Random) -> None:
    """Have the servers look at memory that may not be here yet."""
    for key in dice.sample(range(1000), dice.randint(1, 6)):
        for server, heap in zip(pod.servers, image.shape.heaps, strict=True):
            server.send(f"touch {key}")
            answer = server.receive(timeout_s=LIMIT_S)
            if answer != f"touched {touch_crc(heap.seed, heap.blocks, key)}":
                raise Lost(f"{answer} is not what it was")
