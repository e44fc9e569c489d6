"""The wrapper as it is installed, over a runsc that only notes how it was called, and agents that behave or don't."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from agent.wrapper.building import build

_HANG_S = 60.0
_FAKE = Path(__file__).with_name("fake_runsc.c")


@dataclass(frozen=True, slots=True)
class Wrapped:
    """A wrapper and its runsc, with everything that both keep in `directory`."""

    directory: Path
    wrapper: Path
    runsc: Path

    @property
    def agent_socket(self) -> Path:
        return self.directory / "agent.sock"

    @property
    def run_directory(self) -> Path:
        return self.directory / "run"

    def configure(self, **settings: object) -> None:
        """Write the configuration."""
        known = {
            "runsc": str(self.runsc),
            "agent_socket": str(self.agent_socket),
            "run_directory": str(self.run_directory),
            "log_socket": str(self.directory / "log.sock"),
            "deadline_ms": 5000,
            **settings,
        }
        lines = [f"{key} = {json.dumps(value)}\n" for key, value in known.items()]
        (self.directory / "runsc.toml").write_text("# A test's.\n\n" + "".join(lines))

    def let_runsc(self, ending: str, saying: str = "") -> None:
        """Choose how runsc ends, and what it writes to its log."""
        Path(f"{self.runsc}.ending").write_text(ending)
        Path(f"{self.runsc}.saying").write_text(saying)

    def run(self, *arguments: str, program: Path | None = None) -> subprocess.CompletedProcess[bytes]:
        """Run the wrapper, its output captured as one pipe, as containerd's shims do."""
        return subprocess.run(
            [program or self.wrapper, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_HANG_S,
            check=False,
        )

    def calls(self) -> list[str]:
        """Take what runsc has noted so far: each call's report."""
        path = Path(f"{self.runsc}.calls")
        reports = os.fsdecode(path.read_bytes()).split("\n\n")[:-1] if path.exists() else []
        path.unlink(missing_ok=True)
        return reports

    def vectors(self) -> list[list[str]]:
        """Take what runsc was called with so far, without its own name."""
        prefix = "argument "
        return [
            [line.removeprefix(prefix) for line in report.split("\n") if line.startswith(prefix)][1:]
            for report in self.calls()
        ]

    def bundle(self, annotations: object = None, name: str = "bundle", **members: object) -> Path:
        """Make a bundle."""
        path = self.directory / name
        path.mkdir()
        spec = {"ociVersion": "1.0.2", "annotations": annotations, **members}
        (path / "config.json").write_text(json.dumps(spec))
        return path


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the fake runsc, once."""
    directory = tmp_path_factory.mktemp("programs")
    subprocess.run(["gcc", "-O1", "-static", "-o", directory / "runsc", _FAKE], check=True)
    return directory


@pytest.fixture
def wrapped(programs: Path) -> Iterator[Wrapped]:
    """Give a wrapper of this test's own."""
    # A short name: there are Unix sockets in it.
    with tempfile.TemporaryDirectory(prefix="wrapper-", dir="/var/tmp") as name:
        directory = Path(name)
        runsc = directory / "runsc"
        runsc.write_bytes((programs / "runsc").read_bytes())
        runsc.chmod(0o755)
        wrapped = Wrapped(directory, build(directory / "streamd-runsc", config=directory / "runsc.toml"), runsc)
        wrapped.configure()
        yield wrapped


@dataclass(slots=True)
class Log:
    """What was sent to the system's log."""

    socket: socket.socket

    def lines(self) -> list[str]:
        """Take what has come so far."""
        found = []
        with contextlib.suppress(BlockingIOError):
            while True:
                found.append(self.socket.recv(4096).decode())
        return found


@pytest.fixture
def log(wrapped: Wrapped) -> Iterator[Log]:
    """Give the system's log."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as listener:
        listener.bind(str(wrapped.directory / "log.sock"))
        yield Log(listener)


Talk = Callable[[socket.socket], None]


@dataclass(slots=True)
class FakeAgent:
    """An agent whose every connection is talked to by `talk`, in a thread; `requests` are the lines that came."""

    listener: socket.socket
    talk: Talk
    requests: list[bytes] = field(default_factory=list)

    def serve(self) -> None:
        """Accept until the listener is shut down."""
        threads = []
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.listener.accept()
                threads.append(threading.Thread(target=self._serve_one, args=(connection,)))
                threads[-1].start()
        for thread in threads:
            thread.join()

    def _serve_one(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            self.requests.append(connection.makefile("rb").readline())
            self.talk(connection)

    def asked(self) -> list[dict[str, object]]:
        """Take the requests so far."""
        found, self.requests = self.requests, []
        return [json.loads(line) for line in found]


StartAgent = Callable[[Talk], FakeAgent]


@pytest.fixture
def agent(wrapped: Wrapped) -> Iterator[StartAgent]:
    """Give what starts an agent."""
    with contextlib.ExitStack() as stack:

        def start(talk: Talk) -> FakeAgent:
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            listener.bind(str(wrapped.agent_socket))
            listener.listen(256)
            made = FakeAgent(listener, talk)
            thread = threading.Thread(target=made.serve)
            thread.start()
            stack.callback(thread.join)
            stack.callback(listener.shutdown, socket.SHUT_RDWR)
            return made

        yield start


def says(*answers: object) -> Talk:
    """Give the talk of an agent that answers with these objects, one a connection, the last for all others."""
    left = list(answers)

    def talk(connection: socket.socket) -> None:
        answer = left.pop(0) if len(left) > 1 else left[0]
        connection.sendall(json.dumps({"version": 1, **dict(answer)}).encode() + b"\n")  # type: ignore[call-overload]

    return talk


def processes_of(directory: Path) -> list[int]:
    """List the processes that were started by this wrapper: their arguments name its directory."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and os.fsencode(directory / "run") in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for what must come; a deadline finds a hang."""
    until_s = time.monotonic() + _HANG_S
    while not condition():
        assert time.monotonic() < until_s, "it did not come"
        time.sleep(0.005)


@pytest.fixture(autouse=True)
def nothing_stays(request: pytest.FixtureRequest) -> Iterator[None]:
    """End keepers and stand-ins that a test leaves, which it must not."""
    wrapped = request.getfixturevalue("wrapped") if "wrapped" in request.fixturenames else None
    yield
    if isinstance(wrapped, Wrapped):
        left: Sequence[int] = processes_of(wrapped.directory)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not left
