"""What an agent can do to a container's `create` and `start`, and all that it can't."""

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.wrapper.conftest import Log, StartAgent, Talk, Wrapped, processes_of, says, wait_until

_POD = {
    "io.kubernetes.cri.container-type": "sandbox",
    "io.kubernetes.cri.sandbox-id": "abc",
    "io.kubernetes.cri.sandbox-namespace": "shop",
    "io.kubernetes.cri.sandbox-name": "web-1",
    "io.kubernetes.cri.sandbox-uid": "u-1",
}
_FURTHER = {**_POD, "io.kubernetes.cri.container-type": "container", "io.kubernetes.cri.container-name": "app"}


def _create(bundle: Path) -> tuple[str, ...]:
    return ("--root", "/run/x", "--log-format", "json", "create", "--bundle", str(bundle), "abc")


_START = ("--root", "/run/x", "start", "abc")


def test_the_agent_is_told_names_and_places_and_nothing_else(wrapped: Wrapped, agent: StartAgent) -> None:
    fake = agent(says({"answer": "plain", "annotations": {}}))
    bundle = wrapped.bundle(_FURTHER, process={"env": ["PASSWORD=secret"], "terminal": True})
    wrapped.run(*_create(bundle))
    container = {"container_id": "abc", "runsc": str(wrapped.runsc), "runsc_root": "/run/x", "flags": {}}
    assert fake.asked() == [
        {
            "version": 1,
            "request": "create",
            "container": container,
            "bundle": str(bundle),
            "kind": "further",
            "name": "app",
            "sandbox_id": "abc",
            "pod": {"namespace": "shop", "name": "web-1", "uid": "u-1"},
        }
    ]
    wrapped.run(*_START)
    assert fake.asked() == [{"version": 1, "request": "start", "container": container}]


def test_the_agent_is_told_the_flags_that_an_image_depends_on(wrapped: Wrapped, agent: StartAgent) -> None:
    fake = agent(says({"answer": "plain", "annotations": {}}))
    flags = ("--network=none", "--platform", "kvm", "--directfs", "--overlay2=none", "--overlay2=all:memory", "--debug")
    wrapped.run(*flags, "start", "abc")
    told = {"network": "none", "platform": "kvm", "directfs": "", "overlay2": "all:memory"}
    container = {"container_id": "abc", "runsc": str(wrapped.runsc), "runsc_root": "", "flags": told}
    assert fake.asked() == [{"version": 1, "request": "start", "container": container}]


def test_annotations_are_added_to_the_bundle_before_runsc_reads_it(wrapped: Wrapped, agent: StartAgent) -> None:
    added = {"dev.gvisor.internal.checkpoint.enable": "true", "dev.gvisor.internal.checkpoint.path": "/x"}
    agent(says({"answer": "plain", "annotations": added}))
    bundle = wrapped.bundle(_POD, process={"args": ["ü", "\ud800"], "n": 18446744073709551615})
    os.chmod(bundle / "config.json", 0o640)
    os.chown(bundle / "config.json", 7, 8)
    before = json.loads((bundle / "config.json").read_text())
    assert wrapped.run(*_create(bundle)).returncode == 0
    found = (bundle / "config.json").stat()
    assert json.loads((bundle / "config.json").read_text()) == {**before, "annotations": {**_POD, **added}}
    assert (stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid) == (0o640, 7, 8)
    assert os.listdir(bundle) == ["config.json"]
    assert wrapped.vectors() == [list(_create(bundle))]


def test_a_first_containers_start_becomes_a_restore_in_the_background(wrapped: Wrapped, agent: StartAgent) -> None:
    image = wrapped.directory / "image"
    image.mkdir()
    (image / "checkpoint.img").touch()
    fake = agent(says({"answer": "restore", "image": str(image)}, {"answer": "noted"}))
    assert wrapped.run(*_START).returncode == 0
    assert wrapped.vectors() == [
        ["--root", "/run/x", "restore", "--detach", "--background", f"--image-path={image}", "abc"]
    ]
    report = fake.asked()[1]
    assert (report["request"], report["exit_code"], report["message"]) == ("report", 0, "")


@pytest.mark.parametrize(("ending", "exit_code"), [("exit 128", 128), ("signal 9", -9)])
def test_a_restore_that_fails_ends_as_it_failed_and_is_reported_with_its_reason(
    wrapped: Wrapped, agent: StartAgent, log: Log, ending: str, exit_code: int
) -> None:
    (wrapped.directory / "checkpoint.img").touch()
    fake = agent(says({"answer": "restore", "image": str(wrapped.directory)}, {"answer": "noted"}))
    wrapped.let_runsc(ending, '{"level":"info","msg":"no"}{"msg":"version {\\"a\\":1} differs","level":"error"}\n{"x')
    runsc_log = str(wrapped.directory / "log.json")
    done = wrapped.run("--root", "/run/x", "--log", runsc_log, "--log-format", "json", "start", "abc")
    assert done.returncode == exit_code
    restore, delete = wrapped.vectors()  # and no plain start after it
    assert restore[6] == "restore"
    # containerd can't kill what runsc calls created; its reason stays in its log.
    assert delete[6:] == [f"--log={os.devnull}", "delete", "--force", "abc"]
    report = fake.asked()[1]
    assert (report["request"], report["exit_code"]) == ("report", exit_code)
    assert report["message"] == 'version {"a":1} differs'
    assert any("its restore failed" in line and "differs" in line for line in log.lines())


def test_a_removal_that_hangs_keeps_neither_the_caller_nor_its_pipes(
    wrapped: Wrapped, agent: StartAgent, log: Log
) -> None:
    # As when the sandbox waits for a read of its image: it ends once that is answered.
    (wrapped.directory / "checkpoint.img").touch()
    agent(says({"answer": "restore", "image": str(wrapped.directory)}, {"answer": "noted"}))
    wrapped.configure(deadline_ms=200)
    wrapped.let_runsc("exit 128")
    Path(f"{wrapped.runsc}.hanging").write_text("delete")
    try:
        assert wrapped.run(*_START).returncode == 128  # it reads until nobody has the pipe open
        assert [vector[-2] for vector in wrapped.vectors()] == [f"--image-path={wrapped.directory}", "--force"]
        assert any("it can't be removed, or not yet" in line for line in log.lines())
    finally:
        (removing,) = processes_of(wrapped.directory)
        os.kill(removing, signal.SIGKILL)
        wait_until(lambda: not processes_of(wrapped.directory))


def test_a_decision_that_is_stuck_is_given_up_and_the_container_starts(
    wrapped: Wrapped, agent: StartAgent, log: Log
) -> None:
    # Whatever holds it: this is front.c's own bound, which is the interpreter's and the deadline together.
    wrapped.configure(deadline_ms=200)
    stopped = threading.Event()

    def talk(_: socket.socket) -> None:
        (interpreter,) = (pid for pid in processes_of(wrapped.directory) if b"-I" in _words(pid))
        os.kill(interpreter, signal.SIGSTOP)
        stopped.set()

    agent(talk)
    assert wrapped.run(*_START).returncode == 0
    assert stopped.is_set()
    assert wrapped.vectors() == [list(_START)]
    assert any("no decision about `abc`" in line for line in log.lines())


def _words(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")


def test_a_restore_finds_the_process_as_it_was_and_its_failure_is_seen_by_a_caller_that_ignores_children(
    wrapped: Wrapped, agent: StartAgent
) -> None:
    (wrapped.directory / "checkpoint.img").touch()
    agent(says({"answer": "restore", "image": str(wrapped.directory)}, {"answer": "noted"}))
    wrapped.let_runsc("exit 7")
    found = []
    for program in (wrapped.runsc, wrapped.wrapper):
        with subprocess.Popen(
            [program, *_START],
            stdin=subprocess.DEVNULL,
            restore_signals=False,
            preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN),
        ) as process:
            assert process.wait(60) == 7
        found.append([line for line in wrapped.calls()[0].splitlines() if not line.startswith("argument ")])
    assert found[1] == found[0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_reaches_the_restore_and_the_wrapper_ends_by_it(
    wrapped: Wrapped, agent: StartAgent, number: signal.Signals
) -> None:
    (wrapped.directory / "checkpoint.img").touch()
    fake = agent(says({"answer": "restore", "image": str(wrapped.directory)}, {"answer": "noted"}))
    wrapped.let_runsc("hang")
    with subprocess.Popen([wrapped.wrapper, *_START]) as process:
        wait_until(lambda: Path(f"{wrapped.runsc}.calls").exists())
        wrapped.let_runsc("exit 0")
        process.send_signal(number)
        assert process.wait(60) == -number
    assert fake.asked()[1]["exit_code"] == -number


def test_a_wrapper_that_is_killed_takes_the_restore_with_it(wrapped: Wrapped, agent: StartAgent) -> None:
    (wrapped.directory / "checkpoint.img").touch()
    agent(says({"answer": "restore", "image": str(wrapped.directory)}))
    wrapped.let_runsc("hang")
    reader, writer = os.pipe()
    with subprocess.Popen([wrapped.wrapper, *_START], stdout=writer) as process:
        os.close(writer)
        wait_until(lambda: Path(f"{wrapped.runsc}.calls").exists())
        process.kill()
        process.wait(60)
    with open(reader, "rb") as output:
        assert output.read() == b""  # nobody has it open any more


def _silent(connection: socket.socket) -> None:
    connection.recv(1)


def _drips(connection: socket.socket) -> None:
    connection.settimeout(0.01)
    while True:
        connection.sendall(b" ")
        with contextlib.suppress(TimeoutError):
            connection.recv(1)


def _sends(data: bytes) -> Talk:
    return lambda connection: connection.sendall(data)


BAD_AGENTS: dict[str, tuple[Talk, str]] = {
    "silent": (_silent, "no answer within 0.2 s"),
    "drips": (_drips, "no answer within 0.2 s"),
    "closes": (lambda _: None, "broke off"),
    "breaks off": (_sends(b'{"version": 1, "ans'), "broke off"),
    "not JSON": (_sends(b"plain\n"), "no JSON"),
    "not an object": (_sends(b"[]\n"), "no JSON object"),
    "deep": (_sends(b"[" * 5000 + b"\n"), "no JSON"),
    "endless": (_sends(b"x" * (1 << 20)), "has no end"),
    "two answers": (_sends(b'{"version": 1, "answer": "noted"}\n{}\n'), "no JSON"),
    "another version": (_sends(b'{"version": 2, "answer": "plain", "annotations": {}}\n'), "version 2"),
    "an unknown answer": (says({"answer": "panic"}), "no answer: 'panic'"),
    "no annotations": (says({"answer": "plain"}), "annotations is no object"),
    "annotations of others": (says({"answer": "plain", "annotations": {"a": "b"}}), "is not gVisor's"),
    "an annotation that is a number": (says({"answer": "plain", "annotations": {"dev.gvisor.x": 1}}), "no string"),
    "too many": (says({"answer": "plain", "annotations": {f"dev.gvisor.{n}": "" for n in range(33)}}), "more than 32"),
    "an image by a relative path": (says({"answer": "restore", "image": "../x"}), "no absolute path"),
    "an image with a zero byte": (says({"answer": "restore", "image": "/x\0"}), "no absolute path"),
    "an error": (says({"answer": "failed", "message": "the store is down"}), "the store is down"),
    "an answer to something else": (says({"answer": "noted"}), "is no answer to that"),
}


@pytest.mark.parametrize("command", ["create", "start"])
@pytest.mark.parametrize("case", BAD_AGENTS)
def test_without_a_clear_answer_it_is_plain_runsc_and_the_reason_is_logged(
    wrapped: Wrapped, agent: StartAgent, log: Log, case: str, command: str
) -> None:
    talk, reason = BAD_AGENTS[case]
    agent(talk)
    wrapped.configure(deadline_ms=200)
    bundle = wrapped.bundle(_POD)
    before = (bundle / "config.json").read_bytes()
    arguments = _create(bundle) if command == "create" else _START
    assert wrapped.run(*arguments).returncode == 0
    assert wrapped.vectors() == [list(arguments)]
    assert (bundle / "config.json").read_bytes() == before
    if not (command == "start" and case in ("no annotations",)):
        assert any(reason in line for line in log.lines())


def test_an_agent_that_is_not_there_is_logged_and_the_container_starts(wrapped: Wrapped, log: Log) -> None:
    bundle = wrapped.bundle(_POD)
    for arguments in (_create(bundle), _START):
        assert wrapped.run(*arguments).returncode == 0
        assert wrapped.vectors() == [list(arguments)]
        (line,) = log.lines()
        assert line.startswith("<28>streamd-runsc[")
        assert f"no agent at {wrapped.agent_socket}: No such file" in line


def test_an_image_that_is_gone_makes_a_plain_start(wrapped: Wrapped, agent: StartAgent, log: Log) -> None:
    agent(says({"answer": "restore", "image": str(wrapped.directory / "gone")}))
    assert wrapped.run(*_START).returncode == 0
    assert wrapped.vectors() == [list(_START)]
    assert any("no image in" in line for line in log.lines())


def test_a_container_that_the_snapshot_lacks_is_refused_with_the_agents_words(
    wrapped: Wrapped, agent: StartAgent
) -> None:
    reason = "the snapshot web-1 has no container `debugger`"
    agent(says({"answer": "refused", "message": reason}))
    runsc_log = wrapped.directory / "log.json"
    done = wrapped.run("--log", str(runsc_log), "create", f"--bundle={wrapped.bundle(_FURTHER)}", "abc")
    assert done.returncode == 128
    assert wrapped.calls() == []
    record = json.loads(runsc_log.read_text())
    assert (record["level"], record["msg"]) == ("error", reason)
    assert reason in done.stdout.decode()


def _symlink(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


HOSTILE: dict[str, Callable[[Path], object]] = {
    "not there": Path.unlink,
    "a symlink": _symlink,
    "a FIFO": _fifo,
    "a directory": _directory,
    "huge": lambda path: os.truncate(path, (4 << 20) + 1),
    "not JSON": lambda path: path.write_text("{"),
    "deep": lambda path: path.write_text("[" * 100000),
    "not UTF-8": lambda path: path.write_bytes(b'{"annotations": {"\xff": ""}}'),
    "a list": lambda path: path.write_text("[]"),
    "a list of annotations": lambda path: path.write_text('{"annotations": ["a"]}'),
    "an unknown kind": lambda path: path.write_text('{"annotations": {"io.kubernetes.cri.container-type": "../x"}}'),
    "no sandbox": lambda path: path.write_text('{"annotations": {"io.kubernetes.cri.container-type": "container"}}'),
    "a long name": lambda path: path.write_text(
        json.dumps({"annotations": {"io.kubernetes.cri.container-name": "x" * 1025}})
    ),
    "a name that is a number": lambda path: path.write_text('{"annotations": {"io.kubernetes.cri.sandbox-name": 1}}'),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_bundle_that_is_not_clear_is_left_to_runsc_and_nobody_is_asked(
    wrapped: Wrapped, agent: StartAgent, log: Log, case: str
) -> None:
    fake = agent(says({"answer": "plain", "annotations": {"dev.gvisor.x": "y"}}))
    bundle = wrapped.bundle()
    HOSTILE[case](bundle / "config.json")
    assert wrapped.run(*_create(bundle)).returncode == 0
    assert wrapped.vectors() == [list(_create(bundle))]
    assert fake.asked() == []
    (reason,) = log.lines()
    assert "streamd-runsc" in reason
    assert "no decision" not in reason  # it was looked at, and didn't hang


def test_names_that_look_like_paths_are_only_passed_on(wrapped: Wrapped, agent: StartAgent) -> None:
    fake = agent(says({"answer": "plain", "annotations": {}}))
    annotations = {**_FURTHER, "io.kubernetes.cri.sandbox-id": "../../etc", "io.kubernetes.cri.container-name": "/etc"}
    wrapped.run(*_create(wrapped.bundle(annotations, process={"terminal": True})))
    (asked,) = fake.asked()
    assert (asked["sandbox_id"], asked["name"]) == ("../../etc", "/etc")
    assert not wrapped.run_directory.exists()


def test_a_huge_annotation_does_not_keep_a_container_from_starting(wrapped: Wrapped, agent: StartAgent) -> None:
    agent(says({"answer": "plain", "annotations": {"dev.gvisor.x": "y"}}))
    bundle = wrapped.bundle({**_POD, "note": "x" * (2 << 20)})
    assert wrapped.run(*_create(bundle)).returncode == 0
    assert json.loads((bundle / "config.json").read_text())["annotations"]["dev.gvisor.x"] == "y"


def test_a_word_that_only_looks_like_the_verb_decides_nothing(wrapped: Wrapped, agent: StartAgent) -> None:
    fake = agent(says({"answer": "refused", "message": "no"}))
    arguments = ("--root", "/run/x", "exec", "abc", "systemctl", "start", "create")
    assert wrapped.run(*arguments).returncode == 0
    assert wrapped.vectors() == [list(arguments)]
    assert fake.asked() == []


def test_two_hundred_creates_at_once_are_all_answered(wrapped: Wrapped, agent: StartAgent) -> None:
    # Slow machines: what is shown is that none is lost, not how fast it is.
    wrapped.configure(deadline_ms=60000)
    fake = agent(says({"answer": "plain", "annotations": {"dev.gvisor.x": "y"}}))
    bundles = [wrapped.bundle(_POD, name=f"bundle-{number}") for number in range(200)]
    processes = [
        subprocess.Popen([wrapped.wrapper, "create", f"--bundle={bundle}", bundle.name], stdin=subprocess.DEVNULL)
        for bundle in bundles
    ]
    assert [process.wait(300) for process in processes] == [0] * 200
    assert len(fake.asked()) == 200
    assert {vector[-1] for vector in wrapped.vectors()} == {bundle.name for bundle in bundles}
    for bundle in bundles:
        assert json.loads((bundle / "config.json").read_text())["annotations"] == {**_POD, "dev.gvisor.x": "y"}


def test_no_interpreter_stays_when_a_command_is_killed_that_waits_for_an_answer(
    wrapped: Wrapped, agent: StartAgent
) -> None:
    asked, goes_on = threading.Event(), threading.Event()

    def talk(_: socket.socket) -> None:
        asked.set()
        goes_on.wait(60)

    agent(talk)
    with subprocess.Popen([wrapped.wrapper, *_START]) as process:
        assert asked.wait(60)
        process.kill()
        process.wait(60)
    wait_until(lambda: not processes_of(wrapped.directory))
    goes_on.set()


@pytest.mark.parametrize(
    "text", ["runsc=", "[table]", 'runsc = "a', "nonsense", 'unknown = "x"', "deadline_ms = -1", 'runsc = "/x" y']
)
def test_a_configuration_that_is_not_understood_is_logged_by_line_and_ignored(
    wrapped: Wrapped, log: Log, text: str
) -> None:
    with open(wrapped.directory / "runsc.toml", "a") as file:
        file.write(text)
    assert wrapped.run("state", "abc").returncode == 0
    assert wrapped.vectors() == [["state", "abc"]]
    assert any("runsc.toml:8: not understood, ignored" in line for line in log.lines())
