"""Remove a snapshot; collect what pushes and removals left behind.

The rules, each checked by the model test (tests/save/test_model.py)
1. An id without a manifest whose newest object is older than the grace is claimed: a tombstone is put in the manifest's
   place under the condition ABSENT. A push that comes too late is then refused.
2. Packs that no manifest stands beside are deleted only by a pass that has just written the tombstone: claimed the
id, or
   renewed an old one (generation matched). A tombstone stays until no object of the id is left *and* it is
   `TOMBSTONE_LIFE_S`, and the grace, old. Else a push could list its packs, lose them, and commit after the tombstone.
3. Beside a manifest only packs of other pushes go, when they are older than the grace.
4. `remove` replaces the manifest by a tombstone (generation matched). The packs follow an hour later, longer than any
   load takes, and not while a fresh lease says that a node still reads them; `now=True` does not wait.
5. What isn't understood stays: unknown names, manifests that can't be read. (`remove` removes those, too: it was asked
   to. Their packs follow when they are older than the grace, since nothing says whose they are.)
Ages are by the store's clock, read before anything is listed, so that they come out too small rather than too large.
Objects are deleted at the generation that was listed. Everything may stop anywhere and be done again.
"""

import itertools
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from streamd.errors import NotFound, Refused, StoreError, StoreErrorKind
from streamd.save.existing import Existing, Unreadable, read_existing, read_version
from streamd.save.workers import Workers
from streamd.snapshot.manifest import Manifest
from streamd.snapshot.names import MANIFEST, checked_id, manifest_key, packs_prefix
from streamd.snapshot.tombstone import Tombstone, encode_tombstone
from streamd.store.port import CLOCK_KEY, Condition, ObjectInfo, Store

DEFAULT_GRACE_S = 24 * 3600.0
REMOVED_PACKS_LIFE_S = 3600.0  # longer than the longest load of a snapshot that was mounted when it was removed
LEASE_FRESH_S = 3600.0  # a lease that wasn't renewed for so long has no holder
# Whatever the grace. Longer than _DECISION_LIFE_S, commit.COMMIT_WINDOW_S, and one call with all its retries for each.
TOMBSTONE_LIFE_S = 3600.0
_DECISION_LIFE_S = 600.0  # a decision is acted on for so long; then the id is looked at again
# Tombstones have 100 bytes. A larger object beside the packs of one push needs no reading: it is that push's manifest.
_TOMBSTONE_BYTES = 4096
_DELETERS = 8

_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_OURS = re.compile(r"packs/([a-z0-9][a-z0-9-]{0,62})/[0-9]{8}|lease/[^/]+|trace")


@dataclass(frozen=True, slots=True)
class RemoveResult:
    """What `remove` did. `leases` are the nodes that read the snapshot right now, by their fresh leases.

    `packs_deleted` and `bytes_deleted` are 0 without `now`: they follow by `collect`.
    """

    snapshot_id: str
    leases: tuple[str, ...]
    packs_deleted: int = 0
    bytes_deleted: int = 0


@dataclass(slots=True)
class CollectResult:
    """What a pass of `collect` did; `kept` says of each id that is not done why not, be it that the store refused."""

    ids_claimed: list[str] = field(default_factory=list)
    ids_finished: list[str] = field(default_factory=list)
    objects_deleted: int = 0
    bytes_deleted: int = 0
    kept: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be done with one id.

    First `tombstone` is written, when nothing is there or in place of the tombstone that was found; then `delete` is
    deleted. Or the tombstone is dropped. `kept` says why not all is done.
    """

    tombstone: Tombstone | None = None
    delete: tuple[ObjectInfo, ...] = ()
    drop_tombstone: bool = False
    kept: str = ""


def plan(
    snapshot_id: str, objects: Sequence[ObjectInfo], existing: Existing | None, *, now_s: float, grace_s: float
) -> Plan:
    """Decide by the rules above about one id. `objects` is all that is listed under it. Pure."""
    ours = {info: match for info in objects if (match := _OURS.fullmatch(info.key.removeprefix(f"{snapshot_id}/")))}

    def old(info: ObjectInfo) -> bool:
        return now_s - info.updated_s >= grace_s

    match existing.content if existing else None:
        case None:
            if not ours or not all(map(old, ours)):
                return Plan(kept="unfinished push, younger than the grace" if ours else "")
            return Plan(tombstone=Tombstone("gc"), delete=tuple(ours))
        case Unreadable(error):
            return Plan(kept=f"its manifest can't be read: {error}")
        case Manifest(push_id=winner):
            others = [info for info, match in ours.items() if match[1] not in (None, winner)]
            return Plan(delete=tuple(filter(old, others)))
        case Tombstone(push_id=removed) as tombstone:
            assert existing
            age_s = now_s - existing.info.updated_s
            if not ours:
                if age_s < max(grace_s, TOMBSTONE_LIFE_S):
                    return Plan(kept="its tombstone stays a while")
                return Plan(drop_tombstone=True)
            leased = bool(_fresh_leases(snapshot_id, ours, now_s=now_s))

            def due(info: ObjectInfo, match: re.Match[str]) -> bool:
                if removed is not None and match[1] in (None, removed):
                    return not leased and age_s >= REMOVED_PACKS_LIFE_S
                return old(info)

            delete = tuple(info for info, match in ours.items() if due(info, match))
            if not delete:
                return Plan(kept="a node reads it" if leased else "removed or claimed a short while ago")
            return Plan(tombstone=tombstone, delete=delete, kept="its tombstone stays a while")


def remove(
    store: Store,
    snapshot_id: str,
    *,
    now: bool = False,
    monotonic: Callable[[], float] = time.monotonic,
    threads: int = _DELETERS,
) -> RemoveResult:
    """Make a snapshot not exist any more; its packs follow by `collect`, or at once with `now`.

    Removing it again, before its packs are gone, does the same again. `now` kills the restores of the nodes in
    `leases`.

    Raises: `NotFound`; `Refused` when it was replaced meanwhile; `StoreError`.
    """
    existing = read_existing(store, checked_id(snapshot_id))
    if existing is None or existing.content == Tombstone("gc"):
        raise NotFound(f"{store.url} has no snapshot {snapshot_id}")
    push_id = None if isinstance(existing.content, Unreadable) else existing.content.push_id
    now_s = store.now_s()
    began_s = monotonic()
    objects = tuple(store.list(f"{snapshot_id}/"))
    leases = _fresh_leases(snapshot_id, objects, now_s=now_s)
    tombstone = encode_tombstone(Tombstone("rm", push_id))
    if now or not isinstance(existing.content, Tombstone):
        try:
            store.put(manifest_key(snapshot_id), tombstone, condition=existing.info.generation)
        except StoreError as error:
            if error.store_kind not in (StoreErrorKind.CHANGED, StoreErrorKind.GONE):
                raise
            # By another `rm`, or by ourselves when the answer was lost; else it is not the snapshot that was meant.
            there = read_existing(store, snapshot_id)
            if now or there is None or there.data != tombstone:
                raise Refused(f"snapshot {snapshot_id} changed while it was being removed; try again") from error
    if not now or push_id is None:
        return RemoveResult(snapshot_id, leases)
    packs = [info for info in objects if info.key.startswith(packs_prefix(snapshot_id, push_id))]
    done = _delete(store, packs, until_s=began_s + _DECISION_LIFE_S, monotonic=monotonic, threads=threads)
    if done.refused:
        raise done.refused
    return RemoveResult(snapshot_id, leases, done.count, done.size)


def collect(
    store: Store,
    *,
    grace_s: float = DEFAULT_GRACE_S,
    progress: Callable[[str], None] | None = None,
    monotonic: Callable[[], float] = time.monotonic,
    threads: int = _DELETERS,
) -> CollectResult:
    """Make one pass over the store. Two passes, the grace apart, remove everything that is to go.

    `progress` is told each id that something is done about. What the store refuses about one id (FORBIDDEN, such as an
    object under a hold) is noted in the result's `kept`, and the others are done.

    Raises: `NotFound` when this is a snapshot, or a place that holds other things only; `StoreError`: the store fails
    as a whole, or is not there.
    """
    result = CollectResult()
    if not is_used(store):  # asking for the clock would write
        return result
    now_s = store.now_s()
    candidates = [
        snapshot_id
        for snapshot_id, group in itertools.groupby(store.list(""), lambda info: info.key.partition("/")[0])
        if _ID.fullmatch(snapshot_id) and _may_need_work(snapshot_id, tuple(group))
    ]
    for snapshot_id in candidates:
        if progress:
            progress(snapshot_id)
        while not _collect_one(
            store, snapshot_id, result, now_s=now_s, grace_s=grace_s, monotonic=monotonic, threads=threads
        ):
            pass  # it took long: look again
    return result


def is_used(store: Store) -> bool:
    """Tell whether a place is a store that was used; false when it is empty. Raises: `NotFound` when it is no store."""
    is_empty, in_a_snapshot = True, False
    for info in store.list(""):  # of a store, one of the first keys says so
        snapshot_id, _, name = info.key.partition("/")
        if info.key == CLOCK_KEY or (_ID.fullmatch(snapshot_id) and (name == MANIFEST or _OURS.fullmatch(name))):
            return True
        is_empty = False
        in_a_snapshot |= info.key == MANIFEST
    if in_a_snapshot:
        raise NotFound(f"{store.url} is a snapshot, not a store; name the store that it is in")
    if not is_empty:
        raise NotFound(f"{store.url} is no store: it holds no snapshot, nor what a push would have left")
    return False


def _collect_one(
    store: Store,
    snapshot_id: str,
    result: CollectResult,
    *,
    now_s: float,
    grace_s: float,
    monotonic: Callable[[], float],
    threads: int,
) -> bool:
    """Look at one id afresh and do what its plan says; False when the time for that ran out before it was done."""
    began_s = monotonic()
    try:
        objects = tuple(store.list(f"{snapshot_id}/"))
        existing = next(
            (read_version(store, info) for info in objects if info.key == manifest_key(snapshot_id)),
            None,
        )
        todo = plan(snapshot_id, objects, existing, now_s=now_s, grace_s=grace_s)
        if todo.tombstone:
            condition = existing.info.generation if existing else Condition.ABSENT
            store.put(manifest_key(snapshot_id), encode_tombstone(todo.tombstone), condition=condition)
            if not existing:
                result.ids_claimed.append(snapshot_id)
        if todo.drop_tombstone and existing:
            store.delete(existing.info.key, generation=existing.info.generation)
            result.ids_finished.append(snapshot_id)
    except StoreError as error:
        match error.store_kind:
            case StoreErrorKind.CHANGED | StoreErrorKind.GONE:
                result.kept[snapshot_id] = "it changed a moment ago"
            case StoreErrorKind.FORBIDDEN:
                result.kept[snapshot_id] = str(error)
            case _:
                raise
        return True
    result.kept.pop(snapshot_id, None)
    if todo.kept:
        result.kept[snapshot_id] = todo.kept
    done = _delete(store, todo.delete, until_s=began_s + _DECISION_LIFE_S, monotonic=monotonic, threads=threads)
    result.objects_deleted += done.count
    result.bytes_deleted += done.size
    if done.refused:
        result.kept[snapshot_id] = str(done.refused)
    return done.all_tried or done.refused is not None


def _may_need_work(snapshot_id: str, objects: Sequence[ObjectInfo]) -> bool:
    """Tell whether an id is other than a snapshot with the packs of its own push, which is what nearly all are."""
    manifest = next((info for info in objects if info.key == f"{snapshot_id}/{MANIFEST}"), None)
    if manifest is None or manifest.size <= _TOMBSTONE_BYTES:
        return True
    prefix = packs_prefix(snapshot_id)
    pushes = {info.key.removeprefix(prefix).partition("/")[0] for info in objects if info.key.startswith(prefix)}
    return len(pushes) > 1


def _fresh_leases(snapshot_id: str, objects: Iterable[ObjectInfo], *, now_s: float) -> tuple[str, ...]:
    prefix = f"{snapshot_id}/lease/"
    return tuple(
        info.key.removeprefix(prefix)
        for info in objects
        if info.key.startswith(prefix) and now_s - info.updated_s < LEASE_FRESH_S
    )


@dataclass(frozen=True, slots=True)
class _Deleted:
    """What became of versions that were to be deleted: `count` of `size` bytes were; the first FORBIDDEN, if any."""

    all_tried: bool
    count: int
    size: int
    refused: StoreError | None


def _delete(
    store: Store, infos: Sequence[ObjectInfo], *, until_s: float, monotonic: Callable[[], float], threads: int
) -> _Deleted:
    """Delete these versions, beginning none after `until_s`. Raises: `StoreError`, but not FORBIDDEN."""

    def delete_one(info: ObjectInfo) -> bool | StoreError | None:
        if monotonic() > until_s:
            return None
        try:
            store.delete(info.key, generation=info.generation)
        except StoreError as error:
            match error.store_kind:
                case StoreErrorKind.GONE | StoreErrorKind.CHANGED:
                    return False
                case StoreErrorKind.FORBIDDEN:
                    return error
            raise
        return True

    if threads <= 1 or len(infos) <= 1:
        deleted = list(map(delete_one, infos))
    else:
        workers = Workers("delete", min(threads, len(infos)))
        try:
            futures = [workers.submit(delete_one, info) for info in infos]
            deleted = [future.result() for future in futures]
        finally:
            workers.stop(timeout_s=10)
    sizes = [info.size for info, outcome in zip(infos, deleted, strict=True) if outcome is True]
    refused = next((outcome for outcome in deleted if isinstance(outcome, StoreError)), None)
    return _Deleted(None not in deleted, len(sizes), sum(sizes), refused)
