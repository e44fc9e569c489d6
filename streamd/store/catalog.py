"""Which snapshots a store has, and one of them, pinned.

A snapshot exists when and only when `ID/manifest` does and is no tombstone. Opening one means: list what lies under its
id once, read the manifest at the generation that the listing names, and check that each pack that the manifest counts
is listed with its size (and crc32c, where the store keeps one). The generations of that listing are the snapshot from
then on; whoever changes an object afterwards causes errors, never mixtures.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from streamd.errors import Damaged, NotFound, Refused, StoreError, StoreErrorKind
from streamd.snapshot import names
from streamd.snapshot.manifest import (
    MAX_MANIFEST_BYTES,
    Manifest,
    decode,
    decode_tombstone,
    manifest_digest,
    tables_bytes,
)
from streamd.store.port import ObjectInfo, Store


@dataclass(frozen=True, slots=True, eq=False)
class Pinned:
    """A snapshot as it was when it was opened.

    `data` is the stored manifest, `digest` its SHA-256 (32 bytes), `packs[i]` the version of pack i, `trace` that of
    its learned order, if there was one. Unlike the others, that one may change in the snapshot's life.
    """

    manifest: Manifest
    data: bytes
    digest: bytes
    manifest_info: ObjectInfo
    packs: tuple[ObjectInfo, ...]
    trace: ObjectInfo | None = None

    @property
    def tables_bytes(self) -> int:
        """What it takes of the memory of who serves it, before there is any byte of its image."""
        ranges = sum(len(file.ranges) for file in self.manifest.gvisor.memory_files)
        return tables_bytes(chunks=len(self.manifest.table), ranges=ranges) + _DATA_COPIES * len(self.data)


class State(StrEnum):
    """What `ls` says of an id that has a manifest."""

    OK = "ok"
    REMOVING = "removing"  # a tombstone stands in the manifest's place
    DAMAGED = "damaged"  # the manifest can't be read, or doesn't agree with the packs that are there
    UNSUPPORTED = "unsupported"  # written by a later version of this program


@dataclass(frozen=True, slots=True, eq=False)
class CatalogEntry:
    """One id that has a manifest; `pinned` when its state is OK, else `reason`."""

    snapshot_id: str
    state: State
    manifest_info: ObjectInfo
    pinned: Pinned | None = None
    reason: str = ""

    @property
    def manifest(self) -> Manifest | None:
        return self.pinned.manifest if self.pinned else None


class BeingRemoved(Refused):
    """A tombstone stands in the manifest's place; `reason` is the tombstone's ("gc" or "rm")."""

    def __init__(self, snapshot_id: str, reason: str) -> None:
        super().__init__(f"snapshot {snapshot_id} is being removed ({reason})")
        self.reason = reason


# The stored manifest stays in memory beside what it says, and again where the next worker finds it.
_DATA_COPIES = 2
# Of one snapshot: a TB in packs of 32 MiB is 32 768, and leases, and what interrupted pushes have left. More is no
# snapshot of ours, and would fill the memory of whoever opens it.
OBJECTS_MAX = 200_000


def open_snapshot(store: Store, snapshot_id: str, *, tables_max_bytes: int | None = None) -> Pinned:
    """Pin a snapshot. With `tables_max_bytes`, none that takes more memory than that (`Pinned.tables_bytes`).

    Raises: `NotFound`, which says so when the address is a store's; `BeingRemoved` (a `Refused`); `Damaged`, which
    names the field or the pack; `Refused` for a manifest of a later version; `TablesTooLarge` (a `Refused`), before the
    tables are made; `StoreError`, CHANGED among them when the manifest was replaced in this moment.
    """
    infos = {}
    for info in store.list(f"{names.checked_id(snapshot_id)}/"):
        infos[info.key] = info
        if len(infos) > OBJECTS_MAX:
            raise Refused(
                f"{store.url}/{snapshot_id} has more than {OBJECTS_MAX} objects; `streamd gc` removes leftovers"
            )
    try:
        return _pin(store, snapshot_id, infos, tables_max_bytes)
    except StoreError as error:
        if error.store_kind is StoreErrorKind.GONE:
            raise NotFound(f"{store.url} has no snapshot {snapshot_id} (it was removed a moment ago)") from error
        raise


def list_snapshots(store: Store) -> Iterator[CatalogEntry]:
    """Go through all snapshots of a store in id order, reading each manifest. One bad snapshot hides no other.

    Raises: `NotFound` when this is no store but a snapshot; `StoreError` when the store itself fails.
    """
    in_a_snapshot, empty = False, True
    # In key order, and an id holds no slash, so that what belongs to one id stands together.
    for snapshot_id, group in itertools.groupby(store.list(""), lambda info: info.key.partition("/")[0]):
        infos = {info.key: info for info in group}
        in_a_snapshot |= names.MANIFEST in infos
        info = infos.get(f"{snapshot_id}/{names.MANIFEST}")
        if info is None or not _is_id(snapshot_id):
            continue
        empty = False
        try:
            yield CatalogEntry(snapshot_id, State.OK, info, pinned=_pin(store, snapshot_id, infos))
        except BeingRemoved as error:
            yield CatalogEntry(snapshot_id, State.REMOVING, info, reason=error.reason)
        except Damaged as error:
            yield CatalogEntry(snapshot_id, State.DAMAGED, info, reason=str(error))
        except Refused as error:
            yield CatalogEntry(snapshot_id, State.UNSUPPORTED, info, reason=str(error))
        except StoreError as error:
            match error.store_kind:
                case StoreErrorKind.GONE | StoreErrorKind.CHANGED:
                    pass  # removed, or replaced by a tombstone, between the listing and now
                case StoreErrorKind.FORBIDDEN | StoreErrorKind.CORRUPT:  # about this one object
                    yield CatalogEntry(snapshot_id, State.DAMAGED, info, reason=f"can't be read: {error}")
                case _:
                    raise
    if in_a_snapshot and empty:
        raise NotFound(f"{store.url} is a snapshot, not a store; name the store that it is in")


def read_manifest(store: Store, info: ObjectInfo) -> bytes:
    """Read a manifest whole. Raises: `Damaged` when it is absurdly large, `StoreError`."""
    if info.size > MAX_MANIFEST_BYTES:
        raise Damaged(f"{info.key}: {info.size} bytes are too many for a manifest (limit {MAX_MANIFEST_BYTES})")
    return b"".join(store.read(info.key, generation=info.generation, start=0, end=info.size))


def _is_id(text: str) -> bool:
    try:
        names.checked_id(text)
    except Refused:
        return False
    return True


def _is_manifest_below(key: str) -> bool:
    """Tell whether a key is that of a manifest in a store which is one level down."""
    _, _, rest = key.partition("/")
    snapshot_id, _, last = rest.partition("/")
    return last == names.MANIFEST and snapshot_id != "lease" and _is_id(snapshot_id)


def _below(url: str, name: str) -> str:
    """Give the address of what is one level down; the query of a file: address stays at the end."""
    base, mark, query = url.partition("?")
    return f"{base.rstrip('/')}/{name}{mark}{query}"


def _pin(store: Store, snapshot_id: str, infos: dict[str, ObjectInfo], tables_max_bytes: int | None = None) -> Pinned:
    """Open a snapshot, given what is listed under its id."""
    info = infos.get(names.manifest_key(snapshot_id))
    if info is None:
        if any(_is_manifest_below(key) for key in infos):
            url = _below(store.url, snapshot_id)
            raise NotFound(f"{url} is a store, not a snapshot; name a snapshot in it (`streamd ls {url}` lists them)")
        left = f"; {len(infos)} objects of an unfinished or removed push are there" if infos else ""
        raise NotFound(f"{store.url} has no snapshot {snapshot_id}{left}")
    data = read_manifest(store, info)
    tombstone = decode_tombstone(data)
    if tombstone is not None:
        raise BeingRemoved(snapshot_id, tombstone.reason)
    if tables_max_bytes is not None:
        tables_max_bytes -= _DATA_COPIES * len(data)
    manifest = decode(data, tables_max_bytes=tables_max_bytes)
    if manifest.snapshot_id != snapshot_id:
        raise Damaged(f"{info.key}: it is the manifest of {manifest.snapshot_id}")
    packs = tuple(_pinned_pack(manifest, index, infos) for index in range(len(manifest.packs)))
    return Pinned(
        manifest=manifest,
        data=data,
        digest=manifest_digest(data),
        manifest_info=info,
        packs=packs,
        trace=infos.get(names.trace_key(snapshot_id)),
    )


def _pinned_pack(manifest: Manifest, index: int, infos: dict[str, ObjectInfo]) -> ObjectInfo:
    pack = manifest.packs[index]
    if pack.snapshot is not None:
        raise Refused(f"{manifest.snapshot_id}: pack {index} belongs to snapshot {pack.snapshot}: not supported yet")
    key = names.pack_key(manifest.snapshot_id, manifest.push_id, index)
    info = infos.get(key)
    if info is None:
        raise Damaged(f"{key}: the manifest counts this pack, and it isn't there")
    if info.size != pack.size:
        raise Damaged(f"{key}: has {info.size} bytes where the manifest says {pack.size}")
    if info.crc32c is not None and info.crc32c != pack.crc32c:
        raise Damaged(f"{key}: has crc32c {info.crc32c:08x} where the manifest says {pack.crc32c:08x}")
    return info
