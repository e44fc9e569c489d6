"""What can go wrong for correct code, and what the commands answer.

Every error that a user may meet is a `StreamdError`: a message to act on, facts as attributes, and an exit code. What
only a bug can cause is a `ValueError` or an assertion and is not caught anywhere but at the kernel's door.
"""

from enum import IntEnum, StrEnum


class Exit(IntEnum):
    """Exit codes of the commands (README, "Exit codes")."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    NOT_FOUND = 3
    DAMAGED = 4
    NOT_PERMITTED = 5
    UNREACHABLE = 6
    REFUSED = 7
    INTERRUPTED = 130
    TERMINATED = 143


class StreamdError(Exception):
    """Something that correct code can meet; `exit_code` is what a command ends with, `kind` names it in `--json`."""

    exit_code: Exit = Exit.FAILED
    kind: str = "failed"


class NotFound(StreamdError):
    """The snapshot, the directory or the mount isn't there."""

    exit_code, kind = Exit.NOT_FOUND, "not-found"


class Damaged(StreamdError):
    """Stored bytes, or numbers that describe them, do not add up."""

    exit_code, kind = Exit.DAMAGED, "damaged"


class NotPermitted(StreamdError):
    """The caller may not do this here (not root, no access to the store)."""

    exit_code, kind = Exit.NOT_PERMITTED, "not-permitted"


class Unreachable(StreamdError):
    """The store did not answer in time."""

    exit_code, kind = Exit.UNREACHABLE, "unreachable"


class Refused(StreamdError):
    """Asked for something that would hurt: it exists, it is in use, it doesn't match."""

    exit_code, kind = Exit.REFUSED, "refused"


class StoreErrorKind(StrEnum):
    """The kinds of failure of a store that a reader can tell apart; `serve/policy.py` says what each one gets."""

    TRANSIENT = "transient"  # connection refused or cut, DNS, time-out, 408, 5xx
    THROTTLED = "throttled"  # 429, or 503 that says so
    CREDENTIALS = "credentials"  # 401, or no token to be had
    GONE = "gone"  # 404: this object, or this generation of it, is not there
    FORBIDDEN = "forbidden"  # 403, and every other 4xx: asking again changes nothing
    CHANGED = "changed"  # a precondition failed, or the object has another generation now
    CORRUPT = "corrupt"  # the bytes are not what their checksum says


_STORE_EXIT = {
    StoreErrorKind.TRANSIENT: Exit.UNREACHABLE,
    StoreErrorKind.THROTTLED: Exit.UNREACHABLE,
    StoreErrorKind.CREDENTIALS: Exit.NOT_PERMITTED,
    StoreErrorKind.GONE: Exit.NOT_FOUND,
    StoreErrorKind.FORBIDDEN: Exit.NOT_PERMITTED,
    StoreErrorKind.CHANGED: Exit.REFUSED,
    StoreErrorKind.CORRUPT: Exit.DAMAGED,
}


class StoreError(StreamdError):
    """A store answered, or failed to answer, a request about one object.

    `store_kind` is the class of the failure, `key` the object. The message never holds a token or object contents.
    """

    def __init__(self, store_kind: StoreErrorKind, key: str, message: str) -> None:
        super().__init__(f"{key}: {message}" if key else message)
        self.store_kind = store_kind
        self.key = key
        self.exit_code = _STORE_EXIT[store_kind]
        self.kind = store_kind.value
