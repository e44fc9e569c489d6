"""What all commands share of a command line: settings, common options, and opening a store."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from streamd.commands.output import printable
from streamd.config import Config, load, parse_duration
from streamd.errors import StoreError

if TYPE_CHECKING:
    from streamd.store.port import Store

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Invocation:
    """The options that stand before the command."""

    config_path: Path | None
    log_level: str | None

    def config(self) -> Config:
        """Read the configuration, with the options on top. Raises: `ConfigError`."""
        config = load(self.config_path)
        return replace(config, log_level=self.log_level) if self.log_level else config


def duration(_context: click.Context, parameter: click.Parameter, value: str) -> float:
    """Read an option's `30s`, `24h`, `500ms`, in seconds (a click callback)."""
    try:
        return parse_duration(value)
    except ValueError as error:
        raise click.BadParameter(str(error), param=parameter) from error


def json_option(function: F) -> F:
    """Add `--json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout, errors too.")(
        function
    )


def store_timeout_option(function: F) -> F:
    """Add `--store-timeout`."""
    text = "How long the store may be out of reach before the command gives up."
    return click.option(
        "--store-timeout",
        "store_timeout_s",
        metavar="DURATION",
        callback=duration,
        default="30s",
        show_default=True,
        help=text,
    )(function)


@contextmanager
def opened_store(url: str, *, timeout_s: float, may_be_new: bool = False) -> "Iterator[Store]":
    """Open a store whose calls are retried for `timeout_s`; the first failure that is tried again is told on stderr.

    `may_be_new`: a directory that isn't there is a new store, not one that is away.
    Raises: usage errors for an address that isn't one.
    """
    from streamd.store.opening import open_store
    from streamd.store.retry import retrying

    told: list[str] = []

    def tell(error: StoreError, _delay_s: float) -> None:
        if not told:
            told.append(str(error))
            click.echo(f"the store fails ({printable(error)}); trying again for up to {timeout_s:g} s", err=True)

    store = retrying(open_store(url, is_used=not may_be_new), deadline_s=timeout_s, on_retry=tell)
    try:
        yield store
    except StoreError as error:
        # Its message names an object, or nothing; which store it was is known here.
        named = StoreError(error.store_kind, "", f"{url}: {error}")
        named.key = error.key
        raise named from error
    finally:
        store.close()
