"""Threads for work that releases the GIL or waits for the store.

`concurrent.futures` gives the futures but not the threads: its pools are joined when the interpreter ends, so that one
upload that hangs would hold up a Ctrl-C. These threads are daemons; `stop` waits a bounded time and then leaves them.
"""

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Workers:
    """`count` daemon threads that take jobs in the order in which they were submitted.

    The queue has no bound of its own: the submitter holds the futures and bounds their number.
    """

    def __init__(self, name: str, count: int) -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{index}", daemon=True) for index in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        """Queue a call. What it raises comes out of the future."""
        future: Future[T] = Future()
        self._jobs.put((future, lambda: function(*args, **kwargs)))
        return future

    def stop(self, *, timeout_s: float) -> bool:
        """Drop what hasn't begun and wait for what has. Tell whether every thread ended within the time."""
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                break
            if job is not None:
                job[0].cancel()
        for _ in self._threads:
            self._jobs.put(None)
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, call = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
            del job, future, call  # they hold buffers
