"""What one image more may not exceed (descriptors: `test_bad_days.py`, under a daemon)."""

import pytest

from streamd.config import Config, DaemonConfig
from streamd.daemon.admission import check_room
from streamd.errors import Refused

MIB = 1 << 20


def test_each_limit_is_reached_and_not_exceeded() -> None:
    by_count = Config(memory_max_bytes=MIB, daemon=DaemonConfig(images_max=2))
    by_memory = Config(memory_max_bytes=64 * MIB, daemon=DaemonConfig(memory_max_bytes=128 * MIB))
    for config, name in ((by_count, "daemon.images_max"), (by_memory, "daemon.memory_max_bytes")):
        check_room(2, config)
        with pytest.raises(Refused, match=name):
            check_room(3, config)


def test_a_single_image_is_never_too_much_memory() -> None:
    check_room(1, Config(memory_max_bytes=64 * MIB, daemon=DaemonConfig(memory_max_bytes=32 * MIB)))
