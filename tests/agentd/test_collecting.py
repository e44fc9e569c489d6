"""What pushes and removals left goes, without anybody's asking: by which node, how often, and what is told of it."""

from pathlib import Path

import pytest
import trio
import trio.testing

from agent.config import ConfigError, parse
from agent.node.collecting import Collecting
from agent.node.events import Events, What
from agent.node.images import StreamdImages
from agent.node.known_objects import KnownObjects
from agent.node.store_access import StoreAccess
from bench.agent_node import STORAGE
from tests.agentd.conftest import Node, until

DAY_S = 86400.0
HOUR_S = 3600.0


async def test_the_stores_of_all_storage_configs_are_collected_and_failures_are_seen_until_they_end(node: Node) -> None:
    node.write_policy("workload")
    node.write("two.yaml", STORAGE.format(location="{gcs: {bucket: bbb, path: x}}").replace("here", "there"))
    async with node.running() as agent:
        await agent.collecting.look(DAY_S)
        assert node.images.collected == [node.store_url, "gs://bbb/x"]
        assert [event.message for event in node.events(What.COLLECTED)] == [
            f"{store}: 3 objects deleted, 4096 bytes" for store in node.images.collected
        ]
        node.images.problem = "403 Forbidden"
        await agent.collecting.look(DAY_S)
        status = await agent.status()
        assert status["uncollected"] == [
            {"store": store, "problem": "403 Forbidden"} for store in node.images.collected[:2]
        ]
        assert [event.reason for event in node.events(What.PROBLEM)] == ["collection"] * 2
        assert "snapagent_stores_uncollected 2\n" in agent.metrics()
        (node.config.objects_directory / "two.yaml").unlink()
        await until(lambda: len(agent.known.configs) == 1, "one storage config")
        node.images.problem = ""
        await agent.collecting.look(DAY_S)
        assert (await agent.status())["uncollected"] == []


@pytest.mark.parametrize(("draw", "looks"), [(1.0, 4), (0.5, 8)])
async def test_it_looks_some_times_within_the_time_at_moments_of_its_own(
    node: Node, draw: float, looks: int, autojump_clock: trio.testing.MockClock
) -> None:
    known = KnownObjects(Events())
    node.write_policy("workload")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(known.follow, node.objects())
        await known.synced()
        collecting = Collecting(node.images, known, Events(), every_s=DAY_S, draw=lambda: draw)
        nursery.start_soon(collecting.run)
        await trio.sleep(DAY_S + 1)
        assert len(node.images.collected) == looks
        nursery.cancel_scope.cancel()


async def test_a_removed_snapshots_bytes_go_once_for_all_nodes(node: Node) -> None:
    snapshot = await node.saved()
    images = [StreamdImages(Path("/nowhere"), StoreAccess()) for _ in range(3)]
    url = f"{node.store_url}/{snapshot}"
    await images[0].remove(url, tenant="default")
    done = [await each.collect(node.store_url, every_s=HOUR_S) for each in images]
    assert [each is not None for each in done] == [True, False, False]
    assert done[0] is not None
    assert set(done[0].kept) == {snapshot}  # readers may still load from it


SETTINGS: dict[str, tuple[object, float | None]] = {
    "a time": ("6h", 6 * HOUR_S),
    "seconds": (60, 60.0),
    "never": ("never", None),
    "nothing": (None, DAY_S),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_how_often_is_a_setting(case: str) -> None:
    value, every_s = SETTINGS[case]
    assert parse({"retention": {"collect_every": value}}, source="x").collect_every_s == every_s


@pytest.mark.parametrize("value", ["now and then", 0, -1, "48h", True])
def test_what_is_no_time_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"retention\.collect_every"):
        parse({"retention": {"collect_every": value}}, source="x")
