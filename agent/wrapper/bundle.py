"""A container's bundle: what its `config.json` says of the container's place, and annotations into it and out of it.

The bundle is containerd's, but users fill parts of it; so whatever isn't a regular file of a sensible size with an
object in it is a `BadBundle`, and values are only compared or passed on, never used as paths.

gVisor takes from annotations where on the node a sandbox saves itself, as root, and whether its processes may have it
do so. A Pod's annotations get there where containerd passes `dev.gvisor.*` on (its `pod_annotations`). So these, the
`RESERVED` ones, are the agent's alone: what an author wrote of them never reaches runsc.
"""

import json
import os
import stat
from collections.abc import Mapping

from agent.errors import AgentError
from agent.wrapper.protocol import ContainerKind, PodName
from agent.wrapper.record import JsonObject, Record

# Read, it takes up to twenty-five times as much, in the agent and in each wrapper. A real one has some ten KB. What can
# make it large is bounded elsewhere: annotations by Kubernetes (256 KiB), arguments, environment by execve(2) (2 MiB).
SPEC_MAX_BYTES = 4 << 20

# Of a sandbox's whole state, and of its file systems (gVisor runsc/boot/restore.go and fscheckpoint.go). front.c knows
# them, too.
RESERVED = ("dev.gvisor.internal.checkpoint.", "dev.gvisor.internal.fscheckpoint.")

# containerd's CRI plugin (pkg/cri/annotations), which writes its own over a Pod's author's, and CRI-O's names for the
# same; gVisor reads the first two of both (runsc/specutils/cri.go).
_KIND = ("io.kubernetes.cri.container-type", "io.kubernetes.cri-o.ContainerType")
_SANDBOX_ID = ("io.kubernetes.cri.sandbox-id", "io.kubernetes.cri-o.SandboxID")
# CRI-O hands on all annotations of a Pod, containerd's names among them: beside one of its own those are an author's.
_CRIO = "io.kubernetes.cri-o."
_NAME = "io.kubernetes.cri.container-name"
_POD = ("io.kubernetes.cri.sandbox-namespace", "io.kubernetes.cri.sandbox-name", "io.kubernetes.cri.sandbox-uid")


class BadBundle(AgentError):
    """A bundle that can't be read, or says nothing clear."""


class Place(Record):
    """Where a container belongs. `sandbox_id` and `pod` are empty for one that is alone, whatever its annotations say,
    and `pod` for CRI-O's, too. `has_terminal`: its streams are not those of the command that creates it."""

    kind: ContainerKind
    sandbox_id: str
    name: str
    pod: PodName
    has_terminal: bool


def read_spec(bundle: str) -> tuple[JsonObject, os.stat_result]:
    """Read a bundle's spec, and what its file is like. Raises: `BadBundle`."""
    path = os.path.join(bundle, "config.json")
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            facts = os.fstat(fd)
            if not stat.S_ISREG(facts.st_mode):
                raise BadBundle(f"{path} is no regular file")
            text = file.read(SPEC_MAX_BYTES + 1)
    except OSError as error:
        raise BadBundle(f"{path}: {error.strerror}") from error
    if len(text) > SPEC_MAX_BYTES:
        raise BadBundle(f"{path} has more than {SPEC_MAX_BYTES} bytes")
    try:
        spec = json.loads(text, object_pairs_hook=_members)
    except (ValueError, RecursionError) as error:
        raise BadBundle(f"{path} is no JSON") from error
    if not isinstance(spec, dict) or not isinstance(spec.get("annotations") or {}, dict):
        raise BadBundle(f"{path} is no container's spec")
    if other := [name for name in spec if name != "annotations" and name.casefold() == "annotations"]:
        raise BadBundle(f"{path} has {other[0]!r}, which runsc takes for its annotations")
    return spec, facts


def _members(pairs: list[tuple[str, object]]) -> JsonObject:
    """Make an object of its members. Raises: `BadBundle`: two of them may be one to runsc.

    Go takes a member for a field whatever the case of its letters, and puts what comes twice together (encoding/json);
    then what is looked at here would not be what runsc reads.
    """
    seen: set[str] = set()
    for name, _ in pairs:
        folded = name.casefold()
        if folded in seen:
            raise BadBundle(f"its spec has {name[:80]!r} twice in one object, if case doesn't count")
        seen.add(folded)
    return dict(pairs)


def place(spec: JsonObject) -> Place:
    """Say what a spec's annotations say. Raises: `BadBundle`."""
    annotations = spec.get("annotations") or {}
    pod = PodName(*(_text(annotations, name) for name in _POD))
    sandbox_id = _one(annotations, _SANDBOX_ID) or ""
    match _one(annotations, _KIND):
        case None:
            kind, sandbox_id, pod = ContainerKind.SINGLE, "", PodName()
        case "sandbox":
            kind = ContainerKind.FIRST
        case "container":
            kind = ContainerKind.FURTHER
        case other:
            raise BadBundle(f"a container of kind {other[:64]!r}")
    if kind is ContainerKind.FURTHER and not sandbox_id:
        raise BadBundle("a pod's container that names no sandbox")
    process = spec.get("process")
    return Place(
        kind=kind,
        sandbox_id=sandbox_id,
        name=_text(annotations, _NAME),
        pod=PodName() if any(name.startswith(_CRIO) for name in annotations) else pod,
        has_terminal=isinstance(process, dict) and process.get("terminal") is True,
    )


def reserved(spec: JsonObject) -> list[str]:
    """Name the annotations of a spec that only the agent may set."""
    return sorted(name for name in spec.get("annotations") or {} if name.startswith(RESERVED))


def annotate(bundle: str, annotations: Mapping[str, str]) -> None:
    """Add annotations to a bundle's spec, and take out those that are `reserved`.

    The file is replaced, owner and mode are kept. Raises: `BadBundle`, and then it is as it was.
    """
    spec, facts = read_spec(bundle)
    there = spec.get("annotations") or {}
    spec["annotations"] = {name: there[name] for name in there if not name.startswith(RESERVED)} | dict(annotations)
    path, temporary = os.path.join(bundle, "config.json"), os.path.join(bundle, f".config.json.{os.getpid()}")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(fd, "w", encoding="ascii") as file:
                json.dump(spec, file)
                os.fchown(fd, facts.st_uid, facts.st_gid)
                os.fchmod(fd, stat.S_IMODE(facts.st_mode))
            os.rename(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise BadBundle(f"{path} can't be replaced: {error.strerror}") from error


def _one(annotations: Mapping[str, object], names: tuple[str, ...]) -> str | None:
    """Give what all of these that are there say; None: none is. Raises: `BadBundle`: they differ."""
    found = {_text(annotations, name) for name in names if name in annotations}
    if len(found) > 1:
        raise BadBundle(f"annotations {' and '.join(names)} differ")
    return next(iter(found), None)


def _text(annotations: Mapping[str, object], name: str) -> str:
    value = annotations.get(name, "")
    if not isinstance(value, str) or len(value) > 1024:
        raise BadBundle(f"annotation {name} is no short string")
    return value
