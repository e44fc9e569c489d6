"""Signal that this application is ready to be saved, and tell the original from its copies.

Needs nothing but Python. `wait_for_snapshot()` returns "resume", "restore", "error", or "none" where nobody saves.
"""

import contextlib
import os
import random
import secrets
import socket
import time

CHECKPOINT = "/proc/gvisor/checkpoint"
ENVIRONMENT = "/proc/gvisor/spec_environ"


def wait_for_snapshot() -> str:
    """Ask for the snapshot, and say what this process is afterwards."""
    try:
        fd = os.open(CHECKPOINT, os.O_RDWR)
    except OSError:
        return "none"  # not in gVisor, or no policy asks this pod to signal
    try:
        with contextlib.suppress(OSError):  # it was asked for before; the read says "error"
            os.write(fd, b"1")
        return os.read(fd, 16).decode().strip()
    finally:
        os.close(fd)


def current_environment() -> dict[str, str]:
    """Give the environment of the pod that this process runs in now; os.environ is the original's."""
    with open(ENVIRONMENT, "rb") as file:
        variables = file.read().split(b"\0")
    return dict(variable.decode().split("=", 1) for variable in variables if b"=" in variable)


def main() -> None:
    """Load, signal, and serve."""
    model = list(range(100_000))  # what takes long to load
    token = secrets.token_hex(16)

    became = wait_for_snapshot()
    if became == "restore":
        # A copy: re-make what belongs to one pod alone.
        os.environ.clear()
        os.environ.update(current_environment())
        random.seed()
        token = secrets.token_hex(16)

    print(became, os.environ.get("POD_NAME"), socket.gethostname(), token, len(model), flush=True)
    while True:
        time.sleep(1)


if __name__ == "__main__":
    main()
