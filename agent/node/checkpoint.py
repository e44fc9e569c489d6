"""Save a pod: walk the course of a job (`course.py`), with a sandbox, a directory of jobs and a store.

    saver = Saver(jobs, StoreUploader(…), has_whole_state=runsc.has_whole_state)
    outcome = await saver.save(job, RunscSandbox(runsc, sandbox_id))
    for outcome in await saver.recover(sandbox_of): …       # first thing in an agent's life, and now and then

This shell decides nothing: each step is done, what fails becomes a `Reason`, and the course says what follows. Whoever
cancels it gets a pod that runs and no image, or a note that the next round finishes from.
"""

import contextlib
import threading
import uuid
from collections.abc import Awaitable, Callable, Container, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import structlog
import trio

from agent.errors import AgentError
from agent.node.course import (
    FINAL,
    Course,
    Ending,
    Failure,
    Found,
    Phase,
    Reason,
    Step,
    after,
    begin,
    resumed,
)
from agent.node.image_check import ImageNotWhole, check_image, written
from agent.node.jobs import Job, JobDirectory, NoteError, begun_again
from agent.node.sandbox import GpuToolHung, Sandbox, SandboxDeadline, SandboxError
from agent.node.threads import run_endable
from agent.runtime.failures import FailureKind
from streamd.errors import Exit, StoreErrorKind, StreamdError
from streamd.save.push import PushOptions, PushResult, push
from streamd.store.port import Store
from streamd.store.retry import retrying

log = structlog.get_logger(__name__)

# How long a cancelled save may take to let the pod go on and to remove its image.
_UNDO_S = 60.0
# A save that failed for a reason that may pass is done again, this often.
MAX_ATTEMPTS = 3

# What a failure of the sandbox is called in a condition; what isn't here is SaveFailed.
REASONS: Mapping[FailureKind, Reason] = MappingProxyType(
    {
        FailureKind.NO_SPACE: Reason.DISK_FULL,
        FailureKind.IO: Reason.DISK,
        FailureKind.SANDBOX_GONE: Reason.POD_ENDED,
        FailureKind.NO_CONTAINER: Reason.POD_ENDED,
        FailureKind.WRONG_STATE: Reason.NOT_RUNNING,
        FailureKind.GPU_TOOL: Reason.GPU_TOOL,
    }
)


class PreflightFailed(AgentError):
    """The pod can't be saved as it is; the message says why, with the numbers."""

    kind = "preflight"


class Uploader(Protocol):
    """Brings an image into a store. Raises: StreamdError."""

    async def push(self, job: Job, image: Path) -> PushResult:
        """Make a snapshot of an image; a push of the same ids that was cut off is gone on with."""


@dataclass(frozen=True, slots=True)
class StoreUploader:
    """Pushes into the stores of the jobs' addresses, each call tried again until nothing moved for `deadline_s`."""

    open_store: Callable[[str], Store]
    deadline_s: float = 300.0

    async def push(self, job: Job, image: Path) -> PushResult:
        cancel = threading.Event()
        store = retrying(await trio.to_thread.run_sync(self.open_store, job.store_url), deadline_s=self.deadline_s)
        options = PushOptions(metadata=job.metadata, runsc_sha256=job.runsc_sha256, cpu_features=job.cpu_features)

        def end() -> None:
            cancel.set()
            store.close()

        try:
            return await run_endable(
                lambda: push(
                    image, store, snapshot_id=job.snapshot_id, push_id=job.push_id, options=options, cancel=cancel
                ),
                end,
            )
        finally:
            store.close()


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended: DONE, with a snapshot; FAILED, with a reason, nothing left; PENDING, to be gone on with."""

    job: Job
    course: Course
    pushed: PushResult | None = None


class _StepFailed(Exception):
    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Saver:
    """Saves pods of this node. One for a directory of jobs, and one save at a time for a pod: the caller sees to it.

    `has_whole_state`: `Runsc.has_whole_state`.
    """

    def __init__(self, jobs: JobDirectory, uploader: Uploader, *, has_whole_state: Callable[[Path], bool]) -> None:
        self._jobs = jobs
        self._uploader = uploader
        self._has_whole_state = has_whole_state
        self._under_way: set[str] = set()  # ids of jobs

    async def save(
        self,
        job: Job,
        sandbox: Sandbox,
        *,
        preflight: Callable[[], Awaitable[None]] | None = None,
        max_attempts: int = MAX_ATTEMPTS,
    ) -> Outcome:
        """Save a pod, again if that may help. `preflight` raises `PreflightFailed` when it can't be saved.

        The job of a workload trigger is one whose sandbox has written its image (`WorkloadTrigger`).
        """
        while True:
            outcome = await self._walk(job, begin(job.origin, job.ending), sandbox, preflight)
            if not outcome.course.may_be_retried or job.attempt + 1 >= max_attempts:
                return outcome
            job = begun_again(job, job_id=str(uuid.uuid4()), push_id=str(uuid.uuid4()))
            log.info("save is tried again", sandbox=job.sandbox_id, attempt=job.attempt)

    async def recover(
        self, sandbox_of: Callable[[str], Sandbox], *, waited_for: Container[str] = ()
    ) -> tuple[Outcome, ...]:
        """Finish or undo what is noted, by what the runtime says of each sandbox.

        Left as they are: jobs under way, those whose ids are `waited_for` (somebody is in `await_written`), and armed
        ones of sandboxes that live and have not written yet. What was undone may be saved
        again (`Course.may_be_retried`, `begun_again`): the caller knows whether it is still wanted.
        """
        jobs, problems = await trio.to_thread.run_sync(self._jobs.jobs)
        for problem in problems:
            log.error("a job's note can't be read", error=str(problem))
        outcomes = []
        for job in jobs:
            if job.job_id in self._under_way or job.job_id in waited_for:
                continue
            sandbox = sandbox_of(job.sandbox_id)
            try:
                found, pid = await sandbox.found(), await sandbox.pid()
            except SandboxError as error:
                log.warning("a sandbox can't be asked", sandbox=job.sandbox_id, error=str(error))
                continue
            course = resumed(job.origin, job.ending, job.phase, found, written(self._jobs.image(job), pid))
            if course is not None:
                outcomes.append(await self._walk(job, course, sandbox, None))
        return tuple(outcomes)

    async def _walk(
        self,
        job: Job,
        course: Course,
        sandbox: Sandbox,
        preflight: Callable[[], Awaitable[None]] | None,
    ) -> Outcome:
        pushed = None
        with self._walked_once(job):
            while course.step not in FINAL:
                try:
                    failure, result = await self._attempt(job, course, sandbox, preflight)
                except BaseException:  # cancelled, or a bug: the pod goes on
                    interrupted = after(course, Failure(Reason.INTERRUPTED, "cancelled", course.step))
                    with trio.CancelScope(shield=True, deadline=trio.current_time() + _UNDO_S):
                        await self._undo(job, interrupted, sandbox)
                    raise
                pushed = pushed or result
                if failure is not None:
                    log.warning("save step failed", step=course.step, reason=failure.reason, error=failure.message)
                course = after(course, failure)
        return Outcome(job, course, pushed)

    @contextlib.contextmanager
    def _walked_once(self, job: Job) -> Iterator[None]:
        """Mark a job as under way meanwhile."""
        if job.job_id in self._under_way:
            raise ValueError(f"the job {job.job_id} is under way")
        self._under_way.add(job.job_id)
        try:
            yield
        finally:
            self._under_way.discard(job.job_id)

    async def _undo(self, job: Job, course: Course, sandbox: Sandbox) -> None:
        while course.step in (Step.RESUME, Step.DISCARD):
            failure, _ = await self._attempt(job, course, sandbox, None)
            course = after(course, failure)

    async def _attempt(
        self, job: Job, course: Course, sandbox: Sandbox, preflight: Callable[[], Awaitable[None]] | None
    ) -> tuple[Failure | None, PushResult | None]:
        """Do the course's step; say why it failed, or what a push gave."""
        step = course.step
        try:
            return None, await self._do(job, step, sandbox, preflight)
        except _StepFailed as error:
            return Failure(error.reason, str(error), step), None
        except SandboxError as error:
            return Failure(_reason(step, error), str(error), step), None
        except (PreflightFailed, ImageNotWhole) as error:
            reason = Reason.PREFLIGHT if isinstance(error, PreflightFailed) else Reason.VERIFICATION
            return Failure(reason, str(error), step), None
        except StreamdError as error:
            return Failure(_push_reason(error), str(error), step), None
        except (NoteError, OSError) as error:
            return Failure(_disk_reason(error), str(error), step), None

    async def _do(
        self, job: Job, step: Step, sandbox: Sandbox, preflight: Callable[[], Awaitable[None]] | None
    ) -> PushResult | None:
        image = self._jobs.image(job)
        match step:
            case Step.AWAIT_LOADED:
                await sandbox.await_loaded()
            case Step.PREFLIGHT:
                if preflight is not None:
                    await preflight()
            case Step.PREPARE:
                await _on_disk(lambda: self._jobs.write(replace(job, phase=Phase.BEGUN)))
            case Step.PAUSE:
                await sandbox.pause()
            case Step.SAVE:
                await sandbox.save(image)
            case Step.VERIFY:
                await _on_disk(lambda: check_image(image, has_whole_state=self._has_whole_state))
                if job.ending is Ending.STOP and await sandbox.found() is not Found.PAUSED:
                    raise _StepFailed(Reason.NOT_RUNNING, "the pod was resumed, or ended, during its save")
            case Step.COMMIT:
                await _on_disk(lambda: self._jobs.write(replace(job, phase=Phase.COMMITTED)))
            case Step.END:
                await sandbox.end()
            case Step.PUSH:
                return await self._uploader.push(job, image)
            case Step.CLEAR | Step.DISCARD:
                await _on_disk(lambda: self._jobs.discard(job))
            case Step.RESUME:
                await sandbox.resume()
            case _:
                raise ValueError(f"{step} is nothing to be done")
        return None


async def _on_disk(call: Callable[[], object]) -> None:
    await trio.to_thread.run_sync(call)


def _reason(step: Step, error: SandboxError) -> Reason:
    reason = REASONS.get(error.failure.kind, Reason.SAVE_FAILED)
    match step, error:
        case _, GpuToolHung():
            return Reason.GPU_TOOL_HUNG
        case Step.AWAIT_LOADED, SandboxDeadline():
            return Reason.STILL_LOADING
        case Step.RESUME, _ if reason is not Reason.POD_ENDED:
            return Reason.STILL_PAUSED
        case Step.END, _:
            return Reason.STILL_ALIVE
        case _, SandboxDeadline():
            return Reason.DEADLINE
        case _:
            return reason


def _push_reason(error: StreamdError) -> Reason:
    if error.kind == StoreErrorKind.CREDENTIALS:  # whoever renews the token is late; an image can't be made again
        return Reason.STORE_UNAVAILABLE
    match error.exit_code:
        case Exit.UNREACHABLE | Exit.INTERRUPTED:
            return Reason.STORE_UNAVAILABLE
        case Exit.DAMAGED:
            return Reason.VERIFICATION
        case Exit.FAILED:
            return Reason.DISK
        case _:
            return Reason.STORE_REFUSED


def _disk_reason(error: NoteError | OSError) -> Reason:
    full = isinstance(error, OSError) and error.errno in (28, 122)  # ENOSPC, EDQUOT
    return Reason.DISK_FULL if full else Reason.DISK
