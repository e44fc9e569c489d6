"""The pods of this node, as the agent knows them: from the wrapper's questions, and after its own restart from runsc.

Nothing of this is kept on disk: what must outlive the agent is in the notes of jobs, the records of restores and the
objects, and the rest is asked of the runtime again. No environment is kept, and of a pod's spec only what counts.
"""

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import structlog
import trio

from agent.errors import AgentError
from agent.matching.pod import PodFacts, pod_facts
from agent.node.node_runtime import NodeRuntime, SandboxKey
from agent.node.pods import Identity, Pod, Pods, identity
from agent.podspec.distil import distil
from agent.podspec.identity import pod_hash
from agent.podspec.shapes import Value
from agent.runtime.spec_rules import container_name
from agent.wrapper.bundle import Place, place, read_spec
from agent.wrapper.protocol import Container, ContainerKind, Create

log = structlog.get_logger(__name__)

# The most pods that a node is known to carry is 256 (GKE); a bound against a runtime that only creates.
MAX_PODS = 4096
# Bundles that are held in memory at a time. Reading is bound to one core: more at once are no faster.
BUNDLES_MAX = 4
# A sandbox that runsc doesn't list is gone, but for one that is being created.
CREATING_S = 120.0
# gVisor's name of a sandbox's first container without one of its own (runsc/boot/loader.go).
_NO_NAME = "__no_name_0"


class State(StrEnum):
    """Where a pod is in its life."""

    CREATED = "created"
    COLD = "started cold"
    RESTORING = "restoring"
    RESTORED = "restored"
    FAILED = "restore failed"
    FOUND = "found running"  # by an agent that wasn't there when it started


@dataclass(slots=True, eq=False)
class PodHere:
    """One pod. `containers` and `finished` are names as in its spec: those that run, and the init containers that end.

    `container_ids`: by gVisor's names, the first one's included. `reason`: of its state, for people. `saving` is held
    by whoever saves it.
    """

    key: SandboxKey
    who: Identity
    kind: ContainerKind
    bundle: str
    facts: PodFacts
    distilled: Mapping[str, Value]
    first_name: str
    containers: tuple[str, ...]
    finished: frozenset[str]
    container_ids: dict[str, str]
    since_s: float = field(default_factory=time.time)
    state: State = State.CREATED
    reason: str = ""
    snapshot: str = ""
    saving: trio.Lock = field(default_factory=trio.Lock)

    @property
    def is_loading(self) -> bool:
        """Whether memory of it is still to come."""
        return self.state is State.RESTORING

    @property
    def names(self) -> frozenset[str]:
        """gVisor's names of the containers that run in it, as long as it lives."""
        if self.kind is ContainerKind.SINGLE:
            return frozenset({self.first_name})
        return frozenset({self.first_name, *self.containers})

    @property
    def running_ids(self) -> dict[str, str]:
        """The ids of those of them that have been created, by name; init containers have ended, and may be gone."""
        return {name: container_id for name, container_id in self.container_ids.items() if name in self.names}

    def name_of(self, container_id: str) -> str:
        """Give a container's name. Raises: KeyError."""
        return {known: name for name, known in self.container_ids.items()}[container_id]


class PodsHere:
    """All of them; changed by one thread, in synchronous methods."""

    def __init__(self) -> None:
        self._pods: dict[SandboxKey, PodHere] = {}
        self.reading = trio.CapacityLimiter(BUNDLES_MAX)  # of bundles, for `pod_of`

    def __iter__(self) -> Iterator[PodHere]:
        return iter(tuple(self._pods.values()))

    def get(self, key: SandboxKey) -> PodHere | None:
        """Give the pod of a sandbox."""
        return self._pods.get(key)

    def of_container(self, key: SandboxKey) -> PodHere | None:
        """Give the pod that has a container, by what the key would be if it were a sandbox."""
        return next(
            (each for each in self if each.key.root == key.root and key.sandbox_id in each.container_ids.values()), None
        )

    def named(self, namespace: str, name: str) -> PodHere | None:
        """Give the pod of a name, the last one that was made if there were several."""
        found = [each for each in self if (each.who.namespace, each.who.name) == (namespace, name)]
        return max(found, key=lambda each: each.since_s, default=None)

    def put(self, pod: PodHere) -> None:
        """Take a pod in; the oldest goes when there are too many."""
        self._pods.pop(pod.key, None)
        while len(self._pods) >= MAX_PODS:
            del self._pods[next(iter(self._pods))]
        self._pods[pod.key] = pod

    def keep_only(self, there: set[SandboxKey], *, now_s: float) -> None:
        """Forget the pods whose sandboxes are gone."""
        for pod in self:
            if pod.key not in there and now_s - pod.since_s > CREATING_S:
                del self._pods[pod.key]


async def pod_of(
    request: Create, key: SandboxKey, pods: Pods, *, reading: trio.CapacityLimiter
) -> tuple[PodHere, dict[str, str]]:
    """Say which pod a sandbox's first container is, and give its bundle's annotations.

    A bundle that is read takes many times its size, so none is kept beyond this, and `reading` bounds how many are.
    Raises: `AgentError`: its bundle, its Pod or its manifest can't be used.
    """
    async with reading:
        spec, _ = await trio.to_thread.run_sync(read_spec, request.bundle)
        pod = await pods.find(request, spec)
        here = _pod_here(request, key, spec, pod)
        return here, {str(name): str(text) for name, text in (spec.get("annotations") or {}).items()}


def _pod_here(request: Create, key: SandboxKey, spec: Mapping[str, Any], pod: Pod) -> PodHere:
    distilled = distil(pod)
    inner = pod["spec"]
    assert isinstance(inner, Mapping)  # distil has read it
    init, containers = inner.get("initContainers") or (), inner["containers"]
    finished = frozenset(str(each["name"]) for each in init if each.get("restartPolicy") != "Always")
    running = tuple(str(each["name"]) for each in (*init, *containers) if str(each["name"]) not in finished)
    first_name = container_name(spec) or _NO_NAME
    return PodHere(
        key=key,
        who=identity(request, spec),
        kind=request.kind,
        bundle=request.bundle,
        facts=pod_facts(pod, pod_hash(distilled)),
        distilled=distilled,
        first_name=first_name,
        containers=running,
        finished=finished,
        container_ids={first_name: request.container.container_id},
    )


async def find_again(runtime: NodeRuntime, pods: Pods, here: PodsHere, *, runsc: str) -> None:
    """Take in the pods that run already, as an agent finds them at its start; what can't be read is passed over."""
    found: list[tuple[Create, SandboxKey]] = []
    for key, state in await runtime.containers():
        if state.status == "stopped":
            continue
        try:
            spec, _ = await trio.to_thread.run_sync(read_spec, os.fspath(state.bundle))
            found.append((_as_created(key, os.fspath(state.bundle), place(spec), runsc), key))
        except AgentError as error:
            log.warning("a container's bundle can't be read", container=key.sandbox_id, error=str(error))
    for request, key in sorted(found, key=lambda each: each[0].kind is ContainerKind.FURTHER):
        if request.kind is ContainerKind.FURTHER:
            pod = here.get(SandboxKey(key.root, request.sandbox_id))
            if pod is not None:
                pod.container_ids[request.name] = key.sandbox_id
            continue
        try:
            pod, _ = await pod_of(request, key, pods, reading=here.reading)
        except AgentError as error:
            log.info("a container is of no pod that is known", container=key.sandbox_id, reason=str(error))
            continue
        pod.state, pod.reason = State.FOUND, "it runs since before the agent"
        here.put(pod)


def _as_created(key: SandboxKey, bundle: str, where: Place, runsc: str) -> Create:
    """Give the question that the wrapper asked when it was created."""
    container = Container(key.sandbox_id, runsc, os.fspath(key.root))
    return Create(container, bundle, where.kind, where.name, where.sandbox_id or key.sandbox_id, where.pod)
