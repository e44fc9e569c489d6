"""The port: what streamd needs of an object store.

Calls block and may be made from any thread, at the same time. No implementation retries: one wrapper does
(`store/retry.py` for commands, `serve/` for reads). Every wait has an explicit time-out. Every failure is a
`StoreError`.

Keys are relative to the store's URL: segments of 1 to 255 bytes, joined by `/`, no segment beginning with a dot (so
neither `.` nor `..`, and stores have such names to themselves). A key that isn't like that is a bug, hence
`ValueError`; stored objects with such names are not listed. A *generation* names one written version of an object; it
is an opaque string, compared only for equality.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview

CLOCK_KEY = "_clock"  # the probe object of `Store.now_s`; no snapshot id begins with an underscore
_SEGMENT_BYTES = 255
_KEY_BYTES = 1024  # Google Cloud Storage's limit, prefix included


def is_key(text: str) -> bool:
    """Tell whether `text` may be a key."""
    return len(text.encode("utf-8", "surrogatepass")) <= _KEY_BYTES and all(map(_is_segment, text.split("/")))


def _is_segment(text: str) -> bool:
    return 0 < len(text.encode("utf-8", "surrogatepass")) <= _SEGMENT_BYTES and text[0] != "." and text.isprintable()


def checked_key(text: str) -> str:
    """Give `text` back if it may be a key. Raises: `ValueError`."""
    if not is_key(text):
        raise ValueError(f"{text[:80]!r} is not a key")
    return text


class Condition(Enum):
    """When a put may take place, besides "the object has exactly this generation" (a string)."""

    ABSENT = "absent"
    ANY = "any"


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One version of one object, as the store lists it.

    `updated_s` is seconds since the epoch by the *store's* clock. `crc32c` is None where the store doesn't keep one
    (directories): `Store.crc32c` then reads the object.
    """

    key: str
    size: int
    generation: str
    crc32c: int | None
    updated_s: float


class Store(Protocol):
    """An object store, rooted at `url`."""

    @property
    def url(self) -> str:
        """The address that was opened, without a trailing slash."""
        ...

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """X"""
        ...

    def head(self, key: str) -> ObjectInfo:
        """Describe the current version. Raises: GONE."""
        ...

    def read(self, key: str, *, generation: str, start: int, end: int) -> Iterator[Buffer]:
        """Stream bytes [start, end) of one generation, in pieces, as they arrive; a piece's memory is the caller's own.

        The iterator may be closed early and then gives its connection back. It yields at most `end - start` bytes; a
        body that ends early raises TRANSIENT, a longer one is cut. Nothing is asked of the store before the first piece
        is asked for, and nothing at all when `start == end`. A range must lie inside the object. Raises: GONE when the
        object, or that generation of it, isn't there; CHANGED where the store can tell that another generation took its
        place.
        """
        ...

    def put(self, key: str, data: Buffer, *, condition: str | Condition) -> ObjectInfo:
        """Write an object whole, atomically and durably; its bytes are checked by the store (crc32c).

        `condition` is ABSENT, ANY, or the generation that it must replace. Raises: CHANGED when the condition fails.
        """
        ...

    def delete(self, key: str, *, generation: str) -> None:
        """Delete that generation. Raises: GONE when nothing is there, CHANGED when another generation is."""
        ...

    def crc32c(self, info: ObjectInfo) -> int:
        """Give the crc32c of a version, from `info` if it is there, else by reading it. Raises: GONE, CHANGED."""
        ...

    def now_s(self) -> float:
        """Read the store's clock (seconds since the epoch), by writing a small probe object at key `_clock`."""
        ...

    def close(self) -> None:
        """Give up connections and threads; calls under way may fail."""
        ...
