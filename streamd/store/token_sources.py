"""Where the access tokens of one identity come from: a file that somebody keeps fresh, or a command.

A mount's credentials are its own: `parse_credentials` reads what a mount asks for, and what it gives lives in that
mount's process only. A source answers one question, `fetch`, and remembers nothing; when to ask, and what to do with
failures, is `Identity`'s (`store/identity.py`).

Both kinds of source say their token in one of two ways: bare, or as a JSON object

    {"access_token": "…", "expires_in": 3599}                      seconds, from the file's last change or the answer
    {"access_token": "…", "expiry": "2026-01-01T12:00:00Z"}        or "expire_time"; or seconds since the epoch

A token is never part of an error, of a log line or of a repr; what a command says on stderr goes through a filter
(`token_command.py`).
"""

import json
import math
import os
import re
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Protocol

from streamd.config import ConfigError
from streamd.errors import StoreError, StoreErrorKind
from streamd.safe_paths import UnsafePath, open_trusted
from streamd.store.token_command import CommandFailed, run_command

# Tokens of Google's have 1 to 2 KiB; an identity token with many groups 8.
TOKEN_BYTES_MAX = 16 << 10
# A file is looked at this often, whatever it says of its expiry: another identity may be put in its place.
FILE_AGAIN_S = 10.0
# How often a command runs that doesn't say how long its token is good: the shortest lives in use are 15 minutes.
COMMAND_AGAIN_S = 300.0
# RFC 6750, b64token. Nothing else becomes a part of a header.
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*", re.ASCII)
_READ_TRIES = 3


@dataclass(frozen=True, slots=True)
class Token:
    """A token, good for `expires_in_s` from when it was fetched (None: nobody said); to be asked for again after
    `again_in_s` at the latest (None: when its life ends). The two are relative, so that no clock has to be shared."""

    value: str = field(repr=False)
    expires_in_s: float | None = None
    again_in_s: float | None = None


class TokenSource(Protocol):
    """Gives tokens of one identity; used by one thread at a time."""

    def fetch(self) -> Token:
        """Get the token as it is now; bounded in time.

        Raises: `StoreError` CREDENTIALS when there is none to be had, TRANSIENT when who gives them doesn't answer.
        """
        ...


class FileToken:
    """A token in a file, which is read at every fetch. Whoever replaces it may write it in place or rename over it.

    The file itself must not be a symlink, may belong to root or to us, and is nobody else's to read or to write but,
    for reading, its group's; nor may anybody else be able to put another one in its place (`safe_paths.py`). (In a
    volume of Kubernetes its name is a symlink: give it as `…/..data/NAME`.)
    """

    def __init__(self, path: str, *, wall_clock: Callable[[], float] = time.time) -> None:
        self.path = path
        self._wall_clock = wall_clock

    def __repr__(self) -> str:
        return f"token file {self.path!r}"

    def fetch(self) -> Token:
        try:
            for _ in range(_READ_TRIES):
                data, info, is_whole = self._read()
                if is_whole:
                    break
            else:
                raise _no_token(f"{self!r} changes while it is read")
        except UnsafePath as error:
            raise _no_token(f"{self!r}: {error}") from error
        except OSError as error:
            raise _no_token(f"{self!r}: {error.strerror}") from error
        return _parsed(
            data,
            whose=repr(self),
            issued_s=info.st_mtime,
            now_s=self._wall_clock(),
            again_in_s=FILE_AGAIN_S,
        )

    def _read(self) -> tuple[bytes, os.stat_result, bool]:
        """Read the file; give what it is, and whether it stayed as it was. Raises: as `open_trusted`; `StoreError`."""
        fd = open_trusted(self.path)
        try:
            info = os.fstat(fd)
            self._check(info)
            data = bytearray()
            while len(data) <= TOKEN_BYTES_MAX and (piece := os.read(fd, TOKEN_BYTES_MAX + 1 - len(data))):
                data += piece
            after = os.fstat(fd)
        finally:
            os.close(fd)
        is_whole = len(data) == after.st_size and (info.st_mtime_ns, info.st_size) == (
            after.st_mtime_ns,
            after.st_size,
        )
        return bytes(data), info, is_whole

    def _check(self, info: os.stat_result) -> None:
        if not stat.S_ISREG(info.st_mode):
            raise _no_token(f"{self!r} is not a file")
        if info.st_uid not in (0, os.geteuid()):
            raise _no_token(f"{self!r} belongs to another user (uid {info.st_uid})")
        if info.st_mode & 0o027:
            mode = stat.S_IMODE(info.st_mode)
            raise _no_token(f"{self!r} can be read or changed by others (mode {mode:04o}): chmod 600")
        if info.st_size > TOKEN_BYTES_MAX:
            raise _no_token(f"{self!r} has {info.st_size} bytes, more than {TOKEN_BYTES_MAX}")


class CommandToken:
    """A token that a command prints (`token_command.py` says how it is run); its arguments may hold secrets, too."""

    def __init__(self, argv: Sequence[str], *, wall_clock: Callable[[], float] = time.time) -> None:
        self._argv = tuple(argv)
        self._wall_clock = wall_clock

    def __repr__(self) -> str:
        return f"token command {self._argv[0]!r}"

    def fetch(self) -> Token:
        issued_s = self._wall_clock()  # before it runs: its token can't be older
        try:
            output = run_command(self._argv, output_bytes_max=TOKEN_BYTES_MAX)
        except CommandFailed as error:
            kind = StoreErrorKind.TRANSIENT if error.is_transient else StoreErrorKind.CREDENTIALS
            raise StoreError(kind, "", f"no access token: {self!r} {error}") from error.__cause__
        token = _parsed(output, whose=repr(self), issued_s=issued_s, now_s=self._wall_clock(), again_in_s=None)
        return token if token.expires_in_s is not None else Token(token.value, None, COMMAND_AGAIN_S)


def parse_credentials(spec: Mapping[str, object] | None) -> TokenSource | None:
    """Read how a mount wants to be identified: `{"token_file": "/abs"}` or `{"command": ["/abs", …]}`.

    None, for the default credentials, when it says nothing. Values are repeated in no error: somebody may have put the
    token itself there. Raises: `ConfigError`.
    """
    if spec is None:
        return None
    match dict(spec):
        case {"token_file": str(path), **rest} if not rest:
            if _is_absolute(path):
                return FileToken(path)
            problem = "token_file must be an absolute path"
        case {"command": list() | tuple() as argv, **rest} if not rest:
            words = [word for word in argv if isinstance(word, str) and "\0" not in word]
            if argv and len(words) == len(argv) and _is_absolute(words[0]):
                return CommandToken(words)
            problem = "command must be a list of texts, the first of them an absolute path"
        case {"token_file": _} | {"command": _} as given if len(given) == 1:
            problem = "token_file must be a text, command a list of texts"
        case _:
            problem = 'must be {"token_file": "/path"} or {"command": ["/path", …]}, one of them and nothing else'
    raise ConfigError("credentials", (problem,))


def _is_absolute(path: str) -> bool:
    return path.startswith("/") and "\0" not in path


def _parsed(data: bytes, *, whose: str, issued_s: float, now_s: float, again_in_s: float | None) -> Token:
    """Make a token of what a source has said; times are seconds since the epoch. Raises: `StoreError`."""
    if len(data) > TOKEN_BYTES_MAX:
        raise _no_token(f"{whose} gives more than {TOKEN_BYTES_MAX} bytes")
    text = data.decode("ascii", errors="replace").strip()
    expires_s: float | None = None
    if text.startswith("{"):
        value, expires_s = _from_json(text, whose, issued_s)
    else:
        value = text
    if not value:
        raise _no_token(f"{whose} is empty")
    if not _TOKEN.fullmatch(value):
        raise _no_token(f"{whose} gives something that is not a token")
    return Token(value, None if expires_s is None else expires_s - now_s, again_in_s)


def _from_json(text: str, whose: str, issued_s: float) -> tuple[str, float | None]:
    """Give the token and when it ends, in seconds since the epoch: the earliest time that is said."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        raise _no_token(f"{whose} gives JSON that can't be read") from None  # the cause holds the text
    value = fields.get("access_token")
    if not isinstance(value, str):
        raise _no_token(f"{whose} gives JSON without an access_token")
    ends = []
    for name in ("expires_in", "expiry", "expire_time"):
        if name in fields and fields[name] is not None:
            time_s = _seconds(fields[name])
            if time_s is None:
                raise _no_token(f"{whose} gives a token whose {name} can't be read")
            ends.append(issued_s + time_s if name == "expires_in" else time_s)
    return value, min(ends, default=None)


def _seconds(value: object) -> float | None:
    """Read a number of seconds, or a date and time (UTC unless it says) as seconds since the epoch."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value) if abs(value) < 1e12 and math.isfinite(value) else None
    if not isinstance(value, str):
        return None
    try:
        if re.fullmatch(r"\d{1,11}", value, re.ASCII):
            return float(value)
        moment = datetime.fromisoformat(value)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None


def _no_token(message: str) -> StoreError:
    return StoreError(StoreErrorKind.CREDENTIALS, "", f"no access token: {message}")
