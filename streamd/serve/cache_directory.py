"""The node cache as a whole: which images a cache directory has, making room among them, clearing, checking.

    DIR/images/<key>/   one directory an image (`node_cache.py`), owned by at most one process
        pins/<key>      an empty file: that image stays, used or not, until it is unpinned
        trash-<uuid>/   an image on its way out, or what a process left of one when it died

`cache_policy.py` decides what leaves; here is what it takes. An image leaves by rename, under its own lock, so nobody
ever sees a half of it; its bytes are freed behind that, by a thread, since a pod must not wait for a large file to be
unlinked. Whoever opens an image holds the directory's lock meanwhile: two mounts that begin at once must not be
promised the same room. Every call here blocks, and may do so for as long as a disk hangs.
"""

import errno
import fcntl
import hashlib
import os
import re
import stat
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from streamd.errors import NotFound, Refused, StreamdError
from streamd.safe_paths import NotAFile, SafeDirectory, open_beneath, open_regular, read_regular
from streamd.serve.cache_policy import DiskSpace, Limits, Newcomer, Resident, room_bytes, victims
from streamd.serve.node_cache import (
    FILES,
    FULL,
    CacheUnusable,
    NodeCache,
    are_files_held,
    has_only_files,
    is_begun,
    is_lock_misplaced,
    lock_image,
    open_image,
    opened,
    opened_image,
    owner_of,
)
from streamd.serve.plan import Layout
from streamd.serve.sealing import NotSealed, is_sealed, seal
from streamd.snapshot.frames import Decoder
from streamd.snapshot.manifest import MAX_MANIFEST_BYTES, Codec, ImageFile, decode, manifest_digest

log = structlog.get_logger()

# A deployment that replaces an image has settled by then; what an hour's restores may need again is still there.
RECENT_S = 3600.0
_PARTS = ("images", "pins")
_KEY = re.compile(r"[0-9a-f]{64}")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY
_NUMBER_BYTES = 20


@dataclass(frozen=True, slots=True)
class CachedImage:
    """One image in a cache directory: its name there, bytes on disk, last use (epoch seconds), owner if in use.

    `promised_bytes` is what its owner may write in all. A pinned image stays when room is made, or the cache cleared.
    """

    key: str
    disk_bytes: int
    promised_bytes: int
    used_s: float
    owner: str | None
    is_pinned: bool


def open_cache(
    directory: Path,
    manifest: bytes,
    layout: Layout,
    *,
    files: Sequence[ImageFile] | None = None,
    source: str,
    owner: str,
    max_bytes: int | None,
    reserve_bytes: int | None = None,
    recent_s: float = RECENT_S,
) -> NodeCache:
    """Open, or begin, the directory of the image that `manifest` describes, and make room for it.

    `files` are the manifest's, where they are at hand (None: the manifest is decoded for them).
    `source` says where the bytes come from: images of different sources share nothing, since a chunk's checksum finds
    accidents, not forgery, and whoever may read a snapshot could put a forged copy elsewhere under its manifest.
    `owner` is what a second process is told. `max_bytes` bounds what all images have in chunks (None: half of the
    disk), `reserve_bytes` is what stays free of the disk (None: a tenth); what leaves for that, `cache_policy` says.

    Raises: `Refused` when another process owns the image; `CacheUnusable` for everything else that is wrong.
    """
    key = hashlib.sha256(manifest_digest(manifest) + source.encode(errors="surrogateescape")).hexdigest()
    try:
        _check_if_there(directory, mends=True)
        with opened(directory, make=True) as checked:
            checked.make_directory("images")
        opened(directory / "images").close()
        space = _space(directory)
        if max_bytes is None and space is None:
            raise CacheUnusable(f"cache directory {directory}: its disk does not say how large it is: set a limit")
        limits = Limits(
            max_bytes=space.total_bytes // 2 if max_bytes is None and space is not None else max_bytes or 0,
            reserve_bytes=reserve_bytes if reserve_bytes is not None else (space.total_bytes // 10 if space else 0),
            recent_s=recent_s,
        )
        with _locked(directory):
            _discard_leftovers(directory)
            room = _Room(directory, key, layout.data_bytes, limits)

            def begin() -> NodeCache:
                image_files = files or decode(manifest).files
                cache = open_image(directory / "images" / key, manifest, image_files, layout, owner)
                try:
                    cache.room_bytes, _ = room.make()
                    cache.reserve_bytes = limits.reserve_bytes
                    cache.promise()
                    cache.note_used()
                except BaseException:
                    cache.close()
                    raise
                return cache

            try:
                cache = begin()
            except OSError as error:
                if error.errno not in FULL or not room.make_at_once():
                    raise
                cache = begin()
    except OSError as error:
        raise CacheUnusable(f"cache directory {directory}: {error}") from error
    cache.make_room = room.make_more
    cache.freeing = threading.Thread(target=_remove_trash, args=(directory,), name="cache-sweep", daemon=True)
    cache.freeing.start()
    return cache


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold the directory's lock: two mounts that begin at once must not be promised the same room.

    Nothing that is done meanwhile may wait for anybody: all other mounts wait for this.
    """
    with opened(directory) as held:
        fcntl.flock(held.fd, fcntl.LOCK_EX)
        yield


def _space(directory: Path) -> DiskSpace | None:
    """Ask the file system for its size, None when it doesn't tell (some in user space don't)."""
    with suppress(OSError):
        info = os.statvfs(directory)
        if info.f_blocks:
            return DiskSpace(info.f_blocks * info.f_frsize, info.f_bavail * info.f_frsize)
    return None


class _Room:
    """Makes room for one image by removing others, under the directory's lock; made before the image is opened."""

    def __init__(self, directory: Path, key: str, wanted_bytes: int, limits: Limits) -> None:
        self._directory = directory
        self._key = key
        self._limits = limits
        self._newcomer = Newcomer(wanted_bytes, 0, None)
        with suppress(OSError), opened(directory / "images") as images, _image(images, key) as image:
            self._newcomer = Newcomer(wanted_bytes, _disk_bytes(images, key), _used_s(image.fd))

    def make(self) -> tuple[int, bool]:
        """Remove what the policy chooses; give the bytes that the image may take up, and whether any other left."""
        newcomer = self._newcomer
        space = _space(self._directory)
        if space is not None:
            space = replace(space, free_bytes=space.free_bytes + _trash_bytes(self._directory))
        others = [_resident(image) for image in _images(self._directory) if image.key != self._key]
        has_left = False
        for image in victims(newcomer, others, limits=self._limits, space=space, now_s=time.time()):
            if not _remove_if_idle(self._directory / "images" / image.key):  # somebody verifies it just now
                continue
            has_left = True
            others.remove(image)
            if space is not None:
                space = replace(space, free_bytes=space.free_bytes + image.disk_bytes)
        return room_bytes(newcomer, others, limits=self._limits, space=space), has_left

    def make_at_once(self) -> bool:
        """Remove and free, before this returns; false when there was nothing."""
        _, has_left = self.make()
        return _remove_trash(self._directory) or has_left

    def make_more(self) -> bool:
        """Do so for an image that is being used, whose disk others have filled; takes the lock."""
        try:
            with _locked(self._directory):
                with opened(self._directory / "images") as images:
                    self._newcomer = replace(self._newcomer, disk_bytes=_disk_bytes(images, self._key))
                return self.make_at_once()
        except (CacheUnusable, OSError) as error:
            log.warning("no room can be made in the cache", reason=str(error))
            return False


def _resident(image: CachedImage) -> Resident:
    return Resident(
        image.key,
        image.disk_bytes,
        image.promised_bytes,
        image.used_s,
        is_owned=image.owner is not None,
        is_pinned=image.is_pinned,
    )


def pin_image(directory: Path, key: str) -> None:
    """Keep an image until it is unpinned, whether it is used or not. Raises: `NotFound`, `CacheUnusable`."""
    try:
        _check_if_there(directory, mends=True)
        if not _KEY.fullmatch(key) or not (directory / "images" / key).is_dir():
            raise NotFound(f"no image {key[:80]} in {directory}")
        with _locked(directory):  # who makes room now has seen it unpinned
            if not (directory / "images" / key).is_dir():
                raise NotFound(f"image {key} has just left {directory}")
            with opened(directory / "pins", make=True) as pins:
                os.close(open_regular(pins.fd, key, os.O_WRONLY | os.O_CREAT))
    except OSError as error:
        raise CacheUnusable(f"cache directory {directory}: {error}") from error


def unpin_image(directory: Path, key: str) -> None:
    """Let an image leave again when room is needed. Raises: `NotFound`, `CacheUnusable`."""
    try:
        if not _KEY.fullmatch(key):
            raise FileNotFoundError(key)
        _check_if_there(directory, mends=False)
        with opened(directory / "pins") as pins:
            pins.unlink(key)
    except FileNotFoundError as error:
        raise NotFound(f"image {key[:80]} is not pinned in {directory}") from error
    except OSError as error:
        raise CacheUnusable(f"cache directory {directory}: {error}") from error


def list_images(directory: Path, *, mends: bool = False) -> list[CachedImage]:
    """Describe every image of a cache directory, least recently used first; `mends` as `_check_if_there` does.

    Raises: `CacheUnusable`.
    """
    try:
        if "images" in _check_if_there(directory, mends=mends):
            return []
        return sorted(_images(directory), key=lambda image: image.used_s)
    except OSError as error:
        raise CacheUnusable(f"cache directory {directory}: {error}") from error


def clear_images(directory: Path, key: str | None = None) -> tuple[list[CachedImage], list[CachedImage]]:
    """Remove one image, or all, that no process owns and that aren't pinned; give (removed, left).

    Also removes what processes that died have left. Raises: `CacheUnusable`.
    """
    removed: list[CachedImage] = []
    left: list[CachedImage] = []
    for image in list_images(directory, mends=True):
        if key is not None and image.key != key:
            continue
        may_go = image.owner is None and not image.is_pinned
        gone = may_go and _remove_alone(directory / "images" / image.key)
        (removed if gone else left).append(image)
    _remove_trash(directory)
    return removed, left


@dataclass(frozen=True, slots=True)
class VerifiedImage:
    """What `verify_images` found: chunks that are cached, and those of them that are not what they should be."""

    key: str
    cached_chunks: int
    bad_chunks: tuple[int, ...]


def verify_images(directory: Path, *, repair: bool = True) -> list[VerifiedImage]:
    """Check every cached chunk of every image that no process owns; with `repair`, forget the bad, seal the whole.

    An image whose own files can't be read any more is removed and reported with all its chunks bad. One that was never
    begun (its process died over it, or the disk was full) says nothing that could be wrong: it is removed.
    Raises: `CacheUnusable`.
    """
    idle = (image for image in list_images(directory, mends=repair) if image.owner is None)
    checked = (_verify_image(directory / "images" / image.key, repair=repair) for image in idle)
    return [image for image in checked if image is not None]


def _verify_image(path: Path, *, repair: bool) -> VerifiedImage | None:
    try:
        with opened_image(path) as image:
            if not has_only_files(image.fd):
                raise CacheUnusable(f"{path} has something that is not a file")
            if not is_begun(image.fd):
                if repair:
                    _remove_alone(path)
                    _remove_trash(path.parent.parent)
                return None
            manifest = read_regular(image.fd, "manifest", MAX_MANIFEST_BYTES + 1)
        decoded = decode(manifest)
        layout = Layout(decoded.table)
        cache = open_image(path, manifest, decoded.files, layout, owner="cache verify")
    except (OSError, StreamdError):
        if repair:
            _remove_alone(path)
            _remove_trash(path.parent.parent)
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
        is_whole = cached == len(layout) - layout.zero_chunks
        if repair and is_whole and not bad and not is_sealed(cache, decoded.files):
            try:
                seal(cache, decoded.files, layout)
            except NotSealed as error:
                bad.extend(error.bad_chunks)
            except OSError as error:
                log.warning("the image was not sealed, the next mount serves it", key=path.name, reason=str(error))
    finally:
        cache.close()
    return VerifiedImage(path.name, cached, tuple(bad))


def _check_if_there(directory: Path, *, mends: bool) -> set[str]:
    """Refuse a cache in which others could change what its paths lead to: nothing there is locked, moved or removed.

    What isn't the cache's but has the name of a part of it is ignored, with a line, and set aside by who `mends`: its
    owner's worker, if it was broken into, may put anything there. A directory of images is never moved, but refused.
    Gives the names that are to be ignored. Raises: `CacheUnusable`, `OSError`.
    """
    ignored = set()
    with suppress(FileNotFoundError), opened(directory) as held:
        for name in _PARTS:
            try:
                opened(directory / name).close()
            except (OSError, CacheUnusable) as error:
                if isinstance(error, OSError) and error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                    raise
                _pass_over(held, name, error, mends=mends)
                ignored.add(name)
    return ignored


def _pass_over(held: SafeDirectory, name: str, problem: Exception, *, mends: bool) -> None:
    try:
        is_directory = stat.S_ISDIR(held.stat(name).st_mode)
    except FileNotFoundError:
        return
    if is_directory and name == "images":
        raise problem
    log.warning("not the cache's own: ignored", path=str(held.path / name), reason=str(problem), is_set_aside=mends)
    if mends:
        with suppress(FileNotFoundError):  # by somebody else, in this moment
            held.rename(name, _trash_name())


def _trash_name() -> str:
    return f"trash-{uuid.uuid4().hex}"


def _discard_leftovers(directory: Path) -> None:
    """Move out what no process owns and none can use: begun by one that died, of another format, or damaged."""
    with opened(directory / "images") as images:
        for entry in images.scandir():
            with suppress(OSError):  # one image that can't be read costs itself
                if not entry.is_dir(follow_symlinks=False):
                    images.unlink(entry.name)
                    continue
                with _image(images, entry.name) as image:
                    is_usable = is_begun(image.fd) and has_only_files(image.fd) and not is_lock_misplaced(image.fd)
                if not is_usable:
                    _remove_if_idle(directory / "images" / entry.name)


def _trash_bytes(directory: Path) -> int:
    """Bytes about to be free. Ask after the free ones: what is freed in between is missed then, not doubled."""
    with opened(directory) as held:
        trash = [entry for entry in held.scandir() if _is_trash(entry) and entry.is_dir(follow_symlinks=False)]
        return sum(_disk_bytes(held, entry.name) for entry in trash)


def _remove_trash(directory: Path) -> bool:
    """Free what has left the cache; tells whether anything had."""
    has_any = False
    with suppress(OSError, CacheUnusable), opened(directory) as held:
        for entry in held.scandir():
            if not _is_trash(entry):
                continue
            has_any = True
            if entry.is_dir(follow_symlinks=False):
                held.remove_tree(entry.name)
            else:
                held.unlink(entry.name, missing_ok=True)
    return has_any


def _is_trash(entry: os.DirEntry[str]) -> bool:
    return entry.name.startswith("trash-")


def _image(images: SafeDirectory, key: str) -> SafeDirectory:
    """Open an image's directory to look at it, whoever may write in it. Raises: OSError."""
    return SafeDirectory(images.path / key, open_beneath(images.fd, key, _DIRECTORY))


def _images(directory: Path) -> Iterator[CachedImage]:
    try:
        images = opened(directory / "images")
    except FileNotFoundError:
        return
    with images:
        pins = _pins(directory)
        for entry in images.scandir():
            if entry.is_dir(follow_symlinks=False):
                try:
                    with _image(images, entry.name) as image:
                        yield _describe(images, image, is_pinned=entry.name in pins)
                except FileNotFoundError:
                    pass
                except OSError:  # it can still be cleared
                    yield CachedImage(entry.name, 0, 0, 0.0, None, False)


def _pins(directory: Path) -> set[str]:
    with suppress(OSError, CacheUnusable), opened(directory / "pins") as pins:  # what isn't ours pins nothing
        return set(pins.names())
    return set()


def _describe(images: SafeDirectory, image: SafeDirectory, *, is_pinned: bool) -> CachedImage:
    key = image.path.name
    return CachedImage(
        key, _disk_bytes(images, key), _promised(image.fd), _used_s(image.fd), owner_of(image.fd), is_pinned
    )


def _disk_bytes(parent: SafeDirectory, name: str) -> int:
    """What a directory's files take up; what vanishes meanwhile takes up nothing."""
    blocks = 0
    with suppress(FileNotFoundError):
        for _, _, names, fd in os.fwalk(name, dir_fd=parent.fd, follow_symlinks=False):
            for other in names:
                with suppress(FileNotFoundError):
                    blocks += os.stat(other, dir_fd=fd, follow_symlinks=False).st_blocks
    return 512 * blocks


def _used_s(image_fd: int) -> float:
    try:
        return os.stat("head", dir_fd=image_fd, follow_symlinks=False).st_mtime
    except FileNotFoundError:  # half-made
        return 0.0


def _promised(image_fd: int) -> int:
    try:
        return int(read_regular(image_fd, "promised", _NUMBER_BYTES))
    except (OSError, ValueError):
        return 0


def _remove_alone(path: Path) -> bool:
    """Do as `_remove_if_idle` does, for whom doesn't hold the cache directory's lock."""
    try:
        with _locked(path.parent.parent):
            return _remove_if_idle(path)
    except (CacheUnusable, OSError):
        return False


def _remove_if_idle(path: Path) -> bool:
    """Take an image out of the cache unless a process owns it: by rename, so that nobody sees a half of it.

    Or unless its files are mounted: who owned it may have died, and the next one not be there yet (`daemon.life`).
    The caller holds the directory's lock, under which images begin: where something else was put in the place of the
    image's own lock, that alone keeps two from taking it out, the second one after it was begun anew.
    """
    try:
        with opened(path.parent.parent) as directory, opened(path.parent) as images, _image(images, path.name) as image:
            fd = -1
            try:
                fd = lock_image(path, image.fd, None)
            except NotAFile:
                if not is_lock_misplaced(image.fd):
                    return False
            try:
                with suppress(OSError):  # not there, or not to be opened
                    if are_files_held(FILES, image.fd):
                        return False
                images.rename(path.name, _trash_name(), to=directory)
            finally:
                if fd >= 0:
                    os.close(fd)
    except (Refused, CacheUnusable, OSError):
        return False
    return True
