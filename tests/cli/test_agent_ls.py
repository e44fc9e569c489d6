"""`snapagent ls`: which snapshots there are, in which state, and what can't be read."""

from pathlib import Path

import pytest

from agent.kube.conditions import Step
from tests.cli.agent_places import NOW, Ended, Place, deployment


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path).prepare()


def ls(place: Place, *arguments: str) -> Ended:
    return place.run("ls", "--snapshots", str(place.state), *arguments)


def test_each_snapshot_is_a_line_with_what_has_become_of_it(place: Place) -> None:
    place.snapshot("one")
    place.snapshot("two", steps=(Step.BEGUN, Step.CHECKPOINT_FAILED))
    place.snapshot("three", steps=(Step.BEGUN,))
    ended = ls(place)
    assert ended.code == 0
    rows = [line.split() for line in ended.out.splitlines()]
    assert rows[0] == ["NAMESPACE", "NAME", "STATUS", "POLICY", "POD", "AGE", "USED"]
    assert sorted(row[1:4] for row in rows[1:]) == [
        ["one", "AllSnapshotsAvailable", "web"],
        ["three", "AwaitingCheckpoint", "web"],
        ["two", "Failed", "web"],
    ]
    (first, *_) = ls(place, "--json").json["snapshots"]
    assert (first["namespace"], first["name"], first["created"]) == ("default", "one", NOW)


def test_only_what_was_asked_for_is_listed_and_nothing_is_said_to_be_nothing(place: Place) -> None:
    place.snapshot("one")
    assert "one" in ls(place, "-n", "default").out
    assert ls(place, "-n", "shop").out == "no snapshots\n"
    assert ls(place, "-n", "shop", "--json").json == {"snapshots": []}


def test_a_snapshot_that_can_not_be_read_is_named_and_hides_no_other(place: Place) -> None:
    place.snapshot("one")
    (place.state / "snapshots" / "default" / "two.json").write_text("{")
    ended = ls(place, "--json")
    assert [each["name"] for each in ended.json["snapshots"]] == ["one"]
    assert "two.json" in ended.err


def test_a_directory_that_is_not_there_does_not_pass_for_an_empty_one(place: Place) -> None:
    ended = place.run("ls", "--snapshots", str(place.base / "nothing"), "--json")
    assert (ended.code, ended.json["error"]["kind"]) == (3, "not-found")


def test_each_command_looks_where_the_settings_say(place: Place) -> None:
    place.snapshot("one")
    config = place.base / "agent.toml"
    config.write_text(f'objects_directory = "{place.files}"\nstate_directory = "{place.state}"\n')
    settings = ("--config", str(config), "--json")
    assert [each["name"] for each in place.run("ls", *settings).json["snapshots"]] == ["one"]
    web = place.write("web.yaml", deployment())
    assert place.run("preflight", web, *settings).json["kept"] == 1
    assert place.run("explain", web, "--against", "one", *settings).code == 0
    config.write_text("state = 1\n")
    assert place.run("ls", *settings).json["error"]["kind"] == "usage"
    both = ("--snapshots", str(place.state), "--files", str(place.files))
    assert place.run("explain", web, "--against", "one", *both, *settings).code == 0  # they aren't needed
