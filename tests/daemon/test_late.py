"""What comes after its caller has given up is let go of, and never lost."""

import threading

import pytest
import trio

from streamd.daemon.caching import Late


async def test_a_result_that_comes_late_is_let_go_of() -> None:
    may_end, let_go = threading.Event(), list[int]()
    gone = threading.Event()

    def forget(value: int) -> None:
        let_go.append(value)
        gone.set()

    def hang() -> int:
        may_end.wait()
        return 7

    with trio.move_on_after(0.01) as scope:
        await Late[int](forget).call(hang)
    assert scope.cancelled_caught
    assert let_go == []
    may_end.set()
    assert gone.wait(10)
    assert let_go == [7]


async def test_a_result_in_time_is_the_callers() -> None:
    let_go = list[int]()
    assert await Late[int](let_go.append).call(lambda: 7) == 7
    assert let_go == []


async def test_what_the_call_raises_is_raised() -> None:
    def fail() -> int:
        raise OSError("of the disk")

    with pytest.raises(OSError, match="of the disk"):
        await Late[int](lambda _: None).call(fail)
