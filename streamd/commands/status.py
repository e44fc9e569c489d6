"""`streamd status`: the mounts of this host, by what their processes say, and the images of the node's daemon."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

import click

from streamd.commands.image_facts import GONE, SERVES, STATUS_HEADER, count_text, facts_of, status_row
from streamd.commands.invocation import Invocation, json_option
from streamd.commands.output import flat_facts, print_facts, print_json, print_table, printable, ratio_text
from streamd.daemon.client import Answer, DaemonClient, NoAnswer, NoDaemon
from streamd.daemon.sockets import images_directory, lock_holder
from streamd.errors import StreamdError

# It answers from memory: longer than that, and it hangs, or the node is very busy.
_DAEMON_WAIT_S = 10.0
_COLUMNS = ("MOUNTPOINT", "SNAPSHOT", "PID", "FETCHED", "OPEN", "WAITING", "STATE")


@click.command("status")
@click.argument("mountpoint", metavar="[MOUNTPOINT]", required=False)
@json_option
@click.pass_obj
def command(invocation: Invocation, mountpoint: str | None, as_json: bool) -> None:
    """Show the mounts of this host, or one of them in full, by what their processes say.

    First those of `streamd mount`, each served by a process of its own (PID). Then, where a daemon runs, its images:
    how much of each is on this node, who uses it (open files, leases), how often threads were stopped for memory and
    for how long, reads that waited for too long (STALLS), and its worker's age and restarts. With --json, `images` is
    there when a daemon runs, and `daemon` is null when none does.

    Exit code 1: a daemon runs and gives no answer. 3: none does, though its mounts, or its socket, are still there.

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
    daemon, images, problem = _daemon(run_directory)
    served = {status.get("mountpoint") for status in [*mounts, *images]}
    own = mounting.own_mountpoints()
    dead = [path for path in own if path not in served and mounting.is_dead(path)]
    if daemon is None:
        problem = _missing(run_directory, own)
    if as_json:
        of_daemon = {"daemon": None} if daemon is None else {"images": images, "daemon": daemon}
        print_json({"mounts": mounts, "dead_mountpoints": dead} | of_daemon)
    else:
        if mounts:
            print_table(_COLUMNS, [_row(status) for status in mounts])
        for path in dead:
            click.echo(f"{printable(path)}: its process is dead (streamd umount {printable(path)})")
        if daemon is None and problem is None:
            if not mounts and not dead:
                click.echo("no mounts", err=True)
            click.echo(f"no daemon answers at {DaemonClient(run_directory).path}", err=True)
        elif daemon is not None and problem is None:
            if mounts or dead:
                click.echo()
            _print_daemon(daemon, images)
    if problem is not None:
        raise problem


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
        image = DaemonClient(run_directory).image_at(mountpoint)
        if image is None:
            raise
        return image


def _daemon(run_directory: Path) -> tuple[Answer | None, list[Answer], StreamdError | None]:
    """Ask the daemon for itself, None when there is none, and its images; or say why it gives no answer."""
    client = DaemonClient(run_directory, wait_s=_DAEMON_WAIT_S)
    found: Answer = {"socket": str(client.path)}
    try:
        health = client.health()
        del health["images"]  # their number
        return found | health, client.images(), None
    except NoDaemon:
        return None, [], None
    except StreamdError as error:
        return found | {"error": str(error)}, [], error


def _missing(run_directory: Path, own_mountpoints: Sequence[str]) -> StreamdError | None:
    """Say what shows that a daemon should answer where none does; None when nothing does."""
    path = DaemonClient(run_directory).path
    holder = lock_holder(run_directory)
    if holder is not None:
        return NoAnswer(f"the daemon (pid {holder}) has no socket at {path} now; it makes another within seconds")
    prefix = f"{os.path.realpath(images_directory(run_directory))}/"  # as the kernel's table has it
    mounts = sum(mountpoint.startswith(prefix) for mountpoint in own_mountpoints)
    if mounts:
        return NoDaemon(f"no daemon answers at {path}, and {count_text(mounts, 'mount')} of its images are left")
    if path.is_socket():
        return NoDaemon(f"no daemon answers at {path}: the last one was killed")
    return None


def _print_daemon(daemon: Answer, images: list[Answer]) -> None:
    """Print who serves images, and those that it serves."""
    draining = "; draining: it takes no new images" if daemon.get("is_draining") else ""
    who = f"daemon {printable(daemon.get('version'))} (pid {printable(daemon.get('pid'))})"
    shown = [facts for facts in map(facts_of, images) if facts.state != GONE]
    serves = sum(facts.state in SERVES for facts in shown)
    limit = daemon.get("fetch_max_bytes_per_s")
    limited = f", at most {limit / 1e6:.1f} MB/s from the store" if isinstance(limit, int) and limit else ""
    click.echo(f"{who} serves {count_text(serves, 'image')}{limited}{draining}")
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
    failed = status.get("failed_reads")
    failures = f"; {count_text(failed, 'read')} failed" if isinstance(failed, int) and failed else ""
    return [*place, loaded, len(handles), len(waiting), f"{state}{failures}"]


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []
