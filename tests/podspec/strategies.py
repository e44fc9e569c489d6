"""Pods as people write them, at random, and ways to write the same pod differently."""

import random
from typing import Any

from hypothesis import strategies as st

_NAMES = st.sampled_from(["a", "b", "c", "web", "data"])
_TEXTS = st.sampled_from(["", "x", "--port=80", "/", "/data", "HTTP", "File", "ClusterFirst", "ü"])
_MAYBE_FLAG = st.sampled_from([None, True, False])
_NUMBERS = st.sampled_from([0, 1, 80, 420, 1000])


def _some(**members: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Give an object with any of these members."""
    return st.fixed_dictionaries({}, optional=members)


def _with(name: st.SearchStrategy[Any], key: str, rest: st.SearchStrategy[dict[str, Any]], *, most: int = 3) -> Any:
    """Give a list of objects that no two have the same key."""
    item = st.builds(lambda value, others: {key: value, **others}, name, rest)
    return st.lists(item, unique_by=lambda each: each[key], max_size=most)


_HANDLERS = st.one_of(
    st.builds(lambda command: {"exec": {"command": command}}, st.lists(_TEXTS, max_size=2)),
    st.builds(lambda rest: {"httpGet": {"port": 80, **rest}}, _some(path=_TEXTS, scheme=_TEXTS)),
    st.just({"sleep": {"seconds": 1}}),
)
_SECURITY = _some(
    runAsUser=st.one_of(st.none(), _NUMBERS),
    privileged=_MAYBE_FLAG,
    capabilities=_some(add=st.lists(_TEXTS, max_size=2), drop=st.lists(_TEXTS, max_size=2)),
)
_CONTAINERS = _some(
    image=_TEXTS,
    args=st.lists(_TEXTS, max_size=3),
    command=st.lists(_TEXTS, max_size=2),
    env=st.just([{"name": "A", "value": "1"}]),
    ports=_with(_NUMBERS, "containerPort", _some(name=_TEXTS, protocol=st.sampled_from(["", "TCP", "UDP"]))),
    volumeMounts=_with(_TEXTS, "mountPath", _some(name=_NAMES, readOnly=_MAYBE_FLAG, subPath=_TEXTS)),
    volumeDevices=_with(_NAMES, "devicePath", _some(name=_NAMES)),
    lifecycle=_some(postStart=_HANDLERS, preStop=_HANDLERS),
    terminationMessagePolicy=st.sampled_from(["", "File", "FallbackToLogsOnError"]),
    securityContext=_SECURITY,
    stdin=_MAYBE_FLAG,
)
_SOURCES = st.one_of(
    st.just({}),
    st.builds(lambda rest: {"emptyDir": rest}, _some(medium=_TEXTS, sizeLimit=st.sampled_from(["1Gi", "1024Mi", 5]))),
    st.builds(lambda rest: {"configMap": {"name": "c", **rest}}, _some(defaultMode=_NUMBERS, optional=_MAYBE_FLAG)),
    st.builds(lambda rest: {"hostPath": {"path": "/x", **rest}}, _some(type=_TEXTS)),
    st.builds(lambda name: {"image": {"reference": name}}, st.sampled_from(["model", "model:latest", "model:1"])),
    st.builds(lambda claim: {"persistentVolumeClaim": {"claimName": claim}}, _NAMES),
    st.builds(
        lambda valid: {"projected": {"sources": [{"serviceAccountToken": {"path": "token", **valid}}]}},
        _some(expirationSeconds=st.sampled_from([3600, 7200])),
    ),
)
PODS = st.fixed_dictionaries(
    {
        "spec": st.builds(
            lambda containers, rest: {"containers": containers, **rest},
            _with(_NAMES, "name", _CONTAINERS).filter(bool),
            _some(
                initContainers=_with(_NAMES, "name", _CONTAINERS),
                volumes=_with(_NAMES, "name", _SOURCES),
                dnsPolicy=st.sampled_from(["", "ClusterFirst", "None"]),
                hostNetwork=_MAYBE_FLAG,
                hostUsers=_MAYBE_FLAG,
                automountServiceAccountToken=_MAYBE_FLAG,
                securityContext=_some(fsGroup=_NUMBERS, supplementalGroups=st.lists(_NUMBERS, max_size=2)),
            ),
        )
    },
    optional={"metadata": _some(labels=st.just({"app": "web"}), annotations=st.just({"dev.gvisor.x": ""}))},
)

# Lists that the API declares to be maps.
_UNORDERED = ("volumes", "volumeMounts", "ports", "volumeDevices")
_ADDED = {"future": {"unknown": 1}, "x-null": None}


def rewritten(value: Any, chance: random.Random, name: str = "") -> Any:
    """Write the same pod differently: members in another order, nulls, unknown members, map lists in another order."""
    if isinstance(value, dict):
        members = [(key, rewritten(member, chance, key)) for key, member in value.items()]
        # A volume without a source is an emptyDir, and one with nothing but an unknown source is refused.
        if name not in ("labels", "annotations") and value.keys() != {"name"}:
            members += [(key, member) for key, member in _ADDED.items() if chance.random() < 0.2]
        chance.shuffle(members)
        return dict(members)
    if isinstance(value, list):
        items = [rewritten(item, chance) for item in value]
        if name in _UNORDERED:
            chance.shuffle(items)
        return items
    return value
