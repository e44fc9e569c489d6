"""What a process that serves pod memory sets for itself: no core file, nobody who looks into it, enough descriptors."""

import ctypes
import resource

# linux/prctl.h
_PR_SET_DUMPABLE = 4

_libc = ctypes.CDLL(None, use_errno=True)


def keep_memory_private() -> None:
    """No core files; and tracing this process, or reading /proc/PID/mem, takes root's capability (prctl(2))."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open files to the hard one: connections to the store need some dozens at a time."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
