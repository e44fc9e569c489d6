"""What has changed in the directories since the last look: the blocking half of `local`'s watch.

Objects of users are told by their `resourceVersion`, which follows from their contents, and snapshots by what stat(2)
says of their files. Files of users are read when two looks in a row have found the same ones: an editor that writes
half a file, which may be valid YAML of another meaning, has gone on by then.
"""

from agent.kube.directory import ObjectDirectory
from agent.kube.errors import InvalidObject, NotFound, Unavailable
from agent.kube.objects import Kind, PodSnapshot, Resource
from agent.kube.port import Change, Gone, Key, Mended, Put, Unreadable, key_of

# A file that changes at each look is read all the same then.
_UNSETTLED_LOOKS = 5


class Follower:
    """Follows some kinds in all namespaces. For one thread at a time."""

    def __init__(self, directory: ObjectDirectory, kinds: tuple[Kind, ...]) -> None:
        self._directory = directory
        self._of_users = tuple(kind for kind in kinds if kind is not Kind.SNAPSHOT)
        self._has_snapshots = Kind.SNAPSHOT in kinds
        self._versions: dict[Key, object] = {}
        self._unreadable: dict[str, Unreadable] = {}
        self._files: object = None  # as the last look found them
        self._swept: object = None  # as they were when statuses were last swept
        self._unsettled_looks = 0

    def look(self) -> tuple[list[Change], bool]:
        """Give what has changed, and whether all could be looked at."""
        changes: list[Change] = []
        found: dict[str, Unreadable] = {}
        is_complete = True
        for look in (self._look_at_files, self._look_at_snapshots):
            try:
                look(changes, found)
            except Unavailable as error:
                found[error.where] = Unreadable(error.where, (str(error),))
                is_complete = False
        changes += [each for where, each in found.items() if self._unreadable.get(where) != each]
        changes += [Mended(where) for where in self._unreadable if where not in found]
        self._unreadable = found
        return changes, is_complete

    def _look_at_files(self, changes: list[Change], found: dict[str, Unreadable]) -> None:
        if not self._of_users:
            return
        files = self._directory.files.signatures()
        is_first, is_settled = self._files is None, self._files == files
        self._files = files
        if not is_first and not is_settled and self._unsettled_looks < _UNSETTLED_LOOKS:
            self._unsettled_looks += 1
            found |= self._unreadable
            return
        self._unsettled_looks = 0
        listing = self._directory.list(*self._of_users)
        found |= {each.where: each for each in listing.unreadable}
        for each in listing.items:
            key, version = key_of(each), each.metadata.resource_version
            if self._versions.get(key) != version:
                self._versions[key] = version
                changes.append(Put(each))
        changes += self._gone({key_of(each) for each in listing.items}, self._of_users)
        if self._swept != files:
            self._directory.sweep()
            self._swept = files

    def _look_at_snapshots(self, changes: list[Change], found: dict[str, Unreadable]) -> None:
        if not self._has_snapshots:
            return
        signatures = self._directory.snapshots.signatures()
        there: set[Key] = set()
        for (namespace, name), signature in sorted(signatures.items()):
            key = Key(Kind.SNAPSHOT, namespace, name)
            if self._versions.get(key) == signature:
                there.add(key)
                continue
            try:
                snapshot: Resource = self._directory.get(PodSnapshot, name, namespace)
            except InvalidObject as error:
                found[error.where] = Unreadable(error.where, error.problems)
            except NotFound:
                continue  # removed since
            else:
                there.add(key)
                self._versions[key] = signature
                changes.append(Put(snapshot))
        changes += self._gone(there, (Kind.SNAPSHOT,))

    def _gone(self, there: set[Key], kinds: tuple[Kind, ...]) -> list[Change]:
        gone = [key for key in self._versions if key.kind in kinds and key not in there]
        for key in gone:
            del self._versions[key]
        return [Gone(key) for key in gone]
