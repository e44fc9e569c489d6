"""`make demo` shows the main job, and leaves nothing behind, also when it is interrupted."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

_REPOSITORY = Path(__file__).parents[2]
_END_S = 90.0


@pytest.fixture
def demo(short_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Start a small demo in a process group of its own, all of its files under `short_path`."""

    def start(*arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "bench.demo", "--heap", "64", *arguments],
            cwd=_REPOSITORY,
            env={**os.environ, "TMPDIR": str(short_path), "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,
        )

    return start


def leftovers(directory: Path) -> list[str]:
    """Give what a demo under `directory` left: files, mounts, processes."""
    needle = os.fsencode(directory)
    found = [str(path) for path in directory.iterdir()]
    found += [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(directory) in line]
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue
            if needle in command or needle in environment:
                found.append(f"process {entry.name}: {command!r}")
    return found


@pytest.mark.parametrize("store", ["file", "gs"])
def test_the_demo_shows_both_restores_with_the_memory_intact(
    store: str, demo: Callable[..., subprocess.Popen[str]], short_path: Path
) -> None:
    with demo("--store", store) as process:
        said, _ = process.communicate(timeout=_END_S)
    assert process.returncode == 0, said
    assert "first request answered" in said
    assert "NO" not in said
    assert leftovers(short_path) == []


# What the demo is doing when the signal comes: the beginning of the line that it prints before it does it.
STAGES = [
    "runsc run",
    "runsc checkpoint",
    "streamd push",
    "streamd mount",
    "runsc restore --background --detach --image-path MNT",
    "streamd umount",
    "streamd pull",
    "runsc restore --background --detach --image-path COPY",
]


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.replace(" --background --detach --image-path", ""))
def test_an_interrupted_demo_leaves_nothing_behind(
    stage: str, demo: Callable[..., subprocess.Popen[str]], short_path: Path
) -> None:
    with demo() as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(f"$ {stage}"):
                break
        # SIGTERM as a supervisor sends it, to the process; Ctrl-C on a terminal, to all of its group.
        if STAGES.index(stage) % 2:
            process.terminate()
        else:
            os.killpg(process.pid, signal.SIGINT)
        said, _ = process.communicate(timeout=_END_S)
    assert process.returncode == 130, said
    assert "interrupted" in said
    assert leftovers(short_path) == []
