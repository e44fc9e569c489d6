"""A store in a local directory: `file:///dir`, the embedded default.

An object is a file at its key's path under the root. A generation is (inode, size, mtime in ns), as `stat` gives them.
`ROOT/.streamd/` holds what isn't an object, the lock and files that are being written; no key begins with a dot.

How each promise of the port is kept
- *Atomic and durable*: a put writes `.streamd/put-…`, fsyncs it, then gives it its name with link(2) (which fails when
  the name is taken, whoever took it) or rename(2) (which replaces), and fsyncs the directory.
- *Conditions*: names change only under an exclusive flock of `.streamd/lock`. The lock is a file's, not a process's: it
  works between threads (each opens the file anew) and between processes, and ends with its holder.
- *Pinned*: a read opens the file once, compares the generation, and compares it again after every pread, before the
  bytes are given out. A replaced file is seen at the next open; the old one, still open, is read to its end. A file
  that is written in place is seen by its mtime, if a tick of the kernel's clock (1 to 10 ms) has passed since it was
  pinned.
- *Nothing outside the root*: paths are walked one segment at a time from the root's descriptor and a symbolic link is
  refused wherever it stands below the root. The root itself may be one: that is its owner's choice.

A writer that was killed leaves its file in `.streamd`; it is swept by the first put of a later `DirectoryStore`.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Iterator
from urllib.parse import quote

from streamd.errors import Exit, StoreError, StoreErrorKind
from streamd.store.checksum import crc32c
from streamd.store.port import CLOCK_KEY, Buffer, Condition, ObjectInfo, checked_key, is_key

_OWN = ".streamd"
_LOCK = "lock"
_TEMPORARY = "put-"
# A pread of this size costs 30 µs from the page cache; larger ones only delay the first bytes of a range.
_PIECE_BYTES = 256 << 10
# The lock is held for a few system calls and one directory fsync; who holds it longer is stopped or on a dead disk.
_LOCK_TIMEOUT_S = 30.0
_LOCK_POLL_S = 0.005
# A writer locks its file right after it made it; only one that died in between leaves an unlocked file.
_SWEEP_AGE_S = 3600.0

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC

_KINDS = {
    errno.ENOENT: StoreErrorKind.GONE,
    errno.ENOTDIR: StoreErrorKind.GONE,  # a segment of the key is a file
    errno.EACCES: StoreErrorKind.FORBIDDEN,
    errno.EPERM: StoreErrorKind.FORBIDDEN,
    errno.EROFS: StoreErrorKind.FORBIDDEN,
    errno.ELOOP: StoreErrorKind.FORBIDDEN,
    errno.EISDIR: StoreErrorKind.FORBIDDEN,
    errno.EEXIST: StoreErrorKind.FORBIDDEN,  # a file stands where the store's directory should be
    errno.ENAMETOOLONG: StoreErrorKind.FORBIDDEN,
    errno.EMLINK: StoreErrorKind.FORBIDDEN,
    errno.EOPNOTSUPP: StoreErrorKind.FORBIDDEN,
    errno.ENOSPC: StoreErrorKind.FORBIDDEN,  # waiting does not make room
    errno.EDQUOT: StoreErrorKind.FORBIDDEN,
    errno.EFBIG: StoreErrorKind.FORBIDDEN,
}
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def _error(error: OSError, key: str) -> StoreError:
    """Turn what the kernel said into ours; what isn't in the table (EIO, ESTALE, EMFILE, …) is TRANSIENT."""
    number = error.errno or errno.EIO
    message = os.strerror(number)
    if number == errno.ELOOP:
        message = "a symbolic link stands in its path, and none is followed below the store's directory"
    elif number in _FULL:
        message = f"{message}: make room on the store's device and push again"
    result = StoreError(_KINDS.get(number, StoreErrorKind.TRANSIENT), key, message)
    if number in _FULL:
        result.exit_code = Exit.FAILED  # not a question of permission
    return result


def _generation(status: os.stat_result) -> str:
    return f"{status.st_ino}-{status.st_size}-{status.st_mtime_ns}"


def _info(key: str, status: os.stat_result) -> ObjectInfo:
    return ObjectInfo(
        key=key,
        size=status.st_size,
        generation=_generation(status),
        crc32c=None,
        updated_s=status.st_mtime_ns / 1e9,
    )


def _gone(key: str) -> StoreError:
    return StoreError(StoreErrorKind.GONE, key, "not there")


def _changed(key: str) -> StoreError:
    return StoreError(StoreErrorKind.CHANGED, key, "another version took its place")


class DirectoryStore:
    """The store in directory `root` (an absolute path), which the first put makes (0700) if it isn't there.

    `is_used`: something was put there before, so while it isn't there it is away (TRANSIENT), not empty.
    It holds no descriptor between calls, so any thread and any number of processes may use one directory.
    """

    def __init__(self, root: str, *, is_used: bool = False, lock_timeout_s: float = _LOCK_TIMEOUT_S) -> None:
        if not os.path.isabs(root):
            raise ValueError(f"{root!r} is not an absolute path")
        self._root = os.path.normpath(root)
        self._is_used = is_used
        self._lock_timeout_s = lock_timeout_s
        self._swept = False

    @property
    def url(self) -> str:
        return f"file://{quote(self._root.rstrip('/'))}"

    # Reading: no lock.

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self._check_used("")
        try:
            root_fd = os.open(self._root, _DIRECTORY)
        except OSError as error:
            if error.errno == errno.ENOENT and prefix:
                return  # a push looks for its own leftovers before its first put makes the directory
            raise _error(error, self._root) from error
        yield from self._walk(root_fd, "", prefix)

    def _walk(self, directory_fd: int, base: str, prefix: str) -> Iterator[ObjectInfo]:
        """List what lies under one directory, whose keys begin with `base`; closes `directory_fd`."""
        try:
            try:
                # In key order "a-b/x" comes before "a/x": a directory sorts as if its name ended in a slash.
                with os.scandir(directory_fd) as entries:
                    names = sorted(entry.name + "/" * entry.is_dir(follow_symlinks=False) for entry in entries)
            except OSError as error:
                raise _error(error, base or self._root) from error
            for name in names:
                key = base + name
                if not is_key(key.removesuffix("/")):
                    continue
                try:
                    if name.endswith("/"):
                        if not (key.startswith(prefix) or prefix.startswith(key)):
                            continue
                        below_fd = os.open(name[:-1], _DIRECTORY | os.O_NOFOLLOW, dir_fd=directory_fd)
                    else:
                        status = os.stat(name, dir_fd=directory_fd, follow_symlinks=False)
                except (FileNotFoundError, NotADirectoryError):
                    continue  # removed since
                except OSError as error:
                    raise _error(error, key) from error
                if name.endswith("/"):
                    yield from self._walk(below_fd, key, prefix)
                elif key.startswith(prefix) and stat.S_ISREG(status.st_mode):
                    yield _info(key, status)
        finally:
            os.close(directory_fd)

    def head(self, key: str) -> ObjectInfo:
        self._check_used(key)
        with self._opened(key) as (_, status):
            return _info(key, status)

    def read(self, key: str, *, generation: str, start: int, end: int) -> Iterator[Buffer]:
        if not 0 <= start <= end:
            raise ValueError(f"[{start}, {end}) is not a range")
        if start == end:
            return
        with self._reachable(key), self._opened(key) as (fd, status):
            if _generation(status) != generation:
                raise _changed(key)
            while start < end:
                try:
                    piece = os.pread(fd, min(end - start, _PIECE_BYTES), start)
                    now = os.fstat(fd)
                except OSError as error:
                    raise _error(error, key) from error
                if _generation(now) != generation:
                    raise _changed(key)
                if not piece:
                    raise StoreError(StoreErrorKind.TRANSIENT, key, f"ends at byte {start}, before byte {end}")
                start += len(piece)
                yield piece

    @contextlib.contextmanager
    def _reachable(self, key: str) -> Iterator[None]:
        """Tell an object that is gone from a store that is, for whoever reads a pinned version, and so has seen it."""
        try:
            yield
        except StoreError as error:
            if error.store_kind is StoreErrorKind.GONE:
                self._check_there(key)
            raise

    def _check_used(self, key: str) -> None:
        """Raise TRANSIENT when a store that was used isn't there: a question about its objects has no answer then.

        Nor is anything put into the directory that its file system is to be mounted on.
        """
        if self._is_used:
            self._check_there(key)

    def _check_there(self, key: str) -> None:
        """Raise TRANSIENT unless the directory has something, as every store that was written to: one of ours."""
        message = f"there is no store at {self._root}; is its file system mounted?"
        try:
            with os.scandir(self._root) as entries:
                if any(True for _ in entries):
                    return
        except PermissionError:
            return  # whatever is asked for says so
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                message = f"the store at {self._root} can't be reached: {error.strerror}"
        raise StoreError(StoreErrorKind.TRANSIENT, key, message)

    def crc32c(self, info: ObjectInfo) -> int:
        if info.crc32c is not None:
            return info.crc32c
        crc = 0
        for piece in self.read(info.key, generation=info.generation, start=0, end=info.size):
            crc = crc32c(piece, crc)
        return crc

    def now_s(self) -> float:
        self._check_used("")
        try:
            os.stat(self._root)  # a question must not make the store
        except OSError as error:
            raise _error(error, self._root) from error
        return self.put(CLOCK_KEY, b"", condition=Condition.ANY).updated_s

    def close(self) -> None:
        """Nothing is held."""

    # Writing: names change under the lock.

    def put(self, key: str, data: Buffer, *, condition: str | Condition) -> ObjectInfo:
        checked_key(key)
        self._check_used(key)
        try:
            own_fd = self._own_directory()
        except OSError as error:
            raise _error(error, self._root) from error
        try:
            if not self._swept:
                self._swept = True
                _sweep(own_fd)
            return self._put(own_fd, key, data, condition)
        except FileExistsError as error:
            raise _changed(key) from error
        except OSError as error:
            raise _error(error, key) from error
        finally:
            os.close(own_fd)

    def _put(self, own_fd: int, key: str, data: Buffer, condition: str | Condition) -> ObjectInfo:
        temporary = f"{_TEMPORARY}{secrets.token_hex(8)}"
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=own_fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # "its writer lives", for `_sweep`
            view = memoryview(data).cast("B")
            while view:
                view = view[os.write(fd, view) :]
            os.fsync(fd)
            with self._locked(own_fd, key):
                parent_fd, name = self._parent(key, make=True)
                try:
                    if condition is Condition.ABSENT:
                        os.link(temporary, name, src_dir_fd=own_fd, dst_dir_fd=parent_fd, follow_symlinks=False)
                        os.unlink(temporary, dir_fd=own_fd)
                    else:
                        if isinstance(condition, str):
                            try:
                                _check(parent_fd, name, key, generation=condition)
                            except StoreError as error:
                                raise _changed(key) from error  # also when nothing is there to be replaced
                        os.rename(temporary, name, src_dir_fd=own_fd, dst_dir_fd=parent_fd)
                    os.fsync(parent_fd)
                finally:
                    os.close(parent_fd)
            return _info(key, os.fstat(fd))
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=own_fd)
            os.close(fd)

    def delete(self, key: str, *, generation: str) -> None:
        checked_key(key)
        self._check_used(key)
        try:
            os.stat(self._root)  # a deletion must not make the store
            own_fd = self._own_directory()
            try:
                with self._locked(own_fd, key):
                    parent_fd, name = self._parent(key, make=False)
                    try:
                        _check(parent_fd, name, key, generation=generation)
                        os.unlink(name, dir_fd=parent_fd)
                        os.fsync(parent_fd)
                    finally:
                        os.close(parent_fd)
                    self._remove_empty_parents(key)
            finally:
                os.close(own_fd)
        except OSError as error:
            raise _error(error, key) from error

    def _remove_empty_parents(self, key: str) -> None:
        segments = key.split("/")[:-1]
        while segments:
            try:
                parent_fd, name = self._parent("/".join(segments), make=False)
                try:
                    os.rmdir(name, dir_fd=parent_fd)
                finally:
                    os.close(parent_fd)
            except OSError:
                return  # another object lives there; an empty directory would do no harm either
            segments.pop()

    # Paths and the lock.

    @contextlib.contextmanager
    def _opened(self, key: str) -> Iterator[tuple[int, os.stat_result]]:
        """Open an object for reading. Raises: `StoreError`; what is raised inside passes unchanged."""
        checked_key(key)
        try:
            parent_fd, name = self._parent(key, make=False)
            try:
                # O_NONBLOCK: opening a FIFO that someone put there must not wait for its writer.
                fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=parent_fd)
            finally:
                os.close(parent_fd)
        except OSError as error:
            raise _error(error, key) from error
        try:
            try:
                status = os.fstat(fd)
            except OSError as error:
                raise _error(error, key) from error
            if not stat.S_ISREG(status.st_mode):
                raise _gone(key)
            yield fd, status
        finally:
            os.close(fd)

    def _parent(self, key: str, *, make: bool) -> tuple[int, str]:
        """Open the directory that holds `key`'s file; the caller closes it. Makes missing ones if told to (locked)."""
        *parents, name = key.split("/")
        fd = os.open(self._root, _DIRECTORY)
        try:
            for segment in parents:
                if make:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(segment, 0o700, dir_fd=fd)
                        os.fsync(fd)
                try:
                    below = os.open(segment, _DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
                except NotADirectoryError as error:
                    # With O_DIRECTORY the kernel says this of a link, too.
                    if stat.S_ISLNK(os.stat(segment, dir_fd=fd, follow_symlinks=False).st_mode):
                        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from error
                    raise
                os.close(fd)
                fd = below
        except BaseException:
            os.close(fd)
            raise
        return fd, name

    def _own_directory(self) -> int:
        """Open `.streamd`, making it and the root when they are missing."""
        os.makedirs(self._root, 0o700, exist_ok=True)
        root_fd = os.open(self._root, _DIRECTORY)
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(_OWN, 0o700, dir_fd=root_fd)
                os.fsync(root_fd)
            return os.open(_OWN, _DIRECTORY | os.O_NOFOLLOW, dir_fd=root_fd)
        finally:
            os.close(root_fd)

    @contextlib.contextmanager
    def _locked(self, own_fd: int, key: str) -> Iterator[None]:
        """Hold the right to change names. flock(2) has no time-out of its own, hence the polling."""
        fd = os.open(_LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=own_fd)
        try:
            deadline_s = time.monotonic() + self._lock_timeout_s
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError as error:
                    if time.monotonic() > deadline_s:
                        message = (
                            f"the store's lock {self._root}/{_OWN}/{_LOCK} was held for {self._lock_timeout_s:g} s"
                        )
                        raise StoreError(StoreErrorKind.TRANSIENT, key, message) from error
                    time.sleep(_LOCK_POLL_S)
            yield
        finally:
            os.close(fd)


def _check(parent_fd: int, name: str, key: str, *, generation: str) -> None:
    """Make sure that a name has that generation. Raises: `StoreError` GONE or CHANGED."""
    try:
        status = os.stat(name, dir_fd=parent_fd, follow_symlinks=False)
    except FileNotFoundError as error:
        raise _gone(key) from error
    if not stat.S_ISREG(status.st_mode) or _generation(status) != generation:
        raise _changed(key)


def _sweep(own_fd: int) -> None:
    """Remove what dead writers left: files that are old by mtime and that nobody holds locked.

    A young file isn't even locked to find out: its writer, who is about to lock it, would be refused.
    """
    for name in os.listdir(own_fd):
        if not name.startswith(_TEMPORARY):
            continue
        with contextlib.suppress(OSError):
            fd = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=own_fd)
            try:
                if time.time() - os.fstat(fd).st_mtime > _SWEEP_AGE_S:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(name, dir_fd=own_fd)
            finally:
                os.close(fd)
