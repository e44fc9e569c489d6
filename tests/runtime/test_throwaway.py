"""The spec of a copy that is thrown away differs from the original's only where gVisor lets it, and joins nothing."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from agent.runtime.bundle import CONTAINER_TYPE, SANDBOX_ID, Container, Pod, Rootfs, container_spec
from agent.runtime.throwaway import shared_directories, throwaway_spec
from streamd.errors import Refused

BUNDLE = Path("/run/bundles/web")


def pod_spec(*, first: bool = True) -> dict[str, Any]:
    """A container's spec as a kubelet has it made."""
    pod = Pod(sandbox_id="pod-1", name="web", first=first)
    spec = container_spec(Container(args=("/server",), rootfs=Rootfs(path=Path("rootfs")), pod=pod))
    spec["annotations"]["dev.gvisor.internal.checkpoint.path"] = "/run/checkpoints/pod-1"
    spec["annotations"]["dev.gvisor.internal.checkpoint.enable"] = "true"
    spec["hooks"] = {"createRuntime": [{"path": "/bin/set-up-network"}]}
    spec["linux"]["cgroupsPath"] = "/kubepods/pod-1"
    spec["linux"]["namespaces"] = [{"type": "network", "path": "/proc/1/ns/net"}, {"type": "pid"}]
    return json.loads(json.dumps(spec))  # type: ignore[no-any-return]


def test_a_copy_joins_no_namespace_or_cgroup_runs_no_hook_and_leaves_the_originals_checkpoint_alone() -> None:
    original = pod_spec()
    before = copy.deepcopy(original)
    changed = throwaway_spec(original, bundle=BUNDLE, container_id="copy-1")
    assert original == before
    assert changed["linux"]["namespaces"] == [{"type": "network"}, {"type": "pid"}]
    assert changed["annotations"][SANDBOX_ID] == "copy-1"
    assert changed["annotations"]["dev.gvisor.internal.checkpoint.enable"] == "true"
    assert changed["root"]["path"] == "/run/bundles/web/rootfs"
    text = json.dumps(changed)
    assert not any(word in text for word in ("set-up-network", "kubepods", "/run/checkpoints", "pod-1"))


def test_what_gvisor_compares_stays_as_it_was() -> None:
    original = pod_spec()
    changed = throwaway_spec(original, bundle=BUNDLE, container_id="copy-1")
    for name in ("ociVersion", "process", "mounts", "hostname"):
        assert changed[name] == original[name]
    assert changed["root"]["readonly"] == original["root"]["readonly"]
    assert changed["annotations"][CONTAINER_TYPE] == "sandbox"


def test_a_root_elsewhere_stays_where_it_is() -> None:
    spec = {"root": {"path": "/images/web"}}
    assert throwaway_spec(spec, bundle=BUNDLE, container_id="copy-1")["root"]["path"] == "/images/web"


def test_a_further_container_of_a_pod_is_refused() -> None:
    with pytest.raises(Refused, match="first one"):
        throwaway_spec(pod_spec(first=False), bundle=BUNDLE, container_id="copy-1")


@pytest.mark.parametrize("spec", [{}, {"root": {}}, {"root": {"path": "r"}, "annotations": 1}, {"root": {"path": 1}}])
def test_what_is_no_spec_is_refused(spec: dict[str, Any]) -> None:
    with pytest.raises(Refused, match=r"config\.json"):
        throwaway_spec(spec, bundle=BUNDLE, container_id="copy-1")


def test_directories_of_the_host_that_could_be_written_to_are_named() -> None:
    spec = pod_spec()
    assert shared_directories(spec) == ()
    spec["mounts"] += [
        {"destination": "/data", "type": "bind", "source": "/var/data", "options": ["rbind", "rw"]},
        {"destination": "/config", "type": "bind", "source": "/etc/web", "options": ["rbind", "ro"]},
        {"destination": "/logs", "source": "/var/log/web"},
    ]
    assert shared_directories(spec) == ("/data", "/logs")


@pytest.mark.parametrize(
    "mount",
    [
        {"destination": "/d", "type": "tmpfs", "source": "/srv", "options": ["rbind"]},
        {"destination": "/d", "type": "bind", "source": "/srv", "options": ["ro", "rw"]},
        {"destination": "/d", "type": "bind", "source": "/srv"},
    ],
    ids=["bind-by-option", "rw-after-ro", "no-options"],
)
def test_a_directory_of_the_host_is_known_by_what_runsc_goes_by(mount: dict[str, Any]) -> None:
    assert shared_directories({"mounts": [mount]}) == ("/d",)


def test_a_root_without_an_overlay_is_shared_unless_it_is_read_only() -> None:
    assert shared_directories({"root": {}}, ["--overlay2=none"]) == ("/",)
    assert shared_directories({"root": {"readonly": True}}, ["--overlay2=none"]) == ()
    assert shared_directories({"root": {}}, ["--overlay2=none", "--overlay2=root:self"]) == ()
    assert shared_directories({"root": {}}) == ()


@pytest.mark.parametrize("spec", [{"mounts": 7}, {"mounts": ["x"]}, {"root": 3, "mounts": []}])
def test_mounts_that_are_none_are_refused(spec: dict[str, Any]) -> None:
    with pytest.raises(Refused):
        shared_directories(spec, ["--overlay2=none"])
