"""What a worker needs to take over a snapshot while its store is away: the pinned snapshot, as bytes.

The next worker must serve the very versions that the last one did, whatever has happened in the store since; so it is
not asked again. A little JSON (versions of manifest, packs and learned order), then the stored manifest.
"""

import json
import struct
from dataclasses import asdict

from streamd.errors import Damaged
from streamd.snapshot.manifest import MAX_MANIFEST_BYTES, decode, manifest_digest
from streamd.store.catalog import OBJECTS_MAX, Pinned
from streamd.store.port import ObjectInfo

_HEAD = struct.Struct("<I")
# A version is some 200 bytes of JSON.
MAX_BYTES = MAX_MANIFEST_BYTES + 300 * OBJECTS_MAX


def encode_pinned(pinned: Pinned) -> bytes:
    """Write a pinned snapshot down."""
    versions = {
        "manifest": asdict(pinned.manifest_info),
        "packs": [asdict(pack) for pack in pinned.packs],
        "trace": asdict(pinned.trace) if pinned.trace else None,
    }
    head = json.dumps(versions).encode()
    return b"".join((_HEAD.pack(len(head)), head, pinned.data))


def decode_pinned(data: bytes) -> Pinned:
    """Read it. Raises: `Damaged`."""
    try:
        (size,) = _HEAD.unpack_from(data)
        versions = json.loads(data[_HEAD.size : _HEAD.size + size])
        manifest_info = ObjectInfo(**versions["manifest"])
        packs = tuple(ObjectInfo(**pack) for pack in versions["packs"])
        trace = ObjectInfo(**versions["trace"]) if versions["trace"] else None
    except (struct.error, ValueError, TypeError, LookupError) as error:
        raise Damaged(f"what the last worker left of its snapshot can't be read: {error}") from error
    stored = data[_HEAD.size + size :]
    manifest = decode(stored)
    if len(packs) != len(manifest.packs):
        raise Damaged(f"what the last worker left names {len(packs)} packs, the manifest {len(manifest.packs)}")
    return Pinned(
        manifest=manifest,
        data=stored,
        digest=manifest_digest(stored),
        manifest_info=manifest_info,
        packs=packs,
        trace=trace,
    )
