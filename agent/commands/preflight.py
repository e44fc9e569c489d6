"""`snapagent preflight`: which snapshots would a change of manifests orphan, and because of which fields."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from agent.commands.inputs import (
    Found,
    config_option,
    manifest_files,
    namespace_option,
    no_workload,
    read_workloads,
    say,
    snapshots_in,
    state_option,
)
from agent.kube.conditions import Phase
from agent.kube.objects import Kind, PodSnapshot
from agent.kube.origin import Origin
from agent.podspec.difference import differences
from agent.podspec.distil import distil
from agent.podspec.identity import HASH_VERSION, pod_hash
from agent.podspec.shapes import PodSpecError
from streamd.errors import Exit


@dataclass(frozen=True, slots=True)
class Orphan:
    """A snapshot that its workload's next pods wouldn't be restored from, and why, a line each."""

    snapshot: str
    because: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Outlook:
    """What becomes of a workload's snapshots; `kept`: their names."""

    found: Found
    kept: tuple[str, ...]
    orphans: tuple[Orphan, ...]


@click.command("preflight")
@click.argument("manifests", metavar="DIRECTORY|MANIFEST...", nargs=-1, required=True)
@namespace_option
@state_option
@config_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout, errors too.")
def command(
    manifests: tuple[str, ...], namespace: str, state: Path | None, config_path: Path | None, as_json: bool
) -> Exit:
    """Say which snapshots a change of manifests would orphan, and because of which fields. For CI.

    Reads the manifests as they will be (files, `-` for standard input, or all *.yaml, *.yml and *.json below a
    directory) and compares each workload's next pods with the snapshots of its pods that there are. A snapshot is a
    workload's when its pod's name is one that the workload gives.

    Ends with 0 if no snapshot is orphaned, and with 7 if one is: the first pods after the change would start cold, and
    a new snapshot would be needed.

    \b
    Example:
      snapagent preflight k8s/ --snapshots state/
      helm template web chart/ | snapagent preflight -
    """
    paths = [path for each in manifests for path in (manifest_files(each) if Path(each).is_dir() else (each,))]
    found = [workload for path in paths for workload in read_workloads(path, namespace=namespace, is_lenient=True)]
    if not found:
        raise no_workload(manifests)
    listing = snapshots_in(state, config_path).list(Kind.SNAPSHOT)  # policies play no part
    for each in listing.unreadable:
        click.echo(f"not read: {each.where}: {'; '.join(each.problems)!r}", err=True)
    snapshots = [each for each in listing.items if isinstance(each, PodSnapshot)]
    outlooks, others = outlook(found, snapshots)
    orphaned = sum(len(each.orphans) for each in outlooks)
    if as_json:
        click.echo(json.dumps(_described(outlooks, others)))
    else:
        _show(outlooks, others)
    return Exit.REFUSED if orphaned else Exit.DONE


def outlook(found: Sequence[Found], snapshots: Iterable[PodSnapshot]) -> tuple[list[Outlook], list[str]]:
    """Say what becomes of the snapshots of each workload, and which snapshots are none of theirs.

    Snapshots that failed, or that are being deleted, are nobody's loss. Raises: `PodSpecError`.
    """
    kept: dict[int, list[str]] = {number: [] for number in range(len(found))}
    orphans: dict[int, list[Orphan]] = {number: [] for number in range(len(found))}
    others: list[str] = []
    for snapshot in snapshots:
        origin, namespace = snapshot.status.origin, snapshot.metadata.namespace
        if origin is None or snapshot.phase in (Phase.FAILED, Phase.DELETING):
            continue
        owners = [
            number
            for number, each in enumerate(found)
            if each.workload.namespace == namespace and each.workload.makes(origin.pod_name)
        ]
        if not owners:
            others.append(f"{namespace}/{snapshot.metadata.name}")
            continue
        reasons = {number: _why_not(found[number], origin) for number in owners}
        # Names may fit two workloads (`web` and `web-1`): the one that is nearest is meant.
        owner = min(reasons, key=lambda number: len(reasons[number]))
        if reasons[owner]:
            orphans[owner].append(Orphan(snapshot.metadata.name, reasons[owner]))
        else:
            kept[owner].append(snapshot.metadata.name)
    return [Outlook(each, tuple(kept[n]), tuple(orphans[n])) for n, each in enumerate(found)], others


def _why_not(found: Found, origin: Origin) -> tuple[str, ...]:
    """Say why a workload's next pod doesn't match the pod of a snapshot; nothing when it does."""
    new = found.distilled(found.workload.index_of(origin.pod_name))
    if origin.pod_hash.version != HASH_VERSION:
        return (f"the hash is of version {origin.pod_hash.version} of its rules, which is {HASH_VERSION} by now",)
    if origin.pod_hash.sha256 == pod_hash(new).sha256:
        return ()
    try:
        why = tuple(map(str, differences(distil(origin.distilled), new))) if origin.distilled else ()
    except PodSpecError:
        why = ()
    return why or ("its pod has another hash, and what it was isn't recorded",)


def _described(outlooks: Sequence[Outlook], others: Sequence[str]) -> dict[str, object]:
    return {
        "orphaned": sum(len(each.orphans) for each in outlooks),
        "kept": sum(len(each.kept) for each in outlooks),
        "workloads": [
            {
                "file": each.found.source,
                "kind": each.found.workload.kind,
                "namespace": each.found.workload.namespace,
                "name": each.found.workload.name,
                "kept": [*each.kept],
                "orphaned": [{"snapshot": one.snapshot, "because": [*one.because]} for one in each.orphans],
            }
            for each in outlooks
        ],
        "of_other_workloads": [*others],
    }


def _show(outlooks: Sequence[Outlook], others: Sequence[str]) -> None:
    for each in outlooks:
        where = f"{each.found.workload} ({each.found.source})"
        say(
            f"{where}: {len(each.kept)} kept, {len(each.orphans)} orphaned"
            if each.kept or each.orphans
            else f"{where}: has no snapshots"
        )
        # Snapshots of one revision go for the same reasons.
        by_reason: dict[tuple[str, ...], list[str]] = {}
        for orphan in each.orphans:
            by_reason.setdefault(orphan.because, []).append(orphan.snapshot)
        for because, names in by_reason.items():
            say(f"  this change orphans {', '.join(names)}, because")
            for line in because:
                say(f"    {line}")
    if others:
        say(f"{len(others)} snapshots are of other workloads")
