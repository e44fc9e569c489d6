"""The PodSnapshot that a job is for, beside the job's note: `WORK_DIR/JOB_ID/snapshot.json`.

A sandbox that may write an image by itself needs no object before it does; whoever finds its image later, perhaps an
agent that knows nothing of the pod any more, needs all that the object is to say. The file goes with its job.
"""

import json
import os
from pathlib import Path

from agent.kube.codec import parse, to_mapping
from agent.kube.errors import InvalidObject
from agent.kube.objects import PodSnapshot
from agent.node.jobs import Job, JobDirectory, sync

_NAME = "snapshot.json"
_MAX_BYTES = 4 << 20


def write_draft(jobs: JobDirectory, job: Job, draft: PodSnapshot) -> None:
    """Write it, durably; the job is noted already. Raises: OSError."""
    path = jobs.path / job.job_id / _NAME
    temporary = path.with_name(f"{_NAME}.new")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "w") as file:
        json.dump(to_mapping(draft), file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync(path.parent)


def read_draft(jobs: JobDirectory, job: Job) -> PodSnapshot | None:
    """Read it; None when there is none, or none that can be used."""
    path: Path = jobs.path / job.job_id / _NAME
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            found = parse(json.loads(file.read(_MAX_BYTES)), where=str(path))
    except (OSError, ValueError, RecursionError, InvalidObject):
        return None
    return found if isinstance(found, PodSnapshot) else None
