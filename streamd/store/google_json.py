"""Google Cloud Storage's JSON interface for what is small.

Google's own client takes 0.3 s to import: half as long as the whole start of a mount, and as long again of every other
thread's time when it is imported while a restore loads. A mount needs four requests only (list, get, insert and delete
of https://cloud.google.com/storage/docs/json_api/v1/objects): for its pins, its lease and the learned order.
"""

import base64
import json
import urllib.parse
import uuid
from collections.abc import Iterator, Mapping
from datetime import datetime
from types import MappingProxyType
from typing import Any

from streamd.errors import StoreError, StoreErrorKind
from streamd.store.google_http import GoogleHttp
from streamd.store.port import Buffer, ObjectInfo

_FIELDS = "name,size,generation,crc32c,updated"
# A page of a thousand objects is some 300 KB.
_ANSWER_BYTES_MAX = 16 << 20


class GoogleJson:
    """The objects of a bucket."""

    def __init__(self, http: GoogleHttp, bucket: str) -> None:
        quoted = urllib.parse.quote(bucket, safe="")
        self._objects = f"/storage/v1/b/{quoted}/o"
        self._uploads = f"/upload/storage/v1/b/{quoted}/o"
        self._http = http

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Give every object whose name begins with `prefix`, in the order of the names' UTF-8.

        The keys are whole names. Raises: `StoreError`, `OSError`; another exception when the answer makes no sense.
        """
        page = ""
        while True:
            query = {"prefix": prefix, "fields": f"items({_FIELDS}),nextPageToken"}
            answer = self._ask("GET", self._objects, query | ({"pageToken": page} if page else {}))
            for item in answer.get("items", []):
                yield info_of(item)
            page = answer.get("nextPageToken", "")
            if not page:
                return

    def describe(self, name: str) -> ObjectInfo:
        """Describe the object as it is now. Raises: as `list`."""
        url = f"{self._objects}/{urllib.parse.quote(name, safe='')}"
        return info_of(self._ask("GET", url, {"fields": _FIELDS}))

    def insert(self, name: str, data: Buffer, *, match_generation: int | None, crc32c: int) -> ObjectInfo:
        """Write an object in one request, which the store refuses when its bytes aren't those of `crc32c`.

        `match_generation`: what must be there now, 0 for nothing, None for anything. Raises: as `list`.
        """
        query = {"uploadType": "multipart", "fields": _FIELDS}
        if match_generation is not None:
            query["ifGenerationMatch"] = str(match_generation)
        checksum = base64.b64encode(crc32c.to_bytes(4, "big")).decode()
        about = json.dumps({"name": name, "crc32c": checksum}).encode()
        boundary = uuid.uuid4().hex  # random: it must not be in the data
        head = b"--%b\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n%b\r\n" % (boundary.encode(), about)
        head += b"--%b\r\nContent-Type: application/octet-stream\r\n\r\n" % boundary.encode()
        body = b"".join([head, data, b"\r\n--%b--\r\n" % boundary.encode()])
        headers = {"Content-Type": f"multipart/related; boundary={boundary}"}
        return info_of(self._ask("POST", self._uploads, query, body, headers))

    def delete(self, name: str, *, match_generation: int | None) -> None:
        """Delete an object, if that is its generation. Raises: as `list`."""
        query = {} if match_generation is None else {"ifGenerationMatch": str(match_generation)}
        self._ask("DELETE", f"{self._objects}/{urllib.parse.quote(name, safe='')}", query)

    def _ask(
        self,
        method: str,
        path: str,
        query: dict[str, str],
        data: bytes | None = None,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> Any:
        target = f"{path}?{urllib.parse.urlencode(query)}"
        with self._http.asked(method, target, body=data, headers=headers) as answer:
            body = answer.read(_ANSWER_BYTES_MAX + 1)
        if method == "DELETE":
            return None
        if len(body) > _ANSWER_BYTES_MAX:
            raise StoreError(StoreErrorKind.TRANSIENT, "", f"an answer of more than {_ANSWER_BYTES_MAX} bytes")
        described = json.loads(body)
        if not isinstance(described, dict):
            raise StoreError(StoreErrorKind.TRANSIENT, "", "an answer that is no JSON object")
        return described


def info_of(item: Any) -> ObjectInfo:
    """Read an object's description. Raises: any exception when it isn't as Google's are."""
    if (size := int(item["size"])) < 0:
        raise ValueError(f"an object of {size} bytes")
    crc = item.get("crc32c")  # listings leave it out for objects under a customer's own key
    return ObjectInfo(
        key=str(item["name"]),
        size=size,
        generation=str(int(item["generation"])),
        crc32c=int.from_bytes(base64.b64decode(crc), "big") if crc else None,
        updated_s=datetime.fromisoformat(item["updated"]).timestamp(),
    )
