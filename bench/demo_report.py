"""What the demo found, as values, and the table that a person reads."""

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from agent.runtime.loading import PageLoading

MB = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """The checkpoint and its way into the store; sizes in bytes, times in seconds."""

    heap_bytes: int
    image_bytes: int
    stored_bytes: int
    checkpoint_s: float
    push_s: float
    memory_hash: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """One restore. Times are seconds from the moment somebody wanted the server back.

    `ready_s`: the image can be read (mounted, or copied). `first_s`, `many_s`: the first answer and the last of
    `requests`. `loaded_s`: all memory is there. `read_bytes`, `fetched_bytes`: what runsc had read of the image, and
    what had come from the store (as stored), at the first answer. `faults`, `fault_wait_s`, `longest_fault_s`: reads
    for stopped threads that the mount saw, how long they waited together, and the longest; None without a mount.
    """

    ready_s: float
    running_s: float
    first_s: float
    many_s: float
    requests: int
    loaded_s: float
    read_bytes: int | None
    fetched_bytes: int
    origin_bytes: int
    faults: int | None
    fault_wait_s: float
    longest_fault_s: float
    loading: PageLoading | None
    answers_right: bool
    memory_hash: str


def show(console: Console, link: str, saved: Saved, lazy: Restored, copied: Restored) -> None:
    """Print the two restores beside each other."""
    console.print()
    stored = f"{_mb(saved.stored_bytes)} ({_percent(saved.stored_bytes, saved.image_bytes)} of the image)"
    console.print(
        f"image   {_mb(saved.image_bytes)}, of a heap of {_mb(saved.heap_bytes)}; saved in {saved.checkpoint_s:.1f} s"
    )
    console.print(f"pushed  {stored} in {saved.push_s:.1f} s")
    console.print(f"store   {link}")
    table = Table(title="Restoring the server, from the moment when it is wanted", title_justify="left")
    table.add_column("")
    table.add_column("from the mount, lazily", justify="right")
    table.add_column("copy first, then restore", justify="right")
    both = (lazy, copied)
    rows: list[tuple[str, list[str]]] = [
        ("image mounted / copied", [f"{r.ready_s:.2f} s" for r in both]),
        ("sandbox runs again", [f"{r.running_s:.2f} s" for r in both]),
        ("[bold]first request answered[/]", [f"[bold]{r.first_s:.2f} s[/]" for r in both]),
        ("by then: read of the image", [_share(r.read_bytes, saved.image_bytes) for r in both]),
        ("by then: fetched of what is stored", [_share(r.fetched_bytes, saved.stored_bytes) for r in both]),
        (f"{lazy.requests} requests answered", [f"{r.many_s:.2f} s" for r in both]),
        ("all memory loaded", [f"{r.loaded_s:.2f} s" for r in both]),
        ("fetched in the end", [_share(r.origin_bytes, saved.stored_bytes) for r in both]),
        ("faults that the mount saw", [_faults(r) for r in both]),
        ("gVisor's line: threads waiting", [_gvisor(r.loading) for r in both]),
        ("all answers right", [_verdict(r.answers_right) for r in both]),
        ("SHA-256 of the memory", [r.memory_hash[:16] + "…" for r in both]),
        (
            f"  is the original's, {saved.memory_hash[:16]}…",
            [_verdict(r.memory_hash == saved.memory_hash) for r in both],
        ),
    ]
    for name, values in rows:
        table.add_row(name, *values)
    console.print(table)
    left = saved.stored_bytes - lazy.fetched_bytes
    if left * 20 < saved.stored_bytes:
        console.print("The store was faster than the sandbox: nearly everything was there before the first request.")
    else:
        console.print(
            f"From the mount the first request was answered in 1/{copied.first_s / lazy.first_s:.1f} of the time, with "
            f"{_percent(left, saved.stored_bytes)} of the snapshot still in the store."
        )


def is_good(saved: Saved, *restores: Restored) -> bool:
    """Say whether every restore gave the memory back."""
    return all(r.answers_right and r.memory_hash == saved.memory_hash for r in restores)


def _mb(count: int) -> str:
    return f"{count / MB:.0f} MB"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "–"


def _share(part: int | None, whole: int) -> str:
    return "–" if part is None else f"{_mb(part)} ({_percent(part, whole)})"


def _faults(restored: Restored) -> str:
    if restored.faults is None:
        return "–"
    longest_ms = 1000 * restored.longest_fault_s
    return f"{restored.faults}, waited {restored.fault_wait_s:.2f} s together, {longest_ms:.0f} ms at most"


def _gvisor(loading: PageLoading | None) -> str:
    if loading is None:
        return "not said"
    return f"{loading.waiters} waited {loading.stopped_s:.2f} s for {_mb(loading.awaited_bytes)}"


def _verdict(good: bool) -> str:
    return "[green]yes[/]" if good else "[red bold]NO[/]"
