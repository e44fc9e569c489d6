"""What outlives `create`: a further container's streams, and the stand-ins of containers that have finished."""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.wrapper.conftest import StartAgent, Wrapped, processes_of, says, wait_until

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_HANG_S = 60.0
_FURTHER = {
    "io.kubernetes.cri.container-type": "container",
    "io.kubernetes.cri.sandbox-id": "sandbox",
    "io.kubernetes.cri.container-name": "app",
}


@pytest.fixture(autouse=True)
def as_a_shim() -> Iterator[None]:
    """Adopt orphans, as containerd's shims do."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    yield
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@dataclass(slots=True)
class Streams:
    """The container's ends of three streams, and what they are called in /proc."""

    fds: tuple[int, int, int]
    others: tuple[int, ...]

    def names(self) -> list[str]:
        return [os.readlink(f"/proc/self/fd/{fd}") for fd in self.fds]

    def close(self) -> None:
        """Close both ends of all."""
        for fd in {*self.fds, *self.others}:
            with contextlib.suppress(OSError):
                os.close(fd)


def _pipes() -> Streams:
    (inner_in, outer_in), (outer_out, inner_out), (outer_err, inner_err) = os.pipe(), os.pipe(), os.pipe()
    return Streams((inner_in, inner_out, inner_err), (outer_in, outer_out, outer_err))


def _captured() -> Streams:
    reader, writer = os.pipe()
    return Streams((os.open("/dev/null", os.O_RDONLY), writer, writer), (reader,))


def _null() -> Streams:
    return Streams(
        (os.open("/dev/null", os.O_RDONLY), os.open("/dev/null", os.O_WRONLY), os.open("/dev/null", os.O_WRONLY)), ()
    )


def _call(wrapped: Wrapped, streams: Streams, *arguments: str) -> int:
    """Run the wrapper with these streams."""
    stdin, stdout, stderr = streams.fds
    vector: list[str | Path] = [wrapped.wrapper, "--root", "/run/x", *arguments]
    return subprocess.run(vector, stdin=stdin, stdout=stdout, stderr=stderr, timeout=_HANG_S, check=False).returncode


def _seen(wrapped: Wrapped) -> list[str]:
    """Take what the first call of runsc had as its standard streams."""
    words = [line.split() for line in wrapped.calls()[0].splitlines() if line.startswith("fd ")]
    return [name for _, fd, name, *_ in words if int(fd) < 3]


def _reap() -> None:
    """Collect what this process has adopted and what has ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass


def _nothing_left(wrapped: Wrapped) -> bool:
    _reap()
    return not processes_of(wrapped.directory)


@pytest.mark.parametrize("given", [_pipes, _null])
def test_a_further_container_starts_with_the_streams_that_it_was_created_with(
    wrapped: Wrapped, given: Callable[[], Streams]
) -> None:
    # As under the runc shim: its `create` has the container's streams, its `start` a pipe for messages.
    bundle = wrapped.bundle(_FURTHER)
    created, started = given(), _captured()
    assert _call(wrapped, created, "create", f"--bundle={bundle}", "abc") == 0
    assert _seen(wrapped) == created.names()
    assert _call(wrapped, started, "start", "abc") == 0
    assert _seen(wrapped) == created.names()
    wait_until(lambda: _nothing_left(wrapped))
    assert os.listdir(wrapped.run_directory / "kept") == []
    created.close()
    started.close()


def test_a_further_container_keeps_the_streams_that_its_start_has_when_create_had_none(wrapped: Wrapped) -> None:
    # As under the runsc shim: its `create` has a pipe for messages, which must see its end, and `start` the streams.
    bundle = wrapped.bundle(_FURTHER)
    created, started = _captured(), _pipes()
    assert _call(wrapped, created, "create", f"--bundle={bundle}", "abc") == 0
    assert _seen(wrapped) == created.names()
    os.close(created.fds[1])
    assert os.read(created.others[0], 1) == b""
    assert _call(wrapped, started, "start", "abc") == 0
    assert _seen(wrapped) == started.names()
    assert not (wrapped.run_directory / "kept").exists()
    created.close()
    started.close()


@pytest.mark.parametrize(
    ("annotations", "members"),
    [({}, {}), ({**_FURTHER, "io.kubernetes.cri.container-type": "sandbox"}, {}), (_FURTHER, {"terminal": True})],
    ids=["alone", "first", "with a terminal"],
)
def test_nothing_is_kept_for_a_container_that_has_its_streams_from_create(
    wrapped: Wrapped, annotations: dict[str, str], members: dict[str, object]
) -> None:
    streams = _pipes()
    assert _call(wrapped, streams, "create", f"--bundle={wrapped.bundle(annotations, process=members)}", "abc") == 0
    assert not wrapped.run_directory.exists()
    streams.close()


def test_the_streams_of_a_container_that_is_never_started_are_let_go_with_their_reader(wrapped: Wrapped) -> None:
    streams = _pipes()
    assert _call(wrapped, streams, "create", f"--bundle={wrapped.bundle(_FURTHER)}", "abc") == 0
    _reap()
    assert len(processes_of(wrapped.directory)) == 1
    streams.close()
    wait_until(lambda: _nothing_left(wrapped))
    assert os.listdir(wrapped.run_directory / "kept") == []


def test_a_container_created_again_under_its_id_gets_its_own_streams(wrapped: Wrapped) -> None:
    bundle = wrapped.bundle(_FURTHER)
    first, second, started = _pipes(), _pipes(), _captured()
    assert _call(wrapped, first, "create", f"--bundle={bundle}", "abc") == 0
    assert _call(wrapped, second, "create", f"--bundle={bundle}", "abc") == 0
    wrapped.calls()
    first.close()
    assert _call(wrapped, started, "start", "abc") == 0
    assert _seen(wrapped) == second.names()
    wait_until(lambda: _nothing_left(wrapped))
    second.close()
    started.close()


def test_a_keeper_ends_with_the_shim_that_adopted_it(wrapped: Wrapped) -> None:
    bundle = wrapped.bundle(_FURTHER)
    program = (
        "import ctypes, subprocess, sys; ctypes.CDLL(None).prctl(36, 1, 0, 0, 0); "  # /dev/null: nothing else ends it
        "subprocess.run(sys.argv[1:], "
        "stdin=-3, stdout=-3, stderr=-3, check=True); print('made', flush=True); sys.stdin.read()"
    )
    vector: list[str | Path] = [wrapped.wrapper, "create", f"--bundle={bundle}", "abc"]
    with subprocess.Popen(
        ["/usr/bin/env", "python3", "-c", program, *vector],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as shim:
        assert shim.stdout is not None
        assert shim.stdin is not None
        assert shim.stdout.readline() == b"made\n"
        assert processes_of(wrapped.directory)
        shim.stdin.close()
        shim.wait(_HANG_S)
    wait_until(lambda: _nothing_left(wrapped))


@pytest.mark.parametrize("container_id", ["x" * 200, "../abc", "a/b"])
def test_an_id_that_is_no_name_of_a_socket_is_left_to_runsc(wrapped: Wrapped, container_id: str) -> None:
    streams = _pipes()
    assert _call(wrapped, streams, "create", f"--bundle={wrapped.bundle(_FURTHER)}", container_id) == 0
    assert len(wrapped.calls()) == 1
    assert processes_of(wrapped.directory) == []
    streams.close()


def test_a_further_containers_start_that_joins_a_restore_has_its_streams_and_is_reported(
    wrapped: Wrapped, agent: StartAgent
) -> None:
    fake = agent(says({"answer": "plain", "annotations": {}}, {"answer": "join"}, {"answer": "noted"}))
    created, started = _pipes(), _captured()
    assert _call(wrapped, created, "create", f"--bundle={wrapped.bundle(_FURTHER)}", "abc") == 0
    wrapped.calls()
    wrapped.let_runsc("exit 128")
    assert _call(wrapped, started, "start", "abc") == 128
    assert _seen(wrapped) == created.names()
    assert [(asked["request"], asked.get("exit_code")) for asked in fake.asked()] == [
        ("create", None),
        ("start", None),
        ("report", 128),
    ]
    wait_until(lambda: _nothing_left(wrapped))
    created.close()
    started.close()


# Stand-ins


@pytest.fixture
def finished(wrapped: Wrapped, agent: StartAgent) -> Iterator[int]:
    """Give the process of a container `init` that was created and is answered for."""
    agent(says({"answer": "finished"}))
    bundle = wrapped.bundle(_FURTHER)
    done = wrapped.run("--root", "/run/x", "create", f"--bundle={bundle}", f"--pid-file={bundle}/init.pid", "init")
    assert (done.returncode, done.stdout) == (0, b"")
    pid = int((bundle / "init.pid").read_text())
    yield pid
    wrapped.run("--root", "/run/x", "delete", "--force", "init")
    wait_until(lambda: _nothing_left(wrapped))
    assert os.listdir(wrapped.run_directory / "answered") == []
    assert wrapped.calls() == []  # runsc never hears of it


def _status(wrapped: Wrapped) -> object:
    return json.loads(wrapped.run("--root", "/run/x", "state", "init").stdout)["status"]


def test_a_finished_container_starts_and_containerd_reaps_an_exit_code_of_0(wrapped: Wrapped, finished: int) -> None:
    assert _status(wrapped) == "created"
    assert wrapped.run("--root", "/run/x", "start", "init").returncode == 0
    assert os.waitpid(finished, 0) == (finished, 0)
    assert _status(wrapped) == "stopped"


def test_who_waits_for_a_finished_container_gets_an_exit_code_of_0(wrapped: Wrapped, finished: int) -> None:
    # The runsc shim does that; it does not watch processes.
    wrapped.run("--root=/run/x", "start", "init")
    done = wrapped.run("--root=/run/x", "wait", "init")
    assert json.loads(done.stdout) == {"id": "init", "exitStatus": 0}
    assert os.waitpid(finished, 0) == (finished, 0)


def test_a_finished_container_can_be_killed_before_its_start_and_after_its_end(wrapped: Wrapped, finished: int) -> None:
    assert wrapped.run("--root", "/run/x", "kill", "--all", "init", "9").returncode == 0
    assert os.waitstatus_to_exitcode(os.waitpid(finished, 0)[1]) == -signal.SIGKILL
    assert wrapped.run("--root", "/run/x", "kill", "init", "TERM").returncode == 0
    assert wrapped.run("--root", "/run/x", "update", "--resources", "-", "init").returncode == 0


def test_a_finished_container_that_is_started_twice_fails_the_second_time(wrapped: Wrapped, finished: int) -> None:
    assert wrapped.run("--root", "/run/x", "start", "init").returncode == 0
    os.waitpid(finished, 0)
    done = wrapped.run("--root", "/run/x", "start", "init")
    assert done.returncode == 128
    assert b"init has finished before the snapshot: no start" in done.stdout


def test_another_process_that_has_got_the_pid_meanwhile_is_left_alone(wrapped: Wrapped, finished: int) -> None:
    assert wrapped.run("--root", "/run/x", "start", "init").returncode == 0
    os.waitpid(finished, 0)
    record = wrapped.run_directory / "answered" / "init"
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as other:
        record.write_text(json.dumps({**json.loads(record.read_text()), "pid": other.pid}))
        assert _status(wrapped) == "stopped"
        for verb in ("start", "kill"):
            wrapped.run("--root", "/run/x", verb, "init")
        assert other.poll() is None


def test_nothing_can_be_run_in_a_finished_container(wrapped: Wrapped, finished: int) -> None:
    done = wrapped.run("--root", "/run/x", "exec", "--detach", "init", "ls")
    assert done.returncode == 128
    assert b"init has finished before the snapshot: no exec" in done.stdout


@pytest.mark.usefixtures("finished")
def test_a_container_of_another_root_with_the_same_id_is_runscs(wrapped: Wrapped) -> None:
    assert wrapped.run("--root", "/run/y", "state", "init").returncode == 0
    assert wrapped.vectors() == [["--root", "/run/y", "state", "init"]]


def test_only_further_containers_can_have_finished(wrapped: Wrapped, agent: StartAgent) -> None:
    agent(says({"answer": "finished"}))
    arguments = ("--root", "/run/x", "create", f"--bundle={wrapped.bundle()}", "abc")
    assert wrapped.run(*arguments).returncode == 0
    assert wrapped.vectors() == [list(arguments)]


def test_without_a_place_for_its_record_a_finished_container_is_left_to_runsc(
    wrapped: Wrapped, agent: StartAgent
) -> None:
    agent(says({"answer": "finished"}))
    wrapped.run_directory.mkdir()
    Path(wrapped.run_directory / "answered").touch()
    assert wrapped.run("create", f"--bundle={wrapped.bundle(_FURTHER)}", "abc").returncode == 0
    assert len(wrapped.calls()) == 1
    wait_until(lambda: _nothing_left(wrapped))


def test_without_a_pid_file_a_finished_container_is_left_to_runsc(wrapped: Wrapped, agent: StartAgent) -> None:
    agent(says({"answer": "finished"}))
    bundle = wrapped.bundle(_FURTHER)
    assert wrapped.run("create", f"--bundle={bundle}", f"--pid-file={bundle}/no/pid", "abc").returncode == 0
    assert len(wrapped.calls()) == 1
    assert os.listdir(wrapped.run_directory / "answered") == []
    wait_until(lambda: _nothing_left(wrapped))
