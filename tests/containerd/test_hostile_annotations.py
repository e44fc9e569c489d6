"""Annotations of a pod's author that name places on the node: what a real runsc makes of them, with nobody to ask."""

from pathlib import Path

from bench.server import Heap
from tests.containerd.conftest import Node

_READY_S = 120.0
_HEAP = Heap(1, 4)
_INTERNAL = "dev.gvisor.internal."


def test_a_pod_can_not_have_itself_saved_where_its_author_likes(node: Node, tmp_path: Path) -> None:
    hostile = {
        "state": {f"{_INTERNAL}checkpoint.path": "VICTIM", f"{_INTERNAL}checkpoint.enable": "true"},
        "files": {f"{_INTERNAL}fscheckpoint.path": "VICTIM", f"{_INTERNAL}fscheckpoint.enable": "true"},
        "no-path": {f"{_INTERNAL}checkpoint.enable": "true", f"{_INTERNAL}fscheckpoint.enable": "true"},
    }
    with node.containerd as containerd:
        for name, annotations in hostile.items():
            victim = tmp_path / name
            victim.mkdir()
            annotations = {key: value.replace("VICTIM", str(victim)) for key, value in annotations.items()}
            task = containerd.run(name, _HEAP, annotations=annotations)
            assert task.server.receive(timeout_s=_READY_S) == "ready 4", name
            assert list(victim.iterdir()) == [], name
            stat = ["/usr/bin/stat", "-c", "%a %n", "/proc/gvisor/checkpoint", "/proc/gvisor/fscheckpoint"]
            found = containerd.runsc.exec(name, stat)
            assert found.stdout == b"444 /proc/gvisor/checkpoint\n", (name, found.stderr)


def test_runsc_itself_takes_no_flag_of_an_author_that_names_a_place(node: Node, tmp_path: Path) -> None:
    with node.containerd as containerd:
        for number, flag in enumerate(("debug-log", "panic-log", "profile-heap", "root", "allow-flag-override")):
            task = containerd.run(f"web-{number}", _HEAP, annotations={f"dev.gvisor.flag.{flag}": str(tmp_path)})
            assert task.exit_code() == 1, flag
            assert "flag override disabled" in task.output()[1], flag
        assert list(tmp_path.iterdir()) == []
