"""A store in Google Cloud Storage: `gs://bucket/prefix`.

`google-cloud-storage` uploads what is large. Everything else is a plain request of our own (`google_http.py`): what is
small, since whoever reads must not wait for that client's import, and ranges, because of these figures
(`bench/range_reads.py`, emulator on the same machine, 2 cores, MB/s):

    range, threads             1 MiB, 1    1 MiB, 4    4 MiB, 1    4 MiB, 4    CPU s/GB    at 800 Mbit/s
    google-cloud-storage            230         163         317         255     2.6-5.2          3.3-6.0
    obstore (Rust)                  808         749         764        1319     0.6-1.0          2.1-5.3
    this store (in pieces)         1002        1087        1098        1466     0.4-0.8          1.2-1.9

(one run of 2 s a figure, the emulator on the same two cores: their ratio counts, not their third digit; the last column
is CPU s/GB where bytes come in small portions, over a link).

Neither retries, each has its time-outs, both take their tokens from one provider, and what either of them says went
wrong is classed by one table (`store/google_errors.py`).

A read is pinned by `generation=`; that answers 404 whether the object was deleted or overwritten, and one request
without a generation tells which. (`ifGenerationMatch` on a read would answer 412, but the emulator ignores it there.)
"""

import base64
import contextlib
import http.client
import re
import threading
import time
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from streamd.errors import StoreError, StoreErrorKind
from streamd.store.checksum import crc32c
from streamd.store.credentials import default_tokens
from streamd.store.google_errors import refuse_strange, translated
from streamd.store.google_http import GoogleHttp
from streamd.store.google_json import GoogleJson
from streamd.store.identity import TokenProvider
from streamd.store.port import CLOCK_KEY, Buffer, Condition, ObjectInfo, checked_key, is_key

_ENDPOINT = "https://storage.googleapis.com"
# The client sends up to this much in one request, and more in steps of a resumable upload; each step is copied once. A
# multiple of 256 KiB, as the protocol wants it.
_ONE_REQUEST_BYTES = 8 << 20
_UPLOAD_STEP_BYTES = 8 << 20
# Up to this much (leases, learned orders, manifests of small snapshots) goes without Google's client.
_SMALL_BYTES = 1 << 20
# A body is handed over in pieces of this size, each in memory of its own: what comes off a slow wire comes in 8 to 30
# KiB, and each piece costs a wait for the interpreter's lock. A chunk's size: at 800 Mbit/s it holds a chunk back by at
# most 3 ms, and a chunk that is stored as it is arrives in one piece, where it stays. What was received of a piece when
# its body is cut is asked for again.
PIECE_BYTES = 256 << 10
_CONNECTIONS = 64  # kept open by the client that uploads, which has a thread for each upload under way
_RANGE = re.compile(r"bytes (\d+)-")


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long to wait, in seconds.

    `connect_s` for a connection, `silence_s` for the next bytes of an answer, `body_s` for the whole of a ranged read
    (the time that its consumer takes counts, too), `write_s` for the answer to a request that writes.
    """

    connect_s: float = 5.0
    silence_s: float = 10.0
    body_s: float = 300.0
    write_s: float = 60.0


def emulator_address(host: str) -> str:
    """Give the address of an emulator from STORAGE_EMULATOR_HOST, which has a scheme or not."""
    host = host.strip().rstrip("/")
    return host if "://" in host else f"http://{host}"


class GoogleStore:
    """The objects of a bucket whose names begin with `prefix/` (all of them if it is empty).

    `emulator_host` names an emulator, which is asked without credentials unless `tokens` are given; the real store is
    asked with `tokens`, or those of the application default credentials. The clients are made when they are first
    needed: a store that is only read from never imports Google's.
    """

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        emulator_host: str | None = None,
        tokens: TokenProvider | None = None,
        timeouts: Timeouts = Timeouts(),
    ) -> None:
        self._bucket = bucket
        self._prefix = f"{checked_key(prefix)}/" if prefix else ""
        self._endpoint = emulator_address(emulator_host) if emulator_host else _ENDPOINT
        self._anonymous = bool(emulator_host) and tokens is None
        self._tokens = tokens
        self._timeouts = timeouts
        self._lock = threading.Lock()  # over the making of what follows
        self._google_bucket: Any = None
        self._session: Any = None
        self._http = GoogleHttp(
            self._endpoint, token=self._fresh_token, connect_s=timeouts.connect_s, silence_s=timeouts.silence_s
        )
        self._json = GoogleJson(self._http, bucket)
        self._downloads = f"/download/storage/v1/b/{urllib.parse.quote(bucket, safe='')}/o"

    @property
    def url(self) -> str:
        return f"gs://{self._bucket}/{self._prefix}".rstrip("/")

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        with self._asking(prefix):
            for info in self._json.list(self._prefix + prefix):
                key = info.key.removeprefix(self._prefix)
                if is_key(key):  # not, for example, the "folder/" that a console makes
                    yield replace(info, key=key)

    def head(self, key: str) -> ObjectInfo:
        name = self._prefix + checked_key(key)
        with self._asking(key):
            return replace(self._json.describe(name), key=key)

    def put(self, key: str, data: Buffer, *, condition: str | Condition) -> ObjectInfo:
        match condition:
            case Condition.ABSENT:
                match_generation: int | None = 0
            case Condition.ANY:
                match_generation = None
            case str():
                match_generation = int(condition)
        view = memoryview(data).cast("B")
        name = self._prefix + checked_key(key)
        # The crc32c goes with the request, so that the store refuses damaged bytes before they are an object.
        crc = crc32c(view)
        with self._asking(key):
            if len(view) <= _SMALL_BYTES:
                info = replace(self._json.insert(name, view, match_generation=match_generation, crc32c=crc), key=key)
            else:
                info = self._put_large(key, name, view, match_generation, crc)
            if info.crc32c not in (None, crc):
                raise StoreError(
                    StoreErrorKind.CORRUPT, key, f"stored with crc32c {info.crc32c:08x}, sent with {crc:08x}"
                )
            return info

    def _put_large(self, key: str, name: str, view: memoryview, match_generation: int | None, crc: int) -> ObjectInfo:
        blob = self._bucket_client().blob(name, chunk_size=_UPLOAD_STEP_BYTES)
        # In an upload in steps the crc32c is not left to the client, which would also check the answer and, if that is
        # wrong, delete what is there then, whosever it is, with retries.
        in_steps = len(view) > _ONE_REQUEST_BYTES
        blob.upload_from_file(
            _Reader(view),
            size=len(view),
            content_type="application/octet-stream",
            if_generation_match=match_generation,
            checksum=None if in_steps else "crc32c",
            crc32c_checksum_value=base64.b64encode(crc.to_bytes(4, "big")).decode() if in_steps else None,
            timeout=(self._timeouts.connect_s, self._timeouts.write_s),
            retry=None,
        )
        return _info(key, blob)

    def delete(self, key: str, *, generation: str) -> None:
        name, match_generation = self._prefix + checked_key(key), int(generation)
        with self._asking(key):
            if self._anonymous:
                # fake-gcs-server ignores the condition of a delete (fsouza/fake-gcs-server#1282); this is the same,
                # but for a race that matters to nobody's data.
                there = self._json.describe(name)
                if there.generation != generation:
                    raise StoreError(
                        StoreErrorKind.CHANGED, key, f"has generation {there.generation}, not {generation}"
                    )
            self._json.delete(name, match_generation=None if self._anonymous else match_generation)

    def crc32c(self, info: ObjectInfo) -> int:
        if info.crc32c is not None:
            return info.crc32c
        crc = 0
        for piece in self.read(info.key, generation=info.generation, start=0, end=info.size):
            crc = crc32c(piece, crc)
        return crc

    def now_s(self) -> float:
        return self.put(CLOCK_KEY, b"", condition=Condition.ANY).updated_s

    def close(self) -> None:
        with self._lock:
            if self._session is not None:
                self._session.close()
            self._google_bucket = self._session = None
        self._http.close()

    def read(self, key: str, *, generation: str, start: int, end: int) -> Iterator[Buffer]:
        if not 0 <= start <= end:
            raise ValueError(f"[{start}, {end}) is not a range")
        name = urllib.parse.quote(self._prefix + checked_key(key), safe="")
        if start == end:
            return
        import numpy  # what only lists and uploads does without

        position = start
        target = f"{self._downloads}/{name}?alt=media&generation={generation}"
        late_s = time.monotonic() + self._timeouts.body_s
        with (
            self._asking(key, generation),
            self._http.asked("GET", target, headers={"Range": f"bytes={start}-{end - 1}"}) as answer,
        ):
            _check_answer(answer, key, generation, start)
            while position < end:
                piece = numpy.empty(min(PIECE_BYTES, end - position), numpy.uint8).data  # not zeroed first
                received = answer.readinto(piece)
                if not received:
                    break
                position += received
                yield piece[:received]
                if position < end and time.monotonic() > late_s:
                    raise StoreError(StoreErrorKind.TRANSIENT, key, f"body took more than {self._timeouts.body_s:g} s")
        if position < end:
            raise StoreError(StoreErrorKind.TRANSIENT, key, f"body ended at byte {position}, before byte {end}")

    # The clients.

    def _fresh_token(self) -> str:
        """Have a good token at hand, if this store needs one. Raises: `StoreError`."""
        if self._anonymous:
            return ""
        with self._lock:
            if self._tokens is None:
                self._tokens = default_tokens()
        return self._tokens.fresh()

    def _bucket_client(self) -> Any:
        """Give Google's client for our bucket."""
        with self._lock:
            if self._google_bucket is None:
                import requests
                import requests.adapters
                from google.auth.credentials import AnonymousCredentials as NoCredentials
                from google.cloud import storage

                session = requests.Session()
                session.auth = self._sign
                session.hooks["response"].append(refuse_strange)
                adapter = requests.adapters.HTTPAdapter(pool_connections=1, pool_maxsize=_CONNECTIONS, max_retries=0)
                session.mount(self._endpoint, adapter)
                # The session signs (Google's own would refresh tokens on its own account and try again); the project
                # matters only to calls about buckets, but without one the client goes looking for it.
                client = storage.Client(
                    project="-",
                    credentials=NoCredentials(),  # type: ignore[no-untyped-call]
                    client_options={"api_endpoint": self._endpoint},
                    _http=session,
                )
                # Version 3.17 asks, behind our back and with retries, for the description of the bucket, to put it
                # into traces; a reader may not be allowed to. There is no setting but an environment variable.
                client._bucket_metadata_cache = None
                self._session = session
                self._google_bucket = client.bucket(self._bucket)
            return self._google_bucket

    def _sign(self, request: Any) -> Any:
        """Put the token into a request of the `requests` library, as its `auth` hook."""
        token = self._fresh_token()
        if token:
            request.headers["Authorization"] = f"Bearer {token}"
        return request

    # Errors.

    @contextlib.contextmanager
    def _asking(self, key: str, generation: str = "") -> Iterator[None]:
        """Turn what the clients raise inside into a `StoreError` about `key`; a generation says it is a pinned read."""
        try:
            token = self._fresh_token()
        except StoreError as error:
            raise self._about_store(error.store_kind, key, str(error)) from error
        try:
            yield
            return
        except StoreError as error:
            if error.key:
                raise
            store_error = StoreError(error.store_kind, key, str(error))  # from one of the hooks
            store_error.__cause__ = error
        except MemoryError:
            raise
        except Exception as error:
            store_error = translated(error, key)
            store_error.__cause__ = error
        if not key or key.endswith("/"):  # a listing
            store_error = self._about_store(store_error.store_kind, key, str(store_error).removeprefix(f"{key}: "))
        if store_error.store_kind is StoreErrorKind.CREDENTIALS and self._tokens is not None:
            self._tokens.refuse(token)
        if store_error.store_kind is StoreErrorKind.GONE and generation:
            now = self.head(key)  # which raises GONE if it is
            if now.generation != generation:
                raise StoreError(
                    StoreErrorKind.CHANGED, key, f"generation {generation} was replaced by {now.generation}"
                )
            raise StoreError(StoreErrorKind.TRANSIENT, key, f"generation {generation} is there, but wasn't found")
        raise store_error

    def _about_store(self, kind: StoreErrorKind, key: str, message: str) -> StoreError:
        """Make an error about no single object: its message names the store."""
        error = StoreError(kind, "", f"{self.url}: {message}")
        error.key = key
        return error


class _Reader:
    """A view as the file that Google's client reads from; each read copies only what it gives."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._at = 0

    def read(self, count: int = -1) -> bytes:
        end = len(self._view) if count is None or count < 0 else self._at + count
        data = bytes(self._view[self._at : end])
        self._at += len(data)
        return data

    def tell(self) -> int:
        return self._at

    def seek(self, at: int, whence: int = 0) -> int:
        self._at = at + (0, self._at, len(self._view))[whence]
        return self._at


def _check_answer(answer: http.client.HTTPResponse, key: str, generation: str, start: int) -> None:
    """Make sure that a body is what was asked for. Raises: `StoreError`."""
    answered = answer.headers.get("x-goog-generation")
    if answered is not None and answered != generation:
        raise StoreError(StoreErrorKind.CHANGED, key, f"answered with generation {answered}, not {generation}")
    where = _RANGE.match(answer.headers.get("Content-Range", ""))
    if answer.status != http.HTTPStatus.PARTIAL_CONTENT or where is None or int(where[1]) != start:
        raise StoreError(StoreErrorKind.TRANSIENT, key, f"answered with another range than the one from byte {start}")


def _info(key: str, blob: Any) -> ObjectInfo:
    """Give what an answer says of an object. Raises: any exception when it isn't as Google's are."""
    if (size := int(blob.size)) < 0:
        raise ValueError(f"an object of {size} bytes")
    return ObjectInfo(
        key=key,
        size=size,
        generation=str(int(blob.generation)),
        # Listings leave it out for objects under a customer's own key.
        crc32c=int.from_bytes(base64.b64decode(blob.crc32c), "big") if blob.crc32c else None,
        updated_s=blob.updated.timestamp(),
    )
