"""The learned order of a mount: what was learned before is fetched first, what this restore teaches is added.

An improvement, never a condition: the store's answers are waited for within bounds, and a failure is one line in the
log (`store/traces.py`).
"""

import structlog
import trio

from streamd.serve.image import ServedImage
from streamd.snapshot.trace import Sample, hot_ranges
from streamd.store.traces import LearnedOrder

log = structlog.get_logger()

# The trace is small; a store that takes longer is slow for everything, and the mount needn't wait for this.
_LOAD_TIMEOUT_S = 5.0
# How long adding one sample may take, and what an unmount waits for, so that the last one is not lost.
_SAVE_S = 5.0
_LAST_SAVE_S = 3.0
# Samples that wait to be added. Each is of one restore: more come only while the store hangs, and the first are enough.
_SAMPLES_MAX = 16


class Learner:
    """Loads and adds to one snapshot's learned order; state of the Trio thread."""

    def __init__(self, order: LearnedOrder) -> None:
        self._order = order
        self._add, self._samples = trio.open_memory_channel[Sample](_SAMPLES_MAX)

    async def prepare(self, image: ServedImage) -> None:
        """Have the image fetch what was learned before."""
        with trio.move_on_after(_LOAD_TIMEOUT_S):
            trace = await trio.to_thread.run_sync(self._order.load, abandon_on_cancel=True)
            if trace is not None:
                ranges = hot_ranges(trace)
                log.info("learned order", restores=trace.samples, hot_bytes=sum(end - start for start, end in ranges))
                image.want_hot(ranges)

    def add(self, sample: Sample) -> None:
        """Have a restore's sample added, soon."""
        try:
            self._add.send_nowait(sample)
        except trio.WouldBlock:
            log.info("a restore's sample is lost: the store is too slow to take them")

    async def run(self) -> None:
        """Add samples until cancelled; then those that wait, within a bound."""
        try:
            async for sample in self._samples:
                # An unmount lets it end, within a bound; the store refuses a rival that is later, by its generation.
                with trio.move_on_after(_SAVE_S, shield=True):
                    await self._save(sample)
        finally:
            with trio.move_on_after(_LAST_SAVE_S, shield=True):
                while True:
                    try:
                        sample = self._samples.receive_nowait()
                    except trio.WouldBlock:
                        break
                    await self._save(sample)

    async def _save(self, sample: Sample) -> None:
        trace = await trio.to_thread.run_sync(self._order.save, sample, abandon_on_cancel=True)
        if trace is not None:
            log.info("learned", restores=trace.samples, ranges=len(trace.ranges))
