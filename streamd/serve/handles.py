"""Open files and the reads that wait on them. State of the Trio thread; nothing here awaits."""

from dataclasses import dataclass, field

import trio

from streamd.errors import StreamdError
from streamd.serve.classify import ReadClassifier
from streamd.serve.order import Want
from streamd.store.port import Buffer


class ReadFailed(StreamdError):
    """A read can't be answered: the policy's last step, or somebody asked for it. The kernel is told EIO."""


@dataclass(frozen=True, slots=True)
class Opener:
    """Who opened a file: the process, its command, and the container of the runsc command line, where known."""

    pid: int
    command: str
    container: str | None


class PendingRead:
    """One read that waits for chunks; its event is set when the last one is there, or when it has failed.

    A chunk is kept from its arrival until the reply, so that nothing that happens in between can take it away.
    """

    __slots__ = ("arrived", "began_s", "done", "failure", "missing", "want")

    def __init__(self, want: Want, missing: set[int], began_s: float) -> None:
        self.want = want
        self.missing = missing
        self.began_s = began_s
        self.arrived: dict[int, Buffer] = {}
        self.done = trio.Event()
        self.failure: ReadFailed | None = None

    def arrive(self, chunk: int, data: Buffer) -> None:
        """Take a verified chunk."""
        self.missing.discard(chunk)
        self.arrived[chunk] = data
        if not self.missing:
            self.done.set()

    def fail(self, failure: ReadFailed) -> None:
        """End the wait with an error."""
        self.failure = failure
        self.done.set()


@dataclass(slots=True, eq=False)
class Handle:
    """One open file description of a file of the image.

    `failure` is set when its reads are to be failed from now on. Offsets that the classifier sees are the file's own.
    """

    number: int
    file_name: str
    opener: Opener
    opened_s: float
    classifier: ReadClassifier = field(default_factory=ReadClassifier)
    pending: set[PendingRead] = field(default_factory=set)
    failure: ReadFailed | None = None
    read_bytes: int = 0
    reads: int = 0

    def fail(self, failure: ReadFailed) -> int:
        """Fail the reads that wait and all later ones; give how many waited."""
        self.failure = failure
        waiting = len(self.pending)
        for read in self.pending:
            read.fail(failure)
        return waiting
