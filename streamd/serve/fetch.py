"""One GET, from the first byte to the last frame; runs in a thread and shares nothing but bytes.

Every frame is verified and handed over as soon as its own bytes are in, in order: a sandbox that waits for 128 reads
gets them one by one instead of all at the end. A body that is cut goes on from its last good byte, at the same
generation, as long as each try brings something; a try that brings nothing ends the fetch, and the policy decides.
"""

import threading
import time
from collections.abc import Callable

from streamd.errors import StoreError, StoreErrorKind
from streamd.serve.gets import Progress
from streamd.serve.plan import FrameSpan, GetPlan
from streamd.snapshot.frames import Decoder, FrameCorrupt
from streamd.store.port import Buffer, ObjectInfo, Store

# A try that brought less than this was hardly worth its request; the next one waits, so that a store (or something on
# the way) that cuts every body early isn't asked hundreds of times a second.
_WORTHWHILE_BYTES = 64 << 10
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0
_RESUMABLE = (StoreErrorKind.TRANSIENT, StoreErrorKind.THROTTLED)
_local = threading.local()


def decoder() -> Decoder:
    """Give this thread's decoder (a zstd context is not shared between threads)."""
    found: Decoder | None = getattr(_local, "decoder", None)
    if found is None:
        found = _local.decoder = Decoder()
    return found


class _Frames:
    """Cuts a body into the frames of a plan. A frame that came in several pieces is put together once, when it ends.

    The pieces are ours to keep: one that is a whole frame is not copied.
    """

    def __init__(self, plan: GetPlan, deliver: Callable[[FrameSpan, Buffer], None]) -> None:
        self._rest = iter(plan.frames)
        self._frame: FrameSpan | None = next(self._rest)
        self._pieces: list[memoryview] = []
        self._missing = self._frame.end - self._frame.start
        self._deliver = deliver

    def feed(self, piece: memoryview) -> None:
        while len(piece) and self._frame is not None:
            taken = piece[: self._missing]
            piece = piece[len(taken) :]
            self._missing -= len(taken)
            self._pieces.append(taken)
            if not self._missing:
                self._finish(self._frame)

    def _finish(self, frame: FrameSpan) -> None:
        first = self._pieces[0]
        # A part of a larger piece would keep all of it in memory.
        is_whole = len(self._pieces) == 1 and len(first) == memoryview(first.obj).nbytes
        data = first if is_whole else b"".join(self._pieces)
        self._pieces = []
        chunk = decoder().decode(data, codec=frame.codec, length=frame.length, digest=frame.digest)
        self._frame = next(self._rest, None)
        if self._frame is not None:
            self._missing = self._frame.end - self._frame.start
        self._deliver(frame, chunk)


def fetch(
    store: Store,
    pinned: ObjectInfo,
    plan: GetPlan,
    progress: Progress,
    deliver: Callable[[FrameSpan, Buffer], None],
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Fetch a plan's bytes and deliver its verified chunks, in order, from this thread.

    `pause` waits so many seconds between two tries of which the first brought next to nothing.

    Raises: `StoreError`, of kind CORRUPT when a frame is not what its checksum says; what was delivered before stays.
    """
    frames = _Frames(plan, deliver)
    pause_s = _FIRST_PAUSE_S
    began_s = time.monotonic()
    while progress.received < plan.end and not progress.stop:
        before = progress.received
        progress.requests += 1
        try:
            _consume(store, pinned, plan, progress, frames, began_s)
        except StoreError as error:
            if error.store_kind not in _RESUMABLE or progress.received == before:
                raise
        except FrameCorrupt as error:
            raise StoreError(StoreErrorKind.CORRUPT, pinned.key, str(error)) from error
        else:
            if progress.received == before and not progress.stop:
                raise StoreError(StoreErrorKind.TRANSIENT, pinned.key, "the body was empty")
        if progress.received < plan.end and progress.received - before < _WORTHWHILE_BYTES and not progress.stop:
            pause(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    progress.took_s = time.monotonic() - began_s


def _consume(
    store: Store, pinned: ObjectInfo, plan: GetPlan, progress: Progress, frames: _Frames, began_s: float
) -> None:
    body = store.read(pinned.key, generation=pinned.generation, start=progress.received, end=plan.end)
    try:
        for piece in body:
            if not progress.first_byte_s:
                progress.first_byte_s = time.monotonic() - began_s
            progress.origin_bytes += len(piece)
            useful = memoryview(piece)[: plan.end - progress.received]
            progress.received += len(useful)
            frames.feed(useful)
            if progress.stop:
                return
    finally:
        close = getattr(body, "close", None)
        if close is not None:
            close()
