"""What was asked for under which request id, so that a request whose answer was lost can be sent again.

A request is kept as a keyed digest, since it may name a command with a secret in its arguments.
"""

import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping
from hashlib import blake2b

import msgspec

from streamd.daemon.api.models import ImageRequest
from streamd.errors import Refused

_KEY_BYTES = 32


class RequestIdReused(Refused):
    """A request id came again with another request."""

    kind = "request-id-reused"

    def __init__(self, request_id: str) -> None:
        super().__init__(f"request id {request_id} was used for another request; make a new id for each")
        self.request_id = request_id


class RequestMemory:
    """The most recently used request ids, `kept` at most, and the image that each one got.

    `known` has the digest and the image by id; `on_change` is called when that has changed.
    """

    def __init__(self, *, kept: int, on_change: Callable[[], None] = lambda: None) -> None:
        self._kept = kept
        self._on_change = on_change
        self.key = secrets.token_bytes(_KEY_BYTES)
        self.known: OrderedDict[str, tuple[bytes, str]] = OrderedDict()

    def recall(self, key: bytes, known: Mapping[str, tuple[bytes, str]]) -> None:
        """Go on with what another one has known. Raises: `ValueError` for a key that can't be one."""
        if known:
            if len(key) != _KEY_BYTES:
                raise ValueError("request ids without their key")
            self.key = key
            self.known = OrderedDict(list(known.items())[-self._kept :])

    def image_of(self, request: ImageRequest) -> str | None:
        """Give the image that this request got before. Raises: `RequestIdReused`."""
        known = self.known.get(request.request_id)
        if known is None:
            return None
        digest, image_id = known
        if digest != self._digest(request):
            raise RequestIdReused(request.request_id)
        self.known.move_to_end(request.request_id)
        return image_id

    def note(self, request: ImageRequest, image_id: str) -> None:
        """Remember what a request got; the id that wasn't used for longest is forgotten. Failures aren't noted."""
        self.known[request.request_id] = (self._digest(request), image_id)
        if len(self.known) > self._kept:
            self.known.popitem(last=False)
        self._on_change()

    def _digest(self, request: ImageRequest) -> bytes:
        return blake2b(msgspec.json.encode(request), key=self.key, digest_size=16).digest()
