"""What happens on the node, as a bounded log that any number of clients can follow.

The log is a ring. Who follows it has a place in it, and no queue: publishing costs the same whoever listens, waits for
nobody, and a reader that the ring has overtaken is told so and dropped. An event's id is `EPOCH-NUMBER`; the epoch is
this process's, so that an id of a former life is known for what it is: then everything kept is sent again, behind an
event `lost`. All of it belongs to the Trio thread; `publish` is one synchronous step.
"""

import re
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import trio

from streamd.daemon.api.models import Event

# An hour of a busy node; a client that was away for longer reads the state anew.
KEPT = 1024
LOST = "lost"
_BATCH = 64
_FACT_CHARS_MAX = 1000
_KIND = re.compile(r"[a-z][a-z0-9-]{0,39}")
_ID = re.compile(r"([0-9a-f]{8})-(\d{1,18})")

Fact = str | int | float | bool | None


class FellBehind(Exception):
    """The ring has overtaken a reader: events that it hasn't had are gone."""


class EventLog:
    """The ring; `kept` events of it at most."""

    def __init__(self, *, kept: int = KEPT, epoch: str | None = None, now_s: Callable[[], float] = time.time) -> None:
        self._epoch = epoch or secrets.token_hex(4)
        self._now_s = now_s
        self._ring: deque[Event] = deque(maxlen=kept)
        self._published = 0
        self._change = trio.Event()

    @property
    def published(self) -> int:
        """How many there were."""
        return self._published

    def publish(self, kind: str, *, image: str | None = None, **facts: Fact) -> None:
        """Note an event. Long facts are cut. Never waits."""
        if not _KIND.fullmatch(kind):
            raise ValueError(f"{kind!r} is not the name of a kind of event")
        short = {name: fact[:_FACT_CHARS_MAX] if isinstance(fact, str) else fact for name, fact in facts.items()}
        self._published += 1
        self._ring.append(
            Event(id=self.id_of(self._published), kind=kind, at_s=round(self._now_s(), 3), image=image, facts=short)
        )
        self._change.set()
        self._change = trio.Event()

    def id_of(self, number: int) -> str:
        """Give the id of the event with that number; the first one's is 1."""
        return f"{self._epoch}-{number}"

    async def changed(self) -> None:
        """Wait for the next event. What was looked at before, without an await in between, can't change unseen."""
        await self._change.wait()

    def follow(self, last_id: str | None = None) -> "Follower":
        """Begin behind the event with that id, or at what happens next."""
        if last_id is None:
            return Follower(self, self._published)
        found = _ID.fullmatch(last_id)
        oldest = self._published - len(self._ring)
        if found and found[1] == self._epoch and oldest <= int(found[2]) <= self._published:
            return Follower(self, int(found[2]))
        follower = Follower(self, oldest)
        follower.lost = Event(id=self.id_of(oldest), kind=LOST, at_s=round(self._now_s(), 3))
        return follower

    def since(self, number: int) -> Sequence[Event]:
        """Give some of the events behind that one, oldest first. Raises: `FellBehind`."""
        skip = number - (self._published - len(self._ring))
        if skip < 0:
            raise FellBehind
        return [self._ring[place] for place in range(skip, min(skip + _BATCH, len(self._ring)))]


@dataclass(slots=True)
class Follower:
    """One reader's place in the log: it has had `number` events. `lost` is to be sent first, if anything."""

    log: EventLog
    number: int
    lost: Event | None = None

    @property
    def last_id(self) -> str:
        """The id to come back with."""
        return self.log.id_of(self.number)

    async def next(self) -> Sequence[Event]:
        """Wait for events, and give some, oldest first. Raises: `FellBehind`."""
        if self.lost is not None:
            lost, self.lost = self.lost, None
            return [lost]
        while not (events := self.log.since(self.number)):
            await self.log.changed()
        self.number += len(events)
        return events


def server_sent(event: Event) -> bytes:
    """Write an event as an event stream has it (WHATWG HTML, "Server-sent events"); JSON has no raw line break."""
    return b"id: %s\nevent: %s\ndata: %s\n\n" % (event.id.encode(), event.kind.encode(), msgspec.json.encode(event))
