"""Blocking calls that can be ended from outside, run from Trio."""

from collections.abc import Callable
from typing import TypeVar

import trio

T = TypeVar("T")


async def run_endable(
    call: Callable[[], T], end: Callable[[], None], *, limiter: trio.CapacityLimiter | None = None
) -> T:
    """Run `call` in a thread and wait for it; when we are cancelled, `end` makes it return, and it is waited for still.

    So nothing goes on behind a cancelled caller, which a thread that is merely left alone would do.
    """
    error: Exception | None = None
    has_returned = False

    async def until_cancelled() -> None:
        try:
            await trio.sleep_forever()
        finally:
            if not has_returned:
                end()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(until_cancelled)
        try:
            result = await trio.to_thread.run_sync(call, limiter=limiter)
        except Exception as caught:  # raised below, as it is: a nursery would wrap it
            error = caught
        has_returned = True
        nursery.cancel_scope.cancel()
    if error is not None:
        raise error
    return result
