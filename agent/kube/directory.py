"""The objects in two local directories: what users write (`user_files`), and what the agent writes (`state_files`).

    FILES/*.yaml                             storage configs, policies, triggers; only read
    STATE/snapshots/NAMESPACE/NAME.json      PodSnapshots, as an API server would hold them
    STATE/status/KIND/NAMESPACE/NAME.json    the status of a user's object, and the spec that it is about
    STATE/lock                               held while something is written

How the port's promises (`port`) are kept
- A snapshot's `resourceVersion` counts its writes. A user's object has one made of its spec's digest and of the number
  of writes of its status, so that either's change is seen; its `generation` counts the specs that statuses were
  written for.
- Writers take turns by a lock (flock) of a file, across threads and processes, and compare versions under it.
- A trigger's status stays when its file becomes unreadable: a trigger must not fire again because of a typo somewhere.
  It goes when every file can be read and none has the object any more (`sweep`).
"""

import fcntl
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from agent.kube.codec import parse, spec_mapping, status_mapping, to_mapping
from agent.kube.errors import AlreadyExists, Conflict, InvalidObject, NotFound, ReadOnly, Unavailable
from agent.kube.meta import meta_mapping
from agent.kube.objects import Kind, PodSnapshot, R, Resource, SnapshotStatus
from agent.kube.port import Key, Listing, Unreadable, key_of
from agent.kube.state_files import Signature, StateFiles
from agent.kube.user_files import UserFileReader
from streamd.errors import StreamdError
from streamd.safe_paths import SafeDirectory

# The lock is held for a few small writes and their syncs; who holds it longer is stopped, or its disk is.
_LOCK_WAIT_S = 10.0
_LOCK_POLL_S = 0.01


def utc_now() -> str:
    """Give the time as objects hold it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


class ObjectDirectory:
    """The two directories; blocking calls, for one thread at a time (`local` makes them Trio's).

    `now` gives the time of creation. Every call may raise `Unavailable`.
    """

    def __init__(
        self, files: Path, state: Path, *, now: Callable[[], str] = utc_now, lock_wait_s: float = _LOCK_WAIT_S
    ) -> None:
        self._state = state
        self._now = now
        self._lock_wait_s = lock_wait_s
        self.files = UserFileReader(files)
        self.snapshots = StateFiles(state / "snapshots")
        self._statuses = {kind: StateFiles(state / "status" / kind.value.lower()) for kind in _OF_USERS}
        # Of users' objects as they were last listed: what was written, its status' version, and both together. There
        # may be thousands, and they are listed each second.
        self._listed: dict[Key, tuple[Resource, Signature | None, Resource]] = {}

    def list(self, *kinds: Kind, namespace: str | None = None) -> Listing:
        """Give all objects of these kinds, in the order of kinds, namespaces and names, and what can't be read.

        Unreadable files are told whatever the kinds, unless only snapshots are asked for.
        """
        found: list[Resource] = []
        unreadable: list[Unreadable] = []
        if any(kind in _OF_USERS for kind in kinds):
            there = self.files.read()
            unreadable += there.unreadable
            written = {kind: self._statuses[kind].signatures() for kind in _OF_USERS if kind in kinds}
            self._listed = {key: each for key, each in self._listed.items() if key in there.objects}
            for key, (_, resource) in there.objects.items():
                if key.kind in kinds and namespace in (None, key.namespace):
                    try:
                        version = written[key.kind].get((key.namespace, key.name))
                        found.append(self._with_status_of(key, resource, version))
                    except InvalidObject as error:
                        unreadable.append(Unreadable(error.where, error.problems))
        if Kind.SNAPSHOT in kinds:
            for of_namespace, name in sorted(self.snapshots.signatures()):
                if namespace in (None, of_namespace):
                    try:
                        found.append(self.get(PodSnapshot, name, of_namespace))
                    except InvalidObject as error:
                        unreadable.append(Unreadable(error.where, error.problems))
                    except NotFound:
                        continue  # removed since
        found.sort(key=lambda each: (kinds.index(each.kind), each.metadata.namespace, each.metadata.name))
        return Listing(tuple(found), tuple(unreadable))

    def get(self, kind: type[R], name: str, namespace: str = "") -> R:
        """Give one object. Raises: `NotFound`, `InvalidObject`."""
        key = Key(kind.kind, namespace, name)
        if kind.kind is Kind.SNAPSHOT:
            content = self.snapshots.read(namespace, name)
            if content is None:
                raise NotFound(str(key), "isn't there")
            where = self.snapshots.where(namespace, name)
            resource = parse(content, where=where)
            if key_of(resource) != key:
                raise InvalidObject(where, (f"holds {key_of(resource)}",))
            if not re.fullmatch(r"\d{1,18}", resource.metadata.resource_version, re.ASCII):
                raise InvalidObject(where, ("metadata.resourceVersion: isn't a number of writes",))
        else:
            there = self.files.read().objects.get(key)
            if there is None:
                raise NotFound(str(key), "isn't there, or its file can't be read")
            resource = self._with_status(there[1])
        assert isinstance(resource, kind)
        return resource

    def create(self, snapshot: PodSnapshot) -> PodSnapshot:
        """Keep a new snapshot, as `Objects.create`. Raises: `AlreadyExists`, `InvalidObject`."""
        meta = replace(snapshot.metadata, creation_timestamp=self._now(), resource_version="1", generation=1)
        created = replace(snapshot, metadata=meta, status=SnapshotStatus())
        parse(to_mapping(created), where=str(key_of(created)))
        with self._locked():
            if self.snapshots.has(meta.namespace, meta.name):
                raise AlreadyExists(str(key_of(created)), "is there already")
            self.snapshots.write(meta.namespace, meta.name, to_mapping(created))
        return created

    def update_status(self, resource: R) -> R:
        """Replace an object's status, as `Objects.update_status`. Raises: `NotFound`, `Conflict`, `InvalidObject`."""
        with self._locked():
            meta = resource.metadata
            there = self.get(type(resource), meta.name, meta.namespace)
            _compare(resource, there)
            mapping = to_mapping(there) | {"status": status_mapping(resource)}
            if there.kind is Kind.SNAPSHOT:
                version = str(int(there.metadata.resource_version) + 1)
                mapping["metadata"] = meta_mapping(replace(there.metadata, resource_version=version))
            # What can't be read back must not be written.
            updated = parse(mapping, where=str(key_of(there)))
            assert isinstance(updated, type(resource))
            if there.kind is Kind.SNAPSHOT:
                self.snapshots.write(meta.namespace, meta.name, mapping)
                return updated
            statuses = self._statuses[there.kind]
            record = statuses.read(meta.namespace, meta.name) or {}
            new = {
                "spec": _digest(there),
                "generation": there.metadata.generation,
                "writes": _count(record, "writes") + 1,
                "status": status_mapping(updated),
            }
            statuses.write(meta.namespace, meta.name, new)
            return self._with_status(updated)

    def delete(self, snapshot: PodSnapshot) -> None:
        """Remove a snapshot, as `Objects.delete`. Raises: `NotFound`, `Conflict`, `ReadOnly`."""
        key = key_of(snapshot)
        if key.kind is not Kind.SNAPSHOT:
            raise ReadOnly(str(key), "is a user's; take it out of its file")
        with self._locked():
            _compare(snapshot, self.get(PodSnapshot, key.name, key.namespace))
            self.snapshots.remove(key.namespace, key.name)

    def sweep(self) -> None:
        """Remove statuses of users' objects that are gone for certain."""
        with self._locked():
            there = self.files.read()
            if there.unreadable:
                return
            for kind, statuses in self._statuses.items():
                for namespace, name in statuses.signatures():
                    if Key(kind, namespace, name) not in there.objects:
                        statuses.remove(namespace, name)

    def _with_status_of(self, key: Key, resource: Resource, version: Signature | None) -> Resource:
        """Do as `_with_status`, once for each version of either."""
        kept = self._listed.get(key)
        if kept is None or kept[0] is not resource or kept[1] != version:
            kept = self._listed[key] = (resource, version, self._with_status(resource))
        return kept[2]

    def _with_status(self, resource: R) -> R:
        """Put what the agent keeps of a user's object to what the user wrote. Raises: `InvalidObject`."""
        meta, digest = resource.metadata, _digest(resource)
        statuses = self._statuses[resource.kind]
        record = statuses.read(meta.namespace, meta.name) or {}
        generation = _count(record, "generation") + (record.get("spec") != digest)
        version = f"{generation}.{_count(record, 'writes')}.{digest[:16]}"
        # What belongs to the keeper isn't the user's to write, though it may be in a file that came from a cluster.
        meta = replace(
            meta, uid="", creation_timestamp="", deletion_timestamp="", resource_version=version, generation=generation
        )
        mapping = to_mapping(replace(resource, metadata=meta)) | {"status": record.get("status") or {}}
        found = parse(mapping, where=statuses.where(meta.namespace, meta.name))
        assert isinstance(found, type(resource))
        return found

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            with SafeDirectory.open(self._state, make=True) as directory:
                fd = directory.open_file("lock", os.O_RDWR | os.O_CREAT)
        except (OSError, StreamdError) as error:
            raise Unavailable(str(self._state), str(error)) from error
        try:
            until_s = time.monotonic() + self._lock_wait_s
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > until_s:
                        raise Unavailable(str(self._state), "its lock is held by another for too long") from None
                    time.sleep(_LOCK_POLL_S)
            yield
        finally:
            os.close(fd)


_OF_USERS = (Kind.STORAGE_CONFIG, Kind.POLICY, Kind.TRIGGER)


def _compare(given: Resource, there: Resource) -> None:
    if given.metadata.resource_version != there.metadata.resource_version:
        raise Conflict(str(key_of(there)), "was changed meanwhile; read it again")


def _digest(resource: Resource) -> str:
    return hashlib.sha256(json.dumps(spec_mapping(resource), sort_keys=True).encode()).hexdigest()


def _count(record: Mapping[str, object], name: str) -> int:
    value = record.get(name)
    return value if type(value) is int else 0
