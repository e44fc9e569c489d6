"""`streamd top`: rates from two looks, what a printed view and a live one show, and what ends the live one."""

import os
import pty
import re
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest

from streamd.commands.image_facts import ImageFacts, facts_of
from streamd.commands.top import Sample, cache_text, rows, summary
from streamd.daemon.api.models import ErrorFacts, ImageStateName, Opener
from streamd.errors import Exit
from tests.daemon.api.fake_node import LIMIT_S, URL, Running

if TYPE_CHECKING:
    from tests.cli.conftest import Streamd

ONE = f"{1:032x}"
MB = 1_000_000


def loading(image_id: str = ONE, *, store: int = 0, fault: int = 0, stream: int = 0) -> ImageFacts:
    tiers = {"origin": store, "read_fault": fault, "read_stream": stream}
    return facts_of({"id": image_id, "snapshot_url": URL, "state": "serving", "leases": [{}], "bytes_by_tier": tiers})


def sample(*images: ImageFacts, at_s: float = 10.0) -> Sample:
    return Sample(at_s=at_s, now_s=1000.0 + at_s, health={"version": "1", "pid": 7}, images=images, cache="cache: none")


def rates(now: Sample, before: Sample | None) -> list[tuple[object, object]]:
    return [(row[4], row[5]) for row in rows(now, before)]


def test_rates_are_what_was_added_since_the_look_before() -> None:
    before = sample(loading(store=5 * MB, fault=MB), at_s=10.0)
    now = sample(loading(store=9 * MB, fault=2 * MB, stream=3 * MB), at_s=12.0)
    assert rates(now, before) == [("2.0", "2.0")]
    assert summary(now, before)[1] == "from the store 2.0 MB/s, to readers 2.0 MB/s; cache: none"


def test_rates_that_can_not_be_known_are_not_shown() -> None:
    now = sample(loading(store=MB, stream=MB), at_s=12.0)
    unknown = [("–", "–")]
    assert rates(now, None) == unknown
    assert rates(now, sample(at_s=10.0)) == unknown
    assert rates(now, sample(loading(), at_s=12.0)) == unknown, "no time has passed"
    # A daemon that has taken over counts anew.
    assert rates(now, sample(loading(store=2 * MB, stream=0), at_s=11.0)) == [("–", "1.0")]
    assert summary(now, None)[1].startswith("from the store 0.0 MB/s")


def test_limits_are_shown_with_what_they_bound() -> None:
    limited = replace(loading(), fetch_max_bytes_per_s=50 * MB)
    now = replace(
        sample(limited, loading("b" * 32)), health={"version": "1", "pid": 7, "fetch_max_bytes_per_s": 80 * MB}
    )
    assert rates(now, replace(now, at_s=9.0)) == [("0.0 of 50.0", "0.0"), ("0.0", "0.0")]
    assert summary(now, None)[1].startswith("from the store 0.0 of 80.0 MB/s, to readers")


def test_waits_are_shown_where_there_were_any() -> None:
    waited = replace(loading(), fault_waits=3, fault_p50_ms=0.5, fault_p99_ms=250.0)
    assert [row[8:11] for row in rows(sample(loading(), waited), None)] == [[0, "–", "–"], [3, "0.5 ms", "250 ms"]]


def test_images_in_use_come_first() -> None:
    idle, used = replace(loading("a" * 32), leases=0), loading("b" * 32)
    assert [row[0] for row in rows(sample(idle, used), None)] == ["b" * 12, "a" * 12]
    assert summary(sample(idle, used), None)[0] == "streamd 1 (pid 7): 2 images, 1 in use"


def test_the_node_is_summed_up() -> None:
    health = {"version": "1\x1b", "pid": 7, "started_s": 0.0, "is_draining": True, "warnings": ["a\x1b[2J", "b"]}
    lines = summary(replace(sample(), health=health, now_s=7200.0), None)
    assert lines[0] == r"streamd 1\x1b (pid 7, up 2 h): 0 images, 0 in use; draining: no new images"
    assert lines[2:] == [r"warning: a\x1b[2J", "warning: b"]


def test_the_caches_use_is_told_or_why_there_is_none() -> None:
    state: dict[str, object] = {"directory": "/c", "used_bytes": 1 << 30, "max_bytes": 2 << 30, "free_bytes": 3 << 30}
    assert cache_text(state) == "cache: 1.0 GiB of 2.0 GiB, 3.0 GiB free on its disk"
    assert cache_text(state | {"problem": "no such disk"}) == "cache: not used: no such disk"
    assert cache_text({"directory": None}) == "cache: none (cache.enabled = false)"
    assert cache_text({"directory": "/c"}) == "cache: – of –, – free on its disk"


def load(daemon: Running) -> None:
    """Have an image that loads, and one that is over."""
    error = ErrorFacts(kind="failed", message="bad\x1b[2J [red]", exit_code=1, at_s=1.0)
    opener = Opener(handle=1, file="pages.img", pid=17, command="runsc")
    daemon.call(partial(daemon.node.add, URL, state=ImageStateName.SERVING, openers=[opener], last_error=error))
    daemon.call(partial(daemon.node.add, f"{URL}-over", state=ImageStateName.GONE))
    daemon.node.warnings.append("the unit has no fd store")


def test_a_view_is_printed_whole(streamd: "Streamd", daemon: Running) -> None:
    load(daemon)
    result = streamd.run("top", "--once", "--interval", "100ms")
    assert result.returncode == Exit.DONE
    who, rates_line, warning, header, row = result.stdout.splitlines()
    assert re.fullmatch(r"streamd test \(pid 1, up \d+ d\): 1 image, 1 in use", who)
    assert rates_line == (
        "from the store 0.0 MB/s, to readers 0.0 MB/s; cache: 4.0 KiB of 1.0 GiB, 1.0 MiB free on its disk"
    )
    assert warning == "warning: the unit has no fd store"
    assert header.split()[:2] == ["IMAGE", "SNAPSHOT"]
    assert re.split("  +", row)[:6] == [ONE[:12], "web-1", "serving", "-", "0.0", "0.0"]
    assert row.endswith(r"failed: bad\x1b[2J [red]")


def test_a_cache_that_does_not_answer_keeps_no_view_waiting(streamd: "Streamd", daemon: Running) -> None:
    daemon.node.is_hung = True
    assert "cache: the daemon did not answer within 2 s" in streamd.run("top", "--once", "--interval", "100ms").stdout


@pytest.mark.parametrize("arguments", [[], ["--once", "--interval", "10ms"], ["--once", "--interval", "often"]])
def test_what_can_not_be_shown_is_a_usage_error(streamd: "Streamd", daemon: Running, arguments: list[str]) -> None:
    result = streamd.run("top", *arguments)
    assert result.returncode == Exit.USAGE
    assert "the live view needs a terminal" in result.stderr or "--interval" in result.stderr


class Screen:
    """A terminal: what was written on it so far."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.written = ""

    def wait_for(self, text: str) -> None:
        """Read until the text is there."""
        until_s = time.monotonic() + LIMIT_S
        while text not in self.written:
            readable, _, _ = select.select([self.fd], [], [], max(0.0, until_s - time.monotonic()))
            assert readable, f"no {text!r} in {self.written!r}"
            self.written += os.read(self.fd, 1 << 16).decode(errors="replace")


@contextmanager
def watched(streamd: "Streamd", *arguments: str) -> Iterator[tuple["subprocess.Popen[bytes]", Screen]]:
    """Run `streamd top` on a terminal of 200 columns."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"COLUMNS": "200", "LINES": "30", "TERM": "xterm"}
    try:
        command = streamd.arguments("top", *arguments)
        with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
            try:
                yield process, Screen(ours)
            finally:
                process.kill()
    finally:
        os.close(ours)
        os.close(theirs)


def test_the_live_view_outlives_the_daemon_and_ends_by_an_interrupt(streamd: "Streamd", daemon: Running) -> None:
    load(daemon)
    with watched(streamd, "--interval", "100ms") as (process, screen):
        screen.wait_for("web-1")
        screen.wait_for(r"failed: bad\x1b[2J [red]")
        screen.wait_for("warning: the unit has no fd store")
        assert "web-1-over" not in screen.written
        daemon.stop()
        screen.wait_for("no streamd daemon at")
        screen.written = ""
        screen.wait_for("web-1")  # the last that it said
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_S) == Exit.DONE
    assert "Traceback" not in screen.written
