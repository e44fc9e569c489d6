"""What isn't the wrapper's business reaches runsc as if there were no wrapper; so does what nobody decides."""

import fcntl
import os
import pty
import resource
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.wrapper.conftest import Wrapped, wait_until

_HANG_S = 60.0

CIRCUMSTANCES: dict[str, Callable[[], object]] = {
    "nothing special": lambda: None,
    "SIGPIPE and SIGHUP ignored": lambda: [signal.signal(n, signal.SIG_IGN) for n in (signal.SIGPIPE, signal.SIGHUP)],
    "SIGCHLD ignored": lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN),
    "SIGXFSZ and SIGPIPE at their default": lambda: [
        signal.signal(n, signal.SIG_DFL) for n in (signal.SIGXFSZ, signal.SIGPIPE)
    ],
    "SIGTERM and SIGCHLD blocked": lambda: signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGCHLD)),
    "an umask": lambda: os.umask(0o077),
    "no umask": lambda: os.umask(0),
    "few descriptors": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 128)),
    "small files": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)),
    "a session of its own": os.setsid,
    "a process group of its own": lambda: os.setpgid(0, 0),
    "low priority": lambda: os.nice(5),
    "another directory": lambda: os.chdir("/proc"),
    "no standard input": lambda: os.close(0),
    "no standard streams": lambda: os.closerange(0, 3),
}
# The last two reach the decision, where there is no agent.
COMMANDS = {
    "state": ("--root", "/run/x", "--log-format", "json", "state", "abc"),
    "exec": ("--root=/run/x", "exec", "--process", "/p.json", "--detach", "abc"),
    "create": ("--root", "/run/x", "create", "--bundle", "BUNDLE", "abc"),
    "start": ("--root", "/run/x", "start", "abc"),
}


def _called(
    wrapped: Wrapped, program: Path, arguments: tuple[str, ...], prepare: Callable[[], object], inherited: int
) -> list[str]:
    """Run a program in given circumstances, with descriptors that are the same each time, and give what runsc saw."""
    subprocess.run(
        [wrapped.runsc if program == wrapped.runsc else program, *arguments],
        stdin=subprocess.DEVNULL,
        env={"LC_ALL": "C", "PYTHONPATH": "/nowhere", "LISTEN_FDS": "1", "EMPTY": ""},
        pass_fds=(inherited,),
        restore_signals=False,
        preexec_fn=prepare,
        timeout=_HANG_S,
        check=True,
    )
    reports = wrapped.calls()
    assert len(reports) == 1
    return sorted(reports[0].splitlines())


@pytest.mark.parametrize("circumstance", CIRCUMSTANCES)
@pytest.mark.parametrize("command", COMMANDS)
def test_runsc_finds_the_process_as_it_would_without_the_wrapper(
    wrapped: Wrapped, command: str, circumstance: str
) -> None:
    wrapped.bundle()
    arguments = tuple(str(wrapped.directory / "bundle") if a == "BUNDLE" else a for a in COMMANDS[command])
    prepare = CIRCUMSTANCES[circumstance]
    reader, writer = os.pipe()
    inherited = fcntl.fcntl(writer, fcntl.F_DUPFD_CLOEXEC, 50)  # above what an interpreter opens at its start
    try:
        direct = _called(wrapped, wrapped.runsc, arguments, prepare, inherited)
        through = _called(wrapped, wrapped.wrapper, arguments, prepare, inherited)
    finally:
        for fd in (reader, writer, inherited):
            os.close(fd)
    assert through == direct


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.binary(max_size=20).map(lambda word: os.fsdecode(word.replace(b"\0", b"").replace(b"\n", b""))), max_size=8
    )
)
def test_any_arguments_arrive_as_they_are(wrapped: Wrapped, arguments: list[str]) -> None:
    wrapped.calls()
    wrapped.run(*arguments)
    assert wrapped.vectors() == [arguments]


@pytest.mark.parametrize("arguments", [("state", "abc"), ("start", "abc")])
@pytest.mark.parametrize("ending", ["exit 0", "exit 1", "exit 128", "signal 9", "signal 15", "signal 1"])
def test_runsc_ends_as_it_would_without_the_wrapper(wrapped: Wrapped, arguments: tuple[str, ...], ending: str) -> None:
    wrapped.let_runsc(ending)
    assert wrapped.run(*arguments).returncode == wrapped.run(*arguments, program=wrapped.runsc).returncode


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL, signal.SIGUSR1])
def test_a_signal_reaches_runsc(wrapped: Wrapped, number: signal.Signals) -> None:
    wrapped.let_runsc("hang")
    with subprocess.Popen([wrapped.wrapper, "wait", "abc"]) as process:
        wait_until(lambda: Path(f"{wrapped.runsc}.calls").exists())
        process.send_signal(number)
        assert process.wait(_HANG_S) == -number


def test_a_terminal_stays_the_controlling_one(wrapped: Wrapped) -> None:
    pid, controller = pty.fork()
    if pid == 0:
        os.execv(wrapped.wrapper, [str(wrapped.wrapper), "exec", "abc"])
    with open(controller, "rb"):
        assert os.waitpid(pid, 0)[1] == 0
    assert "session 1" in wrapped.calls()[0]


def test_a_runsc_that_is_not_there_is_said_and_fails(wrapped: Wrapped) -> None:
    wrapped.configure(runsc="/nowhere/runsc")
    done = wrapped.run("state", "abc")
    assert done.returncode == 128
    assert b"/nowhere/runsc: No such file" in done.stdout


def test_a_configuration_that_names_the_wrapper_itself_ends_at_once(wrapped: Wrapped) -> None:
    wrapped.configure(runsc=str(wrapped.wrapper))
    done = wrapped.run("state", "abc")
    assert done.returncode == 128
    assert b"names this program as the real runsc" in done.stdout
