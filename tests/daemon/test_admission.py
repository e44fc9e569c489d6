"""What one image more may not exceed (descriptors: `test_bad_days.py`, under a daemon)."""

import pytest

from streamd.config import Config, DaemonConfig
from streamd.daemon.admission import TABLES_FREE_BYTES, check_room, tables_room_bytes
from streamd.errors import Refused

MIB = 1 << 20
BY_MEMORY = Config(memory_max_bytes=64 * MIB, daemon=DaemonConfig(memory_max_bytes=128 * MIB))


def test_each_limit_is_reached_and_not_exceeded() -> None:
    by_count = Config(memory_max_bytes=MIB, daemon=DaemonConfig(images_max=2))
    for config, name in ((by_count, "daemon.images_max"), (BY_MEMORY, "daemon.memory_max_bytes")):
        check_room([0], config)
        with pytest.raises(Refused, match=name):
            check_room([0, 0], config)


def test_a_refusal_speaks_in_sizes_for_people_and_says_what_can_be_changed() -> None:
    config = Config(memory_max_bytes=256 * MIB, daemon=DaemonConfig(memory_max_bytes=16 << 30))
    check_room([0] * 63, config)
    with pytest.raises(Refused, match=r"65 images may use 16\.2 GiB of memory, this node gives 16\.0 GiB") as refused:
        check_room([0] * 64, config)
    for name in ("daemon.memory_max_bytes", "256.0 MiB (memory_max_bytes)", "streamd image release"):
        assert name in str(refused.value)


def test_a_single_image_is_never_too_much_memory() -> None:
    check_room([], Config(memory_max_bytes=64 * MIB, daemon=DaemonConfig(memory_max_bytes=32 * MIB)))


def test_tables_that_a_workers_own_memory_has_no_room_for_count_as_its_images() -> None:
    check_room([TABLES_FREE_BYTES], BY_MEMORY)
    with pytest.raises(Refused, match=r"daemon\.memory_max_bytes"):
        check_room([TABLES_FREE_BYTES + 1], BY_MEMORY)


def test_tables_may_take_what_caps_and_other_tables_leave_of_the_nodes_memory() -> None:
    assert tables_room_bytes([], BY_MEMORY) == TABLES_FREE_BYTES + 64 * MIB
    assert tables_room_bytes([0], BY_MEMORY) == TABLES_FREE_BYTES
    assert tables_room_bytes([TABLES_FREE_BYTES + MIB], BY_MEMORY) == TABLES_FREE_BYTES
    three = Config(memory_max_bytes=64 * MIB, daemon=DaemonConfig(memory_max_bytes=192 * MIB))
    assert tables_room_bytes([TABLES_FREE_BYTES + MIB], three) == TABLES_FREE_BYTES + 63 * MIB
