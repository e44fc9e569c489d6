"""Settings: one TOML file, read once, into frozen values.

    log_level = "info"                     # debug, info, warning, error
    run_directory = "/run/streamd"         # control sockets of the mounts
    log_directory = "/var/log/streamd"     # logs of mounts in the background
    memory_max_bytes = "256MiB"            # memory that one mount uses for image bytes

    [cache]
    enabled = true
    directory = "/var/cache/streamd"
    max_bytes = "50%"                      # of all images; a size, or a share of the disk
    reserve_bytes = "10%"                  # of the disk stay free, whoever fills it
    recent_s = "1h"                        # what was used since then stays, unless another is asked for again meanwhile

    [fetch]
    background_gets = 16                   # most requests to the store at once for what no thread waits for
    get_bytes = "2MiB"                     # most bytes of one such request
    fault_gets = 16                        # requests at once for stopped threads, on top
    max_bytes_per_s = 0                    # of one image from the store; 0: no limit. Stopped threads don't wait for it

    [policy]
    event_after_s = "10s"                  # a read that waited this long is reported
    credentials_wait_s = "5m"
    hold_s = "60s"                         # how long reads of a lost object are held before they fail
    umount_wait_s = "10s"                  # what the first SIGTERM waits for open files

    [daemon]
    grace_s = "60s"                        # how long an image that nobody uses stays mounted
    images_max = 128                       # images served at once; the next one is refused
    memory_max_bytes = "50%"               # of what all of them may use together (each: memory_max_bytes above)
    fetch_max_bytes_per_s = 0              # of all of them together; 0: no limit (each: fetch.max_bytes_per_s above)
    worker_user = "streamd-worker"         # who workers run as, where that user exists; or "UID:GID"; or "" for root

A size is a number of bytes or text with a unit (`10GiB`, `100MB`), a duration is seconds or text with a unit
(`500ms`, `60s`, `24h`). Keys that are not above are refused, and all problems of a file are reported at once. Flags of
a command override the file; the environment is not read here.
"""

import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from streamd.errors import Exit, StreamdError

DEFAULT_PATH = Path("/etc/streamd/streamd.toml")
WORKER_USER = "streamd-worker"
LOG_LEVELS = ("debug", "info", "warning", "error")

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
# A lower rate is a mistake, as of bits for bytes: a chunk of 256 KiB would take longer than 4 s.
RATE_MIN_BYTES_PER_S = 64 * KIB
_SIZE_UNITS = {"B": 1}
for _power, _letter in enumerate("KMGTP", start=1):
    _SIZE_UNITS[f"{_letter}B"] = 1000**_power
    _SIZE_UNITS[f"{_letter}iB"] = 1024**_power
_DURATION_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_USER = re.compile(r"([a-z_][a-z0-9_-]{0,31}|\d{1,9}:\d{1,9})?", re.ASCII)
_QUANTITY = re.compile(r"(\d{1,18}(?:\.\d{1,9})?)\s*([A-Za-z%]*)", re.ASCII)


class ConfigError(StreamdError):
    """The configuration can't be used; `problems` says everything that is wrong with it, one line each."""

    exit_code, kind = Exit.USAGE, "usage"

    def __init__(self, source: str, problems: tuple[str, ...]) -> None:
        super().__init__(f"{source}: " + "; ".join(problems))
        self.source = source
        self.problems = problems


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Where chunks are kept on this node, and how many (`serve/cache_policy.py`).

    `directory` None: nowhere. `max_bytes` None: half of the disk, `reserve_bytes` None: a tenth of it.
    """

    directory: Path | None = Path("/var/cache/streamd")
    max_bytes: int | None = None
    reserve_bytes: int | None = None
    recent_s: float = 3600.0


class Prefetch(StrEnum):
    """What is fetched before it is read."""

    NONE = "none"
    HOT = "hot"  # what earlier restores waited for, and the windows of faults
    ALL = "all"  # everything, behind that


@dataclass(frozen=True, slots=True)
class FetchConfig:
    """How the store is read: requests at once for background work, bytes of one, requests at once for faults; at most.

    How much of that is used at a time follows from what the store and the link bring (`serve/limit.py`).
    `max_bytes_per_s` bounds what one image takes (`serve/rate.py`), 0: nothing does.
    """

    background_gets: int = 16
    get_bytes: int = 2 * MIB
    fault_gets: int = 16
    max_bytes_per_s: int = 0


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """How long each kind of failure is waited for, in seconds (`serve/policy.py` says which)."""

    event_after_s: float = 10.0
    credentials_wait_s: float = 300.0
    hold_s: float = 60.0
    umount_wait_s: float = 10.0


@dataclass(frozen=True, slots=True)
class DaemonConfig:
    """What a node serves, and for how long (`daemon/supervisor.py`).

    `memory_max_bytes` None: half of the machine's; `fetch_max_bytes_per_s` 0: no limit. `worker_user` is a name,
    `UID:GID`, or empty for root (`daemon/worker_user.py`).
    """

    grace_s: float = 60.0
    images_max: int = 128
    memory_max_bytes: int | None = None
    fetch_max_bytes_per_s: int = 0
    worker_user: str = WORKER_USER


@dataclass(frozen=True, slots=True)
class Config:
    """Everything that may be set."""

    cache: CacheConfig = field(default_factory=CacheConfig)
    fetch: FetchConfig = field(default_factory=FetchConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    daemon: DaemonConfig = field(default_factory=DaemonConfig)
    memory_max_bytes: int = 256 * MIB
    log_level: str = "info"
    run_directory: Path = Path("/run/streamd")
    log_directory: Path = Path("/var/log/streamd")


def parse_size(text: str, *, whole_bytes: Callable[[], int] | None = None) -> int:
    """Read a size such as `10GiB`, `1.5GB` or `4096` in bytes; `50%` too where a whole is given.

    Raises: `ValueError` with a sentence that says what is allowed.
    """
    match = _QUANTITY.fullmatch(text.strip())
    if match:
        number, unit = match.groups()
        if unit == "%" and whole_bytes is not None and float(number) <= 100:
            return int(whole_bytes() * float(number) / 100)
        factor = _SIZE_UNITS.get(unit) if unit else (1 if "." not in number else None)
        if factor is not None:
            return int(number) * factor if "." not in number else round(float(number) * factor)
    share = " or a share (50%)" if whole_bytes is not None else ""
    raise ValueError(f"{text!r} is not a size{share}: give bytes or a unit, such as 512MiB, 10GiB, 100MB")


def size_text(size: float) -> str:
    """Write bytes for people: `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def parse_duration(text: str) -> float:
    """Read a duration such as `500ms`, `60s`, `24h` or `10` in seconds.

    Raises: `ValueError` with a sentence that says what is allowed.
    """
    match = _QUANTITY.fullmatch(text.strip())
    if match and (factor := _DURATION_UNITS_S.get(match[2] or "s")) is not None:
        return float(match[1]) * factor
    raise ValueError(f"{text!r} is not a duration: give seconds or a unit, such as 500ms, 60s, 5m, 24h")


def machine_bytes() -> int:
    """Give the size of the machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def disk_bytes(path: Path) -> int:
    """Give the size of the file system that `path` is on, or would be on if it were made."""
    for candidate in (path, *path.parents):
        try:
            found = os.statvfs(candidate)
        except FileNotFoundError:
            continue
        return found.f_blocks * found.f_frsize
    raise FileNotFoundError(path)


class _Table:
    """One table of the file: takes its keys one by one and notes in `problems` what is wrong with them."""

    def __init__(self, values: Mapping[str, object], name: str, problems: list[str]) -> None:
        self._left = dict(values)
        self._name = name
        self._problems = problems

    def problem(self, key: str, text: str) -> None:
        self._problems.append(f"{self._name}{key}: {text}")

    def table(self, key: str) -> "_Table":
        value = self._left.pop(key, {})
        if not isinstance(value, dict):
            self.problem(key, "must be a table")
            value = {}
        return _Table(value, f"{self._name}{key}.", self._problems)

    def boolean(self, key: str, default: bool) -> bool:
        value = self._left.pop(key, default)
        if isinstance(value, bool):
            return value
        self.problem(key, f"must be true or false, not {value!r}")
        return default

    def choice(self, key: str, default: str, allowed: tuple[str, ...]) -> str:
        value = self._left.pop(key, default)
        if isinstance(value, str) and value in allowed:
            return value
        self.problem(key, f"must be one of {', '.join(allowed)}, not {value!r}")
        return default

    def user(self, key: str, default: str) -> str:
        value = self._left.pop(key, default)
        if isinstance(value, str) and _USER.fullmatch(value):
            return value
        self.problem(key, f"must be the name of a user, UID:GID, or empty for root, not {value!r}")
        return default

    def path(self, key: str, default: Path) -> Path:
        value = self._left.pop(key, None)
        if value is None:
            return default
        if isinstance(value, str) and value.startswith("/") and "\0" not in value:
            return Path(value)
        self.problem(key, f"must be an absolute path, not {value!r}")
        return default

    def integer(self, key: str, default: int, *, low: int, high: int) -> int:
        value = self._left.pop(key, default)
        if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
            return value
        self.problem(key, f"must be a number from {low} to {high}, not {value!r}")
        return default

    def size(self, key: str, *, low: int, high: int, whole_bytes: Callable[[], int] | None = None) -> int | None:
        value = self._left.pop(key, None)
        if value is None:
            return None
        try:
            if isinstance(value, bool) or not isinstance(value, int | str):
                raise ValueError(f"must be a size, not {value!r}")
            size = parse_size(value, whole_bytes=whole_bytes) if isinstance(value, str) else value
            if not low <= size <= high:
                raise ValueError(f"must be from {low} to {high} bytes, not {value!r}")
        except (ValueError, OSError) as error:
            self.problem(key, str(error))
            return None
        return size

    def rate(self, key: str) -> int:
        """Take bytes a second, 0 for no limit."""
        rate = self.size(key, low=0, high=1 << 50) or 0
        if 0 < rate < RATE_MIN_BYTES_PER_S:
            self.problem(key, f"must be 0 (no limit) or at least {RATE_MIN_BYTES_PER_S} bytes a second, not {rate}")
        return rate

    def duration_s(self, key: str, default: float, *, high: float) -> float:
        value = self._left.pop(key, default)
        try:
            if isinstance(value, bool) or not isinstance(value, int | float | str):
                raise ValueError(f"must be a duration, not {value!r}")
            duration_s = parse_duration(value) if isinstance(value, str) else float(value)
            if not 0 <= duration_s <= high:
                raise ValueError(f"must be from 0 to {high:g} seconds, not {value!r}")
        except ValueError as error:
            self.problem(key, str(error))
            return default
        return duration_s

    def done(self) -> None:
        """Note what is left as unknown."""
        for key in self._left:
            self.problem(key, "is not a known setting")


def parse(document: Mapping[str, object], *, source: str, disk_bytes: Callable[[Path], int] = disk_bytes) -> Config:
    """Make a configuration of a parsed TOML document.

    `disk_bytes` gives the size of a path's file system, for shares such as `50%`. Raises: `ConfigError`.
    """
    problems: list[str] = []
    defaults = Config()
    top = _Table(document, "", problems)
    cache, fetch, policy, daemon = (top.table(name) for name in ("cache", "fetch", "policy", "daemon"))
    directory = cache.path("directory", Path("/var/cache/streamd"))
    config = Config(
        cache=CacheConfig(
            max_bytes=cache.size("max_bytes", low=0, high=1 << 60, whole_bytes=lambda: disk_bytes(directory)),
            reserve_bytes=cache.size("reserve_bytes", low=0, high=1 << 60, whole_bytes=lambda: disk_bytes(directory)),
            recent_s=cache.duration_s("recent_s", defaults.cache.recent_s, high=366 * 86400),
            directory=directory if cache.boolean("enabled", True) else None,
        ),
        fetch=FetchConfig(
            background_gets=fetch.integer("background_gets", defaults.fetch.background_gets, low=1, high=256),
            # Smaller than a chunk makes no sense; larger holds too much of the memory cap in one request.
            get_bytes=fetch.size("get_bytes", low=64 * KIB, high=64 * MIB) or defaults.fetch.get_bytes,
            fault_gets=fetch.integer("fault_gets", defaults.fetch.fault_gets, low=1, high=256),
            max_bytes_per_s=fetch.rate("max_bytes_per_s"),
        ),
        policy=PolicyConfig(
            event_after_s=policy.duration_s("event_after_s", defaults.policy.event_after_s, high=86400),
            credentials_wait_s=policy.duration_s("credentials_wait_s", defaults.policy.credentials_wait_s, high=86400),
            hold_s=policy.duration_s("hold_s", defaults.policy.hold_s, high=86400),
            umount_wait_s=policy.duration_s("umount_wait_s", defaults.policy.umount_wait_s, high=3600),
        ),
        daemon=DaemonConfig(
            grace_s=daemon.duration_s("grace_s", defaults.daemon.grace_s, high=366 * 86400),
            images_max=daemon.integer("images_max", defaults.daemon.images_max, low=1, high=512),
            memory_max_bytes=daemon.size("memory_max_bytes", low=32 * MIB, high=1 << 50, whole_bytes=machine_bytes),
            fetch_max_bytes_per_s=daemon.rate("fetch_max_bytes_per_s"),
            worker_user=daemon.user("worker_user", defaults.daemon.worker_user),
        ),
        memory_max_bytes=top.size("memory_max_bytes", low=32 * MIB, high=1 << 50) or defaults.memory_max_bytes,
        log_level=top.choice("log_level", defaults.log_level, LOG_LEVELS),
        run_directory=top.path("run_directory", defaults.run_directory),
        log_directory=top.path("log_directory", defaults.log_directory),
    )
    for table in (top, cache, fetch, policy, daemon):
        table.done()
    if problems:
        raise ConfigError(source, tuple(problems))
    return config


def load(path: Path | None = None) -> Config:
    """Read the file at `path`, or the default one if it is there, else take the defaults.

    Raises: `ConfigError`, also when a file that was named can't be read.
    """
    return parse_text(read_text(path), source=str(path or DEFAULT_PATH))


def read_text(path: Path | None = None) -> str:
    """Give what is in the file at `path`, or in the default one; empty when that isn't there. Raises: `ConfigError`."""
    chosen = path or DEFAULT_PATH
    try:
        return chosen.read_bytes().decode()
    except FileNotFoundError as error:
        if path is None:
            return ""
        raise ConfigError(str(chosen), ("no such file",)) from error
    except OSError as error:
        raise ConfigError(str(chosen), (error.strerror or str(error),)) from error
    except UnicodeDecodeError as error:
        raise ConfigError(str(chosen), (f"not TOML: {error}",)) from error


def parse_text(text: str, *, source: str) -> Config:
    """Make a configuration of TOML. Raises: `ConfigError`."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(source, (f"not TOML: {error}",)) from error
    return parse(document, source=source)
