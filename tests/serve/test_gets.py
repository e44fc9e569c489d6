"""The one GET that stands still is tried again; a store that is slow as a whole is not asked twice for everything."""

from streamd.serve.gets import ALONE_STILL_S, SECOND_TRIES_MAX, STILL_S, Get, Gets, Progress
from streamd.serve.order import Want
from streamd.serve.plan import FrameSpan, GetPlan

MIB = 1 << 20


def a_get(want: Want = Want.AHEAD, *, is_second: bool = False) -> Get:
    plan = GetPlan(0, 0, MIB, (FrameSpan(0, 0, MIB, 1, MIB, b""),))
    return Get(plan, Progress(received=0), want, True, began_s=0.0, moved_s=0.0, moved_to=0, is_second=is_second)


def under_way(*gets: Get) -> Gets:
    found = Gets()
    for get in gets:
        found.add(get)
    return found


def still(gets: Gets, now_s: float, *, bytes_per_s: float = 0.0) -> list[Get]:
    return gets.standing_still(now_s, bytes_per_s=bytes_per_s, round_trip_s=0.01)


def test_one_that_stands_still_while_others_move_is_found() -> None:
    slow, quick = a_get(), a_get()
    gets = under_way(slow, quick)
    for step in range(1, 20):
        quick.progress.received += 1000
        found = still(gets, step * 0.1)
        assert found == ([slow] if step * 0.1 > STILL_S else [])


def test_one_that_trickles_counts_as_standing_still() -> None:
    slow, quick = a_get(), a_get()
    gets = under_way(slow, quick)
    for step in range(1, 11):
        slow.progress.received += 10
        quick.progress.received += 100_000
        found = still(gets, step * 0.1, bytes_per_s=1e6)
    assert found == [slow]


def test_when_nothing_moves_a_second_try_comes_late() -> None:
    gets = under_way(a_get(Want.FAULT), a_get())
    assert still(gets, ALONE_STILL_S) == []
    assert len(still(gets, ALONE_STILL_S + STILL_S + 0.1)) == 2


def test_second_tries_are_bounded_and_threads_that_are_stopped_come_first() -> None:
    fault = a_get(Want.FAULT)
    slow = [*(a_get() for _ in range(SECOND_TRIES_MAX + 3)), fault]
    gets = under_way(*slow)
    found = still(gets, 60.0)
    assert found[0] is fault
    assert len(found) == SECOND_TRIES_MAX
    for get in found:
        get.tried_twice = True
    assert still(gets, 61.0) == []


def test_a_second_try_gets_no_third() -> None:
    assert still(under_way(a_get(is_second=True)), 60.0) == []


def test_what_is_asked_for_again_no_longer_counts_as_outstanding() -> None:
    get = a_get()
    gets = under_way(get)
    assert (gets.outstanding_bytes, gets.background) == (MIB, 1)
    get.tried_twice = True
    assert (gets.outstanding_bytes, gets.background) == (0, 0)
