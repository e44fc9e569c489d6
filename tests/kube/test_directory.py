"""The two directories: what users write is read or named, what the agent writes is whole whenever it ends."""

import os
import resource
import signal
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from agent.kube.conditions import Condition, Status
from agent.kube.errors import AlreadyExists, Conflict, InvalidObject, NotFound, ReadOnly, Unavailable
from agent.kube.meta import ObjectMeta
from agent.kube.objects import (
    Kind,
    PodSnapshot,
    PodSnapshotManualTrigger,
    PodSnapshotPolicy,
    PodSnapshotStorageConfig,
    SnapshotStatus,
    TriggerStatus,
)
from tests.calls import calls_of
from tests.kube.conftest import Place

ALL = tuple(Kind)
OF_USERS = tuple(kind for kind in Kind if kind is not Kind.SNAPSHOT)
ID = "5f2f6f5e-0000-4000-8000-000000000000"
SNAPSHOT = PodSnapshot(ObjectMeta(name=ID, namespace="team-a", labels={"app": "web"}), "web")
DONE = (Condition("Triggered", Status.TRUE, "Complete", "", "2026-11-30T22:00:00Z"),)


def names(place: Place) -> list[str]:
    return [each.metadata.name for each in place.open().list(*ALL).items]


# --- what users write


def test_files_of_several_objects_are_read_in_the_order_of_kinds_and_names(place: Place) -> None:
    place.write("b.yaml", place.trigger, place.policy("web"))
    place.write("a.yml", place.storage, place.policy("api"))
    (place.files / "notes.txt").write_text("not ours")
    (place.files / ".hidden.yaml").write_text("{")
    listing = place.open().list(*ALL)
    assert [(each.kind, each.metadata.name) for each in listing.items] == [
        (Kind.STORAGE_CONFIG, "bucket"),
        (Kind.POLICY, "api"),
        (Kind.POLICY, "web"),
        (Kind.TRIGGER, "now"),
    ]
    assert not listing.unreadable


def test_a_broken_file_is_one_problem_and_others_keep_working(place: Place) -> None:
    place.write("a.yaml", place.policy("api").replace("manual", "sometimes"), place.storage)
    place.write("b.yaml", place.policy("web"))
    listing = place.open().list(*ALL)
    assert [each.metadata.name for each in listing.items] == ["web"]  # and not the good half of a.yaml
    (problem,) = listing.unreadable
    assert problem.where.endswith("/a.yaml")
    assert problem.problems == ("object 1: spec.triggerConfig.type: must be workload or manual, not 'sometimes'",)


def test_an_object_that_is_there_twice_makes_the_later_file_unreadable(place: Place) -> None:
    place.write("a.yaml", place.policy("web"))
    place.write("b.yaml", place.policy("web"), place.storage)
    listing = place.open().list(*ALL)
    assert [each.metadata.name for each in listing.items] == ["web"]
    assert listing.unreadable[0].problems == (
        "PodSnapshotPolicy team-a/web is in a.yaml and in b.yaml: take it out of one of them",
    )
    place.write("a.yaml", place.storage, place.storage)  # twice in one file
    assert names(place) == ["bucket", "web"]  # those of b.yaml


def test_what_has_not_changed_is_not_read_again(place: Place) -> None:
    place.write("a.yaml", *(place.trigger.replace("now", f"t{number}") for number in range(3)))
    place.write("b.yaml", place.storage)
    directory = place.open()
    said, listed = directory.files.read(), directory.list(*OF_USERS).items
    assert directory.files.read() is said
    assert all(one is other for one, other in zip(directory.list(*OF_USERS).items, listed, strict=True))
    trigger = directory.get(PodSnapshotManualTrigger, "t1", "team-a")
    directory.update_status(replace(trigger, status=replace(trigger.status, snapshot_created="s")))
    place.write("b.yaml", place.storage.replace("my-snapshots", "others"))
    again = directory.list(*OF_USERS).items
    assert {each.metadata.name for each, old in zip(again, listed, strict=True) if each is not old} == {"bucket", "t1"}
    made = [each.status.snapshot_created for each in again if isinstance(each, PodSnapshotManualTrigger)]
    assert made == ["", "s", ""]


def test_a_directory_of_twice_as_many_objects_takes_twice_the_work(place: Place) -> None:
    def work(count: int) -> int:
        place.write("a.yaml", *(place.trigger.replace("now", f"t{number}") for number in range(count)))
        files = place.open().files
        files.read()
        place.write("b.yaml", place.storage)  # so that all there is, but not all files, is looked at again
        return calls_of(files.read)

    assert work(400) < 2.5 * work(200)


def test_where_a_file_is_broken_is_told_without_its_path_which_is_told_already(place: Place) -> None:
    place.write("a.yaml", "kind: a\nkind: b\n")
    place.write("b.yaml", "kind: a\n---\n1\n")
    found = [each.problems for each in place.open().list(*ALL).unreadable]
    assert found == [("line 2: 'kind' is there twice in one object",), ("document 2: not an object",)]


@pytest.mark.parametrize(
    ("mode", "uid", "said"),
    [
        (0o666, 0, "by others than root (its mode is 0666): chmod go-w"),
        (0o620, 0, "by others than root (its mode is 0620): chmod go-w"),
        (0o600, 4711, "belongs to uid 4711, and only root may write there: chown it to root"),
        (0o644, 0, ""),
    ],
)
def test_a_file_that_others_may_have_written_is_refused_until_it_is_only_roots(
    place: Place, mode: int, uid: int, said: str
) -> None:
    place.write("a.yaml", place.policy("web"))
    (place.files / "a.yaml").chmod(mode)
    os.chown(place.files / "a.yaml", uid, 0)
    directory = place.open()
    listing = directory.list(*ALL)
    assert [each.problems[0].endswith(said) for each in listing.unreadable] == ([True] if said else [])
    assert names(place) == ([] if said else ["web"])
    (place.files / "a.yaml").chmod(0o600)
    os.chown(place.files / "a.yaml", 0, 0)
    assert [each.metadata.name for each in directory.list(*ALL).items] == ["web"]


def test_a_pods_manifest_among_the_objects_is_told_where_it_belongs(place: Place) -> None:
    place.write("web.yaml", "{apiVersion: apps/v1, kind: Deployment, metadata: {name: web}}\n")
    (problem,) = place.open().list(*ALL).unreadable
    assert problem.problems == ("object 1: a Deployment's manifest belongs into pods/ below this directory",)


HOSTILE = {
    "not YAML": b"{",
    "not text": b"\xff\xfe",
    "no object": b"- 1\n- 2\n",
    "a key twice": b"kind: a\nkind: b\n",
    "too large": b"#" * (300 << 10),
    "nested": b"[" * 50_000,
    "a bomb of aliases": b"a: &a [x,x,x,x,x,x,x,x,x]\n"
    + b"".join(b"%c: &%c [%s]\n" % (98 + i, 98 + i, b",".join([b"*%c" % (97 + i)] * 9)) for i in range(8)),
    "a tag of Python": b"!!python/object/apply:os.system ['true']\n",
    "a snapshot": b"apiVersion: podsnapshot.gke.io/v1\nkind: PodSnapshot\nmetadata: {name: x}\nspec: {policyName: p}\n",
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_whatever_a_file_holds_it_is_named_and_others_keep_working(place: Place, content: bytes) -> None:
    (place.files / "a.yaml").write_bytes(content)
    place.write("b.yaml", place.policy("web"))
    listing = place.open().list(*ALL)
    assert [each.metadata.name for each in listing.items] == ["web"]
    assert [each.where for each in listing.unreadable] == [str(place.files / "a.yaml")]
    assert len(str(listing.unreadable)) < 5000


def test_links_fifos_and_directories_are_not_followed_waited_for_or_entered(place: Place, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(place.storage)
    (place.files / "link.yaml").symlink_to(tmp_path / "secret")
    os.mkfifo(place.files / "fifo.yaml")
    (place.files / "directory.yaml").mkdir()
    (place.files / "gone.yaml").symlink_to(tmp_path / "nothing")
    listing = place.open().list(*ALL)
    assert not listing.items
    assert {Path(each.where).name: each.problems for each in listing.unreadable} == {
        "link.yaml": ("is a link; links aren't followed",),
        "gone.yaml": ("is a link; links aren't followed",),
        "fifo.yaml": ("isn't a regular file",),
        "directory.yaml": ("isn't a regular file",),
    }


def test_a_directory_that_others_may_write_is_not_read(place: Place) -> None:
    place.write("a.yaml", place.policy("web"))
    place.files.chmod(0o777)
    listing = place.open().list(*ALL)
    assert not listing.items
    assert "must be writable by nobody else" in listing.unreadable[0].problems[0]


def test_a_directory_that_is_not_there_is_named(place: Place) -> None:
    place.files.rmdir()
    listing = place.open().list(*ALL)
    assert listing.unreadable[0].problems == ("the directory isn't there",)


def test_too_many_files_are_named_and_the_first_ones_read(place: Place) -> None:
    place.write("a.yaml", place.policy("web"))
    for number in range(1000):
        (place.files / f"b{number:04}.yaml").touch()
    listing = place.open().list(*ALL)
    assert [each.metadata.name for each in listing.items] == ["web"]
    assert listing.unreadable[0].problems == ("has 1001 files; those after 'b0998.yaml' are not read",)


def test_an_edit_is_seen_and_the_generation_counts_what_statuses_were_written_for(place: Place) -> None:
    directory = place.open()
    place.write("a.yaml", place.policy("web"))
    first = directory.get(PodSnapshotPolicy, "web", "team-a")
    assert first.metadata.generation == 1
    status = replace(first.status, conditions=DONE, observed_generation=1)
    kept = directory.update_status(replace(first, status=status))
    assert kept.metadata.resource_version != first.metadata.resource_version
    place.write("a.yaml", place.policy("web").replace("manual", "workload"))
    edited = directory.get(PodSnapshotPolicy, "web", "team-a")
    assert edited.metadata.generation == 2
    assert edited.status == status
    assert place.open().get(PodSnapshotPolicy, "web", "team-a") == edited


def test_what_belongs_to_the_whole_cluster_has_a_status_too(place: Place) -> None:
    place.write("a.yaml", place.storage)
    config = place.open().get(PodSnapshotStorageConfig, "bucket")
    updated = place.open().update_status(replace(config, status=replace(config.status, conditions=DONE)))
    assert place.open().get(PodSnapshotStorageConfig, "bucket") == updated
    assert updated.status.conditions == DONE


def test_what_a_file_says_of_its_status_and_version_is_passed_over(place: Place) -> None:
    text = place.trigger.replace("namespace: team-a", "namespace: team-a, resourceVersion: '9', uid: u")
    place.write("a.yaml", text + "status: {snapshotCreated: {name: forged}}\n")
    trigger = place.open().get(PodSnapshotManualTrigger, "now", "team-a")
    assert trigger.status == TriggerStatus()
    assert trigger.metadata.uid == ""
    assert trigger.metadata.resource_version != "9"


def test_a_trigger_is_not_forgotten_while_a_file_cannot_be_read(place: Place) -> None:
    directory = place.open()
    place.write("a.yaml", place.trigger)
    trigger = directory.get(PodSnapshotManualTrigger, "now", "team-a")
    directory.update_status(replace(trigger, status=TriggerStatus(DONE)))
    place.write("a.yaml", place.trigger + "}")
    directory.sweep()
    with pytest.raises(NotFound):
        directory.get(PodSnapshotManualTrigger, "now", "team-a")
    place.write("a.yaml", place.trigger)
    assert directory.get(PodSnapshotManualTrigger, "now", "team-a").status.conditions == DONE
    place.write("a.yaml", place.storage)
    directory.sweep()  # now it is gone for certain
    place.write("a.yaml", place.trigger)
    assert directory.get(PodSnapshotManualTrigger, "now", "team-a").status.conditions == ()


def test_users_objects_are_theirs_to_remove(place: Place) -> None:
    place.write("a.yaml", place.storage)
    config = place.open().get(PodSnapshotStorageConfig, "bucket")
    with pytest.raises(ReadOnly):
        place.open().delete(config)  # type: ignore[arg-type]


# --- what the agent writes


def test_a_snapshot_lives_as_it_does_in_an_api_server(place: Place) -> None:
    directory = place.open()
    created = directory.create(replace(SNAPSHOT, status=SnapshotStatus(last_access_time="2026-01-01T00:00:00Z")))
    assert created.status == SnapshotStatus()  # the status is a subresource
    assert created.metadata.creation_timestamp == "2026-11-30T22:00:00Z"
    with pytest.raises(AlreadyExists):
        directory.create(SNAPSHOT)
    assert place.open().get(PodSnapshot, ID, "team-a") == created
    changed = replace(created, policy_name="other", status=SnapshotStatus(DONE))
    updated = directory.update_status(changed)
    assert (updated.policy_name, updated.status.conditions) == ("web", DONE)
    with pytest.raises(Conflict):
        directory.update_status(created)
    with pytest.raises(Conflict):
        directory.delete(created)
    directory.delete(updated)
    with pytest.raises(NotFound):
        directory.get(PodSnapshot, ID, "team-a")
    with pytest.raises(NotFound):
        directory.update_status(updated)
    with pytest.raises(NotFound):
        directory.delete(updated)


def test_only_the_agent_can_read_what_it_writes(place: Place) -> None:
    place.open().create(SNAPSHOT)
    for path in place.state.rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


def test_names_never_lead_out_of_the_directory(place: Place, tmp_path: Path) -> None:
    directory = place.open()
    (tmp_path / "outside.json").write_text("{}")
    for name, namespace in [("../../outside", "team-a"), ("outside", "../.."), ("..", "a"), ("a/b", "a"), ("", "a")]:
        with pytest.raises(NotFound):
            directory.get(PodSnapshot, name, namespace)
        with pytest.raises(InvalidObject):
            directory.create(replace(SNAPSHOT, metadata=ObjectMeta(name=name, namespace=namespace)))
    with pytest.raises(InvalidObject):
        directory.create(replace(SNAPSHOT, metadata=ObjectMeta(name="a" * 241, namespace="a")))
    assert [path.name for path in tmp_path.rglob("*.json")] == ["outside.json"]


def test_links_in_the_state_directory_are_not_followed(place: Place, tmp_path: Path) -> None:
    directory = place.open()
    created = directory.create(SNAPSHOT)
    path = place.state / "snapshots" / "team-a" / f"{ID}.json"
    path.rename(tmp_path / "moved.json")
    path.symlink_to(tmp_path / "moved.json")
    before = (tmp_path / "moved.json").read_bytes()
    with pytest.raises(InvalidObject, match="is a link"):
        directory.update_status(created)
    assert (tmp_path / "moved.json").read_bytes() == before
    directory.create(replace(SNAPSHOT, metadata=ObjectMeta(name="good", namespace="team-a")))
    listing = directory.list(Kind.SNAPSHOT)
    assert [each.metadata.name for each in listing.items] == ["good"]
    assert [each.where for each in listing.unreadable] == [str(path)]


BROKEN = {
    "empty": b"",
    "half": b'{"apiVersion": "podsnapshot.gke.io/v1", "kind": "PodSn',
    "a list": b"[]",
    "nested": b"[" * 100_000,
    "not text": b"\xff",
    "another's": b'{"apiVersion":"podsnapshot.gke.io/v1","kind":"PodSnapshot","metadata":{"name":"other"},'
    b'"spec":{"policyName":"p"}}',
    "of an unknown version": b'{"apiVersion":"podsnapshot.gke.io/v1","kind":"PodSnapshot","metadata":{"name":"%s",'
    b'"namespace":"team-a","resourceVersion":"x"},"spec":{"policyName":"p"}}' % ID.encode(),
    "too large": b'{"a":"' + b"x" * 1_500_000 + b'"}',
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_a_broken_snapshot_is_named_and_others_keep_working(place: Place, content: bytes) -> None:
    directory = place.open()
    directory.create(SNAPSHOT)
    directory.create(replace(SNAPSHOT, metadata=ObjectMeta(name="good", namespace="team-a")))
    path = place.state / "snapshots" / "team-a" / f"{ID}.json"
    path.write_bytes(content)
    listing = directory.list(Kind.SNAPSHOT)
    assert [each.metadata.name for each in listing.items] == ["good"]
    assert [each.where for each in listing.unreadable] == [str(path)]


def test_what_could_not_be_read_back_is_not_written(place: Place) -> None:
    directory = place.open()
    created = directory.create(SNAPSHOT)
    half_a_character = Condition("Ready", Status.FALSE, "Failed", "\ud800", "2026-11-30T22:00:00Z")
    for status in (SnapshotStatus(last_access_time="now\n"), SnapshotStatus((half_a_character,))):
        with pytest.raises(InvalidObject):
            directory.update_status(replace(created, status=status))
    assert directory.get(PodSnapshot, ID, "team-a") == created


def test_a_message_may_have_lines_and_any_characters(place: Place) -> None:
    message = "runsc error: exit status 128\n\tno space left: “/var”\x00\U0001f4a5"
    status = SnapshotStatus((Condition("Ready", Status.FALSE, "Failed", message, "2026-11-30T22:00:00Z"),))
    directory = place.open()
    updated = directory.update_status(replace(directory.create(SNAPSHOT), status=status))
    assert place.open().get(PodSnapshot, ID, "team-a") == updated
    assert updated.status == status


def test_a_disk_that_is_full_leaves_what_was_there(place: Place) -> None:
    directory = place.open()
    created = directory.create(SNAPSHOT)
    long = Condition("Ready", Status.FALSE, "Failed", "x" * 1000, "2026-11-30T22:00:00Z")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, hard))
    try:
        with pytest.raises(Unavailable):
            directory.update_status(replace(created, status=SnapshotStatus((long,))))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert place.open().list(Kind.SNAPSHOT).items == (created,)
    updated = directory.update_status(replace(created, status=SnapshotStatus((long,))))  # over what was left
    assert place.open().list(Kind.SNAPSHOT).items == (updated,)
    assert [path.name for path in (place.state / "snapshots" / "team-a").iterdir()] == [f"{ID}.json"]


_WRITER = """
import sys
from dataclasses import replace
from pathlib import Path
from agent.kube.directory import ObjectDirectory
from agent.kube.errors import Conflict
from agent.kube.objects import PodSnapshot, SnapshotStatus
directory = ObjectDirectory(Path(sys.argv[1]), Path(sys.argv[2]))
snapshot = directory.get(PodSnapshot, sys.argv[3], "team-a")
while True:
    count = snapshot.status.observed_checkpoint_retry_count + 1
    updated = replace(snapshot, status=SnapshotStatus(observed_checkpoint_retry_count=count))
    snapshot = directory.update_status(updated)
    print(count, flush=True)
"""
_UPDATE = "    snapshot = directory.update_status(updated)\n"
_UPDATE_OR_READ = """\
    try:
        snapshot = directory.update_status(updated)
    except Conflict:
        snapshot = directory.get(PodSnapshot, sys.argv[3], "team-a")
        continue
"""


def test_a_writer_that_is_killed_leaves_the_old_or_the_new_object_and_never_less_than_it_said(place: Place) -> None:
    place.open().create(SNAPSHOT)
    for acknowledged in (1, 2, 3, 5, 8):
        argv = [sys.executable, "-c", _WRITER, str(place.files), str(place.state), ID]
        writer = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        with writer.stdout as lines:
            told = [int(lines.readline() or -1) for _ in range(acknowledged)]
            writer.send_signal(signal.SIGKILL)
            told += [int(line) for line in lines if line.endswith("\n")]
        writer.wait()
        snapshot = place.open().get(PodSnapshot, ID, "team-a")
        count = snapshot.status.observed_checkpoint_retry_count
        assert count in (told[-1], told[-1] + 1)
        assert snapshot.metadata.resource_version == str(count + 1)


def test_who_reads_while_another_writes_always_finds_a_whole_object(place: Place) -> None:
    directory = place.open()
    directory.create(SNAPSHOT)
    argv = [sys.executable, "-c", _WRITER, str(place.files), str(place.state), ID]
    writer = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
    try:
        counts = [0]
        while counts[-1] < 500:
            assert writer.poll() is None
            counts.append(directory.get(PodSnapshot, ID, "team-a").status.observed_checkpoint_retry_count)
    finally:
        writer.kill()
        writer.wait()
    assert counts == sorted(counts)


def test_two_writers_never_lose_each_others_changes(place: Place) -> None:
    place.open().create(SNAPSHOT)
    script = _WRITER.replace("while True:", "for _ in range(40):").replace(_UPDATE, _UPDATE_OR_READ)
    argv = [sys.executable, "-c", script, str(place.files), str(place.state), ID]
    writers = [subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    told = [int(line) for writer in writers for line in writer.communicate(timeout=60)[0].split()]
    assert all(writer.returncode == 0 for writer in writers)
    # Each count was given to one writer only, and none was lost.
    assert sorted(told) == list(range(1, len(told) + 1))
    snapshot = place.open().get(PodSnapshot, ID, "team-a")
    assert snapshot.status.observed_checkpoint_retry_count == len(told)


def test_a_lock_that_is_never_given_back_is_said_after_a_while(place: Place) -> None:
    created = place.open().create(SNAPSHOT)
    with place.held_lock(), pytest.raises(Unavailable, match="held by another"):
        place.open(lock_wait_s=0.05).update_status(created)
    assert place.open().list(Kind.SNAPSHOT).items == (created,)
