"""`streamd gc`: remove leftovers from a store."""

from dataclasses import asdict

import click

from streamd.commands.invocation import duration, json_option, opened_store, store_timeout_option
from streamd.commands.output import print_json, printable
from streamd.config import size_text


@click.command("gc")
@click.argument("store_url", metavar="STORE_URL")
@click.option(
    "--grace",
    "grace_s",
    metavar="DURATION",
    callback=duration,
    default="24h",
    show_default=True,
    help="Leftovers younger than this, by the store's clock, stay: a push may be at work on them.",
)
@store_timeout_option
@json_option
def command(store_url: str, grace_s: float, store_timeout_s: float, as_json: bool) -> None:
    """Remove what interrupted pushes and removed snapshots left in a store, and nothing else.

    It may run at any time, beside pushes and restores, from anywhere; run it once a day where no snapagent does.

    \b
    Example:
      streamd gc gs://bucket/snapshots
    """
    from streamd.save.lifecycle import collect

    with opened_store(store_url, timeout_s=store_timeout_s) as store:
        result = collect(store, grace_s=grace_s)
    if as_json:
        print_json(asdict(result))
        return
    click.echo(f"{result.objects_deleted} objects deleted, {size_text(result.bytes_deleted)}")
    for snapshot_id, why in result.kept.items():
        click.echo(f"{printable(snapshot_id)} stays for now: {printable(why)}")
