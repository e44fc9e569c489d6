"""What the daemon says of an image, as the commands show it (pure: times come in as numbers).

Answers are read once, here. What is missing in one, or isn't what it should be, counts as nothing: a view of the node
must not end by what one image says. Names and messages come from stores and other processes; whoever prints them
uses `output.printable`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from streamd.commands.output import age_text, ratio_text, time_text
from streamd.config import size_text

# Of `bytes_by_tier`: what the store sent; what readers got, by the class of the read.
STORE_TIER = "origin"
READ_TIERS = "read_"
# As many digits as a table has room for, and `streamd image` takes.
SHORT_ID_CHARACTERS = 12
# Images in these states have a mount, or will.
_LIVE = ("preparing", "serving", "warm", "draining")
GONE = "gone"
SERVES = ("serving", "warm", "draining")

Answer = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """One image. `note` says what is wrong with it, for people; empty when nothing is."""

    id: str
    snapshot_url: str
    tenant: str
    state: str
    mountpoint: str | None
    resident_bytes: int
    total_bytes: int
    openers: int
    leases: int
    fault_waits: int
    fault_p50_ms: float
    fault_p99_ms: float
    stalls: int
    restarts: int
    worker_started_s: float | None
    fetch_max_bytes_per_s: int
    note: str
    tiers: Mapping[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The snapshot's id, from its address."""
        return self.snapshot_url.partition("?")[0].rpartition("/")[2]

    @property
    def short_id(self) -> str:
        """The beginning of the id."""
        return self.id[:SHORT_ID_CHARACTERS]

    @property
    def is_in_use(self) -> bool:
        """Whether it ends only when somebody lets go of it: it is being prepared, has leases or open files."""
        return self.state in _LIVE and bool(self.openers or self.leases or self.state == "preparing")

    @property
    def store_bytes(self) -> int:
        """What the store sent for it."""
        return self.tiers.get(STORE_TIER, 0)

    @property
    def read_bytes(self) -> int:
        """What readers got of it."""
        return sum(amount for tier, amount in self.tiers.items() if tier.startswith(READ_TIERS))

    @property
    def resident(self) -> str:
        """How much of it is on this node."""
        return ratio_text(self.resident_bytes, self.total_bytes)

    @property
    def waits(self) -> str:
        """How often threads were stopped for memory, and for how long."""
        if not self.fault_waits:
            return "0"
        return f"{self.fault_waits} ({wait_text(self.fault_p50_ms)}, {wait_text(self.fault_p99_ms)})"

    def worker_age(self, now_s: float) -> str:
        """How long its worker has been there; `now_s` is Unix time."""
        return "–" if self.worker_started_s is None else age_text(now_s - self.worker_started_s)


def facts_of(answer: Answer) -> ImageFacts:
    """Read one image of an answer."""
    progress, waits = _dict(answer.get("progress")), _dict(answer.get("fault_waits"))
    mountpoint, started_s = answer.get("mountpoint"), answer.get("worker_started_s")
    return ImageFacts(
        id=_text(answer.get("id")),
        snapshot_url=_text(answer.get("snapshot_url")),
        tenant=_text(answer.get("tenant")),
        state=_text(answer.get("state")),
        mountpoint=mountpoint if isinstance(mountpoint, str) else None,
        resident_bytes=int(_number(progress.get("resident_bytes"))),
        total_bytes=int(_number(progress.get("total_bytes"))),
        openers=_length(answer.get("openers")),
        leases=_length(answer.get("leases")),
        fault_waits=int(_number(waits.get("count"))),
        fault_p50_ms=_number(waits.get("p50_ms")),
        fault_p99_ms=_number(waits.get("p99_ms")),
        stalls=int(_number(answer.get("stalls"))),
        restarts=int(_number(answer.get("restarts"))),
        worker_started_s=None if started_s is None else _number(started_s),
        fetch_max_bytes_per_s=int(_number(answer.get("fetch_max_bytes_per_s"))),
        note=_note(answer),
        tiers={tier: int(_number(amount)) for tier, amount in _dict(answer.get("bytes_by_tier")).items()},
    )


def _note(answer: Answer) -> str:
    error, problem = _dict(answer.get("last_error")), answer.get("cache_problem")
    notes = [f"{_text(error.get('kind'))}: {_text(error.get('message'))}"] if error else []
    away = _dict(answer.get("store_away"))
    if away:
        notes.append(
            f"waits for the store since {time_text(_number(away.get('since_s')))}: {_text(away.get('reason'))}"
        )
    if problem is not None:
        notes.append(f"served from memory: {_text(problem)}")
    return "; ".join(notes)


# Tables

LIST_HEADER = ("IMAGE", "SNAPSHOT", "TENANT", "STATE", "RESIDENT", "OPEN", "LEASES", "MOUNTPOINT")
STATUS_HEADER = (
    *("IMAGE", "SNAPSHOT", "STATE", "RESIDENT", "OPEN", "LEASES", "FAULT WAITS (P50, P99)", "STALLS"),
    *("FROM STORE", "TO READERS", "RESTARTS", "WORKER", "PROBLEM"),
)


def list_row(image: ImageFacts) -> list[object]:
    """Give an image's row in the list of images."""
    place = image.mountpoint or ""
    return [
        *(image.id, image.snapshot_url, image.tenant, image.state, image.resident, image.openers, image.leases, place)
    ]


def status_row(image: ImageFacts, *, now_s: float) -> list[object]:
    """Give an image's row in the node's status: what it has done so far."""
    return [
        *(image.short_id, image.name, image.state, image.resident, image.openers, image.leases, image.waits),
        *(image.stalls, size_text(image.store_bytes), size_text(image.read_bytes)),
        *(image.restarts, image.worker_age(now_s), image.note),
    ]


def in_use(images: Sequence[ImageFacts]) -> list[ImageFacts]:
    """Give those that somebody uses."""
    return [image for image in images if image.is_in_use]


def count_text(count: int, what: str) -> str:
    """Write a count for people: `1 image`, `2 images`."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def wait_text(milliseconds: float) -> str:
    """Write a wait for people: `0.4 ms`, `250 ms`, `12 s`."""
    if milliseconds >= 10_000:
        return f"{milliseconds / 1000:.0f} s"
    return f"{milliseconds:.0f} ms" if milliseconds >= 10 else f"{milliseconds:.1f} ms"


def _dict(value: object) -> dict[str, object]:
    return value if isinstance(value, dict) else {}


def _length(value: object) -> int:
    return len(value) if isinstance(value, list) else 0


def _number(value: object) -> float:
    return value if isinstance(value, int | float) else 0


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
