"""Signals that were turned into `KeyboardInterrupt` at a place that can't pass it on.

Python calls a signal's handler between any two of its instructions, also within a weak reference's callback or a
`__del__`, as the importing of modules has them; what is raised there is printed and forgotten
(https://docs.python.org/3/library/sys.html#sys.unraisablehook). A command would then go on as if nobody had ended it.
"""

import signal
import sys
from types import FrameType

_AGAIN_S = 0.01


def tell_again() -> None:
    """From now on, have SIGINT's handler called once more a moment after its `KeyboardInterrupt` was forgotten.

    For the main thread; SIGALRM is used for it.
    """
    print_others = sys.unraisablehook

    def forgotten(what: "sys.UnraisableHookArgs") -> None:
        if issubclass(what.exc_type, KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
        else:
            print_others(what)

    signal.signal(signal.SIGALRM, _again)
    sys.unraisablehook = forgotten


def _again(_number: int, frame: FrameType | None) -> None:
    interrupt = signal.getsignal(signal.SIGINT)
    if not callable(interrupt):  # ignored, as in the background of a script
        raise KeyboardInterrupt
    interrupt(signal.SIGINT, frame)
