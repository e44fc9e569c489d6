"""Errors as the API answers them: RFC 9457 problem details, `urn:streamd:problem:KIND`.

One table says which status a kind of error gets; a kind that isn't in it goes by its exit code. A problem holds what
the error holds (`relay.error_record`), so a client raises what the daemon met: same kind, message and exit code.
"""

from http import HTTPStatus

import msgspec
from starlette.responses import Response

from streamd.daemon.relay import error_record
from streamd.errors import Exit, StreamdError

MEDIA_TYPE = "application/problem+json"
TYPE_PREFIX = "urn:streamd:problem:"

STATUS_OF_KIND: dict[str, HTTPStatus] = {
    # of the request
    "bad-request": HTTPStatus.BAD_REQUEST,  # not JSON, no body where one is needed
    "invalid": HTTPStatus.UNPROCESSABLE_ENTITY,  # JSON, and not what the description allows
    "no-such-path": HTTPStatus.NOT_FOUND,
    "wrong-method": HTTPStatus.METHOD_NOT_ALLOWED,
    "wrong-media-type": HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
    "too-large": HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    "too-slow": HTTPStatus.REQUEST_TIMEOUT,
    "wrong-version": HTTPStatus.HTTP_VERSION_NOT_SUPPORTED,
    "wrong-peer": HTTPStatus.FORBIDDEN,
    "busy": HTTPStatus.SERVICE_UNAVAILABLE,  # no connection or stream left
    # of the node
    "ended": HTTPStatus.GONE,  # the image that a repeated request got
    "draining": HTTPStatus.SERVICE_UNAVAILABLE,
    "no-answer": HTTPStatus.GATEWAY_TIMEOUT,  # a worker or a disk
    "internal": HTTPStatus.INTERNAL_SERVER_ERROR,
    # of the store, where the exit code alone would say something else to an HTTP client
    "throttled": HTTPStatus.SERVICE_UNAVAILABLE,
}
STATUS_OF_EXIT: dict[Exit, HTTPStatus] = {
    Exit.DONE: HTTPStatus.INTERNAL_SERVER_ERROR,  # not of an error
    Exit.FAILED: HTTPStatus.INTERNAL_SERVER_ERROR,
    Exit.USAGE: HTTPStatus.UNPROCESSABLE_ENTITY,
    Exit.NOT_FOUND: HTTPStatus.NOT_FOUND,
    Exit.DAMAGED: HTTPStatus.BAD_GATEWAY,  # what the store has is wrong
    # Not 401: that would be about the API's own caller.
    Exit.NOT_PERMITTED: HTTPStatus.FORBIDDEN,
    Exit.UNREACHABLE: HTTPStatus.SERVICE_UNAVAILABLE,
    Exit.REFUSED: HTTPStatus.CONFLICT,
    Exit.INTERRUPTED: HTTPStatus.SERVICE_UNAVAILABLE,
    Exit.TERMINATED: HTTPStatus.SERVICE_UNAVAILABLE,
}
# Asking again later may well work.
_RETRY_AFTER_S = {HTTPStatus.SERVICE_UNAVAILABLE: 5, HTTPStatus.GATEWAY_TIMEOUT: 5}


class RequestProblem(StreamdError):
    """Something is wrong with a request, or with when it came, before the node is asked."""

    exit_code = Exit.USAGE

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class NoAnswerYet(StreamdError):
    """A worker or a disk did not answer in time."""

    kind = "no-answer"


def status_of(error: StreamdError) -> HTTPStatus:
    """Look the error's status up."""
    return STATUS_OF_KIND.get(error.kind) or STATUS_OF_EXIT[error.exit_code]


def problem(error: StreamdError) -> dict[str, object]:
    """Describe an error."""
    record = error_record(error)
    # What the kind says needs no second place; and a fact must not take the name of a member of the problem.
    facts = {key: value for key, value in record.items() if key not in ("kind", "message", "status", "type", "title")}
    status = status_of(error)
    members = {"type": TYPE_PREFIX + error.kind, "title": status.phrase, "status": int(status), "detail": str(error)}
    return facts | members


def response(error: StreamdError, headers: dict[str, str] | None = None) -> Response:
    """Make the answer to a request that met an error."""
    status = status_of(error)
    wait = {"retry-after": str(_RETRY_AFTER_S[status])} if status in _RETRY_AFTER_S else {}
    return Response(
        msgspec.json.encode(problem(error)), status_code=status, media_type=MEDIA_TYPE, headers=wait | (headers or {})
    )


def raw_response(error: StreamdError) -> bytes:
    """Write a whole HTTP answer for a connection that isn't even listened to."""
    status, body = status_of(error), msgspec.json.encode(problem(error))
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\n"
        f"content-type: {MEDIA_TYPE}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body
