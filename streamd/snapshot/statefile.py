"""The head of gVisor's checkpoint.img (gVisor pkg/state/statefile/statefile.go): what the image says of itself.

    8 bytes magic "gVisorSF" | u64 big-endian length, 16 MiB at most | JSON: an object of texts | the object graph

Of the container specs in it, which hold the processes' environments, only the container names are kept. gVisor doesn't
protect the head against changes.
"""

import struct
from dataclasses import dataclass

from streamd.errors import Damaged
from streamd.snapshot import Buffer, strict_json

MAGIC = b"gVisorSF"
PREFIX_BYTES = 16
_MAX_METADATA_BYTES = 16 << 20  # maxMetadataSize there
MAX_HEAD_BYTES = PREFIX_BYTES + _MAX_METADATA_BYTES
# Brackets in the specs' text count too: a spec has a few hundred.
_MAX_CONTAINERS = 2**20


@dataclass(frozen=True, slots=True)
class StatefileHead:
    """What a checkpoint.img says of itself; a key that is missing has the value that gVisor then takes.

    `runsc_version` is "" when missing. `timestamp` is text in Go's format, for people. `container_names` ascend.
    """

    runsc_version: str
    compression: str
    network: str
    container_count: int
    container_names: tuple[str, ...]
    timestamp: str

    @property
    def compressed(self) -> bool:
        """Say whether gVisor compressed the image: then all of it, memory too, is in this one file."""
        return self.compression != "none"


def head_bytes(prefix: Buffer) -> int:
    """Say how many bytes from the file's start are the head, given its first `PREFIX_BYTES` (more do no harm).

    Raises: `Damaged`: empty, too short, another magic, a length beyond gVisor's limit.
    """
    if len(prefix) < PREFIX_BYTES:
        raise Damaged(f"checkpoint.img: {'empty' if not len(prefix) else 'too short for its head'}")
    magic, length = struct.unpack_from(">8sQ", prefix)
    if magic != MAGIC:
        raise Damaged(f"checkpoint.img: magic: it starts with {magic!r}, not {MAGIC!r}: no gVisor checkpoint")
    if length > _MAX_METADATA_BYTES:
        raise Damaged(f"checkpoint.img: metadata length: {length} bytes, more than gVisor's {_MAX_METADATA_BYTES}")
    return PREFIX_BYTES + int(length)


def decode_head(data: Buffer) -> StatefileHead:
    """Read the head from the file's first bytes: all of the head, and maybe more.

    Raises: `Damaged`, which names the key.
    """
    end = head_bytes(data)
    if len(data) < end:
        raise Damaged(f"checkpoint.img: cut: {len(data)} bytes of the head's {end}")
    fields = strict_json.parse(memoryview(data)[PREFIX_BYTES:end], "checkpoint.img", max_containers=_MAX_CONTAINERS)
    specs = strict_json.parse(
        fields.text("container_specs").encode("utf-8", "replace"),
        "checkpoint.img: container_specs",
        max_containers=_MAX_CONTAINERS,
    )
    count = fields.name("container_count")
    if not count.isascii() or not count.isdecimal() or len(count) > 9:
        fields.refuse("container_count", f"{count[:80]!r} is no count")
    return StatefileHead(
        runsc_version=fields.name("runsc_version", default=""),
        compression=fields.name("compression", default="none"),
        network=fields.name("network", default="sandbox"),
        container_count=int(count),
        container_names=tuple(sorted(specs.names())),
        timestamp=fields.name("timestamp", default=""),
    )
