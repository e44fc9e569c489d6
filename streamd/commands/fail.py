"""`streamd fail`: the human exit for reads that wait."""

import click

from streamd.commands.invocation import Invocation, json_option
from streamd.commands.output import print_json


@click.command("fail")
@click.argument("mountpoint", metavar="MOUNTPOINT")
@click.option(
    "--handle", type=click.IntRange(0, (1 << 64) - 1), help="Only the open file with this number (see status)."
)
@click.option("--container", help="Only the files that were opened for this container.")
@json_option
@click.pass_obj
def command(invocation: Invocation, mountpoint: str, handle: int | None, container: str | None, as_json: bool) -> None:
    """Fail the reads that wait on a mount, of all its open files or of some, with an I/O error.

    A sandbox that waits for a read can't be killed until the read is answered; this answers it, and gVisor then ends
    the sandbox; runsc needs a second or two to report it as stopped. Files that are opened later are served as before.

    \b
    Example:
      streamd fail /mnt/web-1 --container web
    """
    from streamd.daemon.client import DaemonClient
    from streamd.daemon.control_client import MountClient, NoServer
    from streamd.errors import Refused
    from streamd.fuse import mount_paths

    if handle is not None and container is not None:
        raise click.UsageError("give --handle or --container, not both")
    run_directory = invocation.config().run_directory
    client = MountClient(run_directory, mount_paths.resolve(mountpoint))
    try:
        failed = client.fail(handle=handle, container=container)
    except NoServer:
        image = DaemonClient(run_directory).image_at(client.mountpoint)
        if image is None:
            raise
        raise Refused(
            f"{client.mountpoint} is the daemon's image {image.get('id')}: fail its reads with"
            f" `streamd image fail {image.get('id')}`"
        ) from None
    if as_json:
        print_json({"mountpoint": client.mountpoint, "failed_handles": failed})
    else:
        click.echo(f"the reads of {failed} open {'file' if failed == 1 else 'files'} fail from now on")
