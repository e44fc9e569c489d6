"""The node cache as a whole: which images a cache directory has, making room among them, clearing, checking.

    DIR/images/<key>/   one directory an image (`node_cache.py`), owned by at most one process
        pins/<key>      an empty file: that image stays, used or not, until it is unpinned
        trash-<uuid>/   an image on its way out, or what a process left of one when it died

`cache_policy.py` decides what leaves; here is what it takes. An image leaves by rename, under its own lock, so nobody
ever sees a half of it; its bytes are freed behind that, by a thread, since a pod must not wait for a large file to be
unlinked. Whoever opens an image holds the directory's lock meanwhile: two mounts that begin at once must not be
promised the same room. Every call here blocks, and may do so for as long as a disk hangs.
"""

import fcntl
import hashlib
import os
import re
import shutil
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from streamd.errors import NotFound, Refused, StreamdError
from streamd.serve.cache_policy import DiskSpace, Limits, Newcomer, Resident, room_bytes, victims
from streamd.serve.node_cache import (
    FILES,
    CacheUnusable,
    NodeCache,
    are_files_held,
    is_current,
    lock_image,
    open_image,
    opened,
    owner_of,
)
from streamd.serve.plan import Layout
from streamd.serve.sealing import NotSealed, is_sealed, seal
from streamd.snapshot.frames import Decoder
from streamd.snapshot.manifest import Codec, ImageFile, decode, manifest_digest

log = structlog.get_logger()

# A deployment that replaces an image has settled by then; what an hour's restores may need again is still there.
RECENT_S = 3600.0
_KEY = re.compile(r"[0-9a-f]{64}")


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
    wanted_bytes = sum(length for chunk, length in enumerate(layout.length) if not layout.is_zero(chunk))
    try:
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
            if space is not None:
                space = replace(space, free_bytes=space.free_bytes + _trash_bytes(directory))
            images = {image.key: image for image in _images(directory)}
            before = images.pop(key, None)
            newcomer = Newcomer(wanted_bytes, before.disk_bytes if before else 0, before.used_s if before else None)
            cache = open_image(directory / "images" / key, manifest, files or decode(manifest).files, layout, owner)
            try:
                cache.room_bytes = _make_room(directory, newcomer, images.values(), limits=limits, space=space)
                cache.reserve_bytes = limits.reserve_bytes
                cache.promise()
                cache.note_used()
            except BaseException:
                cache.close()
                raise
    except OSError as error:
        raise CacheUnusable(f"cache directory {directory}: {error}") from error
    cache.freeing = threading.Thread(target=_remove_trash, args=(directory,), name="cache-sweep", daemon=True)
    cache.freeing.start()
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


def _space(directory: Path) -> DiskSpace | None:
    """Ask the file system for its size, None when it doesn't tell (some in user space don't)."""
    with suppress(OSError):
        info = os.statvfs(directory)
        if info.f_blocks:
            return DiskSpace(info.f_blocks * info.f_frsize, info.f_bavail * info.f_frsize)
    return None


def _make_room(
    directory: Path, newcomer: Newcomer, images: Iterable[CachedImage], *, limits: Limits, space: DiskSpace | None
) -> int:
    """Remove of the other `images` what the policy chooses for the newcomer; give the bytes that it may take up."""
    others = [_resident(image) for image in images]
    for image in victims(newcomer, others, limits=limits, space=space, now_s=time.time()):
        if not _remove_if_idle(directory / "images" / image.key):  # somebody verifies it just now
            continue
        others.remove(image)
        if space is not None:
            space = replace(space, free_bytes=space.free_bytes + image.disk_bytes)
    return room_bytes(newcomer, others, limits=limits, space=space)


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
        _check_if_there(directory)
        if not _KEY.fullmatch(key) or not (directory / "images" / key).is_dir():
            raise NotFound(f"no image {key[:80]} in {directory}")
        with _locked(directory):  # who makes room now has seen it unpinned
            if not (directory / "images" / key).is_dir():
                raise NotFound(f"image {key} has just left {directory}")
            (directory / "pins").mkdir(mode=0o700, exist_ok=True)
            (directory / "pins" / key).touch(mode=0o600)
    except OSError as error:
        raise CacheUnusable(f"cache directory {directory}: {error}") from error


def unpin_image(directory: Path, key: str) -> None:
    """Let an image leave again when room is needed. Raises: `NotFound`, `CacheUnusable`."""
    try:
        if not _KEY.fullmatch(key):
            raise FileNotFoundError(key)
        _check_if_there(directory)
        (directory / "pins" / key).unlink()
    except FileNotFoundError as error:
        raise NotFound(f"image {key[:80]} is not pinned in {directory}") from error
    except OSError as error:
        raise CacheUnusable(f"cache directory {directory}: {error}") from error


def list_images(directory: Path) -> list[CachedImage]:
    """Describe every image of a cache directory, least recently used first. Raises: `CacheUnusable`."""
    try:
        _check_if_there(directory)
        return sorted(_images(directory), key=lambda image: image.used_s)
    except OSError as error:
        raise CacheUnusable(f"cache directory {directory}: {error}") from error


def clear_images(directory: Path, key: str | None = None) -> tuple[list[CachedImage], list[CachedImage]]:
    """Remove one image, or all, that no process owns and that aren't pinned; give (removed, left).

    Also removes what processes that died have left. Raises: `CacheUnusable`.
    """
    removed: list[CachedImage] = []
    left: list[CachedImage] = []
    for image in list_images(directory):
        if key is not None and image.key != key:
            continue
        may_go = image.owner is None and not image.is_pinned
        gone = may_go and _remove_if_idle(directory / "images" / image.key)
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

    An image whose own files can't be read any more is removed and reported with all its chunks bad.
    Raises: `CacheUnusable`.
    """
    idle = (image for image in list_images(directory) if image.owner is None)
    return [_verify_image(directory / "images" / image.key, repair=repair) for image in idle]


def _verify_image(path: Path, *, repair: bool) -> VerifiedImage:
    try:
        manifest = (path / "manifest").read_bytes()
        decoded = decode(manifest)
        layout = Layout(decoded.table)
        cache = open_image(path, manifest, decoded.files, layout, owner="cache verify")
    except (OSError, StreamdError):
        if repair:
            _remove_if_idle(path)
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
        is_whole = cached == len(layout) - layout.codec.count(Codec.ZERO)
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


def _check_if_there(directory: Path) -> None:
    """Refuse a cache in which others could change what its paths lead to: nothing there is locked, moved or removed.

    Raises: `CacheUnusable`, `OSError`.
    """
    for path in (directory, directory / "images", directory / "pins"):
        with suppress(FileNotFoundError):
            opened(path).close()


def _discard_leftovers(directory: Path) -> None:
    """Move out what no process owns and none can use: begun by one that died, or of another format."""
    for entry in os.scandir(directory / "images"):
        path = Path(entry.path)
        with suppress(OSError):  # one image that can't be read costs itself
            if entry.is_dir(follow_symlinks=False) and not is_current(path):
                _remove_if_idle(path)


def _trash_bytes(directory: Path) -> int:
    """Bytes about to be free. Ask after the free ones: what is freed in between is missed then, not doubled."""
    return sum(_disk_bytes(Path(entry.path)) for entry in os.scandir(directory) if entry.name.startswith("trash-"))


def _remove_trash(directory: Path) -> None:
    with suppress(OSError):
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
            try:
                yield _describe(Path(entry.path))
            except FileNotFoundError:
                pass
            except OSError:  # it can still be cleared
                yield CachedImage(entry.name, 0, 0, 0.0, None, False)


def _describe(path: Path) -> CachedImage:
    is_pinned = (path.parent.parent / "pins" / path.name).exists()
    return CachedImage(path.name, _disk_bytes(path), _promised(path), _used_s(path), owner_of(path), is_pinned)


def _disk_bytes(path: Path) -> int:
    """What a directory's files take up; what vanishes meanwhile takes up nothing."""
    blocks = 0
    for directory, _, names in os.walk(path):
        for name in names:
            with suppress(FileNotFoundError):
                blocks += os.stat(os.path.join(directory, name), follow_symlinks=False).st_blocks
    return 512 * blocks


def _used_s(path: Path) -> float:
    try:
        return (path / "head").stat().st_mtime
    except FileNotFoundError:  # half-made
        return 0.0


def _promised(path: Path) -> int:
    try:
        return int((path / "promised").read_text()[:20])
    except (OSError, ValueError):
        return 0


def _remove_if_idle(path: Path) -> bool:
    """Take an image out of the cache unless a process owns it: by rename, so that nobody sees a half of it.

    Or unless its files are mounted: who owned it may have died, and the next one not be there yet (`daemon.life`).
    """
    try:
        fd = lock_image(path, None)
    except (Refused, CacheUnusable, OSError):
        return False
    try:
        with suppress(OSError):  # not there, or not to be opened
            if are_files_held(path / FILES):
                return False
        path.rename(path.parent.parent / f"trash-{uuid.uuid4().hex}")
    finally:
        os.close(fd)
    return True
