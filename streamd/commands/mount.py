"""`streamd mount`: serve a snapshot as files."""

import os
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from streamd.commands.invocation import Invocation, json_option, store_timeout_option
from streamd.commands.output import print_json, printable
from streamd.config import Config, Prefetch, disk_bytes, parse_size
from streamd.daemon.options import MountOptions
from streamd.errors import StreamdError

# The first to import structlog, for its reason.
from streamd.logs import BoundedLog, configure

if TYPE_CHECKING:
    from streamd.daemon.background import ReadyPipe
    from streamd.daemon.control_client import MountClient

# On top of the store's time-out: starting an interpreter on a busy node, reading the two small files.
_START_WAIT_S = 60.0


@click.command("mount")
@click.argument("snapshot_url", metavar="SNAPSHOT_URL")
@click.argument("mountpoint", metavar="MOUNTPOINT")
@click.option("--cache-dir", type=click.Path(path_type=Path), help="Where fetched chunks stay [/var/cache/streamd].")
@click.option("--cache-max", help="Most of it: a size, or a share of the disk such as 50%.")
@click.option("--no-cache", is_flag=True, help="Keep nothing on disk.")
@click.option(
    "--prefetch",
    type=click.Choice([mode.value for mode in Prefetch]),
    default=Prefetch.ALL.value,
    show_default=True,
    help="What is fetched before it is read: nothing; what earlier restores waited for; or that, and then all of it.",
)
@click.option(
    "--no-warm",
    is_flag=True,
    help="Serve also when the whole snapshot is on the node; else its files there are mounted themselves, read-only.",
)
@click.option(
    "--foreground",
    is_flag=True,
    help="Serve in this process, log to stderr, until SIGTERM or Ctrl-C: the first waits for open files, up to 10 s,"
    " the second fails their reads.",
)
@store_timeout_option
@json_option
@click.pass_obj
def command(
    invocation: Invocation,
    snapshot_url: str,
    mountpoint: str,
    cache_dir: Path | None,
    cache_max: str | None,
    no_cache: bool,
    prefetch: str,
    no_warm: bool,
    foreground: bool,
    store_timeout_s: float,
    as_json: bool,
) -> None:
    """Serve a snapshot at MOUNTPOINT, an empty directory. Needs root.

    The command returns when the files can be read; a process in the background fetches what is read, as it is read, and
    the rest after it. While the store can't be reached reads wait; they don't fail.

    \b
    Example:
      streamd mount gs://bucket/snapshots/web-1 /mnt/web-1
      runsc restore --background --image-path /mnt/web-1 --bundle BUNDLE CONTAINER
    """
    from streamd.daemon.control_client import MountClient
    from streamd.fuse import mount_paths, mounting
    from streamd.store.opening import split_snapshot_url

    config = _with_flags(invocation.config(), cache_dir, cache_max, no_cache)
    split_snapshot_url(snapshot_url)
    mounting.require_root()
    options = MountOptions(
        snapshot_url=snapshot_url,
        mountpoint=mount_paths.resolve(mountpoint),
        cache_dir=config.cache.directory,
        cache_max_bytes=config.cache.max_bytes,
        prefetch=Prefetch(prefetch),
        config=config,
        store_timeout_s=store_timeout_s,
        warm=not no_warm,
    )
    if foreground:
        _serve(options, pipe=None, as_json=as_json)
        return
    # Said at once, without the price of a process; the process looks again.
    client = MountClient(config.run_directory, options.mountpoint)
    with mounting.check(options.mountpoint, server_lives=lambda _: client.is_served()):
        pass
    _start(options, client, as_json=as_json)


def _with_flags(config: Config, cache_dir: Path | None, cache_max: str | None, no_cache: bool) -> Config:
    """Put the flags on top of the configuration."""
    if no_cache and (cache_dir or cache_max):
        raise click.UsageError("--no-cache goes without --cache-dir and --cache-max")
    cache = config.cache
    if no_cache:
        cache = replace(cache, directory=None, max_bytes=None)
    if cache_dir is not None:
        cache = replace(cache, directory=cache_dir.absolute())
    if cache_max is not None:
        if cache.directory is None:
            raise click.UsageError("--cache-max needs a cache: give --cache-dir")
        directory = cache.directory
        try:
            cache = replace(cache, max_bytes=parse_size(cache_max, whole_bytes=lambda: disk_bytes(directory)))
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="--cache-max") from error
    return replace(config, cache=cache)


def _serve(options: MountOptions, *, pipe: "ReadyPipe | None", as_json: bool) -> None:
    """Serve in this process, and report as this process was asked to: over the pipe, or on stdout."""
    from streamd.daemon.background import log_path
    from streamd.daemon.mounted import run_mount
    from streamd.daemon.relay import single_error

    if pipe is None:
        configure(options.config.log_level)
    else:
        # Opened already, before the fork, by who holds the directory's rights.
        log = BoundedLog(log_path(options.config.log_directory, options.mountpoint), take_over_stdio=True)
        configure(options.config.log_level, log=log)

    def ready(facts: dict[str, object]) -> None:
        facts = {"mountpoint": options.mountpoint, "pid": os.getpid()} | facts
        if pipe is not None:
            pipe.ready(facts)
            # The directory that the command was started in must not be held for the life of the mount.
            os.chdir("/")
        elif as_json:
            print_json(facts)
        else:
            click.echo(f"{printable(options.snapshot_url)} is served at {options.mountpoint}; Ctrl-C ends it", err=True)
        if pipe is None:
            _warn(facts)

    try:
        run_mount(options, ready)
    except (StreamdError, BaseExceptionGroup) as error:
        lone = single_error(error)
        if pipe is not None and isinstance(lone, StreamdError):
            pipe.failed(lone)
        raise


def _start(options: MountOptions, client: "MountClient", *, as_json: bool) -> None:
    """Serve in a process in the background; return when it serves. Also returns in that process, at its end."""
    from streamd.daemon.background import ReadyPipe, log_path, start
    from streamd.fuse import mounting

    log = log_path(options.config.log_directory, options.mountpoint)
    try:
        started = start(log=log, wait_s=options.store_timeout_s + _START_WAIT_S)
    except BaseException:
        # The process has ended; one that had to be killed could not unmount.
        with suppress(StreamdError):
            mounting.clean_stale(options.mountpoint, server_lives=lambda _: client.is_served())
        raise
    if isinstance(started, ReadyPipe):
        _serve(options, pipe=started, as_json=False)
        return
    if as_json:
        facts: dict[str, object] = {"mountpoint": options.mountpoint, "pid": started.pid, "log": str(started.log_path)}
        print_json(started.ready | facts)
    else:
        click.echo(f"{printable(options.snapshot_url)} is served at {options.mountpoint}")
        click.echo(f"process {started.pid}, log {started.log_path}", err=True)
    _warn(started.ready)
    sys.stdout.flush()


def _warn(facts: dict[str, object]) -> None:
    """Tell people of a mount that serves, but not as it was asked to."""
    if facts.get("cache_problem"):
        reason = printable(facts["cache_problem"])
        click.echo(f"warning: nothing is kept on disk, the mount serves from memory: {reason}", err=True)
