"""What the commands about pods share: pods from manifests, and the agent's objects from its two directories."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from agent.config import load
from agent.errors import AgentError
from agent.podspec.distil import distil
from agent.podspec.manifests import MAX_CHARS, read_manifests
from agent.podspec.shapes import PodSpecError, Value
from agent.podspec.workloads import WORKLOAD_KINDS, Workload, workload_of
from streamd.errors import Exit

if TYPE_CHECKING:
    from agent.kube.directory import ObjectDirectory

# UTF-8 takes four bytes a character at most.
_MAX_BYTES = 4 * MAX_CHARS
_SUFFIXES = (".yaml", ".yml", ".json")
_STDIN = "-"

F = TypeVar("F", bound=Callable[..., Any])


class InputMissing(AgentError):
    """What a command was told to read isn't there, or holds nothing of use to it."""

    ends_with, kind = Exit.NOT_FOUND, "not-found"


class InputUnreadable(AgentError):
    """The operating system doesn't let us read it."""

    ends_with, kind = Exit.NOT_PERMITTED, "not-permitted"


@dataclass(frozen=True, slots=True)
class Found:
    """A workload and the file that it is in."""

    source: str
    workload: Workload

    def distilled(self, index: int | None = None) -> dict[str, Value]:
        """Distil its pod of an index (the first). Raises: `PodSpecError`, which names the file."""
        try:
            return distil(self.workload.pod(index))
        except PodSpecError as error:
            raise PodSpecError(f"{self.source}: {self.workload}: {error.path}", error.why) from error


def namespace_option(function: F) -> F:
    """Add `--namespace`."""
    return click.option(
        "-n",
        "--namespace",
        default="default",
        show_default=True,
        help="The namespace of manifests that name none.",
    )(function)


def index_option(function: F) -> F:
    """Add `--index`."""
    return click.option(
        "--index",
        type=click.IntRange(min=0),
        help="Which replica, where each differs: of a StatefulSet with claim templates, of an Indexed Job [the first].",
    )(function)


def files_option(function: F) -> F:
    """Add `--files`."""
    return click.option(
        "--files",
        type=click.Path(path_type=Path, readable=False),
        help="Where policies and storage configs are written down [as the settings say].",
    )(function)


def state_option(function: F) -> F:
    """Add `--snapshots`."""
    return click.option(
        "--snapshots",
        "state",
        type=click.Path(path_type=Path, readable=False),
        help="The agent's state directory, which has the PodSnapshots [as the settings say].",
    )(function)


def config_option(function: F) -> F:
    """Add `--config`."""
    return click.option(
        "--config", "config_path", type=click.Path(path_type=Path), help="Settings [/etc/snapagent.toml]."
    )(function)


def snapshots_in(state: Path | None, config_path: Path | None) -> "ObjectDirectory":
    """Open the agent's state directory, by default that of its settings, for snapshots. Raises: as `objects_in`."""
    state = state or load(config_path).state_directory
    return _opened(state, state)


def objects_in(state: Path | None, files: Path | None, config_path: Path | None) -> "ObjectDirectory":
    """Open the agent's directories, by default those of its settings, which aren't read where both are given.

    Raises: `ConfigError`; `InputMissing`: a mistyped one must not pass for one without objects; `InputUnreadable`.
    """
    if state is None or files is None:
        config = load(config_path)
        state, files = state or config.state_directory, files or config.objects_directory
    return _opened(state, files)


def _opened(state: Path, files: Path) -> "ObjectDirectory":
    from agent.kube.directory import ObjectDirectory

    here = "that is the agent's, on its node"
    for path, option in {files: "--files", state: "--snapshots"}.items():
        if not path.is_dir():
            raise InputMissing(f"{path}: no such directory ({here}); {option} names another one, or a copy")
        if not os.access(path, os.R_OK | os.X_OK):
            raise InputUnreadable(f"{path}: Permission denied ({here}); run this with sudo, or name a copy: {option}")
    return ObjectDirectory(files.absolute(), state.absolute())


def read_text(path: str) -> str:
    """Read a text file, or standard input for `-`. Raises: `InputMissing`, `InputUnreadable`, `PodSpecError`."""
    try:
        if path == _STDIN:
            data = sys.stdin.buffer.read(_MAX_BYTES + 1)
        else:
            with open(path, "rb") as file:
                data = file.read(_MAX_BYTES + 1)
        return data.decode("utf-8-sig")
    except FileNotFoundError as error:
        raise InputMissing(f"{path}: {error.strerror}") from error
    except IsADirectoryError as error:
        raise InputMissing(f"{path}: is a directory; name its files ({path.rstrip('/')}/*.yaml)") from error
    except OSError as error:
        raise InputUnreadable(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise PodSpecError(path, "not UTF-8") from error


def is_manifest(name: str) -> bool:
    """Say whether an argument means a file of manifests, and not an object of that name."""
    return name == _STDIN or name.endswith(_SUFFIXES) or os.sep in name


def read_workloads(path: str, *, namespace: str, is_lenient: bool = False) -> list[Found]:
    """Give the workloads of a file; other objects are passed over.

    `is_lenient`: so are documents that are no Kubernetes objects, such as a chart's values. Raises: as `read_text`.
    """
    manifests = read_manifests(read_text(path), path)
    if is_lenient:
        manifests = tuple(each for each in manifests if "kind" in each and "apiVersion" in each)
    found = (workload_of(each, path, namespace=namespace) for each in manifests)
    return [Found(path, workload) for workload in found if workload is not None]


def no_workload(paths: Iterable[str]) -> InputMissing:
    """Say that nothing in these files makes pods."""
    names = ", ".join("standard input" if path == _STDIN else path for path in paths)
    return InputMissing(f"{names}: nothing there makes pods; what does: {', '.join(WORKLOAD_KINDS)}")


def one_workload(path: str, *, namespace: str) -> Found:
    """Give the one workload of a file. Raises: as `read_text`; `InputMissing`: there is none, or more than one."""
    found = read_workloads(path, namespace=namespace)
    if not found:
        raise no_workload([path])
    if len(found) > 1:
        names = ", ".join(str(each.workload) for each in found)
        raise InputMissing(f"{path}: holds {names}; give a file with one of them")
    return found[0]


def manifest_files(directory: str) -> Iterator[str]:
    """Give the manifests below a directory, in the order of their names; hidden ones and links are passed over.

    Raises: `InputMissing`, `InputUnreadable`.
    """
    if not os.path.isdir(directory):
        raise InputMissing(f"{directory}: no such directory")

    def refuse(error: OSError) -> None:
        raise InputUnreadable(f"{error.filename}: {error.strerror}") from error

    for parent, directories, names in os.walk(directory, onerror=refuse):
        directories[:] = sorted(name for name in directories if not name.startswith("."))
        for name in sorted(names):
            path = os.path.join(parent, name)
            if name.endswith(_SUFFIXES) and not name.startswith(".") and not os.path.islink(path):
                yield path


def say(line: str) -> None:
    """Print a line for people; what could control a terminal is escaped."""
    click.echo("".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in line))
