"""The forged order that one contestant starts from."""

import pytest

from bench.race_contestants import misleading
from streamd.snapshot.trace import HOT_BYTES, Trace, TraceRange, decode, encode

MIB = 1 << 20


@pytest.mark.parametrize("named", [[], [(100 * MIB, 200 * MIB)], [(0, 4096), (700 * MIB, 776 * MIB)]])
def test_it_names_as_much_as_is_fetched_first_and_nothing_that_was_learned(named: list[tuple[int, int]]) -> None:
    pages_bytes = 776 * MIB
    learned = Trace(bytes(32), 3, tuple(TraceRange(start, end, 0.9, start) for start, end in named))
    forged = misleading(learned, pages_bytes)
    assert decode(encode(forged), digest=bytes(32), pages_bytes=pages_bytes) == forged
    assert forged.bytes_total == HOT_BYTES
    for row in forged.ranges:
        assert all(row.end <= start or end <= row.start for start, end in named)
