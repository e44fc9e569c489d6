"""Mounts of a former life that came back from no fd store: their workers serve on until they are unmounted.

They are taken away once nobody uses them. What is in use stays, and so does what others have mounted.
"""

import os
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

import structlog

from streamd.errors import StreamdError
from streamd.fuse import mountinfo, mounting

log = structlog.get_logger()


class Strays:
    """Those below a directory; its calls block, and come one at a time."""

    def __init__(self, directory: Path) -> None:
        self._prefix = f"{directory}/"
        self._told: set[str] = set()

    def clean_up(self, ours: Callable[[], Collection[str]]) -> None:
        """Take away what can be; `ours` gives the mountpoints of this life.

        It is asked after the kernel's table was: what this life mounts in between isn't in the table yet.
        """
        found = [entry for entry in mountinfo.read() if entry.mountpoint.startswith(self._prefix)]
        living = ours()
        for entry in found:
            if entry.mountpoint in living or not mounting.is_own(entry):
                continue
            try:
                mounting.unmount(entry.mountpoint, entry.device)
            except (StreamdError, OSError):
                if entry.mountpoint not in self._told:
                    self._told.add(entry.mountpoint)
                    log.warning("a worker of a former life still serves", mountpoint=entry.mountpoint)
                continue
            self._told.discard(entry.mountpoint)
            log.info("a mount of a former life was taken away", mountpoint=entry.mountpoint)
            with suppress(OSError):
                os.rmdir(entry.mountpoint)
