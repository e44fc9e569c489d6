"""Running a command that prints a token: no shell, next to no environment, bounded in time and in output.

The command gets no input, `/` as its directory and a session of its own, which is killed at the end, and when its time
is over. Exit code 75 (EX_TEMPFAIL of sysexits.h) says that it is worth asking again: nobody answered it, say. What it
prints on stdout is nobody's but the caller's; of stderr the first line goes into the error, without what looks like a
secret or is on stdout as well.
"""

import os
import re
import selectors
import signal
import stat
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress

from streamd.safe_paths import UnsafePath, stat_trusted
from streamd.store.google_errors import safe_text

TIMEOUT_S = 10.0
_TEMPORARY_FAILURE = 75
_STDERR_BYTES_MAX = 4096
# Where a helper finds its own; no HOME, no proxy, and nothing of ours.
_ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}
# Long words without a slash: tokens, keys, hashes. A message loses nothing by them.
_LONG_WORD = re.compile(r"[A-Za-z0-9._~+=-]{24,}")
# Shorter words of stdout don't give a token away, and are found in every sentence.
_SECRET_CHARACTERS = 8


class CommandFailed(Exception):
    """It gave no token; `is_transient`: asking again may help, and the message goes after the command's name."""

    def __init__(self, message: str, *, is_transient: bool = False) -> None:
        super().__init__(message)
        self.is_transient = is_transient


def run_command(argv: Sequence[str], *, output_bytes_max: int, timeout_s: float = TIMEOUT_S) -> bytes:
    """Run it, and give what it prints, cut one byte after the maximum. Raises: `CommandFailed`."""
    try:
        _check(argv[0])
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            cwd="/",
            env=_ENVIRONMENT,
            umask=0o077,
            start_new_session=True,
        )
    except UnsafePath as error:
        raise CommandFailed(f"can be changed by other users: {error}") from error
    except OSError as error:
        raise CommandFailed(f"can't be run: {error.strerror}") from error
    try:
        output, said, is_over = _collect(process, output_bytes_max + 1, timeout_s)
    finally:
        # Before it is reaped: until then its process group can't be anybody else's.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
    if not is_over:
        raise CommandFailed(f"did not end within {timeout_s:g} s{_said(said, output)}", is_transient=True)
    code = process.returncode
    if code:
        how = f"ended with exit code {code}" if code > 0 else f"was killed by signal {-code}"
        raise CommandFailed(f"{how}{_said(said, output)}", is_transient=code == _TEMPORARY_FAILURE)
    return output


def _check(path: str) -> None:
    """Refuse a program that others can change, or put another one in its place. Raises: as `stat_trusted`, too."""
    info = stat_trusted(path)
    if not stat.S_ISREG(info.st_mode):
        raise CommandFailed("is not a program")
    if info.st_uid not in (0, os.geteuid()) or info.st_mode & 0o022:
        raise CommandFailed("can be changed by other users: it must belong to root, and be writable by nobody else")


def _collect(process: subprocess.Popen[bytes], output_bytes_max: int, timeout_s: float) -> tuple[bytes, bytes, bool]:
    """Read stdout and stderr until it ends; also tell whether it did, in time.

    Its end counts, not that of the pipes: something that it left running may hold them.
    """
    assert process.stdout is not None
    assert process.stderr is not None
    until_s = time.monotonic() + timeout_s
    kept = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
    most = {process.stdout.fileno(): output_bytes_max, process.stderr.fileno(): _STDERR_BYTES_MAX}
    ended_fd = os.pidfd_open(process.pid)
    is_over = False
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(ended_fd, selectors.EVENT_READ)
            for fd in kept:
                os.set_blocking(fd, False)
                selector.register(fd, selectors.EVENT_READ)
            while not is_over and (left_s := until_s - time.monotonic()) > 0:
                for key, _ in selector.select(left_s):
                    if key.fd == ended_fd:
                        is_over = True
                    elif _is_at_end(key.fd, kept[key.fd], most[key.fd]):
                        selector.unregister(key.fd)
        if is_over:
            for fd, data in kept.items():
                _is_at_end(fd, data, most[fd])
    finally:
        os.close(ended_fd)
    return bytes(kept[process.stdout.fileno()]), bytes(kept[process.stderr.fileno()]), is_over


def _is_at_end(fd: int, data: bytearray, most: int) -> bool:
    """Take what is in a pipe, and keep the first bytes; tell whether that was all that will ever come."""
    with suppress(BlockingIOError):
        for _ in range(64):  # a command that writes without end must not keep us from the clock
            piece = os.read(fd, 1 << 16)
            if not piece:
                return True
            data += piece[: most - len(data)]
    return False


def _said(stderr: bytes, stdout: bytes) -> str:
    """Give the first line of stderr, fit for a message."""
    lines = stderr.decode(errors="replace").strip().splitlines()
    if not lines:
        return ""
    line = lines[0]
    for word in sorted(re.split(r"[\s\"',:{}]+", stdout.decode(errors="replace")), key=len, reverse=True):
        if len(word) >= _SECRET_CHARACTERS:
            line = line.replace(word, "[redacted]")
    text = safe_text(_LONG_WORD.sub("[redacted]", safe_text(line)))
    return f": {''.join(character for character in text if character.isprintable())}"
