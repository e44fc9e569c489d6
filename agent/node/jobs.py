"""A save's note on disk: what a next life of the agent needs to finish a save, or to undo it.

    WORK_DIR/JOB_ID/job.json     the note, replaced as a whole: written beside, synced, renamed, directory synced
    WORK_DIR/JOB_ID/image/       the image; runsc makes it, or `arm` does for a workload trigger
    WORK_DIR/.JOB_ID/            a job that isn't there yet, or not any more

The directory is root's alone (0700): an image is the memory of a pod. Job ids are ours (UUIDs), never a name from a pod
or a store. A note that can't be read is one problem for an operator and hides no other.

A job comes and goes by a rename of its directory. So whoever lists the jobs, in any thread and whatever others are in
the middle of, sees each as it is or not at all, and no note speaks of an image that is gone. One process owns the
directory, and of a job one thread at a time writes.
"""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from agent.errors import AgentError
from agent.node.course import Ending, Origin, Phase

NOTE = "job.json"
IMAGE = "image"
_NOTE_VERSION = 1
# The facts of a node and a pod, and the CPU's features, are a few KiB.
_NOTE_MAX_BYTES = 1 << 20
_JOB_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


class NoteError(AgentError):
    """A job's note can't be read or written; `path`."""

    kind = "job-note"

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path}: {why}")
        self.path = path


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One save of one pod.

    `sandbox_id`: the full id of the pod's first container, which names its sandbox. `snapshot_id` and `push_id` are
    fixed at the beginning, so that an upload that was cut off is resumed and not begun again. `attempt` counts from 0
    (`observedCheckpointRetryCount`). `metadata` is what the snapshot needs to match (machine, versions, GPU, flags) and
    whose it is; it is written into the manifest as it is, with `runsc_sha256` and `cpu_features`.
    """

    job_id: str
    sandbox_id: str
    origin: Origin
    ending: Ending
    store_url: str
    snapshot_id: str
    push_id: str
    attempt: int = 0
    phase: Phase = Phase.BEGUN
    runsc_sha256: str | None = None
    cpu_features: tuple[str, ...] | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not _JOB_ID.fullmatch(self.job_id):
            raise ValueError(f"{self.job_id!r} is no id of a job")

    @property
    def namespace(self) -> str:
        """The namespace of its pod, and of its snapshot."""
        return self.metadata.get("namespace", "default")


@dataclass(frozen=True, slots=True)
class JobDirectory:
    """Where the jobs of this node are; every method blocks on the disk and may raise OSError or `NoteError`.

    `only`: the id of the one job that there is to this view of it; empty: all are.
    """

    path: Path
    only: str = ""

    def image(self, job: Job) -> Path:
        """Give the directory of a job's image."""
        return self.path / job.job_id / IMAGE

    def alone(self, job: Job) -> "JobDirectory":
        """Give a view that has no other job."""
        return replace(self, only=job.job_id)

    def write(self, job: Job) -> None:
        """Note a job, durably, in place of what was noted of it."""
        directory = self.path / job.job_id
        if directory.is_dir():
            _write_note(directory, job)
        else:
            self._begin(job)

    def arm(self, job: Job) -> Path:
        """Note a job whose image its sandbox may write, with an empty directory for that."""
        assert job.phase is Phase.ARMED
        self._begin(job, IMAGE)
        return self.image(job)

    def discard(self, job: Job) -> None:
        """Remove a job, as far as it is there."""
        hidden = self._hidden(job)
        with contextlib.suppress(FileNotFoundError):
            (self.path / job.job_id).rename(hidden)
            sync(self.path)
            shutil.rmtree(hidden)

    def sweep(self) -> None:
        """Remove what a former life was in the middle of making or removing; before this one begins anything."""
        if self.path.is_dir():
            for entry in list(os.scandir(self.path)):
                if _JOB_ID.fullmatch(entry.name.removeprefix(".")) and entry.name.startswith("."):
                    shutil.rmtree(entry.path)

    def jobs(self) -> tuple[tuple[Job, ...], tuple[NoteError, ...]]:
        """Give all jobs that are noted, and what can't be read."""
        found, problems = [], []
        for directory in self._directories():
            try:
                found.append(_read(directory))
            except FileNotFoundError:
                if directory.is_dir():  # else it was discarded just now
                    problems.append(NoteError(directory / NOTE, "it is missing; remove the directory"))
            except NoteError as error:
                problems.append(error)
        return tuple(found), tuple(problems)

    def _begin(self, job: Job, *directories: str) -> None:
        """Make a job's directory, whole."""
        hidden = self._hidden(job)
        hidden.mkdir(mode=0o700, parents=True)
        try:
            for name in directories:
                (hidden / name).mkdir(mode=0o700)
            _write_note(hidden, job)
            hidden.rename(self.path / job.job_id)
        except BaseException:
            shutil.rmtree(hidden, ignore_errors=True)
            raise
        sync(self.path)

    def _hidden(self, job: Job) -> Path:
        return self.path / f".{job.job_id}"

    def _directories(self) -> Iterator[Path]:
        if self.path.is_dir():
            for entry in sorted(os.scandir(self.path), key=lambda entry: entry.name):
                if (
                    _JOB_ID.fullmatch(entry.name)
                    and self.only in ("", entry.name)
                    and entry.is_dir(follow_symlinks=False)
                ):
                    yield Path(entry.path)


def begun_again(job: Job, *, job_id: str, push_id: str) -> Job:
    """Give the next attempt of a job: a save of our own, into a directory of its own, for the same snapshot."""
    return replace(
        job, job_id=job_id, push_id=push_id, origin=Origin.MANUAL, phase=Phase.BEGUN, attempt=job.attempt + 1
    )


def sync(path: Path) -> None:
    """Bring a file or a directory to the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_note(directory: Path, job: Job) -> None:
    temporary = directory / f"{NOTE}.new"
    with open(temporary, "wb") as file:
        file.write(json.dumps({"version": _NOTE_VERSION} | asdict(job), indent=1).encode())
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(directory / NOTE)
    sync(directory)


def _read(directory: Path) -> Job:
    path = directory / NOTE
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        text = file.read(_NOTE_MAX_BYTES + 1)
    try:
        values: dict[str, Any] = json.loads(text)
        if values.pop("version") != _NOTE_VERSION:
            raise NoteError(path, "it is of another version of the agent; run that one, or remove the directory")
        if values["job_id"] != directory.name:
            raise NoteError(path, f"it is of the job {str(values['job_id'])[:80]!r}")
        values["origin"] = Origin(values["origin"])
        values["ending"] = Ending(values["ending"])
        values["phase"] = Phase(values["phase"])
        features = values["cpu_features"]
        values["cpu_features"] = None if features is None else tuple(features)
        if set(values) != {one.name for one in fields(Job)}:
            raise NoteError(path, "it has other members than a job's")
        return Job(**values)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise NoteError(path, f"it is no note of a job: {error}") from error
