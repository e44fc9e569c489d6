"""Whether a directory is an image that can be pushed, looked at before anything is written.

Directory and files are opened once, without following links and without waiting (a FIFO would make open hang), and read
through these descriptors until the push ends: what was checked is what is pushed. Other files in the directory are
ignored; a `gcs_opts.json`, which would send runsc to another store, is never pushed.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from streamd.errors import NotFound, NotPermitted, Refused, StreamdError
from streamd.snapshot import statefile
from streamd.snapshot.head import MAX_FILE_BYTES
from streamd.snapshot.manifest import GvisorInfo
from streamd.snapshot.memory import check_memory_files
from streamd.snapshot.names import CHECKPOINT, IMAGE_FILES, PAGES, PAGES_META
from streamd.snapshot.pages_meta import decode_pages_meta


@dataclass(frozen=True, slots=True)
class ImageDir:
    """An image directory that was found to be in order: its files' sizes in bytes, and what gVisor says of it."""

    directory: Path
    sizes: Mapping[str, int]
    gvisor: GvisorInfo


@dataclass(frozen=True, slots=True)
class OpenImage:
    """An image directory whose files are held open; `fds` by file name."""

    directory: Path
    fds: Mapping[str, int]
    sizes: Mapping[str, int]
    mtimes_ns: Mapping[str, int]
    gvisor: GvisorInfo

    def check_unchanged(self) -> None:
        """Look whether the files are as they were opened. Raises: `Refused`."""
        for name, fd in self.fds.items():
            status = os.fstat(fd)
            if (status.st_size, status.st_mtime_ns) != (self.sizes[name], self.mtimes_ns[name]):
                raise Refused(f"{self.directory / name} changed while it was pushed: something still writes to it")


def check_image_dir(directory: Path) -> ImageDir:
    """Check a directory; costs no more than reading pages_meta.img (3 µs a range). Raises: as `open_image_dir`."""
    with open_image_dir(directory) as image:
        return ImageDir(image.directory, image.sizes, image.gvisor)


@contextlib.contextmanager
def open_image_dir(directory: Path) -> Iterator[OpenImage]:
    """Open the files of an image directory and check them.

    Raises: `NotFound`: no such directory. `Refused`: not an image directory, a file of it is missing, empty, or no
        regular file, an image that gVisor compressed, an unknown version. `Damaged`: the numbers in it don't add up.
        `NotPermitted`.

    Of pages.img nothing is read.
    """
    with contextlib.ExitStack() as stack:
        directory_fd = _open_directory(directory, stack)
        present = [name for name in IMAGE_FILES if _is_there(directory, name, directory_fd)]
        if CHECKPOINT not in present:
            raise Refused(f"{directory} is not an image directory: it has no {CHECKPOINT}")
        fds, sizes, mtimes_ns = {}, {}, {}
        for name in present:
            path = directory / name
            fds[name] = _open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, stack, directory_fd)
            status = os.fstat(fds[name])
            if not stat.S_ISREG(status.st_mode):
                raise Refused(f"{path} is not a regular file")
            if not status.st_size:
                raise Refused(f"{path} is empty: the checkpoint was not written yet, or failed")
            if status.st_size > MAX_FILE_BYTES[name]:
                raise Refused(
                    f"{path}: {status.st_size} bytes are too many: a {name} has {MAX_FILE_BYTES[name]} at most"
                )
            sizes[name], mtimes_ns[name] = status.st_size, status.st_mtime_ns
        head = _head(directory, fds[CHECKPOINT])
        if head.compressed:
            raise Refused(
                f"{directory}: gVisor compressed this image ({head.compression}), so that it can't be loaded lazily;"
                " make it with `runsc checkpoint --compression=none`"
            )
        for name in IMAGE_FILES:
            if name not in present:
                raise Refused(f"{directory} is not an image directory: it has no {name}")
        memory_files = decode_pages_meta(_read(fds[PAGES_META], sizes[PAGES_META], directory / PAGES_META))
        check_memory_files(memory_files, pages_bytes=sizes[PAGES], what=str(directory / PAGES_META))
        gvisor = GvisorInfo(
            runsc_version=head.runsc_version,
            network=head.network,
            container_names=head.container_names,
            memory_files=memory_files,
        )
        yield OpenImage(directory, fds, sizes, mtimes_ns, gvisor)


def _is_there(directory: Path, name: str, directory_fd: int) -> bool:
    try:
        os.stat(name, dir_fd=directory_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise _error(error, directory / name) from error
    return True


def _open_directory(directory: Path, stack: contextlib.ExitStack) -> int:
    """Open it, unless it is a link, as `pull` does: whoever can make one could lead root to another pod's memory."""
    try:
        return _open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, stack)
    except StreamdError:
        if directory.is_symlink():  # the kernel says ENOTDIR
            raise Refused(f"{directory} is a symbolic link; name the directory itself") from None
        raise


def _open(path: Path, flags: int, stack: contextlib.ExitStack, directory_fd: int | None = None) -> int:
    """Open, by its name in the directory if that is given, and have it closed at the end."""
    try:
        fd = os.open(path if directory_fd is None else path.name, flags | os.O_CLOEXEC, dir_fd=directory_fd)
    except OSError as error:
        raise _error(error, path) from error
    stack.callback(os.close, fd)
    return fd


def _error(error: OSError, path: Path) -> StreamdError:
    match error.errno:
        case errno.ENOENT:
            return NotFound(f"{path} does not exist")
        case errno.ENOTDIR:
            return Refused(f"{path} is not an image directory: it is not a directory")
        case errno.ELOOP:
            return Refused(f"{path} is a symbolic link; an image's files must be regular files")
        case errno.ENXIO:  # a socket, or a device without a driver
            return Refused(f"{path} is not a regular file")
        case errno.EACCES | errno.EPERM:
            return NotPermitted(f"{path}: {error.strerror}")
        case _:
            return StreamdError(f"{path}: {error.strerror}")


def _head(directory: Path, fd: int) -> statefile.StatefileHead:
    path = directory / CHECKPOINT
    prefix = _read(fd, statefile.PREFIX_BYTES, path)
    if prefix[: len(statefile.MAGIC)] != statefile.MAGIC:
        raise Refused(f"{directory} is not an image directory: {CHECKPOINT} does not begin as gVisor's do")
    return statefile.decode_head(_read(fd, statefile.head_bytes(prefix), path))


def _read(fd: int, count: int, path: Path) -> bytes:
    """Read from the file's start: `count` bytes, or less where it ends."""
    parts: list[bytes] = []
    done = 0
    while done < count:
        try:
            part = os.pread(fd, count - done, done)
        except OSError as error:
            raise _error(error, path) from error
        if not part:
            break
        parts.append(part)
        done += len(part)
    return b"".join(parts)
