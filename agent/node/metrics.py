"""What is counted for Prometheus: names, labels and meanings, and how they are written. Pure.

`docs/agent.md` has the same table for operators; a test compares them.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from agent.kube.conditions import ConditionType, Status, condition
from agent.kube.objects import Kind, PodSnapshotPolicy, PodSnapshotStorageConfig
from agent.node.events import Events
from agent.node.known_objects import KnownObjects
from agent.node.pods_here import PodHere, State
from agent.node.status import Under


@dataclass(frozen=True, slots=True)
class Metric:
    """One; `labels` in the order in which they are written."""

    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str


EVENTS = Metric("snapagent_events_total", "counter", ("event", "reason"), "What has happened, by kind and reason")
PODS = Metric("snapagent_pods", "gauge", ("state",), "Pods of this node by where they are")
SAVES = Metric("snapagent_saves_under_way", "gauge", (), "Saves and uploads, and pods that may save themselves")
RESTORES = Metric("snapagent_restores_under_way", "gauge", (), "Images that are held for a restore")
UNREADABLE = Metric("snapagent_objects_unreadable", "gauge", (), "Files or objects that can't be used")
NOT_READY = Metric("snapagent_objects_not_ready", "gauge", ("kind",), "Policies and storage configs that aren't Ready")
ORPHANS = Metric("snapagent_snapshots_without_policy", "gauge", (), "Snapshots whose policy isn't there")
UNCOLLECTED = Metric("snapagent_stores_uncollected", "gauge", (), "Stores whose last collection from here has failed")


def metrics_text(known: KnownObjects, pods: Iterable[PodHere], under: Under, events: Events) -> str:
    """Write the metrics as Prometheus reads them (text exposition format 0.0.4)."""
    states = Counter(pod.state for pod in pods)
    standing: list[PodSnapshotPolicy | PodSnapshotStorageConfig] = [*known.policies.values(), *known.configs.values()]
    not_ready = Counter(
        each.kind
        for each in standing
        if (found := condition(each.status.conditions, ConditionType.READY)) and found.status is Status.FALSE
    )
    values: dict[Metric, Mapping[tuple[str, ...], int]] = {
        EVENTS: {(what.value, reason): count for (what, reason), count in sorted(events.counts.items())},
        PODS: {(state.value,): states[state] for state in State},
        SAVES: {(): len(under.saves)},
        RESTORES: {(): len(under.restores)},
        UNREADABLE: {(): len(known.unreadable)},
        NOT_READY: {(kind.value,): not_ready[kind] for kind in (Kind.POLICY, Kind.STORAGE_CONFIG)},
        UNCOLLECTED: {(): len(under.uncollected)},
        ORPHANS: {(): sum(known.without_policy().values())},
    }
    return "".join(f"{line}\n" for metric, counts in values.items() for line in _lines(metric, counts))


def _lines(metric: Metric, counts: Mapping[tuple[str, ...], int]) -> Iterable[str]:
    yield f"# HELP {metric.name} {metric.meaning}"
    yield f"# TYPE {metric.name} {metric.kind}"
    for texts, count in counts.items():
        labels = ",".join(f'{name}="{_label(text)}"' for name, text in zip(metric.labels, texts, strict=True))
        yield f"{metric.name}{{{labels}}} {count}" if labels else f"{metric.name} {count}"


def _label(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")
