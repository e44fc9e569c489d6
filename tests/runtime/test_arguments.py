"""The command lines that runsc gets."""

import subprocess
from pathlib import Path

import pytest

from agent.runtime import arguments
from agent.runtime.arguments import GlobalOptions, GpuTool

BUNDLE, IMAGE = Path("/b"), Path("/i")
EVERYTHING = GlobalOptions(
    root=Path("/r"),
    network="none",
    overlay2="root:self",
    directfs=False,
    debug_log_dir=Path("/log"),
    ignore_cgroups=True,
    extra=("--platform=systrap",),
)
VECTORS = {
    "create": arguments.create("id", BUNDLE),
    "start": arguments.start("id"),
    "run": arguments.run("id", BUNDLE, detach=True),
    "checkpoint": arguments.checkpoint(
        "id",
        IMAGE,
        leave_running=True,
        exclude_committed_zero_pages=True,
        direct=False,
        gpu_tool=GpuTool("/cuda-checkpoint", sequential=True),
    ),
    "restore": arguments.restore("id", BUNDLE, IMAGE, background=True, direct=True, detach=True),
    "wait": arguments.wait("id"),
    "wait --restore": arguments.wait_restore("id"),
    "wait --checkpoint": arguments.wait_checkpoint("id"),
    "pause": arguments.pause("id"),
    "resume": arguments.resume("id"),
    "kill": arguments.kill("id", "TERM", everything=True),
    "delete": arguments.delete("id", force=True),
    "state": arguments.state("id"),
    "list": arguments.list_containers(),
    "exec": arguments.execute("id", ["ls", "-l"], env={"A": "b"}, cwd="/"),
    "cpu-features": arguments.cpu_features(),
}


def flag_names(vector: list[str]) -> set[str]:
    """Give the names of the flags that are ours: those before the container's id."""
    own = vector[: vector.index("id")] if "id" in vector else vector
    return {word.removeprefix("--").partition("=")[0] for word in own if word.startswith("--")}


def test_each_choice_about_a_restore_is_told_to_runsc() -> None:
    assert arguments.restore("id", BUNDLE, IMAGE, background=True, direct=False, detach=True) == [
        "restore",
        "--bundle=/b",
        "--image-path=/i",
        "--background=true",
        "--direct=false",
        "--detach=true",
        "id",
    ]


def test_a_checkpoint_is_never_compressed_by_gvisor() -> None:
    assert "--compression=none" in VECTORS["checkpoint"]


def test_a_command_in_a_container_keeps_its_own_flags_behind_the_id() -> None:
    assert VECTORS["exec"] == ["exec", "--env=A=b", "--cwd=/", "id", "ls", "-l"]


def test_an_option_that_is_not_set_leaves_runsc_its_default() -> None:
    assert arguments.global_flags(GlobalOptions(root=Path("/r"))) == ["--root=/r", "--network=sandbox"]


def test_all_global_options_come_before_the_verb_in_full() -> None:
    assert arguments.global_flags(EVERYTHING) == [
        "--root=/r",
        "--network=none",
        "--overlay2=root:self",
        "--directfs=false",
        "--debug-log=/log/",
        "--ignore-cgroups=true",
        "--platform=systrap",
    ]


@pytest.mark.parametrize("name", VECTORS)
def test_this_runsc_knows_the_command_and_every_flag_of_it(name: str, runsc_binary: Path) -> None:
    vector = VECTORS[name]
    known = documented_flags(runsc_binary, "help", vector[0])
    assert flag_names(vector) <= known


def test_this_runsc_knows_every_global_flag(runsc_binary: Path) -> None:
    flags = [*arguments.global_flags(EVERYTHING), *arguments.log_flags("/f")]
    assert flag_names(flags) <= documented_flags(runsc_binary, "flags")


def documented_flags(binary: Path, *question: str) -> set[str]:
    """Give the flags that runsc's help lists; each stands at the beginning of a line, after two blanks."""
    done = subprocess.run([binary, *question], capture_output=True, text=True, timeout=30, check=True)
    lines = (done.stdout + done.stderr).splitlines()
    return {line.split()[0].lstrip("-") for line in lines if line.startswith("  -")}
