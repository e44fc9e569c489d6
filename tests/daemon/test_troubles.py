"""What of a worker's beats is news: reads that failed, a store that goes away and comes back."""

from typing import Any

import pytest

from streamd.daemon.api.models import StoreAway
from streamd.daemon.troubles import TOLD_AGAIN_S, FailedReads, Failures, store_away

AFTER_S = 10.0
NOW_S = 1000.0
KNOWN = StoreAway(since_s=900.0, reason="transient: no route")


def gone(reads: int) -> dict[str, dict[str, Any]]:
    return {"gone": {"reads": reads, "message": f"read {reads}", "exit_code": 3}}


def test_reads_that_fail_are_told_of_once_a_minute_and_none_is_forgotten() -> None:
    failures = Failures()
    assert failures.news({}, NOW_S) == []
    assert failures.news(gone(2), NOW_S) == [FailedReads("gone", 2, "read 2", 3)]
    assert failures.news(gone(2), NOW_S + 1) == failures.news(gone(9), NOW_S + TOLD_AGAIN_S - 1) == []
    assert failures.news(gone(9), NOW_S + TOLD_AGAIN_S) == [FailedReads("gone", 7, "read 9", 3)]
    assert failures.news(gone(9), NOW_S + 9 * TOLD_AGAIN_S) == []


def test_each_kind_of_failure_is_told_of_by_itself() -> None:
    failures = Failures()
    assert failures.news(gone(1), NOW_S)
    both = gone(5) | {"operator": {"reads": 1, "message": "m", "exit_code": 1}}
    assert failures.news(both, NOW_S + 1) == [FailedReads("operator", 1, "m", 1)]


def test_the_next_worker_counts_anew_and_a_clock_that_is_set_back_silences_nothing() -> None:
    failures = Failures()
    failures.news(gone(5), NOW_S)
    failures.worker_is_gone()
    assert failures.news(gone(1), NOW_S + 1) == []
    assert failures.news(gone(1), NOW_S + TOLD_AGAIN_S) == [FailedReads("gone", 1, "read 1", 3)]
    assert failures.news(gone(2), NOW_S - 5) == [FailedReads("gone", 1, "read 2", 3)]


@pytest.mark.parametrize(
    ("before", "status", "worker_age_s", "expected"),
    [
        (None, {}, 100.0, None),  # a warm image's worker
        (None, {"store_wait_s": 0.0}, 100.0, None),
        (None, {"store_wait_s": 9.9}, 100.0, None),
        (None, {"store_wait_s": 10.0}, 100.0, StoreAway(since_s=990.0, reason="no answer")),
        (None, {"store_wait_s": 20.0, "last_failure": "x"}, 100.0, StoreAway(since_s=980.0, reason="x")),
        (KNOWN, {"store_wait_s": 99.0, "last_failure": "x"}, 200.0, StoreAway(since_s=900.0, reason="x")),
        (KNOWN, {"store_wait_s": 0.0, "origin_bytes": 7}, 200.0, None),
        (KNOWN, {"store_wait_s": 0.0, "origin_bytes": 0}, 200.0, None),  # nothing is wanted any more
        # The next worker: it has just begun, has asked and got nothing, has got something.
        (KNOWN, {"store_wait_s": 0.0, "origin_bytes": 0}, 1.0, KNOWN),
        (KNOWN, {"store_wait_s": 0.5, "origin_bytes": 0}, 1.0, KNOWN),
        (KNOWN, {"store_wait_s": 0.0, "origin_bytes": 7}, 1.0, None),
    ],
)
def test_a_store_is_away_from_when_nothing_came_for_long_until_something_comes(
    before: StoreAway | None, status: dict[str, Any], worker_age_s: float, expected: StoreAway | None
) -> None:
    assert store_away(before, status, now_s=NOW_S, worker_age_s=worker_age_s, after_s=AFTER_S) == expected
