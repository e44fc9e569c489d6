"""`streamd drain`: before a node goes, or before a version that can't take over."""

import time

import click

from streamd.commands.image_facts import ImageFacts, count_text, facts_of, in_use
from streamd.commands.invocation import Invocation, json_option
from streamd.commands.output import print_json, printable
from streamd.daemon.client import DaemonClient
from streamd.errors import StreamdError

_LOOK_S = 0.5


class DrainUndone(StreamdError):
    """The daemon takes new images again: somebody has ended the drain, or the daemon, while this waited."""

    kind = "drain-undone"


@click.command("drain")
@click.option("--wait/--no-wait", default=True, show_default=True, help="Return when no image is in use any more.")
@click.option("--end", is_flag=True, help="Take new images again.")
@json_option
@click.pass_obj
def command(invocation: Invocation, wait: bool, end: bool, as_json: bool) -> None:
    """Let the daemon take no new images, and wait until those that it has are not in use any more.

    Restores that are under way go on to their end, and images that are here can still be asked for; a new one is
    refused (exit code 7). It waits for as long as it takes, and says on stderr for whom; Ctrl-C ends the waiting, not
    the draining. That is ended by --end, or by stopping the daemon; one that systemd restarts goes on draining.

    \b
    Example:
      streamd drain && systemctl stop streamd
    """
    client = DaemonClient(invocation.config().run_directory)
    if end:
        client.end_drain()
        if as_json:
            print_json({"is_draining": False})
        else:
            click.echo("new images are taken again")
        return
    client.drain()
    left = in_use(list(map(facts_of, client.images())))
    told = ""
    while wait and left:
        told = _tell(left, told)
        time.sleep(_LOOK_S)
        if not client.is_draining():
            raise DrainUndone("the daemon takes new images again: somebody has ended the drain, or stopped it")
        left = in_use(list(map(facts_of, client.images())))
    if as_json:
        print_json({"is_draining": True, "images_in_use": [image.id for image in left]})
    else:
        click.echo(f"draining; in use: {count_text(len(left), 'image')}")


def _tell(left: list[ImageFacts], told: str) -> str:
    """Say who is waited for, when that has changed; give what was said."""
    text = ", ".join(f"{printable(image.name)} ({_users(image)})" for image in left)
    if text != told:
        click.echo(f"{len(left)} in use: {text}", err=True)
    return text


def _users(image: ImageFacts) -> str:
    counts = [(image.leases, "lease"), (image.openers, "open file")]
    users = [count_text(count, what) for count, what in counts if count]
    return ", ".join(users) or image.state
