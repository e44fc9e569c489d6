"""The lease of a mount in the store: renewed while the mount lives, so that `rm` and `gc` elsewhere know of it.

A courtesy, never a condition: a node that may only read a bucket mounts all the same, and says so once.
"""

import hashlib
import json
import os
import socket

import structlog
import trio

from streamd.snapshot.names import lease_key
from streamd.store.port import Condition, ObjectInfo, Store

log = structlog.get_logger()

# Well within the hour for which a lease counts as fresh (`save/lifecycle.py`), so that a few failures don't end it.
RENEW_S = 600.0
_GIVE_BACK_S = 2.0


def holder_name(mountpoint: str) -> str:
    """Name a mount on this host: two mounts of one snapshot must not end each other's lease."""
    return f"{socket.gethostname()}-{hashlib.sha256(os.fsencode(mountpoint)).hexdigest()[:8]}"


async def hold_lease(store: Store, snapshot_id: str, mountpoint: str) -> None:
    """Hold the lease until cancelled, then give it back, within a bound."""
    key = lease_key(snapshot_id, holder_name(mountpoint))
    content = json.dumps({"mountpoint": mountpoint, "host": socket.gethostname()}).encode()
    held: ObjectInfo | None = None
    reported = False
    try:
        while True:
            try:
                held = await trio.to_thread.run_sync(
                    lambda: store.put(key, content, condition=Condition.ANY), abandon_on_cancel=True
                )
            except Exception as error:  # a courtesy must never end a mount
                level = log.debug if reported else log.info
                level("no lease in the store: an rm elsewhere can't know of this mount", reason=str(error))
                reported = True
            await trio.sleep(RENEW_S)
    finally:
        if held is not None:
            generation = held.generation
            with trio.move_on_after(_GIVE_BACK_S, shield=True):
                try:
                    await trio.to_thread.run_sync(
                        lambda: store.delete(key, generation=generation), abandon_on_cancel=True
                    )
                except Exception as error:
                    log.debug("lease was not given back", reason=str(error))
