"""Which restores were tried and which failed, on disk: so that a pod whose restore failed starts cold the next time.

A record is written *before* the Restore RPC and removed when the pod is back. So an agent that dies in between, or a
node, leaves a record too, and no pod is tried twice: the next attempt of that pod (by its namespace and UID) starts
cold, whichever snapshot it would get, since nothing says that the next one fares better. Namespaces share nothing here:
neither does a record hold for another's pod of the same UID, nor does a message name what is of another one. Records
end after `KEPT_S`, or when the pod is gone and somebody calls `forget`; there are `MAX_RECORDS` at most, of which the
oldest go first.

A snapshot whose restores have failed for `FAILURES_MAX` pods here, and for none since has not, rests for `REST_S`: else
each new replica of a Deployment would die once before it starts cold. One failure is not enough to blame the snapshot:
a pod that is deleted while it loads looks the same as one that its image has killed.

One file, replaced as a whole. One process owns it. A file that can't be read is put aside and told of: then at most one
more restore is tried for each pod.
"""

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from agent.errors import AgentError
from agent.node.jobs import sync
from agent.node.pods import Identity

KEPT_S = 24 * 3600.0
MAX_RECORDS = 1000
FAILURES_MAX = 2
# Long enough that a snapshot that can't be restored costs some pods an hour, not all; a new one is tried at once.
REST_S = 600.0
_VERSION = 1
_MAX_BYTES = 4 << 20
_REASON_CHARS = 600


class RestoreRecordsError(AgentError):
    """The records can't be written; nothing may be restored then, since nothing would keep it from being repeated."""

    kind = "restore-records"


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreRecord:
    """A restore of a pod that was begun, `at_s` (seconds since the epoch); `failure`: why it failed, "" if unknown."""

    namespace: str
    pod_uid: str
    snapshot_id: str
    at_s: float
    failure: str = ""

    @property
    def pod(self) -> tuple[str, str]:
        """Which pod: its namespace and UID."""
        return self.namespace, self.pod_uid

    @property
    def snapshot(self) -> tuple[str, str]:
        """Which snapshot: its namespace and name."""
        return self.namespace, self.snapshot_id

    def __str__(self) -> str:
        why = self.failure or "the agent or the node ended before its outcome was known"
        return f"an earlier restore of this pod, from {self.snapshot_id}, failed: {why}"


@dataclass(frozen=True, slots=True)
class SnapshotRests:
    """A snapshot isn't tried for now; `last`: its latest failure."""

    last: RestoreRecord

    def __str__(self) -> str:
        return (
            f"{FAILURES_MAX} restores from {self.last.snapshot_id} have failed here within {REST_S / 60:g} min,"
            f" the last one: {self.last.failure}"
        )


class RestoreRecords:
    """The records in the file at `path`; methods block on the disk. `now_s` is the wall clock's."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.problem = ""  # why the file's former content is not used
        self._records = {record.pod: record for record in self._read()}
        self._proven_at_s: dict[tuple[str, str], float] = {}  # by snapshot; not on disk: forgotten, it rests sooner

    def begin(self, who: Identity, snapshot_id: str, *, now_s: float) -> RestoreRecord | SnapshotRests | None:
        """Note that a restore is to begin, durably; or give why it may not.

        Raises: `RestoreRecordsError`: then it may not begin either.
        """
        self._expire(now_s)
        new = RestoreRecord(namespace=who.namespace, pod_uid=who.uid, snapshot_id=snapshot_id, at_s=now_s)
        if (former := self._records.get(new.pod)) is not None:
            return former
        since_s = max(now_s - REST_S, self._proven_at_s.get(new.snapshot, 0.0))
        failed = [one for one in self.all() if one.snapshot == new.snapshot and one.failure and one.at_s > since_s]
        if len(failed) >= FAILURES_MAX:
            return SnapshotRests(failed[-1])
        self._records[new.pod] = new
        try:
            self._write()
        except RestoreRecordsError:
            del self._records[new.pod]
            raise
        return None

    def failed(self, who: Identity, failure: str) -> None:
        """Note why a restore that was begun has failed."""
        if (record := self._records.get((who.namespace, who.uid))) is not None:
            self._records[record.pod] = replace(record, failure=failure[:_REASON_CHARS])
            self._write()

    def proven(self, who: Identity, *, now_s: float) -> None:
        """Note that a pod is back: its record goes, and its snapshot is good."""
        if (record := self._records.get((who.namespace, who.uid))) is not None:
            self._proven_at_s = {name: at_s for name, at_s in self._proven_at_s.items() if now_s - at_s < REST_S}
            self._proven_at_s[record.snapshot] = now_s
        self.forget(who)

    def forget(self, who: Identity) -> None:
        """Remove the record of a pod whose restore wasn't tried, or that is gone."""
        if self._records.pop((who.namespace, who.uid), None) is not None:
            self._write()

    def all(self) -> tuple[RestoreRecord, ...]:
        """Give all records, oldest first."""
        return tuple(sorted(self._records.values(), key=lambda record: record.at_s))

    def _expire(self, now_s: float) -> None:
        # A clock that was set back makes records of the future; they go when it has caught up with them.
        kept = [record for record in self.all() if now_s - record.at_s < KEPT_S]
        self._records = {record.pod: record for record in kept[-(MAX_RECORDS - 1) :]}

    def _read(self) -> tuple[RestoreRecord, ...]:
        try:
            with open(os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
                content = json.loads(file.read(_MAX_BYTES))
            if content["version"] != _VERSION:
                raise ValueError(f"version {content['version']}")
            return tuple(_record(members) for members in content["records"])
        except FileNotFoundError:
            return ()
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            aside = self._path.with_name(f"{self._path.name}.unreadable")
            self._path.replace(aside)
            self.problem = f"{self._path} can't be read ({error}); it is kept as {aside.name}"
            return ()

    def _write(self) -> None:
        temporary = self._path.with_name(f"{self._path.name}.new")
        content = {"version": _VERSION, "records": [asdict(record) for record in self.all()]}
        try:
            with open(temporary, "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                json.dump(content, file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self._path)
            sync(self._path.parent)
        except OSError as error:
            raise RestoreRecordsError(f"{self._path} can't be written: {error.strerror}") from error


def _record(members: dict[str, object]) -> RestoreRecord:
    match members:
        case {
            "namespace": str(namespace),
            "pod_uid": str(uid),
            "snapshot_id": str(snapshot),
            "at_s": int() | float() as at_s,
            "failure": str(why),
        }:
            return RestoreRecord(namespace=namespace, pod_uid=uid, snapshot_id=snapshot, at_s=float(at_s), failure=why)
        case _:
            raise ValueError("a record has other members than a record's")
