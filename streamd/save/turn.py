"""Collection where many may begin it, such as the agents of all nodes: of those that find it due, one makes the pass.

A pass may run beside others (`lifecycle`), so this saves work and guards nothing. Whoever begins notes it in the store,
in the place of the note that was read; so of two that read the same note one has the turn. A pass that dies leaves its
note, and the next one is due when that is old. Times are the store's.
"""

import os
from collections.abc import Callable

from streamd.errors import StoreError, StoreErrorKind
from streamd.save.lifecycle import DEFAULT_GRACE_S, CollectResult, collect, is_used
from streamd.store.port import Condition, ObjectInfo, Store

TURN_KEY = "_collected"  # no snapshot id begins with an underscore


def collect_in_turn(
    store: Store, *, every_s: float, grace_s: float = DEFAULT_GRACE_S, progress: Callable[[str], None] | None = None
) -> CollectResult | None:
    """Make a pass, as `collect`; None when one was begun within `every_s`, whoever's. Raises: as `collect`."""
    if is_used(store) and not _takes_turn(store, every_s):
        return None
    return collect(store, grace_s=grace_s, progress=progress)


def _takes_turn(store: Store, every_s: float) -> bool:
    try:
        last: ObjectInfo | None = store.head(TURN_KEY)
    except StoreError as error:
        if error.store_kind is not StoreErrorKind.GONE:
            raise
        last = None
    if last is not None and store.now_s() - last.updated_s < every_s:
        return False
    try:
        # Bytes of its own: a store that is asked again after a lost answer must not take another's note for ours.
        store.put(TURN_KEY, os.urandom(16), condition=last.generation if last else Condition.ABSENT)
    except StoreError as error:
        if error.store_kind in (StoreErrorKind.CHANGED, StoreErrorKind.GONE):
            return False
        raise
    return True
