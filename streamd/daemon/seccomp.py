"""A filter on system calls for a process that holds pod memory and talks to the network: none that it never needs.

What it does to the rest of the machine ends with this: no program is run, no process traced, no mount or namespace
made or changed, no module or BPF program loaded, no file opened by handle; and no other process is signalled (nor by
the kernel in our name, as a descriptor's owner is), given limits or scheduled otherwise, since the workers of all
tenants may be of one user. These calls answer EPERM, so that a library that tries one goes on. Threads, sockets of the
usual families, files and FUSE go on as they were; so does fork(2), whose child is under it.

The filter looks at the architecture first: calls by another one (32-bit ones, where numbers mean something else) kill
the process, and those of x32 are refused. clone(2) may not make namespaces; clone3(2), whose flags are in memory, where
a filter can't look, answers ENOSYS, and C libraries go back to clone. io_uring is refused because a filter doesn't see
what is asked through it. Filters can't be taken off again (seccomp(2)).
"""

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Mapping, Sequence

from streamd.errors import StreamdError

# Numbers on (x86_64, aarch64): asm/unistd_64.h, asm-generic/unistd.h.
DENIED: Mapping[str, tuple[int, int]] = {
    "execve": (59, 221), "execveat": (322, 281), "ptrace": (101, 117),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "pidfd_getfd": (438, 438), "kcmp": (312, 272),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "move_mount": (429, 429),
    "open_tree": (428, 428), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "mount_setattr": (442, 442), "setns": (308, 268), "unshare": (272, 97), "open_by_handle_at": (304, 265),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142), "swapon": (167, 224),
    "swapoff": (168, 225), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "kill": (62, 129), "tkill": (200, 130), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
    "ioprio_set": (251, 30), "sched_setaffinity": (203, 122), "sched_setattr": (314, 274),
    "sched_setparam": (142, 118), "sched_setscheduler": (144, 119), "migrate_pages": (256, 238),
    "move_pages": (279, 239), "process_madvise": (440, 440),
    "shmget": (29, 194), "shmat": (30, 196), "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
}  # fmt: skip
# What a process needs that runs commands for its tokens.
_RUNNING_PROGRAMS = ("execve", "execveat", "kill")
# Calls that name a process first, and may name this one: abort(3) and pthread_kill(3) use the one, by our number;
# getrlimit(2) is the other, with 0.
_TGKILL, _PRLIMIT = (234, 131), (302, 261)
# Of this thread alone (PRIO_PROCESS and 0): what seals an image steps back behind everything else.
_SETPRIORITY = (141, 140)
# Who gets a descriptor's signals, and which (asm-generic/fcntl.h, asm-generic/sockios.h).
_FCNTL, _OWNER_COMMANDS = (72, 25), (8, 10, 15)  # F_SETOWN, F_SETSIG, F_SETOWN_EX
_IOCTL, _OWNER_REQUESTS = (16, 29), (0x8901, 0x8902)  # FIOSETOWN, SIOCSPGRP
# linux/socket.h: AF_UNIX, AF_INET, AF_INET6, and AF_NETLINK, by which C libraries learn of addresses.
_SOCKET, _FAMILIES = (41, 198), (1, 2, 10, 16)
_CLONE, _CLONE3 = (56, 220), 435
_CLONE_NEW = 0x7E020000  # all CLONE_NEW* flags of linux/sched.h that clone(2) takes
_X32 = 0x40000000  # asm/unistd.h: __X32_SYSCALL_BIT
# linux/audit.h, and which of the two numbers above
_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}

# linux/bpf_common.h, linux/seccomp.h; offsets are those of struct seccomp_data (both machines are little-endian)
_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _FIRST_ARGUMENT_AT, _SECOND_ARGUMENT_AT = 0, 4, 16, 24
_ALLOW, _ERRNO, _KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
_REFUSED = _ERRNO | errno.EPERM
_SET_MODE_FILTER, _FLAG_TSYNC = 1, 1
_SYS_SECCOMP = (317, 277)
_PR_SET_NO_NEW_PRIVS = 38

_libc = ctypes.CDLL(None, use_errno=True)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def is_supported() -> bool:
    """Whether the numbers of this machine's calls are known here."""
    return platform.machine() in _ARCHITECTURES


def filter_program(machine: str, *, pid: int, may_run_programs: bool = False) -> bytes:
    """Write the filter of process `pid` for a machine (`uname -m`). Raises: KeyError for one that isn't known.

    With `may_run_programs` those, too, may send and limit what they may; they inherit the filter.
    """
    audit_number, column = _ARCHITECTURES[machine]
    refused = [
        numbers[column] for name, numbers in DENIED.items() if not (may_run_programs and name in _RUNNING_PROGRAMS)
    ]
    program = [
        _step(_LOAD, _ARCHITECTURE_AT),
        _step(_JUMP_EQUAL, audit_number, if_true=1),
        _step(_RETURN, _KILL_PROCESS),
        _step(_LOAD, _NUMBER_AT),
    ]
    if machine == "x86_64":
        program += [_step(_JUMP_AT_LEAST, _X32, if_false=1), _step(_RETURN, _REFUSED)]
    for number in refused:
        program += [_step(_JUMP_EQUAL, number, if_false=1), _step(_RETURN, _REFUSED)]
    if not may_run_programs:
        for numbers, allowed in ((_TGKILL, pid), (_PRLIMIT, 0)):
            program += _by_argument(numbers[column], _FIRST_ARGUMENT_AT, (allowed,), listed=_ALLOW, others=_REFUSED)
    program += [
        _step(_JUMP_EQUAL, _SETPRIORITY[column], if_false=6),
        _step(_LOAD, _FIRST_ARGUMENT_AT),
        _step(_JUMP_EQUAL, os.PRIO_PROCESS, if_false=2),
        _step(_LOAD, _SECOND_ARGUMENT_AT),
        _step(_JUMP_EQUAL, 0, if_true=1),
        _step(_RETURN, _REFUSED),
        _step(_RETURN, _ALLOW),
    ]
    program += _by_argument(_SOCKET[column], _FIRST_ARGUMENT_AT, _FAMILIES, listed=_ALLOW, others=_REFUSED)
    for numbers, refused_values in ((_FCNTL, _OWNER_COMMANDS), (_IOCTL, _OWNER_REQUESTS)):
        program += _by_argument(numbers[column], _SECOND_ARGUMENT_AT, refused_values, listed=_REFUSED, others=_ALLOW)
    program += [
        _step(_JUMP_EQUAL, _CLONE3, if_false=1),
        _step(_RETURN, _ERRNO | errno.ENOSYS),
        _step(_JUMP_EQUAL, _CLONE[column], if_false=3),
        _step(_LOAD, _FIRST_ARGUMENT_AT),
        _step(_JUMP_ANY_BIT, _CLONE_NEW, if_false=1),
        _step(_RETURN, _REFUSED),
        _step(_RETURN, _ALLOW),
    ]
    return b"".join(program)


def _by_argument(number: int, argument_at: int, values: Sequence[int], *, listed: int, others: int) -> list[bytes]:
    """Answer a call by the lower half of one of its arguments, which is all that the kernel takes of these."""
    looks = [step for value in values for step in (_step(_JUMP_EQUAL, value, if_false=1), _step(_RETURN, listed))]
    body = [_step(_LOAD, argument_at), *looks, _step(_RETURN, others)]
    return [_step(_JUMP_EQUAL, number, if_false=len(body)), *body]


def _step(code: int, value: int, *, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)  # struct sock_filter; jumps count from the next step


def deny_dangerous_calls(*, may_run_programs: bool = False) -> None:
    """Put all threads of this process under the filter, for ever. Raises: `StreamdError`."""
    if not is_supported():
        raise StreamdError(f"no filter of system calls for {platform.machine()} machines")
    program = filter_program(platform.machine(), pid=os.getpid(), may_run_programs=may_run_programs)
    _, column = _ARCHITECTURES[platform.machine()]
    if _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise StreamdError(f"PR_SET_NO_NEW_PRIVS: {os.strerror(ctypes.get_errno())}")
    described = _Program(len(program) // 8, program)
    answer = _libc.syscall(
        ctypes.c_long(_SYS_SECCOMP[column]),
        ctypes.c_uint(_SET_MODE_FILTER),
        ctypes.c_uint(_FLAG_TSYNC),
        ctypes.byref(described),
    )
    if answer:
        why = os.strerror(ctypes.get_errno()) if answer < 0 else f"thread {answer} has a filter of its own"
        raise StreamdError(f"no filter of system calls: {why}")
