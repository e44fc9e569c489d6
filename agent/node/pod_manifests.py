"""Pods from manifests in a directory, for nodes without an API server: blocking calls, for one thread at a time.

A file that hasn't changed isn't read again. Nothing here trusts what lies there: links aren't followed, sizes and
numbers are bounded, and a file with a problem is passed over, and told of, while the others keep working.
"""

import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import structlog
import trio

from agent.errors import AgentError
from agent.kube.user_files import written_by_others
from agent.node.pods import Identity, Pod, PodUnknown, identity, pod_of_bundle
from agent.podspec.manifests import MAX_CHARS, read_manifests
from agent.podspec.workloads import Workload, workload_of
from agent.wrapper.protocol import ContainerKind, Create
from streamd.errors import StreamdError
from streamd.safe_paths import SafeDirectory

log = structlog.get_logger(__name__)

_SUFFIXES = (".yaml", ".yml", ".json")
_MAX_FILES = 1000

Signature = tuple[int, int, int, int]


class PodManifests:
    """The manifests of one directory."""

    def __init__(self, directory: Path) -> None:
        self._path = directory
        self._read_files: dict[str, tuple[Signature, tuple[Workload, ...]]] = {}

    def find(self, who: Identity) -> Pod | None:
        """Give the Pod of that name, else what the one workload makes whose pods have such names; None: there is none.

        Raises: `PodUnknown` when several could have made it.
        """
        found = [each for each in self._workloads() if each.namespace == who.namespace and each.makes(who.name)]
        exact = [each for each in found if each.kind == "Pod"]
        if len(exact or found) > 1:
            names = ", ".join(sorted(str(each) for each in exact or found))
            raise PodUnknown(f"several manifests could have made it: {names}")
        for each in exact or found:
            pod = each.pod(each.index_of(who.name))
            metadata = pod["metadata"]
            assert isinstance(metadata, Mapping)
            return {**pod, "metadata": {**metadata, "name": who.name, "namespace": who.namespace, "uid": who.uid}}
        return None

    def _workloads(self) -> Iterator[Workload]:
        try:
            with SafeDirectory.open(self._path) as directory:
                names = sorted(name for name in directory.names() if name.endswith(_SUFFIXES) and name[0] != ".")
                kept, self._read_files = self._read_files, {}
                for name in names[:_MAX_FILES]:
                    self._read_files[name] = self._file(directory, name, kept.get(name))
        except FileNotFoundError:
            self._read_files = {}
        except (OSError, StreamdError) as error:
            log.warning("pods' manifests can't be read", directory=str(self._path), error=str(error))
        for _, workloads in self._read_files.values():
            yield from workloads

    def _file(
        self, directory: SafeDirectory, name: str, kept: tuple[Signature, tuple[Workload, ...]] | None
    ) -> tuple[Signature, tuple[Workload, ...]]:
        signature: Signature = (0, 0, 0, 0)
        where = str(self._path / name)
        try:
            fd = directory.open_file(name, os.O_RDONLY)
            with open(fd, "rb") as file:
                info = os.fstat(fd)
                signature = info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns
                if kept is not None and kept[0] == signature:
                    return kept
                if not stat.S_ISREG(info.st_mode):
                    raise AgentError("it isn't a regular file")
                if others := written_by_others(info):
                    raise AgentError(f"it {others}")
                text = file.read(MAX_CHARS + 1).decode()
            found = (workload_of(each, where) for each in read_manifests(text, where))
            return signature, tuple(each for each in found if each is not None)
        except (AgentError, OSError, UnicodeDecodeError) as error:
            log.warning("a manifest is passed over", file=where, error=str(error))
            return signature, ()


class LocalPods:
    """The port `Pods` without an API server."""

    def __init__(self, directory: Path) -> None:
        self._manifests = PodManifests(directory)
        self._one_at_a_time = trio.CapacityLimiter(1)

    async def find(self, request: Create, spec: Mapping[str, Any]) -> Pod:
        who = identity(request, spec)
        pod = await trio.to_thread.run_sync(self._manifests.find, who, limiter=self._one_at_a_time)
        if pod is not None:
            return pod
        if request.kind is not ContainerKind.SINGLE:
            raise PodUnknown(f"no manifest of pod {who} is in pods/ of the objects directory")
        return pod_of_bundle(request, spec)
