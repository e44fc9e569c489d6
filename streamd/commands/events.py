"""`streamd events`: what has happened to the daemon's images, and what happens."""

import json
import re
import time
from collections.abc import Callable, Iterator

import click

from streamd.commands.image_facts import SHORT_ID_CHARACTERS
from streamd.commands.invocation import Invocation
from streamd.commands.output import printable, time_text
from streamd.daemon.client import Answer, DaemonClient, NoAnswer, NoDaemon

# An id that no event has: the daemon begins with the oldest that it knows, behind one of kind `lost`.
_OLDEST = "oldest"
_LOST = "lost"
_EVENT_ID = re.compile(r"[0-9a-f]{8}-(\d{1,18})", re.ASCII)
# A restart takes seconds, the start of a node that is busy tens of them.
_BACK_WITHIN_S = 60.0
_AGAIN_S = 0.5


def _event_id(_context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Check an event's id (a click callback)."""
    if value is not None and not _EVENT_ID.fullmatch(value):
        raise click.BadParameter("an event's id looks like 1a2b3c4d-17", param=parameter)
    return value


@click.command("events")
@click.option("--follow/--no-follow", default=True, show_default=True, help="Go on as more happens, until Ctrl-C.")
@click.option("--since", metavar="ID", callback=_event_id, help="Only what came after the event with this id.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
@click.pass_obj
def command(invocation: Invocation, follow: bool, since: str | None, as_json: bool) -> None:
    """Show what happened to the daemon's images, oldest first: the last thousand events since it was started.

    A line has the time, the event's id, its kind, the image, and facts. When the daemon is restarted, this waits for it
    (a minute at most) and goes on; events that can't be had any more are told of by one of kind `lost`.

    \b
    Example:
      streamd events --no-follow --json | jq -c 'select(.kind == "worker-lost")'
    """
    client = DaemonClient(invocation.config().run_directory)
    for event in _followed(client, since) if follow else _kept(client, since):
        click.echo(json.dumps(event) if as_json else _line(event))


def _kept(client: DaemonClient, since: str | None) -> Iterator[Answer]:
    """Give what has happened until now."""
    newest = client.last_event_id()
    if since == newest or (since is None and not _number(newest)):
        return
    epoch = newest.partition("-")[0]
    for event in client.events(last_id=since or _OLDEST):
        if since is not None or event.get("kind") != _LOST:
            yield event
        event_id = str(event.get("id"))
        # Of another epoch: the daemon was restarted just now.
        if _number(event_id) >= _number(newest) or event_id.partition("-")[0] != epoch:
            return


def _followed(
    client: DaemonClient,
    since: str | None,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> Iterator[Answer]:
    """Give what has happened and what happens, also beyond a restart of the daemon. Raises: `NoDaemon`."""
    client.health()  # a daemon that isn't there at first isn't waited for
    missing_since_s: float | None = None
    while True:
        try:
            for event in client.events(last_id=since or _OLDEST):
                if since is not None or event.get("kind") != _LOST:
                    yield event
                since = str(event.get("id"))
            missing_since_s = None
        except NoAnswer:
            missing_since_s = None
        except NoDaemon:
            if missing_since_s is None:
                missing_since_s = clock()
                click.echo("the daemon has ended; waiting for the next one", err=True)
            elif clock() - missing_since_s > _BACK_WITHIN_S:
                raise
        sleep(_AGAIN_S)


def _number(event_id: str) -> int:
    found = _EVENT_ID.fullmatch(event_id)
    return int(found[1]) if found else 0


def _line(event: Answer) -> str:
    at_s, image, facts = event.get("at_s"), event.get("image"), event.get("facts")
    moment = time_text(at_s) if isinstance(at_s, int | float) else "–"
    short = image[:SHORT_ID_CHARACTERS] if isinstance(image, str) else "–"
    words = [f"{name}={_word(value)}" for name, value in facts.items()] if isinstance(facts, dict) else []
    cells = [moment, str(event.get("id")), str(event.get("kind")).ljust(16), short.ljust(SHORT_ID_CHARACTERS), *words]
    return "  ".join(map(printable, cells)).rstrip()


def _word(value: object) -> str:
    """Write a fact's value so that one ends where the next begins."""
    is_plain = isinstance(value, str) and re.fullmatch(r"[\w.:/@%+-]+", value)
    return str(value) if is_plain else json.dumps(value, ensure_ascii=False)
