"""The head of a manifest: JSON, for what is small and may grow.

Members that a reader doesn't know are ignored, unless `requires` names them as a feature that it must know.
"""

import json

from streamd.errors import Damaged, Refused
from streamd.snapshot import Buffer, strict_json
from streamd.snapshot.chunks import MAX_CHUNK_BYTES, MAX_CHUNKS, MAX_PACK_BYTES, NO_CHUNKS
from streamd.snapshot.memory import PAGE_BYTES, MemoryFile
from streamd.snapshot.model import GvisorInfo, ImageFile, Manifest, Pack
from streamd.snapshot.names import CHECKPOINT, IMAGE_FILES, PAGES, PAGES_META, checked_id

KNOWN_FEATURES: frozenset[str] = frozenset()

MAX_PACKS = 2**16  # 2 TiB in packs of 32 MiB; 110 bytes of JSON each
MAX_PAGE_RANGES = 2**22  # 32 GiB of memory where every second page is zero
MAX_MEMORY_FILES = 2**12
MAX_HEAD_BYTES = 8 << 20
MAX_PACK_ENTRY_BYTES = 116  # what one pack takes in a head, at most
_MAX_SIZE = 2**63 - 1  # off_t
# A mount holds these two files whole in memory, from before the first read until its end. A checkpoint.img has the
# kernel's objects: 0.2 MB for a small container, tens of MB for many thousands of tasks and files. A pages_meta.img has
# some 20 bytes a range of memory: 64 MiB are 3 million ranges.
MAX_FILE_BYTES = {CHECKPOINT: 256 << 20, PAGES_META: 64 << 20, PAGES: _MAX_SIZE}
_LATEST_S = 253402300799  # the last second of the year 9999, the last one that a date can show


def write_head(manifest: Manifest) -> bytes:
    """Write the head of a manifest, always in the same way. Nothing is checked: `read_head` does that."""
    gvisor = manifest.gvisor
    head = {
        "id": manifest.snapshot_id,
        "push_id": manifest.push_id,
        "created_s": float(manifest.created_s),
        "requires": manifest.requires,
        "optional": manifest.optional,
        "chunk_bytes": manifest.chunk_bytes,
        "files": [
            {"name": f.name, "size": f.size, "first_chunk": f.first_chunk, "chunk_count": f.chunk_count}
            for f in manifest.files
        ],
        "packs": [
            {"size": p.size, "crc32c": p.crc32c, "sha256": p.sha256.hex()}
            | ({} if p.snapshot is None else {"snapshot": p.snapshot})
            for p in manifest.packs
        ],
        "gvisor": {
            "runsc_version": gvisor.runsc_version,
            "network": gvisor.network,
            "container_names": gvisor.container_names,
            "memory_files": [{"private": f.private, "range_count": len(f.ranges)} for f in gvisor.memory_files],
            "runsc_sha256": gvisor.runsc_sha256,
            "cpu_features": gvisor.cpu_features,
        },
        "metadata": dict(manifest.metadata),
    }
    return json.dumps(head, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def read_head(head: Buffer) -> tuple[Manifest, list[int]]:
    """Read a head: a manifest without its columns, and how many ranges each of its memory files has.

    Raises: `Damaged`, which names the member; `Refused`: it requires a feature that is unknown here.
    """
    if len(head) > MAX_HEAD_BYTES:
        raise Damaged(f"manifest: head: {len(head)} bytes, more than {MAX_HEAD_BYTES}")
    fields = strict_json.parse(head, "manifest", max_containers=MAX_PACKS + MAX_MEMORY_FILES + 64)
    requires = fields.name_list("requires")
    for feature in requires:  # before anything whose meaning such a feature may change
        if feature not in KNOWN_FEATURES:
            raise Refused(f"manifest: requires: the feature {feature[:80]!r} is unknown here; update streamd")
    files = _read_files(fields)
    chunk_bytes = fields.integer("chunk_bytes", least=PAGE_BYTES, most=MAX_CHUNK_BYTES)
    if chunk_bytes % PAGE_BYTES:
        fields.refuse("chunk_bytes", f"{chunk_bytes} is not a multiple of {PAGE_BYTES}")
    gvisor, range_counts = _read_gvisor(fields.member("gvisor"))
    manifest = Manifest(
        snapshot_id=_id(fields, "id"),
        push_id=_id(fields, "push_id"),
        created_s=fields.number("created_s", least=0, most=_LATEST_S),
        chunk_bytes=chunk_bytes,
        files=files,
        packs=tuple(_read_pack(pack) for pack in fields.members("packs", most=MAX_PACKS)),
        table=NO_CHUNKS,
        gvisor=gvisor,
        metadata=fields.texts("metadata"),
        requires=requires,
        optional=fields.name_list("optional"),
    )
    return manifest, range_counts


def _read_files(fields: strict_json.Fields) -> tuple[ImageFile, ...]:
    files = tuple(
        ImageFile(
            name=file.name("name"),
            size=file.integer("size", most=MAX_FILE_BYTES.get(file.name("name"), _MAX_SIZE)),
            first_chunk=file.integer("first_chunk", most=MAX_CHUNKS),
            chunk_count=file.integer("chunk_count", most=MAX_CHUNKS),
        )
        for file in fields.members("files", most=len(IMAGE_FILES))
    )
    names = tuple(file.name for file in files)
    if names != IMAGE_FILES:  # nothing else is ever served, whatever a manifest says
        fields.refuse("files", f"names are {[name[:80] for name in names]}, not {list(IMAGE_FILES)}")
    first = 0
    for index, file in enumerate(files):
        if file.first_chunk != first:
            fields.refuse(f"files[{index}].first_chunk", f"{file.first_chunk}, but {first} chunks come before")
        first += file.chunk_count
    if first > MAX_CHUNKS:
        fields.refuse("files", f"{first} chunks, more than {MAX_CHUNKS}")
    return files


def _read_pack(pack: strict_json.Fields) -> Pack:
    if not pack.absent("snapshot"):
        pack.refuse("snapshot", "another snapshot's pack, but no feature for that is required")
    return Pack(
        size=pack.integer("size", least=1, most=MAX_PACK_BYTES),
        crc32c=pack.integer("crc32c", most=2**32 - 1),
        sha256=pack.hexadecimal("sha256", size=32),
    )


def _read_gvisor(fields: strict_json.Fields) -> tuple[GvisorInfo, list[int]]:
    files = fields.members("memory_files", most=MAX_MEMORY_FILES)
    range_counts = [file.integer("range_count", most=MAX_PAGE_RANGES) for file in files]
    if sum(range_counts) > MAX_PAGE_RANGES:
        fields.refuse("memory_files", f"{sum(range_counts)} ranges, more than {MAX_PAGE_RANGES}")
    digest = None if fields.absent("runsc_sha256") else fields.hexadecimal("runsc_sha256", size=32).hex()
    gvisor = GvisorInfo(
        runsc_version=fields.name("runsc_version"),
        network=fields.name("network"),
        container_names=fields.name_list("container_names"),
        memory_files=tuple(MemoryFile(file.boolean("private"), ()) for file in files),
        runsc_sha256=digest,
        cpu_features=None if fields.absent("cpu_features") else fields.name_list("cpu_features"),
    )
    return gvisor, range_counts


def _id(fields: strict_json.Fields, name: str) -> str:
    try:
        return checked_id(fields.name(name), name)
    except Refused as error:
        raise Damaged(f"manifest: {error}") from error
