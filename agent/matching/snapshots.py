"""A PodSnapshot, as far as matching cares; small, since a node keeps all of its cluster's in memory. Pure."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from agent.kube.conditions import Phase
from agent.kube.errors import InvalidObject
from agent.kube.objects import PodSnapshot
from agent.matching.facts import MachineFacts
from agent.podspec.identity import PodHash

# Sorts newest first, and by name among those of one second, as clients do (they sort a listing, which is by name).
Order: TypeAlias = tuple[str, str]
_LATEST_FIRST = str.maketrans("0123456789", "9876543210")


@dataclass(frozen=True, slots=True)
class Needs:
    """All that rules compare with a pod and a node; many snapshots share one. `machine` None: can't be read.

    `pod_hash` None: it isn't known, as of a snapshot that was begun a moment ago.
    """

    phase: Phase
    pod_hash: PodHash | None
    gpus: int = 0
    machine: MachineFacts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotFacts:
    """A snapshot. `created`: RFC 3339, UTC, whole seconds; `url`: of its data, `store_url`: of that in which it is."""

    namespace: str
    name: str
    created: str
    policy_name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    needs: Needs
    url: str = ""
    store_url: str = ""

    @property
    def order(self) -> Order:
        """Sort key: newest first."""
        return self.created.translate(_LATEST_FIRST), self.name


def snapshot_facts(snapshot: PodSnapshot) -> SnapshotFacts:
    """Take from a PodSnapshot what matching needs."""
    meta, origin = snapshot.metadata, snapshot.status.origin
    machine = None
    if origin is not None:
        try:
            machine = MachineFacts.from_mapping(origin.node_facts, where=f"PodSnapshot {meta.namespace}/{meta.name}")
        except InvalidObject:
            machine = None  # a later version's, perhaps: it matches nothing, by name (`Reason.NO_RECORD`)
    return SnapshotFacts(
        namespace=meta.namespace,
        name=meta.name,
        created=meta.creation_timestamp,
        policy_name=snapshot.policy_name,
        labels=dict(meta.labels),
        needs=Needs(
            phase=snapshot.phase,
            pod_hash=None if origin is None else origin.pod_hash,
            gpus=0 if origin is None else origin.gpus,
            machine=machine,
        ),
        url=snapshot.status.snapshot_url,
        store_url=sys.intern(snapshot.status.snapshot_url.rpartition("/")[0]),
    )
