"""gVisor's rules about the specs of a restored container, checked before the restore (pure).

After the Restore RPC there is no way back, so what gVisor would refuse then (runsc/specutils/restore.go, with
`--restore-spec-validation=enforce`, its default) is found here first, and the container starts cold. The rules are
gVisor's, and so are the names of the fields; `tests/runtime/test_spec_rules.py` asks a real runsc about each.

Free to change: root.path, env, hostname, domainname, cgroupsPath, hooks, resources, sources of mounts, paths of
namespaces, internal and debug annotations. Lists that are sets to gVisor may not have an element twice.

Specs are what JSON gives. Go reads an absent member, null, false, 0 and "" as the same for most members, so these are
dropped before the rest is compared; where Go has a pointer and tells them apart, so do we. An empty list is another
matter: it is written into no image, and gVisor then refuses it as "not nil" at every restore.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent.runtime.bundle import CONTAINER_NAME
from streamd.errors import Damaged
from streamd.snapshot import statefile, strict_json

Spec = Mapping[str, Any]

_SHOWN_CHARS = 200
_MAX_CONTAINERS = 2**20

_GVISOR = "dev.gvisor."
_INTERNAL = "dev.gvisor.internal."
_REMAP = "dev.gvisor.container-name-remap."
_MOUNT = "dev.gvisor.spec.mount."
_FLAG = "dev.gvisor.flag."
_SECCOMP = "dev.gvisor.internal.seccomp."
_DEBUG_FLAGS = frozenset(
    f"{_FLAG}{name}"
    for name in (
        "debug",
        "debug-log",
        "debug-command",
        "debug-log-format",
        "strace",
        "strace-syscalls",
        "strace-log-size",
        "log-packets",
    )
)
_CAPABILITY_SETS = ("bounding", "effective", "inheritable", "permitted", "ambient")
# Members that Go holds by a pointer: zero and absent differ (runtime-spec specs-go/config.go).
_POINTERS = frozenset({"oomScoreAdj", "errnoRet", "intelRdt", "personality", "scheduler", "ioPriority", "consoleSize"})
_NVIDIA_MAJOR = 195  # pkg/abi/nvgpu
_NVIDIA_DEVICE = re.compile(r"nvidia(\d{1,3})")


@dataclass(frozen=True, slots=True)
class SpecDifference:
    """A field, by gVisor's name for it, in which a container's spec may not differ from the image's, but does."""

    container: str
    field: str
    saved: str
    here: str

    def __str__(self) -> str:
        return f"{self.container or 'the container'}: {self.field}: saved with {self.saved}, here {self.here}"


def saved_specs(head: bytes) -> dict[str, Spec]:
    """Read the specs of an image's containers, by name, from the head of its checkpoint.img.

    They hold the environment of the saved processes: they are compared, and neither logged nor kept.
    Raises: `Damaged`.
    """
    end = statefile.head_bytes(head)
    what = "checkpoint.img"
    fields = strict_json.parse(head[statefile.PREFIX_BYTES : end], what, max_containers=_MAX_CONTAINERS)
    text = fields.text("container_specs")
    names = strict_json.parse(text.encode(), f"{what}: container_specs", max_containers=_MAX_CONTAINERS).names()
    specs = json.loads(text)
    if not all(isinstance(specs[name], dict) for name in names):
        raise Damaged(f"{what}: container_specs: not an object of specs")
    return dict(specs)


def container_name(spec: Spec) -> str | None:
    """Give the name by which gVisor finds a container's spec in an image; None: by the order of the containers."""
    name = (spec.get("annotations") or {}).get(CONTAINER_NAME)
    return name if isinstance(name, str) and name else None


def spec_differences(name: str, saved: Spec, here: Spec) -> tuple[SpecDifference, ...]:
    """Say in what `here` differs from the spec that an image has for this container, as far as gVisor forbids it.

    Every difference is given, where gVisor stops at the first. Raises: `Damaged` when either is no spec at all.
    """
    try:
        return tuple(
            SpecDifference(name, field, _shown(old), _shown(new)) for field, old, new in _differences(saved, here)
        )
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise Damaged(f"{name}: not the spec of a container: {error}") from error


_Difference = tuple[str, object, object]


def _differences(saved: Spec, here: Spec) -> Iterator[_Difference]:
    yield from _unless(_same, "OCI Version", saved.get("ociVersion") or "", here.get("ociVersion") or "")
    old_root, new_root = saved.get("root") or {}, here.get("root") or {}
    yield from _unless(_same, "Root.Readonly", bool(old_root.get("readonly")), bool(new_root.get("readonly")))
    yield from _unless(_same_mounts, "Mounts", saved.get("mounts") or [], here.get("mounts") or [])
    yield from _unless(_same, "Annotations", _counting(saved.get("annotations")), _counting(here.get("annotations")))
    yield from _process_differences(saved.get("process") or {}, here.get("process") or {})
    yield from _linux_differences(saved.get("linux") or {}, _effective_linux(here))
    free = {"ociVersion", "root", "mounts", "annotations", "process", "linux", "hostname", "domainname", "hooks"}
    yield from _unless(_same, "Spec", _rest(saved, free), _rest(here, free))


def _process_differences(old: Spec, new: Spec) -> Iterator[_Difference]:
    yield from _unless(_same, "Terminal", bool(old.get("terminal")), bool(new.get("terminal")))
    yield from _unless(_same, "Cwd", old.get("cwd") or "", new.get("cwd") or "")
    yield from _unless(_same, "User", _dropped(old.get("user") or {}), _dropped(new.get("user") or {}))
    yield from _unless(_same_set, "Rlimits", old.get("rlimits") or [], new.get("rlimits") or [])
    yield from _unless(_same_args, "Args", old.get("args") or [], new.get("args") or [])
    yield from _capability_differences(old.get("capabilities"), new.get("capabilities"))
    free = {"terminal", "cwd", "user", "rlimits", "args", "capabilities", "env"}
    yield from _unless(_same, "Process", _rest(old, free), _rest(new, free))


def _capability_differences(old: Spec | None, new: Spec | None) -> Iterator[_Difference]:
    if old is None or new is None:
        yield from _unless(_same, "Capabilities", old, new)
        return
    for kind in _CAPABILITY_SETS:
        yield from _unless(_same_set, f"Capabilities.{kind.title()}", old.get(kind) or [], new.get(kind) or [])


def _linux_differences(old: Spec, new: Spec) -> Iterator[_Difference]:
    yield from _unless(_same, "Sysctl", old.get("sysctl") or {}, new.get("sysctl") or {})
    yield from _unless(_same, "Seccomp", _present(old.get("seccomp")), _present(new.get("seccomp")))
    yield from _unless(_same_devices, "Devices", old.get("devices") or [], new.get("devices") or [])
    for field, member in (("UIDMappings", "uidMappings"), ("GIDMappings", "gidMappings")):
        yield from _unless(_same_set, field, old.get(member) or [], new.get(member) or [])
    yield from _unless(_same_set, "Namespace", _kinds(old), _kinds(new))
    free = {"sysctl", "seccomp", "devices", "uidMappings", "gidMappings", "namespaces", "resources", "cgroupsPath"}
    yield from _unless(_same, "Linux", _rest(old, free), _rest(new, free))


def _unless(same: Callable[[Any, Any], bool], field: str, old: object, new: object) -> Iterator[_Difference]:
    if not same(old, new):
        yield field, old, new


def _same(old: object, new: object) -> bool:
    return old == new


def _same_set(old: Sequence[object], new: Sequence[object]) -> bool:
    """Compare lists as sets; one with an element twice is like none, not even itself."""
    ours, theirs = [_key(one) for one in old], [_key(one) for one in new]
    return len(set(ours)) == len(ours) and sorted(ours) == sorted(theirs)


def _same_args(old: Sequence[str], new: Sequence[str]) -> bool:
    """Compare command lines; of the program only its name counts."""
    if not old or not new:
        return not old and not new
    return _name(old[0]) == _name(new[0]) and list(old[1:]) == list(new[1:])


def _same_mounts(old: Sequence[Spec], new: Sequence[Spec]) -> bool:
    """Compare mounts by their destinations; the source is free, but for a destination that is given twice."""
    olds, news = {one["destination"]: _mount(one) for one in old}, {one["destination"]: _mount(one) for one in new}
    firsts: dict[str, Spec] = {}
    for one in new:
        whole = _mount(one) | {"source": one.get("source")}
        if firsts.setdefault(one["destination"], whole) != whole:
            return False
    return olds.keys() == news.keys() and all(
        _without_ids(olds[place]) == _without_ids(news[place])
        and all(_same_set(olds[place][ids], news[place][ids]) for ids in ("uidMappings", "gidMappings"))
        for place in news
    )


def _mount(mount: Spec) -> dict[str, Any]:
    return {
        "type": mount.get("type") or "",
        "options": sorted(mount.get("options") or []),
        "uidMappings": mount.get("uidMappings") or [],
        "gidMappings": mount.get("gidMappings") or [],
    }


def _without_ids(mount: Spec) -> dict[str, Any]:
    return {"type": mount["type"], "options": mount["options"]}


def _same_devices(old: Sequence[Spec], new: Sequence[Spec]) -> bool:
    """Compare devices by path and type; GPUs are mapped to others, whatever their numbers."""
    ours, theirs = ([(d["path"], d["type"]) for d in devices if not _is_gpu(d)] for devices in (old, new))
    return len(set(ours)) == len(ours) and sorted(ours) == sorted(theirs)


def _is_gpu(device: Spec) -> bool:
    found = _NVIDIA_DEVICE.fullmatch(_name(device["path"]))
    number = int(found[1]) if found else 255
    return number < 255 and (device.get("major"), device.get("minor")) == (_NVIDIA_MAJOR, number)


def _counting(annotations: Mapping[str, str] | None) -> dict[str, str]:
    return {key: value for key, value in (annotations or {}).items() if _counts(key)}


def _counts(key: str) -> bool:
    return (
        key.startswith(_GVISOR)
        and not key.startswith((_INTERNAL, _REMAP))
        and not (key.startswith(_MOUNT) and key.endswith(".source"))
        and key not in _DEBUG_FLAGS
    )


def _effective_linux(spec: Spec) -> Spec:
    """Give a spec's Linux part as runsc keeps it: without seccomp rules that are the runtime's default."""
    linux: Spec = spec.get("linux") or {}
    name = container_name(spec)
    if name is not None and (spec.get("annotations") or {}).get(_SECCOMP + name) == "RuntimeDefault":
        return {key: value for key, value in linux.items() if key != "seccomp"}
    return linux


def _name(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _kinds(linux: Spec) -> list[str]:
    return [namespace["type"] for namespace in linux.get("namespaces") or []]


def _rest(spec: Spec, free: set[str]) -> object:
    return _dropped({key: value for key, value in spec.items() if key not in free})


def _present(value: object) -> object:
    return None if value is None else _dropped(value)


def _dropped(value: object) -> object:
    """Drop what Go reads as nothing from objects, at every depth."""
    if isinstance(value, Mapping):
        kept = {key: _dropped(one) for key, one in value.items() if one is not None}
        return {key: one for key, one in kept.items() if one not in (False, 0, "") or key in _POINTERS}
    if isinstance(value, list):
        return [_dropped(one) for one in value]
    return value


def _key(value: object) -> str:
    return json.dumps(_dropped(value), sort_keys=True)


def _shown(value: object) -> str:
    text = json.dumps(value, sort_keys=True)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"
