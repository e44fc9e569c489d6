"""What a process has, and what it may have: nothing must grow."""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from bench.report import anonymous_bytes


@dataclass(frozen=True, slots=True)
class Facts:
    """What a process has; nothing when it has ended."""

    descriptors: int
    threads: int
    anonymous_bytes: int

    @staticmethod
    def of(pid: int) -> "Facts":
        """Look."""
        process = Path(f"/proc/{pid}")
        with contextlib.suppress(OSError):
            return Facts(len(os.listdir(process / "fd")), len(os.listdir(process / "task")), anonymous_bytes(pid))
        return Facts(0, 0, 0)

    def check(self, limits: tuple[int, int, int], whose: str) -> None:
        """Compare with what it may have. Raises: `AssertionError`."""
        for name, value, limit in zip(
            ("descriptors", "threads", "bytes"),
            (self.descriptors, self.threads, self.anonymous_bytes),
            limits,
            strict=True,
        ):
            assert value <= limit, f"{whose} has {value} {name}"
