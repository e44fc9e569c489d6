"""Names: which files an image has, and which objects a snapshot has.

Nothing that comes from a store or from a caller becomes a path or a key unless it passed through here.
"""

import re

from streamd.errors import Refused

CHECKPOINT = "checkpoint.img"
PAGES_META = "pages_meta.img"
PAGES = "pages.img"
# The order in which chunks are numbered and packed: what a restore needs before anything else comes first.
IMAGE_FILES = (CHECKPOINT, PAGES_META, PAGES)

MANIFEST = "manifest"
TRACE = "trace"

_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")


def checked_id(text: str, what: str = "snapshot id") -> str:
    """Give `text` back if it may be an id. Raises: `Refused`."""
    if not _ID.fullmatch(text):
        raise Refused(f"{what} {text[:80]!r} must match [a-z0-9][a-z0-9-]{{0,62}}")
    return text


def manifest_key(snapshot_id: str) -> str:
    """Key of the manifest, whose existence is the snapshot's."""
    return f"{checked_id(snapshot_id)}/{MANIFEST}"


def trace_key(snapshot_id: str) -> str:
    """Key of the learned order, which a snapshot may have."""
    return f"{checked_id(snapshot_id)}/{TRACE}"


def packs_prefix(snapshot_id: str, push_id: str = "") -> str:
    """Prefix of all packs of a snapshot, or of one push of it; ends in a slash."""
    base = f"{checked_id(snapshot_id)}/packs/"
    return f"{base}{checked_id(push_id, 'push id')}/" if push_id else base


def pack_key(snapshot_id: str, push_id: str, index: int) -> str:
    """Key of the pack with that index."""
    return f"{packs_prefix(snapshot_id, push_id)}{index:08d}"


def lease_key(snapshot_id: str, holder: str) -> str:
    """Key of the object that says who reads a snapshot right now; `holder` is cut to what a key may hold."""
    name = re.sub(r"[^a-z0-9.-]+", "-", holder.lower()).strip(".-")[:100] or "node"
    return f"{checked_id(snapshot_id)}/lease/{name}"
