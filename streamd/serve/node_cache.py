"""The node cache on disk: one directory an image, a sparse file that mirrors it, and a bitmap of what is there.

    DIR/images/<key>/head       JSON: format, chunk count, bytes; unknown or different = the directory is discarded
                        manifest   the snapshot's manifest, so that `cache verify` needs no store
                        data       sparse; byte k of the image (its files one after another) is byte k here
                        resident   one bit a chunk, set after the chunk was written
                        lock       flocked by the process that owns the directory; its text says who that is
                        promised   bytes that its owner may write, so that all stay within the limit together

Rules. One process owns an image's directory. Files are written by `pwrite` only (a store through a mapping into a full
disk is SIGBUS) and never shortened; an image leaves by rename, then unlink. A set bit is a hint, not a promise: after a
crash of the machine the data may not have reached the disk, so whoever reads a chunk for the first time in its life
verifies it. Every call here may block or fail; callers run them in threads and go on without the cache.
"""

import fcntl
import hashlib
import json
import os
import shutil
import stat
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from streamd.errors import Refused, StreamdError
from streamd.serve.plan import Layout
from streamd.snapshot.frames import Decoder
from streamd.snapshot.manifest import Codec, decode, manifest_digest

CACHE_FORMAT = 1
_LOCK_TRIES = 6
_LOCK_PAUSE_S = 0.02


class CacheUnusable(StreamdError):
    """The cache directory can't be used; the mount serves from memory instead."""


@dataclass(frozen=True, slots=True)
class CachedImage:
    """One image in a cache directory: its name there, bytes on disk, last use (epoch seconds), owner if in use.

    `promised_bytes` is what its owner may write in all.
    """

    key: str
    disk_bytes: int
    promised_bytes: int
    used_s: float
    owner: str | None


class NodeCache:
    """One image's directory, owned by this process until `close`.

    `cached` is the bitmap as found at the start. `write` may be called from one thread only, reads from any.
    `room_bytes` is what the image may take up in all.
    """

    def __init__(self, path: Path, *, lock_fd: int, data_fd: int, resident_fd: int, cached: bytearray) -> None:
        self.path = path
        self.room_bytes = 0
        self._lock_fd = lock_fd
        self._data_fd = data_fd
        self._resident_fd = resident_fd
        self._bits = cached
        self._bits_lock = threading.Lock()

    def has(self, chunk: int) -> bool:
        """Whether the chunk's bit is set."""
        return bool(self._bits[chunk >> 3] & (1 << (chunk & 7)))

    def read_nowait(self, view: memoryview, offset: int) -> int:
        """Fill `view` from the page cache only; give the bytes read, 0 when a disk would have to be waited for."""
        try:
            return os.preadv(self._data_fd, [view], offset, os.RWF_NOWAIT)
        except (BlockingIOError, OSError):
            return 0

    def read(self, size: int, offset: int) -> bytearray:
        """Read `size` bytes, waiting for the disk. Raises: OSError, also when the file is too short."""
        data = bytearray(size)
        view = memoryview(data)
        done = 0
        while done < size:
            got = os.preadv(self._data_fd, [view[done:]], offset + done)
            if got == 0:
                raise OSError(f"{self.path}/data ends at {offset + done}")
            done += got
        return data

    def write(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        """Write a verified chunk; it counts once `confirm` has returned. Raises: OSError."""
        view = memoryview(data)
        done = 0
        while done < len(view):
            done += os.pwrite(self._data_fd, view[done:], offset + done)

    def confirm(self, chunks: Sequence[int]) -> None:
        """Wait until what was written is on the disk, then set the bits of those chunks. Raises: OSError.

        The kernel reports a write-back that failed to the next sync of the descriptor, and only there (fsync(2)).
        """
        os.fdatasync(self._data_fd)
        for chunk in chunks:
            self._set_bit(chunk, True)

    def forget(self, chunk: int) -> None:
        """Clear a chunk's bit: what is in the file is not what it should be. Raises: OSError."""
        self._set_bit(chunk, False)

    def _set_bit(self, chunk: int, value: bool) -> None:
        with self._bits_lock:
            index, mask = chunk >> 3, 1 << (chunk & 7)
            byte = self._bits[index]
            self._bits[index] = byte | mask if value else byte & ~mask
            os.pwrite(self._resident_fd, self._bits[index : index + 1], index)

    def promise(self) -> None:
        """Write down `room_bytes`, for the mounts that count what is left of the limit. Raises: OSError."""
        (self.path / "promised").write_text(str(self.room_bytes))

    def close(self) -> None:
        """Let go of the directory; what is cached stays."""
        for fd in (self._data_fd, self._resident_fd, self._lock_fd):
            with suppress(OSError):
                os.close(fd)


def open_cache(
    directory: Path, manifest: bytes, layout: Layout, *, source: str, owner: str, max_bytes: int | None
) -> NodeCache:
    """Open, or begin, the directory of the image that `manifest` describes, and make room for it.

    `source` says where the bytes come from: images of different sources share nothing, since a chunk's checksum finds
    accidents, not forgery, and whoever may read a snapshot could put a forged copy elsewhere under its manifest.
    `owner` is what a second process is told. `max_bytes` bounds all images of the directory together (None: by
    `default_max_bytes`): idle images leave, the least recently used first, until this one fits or none is left.

    Raises: `Refused` when another process owns the image; `CacheUnusable` for everything else that is wrong.
    """
    key = hashlib.sha256(manifest_digest(manifest) + source.encode(errors="surrogateescape")).hexdigest()
    wanted_bytes = sum(length for chunk, length in enumerate(layout.length) if not layout.is_zero(chunk))
    try:
        _checked_directory(directory)
        with _locked(directory):
            _sweep(directory)
            cache = _open_image(directory / "images" / key, manifest, layout, owner)
            try:
                limit_bytes = default_max_bytes(directory) if max_bytes is None else max_bytes
                wanted_bytes = min(wanted_bytes, limit_bytes)
                others_bytes = _make_room(directory, keep=key, max_bytes=limit_bytes - wanted_bytes)
                cache.room_bytes = max(0, min(wanted_bytes, limit_bytes - others_bytes))
                cache.promise()
            except BaseException:
                cache.close()
                raise
    except OSError as error:
        raise CacheUnusable(f"cache directory {directory}: {error}") from error
    return cache


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold the directory's lock: two mounts that begin at once must not be promised the same room."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def default_max_bytes(directory: Path) -> int:
    """Half of the disk, at most what is free less a tenth of the disk. Raises: OSError."""
    info = os.statvfs(directory)
    total, free = info.f_blocks * info.f_frsize, info.f_bavail * info.f_frsize
    own = sum(image.disk_bytes for image in _images(directory))
    return max(0, min(total // 2, own + free - total // 10))


def list_images(directory: Path) -> list[CachedImage]:
    """Describe every image of a cache directory, least recently used first. Raises: `CacheUnusable`."""
    try:
        return sorted(_images(directory), key=lambda image: image.used_s)
    except OSError as error:
        raise CacheUnusable(f"cache directory {directory}: {error}") from error


def clear_images(directory: Path, key: str | None = None) -> tuple[list[CachedImage], list[CachedImage]]:
    """Remove one image, or all, that no process owns; give (removed, left because they are in use)."""
    removed: list[CachedImage] = []
    in_use: list[CachedImage] = []
    for image in list_images(directory):
        if key is not None and image.key != key:
            continue
        gone = image.owner is None and _remove_if_idle(directory / "images" / image.key)
        (removed if gone else in_use).append(image)
    return removed, in_use


@dataclass(frozen=True, slots=True)
class VerifiedImage:
    """What `verify_images` found: chunks that are cached, and those of them that are not what they should be."""

    key: str
    cached_chunks: int
    bad_chunks: tuple[int, ...]


def verify_images(directory: Path, *, repair: bool = True) -> list[VerifiedImage]:
    """Check every cached chunk of every image that no process owns; with `repair`, forget the bad ones.

    An image whose own files can't be read any more is removed and reported with all its chunks bad.
    Raises: `CacheUnusable`.
    """
    idle = (image for image in list_images(directory) if image.owner is None)
    return [_verify_image(directory / "images" / image.key, repair=repair) for image in idle]


def _verify_image(path: Path, *, repair: bool) -> VerifiedImage:
    try:
        manifest = (path / "manifest").read_bytes()
        layout = Layout(decode(manifest).table)
        cache = _open_image(path, manifest, layout, owner="cache verify")
    except (OSError, StreamdError):
        if repair:
            _remove_if_idle(path)
        return VerifiedImage(path.name, 0, (0,))
    decoder = Decoder()
    bad, cached = [], 0
    try:
        for chunk in range(len(layout)):
            if layout.is_zero(chunk) or not cache.has(chunk):
                continue
            cached += 1
            try:
                data = cache.read(layout.length[chunk], layout.start[chunk])
                decoder.decode(data, codec=Codec.RAW, length=len(data), digest=layout.digest(chunk))
            except (OSError, StreamdError):
                bad.append(chunk)
                if repair:
                    cache.forget(chunk)
    finally:
        cache.close()
    return VerifiedImage(path.name, cached, tuple(bad))


def _checked_directory(directory: Path) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = directory.stat(follow_symlinks=False)
    if not stat.S_ISDIR(info.st_mode):
        raise CacheUnusable(f"cache directory {directory} is not a directory")
    if info.st_uid != os.geteuid() or info.st_mode & 0o022:
        raise CacheUnusable(f"cache directory {directory} must belong to this user and be writable by nobody else")
    (directory / "images").mkdir(mode=0o700, exist_ok=True)


def _sweep(directory: Path) -> None:
    for entry in os.scandir(directory):
        if entry.name.startswith("trash-"):
            shutil.rmtree(entry.path, ignore_errors=True)


def _images(directory: Path) -> Iterator[CachedImage]:
    try:
        entries = list(os.scandir(directory / "images"))
    except FileNotFoundError:
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            with suppress(FileNotFoundError):
                yield _describe(Path(entry.path))


def _describe(path: Path) -> CachedImage:
    blocks = sum(entry.stat(follow_symlinks=False).st_blocks for entry in os.scandir(path))
    used_s = max((entry.stat(follow_symlinks=False).st_mtime for entry in os.scandir(path)), default=0.0)
    return CachedImage(path.name, 512 * blocks, _promised(path), used_s, _owner_of(path))


def _promised(path: Path) -> int:
    try:
        return int((path / "promised").read_text()[:20])
    except (OSError, ValueError):
        return 0


def _owner_of(path: Path) -> str | None:
    try:
        fd = os.open(path / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.pread(fd, 4096, 0).decode(errors="replace") or "another process"
    finally:
        os.close(fd)
    return None


def _lock(path: Path, owner: str | None) -> int:
    """Take the image's lock, and say in it who has it (`owner` None: for a moment only, by nobody worth naming)."""
    fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    for attempt in range(_LOCK_TRIES):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            # Whoever lists the cache holds the lock, shared, for an instant.
            if attempt < _LOCK_TRIES - 1:
                time.sleep(_LOCK_PAUSE_S)
                continue
            holder = os.pread(fd, 4096, 0).decode(errors="replace") or "another process"
            os.close(fd)
            raise Refused(f"this snapshot is in use with this cache already, by {holder}") from None
    if not _is_at(fd, path / "lock"):  # the directory was removed between our open and our lock
        os.close(fd)
        raise CacheUnusable(f"{path} was removed while it was being opened")
    if owner is not None:
        with suppress(OSError):  # a full disk has no room for names
            os.ftruncate(fd, 0)
            os.pwrite(fd, owner.encode(errors="replace"), 0)
    return fd


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat(follow_symlinks=False))
    except FileNotFoundError:
        return False


def _open_image(path: Path, manifest: bytes, layout: Layout, owner: str) -> NodeCache:
    path.mkdir(mode=0o700, exist_ok=True)
    lock_fd = _lock(path, owner)
    fds = [lock_fd]
    try:
        head = {"format": CACHE_FORMAT, "chunks": len(layout), "bytes": layout.start[-1]}
        if not _is_ours(path, head, manifest):
            _begin(path, head, manifest)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fds.append(os.open(path / "data", flags, 0o600))
        fds.append(os.open(path / "resident", flags, 0o600))
        bitmap_bytes = (len(layout) + 7) // 8
        os.posix_fallocate(fds[2], 0, max(bitmap_bytes, 1))  # the disk may be full when its bits are to be set
        bits = bytearray(os.pread(fds[2], bitmap_bytes, 0))
        bits.extend(bytes(bitmap_bytes - len(bits)))
        if os.fstat(fds[1]).st_size != layout.start[-1]:
            os.ftruncate(fds[1], layout.start[-1])
        os.utime(lock_fd)
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return NodeCache(path, lock_fd=lock_fd, data_fd=fds[1], resident_fd=fds[2], cached=bits)


def _is_ours(path: Path, head: dict[str, int], manifest: bytes) -> bool:
    try:
        return bool(json.loads((path / "head").read_bytes()) == head and (path / "manifest").read_bytes() == manifest)
    except (OSError, ValueError, RecursionError):
        return False


def _begin(path: Path, head: dict[str, int], manifest: bytes) -> None:
    """Start an image's directory anew, under its lock; `head` comes last, so a half-made one is discarded."""
    for name in ("head", "manifest", "data", "resident"):
        with suppress(FileNotFoundError):
            (path / name).unlink()
    for name, content in (("manifest", manifest), ("head", json.dumps(head).encode())):
        fd = os.open(path / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            view = memoryview(content)
            while view:
                view = view[os.write(fd, view) :]
        finally:
            os.close(fd)


def _make_room(directory: Path, *, keep: str, max_bytes: int) -> int:
    """Remove idle images until the others claim at most `max_bytes`, if that can be; give what they claim then.

    An image in use claims what it was promised, an idle one what it has.
    """
    others = sorted((i for i in _images(directory) if i.key != keep), key=lambda image: image.used_s)
    claims = {i.key: i.disk_bytes if i.owner is None else max(i.disk_bytes, i.promised_bytes) for i in others}
    total = sum(claims.values())
    for image in others:
        if total <= max(0, max_bytes):
            break
        if image.owner is None and _remove_if_idle(directory / "images" / image.key):
            total -= claims[image.key]
    return total


def _remove_if_idle(path: Path) -> bool:
    """Take an image out of the cache unless a process owns it: rename first, so nobody sees a half of it."""
    try:
        fd = _lock(path, None)
    except (Refused, CacheUnusable, OSError):
        return False
    try:
        trash = path.parent.parent / f"trash-{uuid.uuid4().hex}"
        path.rename(trash)
        shutil.rmtree(trash, ignore_errors=True)
    finally:
        os.close(fd)
    return True
