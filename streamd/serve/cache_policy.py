"""Which images leave the node cache, how much a new one may take, and which chunks leave a window. Pure.

Whole images leave, and only when one begins that needs their room (there is no watermark that evicts by itself: on a
disk that others fill, it would empty the cache again and again for nothing). Two limits hold at once:

- **quota**: what the cache's images have on disk, or were promised while they are in use, is at most `max_bytes`;
- **reserve**: `reserve_bytes` of the disk stay free, whoever filled it. When others did, the newcomer gets less.

Images in use and pinned ones stay. So does what was used less than `recent_s` ago, unless the newcomer has been used
twice since: an image that is asked for again while the other wasn't has shown that it is worth more. So two images that
don't both fit don't evict each other in turns; one stays whole, the other gets what is left, and no other choice would
fetch less while they alternate. Of what may leave, the least recently used goes first, and nothing goes in vain.
"""

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """A file system: its size and what is free for us, in bytes."""

    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Limits:
    """The node cache's bounds: `max_bytes` of its own, `reserve_bytes` left free; `recent_s` makes an image recent."""

    max_bytes: int
    reserve_bytes: int
    recent_s: float


@dataclass(frozen=True, slots=True)
class Resident:
    """An image in the cache: bytes it has on disk and, where a mount owns it, may write in all; its last use."""

    key: str
    disk_bytes: int
    promised_bytes: int
    used_s: float
    is_owned: bool
    is_pinned: bool

    @property
    def claim_bytes(self) -> int:
        """What it counts against the quota."""
        return max(self.disk_bytes, self.promised_bytes) if self.is_owned else self.disk_bytes

    @property
    def pending_bytes(self) -> int:
        """What it will still take of what is free."""
        return self.claim_bytes - self.disk_bytes


@dataclass(frozen=True, slots=True)
class Newcomer:
    """An image that a mount begins to use: bytes it can use, has already, and its use before (None: none known)."""

    wanted_bytes: int
    disk_bytes: int
    used_s: float | None


def victims(
    newcomer: Newcomer, others: Sequence[Resident], *, limits: Limits, space: DiskSpace | None, now_s: float
) -> list[Resident]:
    """Choose the images that leave for the newcomer, as far as that can be done; `space` None: not known.

    The quota is kept in any case. For the reserve, which others may have used up, images leave only if that brings the
    newcomer something.
    """
    candidates = [i for i in others if _may_leave(i, newcomer, recent_s=limits.recent_s, now_s=now_s)]
    candidates.sort(key=lambda image: image.used_s)
    wanted_bytes = min(newcomer.wanted_bytes, limits.max_bytes)
    by_quota = _enough(candidates, wanted_bytes - _left_by_quota(others, limits))
    if space is None:
        return by_quota
    by_both = _enough(candidates, wanted_bytes - _left_bytes(newcomer, others, limits=limits, space=space))

    def room_without(gone: Sequence[Resident]) -> int:
        freed = DiskSpace(space.total_bytes, space.free_bytes + sum(image.disk_bytes for image in gone))
        staying = [image for image in others if image not in gone]
        return room_bytes(newcomer, staying, limits=limits, space=freed)

    return by_both if room_without(by_both) > room_without(by_quota) else by_quota


def _enough(candidates: Sequence[Resident], short_bytes: int) -> list[Resident]:
    """Take candidates in their order until they have `short_bytes`, or all; none that the others make needless."""
    chosen: list[Resident] = []
    for image in candidates:
        if short_bytes <= 0:
            break
        if image.disk_bytes > 0:
            chosen.append(image)
            short_bytes -= image.disk_bytes
    for image in reversed(chosen.copy()):  # a large one at the end may be enough without small ones before it
        if image.disk_bytes <= -short_bytes:
            chosen.remove(image)
            short_bytes += image.disk_bytes
    return chosen


def room_bytes(newcomer: Newcomer, others: Sequence[Resident], *, limits: Limits, space: DiskSpace | None) -> int:
    """Say how much the newcomer may take up beside `others`, which stay; what it has already it may always keep.

    `space` counts what victims give back as free, even where it isn't yet.
    """
    left_bytes = _left_bytes(newcomer, others, limits=limits, space=space)
    return max(min(newcomer.wanted_bytes, left_bytes), min(newcomer.wanted_bytes, newcomer.disk_bytes), 0)


def _left_bytes(newcomer: Newcomer, others: Sequence[Resident], *, limits: Limits, space: DiskSpace | None) -> int:
    """What both limits leave for the newcomer beside all others; negative where they are exceeded without it."""
    by_quota = _left_by_quota(others, limits)
    if space is None:
        return by_quota
    pending_bytes = sum(image.pending_bytes for image in others)
    return min(by_quota, newcomer.disk_bytes + space.free_bytes - pending_bytes - limits.reserve_bytes)


def _left_by_quota(others: Sequence[Resident], limits: Limits) -> int:
    return limits.max_bytes - sum(image.claim_bytes for image in others)


def _may_leave(image: Resident, newcomer: Newcomer, *, recent_s: float, now_s: float) -> bool:
    if image.is_owned or image.is_pinned:
        return False
    # The second bound: what was used before the clock was set back would else stay until that time has come.
    is_recent = now_s - recent_s < image.used_s < now_s + recent_s
    return not is_recent or (newcomer.used_s is not None and image.used_s < newcomer.used_s)


class ReadChunks:
    """Cached chunks that were read, for an image that is larger than its room: a window that moves with the reads.

    What was read the longest ago leaves first: the stream is past it. What wasn't read yet never leaves.
    """

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def note(self, chunk: int) -> None:
        """Count a cached chunk as read just now."""
        self._order[chunk] = None
        self._order.move_to_end(chunk)

    def take(self, size: int, *, length: Sequence[int], busy: Collection[int]) -> list[int]:
        """Take out chunks of at least `size` bytes together that aren't `busy`; none when there aren't so many."""
        taken: list[int] = []
        for chunk in self._order:
            if size <= 0:
                break
            if chunk not in busy:
                taken.append(chunk)
                size -= length[chunk]
        if size > 0:
            return []
        for chunk in taken:
            del self._order[chunk]
        return taken

    def clear(self) -> None:
        """Forget all."""
        self._order.clear()
