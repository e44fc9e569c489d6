"""glibc's malloc, told to give memory back: a mount holds a hundred megabytes while it loads, and little after.

By default every thread gets an arena of its own, and what is freed in one is of no use to the others nor to the system.
On another C library nothing here has an effect.
"""

import ctypes

# malloc.h
_M_ARENA_MAX = -8
# One for the Trio thread and one for those that decode; more buys nothing while the GIL is what they wait for.
_ARENAS = 2

_libc = ctypes.CDLL(None)


def limit_arenas() -> None:
    """Bound the number of arenas; call it before any thread is started."""
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(_M_ARENA_MAX, _ARENAS)


def give_back() -> None:
    """Return free memory to the system. Takes milliseconds, without the GIL: call it in a thread, now and then."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)
