"""What stands at a snapshot's manifest key right now: the one fact that pushes, removal and collection decide by."""

from dataclasses import dataclass

from streamd.errors import Damaged, Refused, StoreError, StoreErrorKind, StreamdError
from streamd.snapshot.manifest import MAX_MANIFEST_BYTES, Manifest, decode, decode_tombstone
from streamd.snapshot.names import manifest_key
from streamd.snapshot.tombstone import Tombstone
from streamd.store.port import ObjectInfo, Store


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Neither a manifest nor a tombstone that this version can read; `error` says why. It may be a later version's."""

    error: StreamdError


@dataclass(frozen=True, slots=True, eq=False)
class Existing:
    """A version of the manifest object, and what it turned out to be; `data` is empty when it could not be read."""

    info: ObjectInfo
    data: bytes
    content: Manifest | Tombstone | Unreadable


def read_existing(store: Store, snapshot_id: str) -> Existing | None:
    """Read what is there; None when nothing is, or when it went away in between.

    Raises: `StoreError`, but not GONE. CHANGED comes when it was replaced meanwhile.
    """
    try:
        return read_version(store, store.head(manifest_key(snapshot_id)))
    except StoreError as error:
        if error.store_kind is StoreErrorKind.GONE:
            return None
        raise


def read_version(store: Store, info: ObjectInfo) -> Existing:
    """Read and classify a listed version; what the store refuses to give (FORBIDDEN, CORRUPT) is `Unreadable`.

    Raises: `StoreError`.
    """
    if info.size > MAX_MANIFEST_BYTES:
        return Existing(info, b"", Unreadable(Damaged(f"{info.key}: {info.size} bytes are too many for a manifest")))
    try:
        data = b"".join(store.read(info.key, generation=info.generation, start=0, end=info.size))
    except StoreError as error:
        if error.store_kind not in (StoreErrorKind.FORBIDDEN, StoreErrorKind.CORRUPT):
            raise
        return Existing(info, b"", Unreadable(error))
    return Existing(info, data, _classify(data))


def _classify(data: bytes) -> Manifest | Tombstone | Unreadable:
    try:
        return decode_tombstone(data) or decode(data)
    except (Damaged, Refused) as error:
        return Unreadable(error)
