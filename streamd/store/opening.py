"""From an address to a store: `gs://bucket/prefix`, `file:///dir`, `file:///dir?latency=15ms&rate=100MB/s`.

A snapshot's address is its store's with `/ID` at the end of the path.
"""

import os
import re
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit, urlunsplit

from streamd.errors import Exit, StreamdError
from streamd.snapshot.names import checked_id
from streamd.store.identity import TokenProvider
from streamd.store.port import Store, is_key

_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_BYTES_PER_S = {
    "B/s": 1.0,
    "kB/s": 1e3,
    "MB/s": 1e6,
    "GB/s": 1e9,
    "KiB/s": 2.0**10,
    "MiB/s": 2.0**20,
    "GiB/s": 2.0**30,
    "kbit/s": 1e3 / 8,
    "Mbit/s": 1e6 / 8,
    "Gbit/s": 1e9 / 8,
}
# As the daemon's API takes them (`daemon/api/models.py`).
_ADDRESS = re.compile(r"[\x21-\x7e]*", re.ASCII)
# https://cloud.google.com/storage/docs/buckets#naming
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")


class BadURL(StreamdError):
    """What was given isn't the address of a store or of a snapshot; the message says what is wrong with it."""

    exit_code, kind = Exit.USAGE, "usage"


def open_store(url: str, *, tokens: TokenProvider | None = None, is_used: bool = False) -> Store:
    """Open the store at `url`. Nothing is asked of it yet, so a wrong bucket or directory shows at the first call.

    The query of a `file:` address, for trials, makes every request wait (`latency`, with us, ms or s) and lets all
    reads and puts together move no more than `rate` (B/s, kB/s, MB/s, GB/s, KiB/s, MiB/s, GiB/s, kbit/s, Mbit/s,
    Gbit/s). `is_used`: it is known that something was put there, so a directory that is missing, or empty since its
    file system isn't mounted, is a store that is away, not an empty one. `tokens` sign what is asked of Google; None:
    those of the application default credentials. Raises: `BadURL`; for `gs:` also `StoreError` CREDENTIALS when there
    are none to be had.
    """
    parts = _parts(url)
    match parts.scheme:
        case "file":
            return _open_directory(url, parts, is_used=is_used)
        case "gs":
            if parts.query or parts.fragment:
                raise BadURL(f"{url}: a gs:// address has no query and no fragment")
            prefix = unquote(parts.path).strip("/")
            if not _BUCKET.fullmatch(parts.netloc):
                raise BadURL(f"{url}: {parts.netloc!r} is not the name of a bucket")
            if prefix and not is_key(prefix):
                raise BadURL(f"{url}: {prefix[:80]!r} can't be a prefix")
            from streamd.store.gcs import GoogleStore  # half a second, which other stores need not pay

            return GoogleStore(parts.netloc, prefix, emulator_host=_emulator_host(), tokens=tokens)
        case "":
            raise BadURL(f"{url}: a store's address begins with gs:// or file://")
        case scheme:
            raise BadURL(f"{url}: no store is reached by {scheme}://, only by gs:// and file://")


def _parts(url: str) -> SplitResult:
    """Split an address, which is visible ASCII: `urlsplit` drops some of what isn't. Raises: `BadURL`."""
    if not _ADDRESS.fullmatch(url):
        raise BadURL(
            f"{url!r}: an address has no white space and no characters beyond ASCII; percent-encode them (a space: %20)"
        )
    try:
        return urlsplit(url)
    except ValueError as error:  # as of [ without ]
        raise BadURL(f"{url}: {error}") from error


def check_snapshot_url(url: str) -> None:
    """See whether this may be a snapshot's address, without opening anything. Raises: `BadURL`, `Refused`."""
    store_url, _ = split_snapshot_url(url)
    if urlsplit(store_url).scheme not in ("gs", "file"):
        open_store(store_url)  # says what is wrong with it


def wants_default_credentials(url: str) -> bool:
    """Whether a store, or a snapshot, without credentials of its own is asked with the application default ones."""
    return urlsplit(url).scheme == "gs" and not _emulator_host()


def _emulator_host() -> str | None:
    return os.environ.get("STORAGE_EMULATOR_HOST")  # as every client of Google Cloud Storage honours it


def _open_directory(url: str, parts: SplitResult, *, is_used: bool) -> Store:
    from streamd.store.directory import DirectoryStore

    path, query = unquote(parts.path), parts.query
    if parts.netloc not in ("", "localhost") or not path.startswith("/"):
        raise BadURL(f"{url}: the directory must be absolute, as in file:///var/lib/snapshots")
    if parts.fragment or "\0" in path:
        raise BadURL(f"{url}: not the address of a directory")
    store = DirectoryStore(path, is_used=is_used)
    try:
        settings = parse_qsl(query, keep_blank_values=True, strict_parsing=True) if query else []
    except ValueError as error:
        raise BadURL(f"{url}: {error}") from error
    if not settings:
        return store
    latency_s, bytes_per_s = 0.0, None
    if len(dict(settings)) < len(settings):
        raise BadURL(f"{url}: a setting is given twice")
    for name, value in settings:
        match name:
            case "latency":
                latency_s = _amount(url, name, value, _SECONDS)
            case "rate":
                bytes_per_s = _amount(url, name, value, _BYTES_PER_S)
                if not bytes_per_s:
                    raise BadURL(f"{url}: rate must be more than 0")
            case _:
                raise BadURL(f"{url}: unknown setting {name!r}; there are latency and rate")
    from streamd.store.shaped import ShapedStore

    return ShapedStore(store, latency_s=latency_s, bytes_per_s=bytes_per_s, url=url.rstrip("/"))


def _amount(url: str, name: str, text: str, units: dict[str, float]) -> float:
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?) ?([A-Za-z/]+)", text)
    if not found or found[2] not in units:
        raise BadURL(f"{url}: {name}={text} is not a number with one of the units {', '.join(units)}")
    return float(found[1]) * units[found[2]]


def split_snapshot_url(url: str) -> tuple[str, str]:
    """Split a snapshot's address into its store's address and its id; a query stays with the store.

    Raises: `BadURL` when there is no path to take an id from, `Refused` when the last part of it can't be an id.
    """
    parts = _parts(url)
    path, slash, snapshot_id = parts.path.rstrip("/").rpartition("/")
    if not parts.scheme or not slash or not snapshot_id:
        raise BadURL(f"{url}: a snapshot's address is its store's and its id, as in gs://bucket/prefix/ID")
    if parts.scheme == "file":
        # urlunsplit would give file:/dir.
        store_url = f"file://{parts.netloc}{path or '/'}" + (f"?{parts.query}" if parts.query else "")
    else:
        store_url = urlunsplit(parts._replace(path=path))
    return store_url, checked_id(unquote(snapshot_id))
