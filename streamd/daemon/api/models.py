"""What goes over the wire: one struct a JSON object, checked as it is read.

What a client sends is refused when it has a field that isn't here, a wrong type or a value out of its bounds; what the
daemon answers may gain fields. Names follow `streamd status` (README). Times are seconds: `_s` after a moment is Unix
time, and sizes are bytes. No answer holds a token, nor the command or the file that a token comes from.
"""

import re
from enum import StrEnum
from typing import Annotated, TypeAlias

from msgspec import UNSET, Meta, Struct, UnsetType, field

from streamd.config import Prefetch

# `$` also matches before a newline at the end, in Python; the look-ahead closes that, there and in JSON Schema.
_PRINTABLE = r"^[^\x00-\x1f\x7f]*$(?!\n)"
RequestId: TypeAlias = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z0-9._-]{1,64}$(?!\n)",
        max_length=64,
        description="Made by the client; the same id again asks for nothing new.",
    ),
]
_SnapshotURL: TypeAlias = Annotated[
    str,
    Meta(
        pattern=r"^(gs|file)://[\x21-\x7e]+$(?!\n)",
        max_length=2048,
        description="gs://bucket/prefix/ID or file:///dir/ID",
    ),
]
_Tenant: TypeAlias = Annotated[
    str, Meta(pattern=r"^[\x21-\x7e]*$(?!\n)", max_length=128, description="Whose it is; tenants share no image.")
]
_Name: TypeAlias = Annotated[str, Meta(pattern=_PRINTABLE, min_length=1, max_length=256)]
_ABSOLUTE_PATH = re.compile(r"^/[^\x00-\x1f\x7f]*$(?!\n)")
_AbsolutePath: TypeAlias = Annotated[str, Meta(pattern=_ABSOLUTE_PATH.pattern, max_length=4096)]
_Argument: TypeAlias = Annotated[str, Meta(pattern=r"^[^\x00]*$", max_length=4096)]
_Count: TypeAlias = Annotated[int, Meta(ge=0)]
HANDLE_MAX = (1 << 64) - 1


class ImageStateName(StrEnum):
    """Where an image is in its life."""

    PREPARING = "preparing"  # its worker starts; nothing is mounted yet
    SERVING = "serving"
    WARM = "warm"  # a bind of the node cache's sealed files; its worker serves nothing
    DRAINING = "draining"  # ends as soon as nobody has it open
    FAILED = "failed"  # `last_error` says why; a new request tries again
    GONE = "gone"


class CredentialsKind(StrEnum):
    """Where an image's tokens come from; all that an answer says of it."""

    DEFAULT = "default"
    TOKEN_FILE = "token_file"  # noqa: S105 - a name
    COMMAND = "command"


class HealthStatus(StrEnum):
    """Whether the node can do all that it should."""

    OK = "ok"
    DEGRADED = "degraded"


class _Request(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a client sends."""


class _Answer(Struct, frozen=True, kw_only=True):
    """What the daemon says."""


class Credentials(_Request, frozen=True, kw_only=True):
    """Where an image's tokens come from: a file that is read anew when it changes, or a command's output."""

    token_file: _AbsolutePath | UnsetType = UNSET
    command: Annotated[list[_Argument], Meta(min_length=1, max_length=64)] | UnsetType = UNSET

    def __post_init__(self) -> None:
        """Raises: `ValueError`; the message never repeats a value."""
        if (self.token_file is UNSET) == (self.command is UNSET):
            raise ValueError("give token_file or command, one of them")
        if self.command is not UNSET and not _ABSOLUTE_PATH.search(self.command[0]):
            raise ValueError("command must begin with an absolute path")

    @property
    def kind(self) -> CredentialsKind:
        """Which of them it is."""
        return CredentialsKind.COMMAND if self.token_file is UNSET else CredentialsKind.TOKEN_FILE

    def __repr__(self) -> str:
        """Hide everything but the kind: this may end up in a log."""
        return f"Credentials({self.kind})"


class ImageRequest(_Request, frozen=True, kw_only=True):
    """An image that somebody wants on this node."""

    snapshot_url: _SnapshotURL
    request_id: RequestId
    tenant: _Tenant = ""
    credentials: Credentials | None = None
    prefetch: Prefetch = Prefetch.ALL


class ReleaseRequest(_Request, frozen=True, kw_only=True):
    """An image shall end; with `force` also while it is in use, and then its readers get EIO."""

    force: bool = False


class FailRequest(_Request, frozen=True, kw_only=True):
    """Reads that wait shall fail: of one handle, of one container, or all."""

    handle: _Count | UnsetType = UNSET
    container: _Name | UnsetType = UNSET

    def __post_init__(self) -> None:
        """Raises: `ValueError`."""
        if self.handle is not UNSET and self.container is not UNSET:
            raise ValueError("give a handle or a container, not both")
        if self.handle is not UNSET and self.handle > HANDLE_MAX:
            raise ValueError("handle is too large")


class LeaseRequest(_Request, frozen=True, kw_only=True):
    """Somebody uses an image, for as long as the connection lives."""

    owner: _Name
    purpose: _Name


class Lease(_Answer, frozen=True, kw_only=True):
    """Who uses an image, and since when."""

    id: str
    owner: str
    purpose: str
    since_s: float
    pid: int


class LeaseLine(_Answer, frozen=True, kw_only=True, omit_defaults=True):
    """A line of a lease's stream: first the lease, then an empty object now and then, and why when it ends."""

    lease: Lease | None = None
    ended: str | None = None


class Opener(_Answer, frozen=True, kw_only=True):
    """Who has a file of an image open."""

    handle: int
    file: str
    pid: int
    command: str
    container: str | None = None


class Progress(_Answer, frozen=True, kw_only=True):
    """How much of an image is on this node, verified."""

    resident_bytes: int = 0
    total_bytes: int = 0


class FaultWaits(_Answer, frozen=True, kw_only=True):
    """How long threads of the sandbox were stopped for memory that wasn't here yet."""

    count: int = 0
    p50_ms: float = 0.0
    p99_ms: float = 0.0


class ReleaseGaps(_Answer, frozen=True, kw_only=True):
    """Times between two chunks that the running worker's fetches have brought, while any were under way."""

    p50_ms: float = 0.0
    p99_ms: float = 0.0


class ErrorFacts(_Answer, frozen=True, kw_only=True):
    """What went wrong last with an image: kind, message and exit code as the commands have them."""

    kind: str
    message: str
    exit_code: int
    at_s: float


class StoreAway(_Answer, frozen=True, kw_only=True):
    """Nothing comes of what the store is asked for: since when (Unix time), and its last answer."""

    since_s: float
    reason: str


class ImageState(_Answer, frozen=True, kw_only=True):
    """One image of this node. `fault_waits`, `stalls`, `failed_reads` and `bytes_by_tier` are sums over its life.

    `fetch_max_bytes_per_s` is what its worker may take from the store now (0: no bound): its share of the node's limit.
    """

    id: str
    snapshot_url: str
    tenant: str
    state: ImageStateName
    created_s: float
    prefetch: Prefetch
    credentials: CredentialsKind = CredentialsKind.DEFAULT
    mountpoint: str | None = None
    restarts: int = 0
    worker_pid: int | None = None
    worker_started_s: float | None = None
    leases: list[Lease] = field(default_factory=list)
    openers: list[Opener] = field(default_factory=list)
    progress: Progress = Progress()
    fault_waits: FaultWaits = FaultWaits()
    release_gaps: ReleaseGaps = ReleaseGaps()
    stalls: int = 0
    failed_reads: int = 0
    fetch_max_bytes_per_s: int = 0
    bytes_by_tier: dict[str, int] = field(default_factory=dict)
    last_error: ErrorFacts | None = None
    cache_problem: str | None = None
    store_away: StoreAway | None = None


class ImageList(_Answer, frozen=True, kw_only=True):
    """The images of this node, oldest first."""

    images: list[ImageState]


class Failed(_Answer, frozen=True, kw_only=True):
    """How many handles' reads were failed."""

    failed: int


class CachedImage(_Answer, frozen=True, kw_only=True):
    """One image in the node cache (`streamd cache ls`)."""

    key: str
    disk_bytes: int
    used_s: float
    owner: str | None = None
    is_pinned: bool = False


class CacheState(_Answer, frozen=True, kw_only=True):
    """The node cache, least recently used image first; `problem` says why it isn't used."""

    directory: str | None
    images: list[CachedImage]
    used_bytes: int
    max_bytes: int
    reserve_bytes: int
    free_bytes: int
    problem: str | None = None


class RecordFacts(_Answer, frozen=True, kw_only=True):
    """One record of a restore, by its name in the directory of records."""

    name: str
    size_bytes: int
    modified_s: float


class RecordList(_Answer, frozen=True, kw_only=True):
    """Records, newest first."""

    records: list[RecordFacts]


class Health(_Answer, frozen=True, kw_only=True):
    """Whether the node can do all that it should; `warnings` say what it can't, for people.

    `fetch_max_bytes_per_s`: what all images together may take from the store (0: no bound).
    """

    status: HealthStatus
    warnings: list[str]
    is_draining: bool
    images: int
    pid: int
    started_s: float
    fetch_max_bytes_per_s: int = 0
    version: str


class DrainState(_Answer, frozen=True, kw_only=True):
    """Whether new images are taken."""

    is_draining: bool


class Event(_Answer, frozen=True, kw_only=True):
    """Something that happened on this node. `facts` depend on the kind."""

    id: str
    kind: str
    at_s: float
    image: str | None = None
    facts: dict[str, str | int | float | bool | None] = field(default_factory=dict)


class Problem(_Answer, frozen=True, kw_only=True):
    """An error (RFC 9457), with facts that depend on its kind; `exit_code` is what a command would end with."""

    type: str
    title: str
    status: int
    detail: str
    exit_code: int
