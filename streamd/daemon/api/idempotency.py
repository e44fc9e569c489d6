"""What was asked for under which request id, so that a request whose answer was lost can be sent again.

A request is kept as a keyed digest, since it may name a command with a secret in its arguments.
"""

import secrets
from collections import OrderedDict
from hashlib import blake2b

import msgspec

from streamd.daemon.api.models import ImageRequest
from streamd.errors import Refused


class RequestIdReused(Refused):
    """A request id came again with another request."""

    kind = "request-id-reused"

    def __init__(self, request_id: str) -> None:
        super().__init__(f"request id {request_id} was used for another request; make a new id for each")
        self.request_id = request_id


class RequestMemory:
    """The most recently used request ids, `kept` at most, and the image that each one got."""

    def __init__(self, *, kept: int) -> None:
        self._kept = kept
        self._key = secrets.token_bytes(32)
        self._known: OrderedDict[str, tuple[bytes, str]] = OrderedDict()

    def image_of(self, request: ImageRequest) -> str | None:
        """Give the image that this request got before. Raises: `RequestIdReused`."""
        known = self._known.get(request.request_id)
        if known is None:
            return None
        digest, image_id = known
        if digest != self._digest(request):
            raise RequestIdReused(request.request_id)
        self._known.move_to_end(request.request_id)
        return image_id

    def note(self, request: ImageRequest, image_id: str) -> None:
        """Remember what a request got; the id that wasn't used for longest is forgotten. Failures aren't noted."""
        self._known[request.request_id] = (self._digest(request), image_id)
        if len(self._known) > self._kept:
            self._known.popitem(last=False)

    def _digest(self, request: ImageRequest) -> bytes:
        return blake2b(msgspec.json.encode(request), key=self._key, digest_size=16).digest()
