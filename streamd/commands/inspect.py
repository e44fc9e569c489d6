"""`streamd inspect`: what one snapshot holds."""

from typing import TYPE_CHECKING

import click
import numpy as np

from streamd.commands.invocation import json_option, opened_store, store_timeout_option
from streamd.commands.output import print_facts, print_json, print_table, ratio_text, time_text
from streamd.config import size_text

if TYPE_CHECKING:
    from streamd.store.catalog import Pinned

# gVisor pkg/sentry/usage/memory.go
_KINDS = ("system", "anonymous", "page cache", "tmpfs", "ramdiskfs", "mapped")


def describe(pinned: "Pinned") -> dict[str, object]:
    """Describe a snapshot from its manifest, in what JSON can hold; sizes in bytes."""
    from streamd.snapshot.manifest import Codec

    manifest, table = pinned.manifest, pinned.manifest.table
    zero = table.codec == Codec.ZERO
    files = []
    for file in manifest.files:
        rows = slice(file.first_chunk, file.first_chunk + file.chunk_count)
        files.append(
            {
                "name": file.name,
                "bytes": file.size,
                "stored_bytes": int(table.frame_bytes[rows].sum(dtype=np.uint64)),
                "zero_bytes": int(table.length[rows][zero[rows]].sum(dtype=np.uint64)),
                "chunks": file.chunk_count,
            }
        )
    gvisor = manifest.gvisor
    memory = []
    for memory_file in gvisor.memory_files:
        kinds: dict[str, int] = {}
        for page_range in memory_file.ranges:
            name = _KINDS[page_range.kind] if page_range.kind < len(_KINDS) else str(page_range.kind)
            kinds[name] = kinds.get(name, 0) + page_range.end - page_range.start
        memory.append({"private": memory_file.private, "ranges": len(memory_file.ranges), "bytes_by_kind": kinds})
    return {
        "id": manifest.snapshot_id,
        "digest": pinned.digest.hex(),
        "push_id": manifest.push_id,
        "created_s": manifest.created_s,
        "image_bytes": sum(file.size for file in manifest.files),
        "stored_bytes": sum(pack.size for pack in manifest.packs),
        "zero_bytes": int(table.length[zero].sum(dtype=np.uint64)),
        "files": files,
        "chunk_bytes": manifest.chunk_bytes,
        "chunks": {codec.name.lower(): int((table.codec == codec).sum()) for codec in Codec},
        "packs": len(manifest.packs),
        "gvisor": {
            "runsc_version": gvisor.runsc_version,
            "runsc_sha256": gvisor.runsc_sha256,
            "cpu_features": None if gvisor.cpu_features is None else list(gvisor.cpu_features),
            "network": gvisor.network,
            "containers": list(gvisor.container_names),
            "memory_files": memory,
        },
        "metadata": dict(manifest.metadata),
        "requires": list(manifest.requires),
        "optional": list(manifest.optional),
    }


@click.command("inspect")
@click.argument("snapshot_url", metavar="SNAPSHOT_URL")
@store_timeout_option
@json_option
def command(snapshot_url: str, store_timeout_s: float, as_json: bool) -> None:
    """Show what a snapshot holds: files, sizes, chunks and packs, gVisor's own head, what it was made on.

    \b
    Example:
      streamd inspect gs://bucket/snapshots/web-1 --json | jq .gvisor
    """
    from streamd.store.catalog import open_snapshot
    from streamd.store.opening import split_snapshot_url

    store_url, snapshot_id = split_snapshot_url(snapshot_url)
    with opened_store(store_url, timeout_s=store_timeout_s) as store:
        pinned = open_snapshot(store, snapshot_id)
    if as_json:
        print_json(describe(pinned))
    else:
        _show(pinned)


def _show(pinned: "Pinned") -> None:
    from streamd.snapshot.manifest import Codec

    manifest, gvisor, table = pinned.manifest, pinned.manifest.gvisor, pinned.manifest.table
    image = sum(file.size for file in manifest.files)
    stored = sum(pack.size for pack in manifest.packs)
    zero = int(table.length[table.codec == Codec.ZERO].sum(dtype=np.uint64))
    counts = ", ".join(f"{int((table.codec == codec).sum())} {codec.name.lower()}" for codec in Codec)
    features = "not recorded" if gvisor.cpu_features is None else f"{len(gvisor.cpu_features)} (--json lists them)"
    committed = [sum(page.end - page.start for page in file.ranges) for file in gvisor.memory_files]
    memory = ", ".join(
        f"{'private' if file.private else 'main'} {size_text(size)} in {len(file.ranges)} ranges"
        for file, size in zip(gvisor.memory_files, committed, strict=True)
    )
    print_facts(
        [
            ("snapshot", manifest.snapshot_id),
            ("digest", pinned.digest.hex()),
            ("push", manifest.push_id),
            ("created", time_text(manifest.created_s)),
            ("image", f"{size_text(image)}, {ratio_text(zero, image)} zero chunks"),
            ("stored", f"{size_text(stored)} in {len(manifest.packs)} packs, {ratio_text(stored, image)} of the image"),
            ("chunks", f"{len(table)} of at most {size_text(manifest.chunk_bytes)}: {counts}"),
            ("runsc", gvisor.runsc_version),
            ("runsc sha256", gvisor.runsc_sha256 or "not recorded"),
            ("CPU features", features),
            ("network", gvisor.network),
            ("containers", ", ".join(gvisor.container_names)),
            ("memory files", memory),
            *((f"metadata {key}", value) for key, value in sorted(manifest.metadata.items())),
        ]
    )
    click.echo()
    print_table(
        ["FILE", "BYTES", "STORED BYTES", "CHUNKS"],
        [
            [
                file.name,
                file.size,
                int(table.frame_bytes[file.first_chunk : file.first_chunk + file.chunk_count].sum(dtype=np.uint64)),
                file.chunk_count,
            ]
            for file in manifest.files
        ],
    )
