"""Access tokens of Google's, one provider for every client of a store.

`Tokens.fresh` gives a token that is good for some minutes, asking for a new one when the old one runs out or was
refused; callers that wait for the same refresh share it.
"""

import threading
from typing import Any, Protocol

from streamd.errors import StoreError, StoreErrorKind
from streamd.store.google_errors import safe_text

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
                from google.auth import exceptions

                try:
                    credentials.refresh(self._request)
                except exceptions.GoogleAuthError as error:
                    raise _error(error) from error
            return credentials.token or ""

    def refuse(self, token: str) -> None:
        """Say that the store answered 401 to this token; if no newer one is here, `fresh` will ask for one."""
        with self._lock:
            if token == self._credentials.token:
                self._refused = token


def default_tokens() -> Tokens:
    """Find the application default credentials (https://cloud.google.com/docs/authentication/application-default-credentials).

    On a Google machine without a key file this asks the metadata server. Raises: as `Tokens.fresh`.
    """
    import google.auth
    from google.auth import exceptions
    from google.auth.transport.requests import Request

    try:
        credentials, _ = google.auth.default(scopes=_SCOPES)
    except exceptions.GoogleAuthError as error:
        raise _error(error) from error
    request = Request()
    # The transport of refreshes would wait 120 s.
    return Tokens(credentials, lambda *args, **others: request(*args, **{"timeout": _REFRESH_TIMEOUT_S, **others}))


def _error(error: Exception) -> StoreError:
    from google.auth import exceptions

    # A DefaultCredentialsError explains in a paragraph what to do; others name the endpoint that refused.
    message = safe_text(str(error.args[0] if error.args else error))
    unreachable = isinstance(error, exceptions.TransportError) or getattr(error, "retryable", False)
    kind = StoreErrorKind.TRANSIENT if unreachable else StoreErrorKind.CREDENTIALS
    return StoreError(kind, "", f"no Google access token: {message}")
