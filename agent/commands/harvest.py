"""`snapagent harvest`: learn the order of a snapshot's memory before users come."""

import json
import os
import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import click

from agent.interrupts import Interrupts
from streamd.config import parse_duration
from streamd.errors import NotFound

if TYPE_CHECKING:
    from agent.node.harvest import Harvest

# A load takes the image's size over the link; what takes longer than this hangs.
_LIMIT_S = 1800.0


def _seconds(_context: click.Context, parameter: click.Parameter, value: str | None) -> float | None:
    """Read a duration in seconds (a click callback)."""
    try:
        return None if value is None else parse_duration(value)
    except ValueError as error:
        raise click.BadParameter(str(error), param=parameter) from error


def _words(_context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Split command lines as a shell does (a click callback)."""
    try:
        commands = tuple(tuple(shlex.split(value)) for value in values)
    except ValueError as error:
        raise click.BadParameter(str(error), param=parameter) from error
    if not all(commands):
        raise click.BadParameter("a command is empty", param=parameter)
    return commands


@click.command("harvest")
@click.argument("snapshot_url", metavar="SNAPSHOT_URL")
@click.option(
    "--bundle",
    required=True,
    type=click.Path(path_type=Path),
    help="OCI bundle of the container, as for `runsc restore`; it is not changed.",
)
@click.option(
    "--request",
    "commands",
    metavar="COMMAND",
    multiple=True,
    callback=_words,
    help="Run this in the container once it runs, such as 'curl -s localhost:8080/'; may be given several times.",
)
@click.option(
    "--stdin",
    "stdin_file",
    type=click.File("rb"),
    help="What the container reads from its standard input [nothing, and no end of it].",
)
@click.option(
    "--for",
    "limit_s",
    metavar="DURATION",
    callback=_seconds,
    help="End after this time, loaded or not [when it is loaded].",
)
@click.option("--runsc", type=click.Path(path_type=Path), help="The runsc that made the snapshot [the one on $PATH].")
@click.option(
    "--runsc-flag",
    "runsc_flags",
    metavar="FLAG",
    multiple=True,
    help="Give runsc a flag that the original had, such as --runsc-flag=--overlay2=none; may be given several times.",
)
@click.option(
    "--share-directories",
    is_flag=True,
    help="Let the sandbox write into directories of the host that the bundle mounts, as the original does.",
)
@click.option("--streamd-config", type=click.Path(path_type=Path), help="Settings [/etc/streamd/streamd.toml].")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout, errors too.")
@click.pass_obj
def command(
    interrupts: Interrupts,
    snapshot_url: str,
    bundle: Path,
    commands: tuple[tuple[str, ...], ...],
    stdin_file: BinaryIO | None,
    limit_s: float | None,
    runsc: Path | None,
    runsc_flags: tuple[str, ...],
    share_directories: bool,
    streamd_config: Path | None,
    as_json: bool,
) -> None:
    """Restore a snapshot once, unseen, to learn which memory its restores wait for first.

    The first restore of a snapshot waits for memory that nobody knew would be wanted; the next ones find it fetched.
    This makes that first restore in a sandbox without network that is thrown away, before users come. What a server
    touches to answer counts: send it a request or two with --request (inside, localhost is reachable).

    Needs root, and fetches the snapshot once. `streamd trace show SNAPSHOT_URL` shows what was learned.

    \b
    Example:
      streamd push IMAGE gs://bucket/snapshots --id web-1
      snapagent harvest gs://bucket/snapshots/web-1 --bundle BUNDLE --request 'curl -s localhost:8080/'
    """
    from agent.node.harvest import STDIN_MAX_BYTES, HarvestRequest, harvest
    from agent.node.streamd_command import StreamdCommand

    found = runsc or shutil.which("runsc")
    if found is None:
        raise NotFound("no runsc on $PATH; --runsc names one")
    stdin = b"" if stdin_file is None else stdin_file.read(STDIN_MAX_BYTES + 1)
    if len(stdin) > STDIN_MAX_BYTES:
        raise click.BadParameter(f"more than {STDIN_MAX_BYTES} bytes", param_hint="--stdin")
    request = HarvestRequest(
        snapshot_url=snapshot_url,
        bundle=bundle,
        runsc=Path(os.path.abspath(found)),
        runsc_flags=runsc_flags,
        stdin=stdin,
        commands=commands,
        limit_s=_LIMIT_S if limit_s is None else limit_s,
        must_load=limit_s is None,
        shares_directories=share_directories,
    )
    result = harvest(request, StreamdCommand(streamd_config), interrupts, say=lambda step: click.echo(step, err=True))
    if as_json:
        click.echo(json.dumps(_described(snapshot_url, result)))
    else:
        _show(snapshot_url, result)


def _described(snapshot_url: str, result: "Harvest") -> dict[str, object]:
    trace, loading = result.after, result.loading
    return {
        "snapshot_url": snapshot_url,
        "learned": result.has_learned,
        "samples": trace.samples if trace else 0,
        "ranges": len(trace.ranges) if trace else 0,
        "waited_bytes": trace.bytes_total if trace else 0,
        "loaded_s": loading.took_s if loading else None,
    }


def _show(snapshot_url: str, result: "Harvest") -> None:
    if not result.has_learned or result.after is None:
        click.echo(f"{snapshot_url}: nothing was learned: no memory was waited for (--request makes it work)")
        return
    trace = result.after
    restores = "this restore" if trace.samples == 1 else f"{trace.samples} restores"
    click.echo(
        f"{snapshot_url}: {len(trace.ranges)} ranges, {trace.bytes_total / (1 << 20):.1f} MiB, by {restores}; mounts "
        "fetch them first from now on"
    )
