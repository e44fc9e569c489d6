"""A saved image, before anything depends on it: its numbers add up, its object graph is whole, it is on the disk.

runsc syncs nothing and says "done" of what the page cache holds; and a save that ran out of space leaves files that
look like an image. So nothing is ended, and nothing is pushed, before this.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from agent.errors import AgentError
from agent.node.course import Written
from agent.node.jobs import sync
from agent.runtime.runsc import RunscError
from streamd.errors import StreamdError
from streamd.save.image_dir import check_image_dir
from streamd.snapshot.names import CHECKPOINT, IMAGE_FILES


class ImageNotWhole(AgentError):
    """What was saved is no whole image; `directory`."""

    kind = "image-not-whole"

    def __init__(self, directory: Path, why: str) -> None:
        super().__init__(why)
        self.directory = directory


@dataclass(frozen=True, slots=True)
class CheckedImage:
    """An image that is whole and on the disk."""

    directory: Path
    image_bytes: int
    container_names: tuple[str, ...]


def check_image(directory: Path, *, has_whole_state: Callable[[Path], bool]) -> CheckedImage:
    """Check an image and bring it to the disk.

    `has_whole_state` says whether the object graph in a checkpoint.img is whole (`Runsc.has_whole_state`). Magic,
    version and sums are looked at here: the committed ranges of all memory files must make up pages.img.
    Raises: `ImageNotWhole`; OSError when the disk fails.
    """
    try:
        image = check_image_dir(directory)
    except StreamdError as error:
        raise ImageNotWhole(directory, str(error)) from error
    try:
        is_whole = has_whole_state(directory / CHECKPOINT)
    except RunscError as error:
        raise ImageNotWhole(directory, f"{directory / CHECKPOINT} can't be looked at: {error}") from error
    if not is_whole:
        raise ImageNotWhole(directory, f"{directory / CHECKPOINT}: its object graph is cut or damaged")
    for name in IMAGE_FILES:
        sync(directory / name)
    sync(directory)
    sync(directory.parent)
    return CheckedImage(directory, sum(image.sizes.values()), image.gvisor.container_names)


def written(directory: Path, sandbox_pid: int | None) -> Written:
    """Say how far a sandbox is with the image that it writes by itself; `sandbox_pid`: None when it is gone.

    What its descriptors say is the truth whatever events were missed: it holds the three files open from its creation
    until the save has ended, well or not (gVisor runsc/boot/restore.go:SaveAsync).
    """
    paths = [directory / name for name in IMAGE_FILES]
    has_bytes = any(map(_size, paths))
    match None if sandbox_pid is None else _holds_any(sandbox_pid, paths):
        case True:
            return Written.SAVING if has_bytes else Written.NOTHING
        case _ if has_bytes:
            return Written.CLOSED
        case False:
            return Written.SPENT
        case _:
            return Written.NOTHING


def image_bytes(directory: Path) -> int:
    """Give how much of an image is written, as far as it is there."""
    return sum(_size(directory / name) for name in IMAGE_FILES)


def _size(path: Path) -> int:
    try:
        return path.stat(follow_symlinks=False).st_size
    except FileNotFoundError:
        return 0


def _holds_any(pid: int, paths: list[Path]) -> bool | None:
    """Say whether a process has any of the files open; None: it has nothing open, so it has ended."""
    wanted = set()
    for path in paths:
        try:
            status = path.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue
        wanted.add((status.st_dev, status.st_ino))
    descriptors = f"/proc/{pid}/fd"
    try:
        names = os.listdir(descriptors)
    except (FileNotFoundError, ProcessLookupError):
        return None
    is_there = False
    for name in names:
        try:
            status = os.stat(f"{descriptors}/{name}")
        except OSError:  # closed meanwhile, or of a kind that can't be looked at
            continue
        is_there = True
        if (status.st_dev, status.st_ino) in wanted:
            return True
    return False if is_there else None
