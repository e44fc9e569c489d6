"""`streamd status`: the mounts of this host, by what their processes say, and the images of the node's daemon."""

import time
from pathlib import Path

import click

from streamd.commands.image_facts import GONE, STATUS_HEADER, count_text, facts_of, status_row
from streamd.commands.invocation import Invocation, json_option
from streamd.commands.output import flat_facts, print_facts, print_json, print_table, printable, ratio_text
from streamd.daemon.client import Answer, DaemonClient, NoDaemon
from streamd.errors import StreamdError

_COLUMNS = ("MOUNTPOINT", "SNAPSHOT", "PID", "FETCHED", "OPEN", "WAITING", "STATE")


@click.command("status")
@click.argument("mountpoint", metavar="[MOUNTPOINT]", required=False)
@json_option
@click.pass_obj
def command(invocation: Invocation, mountpoint: str | None, as_json: bool) -> None:
    """Show the mounts of this host, or one of them in full, by what their processes say.

    First those of `streamd mount`, each served by a process of its own (PID). Then, where a daemon runs, its images:
    how much of each is on this node, who uses it (open files, leases), how often threads were stopped for memory and
    for how long, reads that waited for too long (STALLS), and its worker's age and restarts. With --json, `images` and
    `daemon` are there when a daemon runs.

    \b
    Example:
      streamd status /mnt/web-1
    """
    from streamd.daemon.control_client import all_statuses
    from streamd.fuse import mount_paths, mounting

    run_directory = invocation.config().run_directory
    if mountpoint is not None:
        _show(_status_at(run_directory, mount_paths.resolve(mountpoint)), as_json=as_json)
        return
    mounts = all_statuses(run_directory)
    daemon = _daemon(run_directory)
    images = [] if daemon is None else daemon.pop("images")
    assert isinstance(images, list)
    served = {status.get("mountpoint") for status in [*mounts, *images]}
    dead = [path for path in mounting.own_mountpoints() if path not in served and mounting.is_dead(path)]
    if as_json:
        of_daemon = {} if daemon is None else {"images": images, "daemon": daemon}
        print_json({"mounts": mounts, "dead_mountpoints": dead} | of_daemon)
        return
    if mounts:
        print_table(_COLUMNS, [_row(status) for status in mounts])
    for path in dead:
        click.echo(f"{printable(path)}: its process is dead (streamd umount {printable(path)})")
    if daemon is not None:
        if mounts or dead:
            click.echo()
        _print_daemon(daemon, images)
    elif not mounts and not dead:
        click.echo("no mounts", err=True)


def _show(status: Answer, *, as_json: bool) -> None:
    if as_json:
        print_json(status)
    else:
        print_facts(list(flat_facts(status)))


def _status_at(run_directory: Path, mountpoint: str) -> Answer:
    """Describe what is mounted there, whoever serves it. Raises: `NoServer`."""
    from streamd.daemon.control_client import MountClient, NoServer

    try:
        return MountClient(run_directory, mountpoint).status()
    except NoServer:
        daemon = _daemon(run_directory) or {}
        images = daemon.get("images")
        for image in images if isinstance(images, list) else []:
            if image.get("mountpoint") == mountpoint:
                found: Answer = image
                return found
        raise


def _daemon(run_directory: Path) -> Answer | None:
    """Ask the daemon; None when there is none. One that can't answer has `error` and no images."""
    client = DaemonClient(run_directory)
    found: Answer = {"socket": str(client.path), "images": []}
    try:
        return found | client.health() | {"images": client.images()}  # health has a number of images
    except NoDaemon:
        return None
    except StreamdError as error:
        return found | {"error": str(error)}


def _print_daemon(daemon: Answer, images: list[Answer]) -> None:
    """Print who serves images, and those that it serves."""
    if "error" in daemon:
        click.echo(f"{printable(daemon['socket'])}: {printable(daemon['error'])}")
        return
    draining = "; draining: it takes no new images" if daemon.get("is_draining") else ""
    who = f"daemon {printable(daemon.get('version'))} (pid {printable(daemon.get('pid'))})"
    shown = [facts for facts in map(facts_of, images) if facts.state != GONE]
    limit = daemon.get("fetch_max_bytes_per_s")
    limited = f", at most {limit / 1e6:.1f} MB/s from the store" if isinstance(limit, int) and limit else ""
    click.echo(f"{who} serves {count_text(len(shown), 'image')}{limited}{draining}")
    for warning in _list(daemon.get("warnings")):
        click.echo(f"warning: {printable(warning)}")
    if shown:
        print_table(STATUS_HEADER, [status_row(facts, now_s=time.time()) for facts in shown])


def _row(status: dict[str, object]) -> list[object]:
    if "error" in status:
        return [status.get("socket", ""), "", "", "", "", "", status["error"]]
    handles = [handle for handle in _list(status.get("handles")) if isinstance(handle, dict)]
    waiting = [handle for handle in handles if handle.get("waiting")]
    fetched, stored = status.get("origin_bytes"), status.get("stored_bytes")
    loaded = ratio_text(fetched, stored) if isinstance(fetched, int) and isinstance(stored, int) else ""
    place = [status.get(key, "") for key in ("mountpoint", "snapshot", "pid")]
    # What the store answered last matters while somebody waits for it.
    state = (waiting and status.get("last_failure")) or "serves"
    return [*place, loaded, len(handles), len(waiting), state]


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []
