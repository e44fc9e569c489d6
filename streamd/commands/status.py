"""`streamd status`: the mounts of this host, by what their processes say."""

from collections.abc import Iterator

import click

from streamd.commands.invocation import Invocation, json_option
from streamd.commands.output import print_facts, print_json, print_table, ratio_text

_COLUMNS = ("MOUNTPOINT", "SNAPSHOT", "PID", "FETCHED", "OPEN", "WAITING", "STATE")


@click.command("status")
@click.argument("mountpoint", metavar="[MOUNTPOINT]", required=False)
@json_option
@click.pass_obj
def command(invocation: Invocation, mountpoint: str | None, as_json: bool) -> None:
    """Show the mounts of this host, or one of them in full, by what their processes say.

    \b
    Example:
      streamd status /mnt/web-1
    """
    from streamd.daemon.control_client import MountClient, all_statuses
    from streamd.fuse import mount_paths, mounting

    run_directory = invocation.config().run_directory
    if mountpoint is not None:
        status = MountClient(run_directory, mount_paths.resolve(mountpoint)).status()
        if as_json:
            print_json(status)
        else:
            print_facts(list(_flat(status)))
        return
    mounts = all_statuses(run_directory)
    served = {status.get("mountpoint") for status in mounts}
    dead = [path for path in mounting.own_mountpoints() if path not in served and mounting.is_dead(path)]
    if as_json:
        print_json({"mounts": mounts, "dead_mountpoints": dead})
        return
    if mounts:
        print_table(_COLUMNS, [_row(status) for status in mounts])
    for path in dead:
        click.echo(f"{path}: its process is dead (streamd umount {path})")
    if not mounts and not dead:
        click.echo("no mounts", err=True)


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


def _flat(values: dict[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Write nested facts as `a.b` names."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        match value:
            case dict():
                yield from _flat(value, f"{name}.")
            case list():
                for index, item in enumerate(value):
                    yield from (
                        _flat(item, f"{name}.{index}.") if isinstance(item, dict) else [(f"{name}.{index}", item)]
                    )
            case _:
                yield name, value
