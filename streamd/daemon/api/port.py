"""What the API asks of the daemon: the supervisor implements `Node`.

A plain method answers from memory, at once, and changes state in one synchronous step. An async one may ask a worker
or a disk; whoever calls it bounds it and may cancel it. All are called on the Trio thread. Any may raise a
`StreamdError`, which becomes a problem (`problems.py`); nothing that they say or raise holds a token.

**Every change of an image or of its leases is followed by an event with its id** (`events`): that is what wakes those
who wait for a change, so there is no other way to wait.
"""

from collections.abc import Sequence
from typing import Protocol

from msgspec.structs import asdict

from streamd.daemon.api.events import EventLog
from streamd.daemon.api.models import (
    CacheState,
    FailRequest,
    Health,
    ImageRequest,
    ImageState,
    Lease,
    LeaseRequest,
    Opener,
    RecordFacts,
)
from streamd.errors import Refused

# In a message; the error's facts have all.
_NAMED = 5


class Draining(Refused):
    """The node takes no new images."""

    kind = "draining"

    def __init__(self) -> None:
        super().__init__("this node is draining: it takes no new images")


class ImageInUse(Refused):
    """An image has leases or open files; `leases` and `openers` say whose."""

    kind = "in-use"

    def __init__(self, image_id: str, *, leases: Sequence[Lease], openers: Sequence[Opener]) -> None:
        holders = [f"{lease.owner} holds a lease ({lease.purpose})" for lease in leases]
        holders += [f"{o.command or 'a process'} (pid {o.pid}) has {o.file} open" for o in openers]
        who = ", ".join(holders[:_NAMED]) + (f", and {len(holders) - _NAMED} more" if len(holders) > _NAMED else "")
        super().__init__(f"image {image_id} is in use: {who}")
        self.image = image_id
        self.leases = [asdict(lease) for lease in leases]
        self.openers = [asdict(opener) for opener in openers]


class Node(Protocol):
    """This node's images, cache and records."""

    @property
    def events(self) -> EventLog:
        """What happens here."""
        ...

    @property
    def is_draining(self) -> bool:
        """Whether new images are refused."""
        ...

    async def request_image(self, request: ImageRequest) -> ImageState:
        """Give the image of this snapshot and tenant, and begin to prepare it when there is none, or a failed one.

        Two requests for the same snapshot and tenant get the same image, whatever else differs: the first one's
        credentials and prefetch stay. Other credentials are proven before it is given. Request ids are not its
        business. Raises: `Draining` when a new one would be made; what can be seen at once to be wrong; why other
        credentials may not read the snapshot.
        """
        ...

    def images(self) -> Sequence[ImageState]:
        """All images, oldest first, and those that ended a while ago."""
        ...

    def image(self, image_id: str) -> ImageState:
        """Give one image. Raises: `NotFound`."""
        ...

    def release(self, image_id: str, *, force: bool) -> ImageState:
        """Begin to end an image; its state says when it has. One that has ended stays ended.

        Raises: `ImageInUse` (and nothing changes) without `force`, `NotFound`.
        """
        ...

    async def fail(self, image_id: str, chosen: FailRequest) -> int:
        """Fail reads that wait, and those to come, of the chosen handles; how many. Raises: `NotFound`, `NoAnswer`."""
        ...

    def add_lease(self, image_id: str, request: LeaseRequest, *, pid: int) -> Lease:
        """Note that somebody uses an image, from before it serves on. Raises: `NotFound`, `Refused` when it ends."""
        ...

    def end_lease(self, image_id: str, lease_id: str) -> None:
        """Forget a lease; does nothing when it, or its image, is gone."""
        ...

    async def cache(self) -> CacheState:
        """Describe the node cache."""
        ...

    async def records(self, *, limit: int) -> Sequence[RecordFacts]:
        """Give the newest records, newest first."""
        ...

    def health(self) -> Health:
        """Say what this node can't do now."""
        ...

    def drain(self) -> None:
        """Take no new images from now on; those that are here go on."""
        ...

    def end_drain(self) -> None:
        """Take new images again."""
        ...
