"""`snapagent hash`, as its users run it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.agent_places import DEPLOYMENT, Place, deployment

GOLDEN = Path(__file__).parent.parent / "podspec"


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_each_thing_that_makes_pods_gets_a_line_and_others_are_passed_over(place: Place) -> None:
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "once", "namespace": "b"}}
    job["spec"] = {"completionMode": "Indexed", "template": DEPLOYMENT["spec"]["template"]}
    path = place.write("all.yaml", {"apiVersion": "v1", "kind": "Service"}, DEPLOYMENT, job)
    ended = place.run("hash", path, "--namespace", "a")
    assert ended.code == 0
    first, second = ended.out.splitlines()
    assert first.endswith("  Deployment a/web")
    assert second.endswith("  Job b/once (replica 0; each has a hash of its own)")
    assert place.run("hash", path, "--index", "1").out.splitlines()[1].split()[0] != second.split()[0]


def test_json_has_both_hashes_and_what_was_kept(place: Place) -> None:
    golden = json.loads((GOLDEN / "golden.json").read_text())["nginx.yaml"]
    [pod] = place.run("hash", str(GOLDEN / "manifests" / "nginx.yaml"), "--json").json["pods"]
    assert (pod["xxh3_128"], pod["sha256"], pod["version"]) == (golden["xxh3_128"], golden["sha256"], 1)
    assert pod["spec"]["spec"]["containers"][0]["image"] == "nginx:1.27"
    assert "resources" not in str(pod)


def test_standard_input_is_read_by_the_program_itself(place: Place) -> None:
    manifest = deployment(lambda pod: pod["spec"]["containers"][0].update(env=[{"name": "LEVEL", "value": "debug"}]))
    hashes = [
        subprocess.run(
            [sys.executable, "-m", "agent.cli", "hash", "-"],
            input=json.dumps(each),
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
        for each in (DEPLOYMENT, manifest)
    ]
    assert hashes[0] == hashes[1]


@pytest.mark.parametrize(
    ("content", "code", "kind", "message"),
    [
        (None, 3, "not-found", "No such file"),
        ("kind: Service\napiVersion: v1\n", 3, "not-found", "nothing there makes pods; what does: Pod, "),
        ("- kind: Pod\n- kind: Pod\n", 4, "pod-spec", "not an object; put --- between objects"),
        ("a: [", 4, "pod-spec", "pod.yaml, line"),
        ("a: 1\n", 4, "pod-spec", "not a Kubernetes object"),
        ("\xff", 4, "pod-spec", "not UTF-8"),
        (
            "{kind: Pod, apiVersion: v1, metadata: {name: web}, spec: {containers: [{name: a, args: [1]}]}}",
            4,
            "pod-spec",
            "Pod default/web: spec.containers[0].args[0]: must be text, not a number",
        ),
    ],
)
def test_what_can_not_be_hashed_is_named(place: Place, content: str | None, code: int, kind: str, message: str) -> None:
    path = place.base / "pod.yaml"
    if content is not None:
        path.write_bytes(content.encode("latin-1"))
    ended = place.run("hash", str(path), "--json")
    assert ended.code == code
    assert ended.json["error"]["kind"] == kind
    assert message in ended.json["error"]["message"]


def test_a_directory_is_told_from_a_file_and_standard_input_by_its_name(place: Place) -> None:
    ended = place.run("hash", str(place.base))
    assert (ended.code, f"is a directory; name its files ({place.base}/*.yaml)" in ended.err) == (3, True)


def test_a_name_can_not_write_on_the_terminal(place: Place) -> None:
    manifest = deployment() | {"metadata": {"name": "web\x1b[2J"}}
    ended = place.run("hash", place.write("pod.yaml", manifest))
    assert "\x1b" not in ended.out
    assert "web\\x1b[2J" in ended.out


@pytest.mark.parametrize("name", ["hash", "explain", "preflight"])
def test_help_teaches_by_an_example(place: Place, name: str) -> None:
    shown = place.run(name, "--help")
    assert shown.code == 0
    assert f"snapagent {name} " in shown.out.partition("Example:")[2]


def test_a_mistyped_command_is_told_what_was_meant(place: Place) -> None:
    ended = place.run("hsah")
    assert (ended.code, "did you mean hash?" in ended.err) == (2, True)
