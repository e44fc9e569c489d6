"""The course of a save, as values (pure): which step comes next, and what a failure at each step leads to.

A job saves one pod. What it must keep: the pod is never left paused; with `Ending.STOP` nothing of the application
runs after its snapshot unless there is no snapshot (else its side effects would happen twice); no partial image stays.
So the steps of a stop are pause, save, verify, **commit**, end; until the commit every failure resumes the pod and
throws the image away, and from the commit on the pod's end is decided and the image is kept until it is pushed.

    course = begin(Origin.MANUAL, Ending.STOP)
    while course.step not in FINAL:
        course = after(course, await do(course.step))     # the shell: node/checkpoint.py

`tests/node/test_course.py` walks every failure at every step, and an agent that dies at each.
"""

from dataclasses import dataclass, replace
from enum import StrEnum


class Ending(StrEnum):
    """What becomes of the pod after its snapshot (`postCheckpoint`)."""

    RESUME = "resume"
    STOP = "stop"


class Origin(StrEnum):
    """Who writes the image: runsc, because we ask; or the sandbox, because its application asked (workload trigger)."""

    MANUAL = "manual"
    WORKLOAD = "workload"


class Step(StrEnum):
    """What is done, or to be done, next."""

    AWAIT_LOADED = "await-loaded"  # a pod that is itself being restored would stand still for the rest of its load
    PREFLIGHT = "preflight"
    PREPARE = "prepare"  # the job's directory and its note: from here on a next life knows of it
    PAUSE = "pause"
    SAVE = "save"
    VERIFY = "verify"  # the numbers add up, and the bytes are on the disk
    COMMIT = "commit"
    END = "end"
    PUSH = "push"
    CLEAR = "clear"
    # Ways out
    RESUME = "resume"
    DISCARD = "discard"
    # Ends
    DONE = "done"
    FAILED = "failed"
    PENDING = "pending"  # the image, or the note, stays: a next round goes on from it


FINAL = frozenset({Step.DONE, Step.FAILED, Step.PENDING})

_SAVED = (Step.VERIFY, Step.COMMIT, Step.PUSH, Step.CLEAR)
_SAVED_AND_ENDED = (Step.VERIFY, Step.COMMIT, Step.END, Step.PUSH, Step.CLEAR)
_BEFORE = (Step.AWAIT_LOADED, Step.PREFLIGHT, Step.PREPARE)

# GPU state moves while tasks run: gVisor itself unpauses a paused sandbox for cuda-checkpoint and pauses it again
# before the save (pkg/sentry/control/state_cuda.go:preSaveCuda), so a stop needs no other order for pods with GPUs. A
# workload trigger saves on its own, and nobody can pause before it: between the save's end and the pause the
# application runs on (some ms when the agent waits for it: the window of that combination).
PLANS: dict[tuple[Origin, Ending], tuple[Step, ...]] = {
    (Origin.MANUAL, Ending.RESUME): (*_BEFORE, Step.SAVE, *_SAVED),
    (Origin.MANUAL, Ending.STOP): (*_BEFORE, Step.PAUSE, Step.SAVE, *_SAVED_AND_ENDED),
    (Origin.WORKLOAD, Ending.RESUME): (Step.PREPARE, *_SAVED),
    (Origin.WORKLOAD, Ending.STOP): (Step.PREPARE, Step.PAUSE, *_SAVED_AND_ENDED),
}


class Reason(StrEnum):
    """Why a save failed: what conditions and events carry."""

    STILL_LOADING = "StillLoading"
    NOT_RUNNING = "NotRunning"
    PREFLIGHT = "PreflightFailed"
    GPU_TOOL = "GPUToolFailed"
    GPU_TOOL_HUNG = "GPUToolHung"
    DISK_FULL = "DiskFull"
    DEADLINE = "DeadlineExceeded"
    POD_ENDED = "PodEnded"
    SAVE_FAILED = "SaveFailed"
    VERIFICATION = "VerificationFailed"
    STORE_UNAVAILABLE = "StoreUnavailable"
    STORE_REFUSED = "StoreRefused"
    STILL_PAUSED = "StillPaused"
    STILL_ALIVE = "StillAlive"
    DISK = "DiskFailed"
    INTERRUPTED = "Interrupted"


# What may go well another time: gVisor fails some saves for reasons that pass, and an interrupted one was never judged.
# Not so a full disk, a dead pod or a deadline.
RETRIED = frozenset({Reason.SAVE_FAILED, Reason.VERIFICATION, Reason.INTERRUPTED, Reason.GPU_TOOL})


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed step: why, in a word and in words."""

    reason: Reason
    message: str
    at: Step


@dataclass(frozen=True, slots=True)
class Course:
    """Where a job is. `failure`: the first one, which decided."""

    origin: Origin
    ending: Ending
    step: Step
    failure: Failure | None = None

    @property
    def may_be_retried(self) -> bool:
        """Whether the whole save may be done again, as a manual one."""
        return self.step is Step.FAILED and self.failure is not None and self.failure.reason in RETRIED


def begin(origin: Origin, ending: Ending) -> Course:
    """Give the course of a job from its first step on."""
    return Course(origin, ending, PLANS[origin, ending][0])


def after(course: Course, failure: Failure | None = None) -> Course:
    """Say where a job is after its step was done, or failed.

    A step that failed may have taken effect (a pause whose answer was late), so what undoes it must be able to find it
    undone.
    """
    if failure is None:
        return replace(course, step=_next(course))
    decided = course.failure or failure
    return replace(course, step=_way_out(course, failure.reason), failure=decided)


def _next(course: Course) -> Step:
    match course.step:
        case Step.RESUME:
            return Step.DISCARD
        case Step.DISCARD:
            return Step.DONE if course.failure is None else Step.FAILED
        case Step.CLEAR:
            return Step.DONE
        case step:
            plan = PLANS[course.origin, course.ending]
            return plan[plan.index(step) + 1]


def _way_out(course: Course, reason: Reason) -> Step:
    match course.step:
        case Step.AWAIT_LOADED | Step.PREFLIGHT:
            return Step.FAILED
        case Step.PREPARE:
            return Step.DISCARD
        case Step.PAUSE | Step.SAVE | Step.VERIFY | Step.COMMIT:
            return Step.RESUME if course.ending is Ending.STOP else Step.DISCARD
        case Step.END:
            return Step.PENDING
        case Step.PUSH:
            # A pod that runs can be saved again; of one that was stopped this is all there is.
            worthless = reason in (Reason.STORE_REFUSED, Reason.VERIFICATION) and course.ending is Ending.RESUME
            return Step.DISCARD if worthless else Step.PENDING
        case Step.CLEAR:
            return Step.DONE  # what could not be removed is swept by a next round
        case Step.RESUME:
            return Step.DISCARD if reason is Reason.POD_ENDED else Step.PENDING
        case Step.DISCARD:
            return Step.PENDING
        case final:
            raise ValueError(f"{final} is no step that can fail")


# After the agent's death


class Phase(StrEnum):
    """What the note of a job says; each is written before what it allows."""

    ARMED = "armed"  # a sandbox may write an image here, when its application asks for it
    BEGUN = "begun"  # it may be paused, an image may be half written
    COMMITTED = "committed"  # the image is whole and on the disk; with STOP the pod is to end


class Found(StrEnum):
    """How a former life's pod is found, by the runtime, not by memory. GONE: ended, or unknown to the runtime."""

    RUNNING = "running"
    PAUSED = "paused"
    GONE = "gone"


class Written(StrEnum):
    """How the files are that a sandbox writes its triggered image into."""

    NOTHING = "nothing"  # empty: nothing was asked for yet
    SPENT = "spent"  # empty, and no longer open in the sandbox: a save failed before its first byte
    SAVING = "saving"  # open in the sandbox, and growing
    CLOSED = "closed"  # written, whole or not


def resumed(origin: Origin, ending: Ending, phase: Phase, found: Found, written: Written) -> Course | None:
    """Say where a former life's job goes on; None: an armed sandbox is waited for as before."""
    interrupted = Course(
        origin, ending, Step.DISCARD, Failure(Reason.INTERRUPTED, "the agent ended during the save", Step.SAVE)
    )
    match phase, found:
        case Phase.COMMITTED, _:
            return Course(origin, ending, Step.END if ending is Ending.STOP else Step.PUSH)
        case Phase.ARMED, Found.GONE if written is Written.NOTHING:
            return Course(origin, ending, Step.DISCARD)  # it ended without having asked: nothing failed
        case Phase.ARMED, Found.RUNNING | Found.PAUSED if written is not Written.CLOSED:
            return None
        case Phase.ARMED, _ if ending is Ending.RESUME:
            return begin(origin, ending)
        case Phase.BEGUN, Found.RUNNING | Found.GONE if origin is Origin.WORKLOAD and ending is Ending.RESUME:
            return begin(origin, ending)
        case Phase.BEGUN, Found.PAUSED:
            return replace(interrupted, step=Step.RESUME)
        case _, Found.GONE:
            return replace(interrupted, failure=Failure(Reason.POD_ENDED, "the pod ended before the save", Step.SAVE))
        case _:
            # It ran on, or was never paused by us: what is there, if whole, is no snapshot to stop at.
            return interrupted
