"""A snapshot as values: the parts of a manifest besides the chunk table and the memory files."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from streamd.snapshot.chunks import ChunkTable
from streamd.snapshot.memory import MemoryFile


@dataclass(frozen=True, slots=True)
class ImageFile:
    """A file of the image: `chunk_count` chunks from `first_chunk` on hold its `size` bytes."""

    name: str
    size: int
    first_chunk: int
    chunk_count: int


@dataclass(frozen=True, slots=True)
class Pack:
    """An object that frames are stored in; its key follows from its index (`names.pack_key`).

    `snapshot` is the id of another snapshot that owns it, else None. Format 1 keeps room for that; a manifest that uses
    it must require a feature that no streamd knows so far.
    """

    size: int
    crc32c: int
    sha256: bytes
    snapshot: str | None = None


@dataclass(frozen=True, slots=True)
class GvisorInfo:
    """What gVisor itself says of the image, and what it was made on where `push` was told. No environment, no spec.

    `runsc_sha256` is 64 digits of lower-case hexadecimal.
    """

    runsc_version: str
    network: str
    container_names: tuple[str, ...]
    memory_files: tuple[MemoryFile, ...]
    runsc_sha256: str | None = None
    cpu_features: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Manifest:
    """A snapshot, whole.

    `created_s` is seconds since the epoch by the pusher's clock. No chunk is longer than `chunk_bytes`.
    """

    snapshot_id: str
    push_id: str
    created_s: float
    chunk_bytes: int
    files: tuple[ImageFile, ...]
    packs: tuple[Pack, ...]
    table: ChunkTable
    gvisor: GvisorInfo
    metadata: Mapping[str, str] = field(default_factory=dict)
    requires: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
