"""`streamd umount`: take a mount away."""

import click

from streamd.commands.invocation import Invocation, json_option
from streamd.commands.output import print_json


@click.command("umount")
@click.argument("mountpoint", metavar="MOUNTPOINT")
@click.option(
    "--force",
    is_flag=True,
    help="Also while files are open: reads that wait fail, and their sandboxes end; runsc needs a second or two to"
    " report one as stopped.",
)
@json_option
@click.pass_obj
def command(invocation: Invocation, mountpoint: str, force: bool, as_json: bool) -> None:
    """Unmount a snapshot and end its process; refused (exit code 7) while one of its files is open.

    A sandbox has its files open until it is loaded (`runsc wait --restore` returns then).

    \b
    Example:
      streamd umount /mnt/web-1
    """
    from streamd.daemon.unmounting import unmount

    path, how = unmount(mountpoint, run_directory=invocation.config().run_directory, force=force)
    if as_json:
        print_json({"mountpoint": path, "how": how.value})
    else:
        click.echo(f"{path} unmounted{how.remark}")
