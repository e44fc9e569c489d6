"""`streamd drain`: who is waited for, and what ends the waiting."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from streamd.daemon.api.models import ImageStateName, Opener
from streamd.errors import Exit
from tests.daemon.api.fake_node import LIMIT_S, URL, Running

if TYPE_CHECKING:
    from tests.cli.conftest import Streamd

ONE, TWO = f"{1:032x}", f"{2:032x}"
OPENER = Opener(handle=1, file="pages.img", pid=17, command="runsc")


@contextmanager
def draining(streamd: "Streamd") -> Iterator["subprocess.Popen[str]"]:
    """Run `streamd drain`."""
    command = streamd.arguments("drain")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_node_without_users_is_drained_at_once(streamd: "Streamd", daemon: Running) -> None:
    daemon.call(partial(daemon.node.add, URL, state=ImageStateName.SERVING))
    daemon.call(partial(daemon.node.add, f"{URL}b", state=ImageStateName.FAILED, openers=[OPENER]))
    assert streamd.ok("drain") == {"is_draining": True, "images_in_use": []}
    assert daemon.node.is_draining
    assert streamd.run("drain").stdout == "draining; in use: 0 images\n"
    error = streamd.refused("image", "request", f"{URL}c")
    assert (error["kind"], error["exit_code"]) == ("draining", Exit.REFUSED)


def test_those_who_use_an_image_are_waited_for(streamd: "Streamd", daemon: Running) -> None:
    daemon.call(partial(daemon.node.add, URL, state=ImageStateName.SERVING, openers=[OPENER, OPENER]))
    daemon.call(partial(daemon.node.add, f"{URL}b"))
    assert streamd.ok("drain", "--no-wait")["images_in_use"] == [ONE, TWO]
    with draining(streamd) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "2 in use: web-1 (2 open files), web-1b (preparing)\n"
        # It has looked more often than it has told.
        daemon.wait_for(lambda: daemon.counts.requests["GET", "/v1/images", "200"] >= 5)
        daemon.call(partial(daemon.node.set_state, TWO, ImageStateName.SERVING))
        assert process.stderr.readline() == "1 in use: web-1 (2 open files)\n"
        daemon.call(partial(daemon.node.change, ONE, openers=[]))
        stdout, stderr = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, stdout, stderr) == (Exit.DONE, "draining; in use: 0 images\n", "")


def test_a_drain_is_ended(streamd: "Streamd", daemon: Running) -> None:
    assert streamd.ok("drain")["is_draining"] is True
    assert streamd.ok("drain", "--end") == {"is_draining": False}
    assert not daemon.node.is_draining
    assert streamd.run("drain", "--end").stdout == "new images are taken again\n"


def test_a_drain_that_was_ended_meanwhile_is_told(streamd: "Streamd", daemon: Running) -> None:
    daemon.call(partial(daemon.node.add, URL))
    with draining(streamd) as process:
        assert process.stderr is not None
        assert process.stderr.readline()
        daemon.call(partial(setattr, daemon.node, "is_draining", False))
        _, stderr = process.communicate(timeout=LIMIT_S)
    assert process.returncode == Exit.FAILED
    assert "takes new images again" in stderr
