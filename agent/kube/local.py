"""The port `Objects` on two local directories, for Trio: `directory`'s calls in a thread, and a watch that looks again.

It looks when something was written through this object, and every second besides, for what others have written: no
inotify, whose queue can overflow and which tells nothing on network file systems.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import trio

from agent.kube.directory import ObjectDirectory
from agent.kube.follower import Follower
from agent.kube.objects import Kind, PodSnapshot, R
from agent.kube.port import Change, Listing, Objects, Synced

T = TypeVar("T")

LOOK_EVERY_S = 1.0


class LocalObjects:
    """See `port.Objects` for what each method does. Calls take turns in one thread; of those that wait for it one at
    most is a write, so that however many there are, what is read comes next but one."""

    def __init__(self, directory: ObjectDirectory, *, look_every_s: float = LOOK_EVERY_S) -> None:
        self._directory = directory
        self._look_every_s = look_every_s
        self._one_at_a_time = trio.CapacityLimiter(1)
        self._one_writer = trio.CapacityLimiter(1)
        self._written = trio.Event()

    async def list(self, *kinds: Kind, namespace: str | None = None) -> Listing:
        call = partial(self._directory.list, *kinds, namespace=namespace)
        return await trio.to_thread.run_sync(call, limiter=self._one_at_a_time)

    async def get(self, kind: type[R], name: str, namespace: str = "") -> R:
        call = partial(self._directory.get, kind, name, namespace)
        return await trio.to_thread.run_sync(call, limiter=self._one_at_a_time)

    async def create(self, snapshot: PodSnapshot) -> PodSnapshot:
        return await self._write(partial(self._directory.create, snapshot))

    async def update_status(self, resource: R) -> R:
        return await self._write(partial(self._directory.update_status, resource))

    async def delete(self, snapshot: PodSnapshot) -> None:
        await self._write(partial(self._directory.delete, snapshot))

    @asynccontextmanager
    async def watch(self, *kinds: Kind) -> AsyncIterator[AsyncIterator[Change]]:
        async with aclosing(self._changes(kinds)) as changes:
            yield changes

    async def _changes(self, kinds: tuple[Kind, ...]) -> AsyncGenerator[Change, None]:
        follower = Follower(self._directory, kinds)
        is_synced = False
        while True:
            written = self._written
            changes, is_complete = await trio.to_thread.run_sync(follower.look, limiter=self._one_at_a_time)
            for change in changes:
                yield change
            if is_complete and not is_synced:
                is_synced = True
                yield Synced()
            with trio.move_on_after(self._look_every_s):
                await written.wait()

    async def _write(self, call: Callable[[], T]) -> T:
        async with self._one_writer:
            done = await trio.to_thread.run_sync(call, limiter=self._one_at_a_time)
        self._written.set()
        self._written = trio.Event()
        return done


if TYPE_CHECKING:
    _: type[Objects] = LocalObjects
