"""The port to the API objects: what an API server can do, and what a directory of files can do as well.

What every keeper promises, as an API server does
- An object's `resource_version` changes with each change of it. An update or a deletion that names one is refused with
  `Conflict` when the object has another by now: read again, decide again.
- The status is a subresource: `create` drops it, `update_status` changes nothing else.
- `watch` first tells all there is, then `Synced`, then each change; changes of one object come in their order, though
  some may be left out when another follows. It never ends by itself: what interrupts it is bridged by telling what has
  become of everything meanwhile. So who follows it needs no list, and no version to go on from.

An object that can't be read is told as `Unreadable`, and is not there: what it said before holds no longer. For a
policy that is the safe side, pods start cold and are not saved, until somebody mends it.
"""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from agent.kube.objects import Kind, PodSnapshot, R, Resource


@dataclass(frozen=True, slots=True)
class Key:
    """Which object; `namespace` is empty for kinds of the whole cluster."""

    kind: Kind
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}" if self.namespace else f"{self.kind} {self.name}"


def key_of(resource: Resource) -> Key:
    """Give an object's key."""
    return Key(resource.kind, resource.metadata.namespace, resource.metadata.name)


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A file, or an object of the API, that can't be used: `where` it is, and all that is wrong with it."""

    where: str
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Listing:
    """All objects of some kinds, in the order of their names, and what couldn't be read."""

    items: tuple[Resource, ...]
    unreadable: tuple[Unreadable, ...]


@dataclass(frozen=True, slots=True)
class Put:
    """An object is there, or has changed."""

    resource: Resource


@dataclass(frozen=True, slots=True)
class Gone:
    """An object is there no longer."""

    key: Key


@dataclass(frozen=True, slots=True)
class Mended:
    """What `Unreadable` was told of is gone, or can be read again."""

    where: str


@dataclass(frozen=True, slots=True)
class Synced:
    """All there was has been told."""


Change: TypeAlias = Put | Gone | Unreadable | Mended | Synced


class Objects(Protocol):
    """Keeps the objects. Every method may raise `Unavailable`; names that can't be names are a `NotFound`."""

    async def list(self, *kinds: Kind, namespace: str | None = None) -> Listing:
        """Give all objects of these kinds, of one namespace or of all."""
        ...

    async def get(self, kind: type[R], name: str, namespace: str = "") -> R:
        """Give one object. Raises: `NotFound`, `InvalidObject`."""
        ...

    async def create(self, snapshot: PodSnapshot) -> PodSnapshot:
        """Keep a new snapshot, without its status; give it as it is kept. Raises: `AlreadyExists`."""
        ...

    async def update_status(self, resource: R) -> R:
        """Replace an object's status by this one; give the object as it is kept.

        Raises: `NotFound`; `Conflict`, when the object isn't at `resource.metadata.resource_version` any more.
        """
        ...

    async def delete(self, snapshot: PodSnapshot) -> None:
        """Remove a snapshot; its data in the store is the caller's to remove before.

        Raises: `NotFound`; `Conflict`, as `update_status`.
        """
        ...

    def watch(self, *kinds: Kind) -> AbstractAsyncContextManager[AsyncIterator[Change]]:
        """Follow these kinds in all namespaces while the block is entered."""
        ...
