"""Snapshots that this node leaves alone for a while, since their data was found damaged or missing: matching passes
over them, so that older ones of their group are tried.

In memory only: a new life asks once more. What may be back in a moment (streamd, a store that is away, an image that is
late) is no reason to rest: older snapshots would fare no better, and pods would start cold long after it is back.
"""

import time
from collections.abc import Callable, Mapping

from agent.node.images import ImageUnavailable
from agent.node.restore_records import REST_S
from streamd.daemon.client import NoDaemon
from streamd.errors import Exit, StreamdError

_OF_THE_SNAPSHOT = (Exit.DAMAGED, Exit.NOT_FOUND)


def is_of_the_snapshot(error: Exception) -> bool:
    """Say whether what kept an image from being served is the snapshot's own: it is damaged, or isn't there."""
    match error:
        case NoDaemon():
            return False
        case StreamdError():
            return error.exit_code in _OF_THE_SNAPSHOT
        case ImageUnavailable():
            return error.ends_with in _OF_THE_SNAPSHOT
        case _:
            return False


class Resting:
    """One for a node; of its one thread."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rest: dict[tuple[str, str], tuple[float, str]] = {}  # namespace and name → until when, why

    def put(self, namespace: str, name: str, why: str) -> None:
        """Let a snapshot rest."""
        self._rest[namespace, name] = (self._clock() + REST_S, why)

    def of(self, namespace: str) -> Mapping[str, str]:
        """Give the snapshots of a namespace that rest, and why."""
        now_s = self._clock()
        self._rest = {key: (until_s, why) for key, (until_s, why) in self._rest.items() if until_s > now_s}
        return {name: why for (there, name), (_, why) in self._rest.items() if there == namespace}
