"""`streamd cache`: the images that this node keeps."""

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import click

from streamd.commands.invocation import F, Invocation, json_option
from streamd.commands.output import age_text, print_json, print_table, printable
from streamd.config import size_text
from streamd.errors import Damaged, NotFound, NotPermitted, Refused

# What people type, as of an image's id (`image.py`).
_BEGINNING = re.compile(r"[0-9a-f]{4,63}", re.ASCII)


def _cache_dir_option(function: F) -> F:
    return click.option(
        "--cache-dir", type=click.Path(path_type=Path), help="The cache's directory [the configuration's]."
    )(function)


@click.group("cache")
def command() -> None:
    """List, clear or check the images in this node's cache.

    \b
    Example:
      streamd cache ls
    """


def _directory(invocation: Invocation, given: Path | None) -> Path:
    directory = given or invocation.config().cache.directory
    if directory is None:
        raise Refused("the configuration says that there is no cache (cache.enabled = false): give --cache-dir")
    return directory


@contextmanager
def _by_permission(invocation: Invocation, directory: Path) -> Iterator[None]:
    """Be the user whose the cache is, if we may. Raises: `NotPermitted` for one of another user."""
    from streamd.daemon.worker_user import as_owner
    from streamd.serve.node_cache import CacheUnusable

    try:
        with as_owner(directory, invocation.config()):
            yield
    except (CacheUnusable, PermissionError) as error:
        refused = isinstance(error, PermissionError) or isinstance(error.__cause__, PermissionError)
        if refused or _is_anothers(directory):
            raise NotPermitted(f"{error}; run it with sudo") from error
        raise


def _is_anothers(directory: Path) -> bool:
    try:
        return os.geteuid() not in (0, directory.stat().st_uid)
    except OSError:
        return False


def _full_key(directory: Path, given: str) -> str:
    """Give the one key that `given` begins, else `given` itself. Raises: `Refused` when it begins several."""
    from streamd.serve.cache_directory import list_images

    if not _BEGINNING.fullmatch(given):
        return given
    found = [image.key for image in list_images(directory) if image.key.startswith(given)]
    if len(found) > 1:
        raise Refused(f"{given} begins the names of {len(found)} images: {', '.join(sorted(found))}")
    return found[0] if found else given


@command.command("ls")
@_cache_dir_option
@json_option
@click.pass_obj
def _ls(invocation: Invocation, cache_dir: Path | None, as_json: bool) -> None:
    """List the images, least recently used first, and who uses them."""
    from streamd.serve.cache_directory import list_images

    directory = _directory(invocation, cache_dir)
    with _by_permission(invocation, directory):
        images = list_images(directory)
    if as_json:
        print_json({"directory": str(directory), "images": [asdict(image) for image in images]})
        return
    now_s = time.time()
    rows = [
        [
            image.key,
            size_text(image.disk_bytes),
            age_text(now_s - image.used_s),
            "yes" if image.is_pinned else "",
            image.owner or "",
        ]
        for image in images
    ]
    if rows:
        print_table(["IMAGE", "ON DISK", "USED", "PINNED", "IN USE BY"], rows)
    else:
        click.echo(f"no images in {directory}", err=True)


@command.command("clear")
@click.option("--image", "key", help="Only this image, by the name that `cache ls` shows.")
@_cache_dir_option
@json_option
@click.pass_obj
def _clear(invocation: Invocation, cache_dir: Path | None, key: str | None, as_json: bool) -> None:
    """Remove the images that no mount uses and that aren't pinned; exit code 7 when the one that was named stays."""
    from streamd.serve.cache_directory import clear_images

    directory = _directory(invocation, cache_dir)
    with _by_permission(invocation, directory):
        key = None if key is None else _full_key(directory, key)
        removed, left = clear_images(directory, key)
    if key is not None and not removed:
        if left and left[0].is_pinned:
            raise Refused(f"image {key} is pinned: streamd cache unpin {key}")
        if left:
            raise Refused(f"image {key} is in use by {left[0].owner or 'a mount'}")
        raise NotFound(f"no image {key} in {directory}")
    in_use = [image for image in left if not image.is_pinned]
    pinned = [image for image in left if image.is_pinned]
    if as_json:
        lists = {"removed": removed, "in_use": in_use, "pinned": pinned}
        print_json({name: [asdict(image) for image in images] for name, images in lists.items()})
        return
    click.echo(f"{len(removed)} images removed, {size_text(sum(image.disk_bytes for image in removed))}")
    for image in in_use:
        click.echo(f"{image.key} stays: in use by {printable(image.owner or 'a mount')}")
    for image in pinned:
        click.echo(f"{image.key} stays: it is pinned")


@command.command("pin")
@click.argument("key")
@_cache_dir_option
@json_option
@click.pass_obj
def _pin(invocation: Invocation, key: str, cache_dir: Path | None, as_json: bool) -> None:
    """Keep an image, by the name that `cache ls` shows, until it is unpinned, whether it is used or not.

    \b
    Example:
      streamd cache pin 3f8a…
    """
    from streamd.serve.cache_directory import pin_image

    directory = _directory(invocation, cache_dir)
    with _by_permission(invocation, directory):
        key = _full_key(directory, key)
        pin_image(directory, key)
    if as_json:
        print_json({"key": key, "is_pinned": True})


@command.command("unpin")
@click.argument("key")
@_cache_dir_option
@json_option
@click.pass_obj
def _unpin(invocation: Invocation, key: str, cache_dir: Path | None, as_json: bool) -> None:
    """Let a pinned image leave again when others need its room."""
    from streamd.serve.cache_directory import unpin_image

    directory = _directory(invocation, cache_dir)
    with _by_permission(invocation, directory):
        key = _full_key(directory, key)
        unpin_image(directory, key)
    if as_json:
        print_json({"key": key, "is_pinned": False})


@command.command("verify")
@_cache_dir_option
@json_option
@click.pass_obj
def _verify(invocation: Invocation, cache_dir: Path | None, as_json: bool) -> None:
    """Check every cached chunk of every image that no mount uses; bad ones are forgotten, exit code 4."""
    from streamd.serve.cache_directory import verify_images

    directory = _directory(invocation, cache_dir)
    with _by_permission(invocation, directory):
        results = verify_images(directory)
    bad = {image.key: len(image.bad_chunks) for image in results if image.bad_chunks}
    if bad:
        which = ", ".join(f"{count} in {key}" for key, count in bad.items())
        raise Damaged(f"{sum(bad.values())} cached chunks were damaged and are forgotten: {which}")
    chunks = sum(image.cached_chunks for image in results)
    if as_json:
        print_json({"images": [asdict(image) for image in results]})
    else:
        click.echo(f"{len(results)} images, {chunks} chunks, all as they should be")
