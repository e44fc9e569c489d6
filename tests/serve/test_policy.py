"""Every kind of failure gets what the table says, until the time that it says."""

import pytest

from streamd.config import PolicyConfig
from streamd.errors import StoreErrorKind
from streamd.serve.policy import COURSES, Course, Fail, Retry, Trouble

POLICY = PolicyConfig(credentials_wait_s=300, hold_s=60)


def test_every_kind_has_a_course() -> None:
    assert set(COURSES) == set(StoreErrorKind)


def life(kind: StoreErrorKind, *, backoff_s: float = 5.0, until_s: float = 100_000.0) -> tuple[int, float | None]:
    """Let one chunk fail in that way until it is given up: (failures, seconds until then or None)."""
    trouble, now_s = Trouble(), 1000.0
    failures = 0
    while now_s < until_s:
        failures += 1
        step = trouble.after(kind, now_s=now_s, backoff_s=backoff_s, policy=POLICY)
        if isinstance(step, Fail):
            return failures, now_s - 1000.0
        assert step.delay_s >= 0
        now_s += step.delay_s
    return failures, None


@pytest.mark.parametrize("kind", StoreErrorKind, ids=str)
def test_reads_fail_when_the_table_says_so(kind: StoreErrorKind) -> None:
    failures, after_s = life(kind)
    match COURSES[kind]:
        case Course.WAIT_FOREVER:
            assert after_s is None
        case Course.WAIT_BOUNDED:
            assert after_s == POLICY.credentials_wait_s
        case Course.ASK_AGAIN_AND_HOLD:
            assert (failures, after_s) == (3, POLICY.hold_s)
        case Course.REFETCH_ONCE:
            assert (failures, after_s) == (2, 0.0)


def test_a_failure_of_another_kind_does_not_shorten_the_wait() -> None:
    trouble = Trouble()
    for now_s in range(0, 59, 7):
        assert isinstance(trouble.after(StoreErrorKind.TRANSIENT, now_s=now_s, backoff_s=1, policy=POLICY), Retry)
    assert trouble.after(StoreErrorKind.GONE, now_s=59, backoff_s=1, policy=POLICY) == Retry(0.0)
    assert trouble.after(StoreErrorKind.GONE, now_s=59, backoff_s=1, policy=POLICY) == Retry(60.0)


def test_a_first_refusal_is_asked_again_at_once() -> None:
    for kind, course in COURSES.items():
        if course in (Course.ASK_AGAIN_AND_HOLD, Course.REFETCH_ONCE):
            assert Trouble().after(kind, now_s=0, backoff_s=9, policy=POLICY) == Retry(0.0)
