"""How many images a node takes: what one more would need is here before it is begun, so that it costs no other one."""

import resource
from collections.abc import Sequence

from streamd.config import Config, machine_bytes, size_text
from streamd.daemon.api.limits import Limits
from streamd.errors import Refused

# What an image may need at once: its mount, what a next worker is given, the ways to two workers.
_DESCRIPTORS_AN_IMAGE = 10
# Beside images and connections: of libraries, the listener, threads that look at disks.
_DESCRIPTORS_OWN = 64
# Tables (`Pinned.tables_bytes`) of so many bytes have room in what a worker has beside its cap (docs/operating.md):
# those of 100 GiB in chunks of 256 KiB. What is more counts as the image's memory.
TABLES_FREE_BYTES = 32 << 20


def check_room(tables: Sequence[int], config: Config) -> None:
    """See whether there is room for one image more; `tables` has what those that are here take for their manifests'.

    Raises: `Refused`, which says which limit is reached.
    """
    limits, count = config.daemon, len(tables) + 1
    if count > limits.images_max:
        raise Refused(
            f"this node serves {limits.images_max} images already (daemon.images_max): end some "
            "(streamd image release ID), or raise it"
        )
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if Limits().connections + _DESCRIPTORS_OWN + count * _DESCRIPTORS_AN_IMAGE > descriptors:
        raise Refused(
            f"{count} images and their clients may need more than the {descriptors} open files that this process may "
            "have (LimitNOFILE= of its unit)"
        )
    needed_bytes, limit_bytes = count * config.memory_max_bytes + _counted_bytes(tables), _limit_bytes(config)
    if needed_bytes > limit_bytes and count > 1:
        each, needed, given = map(size_text, (config.memory_max_bytes, needed_bytes, limit_bytes))
        raise Refused(
            f"{count} images may use {needed} of memory, this node gives {given} (daemon.memory_max_bytes): end some "
            f"(streamd image release ID), raise it, or lower what each one may use, {each} (memory_max_bytes)"
        )


def tables_room_bytes(others: Sequence[int], config: Config) -> int:
    """Give what an image that is begun may take for its manifest's tables; `others`: what the other images take."""
    left_bytes = _limit_bytes(config) - (len(others) + 1) * config.memory_max_bytes - _counted_bytes(others)
    return TABLES_FREE_BYTES + max(0, left_bytes)


def _counted_bytes(tables: Sequence[int]) -> int:
    return sum(max(0, size - TABLES_FREE_BYTES) for size in tables)


def _limit_bytes(config: Config) -> int:
    limit_bytes = config.daemon.memory_max_bytes
    return machine_bytes() // 2 if limit_bytes is None else limit_bytes
