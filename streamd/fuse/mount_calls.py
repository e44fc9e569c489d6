"""The kernel's calls for mounts: umount2(2), and those of 5.2 that handle a mount by a descriptor.

With fsopen(2), fsmount(2), open_tree(2) and move_mount(2) a mount has a descriptor before it has a place: it is put on
a directory that is held open, and taken away again, without any path that someone could redirect meanwhile. FUSE has
them since 5.4; mount_setattr(2) came with 5.12. Everything here raises `OSError`.
"""

import ctypes
import errno
import os
import struct
from collections.abc import Mapping

# sys/mount.h
MNT_FORCE, MNT_DETACH = 1, 2
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV, MOUNT_ATTR_NOEXEC = 1, 2, 4, 8
_MOUNT_ATTR_NOSYMFOLLOW = 1 << 21
_UMOUNT_NOFOLLOW = 8
_MS_PRIVATE = 1 << 18
_FSOPEN_CLOEXEC = _FSMOUNT_CLOEXEC = 1
# linux/mount.h, linux/fcntl.h
_OPEN_TREE_CLONE, _OPEN_TREE_CLOEXEC, _AT_EMPTY_PATH = 1, os.O_CLOEXEC, 0x1000
_MOUNT_ATTR = struct.Struct("QQQQ")  # struct mount_attr: attr_set, attr_clr, propagation, userns_fd
_FSCONFIG_SET_FLAG, _FSCONFIG_SET_STRING, _FSCONFIG_CMD_CREATE = 0, 1, 6
_MOVE_MOUNT_F_EMPTY_PATH, _MOVE_MOUNT_T_EMPTY_PATH = 0x04, 0x40
# asm-generic/unistd.h; since 5.1 new calls have one number on all architectures (but alpha).
_SYS_OPEN_TREE, _SYS_MOVE_MOUNT, _SYS_FSOPEN, _SYS_FSCONFIG, _SYS_FSMOUNT = 428, 429, 430, 431, 432
_SYS_MOUNT_SETATTR = 442

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def new_mount(filesystem: str, options: Mapping[str, str | None], attributes: int) -> int:
    """Make a mount that has no place yet, and give its descriptor; closing that ends a mount which got no place.

    `options` are the file system's, None for those without a value; `attributes` are MOUNT_ATTR_ flags.
    """
    context = _syscall(_SYS_FSOPEN, filesystem.encode(), _FSOPEN_CLOEXEC)
    try:
        for key, value in options.items():
            command = _FSCONFIG_SET_FLAG if value is None else _FSCONFIG_SET_STRING
            _syscall(_SYS_FSCONFIG, context, command, key.encode(), None if value is None else value.encode(), 0)
        _syscall(_SYS_FSCONFIG, context, _FSCONFIG_CMD_CREATE, None, None, 0)
        return _syscall(_SYS_FSMOUNT, context, _FSMOUNT_CLOEXEC, attributes)
    finally:
        os.close(context)


def clone_mount(directory_fd: int) -> int:
    """Make another mount of what an open directory shows, itself as the root; it has no place yet (see `new_mount`)."""
    flags = _OPEN_TREE_CLONE | _OPEN_TREE_CLOEXEC | _AT_EMPTY_PATH
    return _syscall(_SYS_OPEN_TREE, directory_fd, b"", flags)


def set_attributes(mount_fd: int, attributes: int) -> None:
    """Give a mount MOUNT_ATTR_ flags, beside those that it has, and cut its ties to what it is a copy of.

    Without that, what is mounted or unmounted below the original shows in the copy (mount_namespaces(7)).
    """
    values = _MOUNT_ATTR.pack(attributes, 0, _MS_PRIVATE, 0)
    _syscall(_SYS_MOUNT_SETATTR, mount_fd, b"", _AT_EMPTY_PATH, values, len(values))


def forbid_symlinks(mount_fd: int) -> None:
    """Have no symlink of a mount followed: who serves its files must not lead root, who opens them, to others.

    A kernel before 5.14 can't; that changes nothing.
    """
    try:
        set_attributes(mount_fd, _MOUNT_ATTR_NOSYMFOLLOW)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS):
            raise


def move_mount(mount_fd: int, directory_fd: int) -> None:
    """Put a mount on top of a directory, wherever that is now."""
    flags = _MOVE_MOUNT_F_EMPTY_PATH | _MOVE_MOUNT_T_EMPTY_PATH
    _syscall(_SYS_MOVE_MOUNT, mount_fd, b"", directory_fd, b"", flags)


def umount(target: str, flags: int) -> None:
    """Unmount what is mounted on a path, whose last component is not followed if it is a symlink."""
    _checked(_libc.umount2(os.fsencode(target), ctypes.c_int(flags | _UMOUNT_NOFOLLOW)), target)


def detach(mount_fd: int) -> None:
    """Take away the mount that a descriptor is the root of, wherever it is."""
    target = f"/proc/self/fd/{mount_fd}"
    _checked(_libc.umount2(target.encode(), ctypes.c_int(MNT_DETACH)), target)


def _syscall(number: int, *arguments: int | bytes | None) -> int:
    # As long: a C int among variadic arguments would leave the upper half of its register undefined.
    values = [ctypes.c_long(value) if isinstance(value, int) else ctypes.c_char_p(value) for value in arguments]
    return _checked(int(_libc.syscall(ctypes.c_long(number), *values)))


def _checked(result: int, path: str | None = None) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), path)
    return result
