"""The store's side of one push: look, put packs, commit. Every call to the store that a push makes is here.

Why it is safe against other pushes, `rm` and `gc` (the rules of those two are in `lifecycle.py`)
- Objects are put under the condition ABSENT, so nothing is ever overwritten, and packs lie under this push's own id.
- The commit is: all packs are listed, then the manifest is put ABSENT, within `COMMIT_WINDOW_S`. Others delete packs
  only after they have written a tombstone, or have seen another push's manifest, and tombstones stand for an hour: so
  packs that vanish after the listing leave something behind that makes the put fail.
- An answer that got lost is found by comparing: packs by size and crc32c, the manifest by content and push id.
"""

import contextlib
import dataclasses
import hashlib
import time
from collections.abc import Callable
from enum import Enum

import numpy as np

from streamd.errors import Refused, StoreError, StoreErrorKind, StreamdError
from streamd.save.existing import Existing, Unreadable, read_existing
from streamd.snapshot.manifest import Manifest, Pack, encode
from streamd.snapshot.names import checked_id, manifest_key, pack_key, packs_prefix
from streamd.snapshot.tombstone import Tombstone
from streamd.store.checksum import crc32c
from streamd.store.port import Buffer, Condition, ObjectInfo, Store

# From listing the packs to putting the manifest; a put's own retries (minutes) come on top. Together far below
# lifecycle.TOMBSTONE_LIFE_S, an hour. A listing of 10 000 packs takes seconds.
COMMIT_WINDOW_S = 300.0
_ATTEMPTS = 3


class Commit(Enum):
    """How the commit went."""

    WRITTEN = "written"
    WAS_THERE = "was there"  # by this push, before: its answer was lost, or a former run of it got that far


class SnapshotWriter:
    """One push of one snapshot, as the store sees it. `put_pack` may be called from many threads."""

    def __init__(
        self, store: Store, *, snapshot_id: str, push_id: str, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._id = checked_id(snapshot_id)
        self._push_id = checked_id(push_id, "push id")
        self._monotonic = monotonic
        self._listed: dict[str, ObjectInfo] = {}

    def begin(self) -> int:
        """Refuse what can't succeed, and note the packs that a former run of this push left; tell how many.

        Raises: `Refused`: the snapshot exists or is being removed. `StoreError`.
        """
        existing = read_existing(self._store, self._id)
        if existing and not (isinstance(existing.content, Manifest) and existing.content.push_id == self._push_id):
            raise self._refusal(existing)
        self._listed = self._list()
        return len(self._listed)

    def put_pack(self, index: int, data: Buffer) -> tuple[Pack, bool]:
        """Put a pack, unless it is there already (then the second value is True).

        Raises: `Refused`: there is a pack of that name with other contents. `StoreError`.
        """
        pack = Pack(size=len(data), crc32c=crc32c(data), sha256=hashlib.sha256(data).digest())
        key = pack_key(self._id, self._push_id, index)
        listed = self._listed.get(key)
        if listed is None:
            try:
                self._store.put(key, data, condition=Condition.ABSENT)
            except StoreError as error:
                # By a former try whose answer was lost, or by another process with our push id.
                if error.store_kind is not StoreErrorKind.CHANGED:
                    raise
                listed = self._store.head(key)
        if listed is None:
            return pack, False
        if listed.size != pack.size or self._store.crc32c(listed) != pack.crc32c:
            raise Refused(
                f"{key} is in the store with other contents: this image is not the one that push {self._push_id} began"
                " with, or was encoded in another way; push again without --push-id"
            )
        return pack, True

    def commit(self, manifest: Manifest) -> Commit:
        """Make the snapshot exist, if nobody else was first; a push that lost removes its packs.

        Raises: `Refused`: the id is taken, being removed, or packs have vanished. `StoreError`: when it comes from the
            put, the snapshot may exist all the same.
        """
        data = encode(manifest)
        for _ in range(_ATTEMPTS):
            began_s = self._monotonic()
            self._require(manifest.packs)
            if self._monotonic() - began_s > COMMIT_WINDOW_S:
                continue
            try:
                self._store.put(manifest_key(self._id), data, condition=Condition.ABSENT)
                return Commit.WRITTEN
            except StoreError as error:
                if error.store_kind is not StoreErrorKind.CHANGED:
                    raise
            existing = read_existing(self._store, self._id)
            if existing is not None:
                if existing.data == data or _same_push(existing, manifest):
                    return Commit.WAS_THERE
                if self._is_lost_to(existing):
                    self._discard()
                raise self._refusal(existing)
        raise Refused(f"snapshot {self._id}: the store was too slow or too busy to commit; try again")

    def _list(self) -> dict[str, ObjectInfo]:
        return {info.key: info for info in self._store.list(packs_prefix(self._id, self._push_id))}

    def _require(self, packs: tuple[Pack, ...]) -> None:
        """Look whether all packs are there. Whatever came meanwhile is looked at again: sizes, not contents."""
        listed = self._list()
        for index, pack in enumerate(packs):
            info = listed.get(pack_key(self._id, self._push_id, index))
            if info is None or info.size != pack.size:
                raise Refused(
                    f"pack {index} of push {self._push_id} is gone from the store: it was collected or deleted"
                    " while the push stood still; push again"
                )

    def _refusal(self, existing: Existing) -> Refused:
        match existing.content:
            case Tombstone(reason="gc"):
                why = "its unfinished push is being collected; push under another id"
            case Tombstone():
                why = "it is being removed; push under another id"
            case Manifest(push_id=push_id) if push_id == self._push_id:
                why = f"it was pushed before by {push_id} from another image"
            case Manifest(push_id=push_id):
                why = f"it exists (pushed by {push_id}); remove it first or push under another id"
            case Unreadable(error):
                why = f"it exists, but its manifest can't be read ({error})"
        return Refused(f"snapshot {self._id}: {why}")

    def _is_lost_to(self, existing: Existing) -> bool:
        """Tell whether what is there surely doesn't need our packs, now or (mounts of a removed snapshot) still."""
        content = existing.content
        return isinstance(content, Manifest | Tombstone) and content.push_id != self._push_id

    def _discard(self) -> None:
        """Remove this push's own packs, as far as it goes: `gc` would, too, a day later."""
        began_s = self._monotonic()
        with contextlib.suppress(StreamdError):
            for info in self._list().values():
                if self._monotonic() - began_s > COMMIT_WINDOW_S:
                    return
                self._store.delete(info.key, generation=info.generation)


def _same_push(existing: Existing, manifest: Manifest) -> bool:
    """Tell whether a manifest is this push's own from a former run: equal but for the time (and zstd's version)."""
    there = existing.content
    if not isinstance(there, Manifest) or there.push_id != manifest.push_id:
        return False
    columns = ("length", "codec", "pack", "offset", "frame_bytes", "digest")
    return all(
        getattr(there, field.name) == getattr(manifest, field.name)
        for field in dataclasses.fields(Manifest)
        if field.name not in ("created_s", "table")
    ) and all(np.array_equal(getattr(there.table, name), getattr(manifest.table, name)) for name in columns)
