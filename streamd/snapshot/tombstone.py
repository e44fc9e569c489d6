"""Tombstones: in a manifest's place, they say that this id is being removed, so that no push can commit there."""

import json
from dataclasses import dataclass

from streamd.errors import Damaged, Refused
from streamd.snapshot import Buffer, envelope, strict_json
from streamd.snapshot.names import checked_id

MAGIC = b"PODSNAPT"
VERSION = 1
REASONS = ("gc", "rm")


@dataclass(frozen=True, slots=True)
class Tombstone:
    """Who removes: `gc` an id that never had a manifest, or `rm` a snapshot, whose push id is then kept."""

    reason: str
    push_id: str | None = None


def encode_tombstone(tombstone: Tombstone) -> bytes:
    """Give the object to write at the manifest's key. The same tombstone always gives the same bytes."""
    if tombstone.reason not in REASONS:
        raise ValueError(f"tombstone for {tombstone.reason!r}")
    if tombstone.push_id is not None:
        checked_id(tombstone.push_id, "push id")
    payload = json.dumps({"push_id": tombstone.push_id, "reason": tombstone.reason}, separators=(",", ":"))
    return envelope.seal(MAGIC, VERSION, (payload.encode(),))


def decode_tombstone(data: Buffer) -> Tombstone | None:
    """Read the object at a manifest's key, if it is a tombstone; None if it is something else, such as a manifest.

    Raises: `Damaged`: it starts as a tombstone, but is not as it was written. `Refused`: a version unknown here.
    """
    if bytes(memoryview(data).cast("B")[: len(MAGIC)]) != MAGIC:
        return None
    payload = envelope.unseal(data, magic=MAGIC, version=VERSION, what="tombstone")
    fields = strict_json.parse(payload, "tombstone", max_containers=16)
    reason = fields.name("reason")
    if reason not in REASONS:
        fields.refuse("reason", f"{reason[:80]!r} is unknown")
    if fields.absent("push_id"):
        return Tombstone(reason)
    try:
        return Tombstone(reason, checked_id(fields.name("push_id"), "push id"))
    except Refused as error:
        raise Damaged(f"tombstone: {error}") from error
