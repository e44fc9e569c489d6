"""`streamd ls`: what is in a store."""

import click

from streamd.commands.invocation import json_option, opened_store, store_timeout_option
from streamd.commands.output import print_json, print_table, ratio_text, time_text
from streamd.config import size_text


@click.command("ls")
@click.argument("store_url", metavar="STORE_URL")
@store_timeout_option
@json_option
def command(store_url: str, store_timeout_s: float, as_json: bool) -> None:
    """List the snapshots of a store, also those that are damaged or being removed.

    \b
    Example:
      streamd ls gs://bucket/snapshots
    """
    from streamd.store.catalog import CatalogEntry, list_snapshots

    def record(entry: CatalogEntry) -> dict[str, object]:
        found: dict[str, object] = {"id": entry.snapshot_id, "state": entry.state.value}
        if entry.manifest is None:
            return found | {"reason": entry.reason}
        manifest = entry.manifest
        return found | {
            "created_s": manifest.created_s,
            "image_bytes": sum(file.size for file in manifest.files),
            "stored_bytes": sum(pack.size for pack in manifest.packs),
            "containers": list(manifest.gvisor.container_names),
            "metadata": dict(manifest.metadata),
        }

    with opened_store(store_url, timeout_s=store_timeout_s) as store:
        if as_json:
            print_json({"store": store_url, "snapshots": [record(entry) for entry in list_snapshots(store)]})
            return
        rows = []
        for entry in list_snapshots(store):
            if entry.manifest is None:
                rows.append([entry.snapshot_id, entry.state.value, "", "", "", entry.reason])
                continue
            image = sum(file.size for file in entry.manifest.files)
            stored = sum(pack.size for pack in entry.manifest.packs)
            facts = [time_text(entry.manifest.created_s), size_text(image), ratio_text(stored, image)]
            rows.append([entry.snapshot_id, entry.state.value, *facts, ""])
    if rows:
        print_table(["ID", "STATE", "CREATED", "IMAGE", "STORED", ""], rows)
    else:
        click.echo(f"no snapshots in {store_url}", err=True)
