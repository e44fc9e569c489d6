"""`streamd events`: what was, what comes, and what a restart in between does to it."""

import json
import re
import subprocess
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING

import pytest

from streamd.commands.events import _followed, _kept, _line
from streamd.daemon.api.limits import Limits
from streamd.daemon.api.server import Allowed
from streamd.daemon.client import Answer, DaemonClient, NoDaemon
from streamd.errors import Exit
from tests.daemon.api.fake_node import LIMIT_S, Running

if TYPE_CHECKING:
    from tests.cli.conftest import Streamd

ONE = f"{1:032x}"


def publish(daemon: Running, *kinds: str) -> None:
    for kind in kinds:
        daemon.call(partial(daemon.node.events.publish, kind, image=ONE, pid=7))


def kinds_of(output: str) -> list[str]:
    return [json.loads(line)["kind"] for line in output.splitlines()]


@contextmanager
def followed(streamd: "Streamd", *arguments: str) -> Iterator[tuple["subprocess.Popen[str]", IO[str]]]:
    """Run `streamd events --json` until the block ends."""
    command = streamd.arguments("events", "--json", *arguments)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout
        finally:
            process.kill()


def test_what_has_happened_is_shown_once(streamd: "Streamd", daemon: Running) -> None:
    nothing = streamd.run("events", "--no-follow")
    assert (nothing.returncode, nothing.stdout, nothing.stderr) == (Exit.DONE, "", "")
    publish(daemon, "one", "two", "three")
    shown = streamd.run("events", "--no-follow", "--json").stdout
    assert kinds_of(shown) == ["one", "two", "three"]
    ids = [json.loads(line)["id"] for line in shown.splitlines()]
    assert kinds_of(streamd.run("events", "--no-follow", "--json", "--since", ids[0]).stdout) == ["two", "three"]
    assert streamd.run("events", "--no-follow", "--since", ids[2]).stdout == ""
    daemon.wait_for(lambda: daemon.counts.streams == 0)


def test_more_events_than_are_sent_at_once_are_all_shown(streamd: "Streamd", daemon: Running) -> None:
    publish(daemon, *(f"kind-{number}" for number in range(150)))
    assert len(kinds_of(streamd.run("events", "--no-follow", "--json").stdout)) == 150


def test_events_that_cannot_be_had_any_more_are_told_of(streamd: "Streamd", daemon: Running) -> None:
    former_life = ["--since", "00000000-9"]
    assert kinds_of(streamd.run("events", "--no-follow", "--json", *former_life).stdout) == ["lost"]
    publish(daemon, "one")
    assert kinds_of(streamd.run("events", "--no-follow", "--json", *former_life).stdout) == ["lost", "one"]


def test_a_daemon_that_is_restarted_just_then_keeps_nobody_waiting() -> None:
    class Restarted(DaemonClient):
        def last_event_id(self) -> str:
            return "aaaaaaaa-9"

        def events(self, **_: object) -> Generator[Answer]:
            yield {"id": "bbbbbbbb-0", "kind": "lost"}
            raise AssertionError("more is waited for")

    assert list(_kept(Restarted(Path("/")), None)) == []
    assert len(list(_kept(Restarted(Path("/")), "cccccccc-1"))) == 1


@pytest.mark.parametrize("since", ["17", "x", "0000000g-1", "00000000-1\n", ""])
def test_what_is_no_events_id_is_a_usage_error(streamd: "Streamd", daemon: Running, since: str) -> None:
    assert streamd.refused("events", "--since", since)["exit_code"] == Exit.USAGE


def test_people_get_a_line_an_event() -> None:
    event = {"id": "1a2b3c4d-9", "kind": "worker-lost", "at_s": 0.0, "image": "f" * 32}
    facts = {"how": "died", "pid": 12, "has_worker": True, "reason": "no way\x1b[2J\n", "none": None, "empty": ""}
    assert _line(event | {"facts": facts}) == (
        "1970-01-01 00:00:00Z  1a2b3c4d-9  worker-lost       ffffffffffff  how=died  pid=12  has_worker=true"
        '  reason="no way\\u001b[2J\\n"  none=null  empty=""'
    )
    assert _line({"facts": {"\x1b": "\u202e", "x": "\u202ey"}}).endswith('\\x1b="\\u202e"  x="\\u202ey"')
    assert _line({}).startswith("–  None")


def test_events_go_on_where_the_next_daemon_begins(streamd: "Streamd", daemon: Running) -> None:
    publish(daemon, "one")
    with followed(streamd) as (process, lines):
        assert json.loads(lines.readline())["kind"] == "one"
        publish(daemon, "two")
        assert json.loads(lines.readline())["kind"] == "two"
        daemon.stop()
        assert process.stderr is not None
        assert process.stderr.readline() == "the daemon has ended; waiting for the next one\n"
        next_daemon = Running(daemon.run_directory, Limits(), Allowed())
        with next_daemon.started():
            publish(next_daemon, "image-adopted")
            assert json.loads(lines.readline())["kind"] == "lost"
            assert json.loads(lines.readline())["kind"] == "image-adopted"
            process.terminate()
            assert process.wait(LIMIT_S) == Exit.TERMINATED


def test_a_daemon_that_stays_away_is_given_up(daemon: Running) -> None:
    publish(daemon, "one")
    slept_s: list[float] = []
    shown = _followed(DaemonClient(daemon.run_directory), None, clock=lambda: sum(slept_s), sleep=slept_s.append)
    assert next(shown)["kind"] == "one"
    daemon.stop()
    with pytest.raises(NoDaemon):
        next(shown)
    assert 60 < sum(slept_s) < 63


def test_lines_for_people_are_aligned(streamd: "Streamd", daemon: Running) -> None:
    publish(daemon, "one")
    line = streamd.run("events", "--no-follow").stdout
    assert re.fullmatch(rf"\d{{4}}-\S+ \S+Z  [0-9a-f]{{8}}-1  one {{13}}  {ONE[:12]}  pid=7\n", line)
