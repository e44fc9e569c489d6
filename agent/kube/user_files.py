"""The files in which users write policies, storage configs and triggers: `DIR/*.yaml`, read-only for the agent.

A file is taken whole or not at all: a problem in one of its objects makes the whole file `Unreadable`, and none of its
objects is there until it is mended. (Half of what somebody wrote, or what it said last week, may be the opposite of
what they mean; without a policy pods start cold and aren't saved, which is safe.) Other files keep working. An object
that an earlier file has already, by the order of names, makes the later file unreadable.

Nothing here trusts what lies in the directory: a file that others than root (or who runs this) may write is refused,
links aren't followed, FIFOs and devices aren't opened, sizes and numbers are bounded.
"""

import errno
import os
import stat
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from agent.kube.codec import parse
from agent.kube.errors import InvalidObject
from agent.kube.objects import GROUP, Kind, Resource
from agent.kube.port import Key, Unreadable, key_of
from agent.podspec.manifests import read_manifests
from agent.podspec.shapes import PodSpecError
from agent.podspec.workloads import WORKLOAD_KINDS
from streamd.errors import StreamdError
from streamd.safe_paths import SafeDirectory

MAX_FILE_BYTES = 256 << 10
MAX_FILES = 1000
# Of one file; a policy takes a dozen lines.
MAX_OBJECTS = 1000
_SUFFIXES = (".yaml", ".yml", ".json")

# What tells a file's versions apart: inode, size, mtime, ctime.
Signature = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class UserFiles:
    """What the files say: each object with its file's name, and what can't be read."""

    objects: dict[Key, tuple[str, Resource]]
    unreadable: tuple[Unreadable, ...]


class UserFileReader:
    """Reads the directory again and again: each file once in each of its versions. For one thread at a time."""

    def __init__(self, directory: Path) -> None:
        self._path = directory
        self._parsed: dict[str, tuple[Signature, tuple[Resource, ...] | Unreadable]] = {}
        self._found: tuple[dict[str, Signature], UserFiles] | None = None  # of which versions, and what they say

    def signatures(self) -> dict[str, Signature]:
        """Look which files there are, in which version, and read none; empty when the directory can't be opened."""
        try:
            with SafeDirectory.open(self._path) as directory:
                return _signatures(directory)
        except (OSError, StreamdError):
            return {}

    def read(self) -> UserFiles:
        """Read all files. Raises nothing for what lies there: it is in `unreadable`."""
        try:
            with SafeDirectory.open(self._path) as directory:
                there = _signatures(directory)
                if self._found is not None and self._found[0] == there:
                    return self._found[1]
                names = sorted(there)
                kept, self._parsed = self._parsed, {}
                for name in names[:MAX_FILES]:
                    self._parsed[name] = self._read_file(directory, name, kept.get(name))
        except FileNotFoundError:
            return UserFiles({}, (Unreadable(str(self._path), ("the directory isn't there",)),))
        except (OSError, StreamdError) as error:
            return UserFiles({}, (Unreadable(str(self._path), (str(error),)),))
        found = self._merged()
        if len(names) > MAX_FILES:
            problem = f"has {len(names)} files; those after {names[MAX_FILES - 1]!r} are not read"
            found = UserFiles(found.objects, (*found.unreadable, Unreadable(str(self._path), (problem,))))
        # One that couldn't be opened, or was replaced meanwhile, is looked at again.
        is_settled = all(there[name] == version for name, (version, _) in self._parsed.items())
        self._found = (there, found) if is_settled else None
        return found

    def _merged(self) -> UserFiles:
        objects: dict[Key, tuple[str, Resource]] = {}
        unreadable = []
        for name, (_, content) in self._parsed.items():
            if isinstance(content, Unreadable):
                unreadable.append(content)
                continue
            keys = [key_of(each) for each in content]
            problems = [
                f"{key} is in {objects[key][0]} and in {name}: take it out of one of them"
                for key in keys
                if key in objects
            ]
            counts = Counter(keys)
            problems += [f"{key} is there twice" for key in sorted(counts, key=str) if counts[key] > 1]
            if problems:
                unreadable.append(Unreadable(self._where(name), tuple(problems)))
            else:
                objects |= {key: (name, each) for key, each in zip(keys, content, strict=True)}
        return UserFiles(objects, tuple(unreadable))

    def _read_file(
        self, directory: SafeDirectory, name: str, kept: tuple[Signature, tuple[Resource, ...] | Unreadable] | None
    ) -> tuple[Signature, tuple[Resource, ...] | Unreadable]:
        where = self._where(name)
        nothing: Signature = (0, 0, 0, 0)
        try:
            fd = directory.open_file(name, os.O_RDONLY)
        except OSError as error:
            what = "is a link; links aren't followed" if error.errno == errno.ELOOP else os.strerror(error.errno or 0)
            return nothing, Unreadable(where, (what,))
        try:
            info = os.fstat(fd)
            signature = _signature(info)
            if kept is not None and kept[0] == signature:
                return kept
            if not stat.S_ISREG(info.st_mode):
                return signature, Unreadable(where, ("isn't a regular file",))
            if others := written_by_others(info):
                return signature, Unreadable(where, (others,))
            data = os.read(fd, MAX_FILE_BYTES + 1)
        except OSError as error:
            return nothing, Unreadable(where, (os.strerror(error.errno or 0),))
        finally:
            os.close(fd)
        if len(data) > MAX_FILE_BYTES:
            return signature, Unreadable(where, (f"is larger than {MAX_FILE_BYTES} bytes",))
        return signature, _parse_file(data, where)

    def _where(self, name: str) -> str:
        return str(self._path / name)


def written_by_others(info: os.stat_result) -> str:
    """Say who else may have written a file that decides what is saved, and where to; empty: only root, or we."""
    if info.st_uid not in (0, os.geteuid()):
        return f"belongs to uid {info.st_uid}, and only root may write there: chown it to root"
    if info.st_mode & 0o022:
        return f"may be written by others than root (its mode is {stat.S_IMODE(info.st_mode):04o}): chmod go-w"
    return ""


def _parse_file(data: bytes, where: str) -> tuple[Resource, ...] | Unreadable:
    try:
        documents = read_manifests(data.decode(), where)
    except UnicodeDecodeError:
        return Unreadable(where, ("isn't UTF-8 text",))
    except PodSpecError as error:  # its path is the file's, which `where` says, or begins so
        return Unreadable(
            where, (f"{error.path.removeprefix(where).removeprefix(', ')}: {error.why}".removeprefix(": "),)
        )
    if len(documents) > MAX_OBJECTS:
        return Unreadable(where, (f"has {len(documents)} objects, more than {MAX_OBJECTS}",))
    found, problems = [], []
    for number, document in enumerate(documents, start=1):
        group = str(document.get("apiVersion", GROUP)).partition("/")[0]
        if group != GROUP and document.get("kind") in WORKLOAD_KINDS:
            problems.append(f"object {number}: a {document['kind']}'s manifest belongs into pods/ below this directory")
            continue
        try:
            resource = parse(document, where=where, is_from_person=True)
        except InvalidObject as error:
            problems += [f"object {number}: {problem}" if len(documents) > 1 else problem for problem in error.problems]
            continue
        if resource.kind is Kind.SNAPSHOT:
            problems.append(f"object {number}: PodSnapshots are the agent's to write")
        found.append(resource)
    return Unreadable(where, tuple(problems)) if problems else tuple(found)


def _signatures(directory: SafeDirectory) -> dict[str, Signature]:
    found = {}
    for name in directory.names():
        if name.endswith(_SUFFIXES) and not name.startswith("."):
            try:
                found[name] = _signature(directory.stat(name))
            except OSError:
                continue  # removed since
    return found


def _signature(info: os.stat_result) -> Signature:
    return info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns
