"""`snapagent ls`: the PodSnapshots of a node, as `kubectl get podsnapshots` would show them."""

import json
import time
from pathlib import Path

import click

from agent.commands.inputs import config_option, say, snapshots_in, state_option
from agent.kube.conditions import ConditionType, condition, epoch_s
from agent.kube.objects import Kind, PodSnapshot

_AGES_S = ((86400, "d"), (3600, "h"), (60, "m"), (1, "s"))


@click.command("ls")
@click.option("-n", "--namespace", help="Of this namespace [all].")
@state_option
@config_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout, errors too.")
def command(namespace: str | None, state: Path | None, config_path: Path | None, as_json: bool) -> None:
    """List the PodSnapshots that the agent keeps, newest last, with what has become of each.

    Pods are restored from those that are AllSnapshotsAvailable. `streamd ls STORE_URL` lists what a store has, from
    whatever node.

    \b
    Example:
      snapagent ls -n shop
      snapagent ls --json | jq '.snapshots[] | select(.status == "Failed") | .message'
    """
    listing = snapshots_in(state, config_path).list(Kind.SNAPSHOT, namespace=namespace)
    for each in listing.unreadable:
        click.echo(f"not read: {each.where}: {'; '.join(each.problems)!r}", err=True)
    found = [_described(each) for each in listing.items if isinstance(each, PodSnapshot)]
    found.sort(key=lambda each: (each["created"], each["namespace"], each["name"]))
    if as_json:
        click.echo(json.dumps({"snapshots": found}))
    else:
        _show(found, now_s=time.time())


def _described(snapshot: PodSnapshot) -> dict[str, str]:
    meta, status = snapshot.metadata, snapshot.status
    ready = condition(status.conditions, ConditionType.READY)
    return {
        "namespace": meta.namespace,
        "name": meta.name,
        "status": snapshot.phase.value,
        "message": "" if ready is None else ready.message,
        "policy": snapshot.policy_name,
        "pod": "" if status.origin is None else status.origin.pod_name,
        "created": meta.creation_timestamp,
        "last_access": status.last_access_time,
        "snapshot_url": status.snapshot_url,
    }


def _show(found: list[dict[str, str]], *, now_s: float) -> None:
    if not found:
        say("no snapshots")
        return
    rows: list[tuple[str, ...]] = [("NAMESPACE", "NAME", "STATUS", "POLICY", "POD", "AGE", "USED")]
    for each in found:
        ages = (_age(each[name], now_s) for name in ("created", "last_access"))
        rows.append((each["namespace"], each["name"], each["status"], each["policy"], each["pod"] or "-", *ages))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    messages = ["", *(each["message"] for each in found)]
    for row, message in zip(rows, messages, strict=True):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        say("  ".join([*cells, message]).rstrip())


def _age(timestamp: str, now_s: float) -> str:
    if not timestamp:
        return "-"
    age_s = max(0, int(now_s) - epoch_s(timestamp))
    unit_s, unit = next((each for each in _AGES_S if age_s >= each[0]), _AGES_S[-1])
    return f"{age_s // unit_s}{unit}"
