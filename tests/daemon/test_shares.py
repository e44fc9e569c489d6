"""The node's link is divided fairly, and workers hear of it."""

import json
import socket
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamd.config import Config, DaemonConfig, FetchConfig, Prefetch
from streamd.daemon.adoption import FdKeeper
from streamd.daemon.fd_store import FdStore
from streamd.daemon.images import Image
from streamd.daemon.life import Life
from streamd.daemon.service_manager import NotifyChannel
from streamd.daemon.shares import Demand, divide, divide_link
from streamd.daemon.spawning import Spawner, WorkerProcess
from streamd.daemon.wire import Wire, wire_pair

limits = st.integers(64 << 10, 1 << 40)
each_max = st.just(0) | limits
demands = st.builds(Demand, st.floats(0, 2.0**40), st.booleans())
crowds = st.lists(demands, min_size=1, max_size=40)
HELD = Demand(0, is_held_back=True)


def about(bytes_per_s: float) -> object:
    return pytest.approx(bytes_per_s, rel=1e-9, abs=1e-3)


@given(limits, crowds, each_max)
def test_all_of_the_link_is_given_out_and_no_more(limit: int, crowd: list[Demand], each_max: int) -> None:
    shares = divide(limit, crowd, each_max=each_max)
    most = each_max or limit
    assert all(0 < share <= most * (1 + 1e-9) for share in shares)
    assert sum(shares) == about(min(limit, most * len(crowd)))


@given(limits, crowds, each_max)
def test_who_is_held_back_gets_an_equal_part_or_more_and_as_much_as_all_who_are(
    limit: int, crowd: list[Demand], each_max: int
) -> None:
    crowd = [*crowd, HELD]
    shares = divide(limit, crowd, each_max=each_max)
    of_held = [share for share, demand in zip(shares, crowd, strict=True) if demand.is_held_back]
    assert of_held == [about(max(shares))] * len(of_held)
    assert of_held[0] >= min(limit / len(crowd), each_max or limit) * (1 - 1e-9)


@given(limits, crowds, st.randoms(use_true_random=False))
def test_equal_demands_get_equal_shares_in_whichever_order(limit: int, crowd: list[Demand], dice: object) -> None:
    before = divide(limit, crowd, each_max=0)
    order = sorted(range(len(crowd)), key=lambda _: dice.random())  # type: ignore[attr-defined]
    after = divide(limit, [crowd[index] for index in order], each_max=0)
    assert after == [about(before[index]) for index in order]
    twice = divide(limit, [*crowd, *crowd], each_max=0)
    assert twice[: len(crowd)] == [about(share) for share in twice[len(crowd) :]]


@given(limits, crowds)
def test_who_takes_less_than_an_equal_part_keeps_it_with_room_to_grow(limit: int, crowd: list[Demand]) -> None:
    equal = limit / (len(crowd) + 1)
    for share, demand in zip(divide(limit, [*crowd, HELD], each_max=0), crowd, strict=False):
        assert share >= min(1.25 * demand.bytes_per_s, equal) * (1 - 1e-9)


def test_an_image_with_nothing_to_fetch_leaves_its_part_to_those_that_load() -> None:
    idle = Demand(0, is_held_back=False)
    assert divide(1000, [HELD, idle, idle, HELD], each_max=0) == [about(475), about(25), about(25), about(475)]
    assert divide(1000, [idle, idle], each_max=0) == [about(500), about(500)]
    assert divide(1000, [HELD, Demand(160, is_held_back=False)], each_max=0) == [about(800), about(200)]


def test_without_a_limit_there_is_no_bound_but_that_of_each() -> None:
    assert divide(0, [HELD, HELD], each_max=0) == [0, 0]
    assert divide(0, [HELD, HELD], each_max=10) == [10, 10]
    assert divide(10, [], each_max=0) == []


class Taking:
    """An image that says what it takes, and hears its share."""

    def __init__(self, demand: Demand) -> None:
        self.demand = demand
        self.heard: list[int] = []

    def share_link(self, bytes_per_s: int) -> None:
        self.heard.append(bytes_per_s)


def test_all_images_hear_their_share_and_together_that_is_never_too_much() -> None:
    config = Config(daemon=DaemonConfig(fetch_max_bytes_per_s=1_000_000), fetch=FetchConfig(max_bytes_per_s=400_000))
    images = [Taking(HELD), Taking(HELD), Taking(Demand(0, is_held_back=False))]
    divide_link(images, config)
    assert [image.heard for image in images] == [[400_000], [400_000], [pytest.approx(200_000, abs=1)]]
    images = [Taking(HELD) for _ in range(7)]
    divide_link(images, config)
    assert sum(image.heard[0] for image in images) <= 1_000_000
    divide_link(images, Config(fetch=FetchConfig(max_bytes_per_s=400_000)))
    divide_link(images, Config())
    assert [image.heard[1:] for image in images] == [[400_000, 0]] * 7


def messages(end: socket.socket) -> list[int]:
    """Give the rates that a worker was told since the last look."""
    found: list[int] = []
    while True:
        try:
            message = json.loads(end.recv(1 << 16))
        except BlockingIOError:
            return found
        assert message.pop("do") == "rate"
        found.append(message.pop("bytes_per_s"))
        assert not message


def make_life() -> Life:
    image = Image(
        id="a" * 32,
        snapshot_url="file:///s/a",
        tenant="",
        prefetch=Prefetch.ALL,
        credentials=None,
        mountpoint="/run/streamd/images/x",
        created_s=1.0,
    )
    keeper = FdKeeper(FdStore(NotifyChannel(None)), version="1")
    return Life(image, Config(), Spawner(), keeper, partial(print, image.id), config_text="")


def test_a_worker_hears_of_less_at_once_and_of_more_when_that_is_notable() -> None:
    life = make_life()
    ours, its = wire_pair()
    with ours, its:
        its.setblocking(False)
        life.worker = WorkerProcess(1, -1, Wire(ours))
        for share in (0, 0):  # one that is adopted may have been given a share in its former life
            life.share_link(share)
        assert messages(its) == [0]
        for share in (1000, 1040, 999, 1000, 1049, 1060, 0):
            life.share_link(share)
        assert messages(its) == [1000, 999, 1049, 0]


def test_a_worker_begins_with_the_share_that_the_last_one_had() -> None:
    life = make_life()
    assert life._assignment().fetch_bytes_per_s == 0
    for share in (1000, 700):  # nobody serves now
        life.share_link(share)
        assert life._assignment().fetch_bytes_per_s == share


def test_a_worker_that_does_not_read_is_told_later() -> None:
    life = make_life()
    ours, its = wire_pair()
    with ours, its:
        its.setblocking(False)
        life.worker = WorkerProcess(1, -1, Wire(ours))
        while life.worker.wire.send_nowait({"do": "rate", "bytes_per_s": 7}):
            pass
        life.share_link(1000)
        assert set(messages(its)) == {7}
        life.share_link(1000)
        assert messages(its) == [1000]


def test_what_an_image_would_take_is_what_its_worker_says_and_all_until_then() -> None:
    life = make_life()
    assert life.demand == HELD
    life.image.take_status({"fetch_bytes_per_s": 5, "fetch_is_held_back": False, "fetch_max_bytes_per_s": 9})
    assert life.demand == Demand(5, is_held_back=False)
    assert life.image.describe().fetch_max_bytes_per_s == 9
    life.image.worker_is_gone()
    assert life.demand == HELD
