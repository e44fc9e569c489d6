"""Triggers that `snapagent snapshot` asks for: files in the objects directory, as a person would write them.

So there is one way in which a trigger comes to the agent, and what is asked for stays to be seen. Files that were made
here are known by their name, and only they are removed.

Who waits for a trigger goes away with the agent, and has said so. So it must not fire in the agent's next life, perhaps
hours later: what nothing was begun for is taken back at the start.
"""

import json
import os
import uuid
from collections.abc import Mapping, Set
from pathlib import Path

import trio

from agent.errors import AgentError
from agent.kube.conditions import ConditionType, condition
from agent.kube.errors import NotFound
from agent.kube.meta import is_name, is_namespace
from agent.kube.objects import API_VERSION, Kind, PodSnapshotManualTrigger
from agent.kube.port import Objects
from agent.node.course import Ending
from agent.node.events import Events, What
from agent.node.known_objects import KnownObjects, Named, is_pending
from agent.node.pods_here import PodHere, PodsHere
from agent.node.triggers import POST_CHECKPOINT
from streamd.errors import Exit, StreamdError
from streamd.safe_paths import SafeDirectory

_PREFIX = "by-hand-"

Json = dict[str, object]


class CantTrigger(AgentError):
    """The trigger can't be written."""

    ends_with, kind = Exit.REFUSED, "cant-trigger"


class HandTriggers:
    """Writes them and says what has become of them. `waiting`: why triggers can't be acted on now."""

    def __init__(
        self,
        directory: Path,
        objects: Objects,
        known: KnownObjects,
        here: PodsHere,
        events: Events,
        *,
        waiting: Mapping[Named, str],
    ) -> None:
        self._directory = directory
        self._objects = objects
        self._known = known
        self._here = here
        self._events = events
        self._waiting = waiting
        self._written: set[str] = set()  # files of this life

    async def at_start(self) -> None:
        """Take back what a former life has left, but for triggers whose saves it has begun; before any is acted on.

        One whose status is lost, or can't be read, is not known to have been begun. Raises: `AgentError`: not done yet.
        """
        await self._known.synced()
        listing = await self._objects.list(Kind.TRIGGER)
        pending = {
            f"{each.metadata.name}.json": each
            for each in listing.items
            if isinstance(each, PodSnapshotManualTrigger) and is_pending(each)
        }
        begun = {name for name, each in pending.items() if each.status.snapshot_created}
        taken_back = await trio.to_thread.run_sync(self._take_back, begun | self._written)
        for each in (pending[name] for name in taken_back if name in pending):
            meta = each.metadata
            said = f"{meta.name}: the agent ended before anything was begun for it; ask again"
            self._events.tell(What.TRIGGER_FAILED, "Failed", said, pod=f"{meta.namespace}/{each.target_pod}")
        while True:
            change = self._known.next_change()
            if not any(f"{name}.json" in taken_back for _, name in self._known.triggers):
                return
            await change.wait()

    async def trigger(self, target: str, namespace: str, *, stop: bool) -> Json:
        """Write a trigger for a pod, by its name or by the id of one of its containers. Raises: `NotFound`, …"""
        pod = self._here.named(namespace, target) or self._by_container(target)
        if pod is None:
            raise NotFound(
                f"{namespace}/{target}",
                "no such pod, and no such container, in a sandbox of this node (`snapagent status`)",
            )
        name = f"{_PREFIX}{uuid.uuid4()}"
        annotations = {"annotations": {POST_CHECKPOINT: Ending.STOP.value}} if stop else {}
        document = {
            "apiVersion": API_VERSION,
            "kind": Kind.TRIGGER.value,
            "metadata": {"name": name, "namespace": pod.who.namespace, **annotations},
            "spec": {"targetPod": pod.who.name},
        }
        self._written.add(f"{name}.json")
        await trio.to_thread.run_sync(self._write, f"{name}.json", json.dumps(document, indent=1))
        return {"namespace": pod.who.namespace, "name": name, "pod": pod.who.name}

    def triggered(self, namespace: str, name: str) -> Json:
        """Say what has become of a trigger; it is pending also when it hasn't been read yet."""
        trigger = self._known.triggers.get((namespace, name))
        if trigger is None:
            return {"state": "pending", "snapshot": "", "message": "", "problem": ""}
        found = condition(trigger.status.conditions, ConditionType.TRIGGERED)
        created = trigger.status.snapshot_created
        phase = self._known.phase(namespace, created) if created else None
        return {
            "state": "pending" if found is None else found.reason,
            "snapshot": created,
            "phase": "" if phase is None else phase.value,
            "message": "" if found is None else found.message,
            "problem": self._waiting.get((namespace, name), ""),
        }

    async def untrigger(self, namespace: str, name: str) -> Json:
        """Remove a trigger that was written here."""
        if not name.startswith(_PREFIX) or not is_name(name) or not is_namespace(namespace):
            raise NotFound(f"{namespace[:80]}/{name[:80]}", "no trigger that `snapagent snapshot` has made")
        await trio.to_thread.run_sync(self._remove, f"{name}.json")
        self._written.discard(f"{name}.json")
        return {}

    def _by_container(self, container_id: str) -> PodHere | None:
        return next((pod for pod in self._here if container_id in pod.container_ids.values()), None)

    def _write(self, name: str, text: str) -> None:
        temporary = f".{name}.new"  # the reader passes over hidden files
        try:
            with SafeDirectory.open(self._directory) as directory:
                fd = directory.open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with open(fd, "w") as file:
                    file.write(text)
                directory.rename(temporary, name)
        except (OSError, StreamdError) as error:
            raise CantTrigger(f"{self._directory}: {error}") from error

    def _take_back(self, begun: Set[str]) -> list[str]:
        """Remove the files that were made here, whole ones and half ones, but for these; give the names."""
        try:
            with SafeDirectory.open(self._directory) as directory:
                found = [
                    name
                    for name in directory.names()
                    if name.removeprefix(".").startswith(_PREFIX) and name not in begun
                ]
                for name in found:
                    directory.unlink(name, missing_ok=True)
        except FileNotFoundError:
            return []
        except (OSError, StreamdError) as error:
            raise CantTrigger(f"{self._directory}: {error}") from error
        return found

    def _remove(self, name: str) -> None:
        try:
            with SafeDirectory.open(self._directory) as directory:
                directory.unlink(name, missing_ok=True)
        except (OSError, StreamdError) as error:
            raise CantTrigger(f"{self._directory}: {error}") from error
