"""The runsc shell, against a program that behaves like runsc in one point each, and against runsc itself."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import agent.runtime.runsc as runsc_module
from agent.runtime.arguments import GlobalOptions
from agent.runtime.bundle import Container, make_rootfs, write_bundle
from agent.runtime.runsc import NoSuchContainer, Runsc, RunscError, RunscTimeout, Stdio

# $LOG is the file that --log names, $VERB the first word after the global flags.
_PRELUDE = """#!/bin/sh
for word in "$@"; do
    case $word in
    --log=*) LOG=${word#--log=} ;;
    --*) ;;
    *) VERB=$word; break ;;
    esac
done
say() { printf '{"msg":"%s","level":"%s"}' "$2" "$1" >> "$LOG"; }
running() { echo '{"id":"web","status":"running","pid":1,"bundle":"/b"}'; }
"""

Fake = Callable[[str], Runsc]


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    """Make a runsc out of the body of a shell script."""

    def make(body: str) -> Runsc:
        program = tmp_path / "fake-runsc"
        program.write_text(_PRELUDE + body)
        program.chmod(0o755)
        return Runsc(program, GlobalOptions(root=tmp_path / "root"))

    return make


@pytest.fixture
def runsc(runsc_binary: Path, tmp_path: Path) -> Iterator[Runsc]:
    """Give the real one, on a root of its own."""
    runsc = Runsc(runsc_binary, GlobalOptions(root=tmp_path / "root", network="none", ignore_cgroups=True))
    yield runsc
    runsc.remove_root()


def test_a_failure_carries_all_errors_that_runsc_logged_and_no_warnings(fake: Fake) -> None:
    runsc = fake("say error first; say warning careful; say error second; exit 128")
    with pytest.raises(RunscError) as caught:
        runsc.create("web", Path("/b"))
    assert (caught.value.verb, caught.value.container_id, caught.value.exit_code) == ("create", "web", 128)
    assert caught.value.messages == ("first", "second")
    assert str(caught.value) == "runsc create web: first; second"


def test_a_failure_without_a_log_carries_what_stands_on_stderr(fake: Fake) -> None:
    with pytest.raises(RunscError, match="no such flag"):
        fake("echo no such flag >&2; exit 2").version()


def test_a_container_whose_id_only_begins_like_that_is_not_found(fake: Fake) -> None:
    runsc = fake('[ "$VERB" = state ] && running')
    assert runsc.state("web").status == "running"
    for action in (runsc.state, runsc.kill, runsc.delete, runsc.pause, runsc.start):
        with pytest.raises(NoSuchContainer, match="but web"):
            action("we")


def test_deleting_what_is_not_there_is_an_error_unless_forced(fake: Fake) -> None:
    runsc = fake("say error 'loading container: file does not exist'; exit 128")
    runsc.delete("web", force=True)
    with pytest.raises(NoSuchContainer):
        runsc.delete("web")


_ENDING = """
if [ "$VERB" = state ]; then
    echo '{"id":"web","status":"stopped","pid":0,"bundle":"/b"}'
    exit 0
fi
echo x >> "$0.tries"
[ $(wc -l < "$0.tries") -gt TRIES ] && exit 0
say error 'destroying container: connecting to control server at PID 7: connection refused'
exit 128
"""


def test_a_container_whose_sandbox_is_ending_by_itself_is_deleted_once_that_has_ended(fake: Fake) -> None:
    """Of a further container, runsc tells no process that could be waited for."""
    fake(_ENDING.replace("TRIES", "3")).delete("web", force=True)


@pytest.mark.parametrize("force", [True, False])
def test_a_deletion_that_goes_on_failing_is_an_error(fake: Fake, force: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runsc_module, "_SETTLE_S", 0.3)
    with pytest.raises(RunscError, match="connection refused"):
        fake(_ENDING.replace("TRIES", "1000000")).delete("web", force=force)


def test_an_id_that_could_be_a_flag_or_a_path_never_reaches_runsc(fake: Fake, tmp_path: Path) -> None:
    runsc = fake(f"touch {tmp_path}/called")
    for container_id in ("--root=/", "../x", "a/b", "a b", "x" * 256):
        with pytest.raises(ValueError, match="not a container id"):
            runsc.create(container_id, Path("/b"))
    assert not (tmp_path / "called").exists()


def test_a_call_that_hangs_is_killed_and_reported(fake: Fake) -> None:
    runsc = fake('if [ "$VERB" = state ]; then running; else exec sleep 1000; fi')
    with pytest.raises(RunscTimeout, match=r"no answer in 0\.2 s"):
        runsc.pause("web", timeout_s=0.2)


def test_the_exit_code_of_a_command_in_a_container_is_a_result_and_a_refusal_is_an_error(fake: Fake) -> None:
    body = 'if [ "$VERB" = state ]; then running; else echo out; echo err >&2; %s exit 3; fi'
    done = fake(body % "").exec("web", ["x"])
    assert (done.exit_code, done.stdout, done.stderr) == (3, b"out\n", b"err\n")
    with pytest.raises(RunscError, match="no such program"):
        fake(body % "say error 'no such program';").exec("web", ["x"])


def test_an_interrupted_caller_lets_a_change_come_to_its_end(fake: Fake, tmp_path: Path) -> None:
    runsc = fake(f"touch {tmp_path}/begun; sleep 0.5; touch {tmp_path}/ended")

    def interrupt() -> None:
        while not (tmp_path / "begun").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        runsc.create("web", Path("/b"))
    thread.join()
    assert (tmp_path / "ended").exists()


def test_a_process_that_names_the_root_is_ended_with_the_root(tmp_path: Path, runsc_binary: Path) -> None:
    runsc = Runsc(runsc_binary, GlobalOptions(root=tmp_path / "root"))
    stray = tmp_path / "runsc-sandbox"
    stray.symlink_to("/bin/sh")
    loop = [str(stray), "-c", "while :; do sleep 1; done"]
    mine, other = (
        subprocess.Popen([*loop, f"--root={tmp_path}/root"]),
        subprocess.Popen([*loop, f"--root={tmp_path}/root2"]),
    )
    try:
        reaper = threading.Thread(target=mine.wait)  # a killed process stays visible until its parent looks
        reaper.start()
        runsc.remove_root()
        reaper.join(timeout=10)
        assert mine.returncode == -signal.SIGKILL
        assert other.poll() is None
    finally:
        for process in (mine, other):
            process.kill()
            process.wait()


def test_this_runsc_restores_in_the_background_and_says_what_it_is(runsc: Runsc) -> None:
    assert runsc.has_background()
    assert runsc.version()
    assert "sse2" in runsc.cpu_features() or "fp" in runsc.cpu_features()


def test_a_sandbox_runs_answers_and_leaves_nothing(runsc: Runsc, tmp_path: Path) -> None:
    root = runsc.options.root
    bundle = write_bundle(tmp_path / "b", Container(args=["/bin/cat"], rootfs=make_rootfs(tmp_path / "r")))
    inner_in, to = os.pipe()
    back, inner_out = os.pipe()
    runsc.run("web-1", bundle, Stdio(inner_in, inner_out))
    for fd in (inner_in, inner_out):
        os.close(fd)
    os.write(to, b"hello\n")
    assert os.read(back, 100) == b"hello\n"
    assert [(c.container_id, c.status) for c in runsc.list()] == [("web-1", "running")]
    assert runsc.exec("web-1", ["/bin/sh", "-c", "exit 5"]).exit_code == 5
    with pytest.raises(RunscError, match="already exists"):
        runsc.create("web-1", bundle)
    runsc.pause("web-1")
    assert runsc.state("web-1").status == "paused"
    runsc.resume("web-1")
    with runsc.waiter("web-1") as waiter:
        runsc.kill("web-1", "TERM")
        os.close(to)
        assert waiter.result(timeout_s=60) in (0, 128 + signal.SIGTERM)
    assert os.read(back, 100) == b""
    os.close(back)
    runsc.remove_root()
    assert not root.exists()
    assert str(root) not in Path("/proc/self/mountinfo").read_text()


def test_a_sandbox_that_can_not_start_says_why(runsc: Runsc, tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "b", Container(args=["/no/such"], rootfs=make_rootfs(tmp_path / "r")))
    with pytest.raises(RunscError, match="/no/such"):
        runsc.run("web-1", bundle)
