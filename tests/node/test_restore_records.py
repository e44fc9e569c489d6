"""Records of restores: no pod is tried twice, whatever dies in between; and they are bounded."""

import json
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from agent.node.pods import Identity
from agent.node.restore_records import (
    FAILURES_MAX,
    KEPT_S,
    MAX_RECORDS,
    REST_S,
    RestoreRecord,
    RestoreRecords,
    RestoreRecordsError,
    SnapshotRests,
)


def who(uid: str, namespace: str = "default") -> Identity:
    return Identity(namespace, "web", uid)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "restores.json"


def test_a_pod_whose_restore_failed_is_not_restored_again_from_whatever_snapshot(path: Path) -> None:
    records = RestoreRecords(path)
    assert records.begin(who("uid"), "snap-1", now_s=100) is None
    records.failed(who("uid"), "bad magic header")
    again = RestoreRecords(path)
    for snapshot in ("snap-1", "snap-2"):
        record = again.begin(who("uid"), snapshot, now_s=200)
        assert isinstance(record, RestoreRecord)
        assert (record.snapshot_id, record.failure) == ("snap-1", "bad magic header")
    assert again.begin(who("other"), "snap-1", now_s=200) is None


def test_an_agent_that_died_after_the_rpc_has_left_its_record(path: Path) -> None:
    RestoreRecords(path).begin(who("uid"), "snap-1", now_s=100)
    record = RestoreRecords(path).begin(who("uid"), "snap-1", now_s=101)
    assert record is not None
    assert "before its outcome was known" in str(record)


def test_a_pod_that_is_back_may_be_restored_again_and_so_after_a_day(path: Path) -> None:
    records = RestoreRecords(path)
    records.begin(who("back"), "s", now_s=100)
    records.forget(who("back"))
    assert RestoreRecords(path).begin(who("back"), "s", now_s=101) is None
    records = RestoreRecords(path)
    assert records.begin(who("back"), "s", now_s=101 + KEPT_S - 1) is not None
    assert records.begin(who("back"), "s", now_s=101 + KEPT_S) is None


def failed(path: Path, *pods: str, at_s: float) -> RestoreRecords:
    """Have restores of these pods fail."""
    records = RestoreRecords(path)
    for pod in pods:
        assert records.begin(who(pod), "s", now_s=at_s) is None
        records.failed(who(pod), f"{pod} died")
    return records


def test_a_snapshot_that_has_failed_for_several_pods_rests_and_others_do_not(path: Path) -> None:
    failed(path, "a", "b", at_s=1000)
    records = RestoreRecords(path)
    rests = records.begin(who("c"), "s", now_s=1000 + REST_S - 1)
    assert isinstance(rests, SnapshotRests)
    assert "2 restores from s have failed here within 10 min, the last one: b died" in str(rests)
    assert records.begin(who("d"), "another", now_s=1001) is None
    assert records.begin(who("c"), "s", now_s=1000 + REST_S) is None  # it rests for a while, and not for ever


def test_a_namespace_has_no_part_in_what_befell_anothers_pods_and_snapshots(path: Path) -> None:
    records = failed(path, "a", "b", at_s=1000)
    for uid in ("a", "c"):
        assert records.begin(who(uid, "bank"), "s", now_s=1001) is None
    records.proven(who("a", "bank"), now_s=1002)
    assert [record.pod for record in records.all()] == [("default", "a"), ("default", "b"), ("bank", "c")]
    assert isinstance(records.begin(who("d"), "s", now_s=1003), SnapshotRests)
    assert isinstance(RestoreRecords(path).begin(who("c", "bank"), "s", now_s=1003), RestoreRecord)


def test_one_failure_and_restores_whose_end_is_not_known_do_not_make_a_snapshot_rest(path: Path) -> None:
    records = failed(path, "a", at_s=1000)
    for pod in ("b", "c", "d"):
        assert records.begin(who(pod), "s", now_s=1001) is None


def test_a_restore_that_is_proven_speaks_for_its_snapshot(path: Path) -> None:
    records = failed(path, "a", at_s=1000)
    assert records.begin(who("good"), "s", now_s=1001) is None
    records.proven(who("good"), now_s=1002)
    assert [record.pod_uid for record in records.all()] == ["a"]
    for pod in ("b", "c"):
        assert records.begin(who(pod), "s", now_s=1003) is None
        records.failed(who(pod), "x")
    assert isinstance(records.begin(who("d"), "s", now_s=1004), SnapshotRests)


def test_the_oldest_records_make_room(path: Path) -> None:
    records = [
        {"namespace": "default", "pod_uid": f"pod-{number}", "snapshot_id": "s", "at_s": number, "failure": ""}
        for number in range(MAX_RECORDS)
    ]
    path.write_text(json.dumps({"version": 1, "records": records}))
    assert RestoreRecords(path).begin(who("new"), "s", now_s=2000) is None
    uids = [record.pod_uid for record in RestoreRecords(path).all()]
    assert len(uids) == MAX_RECORDS
    assert (uids[0], uids[-1]) == ("pod-1", "new")


@pytest.mark.parametrize("content", ["{", "[]", '{"version": 2, "records": []}', '{"version": 1, "records": [{}]}'])
def test_a_file_that_can_not_be_read_is_put_aside_and_told_of(content: str, path: Path) -> None:
    path.write_text(content)
    records = RestoreRecords(path)
    assert str(path) in records.problem
    assert path.with_name("restores.json.unreadable").read_text() == content
    assert records.begin(who("uid"), "s", now_s=1) is None
    assert RestoreRecords(path).problem == ""


def test_nothing_is_restored_when_it_can_not_be_noted(tmp_path: Path) -> None:
    records = RestoreRecords(tmp_path / "gone" / "restores.json")
    with pytest.raises(RestoreRecordsError, match="can't be written"):
        records.begin(who("uid"), "s", now_s=1)
    (tmp_path / "gone").mkdir()
    assert records.begin(who("uid"), "s", now_s=1) is None


def test_the_file_is_root_s_alone(path: Path) -> None:
    RestoreRecords(path).begin(who("uid"), "s", now_s=1)
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in os.scandir(path.parent)] == [path.name]


class Records(RuleBasedStateMachine):
    """Against a dictionary: an agent that begins, fails, succeeds, and dies at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.path = Path(self.directory.name) / "restores.json"
        self.records = RestoreRecords(self.path)
        self.model: dict[str, tuple[str, str]] = {}  # snapshot and failure

    uids = st.sampled_from(["a", "b", "c"])

    @rule(uid=uids, snapshot=st.sampled_from(["1", "2"]))
    def begin(self, uid: str, snapshot: str) -> None:
        refused = self.records.begin(who(uid), snapshot, now_s=1) is not None
        rests = sum(of == snapshot and why != "" for of, why in self.model.values()) >= FAILURES_MAX
        assert refused == (uid in self.model or rests)
        if not refused:
            self.model[uid] = (snapshot, "")

    @rule(uid=uids, why=st.sampled_from(["x", "y"]))
    def fail(self, uid: str, why: str) -> None:
        self.records.failed(who(uid), why)
        if uid in self.model:
            self.model[uid] = (self.model[uid][0], why)

    @rule(uid=uids)
    def forget(self, uid: str) -> None:
        self.records.forget(who(uid))
        self.model.pop(uid, None)

    @rule()
    def die(self) -> None:
        self.records = RestoreRecords(self.path)

    @invariant()
    def same(self) -> None:
        found = {record.pod_uid: (record.snapshot_id, record.failure) for record in self.records.all()}
        assert found == self.model

    def teardown(self) -> None:
        self.directory.cleanup()


TestRecords = Records.TestCase
TestRecords.settings = settings(max_examples=20, stateful_step_count=15, deadline=None)
