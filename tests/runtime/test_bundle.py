"""OCI bundles."""

import json
import os
import subprocess
from pathlib import Path

from agent.runtime.bundle import (
    Container,
    Mount,
    Pod,
    Rootfs,
    container_spec,
    make_rootfs,
    python_interpreter,
    write_bundle,
)

ROOTFS = Rootfs(path=Path("/root-of-it"), mounts=(Mount("/usr", "/usr"),), readonly=False)


def test_the_spec_says_what_runs_in_what() -> None:
    spec = container_spec(Container(args=["/bin/x", "1"], rootfs=ROOTFS, env={"A": "b=c"}, cwd="/tmp"))
    assert spec["process"]["args"] == ["/bin/x", "1"]
    assert spec["process"]["env"] == ["A=b=c"]
    assert spec["process"]["cwd"] == "/tmp"
    assert spec["root"] == {"path": "/root-of-it", "readonly": False}
    assert {"destination": "/usr", "source": "/usr", "type": "bind", "options": ["rbind", "ro"]} in spec["mounts"]


def test_a_container_alone_has_no_pod_annotations() -> None:
    assert container_spec(Container(args=["x"], rootfs=ROOTFS))["annotations"] == {}


def test_the_containers_of_a_pod_name_its_sandbox() -> None:
    first = container_spec(Container(args=["x"], rootfs=ROOTFS, pod=Pod(sandbox_id="s", name="a", first=True)))
    other = container_spec(Container(args=["x"], rootfs=ROOTFS, pod=Pod(sandbox_id="s", name="b", first=False)))
    assert first["annotations"] == {
        "io.kubernetes.cri.container-type": "sandbox",
        "io.kubernetes.cri.sandbox-id": "s",
        "io.kubernetes.cri.container-name": "a",
    }
    assert other["annotations"]["io.kubernetes.cri.container-type"] == "container"
    assert other["annotations"]["io.kubernetes.cri.sandbox-id"] == "s"


def test_a_bundle_can_be_written_again_in_place(tmp_path: Path) -> None:
    write_bundle(tmp_path / "b", Container(args=["old"], rootfs=ROOTFS))
    path = write_bundle(tmp_path / "b", Container(args=["new"], rootfs=ROOTFS))
    assert path.is_absolute()
    assert json.loads((path / "config.json").read_text())["process"]["args"] == ["new"]


def test_everything_that_is_mounted_into_a_root_has_its_place_there(tmp_path: Path) -> None:
    rootfs = make_rootfs(tmp_path / "r")
    for mount in rootfs.mounts:
        assert (rootfs.path / mount.destination.lstrip("/")).is_dir()
        assert Path(mount.source).is_dir()
    make_rootfs(tmp_path / "r")


def test_the_interpreter_is_a_program_inside_one_of_the_roots_mounts(tmp_path: Path) -> None:
    interpreter = python_interpreter()
    assert not interpreter.is_symlink()
    assert any(interpreter.is_relative_to(mount.destination) for mount in make_rootfs(tmp_path / "r").mounts)
    done = subprocess.run([interpreter, "-ISc", "print(6 * 7)"], capture_output=True, env=dict(os.environ), check=True)
    assert done.stdout == b"42\n"
