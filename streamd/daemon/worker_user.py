"""The user that workers run as, and the two directories that are its: the node cache, and the records of mounts.

A worker gets its mount by descriptor, but finds its place in the cache, and its record, by path, for as long as it
lives. So the daemon gives both directories to that user when they are root's still. Root has business there, too
(`streamd mount`, `streamd cache`, the API): it goes in as their owner (`as_owner`), never as root, whom a worker that
was broken into could lead astray by what it puts there.

All workers share the user. What keeps them apart is that none can be looked into (PR_SET_DUMPABLE 0) and that none
opens files of an image that isn't its own; one that was broken into could read and change what others have cached.
"""

import os
import pwd
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

from streamd.config import WORKER_USER, Config, ConfigError, DaemonConfig
from streamd.errors import StreamdError
from streamd.safe_paths import SafeDirectory, acting_as

log = structlog.get_logger()

# A disk that hangs must not keep the daemon from starting.
_HAND_OVER_S = 5.0


@dataclass(frozen=True, slots=True)
class WorkerUser:
    """A user that isn't root, by numbers."""

    uid: int
    gid: int


def find_worker_user(config: DaemonConfig) -> WorkerUser | None:
    """Give the user that workers run as; None for root, which they stay where nobody has made the default user.

    Raises: `ConfigError` for another user that isn't there, and for root by name.
    """
    text = config.worker_user
    if not text:
        return None
    if ":" in text:
        uid, gid = (int(number) for number in text.split(":"))
    else:
        try:
            entry = pwd.getpwnam(text)
        except KeyError as error:
            if text == WORKER_USER:
                return None
            raise ConfigError("daemon.worker_user", (f"there is no user {text}",)) from error
        uid, gid = entry.pw_uid, entry.pw_gid
    if not uid or not gid:
        raise ConfigError("daemon.worker_user", (f"{text} is root, or in its group: leave it empty to mean root",))
    return WorkerUser(uid, gid)


def prepare_worker_user(config: Config) -> tuple[WorkerUser | None, list[str]]:
    """Give the user that workers run as, with its directories made its own, and what is wrong with that, in words.

    That is logged, too. For root; takes a bounded time. Raises: `ConfigError`.
    """
    user = find_worker_user(config.daemon)
    problems: list[str] = []
    if user is not None:
        problems = _hand_over_all(config, user)
    elif config.daemon.worker_user:
        problems = [
            f"there is no user {WORKER_USER}: workers stay root, without capabilities; `systemd-sysusers streamd.conf` "
            "makes it, then restart the daemon"
        ]
    for problem in problems:
        log.warning("workers lack something", reason=problem)
    return user, problems


def records_directory(config: Config) -> Path:
    """Give the directory of the records of mounts."""
    return config.log_directory / "records"


@contextmanager
def as_owner(directory: Path, config: Config) -> Iterator[None]:
    """Do what root does in a directory as the workers' user, when it belongs to that; in this thread.

    Raises: `ConfigError`, `NotPermitted`; `OSError` when the directory can't be looked at.
    """
    user = find_worker_user(config.daemon) if os.geteuid() == 0 else None
    if user is None or _owner(directory) != user.uid:
        yield
        return
    with acting_as(user.uid, user.gid):
        yield


def _owner(directory: Path) -> int | None:
    try:
        return directory.stat().st_uid
    except FileNotFoundError:
        return None


def _hand_over_all(config: Config, user: WorkerUser) -> list[str]:
    """Give a user what must be its; say what it can't use all the same."""
    problems: list[str] = []
    directories = [records_directory(config)]
    if config.cache.directory is not None:
        directories.append(config.cache.directory)

    def give() -> None:
        for directory in directories:
            try:
                _hand_over(directory, user, way=config.log_directory)
            except (OSError, StreamdError) as error:
                problems.append(f"workers (uid {user.uid}) can't use {directory}: {error}")

    thread = threading.Thread(target=give, name="hand-over", daemon=True)
    thread.start()
    thread.join(_HAND_OVER_S)
    if thread.is_alive():
        return [*problems, f"the workers' directories were not theirs within {_HAND_OVER_S:g} s: does a disk hang?"]
    return problems


def _hand_over(directory: Path, user: WorkerUser, *, way: Path) -> None:
    """Have a directory be a user's; if it lies in `way`, let the user pass through that.

    Raises: `OSError`, `StreamdError`: it is another's, or out of the user's reach.
    """
    with suppress(OSError, StreamdError):
        _reach(directory, user)
        return
    if _owner(directory) != user.uid:
        with SafeDirectory.open(directory, make=True) as ours:
            _give(ours, user)
    if directory.parent == way:
        with SafeDirectory.open(way) as ours:
            _let_through(ours, user)
    _reach(directory, user)


def _reach(directory: Path, user: WorkerUser) -> None:
    with acting_as(user.uid, user.gid):
        SafeDirectory.open(directory).close()


def _give(directory: SafeDirectory, user: WorkerUser) -> None:
    """Give a directory of root's away, with all in it; itself last, so that nobody else is in there meanwhile.

    So one that was interrupted is begun again. Nothing of ours there has two names; what has isn't given.
    """
    for _, directories, files, fd in os.fwalk(".", topdown=False, follow_symlinks=False, dir_fd=directory.fd):
        for name in (*directories, *files):
            with suppress(FileNotFoundError):  # a mount that lives has removed it
                info = os.stat(name, dir_fd=fd, follow_symlinks=False)
                # Changing nothing, too, would break a seal (`serve/sealing.py`).
                if info.st_uid != user.uid and (stat.S_ISDIR(info.st_mode) or info.st_nlink == 1):
                    os.chown(name, user.uid, user.gid, dir_fd=fd, follow_symlinks=False)
    os.fchown(directory.fd, user.uid, user.gid)


def _let_through(directory: SafeDirectory, user: WorkerUser) -> None:
    """Let a user's group pass through a directory that is root's alone; what is in it stays unseen."""
    info = os.fstat(directory.fd)
    if stat.S_IMODE(info.st_mode) == 0o700 and info.st_gid in (0, user.gid):
        os.fchown(directory.fd, -1, user.gid)
        os.fchmod(directory.fd, 0o710)
