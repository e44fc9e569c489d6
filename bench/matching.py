"""How long a verdict takes among 100 000 snapshots, chosen or refused and explained, and what the index costs.

    python -m bench.matching [--snapshots 100000] [--asks 200]

Fleets, each with all its snapshots in one namespace, since others are never looked at:
- `deployments`: 500 workloads, each with its own hash, saved again and again on 12 kinds of nodes;
- `sandboxes`: one hash, and a group for each sandbox (a policy that groups by the sandbox's name);
- `upgraded`: one workload, all of whose snapshots were made by 200 other versions of runsc.
"""

import argparse
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from agent.kube.conditions import Phase
from agent.kube.meta import ObjectMeta
from agent.kube.objects import PodSnapshotPolicy, TriggerType
from agent.kube.selectors import LabelSelector
from agent.matching.choice import Verdict, choose
from agent.matching.facts import Architecture, MachineFacts
from agent.matching.index import SnapshotIndex
from agent.matching.pod import PodFacts
from agent.matching.snapshots import Needs, SnapshotFacts
from agent.podspec.identity import PodHash, pod_hash
from bench.report import publish

NAMESPACE = "bench"
GROUP = "agents.x-k8s.io/sandbox-name-hash"
# As many as a Cascade Lake has.
FEATURES = frozenset(f"feature{number:03}" for number in range(110))
NODE = MachineFacts(
    architecture=Architecture.AMD64,
    machine_type="n2-standard-8",
    cpu_vendor="GenuineIntel",
    cpu_features=FEATURES,
    cache_line_bytes=64,
    runsc_version="release-20261116.0",
    runsc_sha256="5e" * 32,
    platform="systrap",
    network="sandbox",
    overlay="root:self",
)
Fleet = tuple[list[PodSnapshotPolicy], list[SnapshotFacts], dict[str, PodFacts]]


def hash_of(number: int) -> PodHash:
    """Give the hash of the workload with that number."""
    return pod_hash({"spec": {"containers": [{"name": f"c{number}"}]}})


def policy(name: str, *grouping_labels: str) -> PodSnapshotPolicy:
    """Make a policy for the pods with its name as their `app`."""
    return PodSnapshotPolicy(
        ObjectMeta(name=name, namespace=NAMESPACE),
        storage_config_name="bucket",
        selector=LabelSelector((("app", name),)),
        trigger_type=TriggerType.MANUAL,
        grouping_labels=grouping_labels,
    )


def snapshot(number: int, policy_name: str, needs: Needs, labels: dict[str, str] | None = None) -> SnapshotFacts:
    """Make the snapshot with that number; each is a second younger than the last."""
    minutes, seconds = divmod(number, 60)
    days, minutes = divmod(minutes, 1440)
    created = f"2026-{1 + days // 28:02}-{1 + days % 28:02}T{minutes // 60:02}:{minutes % 60:02}:{seconds:02}Z"
    # Names are random, as UUIDs are: what is loaded by name comes in no order of time.
    name = f"{number * 2654435761 % 2**32:08x}-{number}"
    return SnapshotFacts(
        namespace=NAMESPACE, name=name, created=created, policy_name=policy_name, labels=labels or {}, needs=needs
    )


def pod(app: str, of: PodHash, **labels: str) -> PodFacts:
    """Make a pod of an application."""
    return PodFacts(namespace=NAMESPACE, name="pod", labels={"app": app} | labels, pod_hash=of)


def deployments(count: int) -> Fleet:
    """See the module's text."""
    kinds = [
        replace(NODE, machine_type=machine_type, runsc_version=f"release-{week}", runsc_sha256=f"{week:064}")
        for machine_type in ("n2-standard-8", "n4-standard-8", "c3-standard-8", "c4-standard-8")
        for week in (1, 2, 3)
    ]
    hashes = [hash_of(number) for number in range(500)]
    snapshots = [
        snapshot(
            number,
            f"app{number % 500}",
            Needs(Phase.AVAILABLE, hashes[number % 500], 0, kinds[number // 500 % len(kinds)]),
        )
        for number in range(count)
    ]
    policies = [policy(f"app{number}") for number in range(500)]
    asked = {
        "chosen": pod("app7", hashes[7]),
        "refused: another hash": pod("app7", hash_of(-1)),
        "refused: no policy": pod("none", hashes[7]),
        "refused: no snapshot of that name": replace(pod("app7", hashes[7]), pin="missing"),
    }
    return policies, snapshots, asked


def sandboxes(count: int) -> Fleet:
    """See the module's text."""
    needs = Needs(Phase.AVAILABLE, hash_of(0), 0, replace(NODE, runsc_version="release-1", runsc_sha256=f"{1:064}"))
    snapshots = [snapshot(number, "agents", needs, {GROUP: f"s{number // 3}"}) for number in range(count)]
    asked = {
        "chosen": pod("agents", hash_of(0), **{GROUP: f"s{count // 6}"}),
        "refused: another group": pod("agents", hash_of(0), **{GROUP: "new"}),
        "refused: another hash": pod("agents", hash_of(1), **{GROUP: f"s{count // 6}"}),
    }
    return [policy("agents", GROUP)], snapshots, asked


def upgraded(count: int) -> Fleet:
    """See the module's text."""
    kinds = [
        Needs(
            Phase.AVAILABLE, hash_of(0), 0, replace(NODE, runsc_version=f"old-{week}", runsc_sha256=f"{week + 10:064}")
        )
        for week in range(200)
    ]
    snapshots = [snapshot(number, "one", kinds[number % 200]) for number in range(count)]
    return [policy("one")], snapshots, {"refused: another runsc": pod("one", hash_of(0))}


FLEETS: dict[str, Callable[[int], Fleet]] = {
    "deployments": deployments,
    "sandboxes": sandboxes,
    "upgraded": upgraded,
}
HERE = replace(NODE, runsc_version="release-1", runsc_sha256=f"{1:064}")


def ask(index: SnapshotIndex, asked: PodFacts, expected: str, asks: int) -> dict[str, object]:
    """Time verdicts on one pod."""
    took_ms = []
    for _ in range(asks):
        began_s = time.perf_counter()
        verdict = choose(asked, HERE, index)
        took_ms.append((time.perf_counter() - began_s) * 1000)
    assert (verdict.chosen is not None) is (expected == "chosen")
    took_ms.sort()
    return {
        "median_ms": round(took_ms[len(took_ms) // 2], 3),
        "p99_ms": round(took_ms[len(took_ms) * 99 // 100], 3),
        "max_ms": round(took_ms[-1], 3),
        "says": _says(verdict),
    }


def _says(verdict: Verdict) -> str:
    if verdict.deciding is None:
        return "chosen"
    return (
        f"{verdict.deciding.reason}, {len(verdict.candidates)} explained, {sum(n for _, n in verdict.counts)} counted"
    )


def measure(fleet: Fleet, asks: int) -> dict[str, object]:
    """Load a fleet, ask for pods, and change it."""
    policies, snapshots, asked = fleet
    began_s = time.perf_counter()
    index = SnapshotIndex(policies, snapshots)
    loaded_s = time.perf_counter() - began_s
    began_s = time.perf_counter()
    for each in snapshots[:: max(1, len(snapshots) // 1000)]:
        index.remove(each.namespace, each.name)
        index.put(each)
    changes = len(snapshots[:: max(1, len(snapshots) // 1000)])
    changed_us = (time.perf_counter() - began_s) / changes * 1e6
    began_s = time.perf_counter()
    one_by_one = SnapshotIndex(policies)
    for each in sorted(snapshots, key=lambda each: each.name):
        one_by_one.put(each)
    return {
        "load_s": round(loaded_s, 3),
        "load_one_by_one_s": round(time.perf_counter() - began_s, 3),
        "remove_and_put_us": round(changed_us, 1),
        "verdicts": {name: ask(index, each, name, asks) for name, each in asked.items()},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--snapshots", type=int, default=100_000)
    parser.add_argument("--asks", type=int, default=200, help="verdicts on each pod")
    chosen = parser.parse_args(arguments)
    figures: dict[str, object] = {name: measure(make(chosen.snapshots), chosen.asks) for name, make in FLEETS.items()}
    figures["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    publish("matching", {"snapshots": chosen.snapshots, "asks": chosen.asks}, figures)


if __name__ == "__main__":
    main()
