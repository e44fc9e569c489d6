"""`snapagent snapshot`: save a pod of this node now."""

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click

from agent.commands.asking import NoAgent, ask
from agent.commands.inputs import say
from agent.errors import AgentError
from streamd.config import parse_duration
from streamd.errors import Exit

_LOOK_S = 0.25


class NotSaved(AgentError):
    """The snapshot has failed."""

    kind = "snapshot-failed"


class NotTaken(AgentError):
    """Nothing was begun: no policy selects the pod, or it can't be saved now."""

    ends_with, kind = Exit.REFUSED, "snapshot-refused"


class AgentGone(AgentError):
    """The agent that was asked answers no more."""

    ends_with, kind = Exit.NOT_FOUND, "no-agent"


class NotYet(AgentError):
    """It isn't Ready within the time given, and goes on."""

    kind = "snapshot-pending"


def _seconds(_context: click.Context, parameter: click.Parameter, value: str) -> float:
    try:
        return parse_duration(value)
    except ValueError as error:
        raise click.BadParameter(str(error), param=parameter) from error


@click.command("snapshot")
@click.argument("target", metavar="POD|CONTAINER")
@click.option("-n", "--namespace", default="default", show_default=True, help="The pod's namespace.")
@click.option("--stop", is_flag=True, help="End the pod after its snapshot, whatever its policy says.")
@click.option("--wait/--no-wait", default=True, show_default=True, help="Wait until it is Ready, or has failed.")
@click.option("--timeout", "timeout_s", metavar="DURATION", callback=_seconds, default="15m", show_default=True)
@click.option("--config", "config_path", type=click.Path(path_type=Path), help="Settings [/etc/snapagent.toml].")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout, errors too.")
def command(
    target: str,
    namespace: str,
    stop: bool,
    wait: bool,
    timeout_s: float,
    config_path: Path | None,
    as_json: bool,
) -> None:
    """Save a pod of this node now, and wait until its snapshot is Ready.

    A policy of the pod's namespace with the trigger `manual` must select it: that says where to. This writes a
    PodSnapshotManualTrigger into the objects directory, as you could; it is removed when it is over. With --no-wait
    it stays there until the agent starts again. If nothing was begun for it by then, nothing will be.

    \b
    Example:
      snapagent snapshot web-1 -n shop
    """
    made = ask(config_path, "POST", "/v1/triggers", {"target": target, "namespace": namespace, "stop": stop})
    place = f"/v1/triggers/{quote(made['namespace'])}/{quote(made['name'])}"
    if not wait:
        _say(made, as_json=as_json, line=f"trigger {made['namespace']}/{made['name']} for pod {made['pod']}")
        return
    try:
        state = _followed(config_path, place, timeout_s, quiet=as_json)
    except NotYet:
        raise  # it goes on, and its trigger with it
    except NoAgent as error:
        said = (
            "a save that had begun is finished or undone by the agent's next life (`snapagent ls`), no other is begun"
        )
        raise AgentGone(f"{error}; {said}") from error
    except BaseException:
        with suppress(AgentError):  # an agent that isn't there takes it back at its next start
            ask(config_path, "DELETE", place)
        raise
    with suppress(NoAgent):
        ask(config_path, "DELETE", place)
    _say(made | state, as_json=as_json, line=f"snapshot {state['snapshot']} of pod {made['pod']} is Ready")


def _followed(config_path: Path | None, place: str, timeout_s: float, *, quiet: bool) -> dict[str, Any]:
    """Ask until the trigger is over; tell what changes on stderr."""
    until_s = time.monotonic() + timeout_s
    said = ""
    while True:
        state = ask(config_path, "GET", place)
        match state["state"]:
            case "Complete":
                return state
            case "pending":
                now = f"{state['snapshot']}: {state['phase']}" if state["snapshot"] else "waiting for the agent"
                now += f", which tries again: {state['problem']}" if state["problem"] else ""
            case _ if state["snapshot"]:
                raise NotSaved(state["message"])
            case _:
                raise NotTaken(state["message"])
        if now != said and not quiet:
            click.echo(now, err=True)
        said = now
        if time.monotonic() > until_s:
            raise NotYet(f"it isn't Ready within {timeout_s:g} s, and goes on ({now}): `snapagent status`")
        time.sleep(_LOOK_S)


def _say(record: dict[str, Any], *, as_json: bool, line: str) -> None:
    if as_json:
        click.echo(json.dumps(record))
    else:
        say(line)
