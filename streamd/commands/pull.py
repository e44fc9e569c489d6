"""`streamd pull`: copy a snapshot to a directory."""

from dataclasses import asdict
from pathlib import Path

import click

from streamd.commands.invocation import json_option, opened_store, store_timeout_option
from streamd.commands.output import print_json, progress_bar
from streamd.config import size_text


@click.command("pull")
@click.argument("snapshot_url", metavar="SNAPSHOT_URL")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@store_timeout_option
@json_option
def command(snapshot_url: str, directory: Path, store_timeout_s: float, as_json: bool) -> None:
    """Copy a snapshot to the directory DIR, every byte verified.

    The result is what `runsc restore --image-path DIR` reads, byte for byte what was pushed.

    \b
    Example:
      streamd pull gs://bucket/snapshots/web-1 /var/lib/checkpoints/web-1
    """
    from streamd.save.pull import pull
    from streamd.store.opening import split_snapshot_url

    store_url, snapshot_id = split_snapshot_url(snapshot_url)
    with opened_store(store_url, timeout_s=store_timeout_s) as store, progress_bar("pull") as report:
        result = pull(
            store,
            snapshot_id,
            directory,
            progress=lambda progress: report(progress.done_bytes, progress.total_bytes, ""),
        )
    if as_json:
        print_json(asdict(result) | {"directory": str(directory)})
    else:
        click.echo(f"{snapshot_id} copied to {directory}: {size_text(result.image_bytes)}, verified")
