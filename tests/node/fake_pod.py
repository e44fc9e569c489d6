"""A pod's sandbox that is a file: what runsc would say and do, with failures on demand. It outlives the process.

A method is named in `fails` and `dies` by its name, or by its name with `!` for once it has taken effect.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path

from agent.node.course import Found
from agent.node.jobs import Job, JobDirectory
from agent.node.sandbox import SandboxError
from agent.runtime.failures import FailureKind, RuntimeFailure
from tests.node.conftest import copy_image


def dies_at(point: str, dies: str) -> None:
    """End the process as SIGKILL would, at that point."""
    if point == dies:
        os._exit(9)


@dataclass(slots=True)
class FakePod:
    """`image`: what a save gives. `fails`: what a method fails of, for as often as is given."""

    state: Path
    image: Path
    fails: dict[str, list[FailureKind]] = field(default_factory=dict)
    dies: str = ""

    def __post_init__(self) -> None:
        if not self.state.exists():
            self._set(Found.RUNNING)

    @property
    def now(self) -> Found:
        """How it is."""
        return Found(self.state.read_text())

    async def found(self) -> Found:
        return self.now

    async def pid(self) -> int | None:
        return None

    async def await_loaded(self) -> None:
        self._at("await_loaded")
        if self.now is not Found.RUNNING:
            raise SandboxError(RuntimeFailure(FailureKind.WRONG_STATE, "it does not run"))

    async def pause(self) -> None:
        self._at("pause")
        self._set(Found.PAUSED)
        self._at("pause!")

    async def save(self, image: Path) -> None:
        self._at("save")
        image.mkdir()
        (image / "pages.img").write_bytes(b"half")
        self._at("save-half")
        copy_image(self.image, image)
        self._at("save!")

    async def remove(self) -> None:
        self._at("remove")
        self._set(Found.GONE)

    async def resume(self) -> None:
        self._at("resume")
        if self.now is Found.GONE:
            raise SandboxError(RuntimeFailure(FailureKind.SANDBOX_GONE, "it ended"))
        self._set(Found.RUNNING)
        self._at("resume!")

    async def end(self) -> None:
        self._at("end")
        self._set(Found.GONE)
        self._at("end!")

    def _set(self, found: Found) -> None:
        self.state.write_text(found)

    def _at(self, point: str) -> None:
        dies_at(point, self.dies)
        if kinds := self.fails.get(point):
            kind = kinds.pop(0)
            if kind is FailureKind.SANDBOX_GONE:
                self._set(Found.GONE)
            raise SandboxError(RuntimeFailure(kind, f"told to fail at {point}"))


@dataclass(frozen=True, slots=True)
class DyingJobs(JobDirectory):
    """A directory of jobs whose user dies at a write (`begun`, `committed`) or a removal (`discard`)."""

    dies: str = ""

    def write(self, job: Job) -> None:
        dies_at(f"{job.phase}", self.dies)
        JobDirectory.write(self, job)
        dies_at(f"{job.phase}!", self.dies)

    def discard(self, job: Job) -> None:
        dies_at("discard", self.dies)
        JobDirectory.discard(self, job)
        dies_at("discard!", self.dies)
