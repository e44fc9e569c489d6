"""Reads of recorded restores are told apart as hindsight tells them apart.

In hindsight no rule about holes is needed: runsc submits stream reads in ascending order and has 128 under way, so at
most 127 × 256 KiB below a stream read *are asked for* after it. What has more coming below it jumped the queue. The
classifier has to know that at the time, when memory that is yet to come and memory that was freed look alike.
"""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from streamd.serve.classify import MISSING_BYTES_MAX, READ_BYTES, RUN_READS, SLOTS, ReadClassifier
from streamd.serve.order import Want
from streamd.serve.record import Rows
from streamd.serve.record_file import decode

RECORDINGS = Path(__file__).with_name("recordings")
# File → the bytes that gVisor says threads waited for (recordings/README.md).
AWAITED_BYTES = {
    "region": 103370752,
    "walk": 202612736,
    "busy": 251908096,
    "scattered": 76025856,
    "free-middle": 2727936,
    "free-most": 31744000,
}
NOTHING_FREED = ("region", "walk", "scattered")


def _reads(name: str) -> Rows:
    return decode((RECORDINGS / f"{name}.record").read_bytes()).reads_of("pages.img")


def _jumped(reads: Rows) -> NDArray[np.bool_]:
    """Say of each read whether more than a window's bytes below it are asked for only after it."""
    start, size = reads["start"].astype(np.int64), reads["size"].astype(np.int64)
    below_later = [int(size[i + 1 :][start[i + 1 :] < start[i]].sum()) for i in range(len(start))]
    return np.array(below_later) > MISSING_BYTES_MAX


def _called_faults(reads: Rows) -> NDArray[np.bool_]:
    classifier = ReadClassifier()
    pairs = zip(reads["start"].tolist(), reads["size"].tolist(), strict=True)
    return np.array([classifier.classify(start, start + size) == Want.FAULT for start, size in pairs])


def test_every_recording_is_looked_at() -> None:
    assert {path.stem for path in RECORDINGS.glob("*.record")} == set(AWAITED_BYTES)


@pytest.mark.parametrize("name", NOTHING_FREED)
def test_without_freed_memory_every_read_is_what_hindsight_says(name: str) -> None:
    reads = _reads(name)
    assert np.array_equal(_called_faults(reads), _jumped(reads))


@pytest.mark.parametrize("name", AWAITED_BYTES)
def test_no_fault_is_taken_for_the_stream(name: str) -> None:
    reads = _reads(name)
    assert not np.any(_jumped(reads) & ~_called_faults(reads))


@pytest.mark.parametrize("name", sorted(set(AWAITED_BYTES) - set(NOTHING_FREED)))
def test_above_freed_memory_the_stream_is_found_again_within_a_run(name: str) -> None:
    reads = _reads(name)
    wrong = np.flatnonzero(_called_faults(reads) & ~_jumped(reads))
    assert len(wrong) <= RUN_READS + SLOTS


@pytest.mark.parametrize("name", AWAITED_BYTES)
def test_hindsight_finds_no_more_faults_than_gvisor_waited_for(name: str) -> None:
    reads = _reads(name)
    # Less is fine: faults near the stream come with it, before hindsight can tell.
    assert 0 < reads["size"][_jumped(reads)].sum() <= AWAITED_BYTES[name]


@pytest.mark.parametrize("name", ["region", "busy"])
def test_whole_windows_of_128_reads_are_among_the_recorded_faults(name: str) -> None:
    reads = _reads(name)
    starts = np.sort(reads["start"][_jumped(reads)].astype(np.int64))
    neighbours = np.split(starts, np.flatnonzero(np.diff(starts) != READ_BYTES) + 1)
    assert any(len(run) >= SLOTS for run in neighbours)
    assert np.mean(reads["start"] % READ_BYTES != 0) > 0.5  # most reads of runsc are not aligned
