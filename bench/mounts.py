"""Real mounts for tests and benchmarks: the real `streamd mount` process, started, watched, and sure to go away.

    with Mounts() as mounts, mounts.start("file:///store/web-1") as mount:
        reader = mount.reader(image / "pages.img")       # 128 reads in flight, in a process of its own
        mount.until(lambda status: status["waiting_chunks"] == 0)
        outcome = reader.outcome()

Nothing here looks at a mount from this process: a server that hangs would hang it for good. What asks the mount runs as
a process with a deadline; what asks the server goes to its control socket. When a `LiveMount` ends, its process was
told to stop, then killed; its connection was aborted and its mountpoint detached; its readers were reaped.
"""

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bench.slot_reader import READ_BYTES, SLOTS, Outcome
from streamd.daemon.control_client import MountClient
from streamd.fuse import mountinfo, mounting

# Ten times and more what anything here takes: it tells a hang.
LIMIT_S = 60.0
_POLL_S = 0.01
_READER = Path(__file__).with_name("slot_reader.py")
_DISK = Path(__file__).with_name("faulty_disk.py")


class Reader:
    """A `slot_reader` process under way."""

    def __init__(self, file: Path, expected: Path, options: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-S", str(_READER), str(file), str(expected), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def is_done(self) -> bool:
        """Tell, without waiting, whether it has ended."""
        return self._process.poll() is not None

    def outcome(self, limit_s: float = LIMIT_S) -> Outcome:
        """Wait for its end and give what it got. Raises: `TimeoutExpired`, `RuntimeError` when it got nowhere."""
        out, err = self._process.communicate(timeout=limit_s)
        lines = out.splitlines()
        if self._process.returncode or len(lines) != 2:
            raise RuntimeError(f"the reader ended with {self._process.returncode}: {out}{err}")
        values = json.loads(lines[1])
        for pairs in ("errors", "gaps"):
            values[pairs] = [(first, second) for first, second in values[pairs]]
        return Outcome(**values)

    def end(self) -> None:
        """Kill it; call this once nothing can hold it any more."""
        if self._process.poll() is None:
            self._process.kill()
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()
        self._process.wait(LIMIT_S)


class LiveMount:
    """One `streamd mount` process in the foreground, and its mount.

    `ready` is what it said when it served: its status. `log_path` is what it logs (JSON lines).
    """

    def __init__(self, mounts: "Mounts", process: "subprocess.Popen[str]", mountpoint: Path, log_path: Path) -> None:
        self._mounts = mounts
        self.process = process
        self.mountpoint = mountpoint
        self.log_path = log_path
        self.client = MountClient(mounts.run_directory, str(mountpoint))
        self.ready: dict[str, Any] = {}
        self._readers: list[Reader] = []

    @property
    def pages(self) -> Path:
        """The mounted pages.img."""
        return self.mountpoint / "pages.img"

    @property
    def pid(self) -> int:
        """The serving process: not always the one that was started (`Mounts.start`'s `wrapper`)."""
        return int(self.ready["pid"])

    def status(self) -> dict[str, Any]:
        """Ask the process how it is."""
        return self.client.status()

    def until(self, condition: Callable[[dict[str, Any]], object], *, limit_s: float = LIMIT_S) -> dict[str, Any]:
        """Ask for the status until it meets a condition. Raises: `TimeoutError`."""
        until_s = time.monotonic() + limit_s
        while not condition(status := self.status()):
            if time.monotonic() > until_s:
                raise TimeoutError(f"the condition is not met after {limit_s} s: {status}")
            time.sleep(_POLL_S)
        return status

    def until_waiting(self, reads: int) -> dict[str, Any]:
        """Wait until that many reads wait, those of all handles together."""
        return self.until(lambda status: sum(handle["waiting"] for handle in status["handles"]) >= reads)

    def reader(
        self,
        expected: Path,
        *,
        slots: int = SLOTS,
        read_bytes: int = READ_BYTES,
        start: int = 0,
        end: int | None = None,
        ranges: Sequence[tuple[int, int]] | None = None,
        go_on: bool = False,
        signal_every_ms: float | None = None,
        file: str = "pages.img",
    ) -> Reader:
        """Start to read a file of the mount, whose right bytes are in `expected`."""
        options = ["--slots", str(slots), "--read-bytes", str(read_bytes), "--start", str(start)]
        options += [] if end is None else ["--end", str(end)]
        options += [] if ranges is None else ["--ranges", json.dumps(ranges)]
        options += ["--go-on"] if go_on else []
        options += [] if signal_every_ms is None else ["--signal-every-ms", str(signal_every_ms)]
        reader = Reader(self.mountpoint / file, expected, options)
        self._readers.append(reader)
        return reader

    def log(self) -> list[dict[str, Any]]:
        """Give what the process logged so far; a line that isn't JSON (a traceback) as `{"text": …}`."""
        lines = self.log_path.read_text(errors="replace").splitlines()
        return [json.loads(line) if line.startswith("{") else {"text": line} for line in lines]

    def complaints(self) -> list[dict[str, Any]]:
        """What must never be in a log: exceptions that nobody foresaw, and text of an interpreter or a C library.

        In the foreground the command's own words stand between the lines, and an empty one after a Ctrl-C.
        """

        def is_own(text: str) -> bool:
            return not text or text.startswith(("warning: ", "error: "))

        return [line for line in self.log() if "exception" in line or not is_own(line.get("text", ""))]

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the serving process."""
        os.kill(self.pid, number)

    def wait(self, limit_s: float = LIMIT_S) -> int:
        """Wait for the process's end and give its exit code. Raises: `TimeoutExpired`."""
        return self.process.wait(limit_s)

    def is_mounted(self) -> bool:
        """Ask the kernel's table, not the mount."""
        return mountinfo.topmost(str(self.mountpoint)) is not None

    def until_unmounted(self, *, limit_s: float = LIMIT_S) -> None:
        """Wait until the mount is gone. Raises: `TimeoutError`."""
        until_s = time.monotonic() + limit_s
        while self.is_mounted():
            if time.monotonic() > until_s:
                raise TimeoutError(f"{self.mountpoint} is still mounted after {limit_s} s")
            time.sleep(_POLL_S)

    def end(self) -> None:
        """End everything, whatever state it is in."""
        for _ in range(2):  # the second SIGTERM waits for nobody
            if self.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(self.ready.get("pid", self.process.pid)), signal.SIGTERM)
                    os.kill(int(self.ready.get("pid", self.process.pid)), signal.SIGCONT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(5)
        self.process.kill()
        with contextlib.suppress(ProcessLookupError):
            if self.process.poll() is None and "pid" in self.ready:
                os.kill(self.pid, signal.SIGKILL)
        while (top := mountinfo.topmost(str(self.mountpoint))) is not None:
            mounting.abort(str(self.mountpoint), top.device)
        for reader in self._readers:
            reader.end()
        self.process.wait(LIMIT_S)
        if self.process.stdout is not None:
            self.process.stdout.close()


class FaultyDisk:
    """A disk at `mountpoint` that keeps its files in `backing` and fails on demand (`bench/faulty_disk.py`)."""

    def __init__(self, backing: Path, mountpoint: Path) -> None:
        self._backing = backing
        self._mountpoint = mountpoint

    def __enter__(self) -> Self:
        for path in (self._backing, self._mountpoint):
            path.mkdir(mode=0o700, exist_ok=True)
        self._process = subprocess.Popen(
            [sys.executable, _DISK, self._backing, self._mountpoint],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        if self._answer() != "ready\n":
            self.__exit__(None, None, None)
            raise RuntimeError("the faulty disk does not serve")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End it; what still hangs in it gets EIO."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._process.kill()
        self._process.wait(LIMIT_S)
        self._process.stdout.close()
        if mountinfo.topmost(str(self._mountpoint)) is not None:
            subprocess.run(["umount", "--lazy", self._mountpoint], check=True)

    def set(self, operation: str, answer: str) -> None:
        """Let it answer an operation (read, write, all) that way (ok, eio, hang)."""
        assert self._process.stdin
        line = f"{operation} {answer}\n"
        self._process.stdin.write(line)
        self._process.stdin.flush()
        if self._answer() != line:
            raise RuntimeError("the faulty disk does not listen")

    @contextlib.contextmanager
    def failing(self, operation: str, answer: str) -> Iterator[None]:
        """Let it fail that way for a while: a process with a thread in a request that hangs can't even be killed."""
        self.set(operation, answer)
        try:
            yield
        finally:
            self.set(operation, "ok")

    def _answer(self) -> str:
        assert self._process.stdout
        readable, _, _ = select.select([self._process.stdout], [], [], LIMIT_S)
        return self._process.stdout.readline() if readable else ""


class Mounts:
    """Starts mounts below a directory of its own, with a configuration of its own; at the end nothing is left.

    `settings` are TOML tables, as text, that are added to the configuration.
    """

    def __init__(self, settings: str = "") -> None:
        # Not a test's own directory: the path of a control socket must be short.
        self.base = Path(tempfile.mkdtemp(prefix="streamd-mounts-"))
        self.run_directory = self.base / "run"
        self.cache_directory = self.base / "cache"
        self.config = self.base / "streamd.toml"
        self._live: list[LiveMount] = []
        self._serial = 0
        self.configure(settings)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for mount in self._live:
            mount.end()
        for entry in mountinfo.read():  # of commands that were run in the background
            if mounting.is_own(entry) and entry.mountpoint.startswith(f"{self.base}/"):
                with contextlib.suppress(Exception):
                    MountClient(self.run_directory, entry.mountpoint).umount(force=True)
                mounting.abort(entry.mountpoint, entry.device)
        shutil.rmtree(self.base, ignore_errors=True)

    def configure(self, settings: str = "", *, umount_wait: str = "1s", policy: str = "") -> None:
        """Write the configuration of what is started from now on; `policy` are lines of that table."""
        self.config.write_text(
            f'run_directory = "{self.run_directory}"\nlog_directory = "{self.base}/log"\n'
            f'{settings}\n[cache]\ndirectory = "{self.cache_directory}"\n'
            f'[policy]\numount_wait_s = "{umount_wait}"\n{policy}\n'
        )

    def mountpoint(self) -> Path:
        """Make an empty directory."""
        self._serial += 1
        path = self.base / f"mnt-{self._serial}"
        path.mkdir()
        return path

    def command(self, *arguments: str | Path) -> list[str]:
        """Give the argument vector of a `streamd` command."""
        return [sys.executable, "-m", "streamd.cli", "--config", str(self.config), *map(str, arguments)]

    def run(
        self, *arguments: str | Path, env: Mapping[str, str] | None = None, limit_s: float = LIMIT_S
    ) -> "subprocess.CompletedProcess[str]":
        """Run a `streamd` command to its end."""
        return subprocess.run(
            self.command(*arguments),
            capture_output=True,
            text=True,
            timeout=limit_s,
            env={**os.environ, **(env or {})},
        )

    def refused(self, *arguments: str | Path, env: Mapping[str, str] | None = None) -> tuple[int, str]:
        """Run a command that must fail, with `--json`; give its exit code and message. Raises: `AssertionError`."""
        result = self.run(*arguments, "--json", env=env)
        assert result.returncode, f"{arguments} succeeded: {result.stdout}"
        assert "Traceback" not in result.stderr, result.stderr
        error = json.loads(result.stdout)["error"]
        assert error["exit_code"] == result.returncode
        return result.returncode, str(error["message"])

    def start(
        self,
        url: str,
        *,
        options: Sequence[str | Path] = (),
        prefetch: str = "none",
        env: Mapping[str, str] | None = None,
        mountpoint: Path | None = None,
        wrapper: Sequence[str] = (),
        is_ready: bool = True,
    ) -> "contextlib.AbstractContextManager[LiveMount]":
        """Mount in the foreground; entered once it serves (with `is_ready` false: once the process was started).

        `wrapper` goes before the command line. Raises: `RuntimeError` with its log when it doesn't serve.
        """
        return self._started(url, options, prefetch, env, mountpoint, wrapper, is_ready)

    @contextlib.contextmanager
    def _started(
        self,
        url: str,
        options: Sequence[str | Path],
        prefetch: str,
        env: Mapping[str, str] | None,
        mountpoint: Path | None,
        wrapper: Sequence[str],
        is_ready: bool,
    ) -> Iterator[LiveMount]:
        mountpoint = mountpoint or self.mountpoint()
        log_path = self.base / f"log-{self._serial}-{time.monotonic_ns()}"
        words = self.command("mount", "--foreground", "--json", "--prefetch", prefetch, *options, url, mountpoint)
        with log_path.open("w") as log:
            process = subprocess.Popen(
                [*wrapper, *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **(env or {})},
                start_new_session=True,  # so that a Ctrl-C is the test's to send
            )
        mount = LiveMount(self, process, mountpoint, log_path)
        self._live.append(mount)
        try:
            if is_ready:
                mount.ready = json.loads(_line(process, log_path))
            yield mount
        finally:
            mount.end()
            self._live.remove(mount)


def _line(process: "subprocess.Popen[str]", log_path: Path) -> str:
    """Read the process's first line."""
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], LIMIT_S)
    line = process.stdout.readline() if readable else ""
    if not line.startswith("{") or line.startswith('{"error"'):
        raise RuntimeError(f"the mount does not serve: {line}{log_path.read_text()}")
    return line
