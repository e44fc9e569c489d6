"""Collects what pushes and removals have left in the stores of the storage configs: above all the bytes of deleted
snapshots, which retention only marks (`streamd gc` does the same by hand).

Each node looks now and then, at moments of its own, whether a store is due; of all nodes that find it so one makes the
pass (`streamd.save.turn`). A pass heeds the leases of nodes that read, and what is younger than a day. Stores are asked
in nobody's name: as the node, or as `[[credentials]]` without a namespace say.
"""

import random
from collections.abc import Callable

import trio

from agent.errors import AgentError
from agent.node.events import Events, What
from agent.node.images import Images
from agent.node.known_objects import KnownObjects
from streamd.errors import StreamdError

# A store is overdue by this share of the time after which it is due, at most; a look is two small requests.
_OVERDUE = 0.25


class Collecting:
    """One for a node. `problems`: why the last try for a store has failed, by its address."""

    def __init__(
        self,
        images: Images,
        known: KnownObjects,
        events: Events,
        *,
        every_s: float | None,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._images = images
        self._known = known
        self._events = events
        self._every_s = every_s
        self._draw = draw
        self.problems: dict[str, str] = {}

    async def run(self) -> None:
        """Collect what is due, until cancelled; nothing where nodes don't."""
        every_s = self._every_s
        if every_s is None:
            await trio.sleep_forever()
        await self._known.synced()
        while True:
            await trio.sleep(self._draw() * _OVERDUE * every_s)
            await self.look(every_s)

    async def look(self, every_s: float) -> None:
        """Collect each store that is due."""
        stores = sorted({config.location.store_url for config in self._known.configs.values()})
        self.problems = {url: why for url, why in self.problems.items() if url in stores}
        for store_url in stores:
            try:
                done = await self._images.collect(store_url, every_s=every_s)
            except (AgentError, StreamdError, OSError) as error:
                self.problems[store_url] = str(error)
                self._events.tell(What.PROBLEM, "collection", f"{store_url}: {error}")
                continue
            self.problems.pop(store_url, None)
            if done is not None:
                said = f"{store_url}: {done.objects_deleted} objects deleted, {done.bytes_deleted} bytes"
                self._events.tell(What.COLLECTED, "done", said)
