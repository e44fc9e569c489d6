"""Events: nobody who listens is waited for, and nobody misses one unknowingly."""

from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from streamd.daemon.api.events import KEPT, EventLog, FellBehind, server_sent
from streamd.daemon.api.models import ImageStateName
from tests.daemon.api.fake_node import FakeNode, InProcess

EPOCH = "0a1b2c3d"


def _log(kept: int = 4) -> EventLog:
    return EventLog(kept=kept, epoch=EPOCH, now_s=lambda: 12.0)


def _publish(log: EventLog, count: int) -> None:
    for _ in range(count):
        log.publish("image", image="x", number=log.published + 1)


def test_an_event_is_written_as_event_streams_have_it() -> None:
    log = _log()
    log.publish("image", image="ab", state="serving", note="a\nb")
    (event,) = log.since(0)
    assert server_sent(event) == (
        b"id: 0a1b2c3d-1\nevent: image\n"
        b'data: {"id":"0a1b2c3d-1","kind":"image","at_s":12.0,"image":"ab","facts":{"state":"serving","note":"a\\nb"}}'
        b"\n\n"
    )


def test_a_long_fact_is_cut_and_a_kind_is_a_name() -> None:
    log = _log()
    log.publish("failure", message="x" * 5000)
    assert log.since(0)[0].facts["message"] == "x" * 1000
    with pytest.raises(ValueError, match="not the name"):
        log.publish("a\nb")


@given(
    st.integers(1, 5),
    st.integers(0, 12),
    st.one_of(st.integers(0, 14).map(lambda n: f"{EPOCH}-{n}"), st.just("ffffffff-3"), st.text(max_size=20)),
)
def test_who_comes_back_has_every_event_or_knows_that_some_are_lost(kept: int, before: int, last_id: str) -> None:
    log = _log(kept)
    _publish(log, before)
    follower = log.follow(last_id)

    async def read() -> list[Any]:
        events: list[Any] = []
        if follower.lost is not None:
            events += await follower.next()
        while follower.number < log.published:
            events += await follower.next()
        return events

    got = trio.run(read)
    numbers = [event.facts.get("number") for event in got if event.kind != "lost"]
    last = int(last_id.partition("-")[2]) if last_id in {f"{EPOCH}-{n}" for n in range(before + 1)} else -1
    if before - min(kept, before) <= last:
        assert numbers == list(range(last + 1, before + 1))
        assert len(numbers) == len(got)
    else:
        assert got[0].kind == "lost"
        assert numbers == list(range(max(1, before - kept + 1), before + 1))
    # Coming back with the id of any event, `lost` too, loses nothing more.
    if got:
        assert log.follow(got[0].id).lost is None


async def test_a_reader_that_the_ring_overtook_is_told() -> None:
    log = _log()
    follower = log.follow()
    _publish(log, 4)
    assert [event.facts["number"] for event in await follower.next()] == [1, 2, 3, 4]
    _publish(log, 5)
    with pytest.raises(FellBehind):
        await follower.next()


def test_the_ring_keeps_so_many_and_no_more() -> None:
    log = EventLog()
    _publish(log, KEPT + 10)
    with pytest.raises(FellBehind):
        log.since(9)
    assert log.since(10)[0].facts["number"] == 11


class _Client:
    """Follows events in-process; takes what it is sent only while `takes` is set."""

    def __init__(self, api: InProcess, **headers: str) -> None:
        self._api = api
        self._headers = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        self.body = b""
        self.takes = True
        self._taken = trio.Event()
        self._left = trio.Event()

    def take(self) -> None:
        self.takes = True
        self._taken.set()

    def leave(self) -> None:
        self._left.set()

    async def run(self, path: str = "/v1/events", query: bytes = b"") -> None:
        asked = [{"type": "http.request", "body": b"", "more_body": False}]

        async def receive() -> Any:
            if asked:
                return asked.pop()
            await self._left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            self.body += message.get("body", b"")
            if not self.takes:
                await self._taken.wait()

        scope = {"type": "http", "http_version": "1.1", "method": "GET", "path": path, "raw_path": path.encode()}
        await self._api.app(scope | {"query_string": query, "headers": self._headers}, receive, send)


async def test_a_follower_gets_what_happens_from_now_on_and_can_come_back() -> None:
    api = InProcess(FakeNode(events=_log()))
    _publish(api.node.events, 2)
    client = _Client(api)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.run)
        await trio.testing.wait_all_tasks_blocked()
        assert client.body == b"id: 0a1b2c3d-2\n\n"
        _publish(api.node.events, 1)
        await trio.testing.wait_all_tasks_blocked()
        assert b'"number":3' in client.body
        assert api.counts.streams == 1
        client.leave()
    assert api.counts.streams == 0
    _publish(api.node.events, 2)
    again = _Client(api, last_event_id="0a1b2c3d-3")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(again.run)
        await trio.testing.wait_all_tasks_blocked()
        assert again.body.count(b"event: image") == 2
        again.leave()


async def test_a_silent_stream_shows_that_it_lives(autojump_clock: trio.testing.MockClock) -> None:
    client = _Client(InProcess())
    with trio.move_on_after(35):
        await client.run()
    assert client.body.count(b":\n\n") == 3


async def test_a_reader_that_is_too_slow_is_dropped_and_nobody_waits_for_it() -> None:
    api = InProcess(FakeNode(events=_log()))
    slow, quick = _Client(api), _Client(api)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(slow.run)
        nursery.start_soon(quick.run)
        await trio.testing.wait_all_tasks_blocked()
        slow.takes = False
        for _ in range(3):
            _publish(api.node.events, 3)  # synchronous: it can't wait
            await trio.testing.wait_all_tasks_blocked()
        assert quick.body.count(b"event: image") == 9
        slow.take()
        await trio.testing.wait_all_tasks_blocked()
        assert slow.body.count(b"event: image") == 3
        assert (api.counts.dropped_readers, api.counts.streams) == (1, 1)
        quick.leave()


async def test_head_of_events_has_an_end(api: InProcess) -> None:
    with trio.fail_after(30):
        answer = await api.ask("HEAD", "/v1/events")
    assert (answer.status, answer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")


async def test_who_waits_for_an_image_and_leaves_is_not_waited_for(api: InProcess) -> None:
    await api.image()
    assert api.node.known[f"{1:032x}"].state is ImageStateName.PREPARING
    client = _Client(api)
    client.leave()
    with trio.fail_after(30):
        await client.run(f"/v1/images/{1:032x}", b"wait_s=60")
