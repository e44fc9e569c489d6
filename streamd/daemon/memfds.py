"""Small data as a descriptor: a sealed memfd, which can lie in an fd store or be handed to a worker.

Sealed means that nobody, not even who made it, can change it any more (memfd_create(2), F_ADD_SEALS): what is read is
what was written, whole. Contents may be private and never show in a name or in an error.
"""

import errno
import fcntl
import os

from streamd.errors import StreamdError

# An INIT message has some hundred bytes, the state of an image some thousand; the store's memory is the manager's.
MEMFD_MAX_BYTES = 64 << 10
# linux/memfd.h, 6.3: data is no program. Where vm.memfd_noexec is 2, a memfd without it is refused.
_MFD_NOEXEC_SEAL = 8
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class BadMemfd(StreamdError):
    """A descriptor is not a sealed memfd of a bearable size: not one of ours."""

    kind = "bad-memfd"


def new_memfd(name: str) -> int:
    """Give an empty memfd that can be sealed. Raises: `OSError`."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create(name, flags)


def memfd_of(data: bytes, name: str = "streamd", *, max_bytes: int = MEMFD_MAX_BYTES) -> int:
    """Give a new sealed memfd with these bytes; `name` shows in /proc/PID/fd. Raises: `OSError`, `ValueError`."""
    if len(data) > max_bytes:
        raise ValueError(f"{len(data)} bytes are too many for a memfd (at most {max_bytes})")
    fd = new_memfd(name)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(fd, rest) :]
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def bytes_of(fd: int, *, max_bytes: int = MEMFD_MAX_BYTES) -> bytes:
    """Give what is in a memfd that `memfd_of` made; its position plays no part. Raises: `BadMemfd`."""
    try:
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise BadMemfd("a stored memfd is not sealed")
        size = os.fstat(fd).st_size
        if size > max_bytes:
            raise BadMemfd(f"a stored memfd has {size} bytes (at most {max_bytes})")
        data = os.pread(fd, size, 0)
    except OSError as error:  # EINVAL: not a memfd
        raise BadMemfd(f"a stored descriptor is no memfd: {error.strerror}") from error
    if len(data) != size:
        raise BadMemfd("a stored memfd could not be read whole")
    return data
