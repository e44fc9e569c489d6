"""A recorded restore is asked for again as it was: the same bytes, in the same order, and what comes is compared."""

import os
from pathlib import Path

import pytest

from bench.replay import Read, recorded_reads, replay
from streamd.serve.order import Want
from streamd.serve.record_file import decode

RECORDING = Path(__file__).parents[1] / "serve" / "recordings" / "free-most.record"
PAGE = 4096


@pytest.fixture
def pages(tmp_path: Path) -> Path:
    path = tmp_path / "pages.img"
    path.write_bytes(b"".join(index.to_bytes(4, "little") * (PAGE // 4) for index in range(256)))
    return path


def test_the_reads_of_a_record_are_those_of_pages_img_in_their_order() -> None:
    reads = recorded_reads(decode(RECORDING.read_bytes()))
    assert len(reads) == 1142
    assert sum(read.size for read in reads) == 290832384  # what gVisor said that it loaded
    assert reads[0].at_s == 0
    assert [read.at_s for read in reads] == sorted(read.at_s for read in reads)


def test_every_read_is_made_once_and_counted_by_its_recorded_class(pages: Path) -> None:
    reads = [Read(0.0, 3 * PAGE, PAGE, Want.FAULT), Read(0.0, 100, 5000, Want.STREAM), Read(0.0, 0, PAGE, Want.STREAM)]
    outcome = replay(pages, reads, slots=2, expected=pages)
    assert outcome.read_bytes == 2 * PAGE + 5000
    assert {name: waited.reads for name, waited in outcome.classes.items()} == {"fault": 1, "stream": 2}
    assert (outcome.wrong, outcome.short, outcome.errors) == (0, 0, {})


def test_wrong_bytes_short_reads_and_errors_are_told(pages: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(os.urandom(256 * PAGE))
    reads = [Read(0.0, 0, PAGE, Want.STREAM), Read(0.0, 255 * PAGE, 2 * PAGE, Want.STREAM)]
    outcome = replay(pages, reads, expected=other)
    assert (outcome.wrong, outcome.short, outcome.errors) == (2, 1, {})
    assert replay(tmp_path / "pages.img", [Read(0.0, -PAGE, PAGE, Want.STREAM)]).errors == {"EINVAL": 1}


def test_paced_reads_come_no_sooner_than_they_did(pages: Path) -> None:
    outcome = replay(pages, [Read(0.0, 0, PAGE, Want.STREAM), Read(0.2, 0, PAGE, Want.STREAM)], slots=1, paced=True)
    assert outcome.took_s >= 0.2
