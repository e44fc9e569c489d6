"""Logging: structlog, one JSON object a line, or text for people on a terminal; a file that can't grow without end.

Facts go in keys with units (`log.info("chunk fetched", took_ms=12)`). Keys whose names say that they hold a secret are
blanked, as a second line of defence: nothing should log one. What libraries say through `logging` comes out here as
well, from warnings up.
"""

import logging
import os
import re
import sys
import threading
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

# structlog takes rich where it finds it, for tracebacks with the values of local variables: pod memory, and a sixth of
# the time and CPU that a mount takes to start. And asyncio for loggers that nobody here has: 2 MB of each process.
_hidden: dict[str, ModuleType | None] = {"rich": None, "asyncio": ModuleType("asyncio")}
_there = {name: sys.modules[name] for name in _hidden if name in sys.modules}
sys.modules.update(_hidden)  # type: ignore[arg-type]
import structlog  # noqa: E402

for _name in _hidden:
    del sys.modules[_name]
sys.modules.update(_there)

from streamd.safe_paths import SafeDirectory  # noqa: E402

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
# Two files of this size: days of a mount's summary lines, hours of debug lines; small next to any image.
LOG_MAX_BYTES = 10 << 20
_SECRET = re.compile(r"token|secret|passw|authorization|credential|api_?key|environ", re.IGNORECASE)


class BoundedLog:
    """A log file of at most `max_bytes`, with one predecessor (`.1`); may be written from any thread.

    With `take_over_stdio` the process's stdout and stderr go there too, also after it was changed, so that what C
    libraries and a dying interpreter say is kept. A disk that is full loses lines, nothing else.
    """

    def __init__(self, path: Path, *, max_bytes: int = LOG_MAX_BYTES, take_over_stdio: bool = False) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._stdio = take_over_stdio
        self._lock = threading.Lock()
        self._fd = -1
        self._directory = SafeDirectory.open(path.parent)
        self._open()

    def _open(self) -> None:
        fd = self._directory.open_file(self.path.name, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = fd
        if self._stdio:
            os.dup2(fd, 1)
            os.dup2(fd, 2)

    def write(self, text: str) -> int:
        """Append `text`."""
        data = text.encode(errors="backslashreplace")
        with self._lock, suppress(OSError):
            if os.fstat(self._fd).st_size + len(data) > self._max_bytes:
                # A file that was moved or whose directory was removed must not end the log: what can be done is done.
                with suppress(OSError):
                    self._directory.rename(self.path.name, f"{self.path.name}.1")
                with suppress(OSError):
                    self._open()
            os.write(self._fd, data)
        return len(text)

    def flush(self) -> None:
        """Do nothing: every write is a write(2)."""

    def close(self) -> None:
        """Close the file; lines written after this are lost."""
        with self._lock:
            os.close(self._fd)
            self._fd = -1
            self._directory.close()


def _hide_secrets(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    for key in event:
        if _SECRET.search(key):
            event[key] = "hidden"
    return event


class _ToStructlog(logging.Handler):
    """Passes records of the standard library's loggers on."""

    def emit(self, record: logging.LogRecord) -> None:
        structlog.get_logger(record.name).log(record.levelno, record.getMessage(), logger=record.name)


def configure(level: str, *, log: BoundedLog | TextIO | None = None) -> None:
    """Set logging up for this process: to `log`, else to stderr; text when that is a terminal, JSON lines otherwise."""
    target: Any = sys.stderr if log is None else log
    isatty = getattr(target, "isatty", None)
    for_people = isatty is not None and isatty()
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _hide_secrets,
    ]
    rendered: list[Any] = (
        [structlog.dev.ConsoleRenderer()]
        if for_people
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    )
    structlog.configure(
        processors=shared + rendered,
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=structlog.WriteLoggerFactory(target),
        cache_logger_on_first_use=False,
    )
    logging.basicConfig(handlers=[_ToStructlog()], level=max(logging.WARNING, LEVELS[level]), force=True)
