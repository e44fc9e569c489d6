"""The learned order never holds up a mount: its end least of all."""

import threading
from typing import Any, cast

import trio
import trio.testing

from streamd.daemon.learner import Learner
from streamd.snapshot.trace import Sample
from streamd.store.traces import LearnedOrder


class Hanging:
    """A learned order whose store never answers."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.may_end = threading.Event()

    def save(self, _: Any) -> None:
        self.began.set()
        self.may_end.wait()


def test_an_unmount_waits_for_a_store_that_hangs_only_so_long() -> None:
    order = Hanging()

    async def test() -> None:
        learner = Learner(cast(LearnedOrder, order))
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(learner.run)
                for _ in range(3):
                    learner.add(Sample(waited=((0, 4096),), passed=()))
                await trio.to_thread.run_sync(order.began.wait)
                nursery.cancel_scope.cancel()

    try:
        trio.run(test, clock=trio.testing.MockClock(rate=100))
    finally:
        order.may_end.set()
