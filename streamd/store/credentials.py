"""Access tokens of Google's, one provider for every client of a store.

`Tokens.fresh` gives a token that is good for some minutes, asking for a new one when the old one runs out or was
refused; callers that wait for the same refresh share it. `DefaultToken` is the same credentials as a source, for who
keeps tokens himself (`store/identity.py`).
"""

import os
import threading
import warnings
from datetime import UTC, datetime
from typing import Any, Protocol

from streamd.errors import StoreError, StoreErrorKind
from streamd.store.google_errors import safe_text
from streamd.store.token_sources import Token

_SCOPES = ("https://www.googleapis.com/auth/devstorage.read_write",)
# Google's metadata server and token endpoints answer within a second or are in trouble.
_REFRESH_TIMEOUT_S = 10.0


class Credentials(Protocol):
    """What is used of `google.auth.credentials.Credentials`; `valid` turns false some minutes before the expiry."""

    token: str | None

    @property
    def valid(self) -> bool: ...

    def refresh(self, request: Any) -> None: ...


class Tokens:
    """The tokens of one identity; any thread may use it."""

    def __init__(self, credentials: Credentials, request: Any) -> None:
        self._credentials = credentials
        self._request = request
        self._lock = threading.Lock()  # held through a refresh, so that there is one at a time
        self._refused: str | None = None

    def fresh(self) -> str:
        """Give a token that should be accepted.

        Raises: `StoreError` CREDENTIALS when there is none to be had; TRANSIENT when who gives them doesn't answer.
        """
        with self._lock:
            credentials = self._credentials
            if not credentials.valid or credentials.token == self._refused:
                try:
                    credentials.refresh(self._request)
                except Exception as error:
                    raise _error(error) from error
            return credentials.token or ""

    def refuse(self, token: str) -> None:
        """Say that the store answered 401 to this token; if no newer one is here, `fresh` will ask for one."""
        with self._lock:
            if token == self._credentials.token:
                self._refused = token


class DefaultToken:
    """The application default credentials; each fetch asks for a token. Used by one thread at a time."""

    def __init__(self) -> None:
        self._found: tuple[Any, Any] | None = None

    def __repr__(self) -> str:
        return "default credentials"

    def fetch(self) -> Token:
        """Get the token as it is now. Raises: as `Tokens.fresh`."""
        credentials, request = self._found = self._found or _find_default()
        try:
            credentials.refresh(request)
        except Exception as error:
            raise _error(error) from error
        expiry: datetime | None = credentials.expiry  # UTC, without saying so
        life_s = None if expiry is None else (expiry.replace(tzinfo=UTC) - datetime.now(UTC)).total_seconds()
        return Token(credentials.token or "", life_s)


def default_tokens() -> Tokens:
    """Find the application default credentials (https://cloud.google.com/docs/authentication/application-default-credentials).

    On a Google machine without a key file this asks the metadata server. Raises: as `Tokens.fresh`.
    """
    return Tokens(*_find_default())


def _find_default() -> tuple[Any, Any]:
    """Find them; also give what sends their requests. Raises: `StoreError`."""
    from google.auth.transport.requests import Request

    try:
        credentials = _default_credentials()
    except Exception as error:
        raise _error(error) from error
    request = Request()
    # The transport of refreshes would wait 120 s.
    return credentials, lambda *args, **others: request(*args, **{"timeout": _REFRESH_TIMEOUT_S, **others})


def _default_credentials() -> Credentials:
    """Do as `google.auth.default` does, but for finding a project, which nobody here wants: for that it runs `gcloud`,
    however long that takes, or asks Google."""
    import google.auth
    from google.auth import _cloud_sdk
    from google.auth.credentials import with_scopes_if_required

    named = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
    path = named or _cloud_sdk.get_application_default_credentials_path()  # type: ignore[no-untyped-call]
    found: Credentials
    if named or os.path.isfile(path):
        with warnings.catch_warnings(action="ignore"):  # that a file may be anybody's, that its user has no project
            found, _ = google.auth.load_credentials_from_file(path)  # type: ignore[no-untyped-call]
        found = with_scopes_if_required(found, _SCOPES)  # type: ignore[no-untyped-call]
    else:
        found, _ = google.auth.default(scopes=_SCOPES)
    return found


def _error(error: Exception) -> StoreError:
    """Say what went wrong. What isn't the library's own may hold what was read; only its kind is told."""
    from google.auth import exceptions

    if isinstance(error, exceptions.GoogleAuthError):
        # A DefaultCredentialsError explains in a paragraph what to do; others name the endpoint that refused.
        message = safe_text(str(error.args[0] if error.args else error))
    else:
        message = (error.strerror if isinstance(error, OSError) else None) or type(error).__name__
        if isinstance(error, PermissionError):
            message += ": they can't be read, or would be got by running a program, which this process may not"
    unreachable = isinstance(error, exceptions.TransportError) or getattr(error, "retryable", False)
    kind = StoreErrorKind.TRANSIENT if unreachable else StoreErrorKind.CREDENTIALS
    return StoreError(kind, "", f"no Google access token: {message}")
