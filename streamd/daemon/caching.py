"""What a mount does with the node cache besides serving from it: opens it, and seals the image once it is whole.

Opening is bounded: a disk that hangs must not keep a pod from starting. Sealing takes as long as the disk needs.
"""

import os
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import structlog
import trio

from streamd.config import ConfigError
from streamd.daemon.options import MountOptions
from streamd.daemon.worker_user import as_owner
from streamd.errors import NotPermitted, StreamdError
from streamd.serve.cache_directory import open_cache
from streamd.serve.node_cache import CacheUnusable, NodeCache
from streamd.serve.plan import Layout
from streamd.serve.sealing import is_sealed, seal
from streamd.store.catalog import Pinned
from streamd.store.port import Store

log = structlog.get_logger()

_T = TypeVar("_T")

# A healthy directory opens in milliseconds.
_CACHE_OPEN_TIMEOUT_S = 5.0
_NO_ROOM = "its disk is full, or up to cache.reserve_bytes, or cache.max_bytes is used up by images that must stay"
# How often it is looked whether an image is whole: what a next mount can't be sooner than.
_WHOLE_LOOK_S = 0.5


class Late(Generic[_T]):
    """A call in a thread whose result is let go of when it comes after the caller has given up: a disk that hung must
    not leave locks behind that nobody uses."""

    def __init__(self, let_go: Callable[[_T], object]) -> None:
        self._let_go = let_go
        self._lock = threading.Lock()
        self._is_given_up = False
        self._results: list[_T] = []

    async def call(self, function: Callable[..., _T], *args: object) -> _T:
        """Make the call. Raises: what it raises; `trio.Cancelled`, and then its result is nobody's."""

        def run() -> None:
            result = function(*args)
            with self._lock:
                if not self._is_given_up:
                    self._results.append(result)
                    return
            self._let_go(result)

        try:
            await trio.to_thread.run_sync(run, abandon_on_cancel=True)
        except trio.Cancelled:
            with self._lock:
                self._is_given_up = True
                results, self._results = self._results, []
            for result in results:
                self._let_go(result)
            raise
        return self._results.pop()


async def open_node_cache(options: MountOptions, store: Store, pinned: Pinned) -> tuple[NodeCache | None, str | None]:
    """Open a snapshot's place in the node cache; or say in the second value why the mount has to do without.

    (None, None) when no cache is wanted; both when what is there can be used, and no more fits. Raises: `Refused` when
    another process owns the place.
    """
    directory = options.cache_dir
    if directory is None:
        return None, None
    owner = f"the mount at {options.mountpoint} (pid {os.getpid()})"
    layout = Layout(pinned.manifest.table)
    place = store.url.partition("?")[0]  # whatever link it is behind
    tenant = [f"tenant {options.tenant}"] if options.tenant else []
    source = "\n".join([place, *tenant, *(f"{pack.key} {pack.generation}" for pack in pinned.packs)])

    def open_it() -> NodeCache:
        with as_owner(directory, options.config):
            cache = open_cache(
                directory,
                pinned.data,
                layout,
                files=pinned.manifest.files,
                source=source,
                owner=owner,
                max_bytes=options.cache_max_bytes,
                reserve_bytes=options.config.cache.reserve_bytes,
                recent_s=options.config.cache.recent_s,
            )
        make_room = cache.make_room

        def make_room_as_owner() -> bool:
            with as_owner(directory, options.config):
                return make_room()

        cache.make_room = make_room_as_owner
        return cache

    problem = f"cache directory {directory} did not answer within {_CACHE_OPEN_TIMEOUT_S} s"
    cache = Late[NodeCache](NodeCache.close)
    with trio.move_on_after(_CACHE_OPEN_TIMEOUT_S):
        try:
            opened = await cache.call(open_it)
            has_room = opened.room_bytes or layout.zero_chunks == len(layout)
            return opened, None if has_room else f"cache directory {directory} has no room for it: {_NO_ROOM}"
        except (CacheUnusable, ConfigError, NotPermitted, OSError) as error:
            problem = str(error)
    memory_max_bytes = options.config.memory_max_bytes
    log.warning("no cache on disk, serving from memory", reason=problem, memory_max_bytes=memory_max_bytes)
    return None, problem


async def seal_when_whole(
    cache: NodeCache, pinned: Pinned, options: MountOptions, is_whole: Callable[[], bool]
) -> None:
    """Seal an image once all of it is in the cache, so that the next mount is warm (`daemon.warm`).

    Tried once in a mount's life: what was in the way then (a damaged chunk, a disk that fails) is fetched again by
    whoever reads it, and the next mount, or `cache verify`, tries again.
    """
    while not is_whole():
        await trio.sleep(_WHOLE_LOOK_S)
    files, layout = pinned.manifest.files, Layout(pinned.manifest.table)
    directory = options.cache_dir
    assert directory is not None

    def seal_it() -> None:
        with as_owner(directory, options.config):
            if not is_sealed(cache, files):  # by a worker whose place this one has taken
                seal(cache, files, layout)

    try:
        await trio.to_thread.run_sync(seal_it, abandon_on_cancel=True)
    except (StreamdError, OSError) as error:
        log.warning("the image was not sealed, the next mount serves it", reason=str(error))
    else:
        log.info("image sealed: the next mount of it is warm", image_bytes=layout.start[-1])
