"""Who applies the changes that are told has what a listing gives."""

import contextlib
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from agent.kube.errors import NotFound
from agent.kube.follower import Follower
from agent.kube.meta import ObjectMeta
from agent.kube.objects import (
    Kind,
    PodSnapshot,
    PodSnapshotManualTrigger,
    PodSnapshotPolicy,
    Resource,
    SnapshotStatus,
    TriggerStatus,
)
from agent.kube.port import Change, Gone, Key, Mended, Put, Synced, Unreadable, key_of
from tests.kube.conftest import Place

ALL = tuple(Kind)
files = st.sampled_from(["a.yaml", "b.yaml"])
policy_names = st.sampled_from(["p", "q"])
snapshot_names = st.sampled_from(["s", "t"])


class View:
    """What a follower makes of the changes."""

    def __init__(self) -> None:
        self.objects: dict[Key, Resource] = {}
        self.unreadable: dict[str, Unreadable] = {}

    def apply(self, changes: list[Change]) -> None:
        for change in changes:
            match change:
                case Put(resource):
                    assert self.objects.get(key_of(resource)) != resource, "told twice"
                    self.objects[key_of(resource)] = resource
                case Gone(key):
                    del self.objects[key]
                case Unreadable(where):
                    assert self.unreadable.get(where) != change, "told twice"
                    self.unreadable[where] = change
                case Mended(where):
                    del self.unreadable[where]
                case Synced():
                    raise AssertionError


class FollowerMachine(RuleBasedStateMachine):
    """Users edit files, the agent writes snapshots, and a follower looks now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.directory_name = tempfile.mkdtemp(prefix="agent-kube-")
        self.place = Place(Path(self.directory_name))
        self.directory = self.place.open()
        self.follower = Follower(self.place.open(), ALL)
        self.view = View()

    def teardown(self) -> None:
        shutil.rmtree(self.directory_name)

    @rule(
        file=files,
        names=st.sets(policy_names),
        is_broken=st.booleans(),
        trigger=st.sampled_from(["manual", "workload"]),
    )
    def edit(self, file: str, names: set[str], is_broken: bool, trigger: str) -> None:
        documents = [self.place.policy(name).replace("manual", trigger) for name in sorted(names)]
        self.place.write(file, *documents, *(["}"] if is_broken else []))

    @rule(file=files)
    def remove(self, file: str) -> None:
        (self.place.files / file).unlink(missing_ok=True)

    @rule(name=policy_names)
    def tell_status(self, name: str) -> None:
        try:
            policy = self.directory.get(PodSnapshotPolicy, name, "team-a")
        except NotFound:
            return
        status = replace(policy.status, observed_generation=policy.status.observed_generation + 1)
        self.directory.update_status(replace(policy, status=status))

    @rule(name=snapshot_names)
    def change_snapshot(self, name: str) -> None:
        try:
            snapshot = self.directory.get(PodSnapshot, name, "n")
        except NotFound:
            self.directory.create(PodSnapshot(ObjectMeta(name=name, namespace="n"), "p"))
        else:
            retries = snapshot.status.observed_checkpoint_retry_count + 1
            status = SnapshotStatus(observed_checkpoint_retry_count=retries)
            self.directory.update_status(replace(snapshot, status=status))

    @rule(name=snapshot_names)
    def delete_snapshot(self, name: str) -> None:
        with contextlib.suppress(NotFound):
            self.directory.delete(self.directory.get(PodSnapshot, name, "n"))

    @rule()
    def look(self) -> None:
        changes, is_complete = self.follower.look()
        assert is_complete
        self.view.apply(changes)

    @rule()
    def settle(self) -> None:
        """After two looks all is known."""
        self.look()
        self.look()
        listing = self.directory.list(*ALL)
        assert self.view.objects == {key_of(each): each for each in listing.items}
        assert self.view.unreadable == {each.where: each for each in listing.unreadable}


TestFollower = FollowerMachine.TestCase
TestFollower.settings = settings(max_examples=30, stateful_step_count=30)


def test_half_a_file_is_not_read_though_it_is_valid(place: Place) -> None:
    place.write("a.yaml", place.policy("web"))
    follower = Follower(place.open(), (Kind.POLICY,))
    follower.look()
    whole = place.policy("web").replace(
        "{matchLabels: {app: web}}", "\n    matchLabels:\n      app: web\n      tier: x"
    )
    text, cut = place.policy("web"), whole.index("      tier: x")
    path = place.files / "a.yaml"
    path.write_text(whole[:cut] + text[text.index("  triggerConfig") :])  # selects more than it will
    assert follower.look() == ([], True)
    path.write_text(whole)
    assert follower.look() == ([], True)
    (put,), _ = follower.look()
    assert isinstance(put, Put)
    assert isinstance(put.resource, PodSnapshotPolicy)
    assert put.resource.selector.match_labels == (("app", "web"), ("tier", "x"))


def test_a_file_that_changes_at_each_look_is_read_after_a_while(place: Place) -> None:
    follower = Follower(place.open(), (Kind.POLICY,))
    follower.look()
    looks = 0
    told: list[Change] = []
    while not told:
        looks += 1
        assert looks < 10
        place.write("a.yaml", place.policy("web") + "#" * looks)
        told, _ = follower.look()
    assert [type(each) for each in told] == [Put]


def test_a_state_directory_that_cannot_be_used_loses_nothing(place: Place) -> None:
    directory = place.open()
    directory.create(PodSnapshot(ObjectMeta(name="s", namespace="n"), "p"))
    follower = Follower(place.open(), (Kind.SNAPSHOT,))
    (put,), is_complete = follower.look()
    assert isinstance(put, Put)
    assert is_complete
    place.state.chmod(0o777)
    (told,), is_complete = follower.look()
    assert isinstance(told, Unreadable)
    assert not is_complete
    assert follower.look() == ([], False)
    place.state.chmod(0o700)
    assert follower.look() == ([Mended(told.where)], True)


def test_what_was_found_before_a_failure_is_told_once(place: Place) -> None:
    place.open().create(PodSnapshot(ObjectMeta(name="s", namespace="n"), "p"))
    place.write("a.yaml", place.policy("web"))
    follower = Follower(place.open(lock_wait_s=0.05), ALL)
    with place.held_lock():  # no status can be swept
        told, is_complete = follower.look()
        assert [type(each) for each in told] == [Put, Put, Unreadable]
        assert not is_complete
    told, is_complete = follower.look()
    assert [type(each) for each in told] == [Mended]
    assert is_complete


def test_a_trigger_that_went_while_a_file_was_broken_is_forgotten_when_that_is_mended(place: Place) -> None:
    directory = place.open()
    place.write("a.yaml", place.trigger)
    place.write("b.yaml", "{")
    follower = Follower(place.open(), ALL)
    follower.look()
    trigger = directory.get(PodSnapshotManualTrigger, "now", "team-a")
    directory.update_status(replace(trigger, status=TriggerStatus(snapshot_created="s")))
    (place.files / "a.yaml").unlink()
    follower.look()
    follower.look()
    place.write("b.yaml", place.storage)
    follower.look()
    follower.look()
    place.write("a.yaml", place.trigger)
    assert directory.get(PodSnapshotManualTrigger, "now", "team-a").status == TriggerStatus()
