"""What the API tells of this node's disks: the cache, and the records of restores. Calls block."""

import os
from collections.abc import Sequence
from pathlib import Path

from streamd.config import Config
from streamd.daemon.api.models import CachedImage, CacheState, RecordFacts
from streamd.daemon.worker_user import as_owner
from streamd.errors import StreamdError


def cache_state(config: Config) -> CacheState:
    """Describe the node cache, or say in `problem` why it can't be used."""
    settings = config.cache
    directory = settings.directory
    if directory is None:
        return CacheState(directory=None, images=[], used_bytes=0, max_bytes=0, reserve_bytes=0, free_bytes=0)
    from streamd.serve.cache_directory import list_images  # 8 MiB of numpy, which nothing else here needs

    problem: str | None = None
    images: list[CachedImage] = []
    free_bytes = total_bytes = 0
    try:
        found = os.statvfs(directory)
        free_bytes, total_bytes = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
        with as_owner(directory, config):
            listed = list_images(directory)
        images = [
            CachedImage(
                key=image.key,
                disk_bytes=image.disk_bytes,
                used_s=image.used_s,
                owner=image.owner,
                is_pinned=image.is_pinned,
            )
            for image in listed
        ]
    except (OSError, StreamdError) as error:
        problem = str(error)
    return CacheState(
        directory=str(directory),
        images=images,
        used_bytes=sum(image.disk_bytes for image in images),
        max_bytes=total_bytes // 2 if settings.max_bytes is None else settings.max_bytes,
        reserve_bytes=total_bytes // 10 if settings.reserve_bytes is None else settings.reserve_bytes,
        free_bytes=free_bytes,
        problem=problem,
    )


def newest_records(directory: Path, limit: int) -> Sequence[RecordFacts]:
    """Give the newest records in a directory, newest first. Raises: `OSError`."""
    found = []
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                if entry.name.endswith(".record") and entry.is_file(follow_symlinks=False):
                    status = entry.stat(follow_symlinks=False)
                    found.append(RecordFacts(name=entry.name, size_bytes=status.st_size, modified_s=status.st_mtime))
    except FileNotFoundError:
        return []
    return sorted(found, key=lambda record: -record.modified_s)[:limit]
