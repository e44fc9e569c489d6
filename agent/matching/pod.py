"""A pod, as far as matching cares. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from agent.kube.errors import InvalidObject
from agent.kube.fields import Fields, shown
from agent.kube.objects import PIN
from agent.matching.facts import MachineFacts
from agent.matching.gpu import gpu_limits
from agent.matching.machine import is_tpu_machine, series_of
from agent.matching.reasons import Reason, Refusal
from agent.podspec.identity import PodHash

# kubernetes-engine/docs/how-to/gpus, /tpus: the resources; cloud-storage-fuse-csi-driver: what marks its pods.
_GPU, _TPU = "nvidia.com/gpu", "google.com/tpu"
_FUSE_ANNOTATION, _FUSE_CONTAINER, _FUSE_DRIVER = (
    "gke-gcsfuse/volumes",
    "gke-gcsfuse-sidecar",
    "gcsfuse.csi.storage.gke.io",
)
_MAX_DEVICES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class PodFacts:
    """A pod that is to be saved or restored. `pin`: the PodSnapshot that it asks for, empty if none."""

    namespace: str
    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    pod_hash: PodHash
    pin: str = ""
    gpus: int = 0
    has_tpu: bool = False
    has_fuse_sidecar: bool = False


def pod_facts(pod: Mapping[str, object], pod_hash: PodHash) -> PodFacts:
    """Take from a Pod what matching needs; `pod_hash` is the same pod's. Raises: `InvalidObject`."""
    problems: list[str] = []
    top = Fields(pod, "", problems, is_strict=False)
    meta, spec = top.member("metadata"), top.member("spec")
    annotations = meta.text_map("annotations")
    containers, init = spec.members("containers"), spec.members("initContainers")
    gpus, tpus = _devices(containers, init)
    names = {each.text("name", default="") for each in (*containers, *init)}
    drivers = {each.member("csi").text("driver", default="") for each in spec.members("volumes")}
    facts = PodFacts(
        namespace=meta.text("namespace", default="default"),
        name=meta.text("name", default="") or meta.text("generateName", default=""),
        labels=meta.text_map("labels"),
        pod_hash=pod_hash,
        pin=annotations.get(PIN, ""),
        gpus=gpus,
        has_tpu=tpus > 0,
        has_fuse_sidecar=annotations.get(_FUSE_ANNOTATION) == "true"
        or _FUSE_CONTAINER in names
        or _FUSE_DRIVER in drivers,
    )
    if problems:
        raise InvalidObject(f"Pod {facts.namespace}/{facts.name}", tuple(problems))
    return facts


def limits(pod: PodFacts, here: MachineFacts) -> Iterator[Refusal]:
    """Say what keeps a pod from being saved on a node, and from being restored there, whatever the snapshot."""
    if series_of(here.machine_type) == "e2":
        yield Refusal(
            Reason.E2_MACHINE,
            f"{here.machine_type}: pods can't be saved on E2 machines, whose CPUs change underneath",
            here=here.machine_type,
        )
    if pod.has_tpu or is_tpu_machine(here.machine_type):
        yield Refusal(Reason.TPU, "pods with TPUs can't be saved")
    if pod.has_fuse_sidecar:
        yield Refusal(Reason.FUSE_SIDECAR, "pods with the Cloud Storage FUSE sidecar can't be saved")
    yield from gpu_limits(pod.gpus, here)


def _devices(containers: list[Fields], init: list[Fields]) -> tuple[int, int]:
    """Count a pod's GPUs and TPUs as its scheduler does: what runs together adds up, what runs before is on its own."""
    running, before = [_limits_of(each) for each in containers], [(0, 0)]
    for each in init:
        (running if each.text("restartPolicy", default="") == "Always" else before).append(_limits_of(each))
    return (
        max(sum(gpus for gpus, _ in running), max(gpus for gpus, _ in before)),
        max(sum(tpus for _, tpus in running), max(tpus for _, tpus in before)),
    )


def _limits_of(container: Fields) -> tuple[int, int]:
    resources = container.member("resources").member("limits")
    return _count(resources, _GPU), _count(resources, _TPU)


def _count(resources: Fields, name: str) -> int:
    """Take a number of devices: a whole number, as a number or as a text (a quantity without a unit)."""
    value = resources.take(name)
    if value is None:
        return 0
    text = str(value) if isinstance(value, int | str) and not isinstance(value, bool) else ""
    if text.isascii() and text.isdigit() and len(text) <= 4 and int(text) <= _MAX_DEVICES:
        return int(text)
    resources.problem(name, f"must be a number of devices, not {shown(value)}")
    return 0
