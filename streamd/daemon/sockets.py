"""Where the control sockets of mounts lie, and whether anyone listens: what server and clients share."""

import hashlib
import os
import socket
from pathlib import Path


def sockets_directory(run_directory: Path) -> Path:
    """Give the directory of all control sockets."""
    return run_directory / "mounts"


def socket_path(run_directory: Path, mountpoint: str) -> Path:
    """Give the socket's path for a resolved mountpoint."""
    name = hashlib.sha256(os.fsencode(mountpoint)).hexdigest()[:16]
    return sockets_directory(run_directory) / f"{name}.sock"


def is_served(path: Path) -> bool:
    """Tell whether a process listens at the socket. Never waits: a full queue (EAGAIN) means yes."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(os.fspath(path))
        except (BlockingIOError, PermissionError):
            return True
        except OSError:
            return False
        return True
