"""Pictures and pages are well formed, refer to nothing outside, and stay small, whatever the record."""

import re
import xml.etree.ElementTree as ElementTree  # of what was written here
from pathlib import Path

import pytest

from streamd.report.page import page
from streamd.report.pictures import overview
from streamd.report.svg import Scale
from streamd.serve.order import Want
from streamd.serve.record import Record, RecordedFile, Recorder, RecordHead, Tier
from streamd.serve.record_file import decode

RECORDINGS = Path(__file__).parents[1] / "serve" / "recordings"
SVG = "{http://www.w3.org/2000/svg}"
MARK = re.compile(r"[ML](-?[\d.]+) (-?[\d.]+)(?:h([\d.]+))?")
OUTSIDE = re.compile(r"""https?://(?!www\.w3\.org/2000/svg")|url\(|src=|href=|@import|<script""")


def recording(name: str) -> Record:
    return decode((RECORDINGS / f"{name}.record").read_bytes())


def made(*, name: str = "web-1", reads: int = 0) -> Record:
    """A record of so many stream reads that wait for a second each."""
    size = max(reads, 1) * (256 << 10)
    files = (RecordedFile("pages.img", size, 0),)
    head = RecordHead(name, "00" * 32, "file:///s", "/mnt", 1, 0.0, 1 << 18, size, files, {"prefetch": "<all>"})
    subject = Recorder(head, origin_s=0.0)
    subject.opened(1, "pages.img", 0.0)
    for index in range(reads):
        want = Want.FAULT if index % 7 == 0 else Want.STREAM
        start = index * (256 << 10)
        subject.read(1, want, Tier.STORE, start=start, size=256 << 10, began_s=index / 1000, wait_s=1.0)
    subject.event(1.0, "read-failed", "<b>&")
    return subject.record(reads / 1000 + 1).ordered()


@pytest.mark.parametrize("name", sorted(path.stem for path in RECORDINGS.glob("*.record")))
def test_the_picture_of_a_restore_is_an_svg_document_of_its_own(name: str) -> None:
    picture = overview(recording(name))
    root = ElementTree.fromstring(picture)
    assert root.tag == f"{SVG}svg"
    assert not OUTSIDE.search(picture)
    assert len(picture) < 100_000
    texts = {element.text for element in root.iter(f"{SVG}text")}
    assert {"fault", "stream", "Restore of rec"} <= texts


@pytest.mark.parametrize("until_s", [None, 2.0])
def test_every_mark_lies_within_the_picture(until_s: float | None) -> None:
    root = ElementTree.fromstring(overview(recording("busy"), until_s=until_s))
    marks = [mark for path in root.iter(f"{SVG}path") for mark in MARK.findall(path.get("d", ""))]
    assert len(marks) > 500
    for x, y, length in marks:
        assert 0 <= float(x) <= float(x) + float(length or 0) <= 940
        assert 0 <= float(y) <= 760


def test_the_same_record_gives_the_same_picture() -> None:
    assert overview(recording("walk")) == overview(recording("walk"))


def test_a_record_of_nothing_has_a_picture_too() -> None:
    ElementTree.fromstring(overview(made()))
    assert "pages.img was not read" in page(made())


def test_the_time_axis_ends_where_it_is_told_to() -> None:
    wide, narrow = (overview(recording("busy"), until_s=until_s) for until_s in (100.0, 2.0))
    assert ">100 s<" in wide
    assert ">0.5 s<" in narrow
    assert ">10 s<" not in narrow.partition("Reads by how long")[0]


def test_a_picture_of_a_huge_load_is_not_huge() -> None:
    assert len(overview(made(reads=100_000))) < 300_000


def test_a_page_shows_texts_of_a_record_as_text() -> None:
    text = page(made(name="<script>alert(1)</script>", reads=3))
    assert not OUTSIDE.search(text)
    assert "&lt;script&gt;" in text
    assert "&lt;b&gt;&amp;" in text
    assert "&lt;all&gt;" in text


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 10, [0, 2.5, 5, 7.5, 10]), (0, 0.37, [0, 0.1, 0.2, 0.3]), (0, 1200, [0, 500, 1000])],
)
def test_ticks_are_round_values(low: float, high: float, expected: list[float]) -> None:
    assert Scale(low, high, 0, 100).ticks(4) == pytest.approx(expected)


def test_ticks_of_a_logarithmic_scale_are_powers_of_ten() -> None:
    assert Scale(10, 1e4, 0, 100, is_log=True).ticks(4) == pytest.approx([10, 100, 1000, 10000])
