"""What the agent says of itself: one JSON object for `snapagent status`. Pure.

Never a spec, an environment or a token. Members are added, and keep their names and meanings: `docs/agent.md` has them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from agent.kube.conditions import conditions_mapping
from agent.matching.facts import MachineFacts
from agent.node.events import Events
from agent.node.known_objects import KnownObjects
from agent.node.pods_here import PodHere

_LAST_EVENTS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Under:
    """What is under way: the snapshots that are being saved, and those that are being restored, with their pods.

    `uncollected`: stores whose collection has failed, and why.
    """

    saves: Mapping[str, str]
    restores: tuple[tuple[str, str], ...]
    uncollected: Mapping[str, str]


def described(
    node_name: str,
    machine: MachineFacts | None,
    known: KnownObjects,
    pods: Iterable[PodHere],
    under: Under,
    events: Events,
    *,
    problems: tuple[str, ...],
    is_ending: bool,
) -> dict[str, object]:
    """Describe the agent; `machine` None: the node's facts aren't known, and `problems` say why."""
    return {
        "node": {"name": node_name, "facts": None if machine is None else machine.to_mapping()},
        "problems": [*problems],
        "is_synced": known.is_synced,
        "is_ending": is_ending,
        "policies": [
            {
                "namespace": policy.metadata.namespace,
                "name": policy.metadata.name,
                "trigger": policy.trigger_type.value,
                "postCheckpoint": policy.post_checkpoint.value,
                "storageConfigName": policy.storage_config_name,
                "conditions": conditions_mapping(policy.status.conditions),
            }
            for _, policy in sorted(known.policies.items())
        ],
        "storageConfigs": [
            {
                "name": config.metadata.name,
                "store": config.location.store_url,
                "conditions": conditions_mapping(config.status.conditions),
            }
            for _, config in sorted(known.configs.items())
        ],
        "without_policy": [
            {"namespace": namespace, "policy": name, "snapshots": count}
            for (namespace, name), count in known.without_policy().items()
        ],
        "unreadable": [{"where": where, "problems": [*each]} for where, each in sorted(known.unreadable.items())],
        "pods": [
            {
                "namespace": pod.who.namespace,
                "name": pod.who.name,
                "uid": pod.who.uid,
                "sandbox": pod.key.sandbox_id,
                "state": pod.state.value,
                "reason": pod.reason,
                "snapshot": pod.snapshot,
                "hash": str(pod.facts.pod_hash),
                "since_s": pod.since_s,
            }
            for pod in sorted(pods, key=lambda each: (str(each.who), each.since_s))
        ],
        "saves": [{"snapshot": snapshot, "pod": pod} for snapshot, pod in sorted(under.saves.items())],
        "restores": [{"pod": pod, "snapshot": snapshot} for pod, snapshot in under.restores],
        "uncollected": [{"store": store, "problem": why} for store, why in sorted(under.uncollected.items())],
        "events": [{**asdict(event), "what": event.what.value} for event in events.last(_LAST_EVENTS)],
        "counts": [
            {"event": what.value, "reason": reason, "count": count}
            for (what, reason), count in sorted(events.counts.items())
        ],
    }
