"""A tenant's access to an image that is here already, with credentials that aren't the image's own.

The image's worker has proven those that it was begun with, and goes on doing so. Whoever comes with others gets the
same mount, so they are proven first: by a process like that worker, with their rights and no others, which asks the
store for the snapshot's manifest and ends.
"""

import os
import signal
from dataclasses import replace

import trio

from streamd.daemon.assignment import Assignment
from streamd.daemon.relay import relayed
from streamd.daemon.spawning import Spawner
from streamd.errors import StreamdError, Unreachable

# As long as whoever asked waits for an answer (`api/limits.py`); a token command has 10 s of its own.
PROOF_S = 10.0
# Processes at once: an image may be asked for by all pods of a node.
PROOFS_MAX = 4


class Proofs:
    """Where credentials are proven; state of the Trio thread."""

    def __init__(self, spawner: Spawner) -> None:
        self._spawner = spawner
        self._limiter = trio.CapacityLimiter(PROOFS_MAX)

    async def prove(self, assignment: Assignment) -> None:
        """Prove the credentials of an assignment. Raises: why they are none; `Unreachable` when nobody could tell."""
        async with self._limiter:
            worker = await self._spawner.spawn()
            try:
                worker.wire.send_nowait(replace(assignment, only_proves=True, store_timeout_s=PROOF_S).message())
                with trio.move_on_after(PROOF_S):
                    while (received := await worker.wire.receive()) is not None:
                        message, fds = received
                        for fd in fds:
                            os.close(fd)
                        match message.get("is"):
                            case "proven":
                                return
                            case "refused":
                                raise relayed(message.get("error"))
                    raise StreamdError(
                        "these credentials couldn't be proven: the process that asked the store has died"
                    )
                raise Unreachable(
                    f"these credentials couldn't be proven within {PROOF_S:g} s: the store doesn't answer"
                )
            finally:
                worker.signal(signal.SIGKILL)
                worker.close()
