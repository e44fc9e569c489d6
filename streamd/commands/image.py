"""`streamd image`: ask the node's daemon for images, see who uses them, end them."""

import os
import re
import select
import shlex
import time
from collections.abc import Callable
from contextlib import ExitStack

import click

from streamd.commands.image_facts import LIST_HEADER, SERVES, facts_of, list_row
from streamd.commands.invocation import Invocation, duration, json_option
from streamd.commands.output import flat_facts, print_facts, print_json, print_table, printable
from streamd.config import Prefetch
from streamd.daemon.client import Answer, DaemonClient, Lease
from streamd.daemon.relay import relayed
from streamd.errors import NotFound, Refused, StreamdError

_ID = re.compile(r"[0-9a-f]{32}", re.ASCII)
# What people type, or copy from a table that has no room for more.
_BEGINNING = re.compile(r"[0-9a-f]{4,31}", re.ASCII)
_TENANT = re.compile(r"[\x21-\x7e]{0,128}", re.ASCII)  # `daemon/api/models.py`
# The daemon waits no longer in one question.
_ONE_WAIT_S = 60.0


class StillPreparing(StreamdError):
    """An image was not ready in time; the daemon goes on with it."""

    kind = "preparing"

    def __init__(self, image_id: str, timeout_s: float) -> None:
        super().__init__(
            f"image {image_id} is not ready after {timeout_s:g} s; the daemon goes on (streamd image show {image_id})"
        )
        self.image = image_id


class LeaseEnded(StreamdError):
    """The daemon has ended a lease, or has ended itself."""

    kind = "lease-ended"


def _tenant(_context: click.Context, parameter: click.Parameter, value: str) -> str:
    """Read a tenant's name as the daemon takes it (a click callback)."""
    if not _TENANT.fullmatch(value):
        raise click.BadParameter(
            "a tenant's name has at most 128 letters, digits and punctuation of ASCII, and no white space",
            param=parameter,
        )
    return value


@click.group("image")
def command() -> None:
    """Ask the daemon of this node for images, list them and end them.

    An image is a snapshot of a tenant on this node: one mount and one fetch, however many pods restore it. It ends when
    nobody has held a lease on it or had one of its files open for a while. An ID may be shortened to its beginning.

    \b
    Example:
      streamd image request gs://bucket/snapshots/web-1
      streamd image ls
    """


@command.command("request")
@click.argument("snapshot_url", metavar="SNAPSHOT_URL")
@click.option("--tenant", default="", callback=_tenant, help="Whose it is; tenants share no image and no cached bytes.")
@click.option(
    "--prefetch",
    type=click.Choice([mode.value for mode in Prefetch]),
    default=Prefetch.ALL.value,
    show_default=True,
    help="What is fetched before it is read: nothing; what earlier restores waited for; or that, and then all of it.",
)
@click.option("--token-file", metavar="FILE", help="Read the store's access token there, anew when it changes.")
@click.option(
    "--token-command",
    metavar="COMMAND",
    help="Run this for an access token: '/usr/bin/print-token web'. The list of processes shows its words.",
)
@click.option("--wait/--no-wait", default=True, show_default=True, help="Return when the image serves, or has failed.")
@click.option(
    "--timeout",
    "timeout_s",
    metavar="DURATION",
    callback=duration,
    default="3m",
    show_default=True,
    help="How long to wait; the daemon goes on after that.",
)
@click.option("--hold", is_flag=True, help="Hold a lease on it until Ctrl-C: meanwhile it stays, used or not.")
@json_option
@click.pass_obj
def _request(
    invocation: Invocation,
    snapshot_url: str,
    tenant: str,
    prefetch: str,
    token_file: str | None,
    token_command: str | None,
    wait: bool,
    timeout_s: float,
    hold: bool,
    as_json: bool,
) -> None:
    """Ask for a snapshot on this node; print the image's id and its mountpoint.

    The same snapshot and tenant get the same image, and then the first one's credentials and prefetch stay. When the
    image fails, so does the command, with the image's exit code. Without --token-file or --token-command the daemon's
    own credentials are used.

    \b
    Example:
      streamd image request gs://bucket/snapshots/web-1 --tenant shop --token-file /run/tokens/shop
    """
    if hold and not wait:
        raise click.UsageError("give --hold or --no-wait, not both")
    from streamd.store.opening import check_snapshot_url

    check_snapshot_url(snapshot_url)
    client, credentials = _client(invocation), _credentials(token_file, token_command)
    image = client.request_image(snapshot_url, tenant=tenant, credentials=credentials, prefetch=prefetch)
    image_id = str(image.get("id"))
    if credentials is not None and image.get("state") in SERVES:  # a new one is prepared first
        click.echo(f"image {image_id} was there already: it keeps its own credentials, these are not used", err=True)
    with ExitStack() as stack:
        lease: Lease | None = None
        if hold:  # from before it serves on: it must not end in between
            lease = stack.enter_context(client.lease(image_id, owner="streamd image request", purpose="held by hand"))
        if wait:
            image = _when_ready(client.image, image_id, timeout_s)
        if as_json:
            print_json(image)
        else:
            click.echo(f"{image_id}  {printable(image.get('mountpoint') or '–')}")
        if lease is not None:
            click.echo(f"image {image_id} is held; Ctrl-C ends the lease", err=True)
            _hold(lease)


def _credentials(token_file: str | None, token_command: str | None) -> dict[str, object] | None:
    """Say where tokens come from, as the daemon wants it. Raises: usage errors, which repeat no value."""
    if token_file is not None and token_command is not None:
        raise click.UsageError("give --token-file or --token-command, not both")
    if token_file is not None:
        # Not resolved: the daemon follows no symlink at its end, and says so.
        return {"token_file": os.path.abspath(token_file)}
    if token_command is None:
        return None
    try:
        words = shlex.split(token_command)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--token-command") from error
    if not words or not words[0].startswith("/"):
        raise click.BadParameter("must begin with an absolute path", param_hint="--token-command")
    return {"command": words}


def _when_ready(
    ask: Callable[..., Answer], image_id: str, timeout_s: float, *, clock: Callable[[], float] = time.monotonic
) -> Answer:
    """Wait until an image serves. `ask` is `DaemonClient.image`.

    Raises: `StillPreparing` after `timeout_s`, `NotFound` when it is gone, what it failed by.
    """
    until_s = clock() + timeout_s
    while True:
        left_s = max(0.0, until_s - clock())
        image = ask(image_id, wait_s=min(left_s, _ONE_WAIT_S))
        match image.get("state"):
            case "preparing":
                if left_s <= _ONE_WAIT_S:
                    raise StillPreparing(image_id, timeout_s)
            case "failed":
                raise relayed(image.get("last_error"))
            case "gone":
                raise NotFound(f"image {image_id} has ended")
            case _:
                return image


def _hold(lease: Lease) -> None:
    """Hold a lease for as long as the daemon lets us. Raises: `LeaseEnded`."""
    # No time-out: a daemon that hangs for a while keeps its leases.
    while lease.is_held():
        select.select([lease], [], [])
    raise LeaseEnded("the daemon has ended the lease: the image was ended or has failed, or the daemon has ended")


@command.command("ls")
@json_option
@click.pass_obj
def _ls(invocation: Invocation, as_json: bool) -> None:
    """List the images of this node, oldest first, and those that ended a while ago.

    \b
    Example:
      streamd image ls --json | jq -r '.images[] | select(.state == "failed") | .last_error.message'
    """
    images = _client(invocation).images()
    if as_json:
        print_json({"images": images})
    elif images:
        print_table(LIST_HEADER, [list_row(facts_of(image)) for image in images])
    else:
        click.echo("no images", err=True)


@command.command("show")
@click.argument("image_id", metavar="ID")
@json_option
@click.pass_obj
def _show(invocation: Invocation, image_id: str, as_json: bool) -> None:
    """Show all that is known of an image: who has leases and open files, bytes by tier, the last error.

    \b
    Example:
      streamd image show 3f8a12cd
    """
    client = _client(invocation)
    image = client.image(_full_id(client, image_id))
    if as_json:
        print_json(image)
    else:
        print_facts(list(flat_facts(image)))


@command.command("release")
@click.argument("image_id", metavar="ID")
@click.option(
    "--force",
    is_flag=True,
    help="Also while it is in use: leases end, reads fail with an I/O error, and sandboxes that load from it end.",
)
@json_option
@click.pass_obj
def _release(invocation: Invocation, image_id: str, force: bool, as_json: bool) -> None:
    """End an image; refused (exit code 7) while somebody has a lease on it or a file of it open.

    What the node's cache has of it stays. A failed image is forgotten.

    \b
    Example:
      streamd image release 3f8a12cd
    """
    client = _client(invocation)
    image = client.release(_full_id(client, image_id), force=force)
    if as_json:
        print_json(image)
    else:
        click.echo(f"image {printable(image.get('id'))} is {printable(image.get('state'))}")


@command.command("fail")
@click.argument("image_id", metavar="ID")
@click.option(
    "--handle", type=click.IntRange(0, (1 << 64) - 1), help="Only the open file with this number (see image show)."
)
@click.option("--container", help="Only the files that were opened for this container.")
@json_option
@click.pass_obj
def _fail(invocation: Invocation, image_id: str, handle: int | None, container: str | None, as_json: bool) -> None:
    """Fail the reads that wait on an image, of all its open files or of some, with an I/O error.

    The way out of a store that won't come back: a sandbox that waits for a read can't be killed until the read is
    answered; this answers it, and gVisor then ends the sandbox. Files that are opened later are served as before.

    \b
    Example:
      streamd image fail 3f8a12cd --container web
    """
    if handle is not None and container is not None:
        raise click.UsageError("give --handle or --container, not both")
    client = _client(invocation)
    full_id = _full_id(client, image_id)
    failed = client.fail(full_id, handle=handle, container=container)
    if as_json:
        print_json({"image": full_id, "failed_handles": failed})
    else:
        click.echo(f"the reads of {failed} open {'file' if failed == 1 else 'files'} fail from now on")


def _client(invocation: Invocation) -> DaemonClient:
    return DaemonClient(invocation.config().run_directory)


def _full_id(client: DaemonClient, given: str) -> str:
    """Give the id that `given` is, or begins. Raises: `NotFound`; `Refused` when it begins several."""
    if _ID.fullmatch(given):
        return given
    if not _BEGINNING.fullmatch(given):
        raise NotFound(f"{given!r} is not the id of an image, nor its first four or more digits")
    # One id may be there twice: an image that ended, and one that was asked for again.
    found = sorted({str(image.get("id")) for image in client.images() if str(image.get("id")).startswith(given)})
    if not found:
        raise NotFound(f"no image's id begins with {given}")
    if len(found) > 1:
        raise Refused(f"{given} begins the ids of {len(found)} images: {', '.join(found)}")
    return found[0]
