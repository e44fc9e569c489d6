"""JSON files in which the agent keeps what it writes: one an object, replaced whole, readable by nobody else.

A file is written under another name, synced, and given its name; then its directory is synced. So whenever the machine
stops, a file has its old or its new content, or isn't there. What a writer that was killed left under the other name is
overwritten by the next.

Names come from objects of users, so they are checked here once more, whoever has checked them before.
"""

import errno
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from agent.kube.errors import InvalidObject, Unavailable
from agent.kube.meta import is_name, is_namespace
from streamd.errors import StreamdError
from streamd.safe_paths import SafeDirectory

# What etcd takes in one request by default, and so an API server in one object.
MAX_BYTES = 1_500_000
# The name under which a file is written must fit in a directory entry (255 bytes).
MAX_NAME_CHARS = 240
_SUFFIX = ".json"
# The directory for what has no namespace; no namespace has an underscore.
_CLUSTER = "_cluster"

# Inode, size, mtime: each write makes a new inode.
Signature = tuple[int, int, int]


class StateFiles:
    """`DIRECTORY/NAMESPACE/NAME.json`; the directory is made by the first write, 0700.

    It holds no descriptor between calls. Writers take turns by a lock of their caller (`directory`).
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory

    def where(self, namespace: str, name: str) -> str:
        """Name a file in messages."""
        return str(self._path / (namespace or _CLUSTER) / f"{name}{_SUFFIX}")

    def signatures(self) -> dict[tuple[str, str], Signature]:
        """Give (namespace, name) of all files, and what tells each one's versions apart. What else lies there is passed
        over. Raises: `Unavailable`.
        """
        found: dict[tuple[str, str], Signature] = {}
        try:
            with SafeDirectory.open(self._path) as directory:
                for below in directory.names():
                    if below != _CLUSTER and not is_namespace(below):
                        continue
                    with directory.open_directory(below) as inner:
                        for entry in inner.scandir():
                            name = entry.name.removesuffix(_SUFFIX)
                            if name != entry.name and _is_file_name(name):
                                info = entry.stat(follow_symlinks=False)
                                namespace = "" if below == _CLUSTER else below
                                found[namespace, name] = (info.st_ino, info.st_size, info.st_mtime_ns)
        except FileNotFoundError:
            return found
        except (OSError, StreamdError) as error:
            raise Unavailable(str(self._path), str(error)) from error
        return found

    def has(self, namespace: str, name: str) -> bool:
        """Say whether something of that name is there. Raises: `Unavailable`."""
        try:
            with self._inside(namespace, name) as inner:
                inner.stat(f"{name}{_SUFFIX}")
        except FileNotFoundError:
            return False
        except (OSError, StreamdError) as error:
            raise Unavailable(self.where(namespace, name), str(error)) from error
        return True

    def read(self, namespace: str, name: str) -> dict[str, object] | None:
        """Read a file; None when there is no such file. Raises: `InvalidObject`, `Unavailable`."""
        where = self.where(namespace, name)
        try:
            with self._inside(namespace, name) as inner:
                fd = inner.open_file(f"{name}{_SUFFIX}", os.O_RDONLY)
        except FileNotFoundError:
            return None
        except (OSError, StreamdError) as error:
            if isinstance(error, OSError) and error.errno == errno.ELOOP:
                raise InvalidObject(where, ("is a link; links aren't followed",)) from error
            raise Unavailable(where, str(error)) from error
        with open(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise InvalidObject(where, ("isn't a regular file",))
            data = file.read(MAX_BYTES + 1)
        try:
            value = json.loads(data) if len(data) <= MAX_BYTES else None
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise InvalidObject(where, (f"isn't a JSON object of {MAX_BYTES} bytes at most",))
        return value

    def write(self, namespace: str, name: str, content: Mapping[str, object]) -> None:
        """Write a file, durably, in the place of what was there. Raises: `InvalidObject`: too large; `Unavailable`."""
        where = self.where(namespace, name)
        if not _is_file_name(name):
            raise InvalidObject(where, (f"metadata.name: can't be kept in a file: {name[:80]!r}",))
        data = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
        if len(data) > MAX_BYTES:
            raise InvalidObject(where, (f"takes {len(data)} bytes, more than {MAX_BYTES}",))
        temporary = f".{name}.new"
        try:
            with (
                SafeDirectory.open(self._path, make=True) as directory,
                directory.open_directory(namespace or _CLUSTER, make=True) as inner,
            ):
                inner.unlink(temporary, missing_ok=True)
                fd = inner.open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with open(fd, "wb", buffering=0) as file:
                    view = memoryview(data)
                    while view:
                        view = view[file.write(view) :]
                    os.fsync(fd)
                inner.rename(temporary, f"{name}{_SUFFIX}")
                os.fsync(inner.fd)
                os.fsync(directory.fd)
        except (OSError, StreamdError) as error:
            raise Unavailable(where, str(error)) from error

    def remove(self, namespace: str, name: str) -> None:
        """Remove a file, if it is there, durably. Raises: `Unavailable`."""
        try:
            with self._inside(namespace, name) as inner:
                inner.unlink(f"{name}{_SUFFIX}", missing_ok=True)
                os.fsync(inner.fd)
        except FileNotFoundError:
            return
        except (OSError, StreamdError) as error:
            raise Unavailable(self.where(namespace, name), str(error)) from error

    def _inside(self, namespace: str, name: str) -> SafeDirectory:
        if not _is_file_name(name) or not (not namespace or is_namespace(namespace)):
            raise FileNotFoundError(name)
        with SafeDirectory.open(self._path) as directory:
            return directory.open_directory(namespace or _CLUSTER)


def _is_file_name(name: str) -> bool:
    return len(name) <= MAX_NAME_CHARS and is_name(name)
