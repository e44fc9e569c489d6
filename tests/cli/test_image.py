"""`streamd image` against a real control API: what is asked of the daemon, what is said of its answers, how it ends."""

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from streamd.commands.image import LeaseEnded, StillPreparing, _hold, _when_ready
from streamd.daemon.api import models
from streamd.daemon.api.models import ErrorFacts, ImageStateName, Opener
from streamd.daemon.client import Lease
from streamd.errors import Exit, NotFound
from tests.daemon.api.fake_node import LIMIT_S, URL, Running

if TYPE_CHECKING:
    from tests.cli.conftest import Streamd

ONE, TWO = f"{1:032x}", f"{2:032x}"
MOUNTPOINT = f"/run/streamd/images/{ONE}"


def add(daemon: Running, url: str = URL, **fields: Any) -> str:
    return daemon.call(partial(daemon.node.add, url, **fields)).id


def serve(daemon: Running, image_id: str = ONE) -> None:
    daemon.call(
        partial(
            daemon.node.change, image_id, state=ImageStateName.SERVING, mountpoint=f"/run/streamd/images/{image_id}"
        )
    )


@contextmanager
def started(streamd: "Streamd", *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """Run a command that goes on until it is interrupted."""
    command = streamd.arguments(*arguments)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


# request


def test_an_image_is_named_as_soon_as_it_serves(streamd: "Streamd", daemon: Running) -> None:
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(streamd.run, "image", "request", URL, "--tenant", "shop", "--prefetch", "hot")
        daemon.wait_for(lambda: ONE in daemon.node.known)
        serve(daemon)
        result = asked.result(LIMIT_S)
    assert (result.returncode, result.stdout, result.stderr) == (Exit.DONE, f"{ONE}  {MOUNTPOINT}\n", "")
    [request] = daemon.node.asked
    assert (request.snapshot_url, request.tenant, request.prefetch, request.credentials) == (URL, "shop", "hot", None)


def test_an_image_that_is_not_waited_for_has_no_mountpoint_yet(streamd: "Streamd", daemon: Running) -> None:
    assert streamd.run("image", "request", URL, "--no-wait").stdout == f"{ONE}  –\n"
    image = streamd.ok("image", "request", URL, "--no-wait")
    assert (image["id"], image["state"], image["mountpoint"]) == (ONE, "preparing", None)
    assert len(daemon.node.asked) == 1


def test_where_tokens_come_from_is_passed_on(streamd: "Streamd", daemon: Running) -> None:
    streamd.ok("image", "request", URL, "--no-wait", "--token-file", "token")
    streamd.ok("image", "request", f"{URL}b", "--no-wait", "--token-command", "/bin/print-token 'a b' c")
    by_file, by_command = (request.credentials for request in daemon.node.asked)
    assert by_file is not None
    assert by_command is not None
    assert by_file.token_file == f"{streamd.base}/token"  # the daemon has another working directory
    assert by_command.command == ["/bin/print-token", "a b", "c"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["request", URL, "--token-file", "/t", "--token-command", "/c"],
        ["request", URL, "--token-command", "print-s3cr3t"],
        ["request", URL, "--token-command", "'/s3cr3t"],
        ["request", URL, "--token-command", ""],
        ["request", URL, "--hold", "--no-wait"],
        ["request", URL, "--prefetch", "some"],
        ["request", URL, "--timeout", "soon"],
        ["fail", ONE, "--handle", "1", "--container", "web"],
        ["fail", ONE, "--handle", "-1"],
        ["show"],
    ],
)
def test_what_makes_no_sense_is_a_usage_error(streamd: "Streamd", daemon: Running, arguments: list[str]) -> None:
    error = streamd.refused("image", *arguments)
    assert error["exit_code"] == Exit.USAGE
    assert "s3cr3t" not in str(error)
    assert daemon.node.asked == []


def test_what_is_no_address_is_said_before_the_daemon_is_asked(streamd: "Streamd", daemon: Running) -> None:
    error = streamd.refused("image", "request", "ftp://x")
    assert (error["kind"], error["exit_code"]) == ("usage", Exit.USAGE)


def test_a_failed_image_fails_the_command_as_the_image_did(streamd: "Streamd", daemon: Running) -> None:
    facts = ErrorFacts(kind="unreachable", message="the store did not answer", exit_code=6, at_s=1.0)
    add(daemon, state=ImageStateName.FAILED, last_error=facts)
    error = streamd.refused("image", "request", URL)
    assert (error["kind"], error["exit_code"], error["message"]) == (
        "unreachable",
        Exit.UNREACHABLE,
        "the store did not answer",
    )


def test_an_image_that_takes_too_long_is_left_to_the_daemon(streamd: "Streamd", daemon: Running) -> None:
    error = streamd.refused("image", "request", URL, "--timeout", "10ms")
    assert (error["kind"], error["image"]) == ("preparing", ONE)
    assert ONE in error["message"]


class FakeImage:
    """An image whose states come one after another; each question takes as long as it may."""

    def __init__(self, states: Sequence[str]) -> None:
        self.states = list(states)
        self.now_s = 0.0
        self.waits: list[float] = []

    def ask(self, image_id: str, *, wait_s: float) -> dict[str, object]:
        self.waits.append(wait_s)
        state = self.states.pop(0)
        self.now_s += wait_s if state == "preparing" else 1.0
        return {"id": image_id, "state": state, "last_error": None}


def test_a_long_wait_is_made_of_questions_that_the_daemon_takes() -> None:
    image = FakeImage(["preparing", "preparing", "warm"])
    assert _when_ready(image.ask, ONE, 150.0, clock=lambda: image.now_s)["state"] == "warm"
    assert image.waits == [60.0, 60.0, 30.0]
    image = FakeImage(["preparing"] * 4)
    with pytest.raises(StillPreparing, match="150 s"):
        _when_ready(image.ask, ONE, 150.0, clock=lambda: image.now_s)
    assert image.waits == [60.0, 60.0, 30.0]
    image = FakeImage(["preparing", "gone"])
    with pytest.raises(NotFound, match="ended"):
        _when_ready(image.ask, ONE, 90.0, clock=lambda: image.now_s)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, Exit.INTERRUPTED), (signal.SIGTERM, Exit.TERMINATED)])
def test_an_image_is_held_from_before_it_serves_until_the_command_ends(
    streamd: "Streamd", daemon: Running, number: signal.Signals, code: Exit
) -> None:
    with started(streamd, "image", "request", URL, "--hold", "--json") as process:
        daemon.wait_for(lambda: ONE in daemon.node.known and bool(daemon.node.known[ONE].leases))
        serve(daemon)
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["mountpoint"] == MOUNTPOINT
        [lease] = daemon.call(lambda: daemon.node.known[ONE].leases)
        assert (lease.owner, lease.purpose, lease.pid) == ("streamd image request", "held by hand", process.pid)
        process.send_signal(number)
        assert process.wait(LIMIT_S) == code
    daemon.wait_for(lambda: not daemon.node.known[ONE].leases)


def test_a_lease_that_the_daemon_ends_ends_the_command(streamd: "Streamd", daemon: Running) -> None:
    add(daemon, state=ImageStateName.SERVING)
    with started(streamd, "image", "request", URL, "--hold") as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(ONE)
        daemon.call(partial(daemon.node.set_state, ONE, ImageStateName.FAILED))
        _, stderr = process.communicate(timeout=LIMIT_S)
    assert process.returncode == Exit.FAILED
    assert "the daemon has ended the lease" in stderr


def test_a_lease_is_held_whatever_the_daemon_says_meanwhile() -> None:
    class Ticking(Lease):
        looks = 0

        def is_held(self) -> bool:
            self.looks += 1
            return self.looks < 4

    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.send(b"{}\n")
        lease = Ticking(ours, {})
        with pytest.raises(LeaseEnded):
            _hold(lease)
    assert lease.looks == 4


# ls, show, release, fail


def used(**fields: Any) -> dict[str, Any]:
    """Give what an image that a sandbox loads from has."""
    opener = Opener(handle=1 << 63, file="pages.img", pid=17, command="runsc", container="web")
    lease = models.Lease(id="7", owner="pod web-1", purpose="restore", since_s=1.0, pid=16)
    return {"state": ImageStateName.SERVING, "openers": [opener], "leases": [lease]} | fields


def test_images_are_listed(streamd: "Streamd", daemon: Running) -> None:
    assert streamd.run("image", "ls").stderr == "no images\n"
    add(daemon, **used(mountpoint=MOUNTPOINT))
    add(daemon, f"{URL}b", state=ImageStateName.GONE)
    assert [image["id"] for image in streamd.ok("image", "ls")["images"]] == [ONE, TWO]
    shown = streamd.run("image", "ls").stdout
    assert re.search(rf"^{ONE}  {URL} +serving +- +1 +1  {MOUNTPOINT}$", shown, re.MULTILINE)
    assert re.search(rf"^{TWO}  {URL}b +gone ", shown, re.MULTILINE)


def test_an_id_may_be_shortened_to_what_is_one_images(streamd: "Streamd", daemon: Running) -> None:
    image = daemon.call(partial(daemon.node.add, URL))
    ids = ["abcd0" + "0" * 27, "abcd1" + "0" * 27]
    for image_id in ids:
        daemon.call(partial(daemon.node.known.__setitem__, image_id, replace(image, id=image_id)))
    assert streamd.ok("image", "show", "abcd0")["id"] == ids[0]
    assert streamd.ok("image", "show", ids[1])["id"] == ids[1]
    error = streamd.refused("image", "release", "abcd", "--force")
    assert (error["kind"], error["exit_code"]) == ("refused", Exit.REFUSED)
    assert all(image_id in error["message"] for image_id in ids)
    for unknown in ("abc", "ABCD", "ffff", "../x", "", f"{ONE}0", "abcd0\n"):
        assert streamd.refused("image", "show", unknown)["exit_code"] == Exit.NOT_FOUND


def test_all_is_shown_of_an_image(streamd: "Streamd", daemon: Running) -> None:
    add(daemon, **used(bytes_by_tier={"origin": 5}))
    assert streamd.ok("image", "show", ONE)["openers"][0]["container"] == "web"
    shown = streamd.run("image", "show", ONE).stdout
    for name, value in (("openers.0.handle", 1 << 63), ("leases.0.owner", "pod web-1"), ("bytes_by_tier.origin", 5)):
        assert re.search(rf"^{re.escape(name)} +{value}$", shown, re.MULTILINE)


def test_an_image_in_use_is_released_by_force_only(streamd: "Streamd", daemon: Running) -> None:
    add(daemon, **used())
    error = streamd.refused("image", "release", ONE)
    assert (error["kind"], error["exit_code"]) == ("in-use", Exit.REFUSED)
    assert "pod web-1 holds a lease" in error["message"]
    assert "runsc (pid 17) has pages.img open" in error["message"]
    assert daemon.node.known[ONE].state is ImageStateName.SERVING
    assert streamd.run("image", "release", ONE, "--force").stdout == f"image {ONE} is draining\n"


def test_reads_are_failed_of_all_or_of_some(streamd: "Streamd", daemon: Running) -> None:
    add(daemon, **used())
    assert streamd.ok("image", "fail", ONE) == {"image": ONE, "failed_handles": 1}
    streamd.ok("image", "fail", ONE, "--handle", str(1 << 63))
    assert "the reads of 1 open file fail" in streamd.run("image", "fail", ONE, "--container", "web").stdout
    every, handle, container = daemon.node.failed
    assert handle.handle == 1 << 63
    assert container.container == "web"
    assert every == type(every)()


def test_what_an_image_says_can_not_write_on_the_terminal(streamd: "Streamd", daemon: Running) -> None:
    facts = ErrorFacts(kind="failed", message="bad\x1b[2J\u202e", exit_code=1, at_s=1.0)
    add(daemon, **used(last_error=facts, cache_problem="\x07", mountpoint="/m\x1b"))
    for arguments in (["ls"], ["show", ONE], ["release", ONE], ["request", URL]):
        result = streamd.run("image", *arguments)
        assert not re.search("[\x1b\x07\u202e]", result.stdout + result.stderr), arguments
    assert r"bad\x1b[2J\u202e" in streamd.run("image", "show", ONE).stdout


def test_without_a_daemon_every_command_says_so(streamd: "Streamd") -> None:
    commands = [
        ["image", "ls"],
        ["image", "request", URL, "--hold"],
        ["image", "show", "abcd"],
        ["image", "release", ONE],
        ["image", "fail", ONE],
        ["events"],
        ["events", "--no-follow"],
        ["drain"],
        ["top", "--once"],
    ]
    with ThreadPoolExecutor(2) as pool:
        for result in pool.map(lambda arguments: streamd.run(*arguments), commands):
            assert result.returncode == Exit.NOT_FOUND, result.args
            assert f"error: no streamd daemon at {streamd.base}/run/api.sock" in result.stderr


def test_the_commands_that_ask_the_daemon_load_nothing_slow() -> None:
    names = ("image", "status", "top", "events", "drain")
    program = f"import sys, {', '.join(f'streamd.commands.{name}' for name in names)}; print(*sys.modules)"
    command = [sys.executable, "-c", program]
    loaded = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=True).stdout
    heavy = {"trio", "structlog", "msgspec", "rich", "numpy", "http.client", "google", "streamd.fuse", "streamd.store"}
    assert not heavy & set(loaded.split())


def test_who_gives_credentials_that_are_not_used_is_told(streamd: "Streamd", daemon: Running) -> None:
    daemon.call(partial(daemon.node.add, URL, state=ImageStateName.SERVING))
    result = streamd.run("image", "request", URL, "--token-file", "/run/token")
    assert (result.returncode, "these are not used" in result.stderr) == (0, True)
    assert streamd.run("image", "request", URL).stderr == ""
