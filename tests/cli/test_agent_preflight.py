"""`snapagent preflight`: a change of manifests, and the snapshots that it would orphan."""

from pathlib import Path
from typing import Any

import pytest

from agent.kube.conditions import Step
from tests.cli.agent_places import DEPLOYMENT, Place, deployment

BECAUSE = ['spec.containers[0 "server"].args[2]: "--threads=4" became "--threads=8"']


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path).prepare()


def more_threads(pod: Any) -> None:
    pod["spec"]["containers"][0]["args"][2] = "--threads=8"


def preflight(place: Place, *arguments: str) -> Any:
    return place.run("preflight", *arguments, "--snapshots", str(place.state), "--json")


def test_a_change_that_counts_orphans_the_workloads_snapshots_and_says_why(place: Place) -> None:
    place.snapshot("one")
    place.snapshot("two", pod_name="web-7f9c8b6d5f-abcde")
    place.snapshot("other", pod_name="batch-12345")
    place.write("k8s/web.yaml", deployment(more_threads))
    ended = preflight(place, str(place.base / "k8s"))
    assert ended.code == 7
    assert (ended.json["orphaned"], ended.json["kept"]) == (2, 0)
    [workload] = ended.json["workloads"]
    assert (workload["kind"], workload["name"]) == ("Deployment", "web")
    assert workload["orphaned"] == [{"snapshot": name, "because": BECAUSE} for name in ("one", "two")]
    assert ended.json["of_other_workloads"] == ["default/other"]
    told = place.run("preflight", str(place.base / "k8s"), "--snapshots", str(place.state))
    assert told.code == 7
    assert told.out.splitlines()[1:] == [
        "  this change orphans one, two, because",
        f"    {BECAUSE[0]}",
        "1 snapshots are of other workloads",
    ]


def test_a_change_that_does_not_count_keeps_them(place: Place) -> None:
    place.snapshot("one")
    place.write("k8s/web.yaml", deployment(lambda pod: pod["spec"]["containers"][0].update(env=[], resources={})))
    ended = preflight(place, str(place.base / "k8s"))
    assert (ended.code, ended.json["kept"], ended.json["orphaned"]) == (0, 1, 0)


def test_each_replica_of_a_stateful_set_is_compared_with_its_own_claims(place: Place) -> None:
    def made(template: Any) -> dict[str, Any]:
        claims = [{"metadata": {"name": "data"}}]
        spec = {"template": template, "volumeClaimTemplates": claims}
        return {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": "web"}, "spec": spec}

    for index in (0, 2):
        pod = deployment()["spec"]["template"]
        pod["spec"]["volumes"].append({"name": "data", "persistentVolumeClaim": {"claimName": f"data-web-{index}"}})
        place.snapshot(f"of-{index}", pod, pod_name=f"web-{index}")
    same = preflight(place, place.write("web.yaml", made(DEPLOYMENT["spec"]["template"])))
    assert (same.code, same.json["kept"]) == (0, 2)
    changed = preflight(place, place.write("web.yaml", made(deployment(more_threads)["spec"]["template"])))
    assert (changed.code, changed.json["orphaned"]) == (7, 2)
    assert {tuple(each["because"]) for each in changed.json["workloads"][0]["orphaned"]} == {tuple(BECAUSE)}


def test_snapshots_of_other_namespaces_and_dead_ones_are_nobodys_loss(place: Place) -> None:
    place.snapshot("failed", steps=(Step.BEGUN, Step.CHECKPOINT_FAILED))
    place.snapshot("one")
    path = place.write("web.yaml", deployment(more_threads))
    ended = preflight(place, path, "--namespace", "elsewhere")
    assert (ended.code, ended.json["of_other_workloads"]) == (0, ["default/one"])
    assert preflight(place, path).json["orphaned"] == 1


def test_of_two_workloads_by_whose_names_a_pod_could_be_the_one_that_fits_is_meant(place: Place) -> None:
    """A pod `web-abcde-12345` may be of the Deployment `web` or of the Job `web-abcde`."""
    place.snapshot("one", pod_name="web-abcde-12345")
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "web-abcde"}}
    template = deployment(lambda pod: pod["spec"]["containers"][0].update(image="other", args=[]))["spec"]["template"]
    both = place.write("both.yaml", job | {"spec": {"template": template}}, deployment())
    ended = preflight(place, both)
    assert (ended.code, ended.json["kept"]) == (0, 1)


def test_files_that_are_no_manifests_are_passed_over_and_broken_ones_end_it(place: Place) -> None:
    place.snapshot("one")
    place.write("k8s/web.yaml", deployment())
    place.write("k8s/values.yaml", {"image": "x"})
    (place.base / "k8s" / "notes.txt").write_text("kind: [")
    (place.base / "k8s" / ".hidden.yaml").write_text("kind: [")
    (place.base / "k8s" / "link.yaml").symlink_to("/proc/self/environ")
    assert preflight(place, str(place.base / "k8s")).code == 0
    (place.base / "k8s" / "broken.yaml").write_text("kind: [")
    ended = preflight(place, str(place.base / "k8s"))
    assert ended.code == 4
    assert "broken.yaml, line 1" in ended.json["error"]["message"]


def test_a_mistyped_directory_does_not_pass_for_one_without_snapshots(place: Place) -> None:
    path = place.write("web.yaml", deployment())
    ended = place.run("preflight", path, "--snapshots", str(place.base / "nothing"), "--json")
    assert (ended.code, ended.json["error"]["kind"]) == (3, "not-found")
    assert "--snapshots names another one" in ended.json["error"]["message"]
    assert place.run("preflight", str(place.base / "nothing"), "--json").code == 3
    assert preflight(place, str(place.files)).code == 3  # a policy makes no pods
