"""One GET: resumed where it was cut, and not hammered when it brings nothing."""

from typing import Any

from bench.faults import Cut, Fault, FaultyStore
from streamd.serve.fetch import fetch
from streamd.serve.gets import Progress
from streamd.serve.plan import FrameSpan, Layout
from streamd.store.port import Buffer


def test_a_body_that_is_always_cut_is_resumed_ever_more_slowly_and_comes_whole(saved: Any) -> None:
    layout = Layout(saved.pinned.manifest.table)
    chunk = next(c for c in range(60, len(layout)) if not layout.is_zero(c))
    plan = layout.plan(chunk, wanted=lambda _: True, get_bytes=64 << 10, raw_bytes=1 << 20)
    store: FaultyStore = saved.faulty()
    store.add(Fault(Cut(at_byte=1000), operation="read", times=None))
    progress, pauses = Progress(received=plan.start), list[float]()
    got: dict[int, Buffer] = {}

    def deliver(frame: FrameSpan, data: Buffer) -> None:
        got[frame.chunk] = data

    fetch(store, saved.pinned.packs[plan.pack], plan, progress, deliver, pauses.append)
    assert list(got) == [frame.chunk for frame in plan.frames]
    assert progress.requests == -(-(plan.end - plan.start) // 1000)
    assert len(pauses) == progress.requests - 1
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (0.05, 2.0)
