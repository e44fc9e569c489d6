"""What an answer of Google's, or none, means: one table for both ways to ask.

Google's client raises exceptions with a status in them, those of `requests` below it, and, for uploads, its own; our
own requests say the status themselves (`refusal`). What has no status is TRANSIENT: a connection refused or cut, a
time-out, a name that isn't found, an answer that makes no sense.

A `StoreError` from here has the status and the server's own explanation in its message, never an address (that of an
upload is a capability), never a header, and no token, even if the server repeats it (`safe_text`).
"""

import http
import json
import re
from typing import Any

from streamd.errors import StoreError, StoreErrorKind

_KINDS = {
    401: StoreErrorKind.CREDENTIALS,
    404: StoreErrorKind.GONE,
    408: StoreErrorKind.TRANSIENT,
    410: StoreErrorKind.TRANSIENT,  # only of upload sessions, and another try begins a new one
    412: StoreErrorKind.CHANGED,
    429: StoreErrorKind.THROTTLED,
}
# What Google's JSON and XML interfaces call it when they say "slower" in other words than 429.
_SLOWER = re.compile(r"SlowDown|[rR]ateLimitExceeded")


def kind_of_status(status: int, body: str = "") -> StoreErrorKind:
    """Class an HTTP status that isn't success; `body` is what came with it, or a part of that."""
    if status in (403, 503) and _SLOWER.search(body):
        return StoreErrorKind.THROTTLED
    if status >= 500:
        return StoreErrorKind.TRANSIENT
    return _KINDS.get(status, StoreErrorKind.FORBIDDEN)


_XML_MESSAGE = re.compile(r"<(Details|Message)>([^<]{1,200})<")


_TOKEN = re.compile(r"(?i)bearer\W+\S+|ya29\.\S+|(access_?token|authorization)\W+\S+")


def safe_text(text: str) -> str:
    """Make somebody else's text fit for a message: one line of 300 characters, without what may be a token."""
    return _TOKEN.sub("[redacted]", " ".join(text.split()))[:300]


def refuse_strange(response: Any, *_: object, **__: object) -> None:
    """Class a refusal whose JSON has not the shape that Google's client takes for granted; a hook of `requests`.

    (The client would fail over it with an AttributeError, and the status would be lost.) Raises: `StoreError`.
    """
    if response.status_code < 400:
        return
    try:
        payload = response.json()
    except ValueError:
        return  # not JSON: the client takes it for text
    if not isinstance(payload, dict) or not isinstance(payload.get("error", {}), dict):
        raise _status_error(int(response.status_code), "", "", response.text)


def translated(error: Exception, key: str) -> StoreError:
    """Say what an exception of either client means."""
    module = type(error).__module__.partition(".")[0]
    if module not in ("google", "requests", "urllib3") and not isinstance(error, OSError):
        # The clients look into answers without a check. TRANSIENT, as after no answer: it may have been carried out.
        return StoreError(StoreErrorKind.TRANSIENT, key, f"the answer makes no sense ({type(error).__name__})")
    status = getattr(error, "code", None)
    response = getattr(error, "response", None)
    if status is None and response is not None:
        status = response.status_code
    # An upload's exception may have a status that isn't a refusal (308: "go on"): then the answer made no sense.
    if isinstance(status, int) and status >= 300 and status != 308:
        body = getattr(response, "text", "")
        return _status_error(int(status), key, _explanation(body), body)
    return StoreError(StoreErrorKind.TRANSIENT, key, f"no answer ({_innermost(error)})")


def refusal(status: int, body: str) -> StoreError:
    """Say what an answer with a status that isn't success means; it is about no key yet."""
    return _status_error(status, "", _explanation(body), body)


def _explanation(body: str) -> str:
    """Find the server's own words in what came with a refusal: JSON, or XML from what stands before the interface."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError, RecursionError):
        explained = dict(_XML_MESSAGE.findall(body))
        return explained.get("Details") or explained.get("Message") or ""


def _status_error(status: int, key: str, message: str, body: str) -> StoreError:
    try:
        phrase = http.HTTPStatus(status).phrase
    except ValueError:
        phrase = "unknown status"
    return StoreError(
        kind_of_status(status, body),
        key,
        f"{status} {phrase}" + (f": {safe_text(message)}" if message else ""),
    )


def _innermost(error: BaseException) -> str:
    """Name the first cause of an exception: ConnectionRefusedError says more than ConnectionError."""
    while True:
        inner = error.__cause__ or error.__context__
        if inner is None:
            return type(error).__name__
        error = inner
