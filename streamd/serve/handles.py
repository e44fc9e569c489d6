"""Open files and the reads that wait on them. State of the Trio thread; nothing here awaits."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from streamd.errors import Exit, StreamdError
from streamd.serve.classify import ReadClassifier
from streamd.serve.learning import Sampler
from streamd.serve.order import Want
from streamd.store.port import Buffer

# Kinds of `ReadFailed` that no store's error has.
BY_OPERATOR = "operator"
BY_KERNEL_LIMIT = "kernel-limit"
INTERNAL = "internal"
ENDING = "ending"  # the mount goes
UNHEARD = "unheard"  # nobody waits for the answer any more


class ReadFailed(StreamdError):
    """A read can't be answered: the policy's last step, or somebody asked for it. The kernel is told EIO.

    `kind` is that of the store's error, or one of those above.
    """

    def __init__(self, message: str, *, kind: str, exit_code: Exit = Exit.FAILED) -> None:
        super().__init__(message)
        self.kind = kind
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class Opener:
    """Who opened a file: the process, its command, and the container of the runsc command line, where known."""

    pid: int
    command: str
    container: str | None


class PendingRead:
    """One read that waits for chunks; `settled` is called once the last one of `missing` is there, or when it fails.

    A chunk is kept from its arrival until the reply, so that nothing that happens in between can take it away. What is
    called may let it wait again for others, by `wait_for`. `failure` is final.
    """

    __slots__ = ("arrived", "began_s", "failure", "missing", "want")

    def __init__(self, want: Want, began_s: float) -> None:
        self.want = want
        self.began_s = began_s
        self.missing: set[int] = set()
        self.arrived: dict[int, Buffer] = {}
        self.failure: ReadFailed | None = None

    def settled(self) -> None:
        """Go on."""
        raise NotImplementedError

    def wait_for(self, missing: Iterable[int]) -> None:
        """Wait for these chunks."""
        self.missing = set(missing)

    def arrive(self, chunk: int, data: Buffer) -> None:
        """Take a verified chunk."""
        self.arrived[chunk] = data
        self.missing.discard(chunk)
        if not self.missing and self.failure is None:
            self.settled()

    def fail(self, failure: ReadFailed) -> None:
        """End the read with an error; the first one counts."""
        if self.failure is None:
            self.failure = failure
            self.settled()


@dataclass(slots=True, eq=False)
class Handle:
    """One open file description of a file of the image.

    `failure` is set when its reads are to be failed from now on. Offsets that the classifier and the sampler see are
    the file's own.
    """

    number: int
    file_name: str
    opener: Opener
    opened_s: float
    classifier: ReadClassifier = field(default_factory=ReadClassifier)
    sampler: Sampler = field(default_factory=Sampler)
    pending: set[PendingRead] = field(default_factory=set)
    failure: ReadFailed | None = None
    read_bytes: int = 0
    reads: int = 0

    def fail(self, failure: ReadFailed) -> int:
        """Fail the reads that wait and all later ones; give how many waited."""
        self.failure = failure
        waiting = list(self.pending)
        for read in waiting:
            read.fail(failure)
        return len(waiting)
