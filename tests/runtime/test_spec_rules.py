"""gVisor's rules about specs, each held against a real runsc: it refuses what we refuse, and names the same field."""

import contextlib
import copy
import json
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.runtime.bundle import CONTAINER_NAME, CONTAINER_TYPE, SANDBOX_ID, Container, container_spec, make_rootfs
from agent.runtime.failures import FailureKind, classify
from agent.runtime.runsc import Runsc, RunscError
from agent.runtime.spec_rules import container_name, saved_specs, spec_differences
from bench.pods import runsc_below
from streamd.errors import Damaged
from tests.calls import calls_of

Spec = dict[str, Any]
NAME = "web"


def put(*path: str | int) -> Callable[[object], Callable[[Spec], None]]:
    """Give what sets a member of a spec."""

    def valued(value: object) -> Callable[[Spec], None]:
        def change(spec: Spec) -> None:
            place: Any = spec
            for step in path[:-1]:
                place = place[step]
            if value is None:
                del place[path[-1]]
            else:
                place[path[-1]] = value

        return change

    return valued


def mount(**members: object) -> Callable[[Spec], None]:
    return lambda spec: spec["mounts"][-1].update(members)


def add(*path: str) -> Callable[[object], Callable[[Spec], None]]:
    def valued(value: object) -> Callable[[Spec], None]:
        def change(spec: Spec) -> None:
            place: Any = spec
            for step in path:
                place = place[step]
            place.append(value)

        return change

    return valued


def both(*changes: Callable[[Spec], None]) -> Callable[[Spec], None]:
    def change(spec: Spec) -> None:
        for one in changes:
            one(spec)

    return change


NULL = {"path": "/dev/other", "type": "c", "major": 1, "minor": 3, "fileMode": 438}
# What is changed, and the field that is refused for it; None: it may change.
CHANGES: dict[str, tuple[Callable[[Spec], None], str | None]] = {
    "nothing": (lambda _: None, None),
    "oci version": (put("ociVersion")("1.1.0"), "OCI Version"),
    "writable root": (put("root", "readonly")(False), "Root.Readonly"),
    "mount option": (mount(options=["rbind", "ro", "nosuid"]), "Mounts"),
    "mount options in another order": (mount(options=["ro", "rbind"]), None),
    "mount source": (mount(source="/usr/share"), None),
    "mount elsewhere": (mount(destination="/tmp/elsewhere"), "Mounts"),
    "mount more": (add("mounts")({"destination": "/tmp/x", "type": "tmpfs", "source": "tmpfs"}), "Mounts"),
    "mounts in another order": (lambda spec: spec["mounts"].reverse(), None),
    "same mount twice": (lambda spec: spec["mounts"].append(copy.deepcopy(spec["mounts"][-1])), None),
    "gvisor annotation": (put("annotations", "dev.gvisor.example")("x"), "Annotations"),
    "internal annotation": (put("annotations", "dev.gvisor.internal.checkpoint.resume")("true"), None),
    "debug annotation": (put("annotations", "dev.gvisor.flag.debug")("false"), None),
    "foreign annotation": (put("annotations", "example.com/x")("y"), None),
    "cwd": (put("process", "cwd")("/tmp"), "Cwd"),
    "user": (put("process", "user")({"uid": 1, "gid": 0}), "User"),
    "groups": (put("process", "user")({"uid": 0, "gid": 0, "additionalGids": [5]}), "User"),
    "umask": (put("process", "user")({"uid": 0, "gid": 0, "umask": 18}), "User"),
    "rlimits": (put("process", "rlimits")([{"type": "RLIMIT_NOFILE", "hard": 99, "soft": 99}]), "Rlimits"),
    "argument": (put("process", "args", 1)("2000"), "Args"),
    "program in another directory": (put("process", "args", 0)("/usr/bin/sleep"), None),
    "program": (put("process", "args", 0)("/bin/cat"), "Args"),
    "capability": (put("process", "capabilities")({"bounding": ["CAP_KILL"]}), "Capabilities.Bounding"),
    "no capabilities at all": (put("process", "capabilities")(None), "Capabilities"),
    "environment": (put("process", "env")(["A=b"]), None),
    "new privileges": (put("process", "noNewPrivileges")(False), "Process"),
    "oom score": (put("process", "oomScoreAdj")(100), "Process"),
    "oom score of 0": (put("process", "oomScoreAdj")(0), "Process"),
    "hostname": (put("hostname")("other"), None),
    "domainname": (put("domainname")("other"), None),
    "sysctl": (put("linux", "sysctl")({"net.core.somaxconn": "5"}), "Sysctl"),
    "resources": (put("linux", "resources")({"memory": {"limit": 1 << 30}}), None),
    "cgroups path": (put("linux", "cgroupsPath")("/elsewhere"), None),
    "device": (put("linux", "devices")([NULL]), "Devices"),
    "namespace less": (lambda spec: spec["linux"]["namespaces"].pop(), "Namespace"),
    "namespaces in another order": (lambda spec: spec["linux"]["namespaces"].reverse(), None),
    "masked paths": (put("linux", "maskedPaths")(["/proc/keys"]), "Linux"),
    "empty list": (put("linux", "maskedPaths")([]), "Linux"),
}


@pytest.fixture(scope="module")
def runsc(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runsc]:
    runsc = runsc_below(tmp_path_factory.mktemp("rules"))
    yield runsc
    runsc.remove_root()


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> Spec:
    rootfs = make_rootfs(tmp_path_factory.mktemp("rootfs"))
    container = Container(
        args=["/bin/sleep", "1000"], rootfs=rootfs, annotations={CONTAINER_NAME: NAME, CONTAINER_TYPE: "sandbox"}
    )
    made = container_spec(container)
    made["mounts"].append(
        {"destination": "/tmp/shared", "source": "/usr/share", "type": "bind", "options": ["rbind", "ro"]}
    )
    made["process"]["rlimits"] = [{"type": "RLIMIT_NOFILE", "hard": 1000, "soft": 100}]
    return made


def bundle_of(directory: Path, spec: Spec, sandbox_id: str) -> Path:
    directory.mkdir()
    named = copy.deepcopy(spec)
    named["annotations"][SANDBOX_ID] = sandbox_id
    (directory / "config.json").write_text(json.dumps(named))
    return directory


@pytest.fixture(scope="module")
def image(runsc: Runsc, spec: Spec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory, sandbox_id = tmp_path_factory.mktemp("image"), str(uuid.uuid4())
    runsc.run(sandbox_id, bundle_of(directory / "bundle", spec, sandbox_id))
    runsc.checkpoint(sandbox_id, directory / "image")
    runsc.delete(sandbox_id, force=True)
    return directory / "image"


@pytest.mark.parametrize("change", CHANGES)
def test_we_refuse_what_gvisor_refuses_and_nothing_else(
    change: str, runsc: Runsc, spec: Spec, image: Path, tmp_path: Path
) -> None:
    act, field = CHANGES[change]
    changed = copy.deepcopy(spec)
    act(changed)
    saved = saved_specs((image / "checkpoint.img").read_bytes())[NAME]
    assert [one.field for one in spec_differences(NAME, saved, changed)] == ([] if field is None else [field])

    sandbox_id = str(uuid.uuid4())
    try:
        runsc.restore(sandbox_id, bundle_of(tmp_path / "b", changed, sandbox_id), image)
    except RunscError as error:
        failure = classify(error.messages)
        assert (failure.kind, failure.facts.get("field")) == (FailureKind.SPEC_MISMATCH, field), failure.message
    else:
        assert field is None
    finally:
        runsc.delete(sandbox_id, force=True)


def test_the_container_s_name_is_the_one_that_kubernetes_gave_it(spec: Spec) -> None:
    assert container_name(spec) == NAME
    assert container_name({}) is None


def test_seccomp_rules_that_runsc_drops_are_no_difference(spec: Spec) -> None:
    here = copy.deepcopy(spec)
    here["linux"]["seccomp"] = {"defaultAction": "SCMP_ACT_ALLOW"}
    assert [one.field for one in spec_differences(NAME, spec, here)] == ["Seccomp"]
    here["annotations"][f"dev.gvisor.internal.seccomp.{NAME}"] = "RuntimeDefault"
    assert spec_differences(NAME, spec, here) == ()


def test_gpus_with_other_numbers_are_no_difference(spec: Spec) -> None:
    saved, here = copy.deepcopy(spec), copy.deepcopy(spec)
    saved["linux"]["devices"] = [{"path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 0}]
    here["linux"]["devices"] = [{"path": "/dev/nvidia3", "type": "c", "major": 195, "minor": 3}]
    assert spec_differences(NAME, saved, here) == ()
    here["linux"]["devices"][0]["major"] = 10
    assert [one.field for one in spec_differences(NAME, saved, here)] == ["Devices"]


def test_a_set_with_an_element_twice_is_refused_even_when_it_is_the_same(spec: Spec) -> None:
    twice = copy.deepcopy(spec)
    twice["linux"]["uidMappings"] = [{"containerID": 0, "hostID": 0, "size": 10}] * 2
    assert [one.field for one in spec_differences(NAME, twice, twice)] == ["UIDMappings"]
    once = copy.deepcopy(spec)
    once["linux"]["uidMappings"] = [{"containerID": 0, "hostID": 0, "size": 10}]
    assert spec_differences(NAME, once, once) == ()
    assert [one.field for one in spec_differences(NAME, once, spec)] == ["UIDMappings"]


@pytest.mark.parametrize(
    "hostile",
    [
        {"mounts": [{}]},
        {"mounts": "x"},
        {"process": []},
        {"process": {"args": 7}},
        {"linux": {"namespaces": [7]}},
        {"annotations": ["x"]},
        {"linux": {"devices": [{"path": "/dev/x"}]}},
    ],
)
def test_what_is_no_spec_is_refused_and_not_guessed_at(hostile: Spec, spec: Spec) -> None:
    for saved, here in ((hostile, spec), (spec, hostile)):
        with contextlib.suppress(Damaged):
            assert spec_differences(NAME, saved, here)


def test_a_difference_is_shown_shortly_and_without_the_environment(spec: Spec) -> None:
    here = copy.deepcopy(spec)
    here["process"] |= {"args": ["/bin/sleep", "x" * 1000], "env": ["SECRET=1"]}
    (difference,) = spec_differences(NAME, spec, here)
    assert len(str(difference)) < 500
    assert "SECRET" not in str(difference)


def test_twice_as_many_mounts_take_twice_the_work(spec: Spec) -> None:
    def work(count: int) -> int:
        many = {**spec, "mounts": [{"destination": f"/{n}", "type": "tmpfs", "source": "x"} for n in range(count)]}
        return calls_of(lambda: list(spec_differences(NAME, many, copy.deepcopy(many))))

    assert work(400) < 2.5 * work(200)
