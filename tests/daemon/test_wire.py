"""Messages between the supervisor and its processes."""

import os
import socket
from collections.abc import Iterator

import pytest
import trio

from streamd.daemon.wire import MESSAGE_MAX_BYTES, Wire, wire_pair


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, its = wire_pair()
    with ours, its:
        yield ours, its


async def test_messages_come_whole_and_in_order_with_their_descriptors(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    one, other = Wire(ends[0]), Wire(ends[1])
    read_end, write_end = os.pipe()
    assert one.send_nowait({"n": 1})
    assert one.send_nowait({"n": 2}, [write_end])
    os.close(write_end)
    assert await other.receive() == ({"n": 1}, [])
    received = await other.receive()
    assert received is not None
    message, [fd] = received
    assert message == {"n": 2}
    assert not os.get_inheritable(fd)
    os.write(fd, b"x")
    os.close(fd)
    assert os.read(read_end, 10) == b"x"
    os.close(read_end)


async def test_a_message_is_waited_for_and_the_end_of_the_other_side_is_none(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    one, other = Wire(ends[0]), Wire(ends[1])
    got: list[object] = []

    async def receive() -> None:
        got.append(await other.receive())
        got.append(await other.receive())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(receive)
        await trio.testing.wait_all_tasks_blocked()
        one.send_nowait({"n": 1})
        await trio.testing.wait_all_tasks_blocked()
        one.close()
    assert got == [({"n": 1}, []), None]
    assert not other.send_nowait({"n": 2})


async def test_who_does_not_read_does_not_hold_up_who_sends(ends: tuple[socket.socket, socket.socket]) -> None:
    one = Wire(ends[0])
    sent = 0
    while one.send_nowait({"filler": "x" * 10_000}):
        sent += 1
        assert sent < 10_000
    assert sent


@pytest.mark.parametrize("data", [b"{", b"[1]", b"null", b"\xff"])
async def test_what_is_no_message_ends_the_conversation_and_leaks_no_descriptor(
    ends: tuple[socket.socket, socket.socket], data: bytes
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    socket.send_fds(ends[0], [data], [0])
    assert await Wire(ends[1]).receive() is None
    assert len(os.listdir("/proc/self/fd")) == before


async def test_a_message_that_is_too_long_is_a_bug_of_the_sender(ends: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(ValueError, match="bytes"):
        Wire(ends[0]).send_nowait({"filler": "x" * MESSAGE_MAX_BYTES})
