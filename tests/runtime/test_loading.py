"""gVisor's own line about a background load."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.runtime.loading import PageLoading, find_completed, find_failed, parse_duration

# As runsc wrote them, with the prefix of its text log.
LINE = (
    "I0921 10:39:40.627100       1 save_restore.go:1909] Async page loading completed in 1.433s (558825472 bytes, "
    "390.024 MB/s); 11 waiters waited 573ms~1m2.5s for 2637824 bytes"
)
FAILED = (
    "W0921 10:39:41.000000       1 save_restore.go:1700] Async page loading failed: read [0, 262144) returned 0 bytes, "
    "error: input/output error"
)


def test_the_line_of_a_finished_load_is_read_in_full() -> None:
    assert find_completed(f"other lines\n{LINE}\nmore\n") == PageLoading(
        took_s=1.433, loaded_bytes=558825472, waiters=11, stopped_s=0.573, waited_s=62.5, awaited_bytes=2637824
    )


def test_a_load_that_nobody_waited_for_is_read() -> None:
    line = LINE.replace("11 waiters waited 573ms~1m2.5s for 2637824", "0 waiters waited 0s~0s for 0")
    found = find_completed(line)
    assert found is not None
    assert (found.waiters, found.stopped_s, found.waited_s, found.awaited_bytes) == (0, 0.0, 0.0, 0)


def test_of_several_loads_in_a_log_the_last_one_counts() -> None:
    found = find_completed(LINE + "\n" + LINE.replace("11 waiters", "12 waiters"))
    assert found is not None
    assert found.waiters == 12


@pytest.mark.parametrize("log", ["", "Async page loading in progress for 5.003s (1 bytes, 2 MB/s)", FAILED, LINE[:-9]])
def test_a_log_without_a_finished_load_gives_none(log: str) -> None:
    assert find_completed(log) is None


def test_the_reason_of_a_failed_load_is_given() -> None:
    assert find_failed(FAILED) == "read [0, 262144) returned 0 bytes, error: input/output error"
    assert find_failed(LINE) is None


@given(st.integers(0, 10**16))
def test_a_go_duration_is_read_to_the_nanosecond(nanoseconds: int) -> None:
    assert parse_duration(go_duration(nanoseconds)) * 1e9 == pytest.approx(nanoseconds, rel=1e-12)


@pytest.mark.parametrize("text", ["", "5", "s", "1.5", "-1s", "1s ", "1x"])
def test_what_is_not_a_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a Go duration"):
        parse_duration(text)


def go_duration(nanoseconds: int) -> str:
    """Write a duration as Go's time.Duration.String does: one unit below a second, hours, minutes and seconds above."""
    for unit, size in (("ns", 1), ("µs", 10**3), ("ms", 10**6)):
        if nanoseconds < size * 1000 and nanoseconds:
            return f"{_decimal(nanoseconds, size)}{unit}"
    minutes, rest = divmod(nanoseconds, 60 * 10**9)
    text = f"{_decimal(rest, 10**9)}s"
    if minutes:
        text = f"{minutes % 60}m{text}"
    if minutes >= 60:
        text = f"{minutes // 60}h{text}"
    return text


def _decimal(value: int, size: int) -> str:
    whole, fraction = divmod(value, size)
    digits = f"{fraction:0{len(str(size)) - 1}d}".rstrip("0") if size > 1 else ""
    return f"{whole}.{digits}" if digits else str(whole)
