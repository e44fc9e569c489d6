"""The kernel's requests: reads are answered here, everything else by libfuse.

A restore makes thousands of reads, 128 of them waiting at any time, and everything else is a handful. So this loop owns
the mount's descriptor. A READ is parsed (40 + 40 bytes), handed to the image, and answered from whatever brings its
last chunk: no task, no lock and no epoll registration for each, which were more than a third of the serving thread's
time under pyfuse3 (py-spy, a restore at 800 Mbit/s). Every other request goes, as it is, to libfuse over a socket pair
that libfuse takes for the device, and libfuse's answers come back the same way: they keep their boundaries
(SOCK_SEQPACKET).

INTERRUPT is dropped: a read is never given up because a signal came (design rule 3), and nothing else takes long.

A connection may outlive its server: another process that has the descriptor takes it over (design §5). The kernel's
INIT, which it sends once, was kept by who mounted; libfuse is given it again, and its answer, which nobody waits for
any more, is refused and not missed. (Unless the last server died before it answered INIT: then that comes again, too,
and libfuse, which has answered one already, isn't asked: it gets the same answer.) What the last server had read and
not answered comes again, with another bit in its `unique` (FUSE_NOTIFY_RESEND). A server that was killed while the
kernel copied an answer out of it must have had every page of that answer in its page table, else that read ends in
EIO: so no buffer here, or in what replies are made of, is memory that was never touched.

Sources: linux/fuse.h (struct fuse_in_header, fuse_read_in, fuse_out_header; FUSE_MIN_READ_BUFFER and the rule that a
read of the device needs room for the largest write, fs/fuse/dev.c:fuse_dev_do_read).
"""

import errno
import os
import socket
import struct

import structlog
import trio

from streamd.serve.handles import ReadFailed
from streamd.serve.image import ServedImage
from streamd.serve.reads import Parts

log = structlog.get_logger()

_IN_HEADER = struct.Struct("<IIQQIIIHH")  # len, opcode, unique, nodeid, uid, gid, pid, total_extlen, padding
_READ_IN = struct.Struct("<QQIIQII")  # fh, offset, size, read_flags, lock_owner, flags, padding
_OUT_HEADER = struct.Struct("<IiQ")  # len, error, unique
_READ, _INIT, _INTERRUPT = 15, 26, 36
# The device gives no request to a reader without room for the largest write that was negotiated: libfuse asks for a
# megabyte (FUSE_MAX_MAX_PAGES), and we have no writes.
_REQUEST_BYTES = (1 << 20) + 8192
# Requests that are taken before others of this process get a turn.
_BATCH = 32
# An answer to a request that is over, or on a connection that is: nobody misses it (fs/fuse/dev.c:fuse_dev_do_write).
_NOBODY_WAITS = (errno.ENOENT, errno.ENODEV, errno.ECONNABORTED)


class Connection:
    """One mount's descriptor, served until the kernel ends it; the descriptor stays its opener's.

    `library_fd` is for libfuse to read and write, and to close. `init` is the kernel's first request, if somebody has
    read it already.
    """

    def __init__(self, image: ServedImage, device_fd: int, *, init: bytes | None = None) -> None:
        self._image = image
        self._device_fd = device_fd
        self._is_over = False
        ours, library = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours = ours
        self.library_fd = library.detach()
        os.set_blocking(device_fd, False)
        ours.setblocking(False)
        self._request = bytearray(_REQUEST_BYTES)
        self._reply = bytearray(_REQUEST_BYTES)
        # INIT as it was given to libfuse: its `unique`, libfuse's answer, and that of one that came again meanwhile.
        self._init_unique: int | None = None
        self._init_answer: bytes | None = None
        self._init_again: int | None = None
        if init is not None:
            _, _, self._init_unique, *_ = _IN_HEADER.unpack_from(init)
            ours.send(init)

    def let_go(self) -> None:
        """Read and answer nothing any more: from now on the connection is another process's."""
        self._is_over = True

    async def serve(self) -> None:
        """Pass requests and answers on until the connection ends."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._answers_of_libfuse)
            await self._requests()
            nursery.cancel_scope.cancel()

    def close(self) -> None:
        """Let go of our end of the pair."""
        self._ours.close()

    async def _requests(self) -> None:
        buffers = [self._request]
        while True:
            await trio.lowlevel.wait_readable(self._device_fd)
            for _ in range(_BATCH):
                if self._is_over:
                    return
                try:
                    size = os.readv(self._device_fd, buffers)
                except BlockingIOError:
                    break
                except OSError as error:
                    if error.errno in (errno.ENODEV, errno.ECONNABORTED):  # unmounted; aborted
                        return
                    if error.errno not in (errno.EINTR, errno.ENOENT):  # ENOENT: it was interrupted before we saw it
                        raise
                    continue
                if not size:
                    return
                _, opcode, unique, *_ = _IN_HEADER.unpack_from(self._request)
                if opcode == _READ:
                    self._read(unique)
                elif opcode == _INIT and self._init_unique is not None:
                    self._init_again = unique
                    self._answer_init_again()
                elif opcode != _INTERRUPT:
                    await self._pass_on(memoryview(self._request)[:size])

    def _answer_init_again(self) -> None:
        if self._init_again is not None and self._init_answer is not None:
            _, error, _ = _OUT_HEADER.unpack_from(self._init_answer)
            self._write(self._init_again, -error, [self._init_answer[_OUT_HEADER.size :]])
            self._init_again = None

    def _read(self, unique: int) -> None:
        try:
            self._begin_read(unique)
        except Exception:
            log.exception("a read failed in an unforeseen way")
            self._write(unique, errno.EIO, [])

    def _begin_read(self, unique: int) -> None:
        number, offset, size, *_ = _READ_IN.unpack_from(self._request, _IN_HEADER.size)
        try:
            handle = self._image.handle(number)
        except KeyError:
            self._write(unique, errno.EBADF, [])
            return

        def answer(result: Parts | ReadFailed) -> None:
            if isinstance(result, ReadFailed):
                self._write(unique, errno.EIO, [])
            else:
                self._write(unique, 0, result)

        self._image.begin_read(handle, offset, size, answer)

    def _write(self, unique: int, error: int, parts: Parts) -> None:
        """Answer a request. The kernel copies in this call, so the parts may change after it."""
        if self._is_over:
            return
        size = _OUT_HEADER.size + sum(len(part) for part in parts)
        try:
            os.writev(self._device_fd, [_OUT_HEADER.pack(size, -error, unique), *parts])
        except OSError as failure:
            if failure.errno not in _NOBODY_WAITS:
                log.error("the kernel refused an answer", error=str(failure), size=size)
                if not error:  # or the read would wait for ever
                    self._write(unique, errno.EIO, [])

    async def _pass_on(self, request: memoryview) -> None:
        while True:
            try:
                self._ours.send(request)
                return
            except BlockingIOError:
                await trio.lowlevel.wait_writable(self._ours)

    async def _answers_of_libfuse(self) -> None:
        view = memoryview(self._reply)
        while True:
            await trio.lowlevel.wait_readable(self._ours)
            try:
                size = self._ours.recv_into(self._reply)
            except BlockingIOError:
                continue
            if not size or self._is_over:
                return
            _, _, unique = _OUT_HEADER.unpack_from(self._reply)
            if unique == self._init_unique and self._init_answer is None:
                self._init_answer = bytes(view[:size])
                self._answer_init_again()
            try:
                os.write(self._device_fd, view[:size])
            except OSError as failure:
                if failure.errno not in _NOBODY_WAITS:
                    log.error("the kernel refused an answer of libfuse", error=str(failure), size=size)
