"""What a daemon says while a test does something to it: its events, recorded, to wait for and to look at."""

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

from bench.mounts import LIMIT_S
from streamd.daemon.client import DaemonClient
from streamd.errors import StreamdError

_POLL_S = 0.01
# Before all events of any daemon: an id of a life that never was.
_BEGINNING = "00000000-0"

Event = dict[str, Any]


def until(condition: Callable[[], object], what: str, *, limit_s: float = LIMIT_S) -> None:
    """Ask until it is so. Raises: `TimeoutError` after `limit_s`, which is far longer than it takes."""
    until_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > until_s:
            raise TimeoutError(f"not within {limit_s:g} s: {what}")
        time.sleep(_POLL_S)


class Tape:
    """What the daemons of a run directory have published, in order, as a follower of the event stream hears it."""

    def __init__(self, client: DaemonClient) -> None:
        self._client = client
        self._events: list[Event] = []
        self._threads: list[threading.Thread] = []

    def follow(self) -> None:
        """Record what the daemon that answers now has said and says, until it ends."""
        thread = threading.Thread(target=self._record, daemon=True, name="event-tape")
        self._threads.append(thread)
        thread.start()

    def _record(self) -> None:
        with contextlib.suppress(StreamdError):  # the daemon was killed; that is the point
            for event in self._client.events(last_id=_BEGINNING):
                if event["kind"] != "lost":
                    self._events.append(event)

    def all(self) -> list[Event]:
        """Give all events so far."""
        return list(self._events)

    def of(self, kind: str, *, image: str | None = None) -> list[Event]:
        """Give the events of a kind so far, of one image or of all."""
        return [event for event in self._events if event["kind"] == kind and image in (None, event.get("image"))]

    def until(self, kind: str, *, image: str | None = None, count: int = 1, limit_s: float = LIMIT_S) -> list[Event]:
        """Wait until there are so many, and give them. Raises: `TimeoutError`."""

        def heard() -> bool:
            return len(self.of(kind, image=image)) >= count

        until(heard, f"{count} × {kind}", limit_s=limit_s)
        return self.of(kind, image=image)

    def join(self) -> None:
        """Wait for the end of what records; the daemons have ended."""
        for thread in self._threads:
            thread.join(LIMIT_S)
