"""What a mount is asked to be: the values that the `mount` command hands to the process that serves."""

from dataclasses import dataclass
from pathlib import Path

from streamd.config import Config, Prefetch


@dataclass(frozen=True, slots=True)
class MountOptions:
    """One mount.

    `mountpoint` is absolute, and resolved (`fuse.mount_paths.resolve`). `cache_dir` None: no cache on disk.
    `cache_max_bytes` None: the node cache's own rule. `store_timeout_s` bounds
    how long the store may be unreachable before the mount serves; after that, reads wait by `config.policy`.
    `warm`: sealed files of the cache may be mounted themselves (`daemon.warm`). `tenant`: whose it is; what one has
    cached is no other's. `seals`: an image that is whole is made ready for a warm mount.
    """

    snapshot_url: str
    mountpoint: str
    cache_dir: Path | None
    cache_max_bytes: int | None
    prefetch: Prefetch
    config: Config
    store_timeout_s: float
    warm: bool = True
    tenant: str = ""
    seals: bool = True
