"""How commands end: a table of bad days, their exit codes, and what is said of them."""

import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from streamd.errors import Exit

if TYPE_CHECKING:
    from tests.cli.conftest import Streamd

# {base}: a directory of the test's own with an `image`, a directory `empty`, and a store with snapshot `web-1` and a
# `damaged` one; what the command line is, its exit code, and a part of its message.
BAD_DAYS: dict[str, tuple[str, Exit, str]] = {
    "no such command": ("snapshot x", Exit.USAGE, "No such command 'snapshot'"),
    "mistyped command": ("moutn x", Exit.USAGE, "did you mean mount?"),
    "gc of a snapshot": ("gc file://{base}/store/web-1", Exit.NOT_FOUND, "is a snapshot, not a store"),
    "gc of another directory": ("gc file://{base}/image", Exit.NOT_FOUND, "is no store"),
    "address with a full-width space": ("ls file://{base}/sto\u3000re", Exit.USAGE, "percent-encode"),
    "image of no address": ("image request web-1", Exit.USAGE, "a snapshot's address is its store's and its id"),
    "image of no store": ("image request http://x/y/web-1", Exit.USAGE, "only by gs:// and file://"),
    "odd tenant": ("image request file:///s/web-1 --tenant a\u3000b", Exit.USAGE, "letters, digits and punctuation"),
    "argument missing": ("mount file://{base}/store/web-1", Exit.USAGE, "Missing argument 'MOUNTPOINT'"),
    "unknown option": ("ls --quick file://{base}/store", Exit.USAGE, "No such option"),
    "no such kind of store": ("ls s3://bucket/x", Exit.USAGE, "s3://"),
    "store address without a scheme": ("ls {base}/store", Exit.USAGE, "begins with gs:// or file://"),
    "relative directory": ("ls file://store", Exit.USAGE, "must be absolute"),
    "duration without sense": ("ls file://{base}/store --store-timeout soon", Exit.USAGE, "'soon' is not a duration"),
    "chunk size that is no multiple of a page": (
        "push {base}/image file://{base}/store --chunk-size 5000",
        Exit.USAGE,
        "multiple of 4KiB",
    ),
    "metadata without a value": ("push {base}/image file://{base}/store --metadata a", Exit.USAGE, "KEY=VALUE"),
    "cache flags that contradict": (
        "mount file://{base}/store/web-1 {base}/empty --no-cache --cache-dir {base}/c",
        Exit.USAGE,
        "--no-cache goes without",
    ),
    "share of more than the disk": (
        "mount file://{base}/store/web-1 {base}/empty --cache-max 200%",
        Exit.USAGE,
        "'200%' is not a size",
    ),
    "two selectors": ("fail {base}/empty --handle 1 --container a", Exit.USAGE, "not both"),
    "config missing": ("--config {base}/none.toml status", Exit.USAGE, "no such file"),
    "config with an unknown key": ("--config {base}/bad.toml status", Exit.USAGE, "colour: is not a known setting"),
    "mountpoint missing": ("mount file://{base}/store/web-1 {base}/none", Exit.NOT_FOUND, "does not exist"),
    "mountpoint is a file": ("mount file://{base}/store/web-1 {base}/bad.toml", Exit.USAGE, "is not a directory"),
    "mountpoint not empty": ("mount file://{base}/store/web-1 {base}/image", Exit.REFUSED, "is not empty"),
    "snapshot missing, mount": ("mount file://{base}/store/other {base}/empty", Exit.NOT_FOUND, "no snapshot other"),
    "snapshot missing, inspect": ("inspect file://{base}/store/other", Exit.NOT_FOUND, "no snapshot other"),
    "snapshot missing, verify": ("verify file://{base}/store/other", Exit.NOT_FOUND, "no snapshot other"),
    "snapshot missing, pull": ("pull file://{base}/store/other {base}/copy", Exit.NOT_FOUND, "no snapshot other"),
    "snapshot missing, rm": ("rm file://{base}/store/other", Exit.NOT_FOUND, "no snapshot other"),
    "id that can't be one": ("inspect file://{base}/store/Web_1", Exit.REFUSED, "must match"),
    "damaged snapshot, inspect": ("inspect file://{base}/store/damaged", Exit.DAMAGED, ""),
    "damaged snapshot, mount": ("mount file://{base}/store/damaged {base}/empty", Exit.DAMAGED, ""),
    "flipped bit in a pack, verify": ("verify file://{base}/store/flipped", Exit.DAMAGED, "pages.img at byte"),
    "flipped bit in a pack, pull": ("pull file://{base}/store/flipped {base}/copy", Exit.DAMAGED, ""),
    "id that can't be one, push": ("push {base}/image file://{base}/store --id Web_1", Exit.USAGE, "must match"),
    "push id that can't be one": ("push {base}/image file://{base}/store --push-id a/b", Exit.USAGE, "must match"),
    "empty id": ("push {base}/image file://{base}/store --id=", Exit.USAGE, "must match"),
    "config with an unknown key, of a command that needs none": (
        "--config {base}/bad.toml ls file://{base}/store",
        Exit.USAGE,
        "colour: is not a known setting",
    ),
    "no image directory": ("push {base}/empty file://{base}/store", Exit.REFUSED, "not an image directory"),
    "directory missing": ("push {base}/none file://{base}/store", Exit.NOT_FOUND, "none"),
    "id is taken": ("push {base}/image file://{base}/store --id web-1", Exit.REFUSED, "web-1"),
    "pull into a directory with files": ("pull file://{base}/store/web-1 {base}/image", Exit.REFUSED, "is not empty"),
    "runsc missing": ("push {base}/image file://{base}/store --runsc {base}/none", Exit.NOT_FOUND, "no such file"),
    "runsc that is none": (
        "push {base}/image file://{base}/store --runsc /bin/false",
        Exit.FAILED,
        "--runsc /bin/false: is it runsc? cpu-features failed with exit code 1",
    ),
    "runsc that is another program": (
        "push {base}/image file://{base}/store --runsc /bin/ls",
        Exit.FAILED,
        "is it runsc? cpu-features failed with exit code 2: ",
    ),
    "no mount, umount": ("umount {base}/empty", Exit.NOT_FOUND, "no streamd mount"),
    "no mount, umount by force": ("umount --force {base}/empty", Exit.NOT_FOUND, "no streamd mount"),
    "another's mount, umount": ("umount --force /proc", Exit.NOT_FOUND, "no streamd mount at /proc"),
    "no mount, fail": ("fail {base}/empty", Exit.NOT_FOUND, "no streamd mount"),
    "no mount, status": ("status {base}/empty", Exit.NOT_FOUND, "no streamd mount"),
    "no such image, cache clear": ("cache clear --image 00", Exit.NOT_FOUND, "no image 00"),
}


def _flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


@pytest.fixture
def base(streamd: "Streamd", image: Path, snapshot: str) -> Path:
    """Give the directory that the table's command lines speak of; the snapshot `web-1` is there."""
    base = streamd.base
    (base / "empty").mkdir()
    (base / "bad.toml").write_text("colour = 3\n")
    shutil.copytree(image, base / "image")
    for name in ("damaged", "flipped"):
        streamd.ok("push", image, f"file://{base}/store", "--id", name)
    _flip(base / "store" / "damaged" / "manifest", 100)
    [pack] = (base / "store" / "flipped" / "packs").rglob("00000000")
    _flip(pack, pack.stat().st_size // 2)
    return base


def test_every_bad_day_has_its_exit_code_and_says_what_is_wrong(streamd: "Streamd", base: Path) -> None:
    # One test for the whole table: its store takes longer to make than most rows to run.
    wrong = []
    for name, (line, exit_code, text) in BAD_DAYS.items():
        result = streamd.run(*line.format(base=base).split(" "), "--json")
        try:
            [stdout_line] = result.stdout.splitlines()
            error = json.loads(stdout_line)["error"]
            assert result.returncode == error["exit_code"] == exit_code
            assert text in error["message"]
            assert error["message"] in result.stderr
            assert "Traceback" not in result.stderr
        except (AssertionError, ValueError, KeyError) as problem:
            wrong.append(f"{name}: {problem!r}\n{result}")
    assert not wrong, "\n\n".join(wrong)
    assert not any((base / "empty").iterdir())


@pytest.mark.parametrize(
    "line",
    ["ls gs://bucket/x", "inspect gs://bucket/x/web-1", "mount gs://bucket/x/web-1 {base}/empty", "gc gs://bucket/x"],
)
def test_a_store_that_is_out_of_reach_is_given_up_after_its_time(streamd: "Streamd", line: str) -> None:
    (streamd.base / "empty").mkdir()
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        emulator = f"http://127.0.0.1:{taken.getsockname()[1]}"
        arguments = line.format(base=streamd.base).split(" ")
        result = streamd.run(*arguments, "--json", "--store-timeout", "500ms", env={"STORAGE_EMULATOR_HOST": emulator})
    assert result.returncode == json.loads(result.stdout)["error"]["exit_code"] == Exit.UNREACHABLE, result


@pytest.mark.parametrize("is_there", [False, True], ids=["missing", "not mounted"])
@pytest.mark.parametrize(
    "command", ["ls", "gc", "inspect", "verify", "pull", "mount", "rm", "trace show", "trace drop"]
)
def test_a_directory_without_a_store_is_a_store_out_of_reach_and_stays_as_it_is(
    streamd: "Streamd", command: str, is_there: bool
) -> None:
    store, target = streamd.base / "away", streamd.base / "target"
    target.mkdir()
    if is_there:
        store.mkdir()
    url = f"file://{store}" if command in ("ls", "gc") else f"file://{store}/web-1"
    arguments: list[str | Path] = [*command.split(), url, *([target / "copy"] if command == "pull" else [])]
    result = streamd.run(*arguments, *([target] if command == "mount" else []), "--json", "--store-timeout", "200ms")
    assert result.returncode == json.loads(result.stdout)["error"]["exit_code"] == Exit.UNREACHABLE, result
    assert f"there is no store at {store}; is its file system mounted?" in result.stderr
    assert not is_there or not any(store.iterdir())
    assert store.exists() == is_there


def test_a_push_makes_a_store_that_is_not_there(streamd: "Streamd", image: Path) -> None:
    streamd.ok("push", image, f"file://{streamd.base}/new/store", "--id", "first")
    assert [entry["id"] for entry in streamd.ok("ls", f"file://{streamd.base}/new/store")["snapshots"]] == ["first"]


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "JSON"])
@pytest.mark.parametrize(
    ("number", "exit_code"), [(signal.SIGINT, Exit.INTERRUPTED), (signal.SIGTERM, Exit.TERMINATED)]
)
def test_an_interrupted_push_says_how_to_go_on(
    streamd: "Streamd", image: Path, as_json: bool, number: signal.Signals, exit_code: Exit
) -> None:
    # The store answers so late that the push is certainly at work when the signal comes.
    command = streamd.arguments("push", image, f"file://{streamd.base}/store?latency=30s", "--id", "slow")
    with subprocess.Popen(
        command + ["--json"] * as_json, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("snapshot slow, push ")
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == exit_code, stderr
    if as_json:
        error = json.loads(stdout)["error"]
        assert (error["kind"], error["exit_code"]) == ("interrupted", exit_code)
    else:
        assert stdout == ""
    assert "interrupted" in stderr
    assert "with --id slow --push-id" in stderr
    assert "Traceback" not in stderr


@pytest.mark.parametrize("command", ["verify", "pull"])
def test_a_command_that_sigterm_ends_says_so(streamd: "Streamd", snapshot: str, command: str) -> None:
    # The store answers so late that the command is certainly at work when the signal comes.
    rest = [streamd.base / "copy"] if command == "pull" else []
    line = streamd.arguments(command, f"{snapshot}?latency=30s", *rest)
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        # Of the signals that it handles: SIGTERM, bit 14.
        until(lambda: bool(int(_status_of(process.pid, "SigCgt"), 16) >> 14 & 1))
        process.send_signal(signal.SIGTERM)
        stdout, stderr = process.communicate(timeout=120)
    assert (process.returncode, stdout) == (Exit.TERMINATED, "")
    assert stderr.endswith("error: interrupted\n")


_LOST = """
import os, signal, sys, time, weakref
from {module} import cli

class Thing:
    pass

def at_work(*_, **__):
    thing = Thing()
    gone = weakref.ref(thing, lambda _: os.kill(os.getpid(), signal.SIGTERM))
    del thing
    time.sleep(60)

cli.cli.main = at_work
cli.main()
"""


@pytest.mark.parametrize("module", ["streamd", "agent"])
def test_a_signal_that_comes_where_nothing_can_be_raised_ends_the_command_all_the_same(module: str) -> None:
    line = [sys.executable, "-c", _LOST.format(module=module)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == Exit.TERMINATED, done.stderr
    assert "Traceback" not in done.stderr


def until(condition: Callable[[], bool]) -> None:
    """Wait for what another process does; a hang is a failure."""
    end_s = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def _status_of(pid: int, key: str) -> str:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line.split()[1] for line in lines if line.startswith(f"{key}:"))


def test_a_push_of_something_else_says_only_what_is_wrong(streamd: "Streamd") -> None:
    result = streamd.run("push", streamd.base, f"file://{streamd.base}/store")
    assert result.returncode == Exit.REFUSED
    assert len(result.stderr.splitlines()) == 1
    assert "not an image directory" in result.stderr


@pytest.fixture
def nobody(streamd: "Streamd") -> Iterator[None]:
    """Run what follows as a user who may read the configuration, and nothing of root's."""
    for name in ("run", "cache"):
        (streamd.base / name).mkdir(mode=0o700)
    streamd.base.chmod(0o755)
    # Imported by root: the user may have no access to the packages.
    for module in (
        "commands.status",
        "commands.cache",
        "daemon.control_client",
        "fuse.mounting",
        "serve.cache_directory",
    ):
        importlib.import_module(f"streamd.{module}")
    os.seteuid(65534)
    yield
    os.seteuid(0)


@pytest.mark.parametrize("line", ["status", "status /mnt", "cache ls", "cache verify", "cache clear"])
@pytest.mark.usefixtures("nobody")
def test_a_user_without_rights_is_told_so(
    streamd: "Streamd", line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from streamd import cli
    from streamd.commands import output

    monkeypatch.setattr(output, "_printed", False)
    assert cli.run(["--config", str(streamd.config), *line.split(" "), "--json"]) == Exit.NOT_PERMITTED
    printed = capsys.readouterr()
    error = json.loads(printed.out)["error"]
    assert (error["kind"], error["exit_code"]) == ("not-permitted", Exit.NOT_PERMITTED)
    assert "run it with sudo" in error["message"]
    assert printed.err == f"error: {error['message']}\n"


def test_a_reader_that_goes_away_gets_no_traceback(streamd: "Streamd", snapshot: str) -> None:
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    result = subprocess.run(
        streamd.arguments("ls", snapshot.rpartition("/")[0]), stdout=write_fd, stderr=subprocess.PIPE, text=True
    )
    os.close(write_fd)
    assert (result.returncode, result.stderr) == (Exit.FAILED, "")


def test_a_bug_is_one_object_and_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from streamd import cli
    from streamd.commands import output

    monkeypatch.setattr(output, "_printed", False)

    def bug(*_: object, **__: object) -> None:
        raise ZeroDivisionError("here")

    broken: Callable[..., object] = bug
    monkeypatch.setattr(cli.cli, "main", broken)
    with pytest.raises(ZeroDivisionError):
        cli.run(["ls", "--json"])
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["kind"], error["message"]) == ("internal", "ZeroDivisionError: here")
