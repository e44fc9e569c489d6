"""What the tests of objects share: two directories, and what lies in them."""

import itertools
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent.kube.directory import ObjectDirectory

POLICY = """
apiVersion: podsnapshot.gke.io/v1
kind: PodSnapshotPolicy
metadata: {name: NAME, namespace: team-a}
spec:
  storageConfigName: bucket
  selector: {matchLabels: {app: web}}
  triggerConfig: {type: manual}
"""
STORAGE = """
apiVersion: podsnapshot.gke.io/v1
kind: PodSnapshotStorageConfig
metadata: {name: bucket}
spec: {snapshotStorageConfig: {gcs: {bucket: my-snapshots}}}
"""
TRIGGER = """
apiVersion: podsnapshot.gke.io/v1
kind: PodSnapshotManualTrigger
metadata: {name: now, namespace: team-a}
spec: {targetPod: web-0}
"""


class Place:
    """The two directories of one test, and a clock that goes on by a second with each look."""

    def __init__(self, path: Path) -> None:
        self.files = path / "files"
        self.state = path / "state"
        self.files.mkdir(mode=0o700)
        self._seconds = itertools.count()

    def open(self, *, lock_wait_s: float = 30.0) -> ObjectDirectory:
        return ObjectDirectory(self.files, self.state, now=self._now, lock_wait_s=lock_wait_s)

    @contextmanager
    def held_lock(self) -> Iterator[None]:
        """Have another process hold the lock."""
        script = (
            "import fcntl,sys\nf=open(sys.argv[1])\nfcntl.flock(f,fcntl.LOCK_EX)\nprint(flush=True)\nsys.stdin.read()"
        )
        argv = [sys.executable, "-c", script, str(self.state / "lock")]
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
            assert holder.stdin is not None
            assert holder.stdout is not None
            holder.stdout.readline()
            try:
                yield
            finally:
                holder.stdin.close()

    def write(self, name: str, *documents: str) -> None:
        """Write a file of a user's as a careful editor does: whole, or not at all."""
        (self.files / f".{name}").write_text("---".join(documents))
        (self.files / f".{name}").rename(self.files / name)

    def policy(self, name: str) -> str:
        return POLICY.replace("NAME", name)

    @property
    def storage(self) -> str:
        return STORAGE

    @property
    def trigger(self) -> str:
        return TRIGGER

    def _now(self) -> str:
        return f"2026-11-30T22:00:{next(self._seconds) % 60:02}Z"


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)
