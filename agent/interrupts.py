"""Signals that end a command: as `KeyboardInterrupt` where it can be unwound, held back where it can't.

A clean-up that is interrupted leaves sandboxes and mounts behind. So a command holds signals while something has no
owner yet, and again from the first step of its clean-up on.
"""

import signal
from types import FrameType

from streamd.lost_interrupts import tell_again

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """The ending signals of this process, from now on; one for a process. `terminated`: it was SIGTERM or SIGHUP."""

    def __init__(self) -> None:
        self._held = False
        self._came = False
        self.terminated = False
        for number in _ENDING:
            signal.signal(number, self._on_signal)
        tell_again()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self.terminated |= number != signal.SIGINT
        self._came = True
        if not self._held:
            raise KeyboardInterrupt

    def hold(self) -> None:
        """From here on only remember a signal."""
        self._held = True

    def release(self) -> None:
        """Let signals through again. Raises: `KeyboardInterrupt` when one came meanwhile."""
        self._held = False
        if self._came:
            raise KeyboardInterrupt
