"""What the supervisor has noted is there for the next one, whole, in whichever moment it ends."""

import os
import signal
import time
from collections.abc import Iterator

import pytest
import structlog

from streamd.daemon.api.idempotency import RequestIdReused
from streamd.daemon.api.limits import Limits
from streamd.daemon.api.models import ImageRequest
from streamd.daemon.memfds import BadMemfd, memfd_of
from streamd.daemon.notes import PLACE_BYTES, NodeMemory, Noted, Notes

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")

ONE, TWO = f"{1:032x}", f"{2:032x}"
KEPT = Limits().request_ids


def request(request_id: str, snapshot_url: str = "gs://bucket/one") -> ImageRequest:
    return ImageRequest(snapshot_url=snapshot_url, request_id=request_id)


@pytest.fixture
def notes() -> Iterator[Notes]:
    """Begin some."""
    made = Notes.make()
    yield made
    os.close(made.fd)


def remembering(notes: Notes | None, *images: str) -> NodeMemory:
    """Start as a supervisor that has these images does."""
    memory = NodeMemory(kept_requests=KEPT)
    memory.recall(notes, images)
    return memory


def test_a_drain_and_the_requests_of_images_that_came_back_are_known_to_the_next_supervisor(notes: Notes) -> None:
    first = remembering(notes)
    first.requests.note(request("a"), ONE)
    first.requests.note(request("b"), TWO)
    first.drain(is_on=True)
    second = remembering(Notes(notes.fd), ONE)
    assert second.is_draining
    assert second.requests.image_of(request("a")) == ONE
    with pytest.raises(RequestIdReused):
        second.requests.image_of(request("a", "gs://bucket/other"))
    assert second.requests.image_of(request("b")) is None  # its image is gone, or never was: it is made good
    second.drain(is_on=False)
    second.requests.note(request("c"), ONE)
    third = remembering(Notes(notes.fd), ONE, TWO)
    assert not third.is_draining
    assert list(third.requests.known) == ["a", "c"]


def test_without_a_place_for_notes_nothing_is_kept_and_all_works() -> None:
    memory = remembering(None)
    memory.drain(is_on=True)
    memory.requests.note(request("a"), ONE)
    assert memory.is_draining
    assert memory.requests.image_of(request("a")) == ONE


def test_as_many_request_ids_as_are_remembered_have_room(notes: Notes) -> None:
    memory = remembering(notes)
    memory.requests.known.update({f"{n:064d}": (bytes(16), ONE) for n in range(KEPT)})
    memory.requests.note(request("x" * 64), ONE)
    again = remembering(Notes(notes.fd), ONE)
    assert len(again.requests.known) == KEPT
    assert again.requests.image_of(request("x" * 64)) == ONE


def test_what_was_noted_is_whole_in_whichever_moment_its_writer_is_killed(notes: Notes) -> None:
    seen = set()
    for round_number in range(20):
        pid = os.fork()
        if not pid:
            writing = Notes(notes.fd)
            for number in range(1 << 30):
                requests = {f"{n}": (bytes(16), ONE) for n in range(number % 7 * 500)}
                writing.write(Noted(request_key=str(len(requests)).encode(), requests=requests))
        time.sleep(0.005 + round_number / 1000)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        noted = Notes(notes.fd).read()
        assert noted.request_key in (b"", str(len(noted.requests)).encode())
        seen.add(noted.request_key)
    assert len(seen) > 1


def test_a_write_that_was_not_finished_counts_for_nothing(notes: Notes) -> None:
    notes.write(Noted(is_draining=True))
    for place in (0, 1):  # the one that doesn't count is spoiled
        fd = os.dup(notes.fd)
        if os.pread(fd, 1, 0) != bytes([place]):
            os.pwrite(fd, b"x" * 100, 4096 + place * PLACE_BYTES)
        os.close(fd)
    assert Notes(notes.fd).read().is_draining


@pytest.mark.parametrize("head", [b"\2\0\0\0\1\0\0\0", b"\0\0\0\0\xff\xff\xff\xff", b"\0\0\0\0\4\0\0\0"])
def test_notes_that_make_no_sense_are_left_out_and_written_anew(notes: Notes, head: bytes) -> None:
    os.pwrite(notes.fd, head, 0)
    with pytest.raises(BadMemfd):
        notes.read()
    with structlog.testing.capture_logs() as lines:
        memory = remembering(notes)
    assert [line["event"] for line in lines] == ["what the last supervisor has noted is lost"]
    memory.drain(is_on=True)
    assert remembering(Notes(notes.fd)).is_draining


def test_a_descriptor_that_is_no_notes_is_refused() -> None:
    for fd in (memfd_of(b"x"), os.open("/dev/null", os.O_RDWR)):
        with pytest.raises(BadMemfd):
            Notes(fd)
        os.close(fd)
