"""How many images a node takes: what one more would need is here before it is begun, so that it costs no other one."""

import resource

from streamd.config import Config, machine_bytes
from streamd.daemon.api.limits import Limits
from streamd.errors import Refused

# What an image may need at once: its mount, what a next worker is given, the ways to two workers.
_DESCRIPTORS_AN_IMAGE = 10
# Beside images and connections: of libraries, the listener, threads that look at disks.
_DESCRIPTORS_OWN = 64


def check_room(count: int, config: Config) -> None:
    """See whether `count` images are within the limits. Raises: `Refused`, which says which one they aren't."""
    limits = config.daemon
    if count > limits.images_max:
        raise Refused(f"this node serves {limits.images_max} images already (daemon.images_max)")
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if Limits().connections + _DESCRIPTORS_OWN + count * _DESCRIPTORS_AN_IMAGE > descriptors:
        raise Refused(
            f"{count} images and their clients may need more than the {descriptors} open files that this process may "
            "have (LimitNOFILE= of its unit)"
        )
    limit_bytes = machine_bytes() // 2 if limits.memory_max_bytes is None else limits.memory_max_bytes
    if count * config.memory_max_bytes > limit_bytes and count > 1:
        raise Refused(
            f"{count} images may use {count * config.memory_max_bytes} bytes of memory, this node gives "
            f"{limit_bytes} (daemon.memory_max_bytes)"
        )
