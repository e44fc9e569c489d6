"""`streamd push`: save an image directory as a snapshot."""

import hashlib
import subprocess
import uuid
from dataclasses import asdict
from pathlib import Path

import click

from streamd.commands.invocation import json_option, opened_store, store_timeout_option
from streamd.commands.output import print_json, progress_bar, ratio_text
from streamd.config import parse_size, size_text
from streamd.errors import NotFound, Refused, StreamdError

# `runsc cpu-features` prints a list and ends; it needs no sandbox.
_RUNSC_WAIT_S = 30.0


def _metadata(_context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    facts = {}
    for value in values:
        key, equals, text = value.partition("=")
        if not equals or not key:
            raise click.BadParameter(f"{value!r} is not KEY=VALUE")
        facts[key] = text
    return facts


def _chunk_bytes(_context: click.Context, _parameter: click.Parameter, value: str) -> int:
    try:
        size = parse_size(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    if size % 4096 or not 4096 <= size <= 8 << 20:
        raise click.BadParameter("must be a multiple of 4KiB, at most 8MiB")
    return size


def _id(_context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    from streamd.snapshot.names import checked_id

    try:
        return None if value is None else checked_id(value, (parameter.name or "").replace("_", " "))
    except Refused as error:
        raise click.BadParameter(str(error)) from error


def _runsc_facts(runsc: Path) -> tuple[str, tuple[str, ...]]:
    """Give the SHA-256 (hex) of the binary and the CPU features that it sees here.

    Raises: `NotFound`, `StreamdError`.
    """
    try:
        with open(runsc, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        found = subprocess.run(
            [runsc.absolute(), "cpu-features"],
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=_RUNSC_WAIT_S,
        )
    except FileNotFoundError as error:
        raise NotFound(f"--runsc {runsc}: no such file") from error
    except OSError as error:
        raise StreamdError(f"--runsc {runsc}: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise StreamdError(f"--runsc {runsc}: its cpu-features did not end within {_RUNSC_WAIT_S:g} s") from error
    if found.returncode:
        said = "".join(f": {line[:200]}" for line in found.stderr.splitlines()[:1])
        raise StreamdError(f"--runsc {runsc}: is it runsc? cpu-features failed with exit code {found.returncode}{said}")
    return digest, tuple(sorted(filter(None, found.stdout.strip().split(","))))


@click.command("push")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.argument("store_url", metavar="STORE_URL")
@click.option(
    "--id", "snapshot_id", callback=_id, help="The snapshot's id: a-z, 0-9 and -, at most 63 [a random UUID]."
)
@click.option(
    "--push-id", callback=_id, help="Resume the push that had this id: packs that are there already are skipped."
)
@click.option("--chunk-size", "chunk_bytes", metavar="SIZE", default="256KiB", show_default=True, callback=_chunk_bytes)
@click.option("--level", type=click.IntRange(1, 19), default=1, show_default=True, help="zstd level.")
@click.option(
    "--metadata",
    metavar="KEY=VALUE",
    multiple=True,
    callback=_metadata,
    help="A fact to keep with it; may be repeated.",
)
@click.option("--runsc", type=click.Path(path_type=Path), help="The runsc that made the image, to record what it is.")
@store_timeout_option
@json_option
def command(
    directory: Path,
    store_url: str,
    snapshot_id: str | None,
    push_id: str | None,
    chunk_bytes: int,
    level: int,
    metadata: dict[str, str],
    runsc: Path | None,
    store_timeout_s: float,
    as_json: bool,
) -> None:
    """Save the checkpoint image in DIR as a snapshot in the store at STORE_URL.

    DIR is what `runsc checkpoint --image-path DIR` wrote, without compression. The snapshot exists when the command has
    ended well, and not before; an interrupted push is resumed by running it again with the ids that it printed.

    \b
    Example:
      streamd push /var/lib/checkpoints/web gs://bucket/snapshots --id web-1 --runsc /usr/local/bin/runsc
    """
    from streamd.save.push import PushFailed, PushOptions, PushProgress, push

    sha256, features = _runsc_facts(runsc) if runsc else (None, None)
    options = PushOptions(
        chunk_bytes=chunk_bytes, level=level, metadata=metadata, runsc_sha256=sha256, cpu_features=features
    )
    snapshot_id, push_id = snapshot_id or str(uuid.uuid4()), push_id or str(uuid.uuid4())
    began = False
    try:
        with (
            opened_store(store_url, timeout_s=store_timeout_s, may_be_new=True) as store,
            progress_bar("push") as report,
        ):

            def show(progress: PushProgress) -> None:
                ratio = f"stored {ratio_text(progress.stored_bytes, progress.done_bytes)}"
                report(progress.done_bytes, progress.total_bytes, ratio)

            def checked() -> None:
                """Before anything is sent, on stderr: whoever is interrupted needs them."""
                click.echo(f"snapshot {snapshot_id}, push {push_id}", err=True)

            began = True
            result = push(
                directory,
                store,
                snapshot_id=snapshot_id,
                push_id=push_id,
                options=options,
                progress=show,
                on_checked=checked,
            )
    except KeyboardInterrupt as error:  # before the push or after it; itself it answers as much
        raise PushFailed(error, snapshot_id=snapshot_id, push_id=push_id, committing=began) from error
    url = _snapshot_url(store_url, result.snapshot_id)
    if as_json:
        print_json(asdict(result) | {"url": url})
        return
    done = "was there already" if result.was_there else f"pushed, {result.packs} packs"
    stored = f"stored {size_text(result.stored_bytes)} ({ratio_text(result.stored_bytes, result.image_bytes)})"
    zero = f"zero {ratio_text(result.zero_bytes, result.image_bytes)}"
    click.echo(f"{url}\n{done}: image {size_text(result.image_bytes)}, {stored}, {zero}")


def _snapshot_url(store_url: str, snapshot_id: str) -> str:
    """Give the address that `mount` takes; a file: address keeps its query at the end."""
    base, mark, query = store_url.partition("?")
    return f"{base.rstrip('/')}/{snapshot_id}{mark}{query}"
