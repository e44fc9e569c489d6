"""What the kernel may ask of a mounted snapshot, but for reads: three read-only files in one directory.

Names, sizes and attributes never change while mounted and are answered from memory, so `ls`, `stat` and `close` answer
at once whatever the store does. Only a read of pages.img can wait, and those never come here (`connection.py`).

An exception that leaves a pyfuse3 handler ends the whole mount, so every handler is guarded: what isn't a `FUSEError`
is logged and becomes EIO for that one request.
"""

import errno
import functools
import stat
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

import pyfuse3
import structlog
import trio

from streamd.fuse import openers
from streamd.serve.handles import Opener
from streamd.serve.image import ServedImage
from streamd.snapshot.names import IMAGE_FILES, PAGES

log = structlog.get_logger()

_P = ParamSpec("_P")
_T = TypeVar("_T")

_ROOT = pyfuse3.ROOT_INODE
_FIRST_FILE = pyfuse3.InodeT(_ROOT + 1)
# The kernel may keep what never changes for as long as it likes.
_FOREVER_S = 86400.0
# Reading another process's command line can wait for that process (its mmap lock); a name in a log isn't worth that.
_OPENER_TIMEOUT_S = 1.0


def _guarded(handler: Callable[_P, Coroutine[Any, Any, _T]]) -> Callable[_P, Coroutine[Any, Any, _T]]:
    @functools.wraps(handler)
    async def guard(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return await handler(*args, **kwargs)
        except pyfuse3.FUSEError:
            raise
        except Exception:
            log.exception("a request failed in an unforeseen way", operation=handler.__name__)
            raise pyfuse3.FUSEError(errno.EIO) from None

    return guard


class Operations(pyfuse3.Operations):
    """Serve one image."""

    supports_dot_lookup = False
    enable_writeback_cache = False
    enable_acl = False

    def __init__(self, image: ServedImage) -> None:
        super().__init__()
        self._image = image
        self._names = tuple(name for name in IMAGE_FILES if name in image.files)
        self._created_ns = int(image.manifest.created_s * 1e9)

    @_guarded
    async def getattr(self, inode: pyfuse3.InodeT, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        return self._attributes(inode)

    @_guarded
    async def lookup(
        self, parent_inode: pyfuse3.InodeT, name: pyfuse3.FileNameT, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        text = name.decode(errors="replace")
        if parent_inode == _ROOT and text in self._names:
            return self._attributes(self._inode(text))
        if parent_inode == _ROOT and text == ".":
            return self._attributes(_ROOT)
        # gcs_opts.json among them: with it, runsc would leave this mount aside and read from a bucket that it names.
        raise pyfuse3.FUSEError(errno.ENOENT)

    @_guarded
    async def opendir(self, inode: pyfuse3.InodeT, ctx: pyfuse3.RequestContext) -> pyfuse3.FileHandleT:
        return inode

    @_guarded
    async def readdir(self, fh: pyfuse3.FileHandleT, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        for index, name in enumerate(self._names[start_id:], start=start_id):
            file_name = pyfuse3.FileNameT(name.encode())
            if not pyfuse3.readdir_reply(token, file_name, self._attributes(self._inode(name)), index + 1):
                return

    @_guarded
    async def releasedir(self, fh: pyfuse3.FileHandleT) -> None:
        pass

    @_guarded
    async def statfs(self, ctx: pyfuse3.RequestContext) -> pyfuse3.StatvfsData:
        total = sum(file.size for file in self._image.files.values())
        info = pyfuse3.StatvfsData()
        info.f_bsize = info.f_frsize = 4096
        info.f_blocks = -(-total // 4096)
        info.f_bfree = info.f_bavail = 0
        info.f_files = len(self._names) + 1
        info.f_ffree = info.f_favail = 0
        info.f_namemax = 255
        return info

    @_guarded
    async def open(self, inode: pyfuse3.InodeT, flags: pyfuse3.FlagT, ctx: pyfuse3.RequestContext) -> pyfuse3.FileInfo:
        name = self._name(inode)
        handle = self._image.open(name, await _opener(ctx.pid))
        log.info("file opened", file=name, handle=handle.number, pid=ctx.pid, container=handle.opener.container)
        # direct_io: 256 KiB requests, all 128 of runsc's at once; without it, readahead's 12 background requests are
        # the limit and a restore takes 2 to 16 times as long (278 MB at 300 ms a read: 3.4 s, else 9 to 55).
        is_pages = name == PAGES
        return pyfuse3.FileInfo(
            fh=pyfuse3.FileHandleT(handle.number), direct_io=is_pages, keep_cache=not is_pages, nonseekable=False
        )

    @_guarded
    async def flush(self, fh: pyfuse3.FileHandleT) -> None:
        # Answered so once, the kernel never asks again: a close() on a mount whose server is gone would hang in it.
        raise pyfuse3.FUSEError(errno.ENOSYS)

    @_guarded
    async def release(self, fh: pyfuse3.FileHandleT) -> None:
        self._image.release(fh)

    @_guarded
    async def forget(self, inode_list: object) -> None:
        pass

    def _inode(self, name: str) -> pyfuse3.InodeT:
        return pyfuse3.InodeT(_FIRST_FILE + self._names.index(name))

    def _name(self, inode: pyfuse3.InodeT) -> str:
        index = inode - _FIRST_FILE
        if not 0 <= index < len(self._names):
            raise pyfuse3.FUSEError(errno.EISDIR if inode == _ROOT else errno.ENOENT)
        return self._names[index]

    def _attributes(self, inode: pyfuse3.InodeT) -> pyfuse3.EntryAttributes:
        entry = pyfuse3.EntryAttributes()
        entry.st_ino = inode
        entry.entry_timeout = entry.attr_timeout = _FOREVER_S
        entry.st_atime_ns = entry.st_mtime_ns = entry.st_ctime_ns = self._created_ns
        if inode == _ROOT:
            entry.st_mode = stat.S_IFDIR | 0o500
            entry.st_nlink = 2
            return entry
        size = self._image.files[self._name(inode)].size
        # Open descriptors are handed to the sandbox; with 0444 every local user could read a pod's memory.
        entry.st_mode = stat.S_IFREG | 0o400
        entry.st_size = size
        entry.st_blocks = -(-size // 512)
        entry.st_blksize = 256 << 10
        return entry


async def _opener(pid: int) -> Opener:
    with trio.move_on_after(_OPENER_TIMEOUT_S):
        return await trio.to_thread.run_sync(openers.describe, pid, abandon_on_cancel=True)
    return Opener(pid, "", None)
