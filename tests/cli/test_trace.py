"""`streamd trace` on a directory store, as its users run it."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from streamd.snapshot.trace import Sample
from streamd.store.catalog import open_snapshot
from streamd.store.opening import open_store, split_snapshot_url
from streamd.store.traces import LearnedOrder

if TYPE_CHECKING:
    from tests.cli.conftest import Streamd

PAGE = 4096


def learn(snapshot: str, *waited: tuple[int, int]) -> None:
    store_url, snapshot_id = split_snapshot_url(snapshot)
    store = open_store(store_url)
    assert LearnedOrder(store, open_snapshot(store, snapshot_id)).save(Sample(waited, ((600 * PAGE, 1 << 30),)))


def test_what_was_learned_is_shown_and_forgotten(streamd: "Streamd", snapshot: str) -> None:
    assert streamd.refused("trace", "show", snapshot)["kind"] == "not-found"
    learn(snapshot, (100 * PAGE, 110 * PAGE), (0, 2 * PAGE))
    learn(snapshot, (100 * PAGE, 110 * PAGE))
    shown = streamd.ok("trace", "show", snapshot)
    assert (shown["id"], shown["samples"], shown["waited_bytes"]) == ("web-1", 2, 12 * PAGE)
    assert (shown["pages_bytes"], shown["fetched_first_bytes"]) == (600 * PAGE, 12 * PAGE)
    assert shown["ranges"] == [
        {"start": 100 * PAGE, "end": 110 * PAGE, "weight": 1.0, "position": 0},
        {"start": 0, "end": 2 * PAGE, "weight": 0.5, "position": 10 * PAGE},
    ]
    assert streamd.ok("trace", "drop", snapshot) == {"id": "web-1", "dropped": True}
    assert streamd.ok("trace", "drop", snapshot) == {"id": "web-1", "dropped": False}


def test_people_get_a_table_in_the_order_of_fetching(streamd: "Streamd", snapshot: str) -> None:
    learn(snapshot, *((page * PAGE, (page + 1) * PAGE) for page in range(60, 0, -2)))
    shown = streamd.run("trace", "show", snapshot).stdout
    assert re.search(r"^restores +1$", shown, re.MULTILINE)
    assert re.search(r"^waited for +120\.0 KiB in 30 ranges, 5\.0 % of the memory$", shown, re.MULTILINE)
    assert re.search(r"^AFTER +OFFSET +SIZE +WAITED FOR BY\n0 B +0x3c000 +4\.0 KiB +100\.0 %$", shown, re.MULTILINE)
    assert "and 10 more" in shown
    assert "is forgotten" in streamd.run("trace", "drop", snapshot).stdout


def test_a_damaged_one_is_told_apart_and_hurts_nothing_else(streamd: "Streamd", snapshot: str) -> None:
    learn(snapshot, (0, PAGE))
    trace = streamd.base / "store" / "web-1" / "trace"
    trace.write_bytes(trace.read_bytes()[:-1])
    assert streamd.refused("trace", "show", snapshot)["kind"] == "damaged"
    assert streamd.ok("verify", snapshot)["chunks"]
    copy = streamd.base / "copy"
    streamd.ok("pull", snapshot, copy)
    assert "trace" not in {path.name for path in copy.iterdir()}


@pytest.mark.parametrize("arguments", [("show",), ("drop",)])
def test_an_address_that_is_none_is_a_usage_error(streamd: "Streamd", arguments: tuple[str], tmp_path: Path) -> None:
    assert streamd.refused("trace", *arguments, str(tmp_path))["exit_code"] == 2
