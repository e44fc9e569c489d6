"""The largest pod that has a hash goes the whole way: a draft, an object with all that it may say, and back."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from agent.kube.conditions import Conditions, Step, after_step
from agent.kube.directory import ObjectDirectory
from agent.kube.fields import MAX_FREE_TEXT_CHARS
from agent.kube.meta import ObjectMeta
from agent.kube.objects import PodSnapshot, SnapshotStatus
from agent.kube.origin import MAX_CONTAINERS, Origin
from agent.node.course import Ending, Phase
from agent.node.course import Origin as JobOrigin
from agent.node.drafts import read_draft, write_draft
from agent.node.jobs import Job, JobDirectory
from agent.podspec.distil import distil
from agent.podspec.identity import MAX_BYTES, canonical_bytes, pod_hash
from agent.podspec.shapes import PodSpecError, Value

NOW = "2026-06-01T12:00:00Z"
UUID = "11111111-1111-4111-8111-111111111111"
# What a character takes in UTF-8, and what in JSON that is ASCII.
CHARACTERS = {"ASCII": "x", "two bytes": "ü", "three bytes": "€", "four bytes": "🜁", "escaped": '"'}


def pod(character: str, total: int) -> dict[str, Value]:
    """Distil a pod whose canonical form has this size."""

    def made(argument: str) -> dict[str, Value]:
        containers = [{"name": f"c{n:061d}", "image": "i"} for n in range(MAX_CONTAINERS - 1)]
        return distil({"spec": {"containers": [{"name": "web", "args": ["-c", argument]}, *containers]}})

    room = total - len(canonical_bytes(made(" "))) + 1
    size = len(json.dumps(character, ensure_ascii=False).encode()) - 2
    return made(character * (room // size) + "x" * (room % size))


@pytest.mark.parametrize("case", CHARACTERS)
def test_the_largest_pod_that_has_a_hash_is_kept_whole_in_its_snapshots_object(tmp_path: Path, case: str) -> None:
    distilled = pod(CHARACTERS[case], MAX_BYTES)
    assert len(canonical_bytes(distilled)) == MAX_BYTES
    conditions: Conditions = ()
    for step in (Step.BEGUN, Step.CHECKPOINTED, Step.REPLICATION_FAILED):
        conditions = after_step(conditions, step, now=NOW, message="x" * MAX_FREE_TEXT_CHARS)
    features = [f"feature-{n}" for n in range(256)]
    origin = Origin(
        pod_name="web",
        pod_uid=UUID,
        pod_hash=pod_hash(distilled),
        distilled=distilled,
        containers=tuple(f"c{n:061d}" for n in range(MAX_CONTAINERS)),
        node_facts={"cpu": {"features": features}},
    )
    labels = {f"example.com/{n}": "x" * 63 for n in range(16)}
    meta = ObjectMeta(name=UUID, namespace="default", labels=labels)
    status = SnapshotStatus(conditions=conditions, snapshot_url="gs://bucket/" + "x" * 1000, origin=origin)
    draft = PodSnapshot(meta, "web", status)

    jobs = JobDirectory(tmp_path / "jobs")
    job = Job(
        job_id=UUID,
        sandbox_id="sandbox",
        origin=JobOrigin.WORKLOAD,
        ending=Ending.RESUME,
        store_url="gs://bucket",
        snapshot_id=UUID,
        push_id=UUID,
        phase=Phase.ARMED,
    )
    jobs.arm(job)
    write_draft(jobs, job, draft)
    assert read_draft(jobs, job) == draft

    objects = ObjectDirectory(tmp_path / "files", tmp_path / "state")
    created = objects.create(draft)
    objects.update_status(replace(created, status=status))
    found = objects.get(PodSnapshot, UUID, "default").status.origin
    assert found is not None
    assert pod_hash(distil(found.distilled)) == found.pod_hash == origin.pod_hash
    assert found.distilled == distilled


def test_a_larger_one_has_no_hash() -> None:
    with pytest.raises(PodSpecError, match=f"{MAX_BYTES + 1} bytes, more than {MAX_BYTES}"):
        pod_hash(pod("x", MAX_BYTES + 1))
