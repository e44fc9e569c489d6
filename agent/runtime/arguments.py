"""runsc's command lines, as values (pure).

Every flag that this project passes to runsc is written here and nowhere else, so that a new runsc means reading one
module (`tests/runtime` holds each flag against the `--help` of the real binary). Flags are spelled `--name=value`: Go's
`flag` package takes a boolean in that form only.

A command line is `runsc GLOBAL… VERB FLAGS… ARGUMENTS…`; `global_flags` gives the first part, the functions below the
rest.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Network = Literal["none", "sandbox", "host"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalOptions:
    """What holds for every call on one runsc root.

    `network`, `overlay2` and `directfs` become part of an image: a restore must use what the save used (gVisor refuses
    another network mode and fails on another directfs). None leaves runsc's default (overlay2: `root:self`, which keeps
    the upper layer of a writable root in a file inside that root; directfs: on).

    `debug_log_dir`: where sandboxes write gVisor's own log, one file per sandbox and command; the line that
    `loading.py` reads is there and nowhere else. The directory must exist.
    `ignore_cgroups`: for machines whose cgroups are not ours to change (containers, test machines).
    """

    root: Path
    network: Network = "sandbox"
    overlay2: str | None = None
    directfs: bool | None = None
    debug_log_dir: Path | None = None
    ignore_cgroups: bool = False
    extra: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GpuTool:
    """NVIDIA's `cuda-checkpoint`, by its path inside the container; `sequential`: one process after another.

    gVisor runs it in the sandbox, before and after the save, for each process that has a GPU open, and does not bound
    its time (gVisor pkg/sentry/control/state_cuda.go). The image keeps both values: a restore needs no flags.
    """

    path: str
    sequential: bool = False


def global_flags(options: GlobalOptions) -> list[str]:
    """Give the flags that precede the verb."""
    flags = [f"--root={options.root}", f"--network={options.network}"]
    if options.overlay2 is not None:
        flags.append(f"--overlay2={options.overlay2}")
    if options.directfs is not None:
        flags.append(f"--directfs={_boolean(options.directfs)}")
    if options.debug_log_dir is not None:
        # With a trailing slash runsc names the files itself: runsc.log.TIME.VERB.txt.
        flags.append(f"--debug-log={options.debug_log_dir}/")
    if options.ignore_cgroups:
        flags.append("--ignore-cgroups=true")
    return [*flags, *options.extra]


def log_flags(log: str) -> list[str]:
    """Send a call's errors, as JSON objects, to the file `log`: the standard streams may be the container's."""
    return [f"--log={log}", "--log-format=json"]


def create(container_id: str, bundle: Path) -> list[str]:
    return ["create", f"--bundle={bundle}", container_id]


def start(container_id: str) -> list[str]:
    return ["start", container_id]


def run(container_id: str, bundle: Path, *, detach: bool) -> list[str]:
    return ["run", f"--bundle={bundle}", f"--detach={_boolean(detach)}", container_id]


def checkpoint(
    container_id: str,
    image_dir: Path,
    *,
    leave_running: bool,
    exclude_committed_zero_pages: bool,
    direct: bool,
    gpu_tool: GpuTool | None = None,
) -> list[str]:
    """Save uncompressed, always: only that is written as pages.img, which can be restored in the background."""
    tool = []
    if gpu_tool is not None:
        sequential = _boolean(gpu_tool.sequential)
        tool = [f"--cuda-checkpoint-path={gpu_tool.path}", f"--cuda-checkpoint-sequential={sequential}"]
    return [
        "checkpoint",
        f"--image-path={image_dir}",
        "--compression=none",
        f"--leave-running={_boolean(leave_running)}",
        f"--exclude-committed-zero-pages={_boolean(exclude_committed_zero_pages)}",
        f"--direct={_boolean(direct)}",
        *tool,
        container_id,
    ]


def restore(
    container_id: str, bundle: Path, image_dir: Path, *, background: bool, direct: bool, detach: bool
) -> list[str]:
    return [
        "restore",
        f"--bundle={bundle}",
        f"--image-path={image_dir}",
        f"--background={_boolean(background)}",
        f"--direct={_boolean(direct)}",
        f"--detach={_boolean(detach)}",
        container_id,
    ]


def wait(container_id: str) -> list[str]:
    return ["wait", container_id]


def wait_restore(container_id: str) -> list[str]:
    return ["wait", "--restore", container_id]


def wait_checkpoint(container_id: str) -> list[str]:
    return ["wait", "--checkpoint", container_id]


def pause(container_id: str) -> list[str]:
    return ["pause", container_id]


def resume(container_id: str) -> list[str]:
    return ["resume", container_id]


def kill(container_id: str, signal: str, *, everything: bool) -> list[str]:
    return ["kill", f"--all={_boolean(everything)}", container_id, signal]


def delete(container_id: str, *, force: bool) -> list[str]:
    return ["delete", f"--force={_boolean(force)}", container_id]


def state(container_id: str) -> list[str]:
    return ["state", container_id]


def list_containers() -> list[str]:
    return ["list", "--format=json"]


def execute(container_id: str, argv: Sequence[str], *, env: Mapping[str, str], cwd: str | None) -> list[str]:
    """Run `argv` in a container; a flag per variable, since runsc splits nothing."""
    flags: Iterable[str] = (f"--env={name}={value}" for name, value in env.items())
    where = [] if cwd is None else [f"--cwd={cwd}"]
    return ["exec", *flags, *where, container_id, *argv]


def version() -> list[str]:
    return ["--version"]


def help_for(verb: str) -> list[str]:
    return ["help", verb]


def cpu_features() -> list[str]:
    return ["cpu-features"]


def print_state_file(path: Path) -> list[str]:
    """Print the object graph of a checkpoint.img, which fails unless the graph is whole."""
    return ["statefile", f"{path}"]


def supported_gpu_drivers() -> list[str]:
    return ["nvproxy", "list-supported-drivers"]


def _boolean(value: bool) -> str:
    return "true" if value else "false"
