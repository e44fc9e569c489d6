"""Run the `streamd` command as a user would, with its sockets, logs and cache in a directory of our own.

A command that is interrupted here gets SIGTERM and time to clean up before it is killed; nothing that it started
outlives `stop_strays`.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streamd.daemon.control_client import MountClient

# A command that was asked to end has this long; the longest clean-up of one is an unmount.
_GRACE_S = 20.0


class CommandFailed(Exception):
    """A command ended with an exit code other than 0: `exit_code`, and in the message what it said."""

    def __init__(self, vector: tuple[str, ...], exit_code: int, said: str) -> None:
        super().__init__(f"streamd {' '.join(vector)}: exit code {exit_code}: {said}")
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class Streamd:
    """The command, with `directory` for everything that it keeps on this machine."""

    directory: Path
    env: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        # A quoted JSON string is a TOML string.
        lines = [
            f"run_directory = {json.dumps(str(self.directory / 'run'))}",
            f"log_directory = {json.dumps(str(self.directory / 'log'))}",
            f"[cache]\ndirectory = {json.dumps(str(self.directory / 'cache'))}",
        ]
        self.config.write_text("\n".join(lines) + "\n")

    @property
    def config(self) -> Path:
        return self.directory / "streamd.toml"

    def run(self, *vector: str, timeout_s: float = 300.0) -> dict[str, Any]:
        """Run a command that knows `--json` and give its answer.

        Raises: CommandFailed; subprocess.TimeoutExpired after `timeout_s`.
        """
        program = str(Path(sys.executable).with_name("streamd"))
        process = subprocess.Popen(
            [program, "--config", str(self.config), *vector, "--json"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **self.env},
            text=True,
        )
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
        except BaseException:
            process.terminate()
            try:
                process.communicate(timeout=_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
            raise
        if process.returncode:
            raise CommandFailed(vector, process.returncode, (stdout + stderr).strip())
        answer = json.loads(stdout)
        assert isinstance(answer, dict)
        return answer

    def status(self, mountpoint: Path) -> dict[str, Any]:
        """Ask a mount how far it is, in a millisecond: by its socket, without starting a command."""
        return MountClient(self.directory / "run", str(mountpoint.resolve())).status()

    def unmount(self, mountpoint: Path, *, force: bool = False, timeout_s: float = 90.0) -> None:
        """Unmount; with `force` also what is in use, and nothing mounted is no error."""
        if force and not os.path.ismount(mountpoint):
            return
        self.run("umount", str(mountpoint), *(["--force"] if force else []), timeout_s=timeout_s)

    def stop_strays(self) -> None:
        """End the processes that name this directory's configuration: what an interrupted `mount` left behind."""
        until = time.monotonic() + _GRACE_S
        number = signal.SIGTERM
        while strays := list(self._strays()):
            for pid in strays:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            time.sleep(0.1)
            if time.monotonic() > until:
                number = signal.SIGKILL
            if time.monotonic() > until + _GRACE_S:
                raise TimeoutError(f"processes {strays} of {self.directory} can't be ended")

    def _strays(self) -> Iterator[int]:
        needle = os.fsencode(self.config)
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):
                    if needle in (entry / "cmdline").read_bytes().split(b"\0"):
                        yield int(entry.name)
