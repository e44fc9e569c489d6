"""What a process that serves pod memory sets for itself: no core file, nobody who looks into it, enough descriptors,
the last to be killed when memory is short, no rights that it doesn't use.

What the machine may refuse to a process like ours (a lower OOM score and PR_SET_IO_FLUSHER need CAP_SYS_RESOURCE, which
containers often lack) costs a line in the log; rights that were to be given up and weren't are an error.
"""

import ctypes
import faulthandler
import os
import resource
import signal
from collections.abc import Collection
from pathlib import Path

import structlog

from streamd.errors import NotPermitted, StreamdError

# linux/prctl.h
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_KEEPCAPS = 8
_PR_SET_NAME = 15
_PR_CAPBSET_READ, _PR_CAPBSET_DROP = 23, 24
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
_PR_SET_IO_FLUSHER = 57
# linux/capability.h
_CAPABILITY_VERSION_3 = 0x20080522
_CAPABILITIES_MAX = 64
# After what the node itself needs (kubelet and containerd have -999), before any pod's (-997 for guaranteed ones).
OOM_SCORE = -998
SERVING_NICE = -10

_libc = ctypes.CDLL(None, use_errno=True)
log = structlog.get_logger()


def name_process(name: str) -> None:
    """Give this process the name that ps shows (at most 15 characters)."""
    _libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def keep_memory_private() -> None:
    """No core files; and tracing this process, or reading /proc/PID/mem, takes root's capability (prctl(2))."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def die_with_parent(*, is_on: bool) -> None:
    """Have the kernel kill this process, even one that is stopped or hangs, when who forked it ends; or no more.

    It is the calling thread's, so that of whoever calls it twice must be the same; a change of user turns it off
    (prctl(2), PR_SET_PDEATHSIG).
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL if is_on else 0)


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open files to the hard one: connections to the store need some dozens at a time."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def dump_stacks_on_request() -> None:
    """Write the stacks of all threads to stderr at SIGUSR1; the process goes on."""
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)


def lower_oom_score(score: int = OOM_SCORE, *, path: Path = Path("/proc/self/oom_score_adj")) -> bool:
    """Be killed late when memory is short, since sandboxes die with their mount; tell whether that could be had.

    Children have the same score. Before privileges are dropped: the file is root's then.
    """
    try:
        path.write_text(str(score))
    except OSError as error:
        log.warning("memory pressure may kill this process early", oom_score=score, reason=error.strerror)
        return False
    return True


def favour_this_thread() -> bool:
    """Let this thread, which is to answer the kernel, go before others while the CPUs are busy; tell whether it may.

    What it starts, threads too, has the usual priority again (SCHED_RESET_ON_FORK, sched(7)): those fetch and write,
    which others wait for, so they are never put below it. On two CPUs that the restoring sandbox fills as well, over
    2 Gbit/s, the first request of a first restore came some 15 % earlier with such a distance.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_OTHER | os.SCHED_RESET_ON_FORK, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, 0, SERVING_NICE)  # of this thread alone on Linux: setpriority(2), "C library"
    except OSError as error:
        log.debug("the serving thread has the priority of the others", reason=error.strerror)
        return False
    return True


def mark_io_flusher() -> bool:
    """Have memory reclaim not wait for this process's I/O (PR_SET_IO_FLUSHER), else the two may wait for each other.

    Holds for the calling thread and those that it starts later (it is a flag of the task). Tells whether it could be.
    """
    if not _libc.prctl(_PR_SET_IO_FLUSHER, 1, 0, 0, 0):
        return True
    reason = os.strerror(ctypes.get_errno())
    log.warning("memory reclaim may wait for this process (no PR_SET_IO_FLUSHER)", reason=reason)
    return False


def drop_capabilities() -> None:
    """Stay who we are, without any capability, for good: root, too, is then an owner of files like any other.

    For a worker that has all its descriptors. It must have one thread: capabilities are each thread's own. Afterwards
    it makes files for itself alone (umask 077). Raises: `NotPermitted`; ValueError for a process with threads.
    """
    _require_one_thread()
    _bound_capabilities(frozenset())
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    _set_capabilities(0)
    os.umask(0o077)


def _require_one_thread() -> None:
    if len(os.listdir("/proc/self/task")) != 1:
        raise ValueError("privileges must be dropped before the first thread is started")


def _bound_capabilities(kept: frozenset[int]) -> None:
    """Make sure that no program that is run, and no file's capabilities, bring back others than those."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    for capability in range(_CAPABILITIES_MAX):
        if capability not in kept and _libc.prctl(_PR_CAPBSET_READ, capability, 0, 0, 0) == 1:
            _prctl(_PR_CAPBSET_DROP, capability)


def drop_privileges(uid: int, gid: int, *, keep_capabilities: Collection[int] = ()) -> None:
    """Become an ordinary user, for good: no groups, no capabilities but those to keep, none by running a program.

    For a worker that has all its descriptors, and has imported all that it needs: an interpreter in root's home is out
    of its reach afterwards. It must have one thread: capabilities are each thread's own.
    Afterwards it can't be looked into (PR_SET_DUMPABLE 0), makes files for itself alone (umask 077), and what of
    /proc/self is root's (oom_score_adj, say) is closed to it.
    Raises: `NotPermitted`, `StreamdError`; ValueError for root, or for a process with threads.
    """
    if uid <= 0 or gid <= 0:
        raise ValueError("root is not an ordinary user")
    _require_one_thread()
    kept = frozenset(keep_capabilities)
    _bound_capabilities(kept)
    if kept:
        _prctl(_PR_SET_KEEPCAPS, 1)
    try:
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
    except PermissionError as error:
        raise NotPermitted(f"privileges can't be dropped: {error.strerror}") from error
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    _set_capabilities(sum(1 << capability for capability in kept))
    _prctl(_PR_SET_DUMPABLE, 0)  # each change of credentials has set it to fs.suid_dumpable, which need not be 0
    os.umask(0o077)
    if os.getresuid() != (uid, uid, uid) or os.getresgid() != (gid, gid, gid) or os.getgroups():
        raise StreamdError("privileges were not dropped")


class _CapabilityHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _CapabilityData(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


def _set_capabilities(mask: int) -> None:
    """Have exactly these, none of them inheritable (capset(2), by glibc, which has no declaration of it)."""
    header = _CapabilityHeader(_CAPABILITY_VERSION_3, 0)
    data = (_CapabilityData * 2)()
    for index in range(2):
        word = mask >> (32 * index) & 0xFFFFFFFF
        data[index].effective = data[index].permitted = word
    if _libc.capset(ctypes.byref(header), data):
        raise NotPermitted(f"capset: {os.strerror(ctypes.get_errno())}")


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(
        ctypes.c_int(option), ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)
    ):
        raise NotPermitted(f"prctl {option}: {os.strerror(ctypes.get_errno())}")
