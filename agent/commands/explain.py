"""`snapagent explain`: would this pod be restored, and if not, what decides against it."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import click

from agent.commands.inputs import (
    Found,
    config_option,
    files_option,
    index_option,
    is_manifest,
    namespace_option,
    objects_in,
    one_workload,
    read_text,
    say,
    state_option,
)
from agent.kube.directory import ObjectDirectory
from agent.kube.errors import NotFound
from agent.kube.objects import PIN, Kind, PodSnapshot, PodSnapshotPolicy
from agent.matching.choice import choose, needs_unmet, policy_unmet
from agent.matching.facts import MachineFacts
from agent.matching.index import SnapshotIndex
from agent.matching.pod import PodFacts, limits, pod_facts
from agent.matching.reasons import Reason, Refusal, differing
from agent.matching.snapshots import snapshot_facts
from agent.podspec.difference import Difference, differences
from agent.podspec.distil import distil
from agent.podspec.identity import pod_hash
from agent.podspec.shapes import PodSpecError, Value
from streamd.errors import Exit


@dataclass(frozen=True, slots=True)
class Compared:
    """A snapshot, or another pod, with all that keeps the pod from being restored from it; the first decides."""

    name: str
    refusals: tuple[Refusal, ...]
    differences: tuple[Difference, ...] = ()


@dataclass(frozen=True, slots=True)
class Explanation:
    """`source`: what the pod would be restored from, if anything. `refusals`: of the pod itself, whatever the snapshot.

    `others`: how many snapshots each reason decided against, where all were asked.
    """

    source: str | None
    refusals: tuple[Refusal, ...] = ()
    compared: tuple[Compared, ...] = ()
    others: tuple[tuple[Reason, int], ...] = ()

    @property
    def deciding(self) -> Refusal | None:
        """What decided against it; None when the pod would be restored."""
        found = [*self.refusals, *(refusal for each in self.compared for refusal in each.refusals)]
        return found[0] if found and self.source is None else None


@click.command("explain")
@click.argument("manifest", metavar="MANIFEST")
@click.option(
    "--against",
    metavar="SNAPSHOT|MANIFEST",
    help="Compare with this PodSnapshot of the pod's namespace, or with the pod of this file [all snapshots].",
)
@click.option("--node", metavar="FACTS", help="The node's facts, a JSON file [as the node of the snapshot].")
@namespace_option
@index_option
@files_option
@state_option
@config_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout, errors too.")
def command(
    manifest: str,
    against: str | None,
    node: str | None,
    namespace: str,
    index: int | None,
    files: Path | None,
    state: Path | None,
    config_path: Path | None,
    as_json: bool,
) -> Exit:
    """Say whether a pod would be restored, and if not, what decides against it: field by field.

    MANIFEST holds one pod, or one thing that makes pods (a Deployment, …); `-` reads standard input. What decides is
    one of: policy (none selects the pod, or another group), snapshot (not Ready, …), hash (a field of the pod that
    counts: each that differs is named, with both values), hardware, gvisor, gpu, pod (it can't be saved at all).

    With another manifest in --against only the hash is asked. Without --against all snapshots of the namespace are, as
    when a pod starts; that needs --node.

    Ends with 0 if the pod would be restored, and with 7 if it would start cold.

    \b
    Example:
      snapagent explain deployment.yaml --against 6f1d8a52-4a5e-4a64-9c0e-3c2b7c7c9f10
      git show HEAD~1:web.yaml | snapagent explain web.yaml --against -
    """
    found = one_workload(manifest, namespace=namespace)
    distilled = found.distilled(index)
    here = None if node is None else _facts(node)
    if against is not None and is_manifest(against):
        if here is not None:
            raise click.UsageError("--node goes with a snapshot: between two manifests only the hash is asked")
        if against == manifest == "-":
            raise click.UsageError("only one of the two can be standard input")
        explanation = _against_pod(one_workload(against, namespace=namespace), distilled, index)
    else:
        pod = pod_facts(found.workload.pod(index), pod_hash(distilled))
        directory = objects_in(state, files, config_path)
        if against is not None:
            explanation = _against_snapshot(directory, against, pod, here, distilled)
        elif here is not None:
            explanation = _against_all(directory, pod, here, distilled)
        else:
            raise click.UsageError("--against names a snapshot; to ask all of them, --node is needed")
    if as_json:
        click.echo(json.dumps(_described(found, explanation)))
    else:
        _show(found, explanation)
    return Exit.DONE if explanation.source is not None else Exit.REFUSED


def _facts(path: str) -> MachineFacts:
    try:
        value: object = json.loads(read_text(path))
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise click.BadParameter(f"{path} holds no JSON object", param_hint="--node")
    return MachineFacts.from_mapping(value, where=path)


def _against_pod(other: Found, distilled: dict[str, Value], index: int | None) -> Explanation:
    old = other.distilled(index)
    found = differences(old, distilled)
    name = f"{other.workload} of {other.source}"
    if not found:
        return Explanation(source=name)
    refusal = differing(Reason.POD_HASH, "pod spec (hash of what counts)", pod_hash(old), pod_hash(distilled))
    return Explanation(None, compared=(Compared(name, (refusal,), found),))


def _against_snapshot(
    directory: ObjectDirectory, name: str, pod: PodFacts, here: MachineFacts | None, distilled: dict[str, Value]
) -> Explanation:
    snapshot = directory.get(PodSnapshot, name, pod.namespace)
    facts = snapshot_facts(snapshot)
    # Rules that compare the snapshot's node with itself always hold.
    there = here or facts.needs.machine
    of_pod = tuple(limits(pod, there)) if there is not None else ()
    unmet: list[Refusal] = []
    if not pod.pin:
        unmet += policy_unmet(facts, pod, _policy(directory, snapshot))
    elif pod.pin != name:  # policies aren't asked by a pod that has chosen by itself
        unmet.append(Refusal(Reason.PIN_OTHER, f"{PIN} names {pod.pin[:80]!r}, and no other is taken", name, pod.pin))
    if there is not None:
        unmet += needs_unmet(facts.needs, pod, there)
    else:
        unmet.append(Refusal(Reason.NO_RECORD, "the snapshot doesn't say what it was made on"))
    if not of_pod and not unmet:
        return Explanation(source=name)
    return Explanation(None, of_pod, (_compared(snapshot, unmet, distilled),))


def _policy(directory: ObjectDirectory, snapshot: PodSnapshot) -> PodSnapshotPolicy | None:
    try:
        return directory.get(PodSnapshotPolicy, snapshot.policy_name, snapshot.metadata.namespace)
    except NotFound:
        return None


def _against_all(
    directory: ObjectDirectory, pod: PodFacts, here: MachineFacts, distilled: dict[str, Value]
) -> Explanation:
    listing = directory.list(Kind.POLICY, Kind.SNAPSHOT, namespace=pod.namespace)
    for each in listing.unreadable:
        click.echo(f"not read: {each.where}: {'; '.join(each.problems)!r}", err=True)
    snapshots = {each.metadata.name: each for each in listing.items if isinstance(each, PodSnapshot)}
    policies = [each for each in listing.items if isinstance(each, PodSnapshotPolicy)]
    verdict = choose(pod, here, SnapshotIndex(policies, map(snapshot_facts, snapshots.values())))
    if verdict.chosen is not None:
        return Explanation(source=verdict.chosen.name)
    compared = [_compared(snapshots[each.snapshot.name], each.refusals, distilled) for each in verdict.candidates]
    return Explanation(None, verdict.refusals, tuple(compared), verdict.counts)


def _compared(snapshot: PodSnapshot, refusals: Iterable[Refusal], distilled: dict[str, Value]) -> Compared:
    refusals = tuple(refusals)
    found: tuple[Difference, ...] = ()
    origin = snapshot.status.origin
    if origin is not None and origin.distilled and any(each.reason is Reason.POD_HASH for each in refusals):
        try:
            found = differences(distil(origin.distilled), distilled)
        except PodSpecError:
            found = ()  # kept by a version that distils otherwise: the hashes differ, which is told
    return Compared(snapshot.metadata.name, refusals, found)


def _described(found: Found, explanation: Explanation) -> dict[str, object]:
    deciding = explanation.deciding
    return {
        "pod": {"kind": found.workload.kind, "namespace": found.workload.namespace, "name": found.workload.name},
        "would_be_restored": explanation.source is not None,
        "from": explanation.source,
        "decided_by": None if deciding is None else deciding.reason.decider.value,
        "reason": None if deciding is None else deciding.reason.value,
        "refusals": [_refusal(each) for each in explanation.refusals],
        "compared": [
            {
                "name": each.name,
                "refusals": [_refusal(refusal) for refusal in each.refusals],
                "differences": [{"path": one.path, "old": one.old, "new": one.new} for one in each.differences],
            }
            for each in explanation.compared
        ],
        "others": {reason.value: count for reason, count in explanation.others},
    }


def _refusal(refusal: Refusal) -> dict[str, object]:
    return {
        "decided_by": refusal.reason.decider.value,
        "reason": refusal.reason.value,
        "message": refusal.message,
        "saved": refusal.saved,
        "here": refusal.here,
    }


def _show(found: Found, explanation: Explanation) -> None:
    deciding = explanation.deciding
    if deciding is None:
        say(f"{found.workload} would be restored from {explanation.source}")
        return
    say(f"{found.workload} would start cold; what decides: {deciding.reason.decider}")
    for refusal in explanation.refusals:
        say(f"  {refusal.reason.decider}: {refusal.message}")
    for each in explanation.compared:
        say(f"  against {each.name}:")
        for refusal in each.refusals:
            if refusal.reason is Reason.POD_HASH and each.differences:
                for difference in each.differences:
                    say(f"    hash: {difference}")
            else:
                say(f"    {refusal.reason.decider}: {refusal.message}")
    if explanation.others:
        counts = ", ".join(f"{reason} {count}" for reason, count in explanation.others)
        say(f"  what decided, of all snapshots of {found.workload.namespace}: {counts}")
