"""What each image may take of the node's link: max-min fair by what they would take. Pure.

Nobody gets more than it would take while another would take more, and whoever would take more than an equal part gets
the same as all others who would. So an image that loads leaves the others an equal part, and the link isn't left idle
for those that have nothing to fetch. What a stopped thread waits for is never held back by a share, it is only counted
towards it (`serve/rate.py`): by that, and only by that, the node may exceed its limit.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from streamd.config import Config

# An image that isn't held back is given so much more than it takes, so that it may grow until it is asked again.
_HEADROOM = 1.25
# And no less than this share of an equal part, so that it can begin.
_FLOOR = 0.1


@dataclass(frozen=True, slots=True)
class Demand:
    """What an image took lately, and whether it was held back by its share."""

    bytes_per_s: float
    is_held_back: bool


class Taker(Protocol):
    """Somebody who fetches, and is told how much."""

    @property
    def demand(self) -> Demand:
        """What it would take."""
        ...

    def share_link(self, bytes_per_s: int) -> None:
        """Hear what it may take (0: no bound)."""
        ...


def divide_link(takers: Collection[Taker], config: Config) -> None:
    """Tell all of them what they may take."""
    demands = [taker.demand for taker in takers]
    shares = divide(config.daemon.fetch_max_bytes_per_s, demands, each_max=config.fetch.max_bytes_per_s)
    for taker, share in zip(takers, shares, strict=True):
        taker.share_link(int(share))


def divide(limit: int, demands: Sequence[Demand], *, each_max: int) -> list[float]:
    """Divide `limit` so that nobody gets more than `each_max`; 0 is no bound, of either and in what is given.

    What nobody asks for is given out, too, in equal parts: who begins doesn't wait until that was noticed.
    """
    if not limit or not demands:
        return [float(each_max)] * len(demands)
    most = float(each_max or limit)
    floor = _FLOOR * limit / len(demands)
    wanted = [most if d.is_held_back else min(most, max(floor, _HEADROOM * d.bytes_per_s)) for d in demands]
    shares = _fill(limit, wanted)
    rest = max(0.0, limit - sum(shares))
    more = _fill(rest, [most - share for share in shares])
    return [share + extra for share, extra in zip(shares, more, strict=True)]


def _fill(amount: float, wanted: Sequence[float]) -> list[float]:
    """Give everyone the same, but nobody more than is wanted; what that leaves goes to the others."""
    given = [0.0] * len(wanted)
    left = amount
    for rank, index in enumerate(sorted(range(len(wanted)), key=wanted.__getitem__)):
        given[index] = min(wanted[index], left / (len(wanted) - rank))
        left -= given[index]
    return given
