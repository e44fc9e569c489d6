"""May this container be restored from that image? Everything that can be known before the Restore RPC (pure).

After the RPC there is no way back in that sandbox: a restore that fails then ends the pod. So every rule of gVisor's,
and every number, is looked at first, and any doubt means: start cold, and say why. All refusals are given, not the
first. What of the pod's spec and of the node's machine decides, is `matching`'s; here is what the image itself says.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from agent.runtime.spec_rules import Spec, container_name, saved_specs, spec_differences
from streamd.errors import Damaged
from streamd.snapshot import statefile
from streamd.snapshot.manifest import Manifest

_HOST_NETWORK = "host"
_SHOWN = 8


class Why(StrEnum):
    """Why an image is not restored here: what conditions and events carry."""

    DAMAGED = "ImageDamaged"
    FILES_DIFFER = "ImageFilesDiffer"
    VERSION = "GVisorVersionMismatch"
    DIGEST = "GVisorDigestMismatch"
    CONTAINERS = "ContainersMismatch"
    SPEC = "SpecMismatch"
    CPU_FEATURES = "CPUFeaturesMissing"
    NETWORK = "NetworkModeMismatch"
    FAILED_BEFORE = "RestoreFailedBefore"
    SNAPSHOT_RESTS = "SnapshotFailedBefore"


@dataclass(frozen=True, slots=True)
class RestoreRefusal:
    """Why a container starts cold, in a word and in words."""

    why: Why
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFacts:
    """An image as it lies on this node: its manifest, the head of its checkpoint.img, the sizes of its files there."""

    manifest: Manifest
    head: bytes
    sizes: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeFacts:
    """The runsc of this node: what it calls itself, its SHA-256, its network mode, the CPU features that it sees."""

    version: str
    sha256: str
    network: str
    cpu_features: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class PodFacts:
    """The pod's containers by gVisor's names for them, the first one (its sandbox) first.

    When the first container starts, the others' bundles need not exist yet: `names` must be all of them, `specs` may be
    fewer. `names` None: not known. Init containers, which have ended when the others start, are none of them.
    """

    specs: Sequence[Spec]
    names: frozenset[str] | None = None


def refusals(image: ImageFacts, runtime: RuntimeFacts, pod: PodFacts) -> tuple[RestoreRefusal, ...]:
    """Say why the pod may not be restored from the image; nothing: it may."""
    return tuple(RestoreRefusal(why, message) for why, message in _refusals(image, runtime, pod))


_Found = Iterator[tuple[Why, str]]


def _refusals(image: ImageFacts, runtime: RuntimeFacts, pod: PodFacts) -> _Found:
    yield from _file_refusals(image)
    try:
        head = statefile.decode_head(image.head)
        saved = saved_specs(image.head)
    except Damaged as error:
        yield Why.DAMAGED, str(error)
        return
    yield from _head_refusals(image, head)
    yield from _runtime_refusals(image, head, runtime)
    yield from _container_refusals(saved, head.container_count, pod)


def _file_refusals(image: ImageFacts) -> _Found:
    """Compare the files that runsc will read with the manifest, whose sums were checked when it was read."""
    for file in image.manifest.files:
        found = image.sizes.get(file.name)
        if found is None:
            yield Why.FILES_DIFFER, f"{file.name} is missing"
        elif found != file.size:
            yield Why.FILES_DIFFER, f"{file.name} has {found} bytes, by the manifest {file.size}"


def _head_refusals(image: ImageFacts, head: statefile.StatefileHead) -> _Found:
    gvisor = image.manifest.gvisor
    if head.compressed:
        yield Why.DAMAGED, f"checkpoint.img: compressed by gVisor ({head.compression}), so nothing can load lazily"
    # gVisor counts the containers that are there, and keeps the specs of removed ones too (runsc/boot/loader.go:
    # containerCount, registerContainerLocked): those of init containers, as a rule.
    if head.container_count > len(head.container_names):
        yield (
            Why.DAMAGED,
            f"checkpoint.img: {head.container_count} containers, but specs of {len(head.container_names)}",
        )
    said = (head.runsc_version, head.network, head.container_names)
    noted = (gvisor.runsc_version, gvisor.network, tuple(gvisor.container_names))
    if said != noted:
        yield Why.DAMAGED, "checkpoint.img says of its version, network or containers what its manifest doesn't"


def _runtime_refusals(image: ImageFacts, head: statefile.StatefileHead, runtime: RuntimeFacts) -> _Found:
    gvisor = image.manifest.gvisor
    if head.runsc_version != runtime.version:
        yield Why.VERSION, f"saved by gVisor {head.runsc_version or 'unknown'}, here is {runtime.version or 'unknown'}"
    # Some builds have no version of their own; and one version, built twice, may write two formats.
    if gvisor.runsc_sha256 is None:
        yield Why.DIGEST, "the snapshot doesn't say which runsc saved it (`streamd push --runsc`)"
    elif gvisor.runsc_sha256 != runtime.sha256:
        yield Why.DIGEST, f"saved by the runsc {gvisor.runsc_sha256[:12]}…, here is {runtime.sha256[:12]}…"
    if (head.network == _HOST_NETWORK) != (runtime.network == _HOST_NETWORK):
        yield Why.NETWORK, f"saved with network {head.network}, which can't be restored with {runtime.network}"
    missing = sorted(set(gvisor.cpu_features or ()) - runtime.cpu_features)
    if gvisor.cpu_features is None:
        yield Why.CPU_FEATURES, "the snapshot doesn't say which CPU features it needs (`streamd push --runsc`)"
    elif missing:
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        yield Why.CPU_FEATURES, f"this CPU lacks {', '.join(missing[:_SHOWN])}{more}"


def _container_refusals(saved: Mapping[str, Spec], count: int, pod: PodFacts) -> _Found:
    """Compare the containers. gVisor restores with the last of `count`: with one too few nothing would ever run."""
    if pod.names is not None:
        lacking, others = sorted(pod.names - saved.keys()), sorted(saved.keys() - pod.names)
        if lacking:
            yield Why.CONTAINERS, f"the snapshot has no {', '.join(lacking)}"
        elif count > len(pod.names):
            yield Why.CONTAINERS, f"the snapshot still holds {', '.join(others)}, which the pod won't start"
        elif count < len(pod.names):
            yield Why.CONTAINERS, f"of the pod's {len(pod.names)} containers only {count} were there when it was saved"
    for index, spec in enumerate(pod.specs):
        # Without a name gVisor goes by the order of creation (runsc/boot/loader.go:registerContainerLocked).
        name = container_name(spec) or f"__no_name_{index}"
        if name not in saved:
            if pod.names is None:
                yield Why.CONTAINERS, f"the snapshot has no container {name}, only {', '.join(sorted(saved))}"
            continue
        try:
            for difference in spec_differences(name, saved[name], spec):
                yield Why.SPEC, str(difference)
        except Damaged as error:
            yield Why.SPEC, str(error)
    if pod.names is None and count != len(pod.specs):
        yield Why.CONTAINERS, f"the snapshot has {count} containers, the pod {len(pod.specs)}"
