"""The shipped files, and a machine whose PID 1 is a real systemd."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.systemd.machine import Machine, wait_until

ROOT = Path(__file__).resolve().parents[2]
UNIT_FILE = ROOT / "systemd" / "streamd.service"
_KEEPER = ROOT / "tests" / "systemd" / "services" / "keeper.py"
UNIT = "streamd.service"


class Service:
    """The shipped unit in a machine, with `keeper.py` in the daemon's place, and what each of its lives reported."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.machine.copy(UNIT_FILE)
        command = f"{sys.executable} {_KEEPER} {machine.place}"
        lines = ["[Service]", "ExecStart=", f"ExecStart={command}", f"Environment=PYTHONPATH={ROOT}"]
        lines += [f"StandardError=append:{machine.place}/errors", "Environment=PYTHONDONTWRITEBYTECODE=1"]
        self.machine.write(f"{UNIT}.d/10-keeper.conf", "\n".join(lines) + "\n")

    def override(self, *settings: str) -> None:
        """Set something else than the shipped unit has."""
        self.machine.write(f"{UNIT}.d/20-override.conf", "[Service]\n" + "\n".join(settings) + "\n")
        self.machine.systemctl("daemon-reload")

    def file(self, name: str, text: str = "") -> Path:
        """Make a file that the service looks for."""
        path = self.machine.place / name
        path.write_text(text)
        return path

    def start(self) -> dict[str, Any]:
        """Start it; give its first report."""
        answer = self.machine.systemctl("start", UNIT, check=False)
        assert self.show("ActiveState") == "active", f"{answer}\n{self.errors()}\n{self.machine.log()}"
        return self.life(1)

    def systemctl(self, verb: str) -> None:
        """Do something to the unit."""
        self.machine.systemctl(verb, UNIT)

    def kill(self, signal: str) -> None:
        """Send the main process a signal, from outside."""
        self.machine.systemctl("kill", "--kill-who=main", f"--signal={signal}", UNIT)

    def life(self, number: int) -> dict[str, Any]:
        """Wait for a life's report, counted from 1, and for systemd to know that it is up."""
        wait_until(lambda: len(self.lives()) >= number, f"life {number}: {self.errors()}\n{self.machine.log()}")
        wait_until(lambda: self.show("ActiveState") == "active", "the unit is active")
        assert len(self.lives()) == number, self.errors()
        return self.lives()[number - 1]

    def lives(self) -> list[dict[str, Any]]:
        """Give all reports."""
        path = self.machine.place / "lives"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def show(self, name: str) -> str:
        """Give a property of the unit."""
        return self.machine.show(UNIT, name)

    def errors(self) -> str:
        """Give what the service wrote to stderr."""
        path = self.machine.place / "errors"
        return path.read_text() if path.exists() else ""


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """Start a machine."""
    with Machine(tmp_path) as running:
        yield running


@pytest.fixture
def service(machine: Machine) -> Service:
    """Install the unit."""
    installed = Service(machine)
    machine.systemctl("daemon-reload")
    return installed
