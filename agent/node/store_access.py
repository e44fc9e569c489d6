"""Whose credentials a store is asked with: what the configuration names for a pod's namespace or a bucket, else the
node's own.

A token file or a token command is known by its place only: the token itself is fetched when a store is asked, here
for what the agent does itself (manifests, pushes, removals), by streamd for what it serves. Snapshots are known by
their addresses, also when storage config and policy are gone; so it is buckets that credentials are named for.

A directory is somebody's to make: one that isn't there has a file system that isn't mounted, or a typing error in its
name, and what was saved into it would fill the node's own disk. So is one that is empty and had snapshots.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import unquote, urlsplit

from agent.config import StoreCredentials
from agent.node.checkpoint import StoreUploader
from agent.node.jobs import Job
from streamd.errors import Exit, StreamdError, Unreachable
from streamd.save.push import PushResult
from streamd.store.identity import Identity
from streamd.store.opening import open_store
from streamd.store.port import Store
from streamd.store.token_sources import parse_credentials


class NotADirectory(StreamdError):
    """Something else stands where a store's directory should be."""

    exit_code, kind = Exit.NOT_FOUND, "not-a-directory"


class StoreAccess:
    """One for an agent; any thread may use it. `has_snapshots`: whether a store is known to have some."""

    def __init__(self, named: Iterable[StoreCredentials] = ()) -> None:
        self.has_snapshots: Callable[[str], bool] = lambda _: False
        self._named: dict[tuple[str, str], tuple[Mapping[str, object], Identity]] = {}
        for each in named:
            source = parse_credentials(each.given)
            assert source is not None
            self._named[each.namespace, each.bucket] = (each.given, Identity(source))

    def credentials(self, store_url: str, namespace: str = "") -> Mapping[str, object] | None:
        """Give what streamd is to be told for a pod of this namespace ("": for nobody's); None: the node's own."""
        key = self._key(store_url, namespace)
        return None if key is None else self._named[key][0]

    def opened(self, store_url: str, namespace: str = "", *, is_used: bool = False) -> Store:
        """Open a store in the name of a namespace, as `open_store`.

        Raises: as that; `Unreachable`, `NotADirectory`: the directory isn't there, or is another than it was.
        """
        parts = urlsplit(store_url)
        if parts.scheme == "file" and not is_used:  # who reads waits for a store that is away
            is_used = self.has_snapshots(store_url)
            _check_directory(unquote(parts.path), is_used=is_used)
        key = self._key(store_url, namespace)
        return open_store(store_url, tokens=None if key is None else self._named[key][1], is_used=is_used)

    def _key(self, store_url: str, namespace: str) -> tuple[str, str] | None:
        """Find what was named most closely; the namespace counts for more than the bucket."""
        parts = urlsplit(store_url)
        if parts.scheme != "gs":
            return None
        keys = ((namespace, parts.netloc), (namespace, ""), ("", parts.netloc), ("", ""))
        return next((key for key in keys if key in self._named), None)


def _check_directory(path: str, *, is_used: bool) -> None:
    try:
        with os.scandir(path) as entries:
            if is_used and not any(True for _ in entries):
                raise Unreachable(f"{path} is empty, and snapshots were put there: is its file system mounted?")
    except PermissionError:
        return  # whatever is asked for says so
    except NotADirectoryError as error:
        raise NotADirectory(f"{path} is no directory, but a file or below one") from error
    except FileNotFoundError as error:
        raise Unreachable(f"there is no directory {path}: mount its file system, or make it (`mkdir`)") from error
    except OSError as error:
        raise Unreachable(f"the directory {path} can't be read: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class NamespaceUploader:
    """Pushes each job in the name of its pod's namespace."""

    access: StoreAccess
    deadline_s: float

    async def push(self, job: Job, image: Path) -> PushResult:
        opened = partial(self.access.opened, namespace=job.namespace)
        return await StoreUploader(opened, deadline_s=self.deadline_s).push(job, image)
