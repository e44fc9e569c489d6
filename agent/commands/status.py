"""`snapagent status`: what the agent of this node knows and does."""

import json
import time
from pathlib import Path
from typing import Any

import click

from agent.commands.asking import ask
from agent.commands.inputs import say


@click.command("status")
@click.option("--config", "config_path", type=click.Path(path_type=Path), help="Settings [/etc/snapagent.toml].")
@click.option("--events", "event_count", type=click.IntRange(0, 50), default=10, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout, errors too.")
def command(config_path: Path | None, event_count: int, as_json: bool) -> None:
    """Show this node's pods with the verdict on each, saves and restores under way, and the last events.

    A pod that has started cold says why; `snapagent explain` says all about it. What can't be read in the objects
    directory is shown with every problem of it.

    \b
    Example:
      snapagent status --json | jq '.pods[] | select(.state == "started cold") | .reason'
    """
    found = ask(config_path, "GET", "/v1/status")
    if as_json:
        click.echo(json.dumps(found))
        return
    _show(found, event_count)


def _show(found: dict[str, Any], event_count: int) -> None:
    node = found["node"]
    facts = node["facts"]
    say(f"node {node['name']}: " + ("its facts aren't known" if facts is None else _machine(facts)))
    for problem in found["problems"]:
        say(f"problem: {problem}")
    if not found["is_synced"]:
        say("policies and snapshots are still being read: pods start cold")
    elif not found["policies"]:
        say("no policy: no pod is saved (`snapagent daemon --help` shows one)")
    elif not found["pods"]:
        say("no pod has been seen: the agent hears of those that streamd-runsc starts")
    for policy in found["policies"]:
        what = f"{policy['trigger']} trigger, {policy['postCheckpoint']}, into {policy['storageConfigName']}"
        say(f"policy {policy['namespace']}/{policy['name']}: {what}{_unwell(policy['conditions'])}")
    for config in found["storageConfigs"]:
        say(f"storage config {config['name']}: {config['store']}{_unwell(config['conditions'])}")
    for each in found["without_policy"]:
        policy = f"{each['namespace']}/{each['policy']}"
        say(f"{each['snapshots']} snapshots are of policy {policy}, which isn't there: no pod is restored from them")
    for each in found["unreadable"]:
        say(f"unreadable: {each['where']}: {'; '.join(each['problems'])}")
    for each in found["uncollected"]:
        say(f"store {each['store']} can't be collected: {each['problem']}")
    for pod in found["pods"]:
        why = f": {pod['reason']}" if pod["reason"] else ""
        source = f" ({pod['snapshot']})" if pod["snapshot"] else ""
        say(f"pod {pod['namespace']}/{pod['name']} {pod['sandbox'][:12]}: {pod['state']}{source}{why}")
    for save in found["saves"]:
        say(f"save {save['snapshot']} of {save['pod']}: under way, or waiting for its application")
    for restore in found["restores"]:
        say(f"restore {restore['snapshot']} of {restore['pod']}: under way")
    for event in found["events"][-event_count:] if event_count else ():
        at = time.strftime("%H:%M:%SZ", time.gmtime(event["at_s"]))
        rest = " ".join(filter(None, [event["pod"], event["snapshot"], event["message"]]))
        say(f"{at} {event['what']} [{event['reason']}] {rest}")


def _machine(facts: dict[str, Any]) -> str:
    cpu, runsc = facts["cpu"], facts["runsc"]
    kind = facts["machineType"] or cpu["model"] or cpu["vendor"]
    gpus = ", ".join(f"{each['count']} × {each['model']} (driver {each['driver']})" for each in facts["gpus"])
    return f"{kind} ({facts['architecture']}), runsc {runsc['version']} {runsc['sha256'][:12]}" + (
        f", {gpus}" if gpus else ""
    )


def _unwell(conditions: list[dict[str, Any]]) -> str:
    """Say what isn't as it should be with an object."""
    found = [each for each in conditions if each["status"] == ("False" if each["type"] == "Ready" else "True")]
    return "".join(f"; {each['type']} is {each['status']} [{each['reason']}]: {each['message']}" for each in found)
