"""What a worker is to serve, as the supervisor says it; apart from the worker, whose imports that needn't have."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

# How often a worker says that it lives, and what it has done.
BEAT_S = 1.0


@dataclass(frozen=True, slots=True)
class Assignment:
    """One image for one worker. `credentials`: as `parse_credentials` takes them.

    `config_text` is the configuration as the supervisor found it at its start: a file that somebody has broken since
    must not keep a worker from taking over. `bind`: the number and the device of the bind that is taken over, None for
    a mount that is served. `may_be_warm`: sealed files may be given to be bound, else they are served.
    `tables_max_bytes` is what the manifest's tables may take (`Pinned.tables_bytes`).
    `only_proves`: whether the credentials may read the snapshot is all that is wanted.
    `fetch_bytes_per_s` is what it may fetch (0: no bound). `user`: uid and gid to run as; None: root, without
    capabilities.
    """

    image: str
    snapshot_url: str
    mountpoint: str
    prefetch: str
    tenant: str = ""
    credentials: Mapping[str, Any] | None = None
    config_text: str = ""
    log_level: str = "info"
    store_timeout_s: float = 60.0
    may_harden: bool = True
    only_proves: bool = False
    tables_max_bytes: int | None = None
    fetch_bytes_per_s: int = 0
    openers: tuple[tuple[int, int, str, str | None], ...] = ()
    bind: tuple[int, tuple[int, int]] | None = None
    may_be_warm: bool = True
    user: tuple[int, int] | None = None

    def message(self) -> dict[str, object]:
        """Give it as a message."""
        return {"do": "serve", "assignment": asdict(self)}
