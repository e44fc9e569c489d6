"""What follows from what the supervisor knows of an image."""

from pathlib import Path

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from streamd.config import Config, Prefetch
from streamd.daemon.adoption import FdKeeper
from streamd.daemon.api.models import ImageRequest, ImageStateName, Lease
from streamd.daemon.fd_store import FdStore
from streamd.daemon.images import DEATHS_MAX, DEATHS_WITHIN_S, Deaths, Image, image_id
from streamd.daemon.life import Life
from streamd.daemon.service_manager import NotifyChannel
from streamd.daemon.spawning import Spawner
from streamd.daemon.supervisor import FORGET_FAILED_S, Supervisor

GRACE_S = 60.0


def make(state: ImageStateName = ImageStateName.SERVING) -> Image:
    return Image(
        id=image_id("file:///s/a", ""),
        snapshot_url="file:///s/a",
        tenant="",
        prefetch=Prefetch.ALL,
        credentials=None,
        mountpoint="/run/streamd/images/x",
        created_s=1.0,
        state=state,
    )


def status(**changes: object) -> dict[str, object]:
    reads = {
        "fault": {"bytes": 10, "waited": 3, "stalled": 2, "wait_p50_s": 0.5, "wait_p99_s": 1.5},
        "stream": {"bytes": 30, "waited": 1, "stalled": 1},
    }
    return {
        "reads": reads,
        "origin_bytes": 100,
        "release_gap_p50_s": 0.002,
        "release_gap_p99_s": 0.01,
        "chunks": 4,
        "zero_chunks": 1,
        "cached_chunks": 1,
        "image_bytes": 1000,
        "openers": [[7, "pages.img", 42, "runsc", "web"]],
        **changes,
    }


def test_tenants_share_no_image_whatever_the_names() -> None:
    names = {image_id(url, tenant) for url, tenant in (("a", "b"), ("b", "a"), ("ab", ""), ("", "ab"), ("a", "b "))}
    assert len(names) == 5
    assert all(len(name) == 32 and int(name, 16) >= 0 for name in names)


@given(st.lists(st.floats(0, 30), max_size=60))
def test_workers_are_replaced_until_more_than_so_many_died_within_the_time(gaps_s: list[float]) -> None:
    deaths, at_s, now_s = Deaths(), list[float](), 0.0
    for gap_s in gaps_s:
        now_s += gap_s
        at_s.append(now_s)
        recent = [death_s for death_s in at_s if now_s - death_s <= DEATHS_WITHIN_S]
        assert deaths.note(now_s) == (len(recent) <= DEATHS_MAX)


def test_an_image_that_nobody_uses_goes_after_the_grace_and_at_once_when_it_was_released() -> None:
    image = make()
    assert not image.is_idle(100.0, grace_s=GRACE_S)
    assert not image.is_idle(159.9, grace_s=GRACE_S)
    assert image.is_idle(160.0, grace_s=GRACE_S)
    image.ends_when_unused = True
    assert image.is_idle(100.0, grace_s=GRACE_S)


def test_a_warm_image_is_idle_as_one_that_is_served() -> None:
    image = make(ImageStateName.WARM)
    assert not image.is_idle(200.0, grace_s=0.0), "it is not what it says"
    image.is_warm = True
    assert image.mounted_state is ImageStateName.WARM
    assert not image.is_idle(100.0, grace_s=GRACE_S)
    assert image.is_idle(160.0, grace_s=GRACE_S)


def test_a_lease_or_an_open_file_begins_the_grace_anew() -> None:
    for use in ("lease", "opener"):
        image = make()
        assert not image.is_idle(0.0, grace_s=GRACE_S)
        if use == "lease":
            image.leases["1"] = Lease(id="1", owner="o", purpose="p", since_s=0.0, pid=1)
        else:
            image.take_status(status())
        image.ends_when_unused = True
        assert not image.is_idle(1000.0, grace_s=GRACE_S)
        image.leases.clear()
        image.take_status(status(openers=[]))
        image.ends_when_unused = False
        assert not image.is_idle(1001.0, grace_s=GRACE_S)
        assert image.is_idle(1001.0 + GRACE_S, grace_s=GRACE_S)


def test_an_image_that_is_being_prepared_does_not_go() -> None:
    assert not make(ImageStateName.PREPARING).is_idle(0.0, grace_s=0.0)


def test_an_image_that_is_asked_for_while_it_ends_is_the_next_one_s_and_leases_of_before_are_not() -> None:
    image = make()
    image.is_ending = True
    image.leases["1"] = Lease(id="1", owner="o", purpose="p", since_s=0.0, pid=1)
    first, second = (ImageRequest(snapshot_url="file:///s/a", request_id=name) for name in ("a", "b"))
    image.want_next(first)
    assert (image.state, image.wanted, image.leases) == (ImageStateName.PREPARING, first, {})
    image.leases["2"] = Lease(id="2", owner="o", purpose="p", since_s=0.0, pid=1)
    image.want_next(second)
    assert (image.wanted, list(image.leases)) == (first, ["2"])


def test_an_image_that_can_not_be_unmounted_goes_on_also_for_who_asked_meanwhile() -> None:
    image = make(ImageStateName.DRAINING)
    image.is_ending = image.ends_when_unused = True
    assert not image.stay()  # nobody asked: it ends as soon as it can
    assert (image.state, image.ends_when_unused, image.is_ending) == (ImageStateName.DRAINING, True, False)
    image.is_ending = True
    image.want_next(ImageRequest(snapshot_url="file:///s/a", request_id="a"))
    assert image.stay()
    assert (image.state, image.ends_when_unused, image.is_ending) == (ImageStateName.SERVING, False, False)
    assert image.wanted is None
    assert not image.is_idle(0.0, grace_s=GRACE_S)


def test_what_dead_workers_have_counted_is_not_forgotten() -> None:
    image = make()
    image.take_status(status())
    image.worker_is_gone()
    image.take_status(status(origin_bytes=5))
    shown = image.describe()
    assert shown.bytes_by_tier == {"read_fault": 20, "read_stream": 60, "origin": 105}
    assert (shown.stalls, shown.fault_waits.count, shown.fault_waits.p99_ms) == (6, 6, 1500.0)
    assert (shown.release_gaps.p50_ms, shown.release_gaps.p99_ms) == (2.0, 10.0)
    assert (shown.progress.resident_bytes, shown.progress.total_bytes) == (500, 1000)
    assert [opener.pid for opener in shown.openers] == [42]


def test_a_cache_that_was_lost_on_the_way_is_told_of_like_one_that_was_never_there() -> None:
    image = make()
    assert image.describe().cache_problem is None
    image.take_status(status(cache_problem=None, cache_failure="[Errno 28] No space left on device"))
    assert image.describe().cache_problem == "[Errno 28] No space left on device"
    image.take_status(status(cache_problem="it did not answer", cache_failure=None))
    assert image.describe().cache_problem == "it did not answer"


def test_a_mountpoint_is_told_only_while_something_is_mounted_there() -> None:
    for state in ImageStateName:
        is_there = state in (ImageStateName.SERVING, ImageStateName.WARM, ImageStateName.DRAINING)
        assert (make(state).describe().mountpoint is not None) == is_there


def test_openers_that_a_new_worker_has_not_met_yet_are_remembered_for_the_next_and_closed_ones_are_not() -> None:
    image = make()
    image.take_status(status())
    image.worker_is_gone()
    assert not image.is_in_use  # as far as is known: the kernel says no to an unmount
    image.take_status(status(openers=[[8, "pages.img", 43, "runsc", None]]))
    assert sorted(image.known_openers) == [7, 8]
    image.take_status(status(openers=[]))
    assert sorted(image.known_openers) == [7]
    for handle in range(1000):
        image.take_status(status(openers=[[handle, "pages.img", 1, "", None]]))
        image.worker_is_gone()
    assert len(image.known_openers) <= 64
    assert 999 in image.known_openers


def test_leases_end_once() -> None:
    image = make()
    image.leases["1"] = Lease(id="1", owner="o", purpose="p", since_s=0.0, pid=1)
    assert image.end_leases() == ["1"]
    assert (image.end_leases(), image.describe().leases) == ([], [])
    image.leases["2"] = Lease(id="2", owner="o", purpose="p", since_s=0.0, pid=1)
    assert image.want_next(ImageRequest(snapshot_url="file:///s/a", request_id="a")) == ["2"]


class FailsAtOnce(Life):
    """Does as a life does whose store says no."""

    async def run(self) -> None:
        self.image.state = ImageStateName.FAILED


@pytest.mark.parametrize("has_served", [False, True])
async def test_an_image_that_failed_before_it_served_is_forgotten_and_no_fault_of_the_node(
    has_served: bool, tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    config = Config(run_directory=tmp_path)
    keeper = FdKeeper(FdStore(NotifyChannel(None)), version="1")
    supervisor = Supervisor(config, keeper, config_text="")
    image = make()
    image.has_served = has_served
    life = FailsAtOnce(image, config, Spawner(), keeper, lambda *_, **__: None, config_text="")
    supervisor._images[image.id], supervisor._lives[image.id] = image, life
    async with trio.open_nursery() as nursery:
        nursery.start_soon(supervisor._live, image, life)
        await trio.testing.wait_all_tasks_blocked()
        assert [shown.id for shown in supervisor.images()] == [image.id]
        assert bool(supervisor.health().warnings) == has_served
    assert bool(supervisor.images()) == has_served
    assert trio.current_time() == (0.0 if has_served else FORGET_FAILED_S)
