"""What gVisor itself says about a background load (pure).

A sandbox that was restored with `--background` writes one line to its debug log when all of its memory is there
(gVisor `pkg/sentry/pgalloc/save_restore.go`, `asyncPagesFileLoad`); no metric and no event says the same. In it,
"waited A~B" means: for A of wall time at least one thread waited for memory, and the waits of all threads add up to B.
"""

import re
from dataclasses import dataclass

# Go prints a duration as a run of number-and-unit pairs without spaces: 1m2.5s, 450ms, 12µs, 0s (time.Duration.String).
_UNIT_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = r"(?:\d+(?:\.\d+)?(?:ns|us|µs|μs|ms|s|m|h))+"
_PART = re.compile(r"(\d+(?:\.\d+)?)(ns|us|µs|μs|ms|s|m|h)")
_COMPLETED = re.compile(
    rf"Async page loading completed in (?P<took>{_DURATION}) \((?P<loaded>\d+) bytes, [^)]*\); "
    rf"(?P<waiters>\d+) waiters waited (?P<union>{_DURATION})~(?P<sum>{_DURATION}) for (?P<awaited>\d+) bytes"
)
_FAILED = re.compile(r"Async page loading failed: (?P<why>.*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class PageLoading:
    """One finished background load.

    `took_s`: from the first read to the last, seconds. `loaded_bytes`: what was read of pages.img; less than its size
    when the application freed memory before it was loaded. `waiters`: how often a thread had to wait for memory.
    `stopped_s`: wall time during which at least one thread waited; `waited_s`: the waits of all threads, added.
    `awaited_bytes`: the memory they waited for.
    """

    took_s: float
    loaded_bytes: int
    waiters: int
    stopped_s: float
    waited_s: float
    awaited_bytes: int


def parse_duration(text: str) -> float:
    """Give the seconds in a Go duration such as `1m2.5s`.

    Raises: ValueError when `text` is not one.
    """
    if not re.fullmatch(_DURATION, text):
        raise ValueError(f"not a Go duration: {text!r}")
    # Go counts nanoseconds; what lies below them is floating point noise.
    return round(sum(float(number) * _UNIT_S[unit] for number, unit in _PART.findall(text)), 9)


def find_completed(log: str) -> PageLoading | None:
    """Find the last finished load in a debug log; None while there is none."""
    found = list(_COMPLETED.finditer(log))
    if not found:
        return None
    last = found[-1]
    return PageLoading(
        took_s=parse_duration(last["took"]),
        loaded_bytes=int(last["loaded"]),
        waiters=int(last["waiters"]),
        stopped_s=parse_duration(last["union"]),
        waited_s=parse_duration(last["sum"]),
        awaited_bytes=int(last["awaited"]),
    )


def find_failed(log: str) -> str | None:
    """Find why a load failed; gVisor kills the sandbox after this line."""
    match = _FAILED.search(log)
    return None if match is None else match["why"].strip()
