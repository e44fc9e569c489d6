"""Since when the store gives nothing of what it is asked for."""

import pytest

from streamd.serve.store_wait import StoreWait

# What is seen at each second: bytes that have come so far, whether the store is asked; and the wait then.
Look = tuple[int, bool, float]

COURSES: dict[str, list[Look]] = {
    "it gives": [(1, True, 0), (2, True, 0), (3, True, 0)],
    "it never answers": [(0, True, 0), (0, True, 1), (0, True, 2)],
    "it goes and comes back": [(5, True, 0), (5, True, 0), (5, True, 1), (6, True, 0), (6, True, 0)],
    "nothing is asked of it": [(5, True, 0), (5, False, 0), (5, False, 0)],
    "nobody wants it any more": [(0, True, 0), (0, True, 1), (0, False, 0), (0, True, 0), (0, True, 1)],
}


@pytest.mark.parametrize("course", COURSES.values(), ids=COURSES)
def test_a_wait_lasts_while_the_store_is_asked_and_nothing_comes(course: list[Look]) -> None:
    wait = StoreWait()
    for second, (received_bytes, is_asked, expected_s) in enumerate(course):
        wait.look(100.0 + second, received_bytes=received_bytes, is_asked=is_asked)
        assert wait.seconds(100.0 + second) == expected_s, second
