"""What the OCI wrapper says to the agent, and what it is answered (pure).

One connection a question, to a Unix stream socket (mode 0600, root's): one JSON object a line each way, at most
`LINE_MAX_BYTES`, with the protocol's version in it. Unknown members are ignored, a missing or wrong one makes the
message a `BadMessage`; so newer sides add members, and `VERSION` counts changes that old ones must not misread.

Nothing of a container but names, ids, paths and some flags of runsc is said: the agent reads the bundle itself.
"""

import json
from collections.abc import Mapping
from enum import StrEnum

from agent.errors import AgentError
from agent.wrapper.record import Record

VERSION = 1
LINE_MAX_BYTES = 64 << 10
# What is added to a bundle is gVisor's own; anything else an answer names is refused.
ANNOTATION_PREFIX = "dev.gvisor."
ANNOTATIONS_MAX = 32
# runsc's flags that an image depends on.
FLAGS = ("network", "platform", "overlay2", "directfs")

Json = Mapping[str, object]


class BadMessage(AgentError):
    """A line that is no message of this protocol."""


class ContainerKind(StrEnum):
    """What a container is to its sandbox: alone in it, a pod's first, or one more of a pod."""

    SINGLE = "single"
    FIRST = "first"
    FURTHER = "further"


class PodName(Record):
    """Which pod, as containerd's CRI plugin annotates it; empty where it doesn't."""

    namespace: str = ""
    name: str = ""
    uid: str = ""


class Container(Record):
    """Which container: its id, and runsc's binary, root directory (empty: its default) and those of `FLAGS` that it is
    called with."""

    container_id: str
    runsc: str
    runsc_root: str
    flags: Mapping[str, str] = {}


class Create(Record):
    """A container is about to be created. `sandbox_id`: its own, but for further ones; `name`: in the pod, or empty."""

    container: Container
    bundle: str
    kind: ContainerKind
    name: str
    sandbox_id: str
    pod: PodName


class Start(Record):
    """A created container is about to be started."""

    container: Container


class Report(Record):
    """A start that was answered with `Restore` or `Join` has ended: `exit_code` of runsc (−n: by signal n), and what
    it said last."""

    container: Container
    exit_code: int
    message: str


Request = Create | Start | Report


class Plain(Record):
    """As runsc does it; at `create` with these annotations added to the bundle."""

    annotations: Mapping[str, str] = {}


class Restore(Record):
    """At a first container's `start`: restore it from the image in this directory."""

    image: str


class Join(Record):
    """At a further container's `start`: it is part of a restore, whose outcome is to be reported."""


class Finished(Record):
    """At `create`: it has run before the snapshot, which doesn't hold it any more; it is to look as if it ran now."""


class Refused(Record):
    """At `create`: it must not be, because …"""

    message: str


class Failed(Record):
    """The agent can't say."""

    message: str


class Noted(Record):
    """The answer to a report."""


Answer = Plain | Restore | Join | Finished | Refused | Failed | Noted


def encode_request(request: Request) -> bytes:
    """Give a request's line."""
    match request:
        case Create():
            members: dict[str, object] = {
                "bundle": request.bundle,
                "kind": request.kind,
                "name": request.name,
                "sandbox_id": request.sandbox_id,
                "pod": request.pod._asdict(),
            }
        case Start():
            members = {}
        case Report():
            members = {"exit_code": request.exit_code, "message": request.message}
    asked = type(request).__name__.lower()
    return _line({"request": asked, "container": request.container._asdict(), **members})


def decode_request(line: bytes) -> Request:
    """Read a request's line. Raises: `BadMessage`."""
    members = _members(line)
    facts = _object(members, "container")
    flags = _object(facts, "flags")
    container = Container(
        _text(facts, "container_id"),
        _text(facts, "runsc"),
        _text(facts, "runsc_root"),
        {name: _text(flags, name) for name in flags},
    )
    match members.get("request"):
        case "create":
            pod = _object(members, "pod")
            try:
                kind = ContainerKind(_text(members, "kind"))
            except ValueError as error:
                raise BadMessage(f"no kind of container: {members['kind']!r}") from error
            return Create(
                container=container,
                bundle=_text(members, "bundle"),
                kind=kind,
                name=_text(members, "name"),
                sandbox_id=_text(members, "sandbox_id"),
                pod=PodName(_text(pod, "namespace"), _text(pod, "name"), _text(pod, "uid")),
            )
        case "start":
            return Start(container)
        case "report":
            exit_code = members.get("exit_code")
            if not isinstance(exit_code, int) or isinstance(exit_code, bool):
                raise BadMessage("exit_code is no number")
            return Report(container, exit_code, _text(members, "message"))
        case other:
            raise BadMessage(f"no request: {other!r}")


def encode_answer(answer: Answer) -> bytes:
    """Give an answer's line."""
    return _line({"answer": type(answer).__name__.lower(), **answer._asdict()})


def decode_answer(line: bytes) -> Answer:
    """Read an answer's line. Raises: `BadMessage`."""
    members = _members(line)
    match members.get("answer"):
        case "plain":
            return Plain(_annotations(members))
        case "restore":
            image = _text(members, "image")
            if not image.startswith("/") or "\0" in image:
                raise BadMessage(f"no absolute path of an image: {image!r}")
            return Restore(image)
        case "join":
            return Join()
        case "finished":
            return Finished()
        case "refused":
            return Refused(_text(members, "message"))
        case "failed":
            return Failed(_text(members, "message"))
        case "noted":
            return Noted()
        case other:
            raise BadMessage(f"no answer: {other!r}")


def _annotations(members: Json) -> dict[str, str]:
    found = _object(members, "annotations")
    if len(found) > ANNOTATIONS_MAX:
        raise BadMessage(f"{len(found)} annotations, more than {ANNOTATIONS_MAX}")
    for name in found:
        if not name.startswith(ANNOTATION_PREFIX):
            raise BadMessage(f"annotation {name!r} is not gVisor's")
    return {name: _text(found, name) for name in found}


def _line(members: Json) -> bytes:
    line = json.dumps({"version": VERSION, **members}).encode() + b"\n"
    if len(line) > LINE_MAX_BYTES:
        raise BadMessage(f"a message of {len(line)} bytes, more than {LINE_MAX_BYTES}")
    return line


def _members(line: bytes) -> Json:
    try:
        members = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadMessage("no JSON") from error
    if not isinstance(members, dict):
        raise BadMessage("no JSON object")
    if members.get("version") != VERSION:
        raise BadMessage(f"version {members.get('version')!r} of the protocol, not {VERSION}")
    return members


def _object(members: Json, name: str) -> Json:
    value = members.get(name)
    if not isinstance(value, dict):
        raise BadMessage(f"{name} is no object")
    return value


def _text(members: Json, name: str) -> str:
    value = members.get(name)
    if not isinstance(value, str):
        raise BadMessage(f"{name} is no string")
    return value
