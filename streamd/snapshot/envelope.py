"""The envelope round everything that we store at a snapshot's `manifest` key.

    8 bytes magic | u32 LE format version | payload | 32 bytes SHA-256 of all before

These three are the same in every version to come. So a damaged object (its SHA-256 is wrong) and one that a newer
streamd wrote (its SHA-256 is right, its version unknown) are told apart before anything else of it is looked at.
"""

import hashlib
import struct
from collections.abc import Iterable

from streamd.errors import Damaged, Refused
from streamd.snapshot import Buffer

DIGEST_BYTES = 32
_START = struct.Struct("<8sI")


def seal(magic: bytes, version: int, payload: Iterable[Buffer]) -> bytes:
    """Join the pieces of `payload` in an envelope; `magic` is 8 bytes."""
    before = b"".join((_START.pack(magic, version), *payload))
    return before + hashlib.sha256(before).digest()


def unseal(data: Buffer, *, magic: bytes, version: int, what: str) -> memoryview:
    """Give the payload of an envelope that has this magic and version; `what` names it in messages.

    Raises: `Damaged` when it is no such envelope or not as it was sealed (one bit changed, cut, longer); `Refused` when
        it is whole and of another version.
    """
    view = memoryview(data).cast("B")
    if len(view) < _START.size + DIGEST_BYTES:
        raise Damaged(f"{what}: {len(view)} bytes are too short for one")
    found_magic, found_version = _START.unpack_from(view)
    if found_magic != magic:
        # What it starts with instead isn't told: it may be any file's, and the message go to whom may not read that.
        raise Damaged(f"{what}: it does not start with {magic!r}")
    if sealed_digest(view) != view[-DIGEST_BYTES:]:
        raise Damaged(f"{what}: its SHA-256 does not match: it was changed or cut after it was written")
    if found_version != version:
        raise Refused(
            f"{what}: format version {found_version} is unknown here (this streamd knows {version}); update it"
        )
    return view[_START.size : -DIGEST_BYTES]


def sealed_digest(data: Buffer) -> bytes:
    """Compute the SHA-256 (32 bytes) that an envelope must end with; data shorter than that gives that of nothing."""
    view = memoryview(data).cast("B")
    return hashlib.sha256(view[: max(0, len(view) - DIGEST_BYTES)]).digest()
