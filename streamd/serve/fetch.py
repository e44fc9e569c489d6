"""One GET, from the first byte to the last frame; runs in a thread and shares nothing but bytes.

Every frame is verified and handed over as soon as its own bytes are in, in order: a sandbox that waits for 128 reads
gets them one by one instead of all at the end. A body that is cut goes on from its last good byte, at the same
generation, as long as each try brings something; a try that brings nothing ends the fetch, and the policy decides.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from streamd.errors import StoreError, StoreErrorKind
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


@dataclass(slots=True, eq=False)
class Progress:
    """How far a GET is; written by its thread, read by the scheduler (single stores of ints: no lock).

    `received` is the next byte of the pack that is still to come, `origin_bytes` all bytes that the store sent,
    `first_byte_s` and `took_s` are seconds. Setting `stop` ends the thread at the next piece of the body.
    """

    received: int
    origin_bytes: int = 0
    requests: int = 0
    first_byte_s: float = 0.0
    took_s: float = 0.0
    stop: bool = False


class _Frames:
    """Cuts a body into the frames of a plan."""

    def __init__(self, plan: GetPlan, deliver: Callable[[FrameSpan, Buffer], None]) -> None:
        self._rest = iter(plan.frames)
        self._frame: FrameSpan | None = next(self._rest)
        self._partial = bytearray()
        self._deliver = deliver

    def feed(self, piece: Buffer) -> None:
        view = memoryview(piece)
        while len(view) and self._frame is not None:
            size = self._frame.end - self._frame.start
            taken = view[: size - len(self._partial)]
            view = view[len(taken) :]
            if len(taken) == size:
                self._finish(self._frame, taken)
                continue
            self._partial += taken
            if len(self._partial) == size:
                self._finish(self._frame, self._partial)
                self._partial = bytearray()

    def _finish(self, frame: FrameSpan, data: Buffer) -> None:
        chunk = decoder().decode(data, codec=frame.codec, length=frame.length, digest=frame.digest)
        self._frame = next(self._rest, None)
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
            useful = piece[: plan.end - progress.received]
            progress.received += len(useful)
            frames.feed(useful)
            if progress.stop:
                return
    finally:
        close = getattr(body, "close", None)
        if close is not None:
            close()
