"""The learned order of a snapshot as an object beside its manifest: read at mount, and every restore adds its sample.

Many nodes write it at the same time: each reads the present version, merges its sample into it, and puts the result in
that version's place under its generation; who comes second does it again. A sample may get lost then, as one among
many. A trace that is damaged, or of another snapshot, counts as absent, and the next sample takes its place; one that a
later streamd wrote is left alone.

It is an improvement, never a condition: what fails here is logged, and no mount fails with it.
"""

import structlog

from streamd.errors import Damaged, StoreError, StoreErrorKind
from streamd.snapshot.names import manifest_key, trace_key
from streamd.snapshot.trace import MAX_TRACE_BYTES, Sample, Trace, UnknownTrace, decode, encode, merge
from streamd.store.catalog import Pinned
from streamd.store.port import Condition, ObjectInfo, Store

log = structlog.get_logger()

# How often a sample is merged again because another node was quicker: dozens may end their restores together.
TRIES_MAX = 8


def read_trace(store: Store, pinned: Pinned, info: ObjectInfo) -> Trace:
    """Read that version of a snapshot's trace. Raises: `Damaged`, `StoreError`."""
    if info.size > MAX_TRACE_BYTES:
        raise Damaged(f"{info.key}: {info.size} bytes are too many for a trace (limit {MAX_TRACE_BYTES})")
    data = b"".join(store.read(info.key, generation=info.generation, start=0, end=info.size))
    return decode(data, digest=pinned.digest, pages_bytes=_pages_bytes(pinned))


def drop_trace(store: Store, snapshot_id: str) -> bool:
    """Delete a snapshot's trace; False when there is none. Raises: `StoreError`."""
    for _ in range(TRIES_MAX):
        info = _head(store, trace_key(snapshot_id))
        if info is None:
            return False
        try:
            store.delete(info.key, generation=info.generation)
            return True
        except StoreError as error:
            last = error
            if error.store_kind not in (StoreErrorKind.CHANGED, StoreErrorKind.GONE):
                raise
    raise last


class LearnedOrder:
    """One mount's way to the trace of its snapshot; blocks, and is called from one thread at a time."""

    def __init__(self, store: Store, pinned: Pinned) -> None:
        """Nothing is asked of the store yet. How long its calls are tried again is `store`'s matter."""
        self._store = store
        self._pinned = pinned
        self._key = trace_key(pinned.manifest.snapshot_id)
        self._is_forbidden = False

    def load(self) -> Trace | None:
        """Give what was learned so far; None, logged, when it can't be had."""
        info = self._pinned.trace
        if info is None:
            return None
        try:
            try:
                return read_trace(self._store, self._pinned, info)
            except StoreError as error:
                # Another restore has added its sample since the listing.
                if error.store_kind not in (StoreErrorKind.GONE, StoreErrorKind.CHANGED):
                    raise
                info = _head(self._store, self._key)
                return read_trace(self._store, self._pinned, info) if info else None
        except (Damaged, StoreError) as error:
            log.warning("the learned order can't be used", reason=str(error))
            return None

    def save(self, sample: Sample) -> Trace | None:
        """Add a restore's sample; give the trace that was written, None when none was, which is logged."""
        if self._is_forbidden:
            return None
        try:
            for _ in range(TRIES_MAX):
                try:
                    return self._save_once(sample)
                except StoreError as error:
                    if error.store_kind not in (StoreErrorKind.CHANGED, StoreErrorKind.GONE):
                        raise
            log.info("a restore's sample is lost: others kept writing the learned order", tries=TRIES_MAX)
        except UnknownTrace as error:
            log.info("the learned order is left as it is", reason=str(error))
        except (ValueError, OverflowError) as error:  # a sample that can't be written down is worth no mount
            log.warning("a restore's sample is lost", reason=str(error))
        except StoreError as error:
            self._is_forbidden = error.store_kind is StoreErrorKind.FORBIDDEN
            log.warning(
                "the learned order can't be kept" if self._is_forbidden else "a restore's sample is lost",
                reason=str(error),
            )
        return None

    def _save_once(self, sample: Sample) -> Trace | None:
        """Read, merge, put. Raises: `UnknownTrace`; `StoreError`, CHANGED or GONE when it is to be done again."""
        # Of a snapshot that was removed, or replaced under its id, nothing is to be written: nobody would delete it, or
        # it would take the place of the new one's.
        current = _head(self._store, manifest_key(self._pinned.manifest.snapshot_id))
        if current is None or current.generation != self._pinned.manifest_info.generation:
            log.info("the snapshot was removed or replaced: nothing is learned of it")
            return None
        info = _head(self._store, self._key)
        old: Trace | None = None
        if info is not None:
            try:
                old = read_trace(self._store, self._pinned, info)
            except UnknownTrace:
                raise
            except Damaged as error:
                log.warning("the learned order is begun anew", reason=str(error))
        merged = merge(old, sample, digest=self._pinned.digest, pages_bytes=_pages_bytes(self._pinned))
        self._store.put(self._key, encode(merged), condition=info.generation if info else Condition.ABSENT)
        return merged


def _pages_bytes(pinned: Pinned) -> int:
    return pinned.manifest.files[-1].size


def _head(store: Store, key: str) -> ObjectInfo | None:
    try:
        return store.head(key)
    except StoreError as error:
        if error.store_kind is StoreErrorKind.GONE:
            return None
        raise
