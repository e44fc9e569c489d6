"""`streamd rm`: remove a snapshot."""

from dataclasses import asdict

import click

from streamd.commands.invocation import json_option, opened_store, store_timeout_option
from streamd.commands.output import print_json, printable
from streamd.config import size_text


@click.command("rm")
@click.argument("snapshot_url", metavar="SNAPSHOT_URL")
@click.option("--now", is_flag=True, help="Delete its data at once, even while nodes restore from it: they fail.")
@store_timeout_option
@json_option
def command(snapshot_url: str, now: bool, store_timeout_s: float, as_json: bool) -> None:
    """Remove a snapshot.

    From now on it can't be mounted. Its data stays for an hour, for restores that are under way, and goes with a later
    `streamd gc`; with --now it goes at once.

    \b
    Example:
      streamd rm gs://bucket/snapshots/web-1
    """
    from streamd.save.lifecycle import remove
    from streamd.store.opening import split_snapshot_url

    store_url, snapshot_id = split_snapshot_url(snapshot_url)
    with opened_store(store_url, timeout_s=store_timeout_s) as store:
        result = remove(store, snapshot_id, now=now)
    if as_json:
        print_json(asdict(result))
        return
    data = f"{size_text(result.bytes_deleted)} deleted" if now else "its data goes with a later `streamd gc`"
    click.echo(f"{snapshot_id} removed; {data}")
    if result.leases:
        what = "it was being read, and those restores fail, by" if now else "it is still being read by"
        click.echo(f"{what}: {', '.join(map(printable, result.leases))}", err=True)
