"""`snapagent rm`: remove a snapshot, object and data."""

import json
from pathlib import Path
from urllib.parse import quote

import click

from agent.commands.asking import ask
from agent.commands.inputs import say


@click.command("rm")
@click.argument("snapshot", metavar="SNAPSHOT")
@click.option("-n", "--namespace", default="default", show_default=True, help="The snapshot's namespace.")
@click.option("--config", "config_path", type=click.Path(path_type=Path), help="Settings [/etc/snapagent.toml].")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout, errors too.")
def command(snapshot: str, namespace: str, config_path: Path | None, as_json: bool) -> None:
    """Remove a snapshot, whatever its policy says: first its data from the store, then its object.

    SNAPSHOT is the PodSnapshot's name. No pod is restored from it from now on; pods that load from it go on. The agent
    does the rest, and goes on with it until the store has let go of the data: `snapagent status` shows the end of it.
    `streamd rm` would leave an object without data.

    \b
    Example:
      snapagent rm 6f1d8a52-4a5e-4a64-9c0e-3c2b7c7c9f10 -n shop
    """
    found = ask(config_path, "DELETE", f"/v1/snapshots/{quote(namespace, safe='')}/{quote(snapshot, safe='')}")
    if as_json:
        click.echo(json.dumps(found))
    else:
        say(f"snapshot {namespace}/{snapshot} is being removed")
