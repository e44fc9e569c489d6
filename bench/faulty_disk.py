"""A disk that fails on demand: a pass-through file system in a process of its own, told by its stdin what to do.

    python faulty_disk.py BACKING MOUNTPOINT

It says `ready` once it serves. A line `read eio`, `write hang`, `all hang` … (operation: read, write, or all, which is
every request; answer: eio, hang, ok) is confirmed by the same line on stdout once it holds. What hangs goes on when its
operation is `ok` again. It ends when its stdin does. (device-mapper's error and delay targets need a kernel module.)
"""

import errno
import os
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import pyfuse3
import trio

ROOT = pyfuse3.ROOT_INODE
ANSWERS = ("ok", "eio", "hang")


class FaultyDisk(pyfuse3.Operations):
    """Passes everything on to the files below `backing`, which nothing else changes meanwhile."""

    enable_writeback_cache = False

    def __init__(self, backing: str) -> None:
        super().__init__()
        self._paths: dict[int, str] = {ROOT: backing}
        self._answers = {"read": "ok", "write": "ok", "all": "ok"}
        self._changed = trio.Event()

    def set(self, operation: str, answer: str) -> None:
        """Answer an operation that way from now on."""
        if operation not in self._answers or answer not in ANSWERS:
            raise ValueError(f"{operation} {answer}")
        self._answers[operation] = answer
        self._changed.set()
        self._changed = trio.Event()

    async def _obey(self, *operations: str) -> None:
        while "hang" in [self._answers[operation] for operation in operations]:
            await self._changed.wait()
        if "eio" in [self._answers[operation] for operation in operations]:
            raise pyfuse3.FUSEError(errno.EIO)

    def _path(self, inode: int, name: bytes | None = None) -> str:
        path = self._paths[inode]
        return path if name is None else os.path.join(path, os.fsdecode(name))

    def _entry(self, path: str) -> pyfuse3.EntryAttributes:
        found = os.lstat(path)
        entry = pyfuse3.EntryAttributes()
        for field in ("st_mode", "st_nlink", "st_uid", "st_gid", "st_size", "st_blocks"):
            setattr(entry, field, getattr(found, field))
        entry.st_atime_ns, entry.st_mtime_ns, entry.st_ctime_ns = (
            found.st_atime_ns,
            found.st_mtime_ns,
            found.st_ctime_ns,
        )
        entry.st_blksize = 4096
        entry.st_ino = ROOT if path == self._paths[ROOT] else found.st_ino + 16
        entry.entry_timeout = entry.attr_timeout = 0
        self._paths[entry.st_ino] = path
        return entry

    async def lookup(self, parent_inode: Any, name: Any, ctx: Any) -> Any:
        await self._obey("all")
        return self._entry(self._path(parent_inode, name))

    async def getattr(self, inode: Any, ctx: Any) -> Any:
        await self._obey("all")
        return self._entry(self._path(inode))

    async def setattr(self, inode: Any, attr: Any, fields: Any, fh: Any, ctx: Any) -> Any:
        await self._obey("all", "write")
        path = self._path(inode)
        if fields.update_size:
            os.truncate(path, attr.st_size)
        if fields.update_mode:
            os.chmod(path, attr.st_mode & 0o7777)
        if fields.update_mtime:
            os.utime(path, ns=(attr.st_atime_ns, attr.st_mtime_ns))
        return self._entry(path)

    async def opendir(self, inode: Any, ctx: Any) -> Any:
        await self._obey("all")
        return inode

    async def readdir(self, fh: Any, start_id: int, token: Any) -> None:
        await self._obey("all")
        path = self._path(fh)
        for index, name in enumerate(sorted(os.listdir(path))[start_id:], start=start_id + 1):
            if not pyfuse3.readdir_reply(token, os.fsencode(name), self._entry(os.path.join(path, name)), index):
                return

    async def releasedir(self, fh: Any) -> None:
        pass

    async def mkdir(self, parent_inode: Any, name: Any, mode: int, ctx: Any) -> Any:
        await self._obey("all", "write")
        path = self._path(parent_inode, name)
        os.mkdir(path, mode & 0o777)
        return self._entry(path)

    async def unlink(self, parent_inode: Any, name: Any, ctx: Any) -> None:
        await self._obey("all", "write")
        os.unlink(self._path(parent_inode, name))

    async def rmdir(self, parent_inode: Any, name: Any, ctx: Any) -> None:
        await self._obey("all", "write")
        os.rmdir(self._path(parent_inode, name))

    async def rename(
        self, parent_inode_old: Any, name_old: Any, parent_inode_new: Any, name_new: Any, flags: int, ctx: Any
    ) -> None:
        await self._obey("all", "write")
        if flags:  # RENAME_EXCHANGE, RENAME_NOREPLACE: nobody here asks for them
            raise pyfuse3.FUSEError(errno.EINVAL)
        old, new = self._path(parent_inode_old, name_old), self._path(parent_inode_new, name_new)
        os.rename(old, new)
        for inode, path in self._paths.items():
            if path == old or path.startswith(f"{old}/"):
                self._paths[inode] = new + path.removeprefix(old)

    async def create(self, parent_inode: Any, name: Any, mode: int, flags: int, ctx: Any) -> Any:
        await self._obey("all", "write")
        path = self._path(parent_inode, name)
        fd = os.open(path, flags | os.O_CREAT, mode & 0o777)
        return pyfuse3.FileInfo(fh=pyfuse3.FileHandleT(fd)), self._entry(path)

    async def open(self, inode: Any, flags: int, ctx: Any) -> Any:
        await self._obey("all")
        return pyfuse3.FileInfo(fh=pyfuse3.FileHandleT(os.open(self._path(inode), flags & ~os.O_CREAT)))

    async def read(self, fh: Any, off: int, size: int) -> bytes:
        await self._obey("all", "read")
        return os.pread(fh, size, off)

    async def write(self, fh: Any, off: int, buf: bytes) -> int:
        await self._obey("all", "write")
        return os.pwrite(fh, buf, off)

    async def fsync(self, fh: Any, datasync: bool) -> None:
        await self._obey("all", "write")

    async def flush(self, fh: Any) -> None:
        # A disk has no such request: closing a file of a hung disk doesn't wait for it.
        raise pyfuse3.FUSEError(errno.ENOSYS)

    async def release(self, fh: Any) -> None:
        os.close(fh)

    async def forget(self, inode_list: Any) -> None:
        pass

    async def statfs(self, ctx: Any) -> Any:
        await self._obey("all")
        found, info = os.statvfs(self._paths[ROOT]), pyfuse3.StatvfsData()
        for field in ("f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_bavail", "f_files", "f_ffree", "f_favail"):
            setattr(info, field, getattr(found, field))
        info.f_namemax = 255
        return info


def _guard(handler: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Coroutine[Any, Any, Any]]:
    async def guarded(*args: Any) -> Any:
        try:
            return await handler(*args)
        except OSError as error:
            raise pyfuse3.FUSEError(error.errno or errno.EIO) from None

    return guarded


async def _listen(disk: FaultyDisk, scope: trio.CancelScope) -> None:
    pending = b""
    async with trio.lowlevel.FdStream(os.dup(0)) as stream:
        async for piece in stream:
            *lines, pending = (pending + piece).split(b"\n")
            for line in lines:
                disk.set(*line.decode().split())
                print(line.decode(), flush=True)
    for operation in ("read", "write", "all"):
        disk.set(operation, "eio")
    scope.cancel()


async def _serve(disk: FaultyDisk) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_listen, disk, nursery.cancel_scope)
        nursery.start_soon(lambda: pyfuse3.main(min_tasks=64, max_tasks=64))
        print("ready", flush=True)


def main() -> None:
    """Serve BACKING at MOUNTPOINT until stdin ends."""
    backing, mountpoint = sys.argv[1:]
    for name in (
        "lookup",
        "getattr",
        "setattr",
        "readdir",
        "mkdir",
        "unlink",
        "rmdir",
        "rename",
        "create",
        "open",
        "read",
        "write",
    ):
        setattr(FaultyDisk, name, _guard(getattr(FaultyDisk, name)))
    disk = FaultyDisk(backing)
    pyfuse3.init(disk, mountpoint, {"fsname=faulty-disk", "default_permissions"})
    try:
        trio.run(_serve, disk)
    finally:
        pyfuse3.close(unmount=False)


if __name__ == "__main__":
    main()
