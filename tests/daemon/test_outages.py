"""What events, status and metrics tell of a store that is away, and of reads that fail, under a real daemon."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bench.daemons import Daemon, ServedImage
from bench.event_tape import until
from bench.fault_proxy import FaultProxy, Hang, Rule, Status
from streamd.errors import Exit

if TYPE_CHECKING:
    from tests.daemon.conftest import Saved

MIB = 1 << 20


@pytest.fixture
def impatient(proxy: FaultProxy) -> Iterator[Daemon]:
    """Start a daemon that asks the emulator through the proxy, and loses patience soon."""
    policy = 'event_after_s = "1s"\nhold_s = "200ms"\ncredentials_wait_s = "200ms"'
    with Daemon(policy=policy, env={"STORAGE_EMULATOR_HOST": proxy.address}) as running:
        yield running


def metric(image: ServedImage, name: str) -> float:
    """Give an image's sample of a metric."""
    found = re.search(rf'^{name}{{image="{image.id}".*}} (\S+)$', image.daemon.client.metrics(), re.MULTILINE)
    assert found is not None
    return float(found[1])


def printed(daemon: Daemon) -> str:
    """Give what `streamd status` prints."""
    return daemon.streamd("status").result().stdout


@pytest.mark.parametrize("action", [Status(503), Hang()], ids=["answers 503", "hangs"])
def test_an_outage_is_in_the_status_while_it_lasts_and_has_one_event_at_each_end(
    impatient: Daemon, uploaded: "Saved", proxy: FaultProxy, action: Status | Hang
) -> None:
    image = impatient.image(uploaded.url)
    rule = proxy.add(Rule(action, times=None))
    reader = image.reader(uploaded.pages)
    away = image.until(lambda state: state["store_away"], "the outage")["store_away"]
    [event] = impatient.tape.until("store-away", image=image.id)
    assert event["at_s"] - away["since_s"] >= 1.0
    assert "503" in event["facts"]["reason"] or isinstance(action, Hang)
    assert "waits for the store since " in printed(impatient)
    assert metric(image, "streamd_image_store_away") == 1
    image.until(lambda state: state["stalls"], "reads that wait for long")
    proxy.remove(rule)
    assert uploaded.is_whole(reader.outcome())
    image.until(lambda state: state["store_away"] is None, "its end")
    assert len(impatient.tape.until("store-back", image=image.id)) == 1
    assert len(impatient.tape.of("store-away", image=image.id)) == 1
    assert impatient.tape.of("reads-failed") == []
    assert metric(image, "streamd_image_store_away") == metric(image, "streamd_image_failed_reads_total") == 0


@pytest.mark.parametrize(
    ("status", "cause", "exit_code"),
    [(403, "forbidden", Exit.NOT_PERMITTED), (404, "gone", Exit.NOT_FOUND), (401, "credentials", Exit.NOT_PERMITTED)],
)
def test_reads_that_the_policy_fails_are_told_of_once_and_counted_all(
    impatient: Daemon, uploaded: "Saved", proxy: FaultProxy, status: int, cause: str, exit_code: Exit
) -> None:
    image = impatient.image(uploaded.url)
    proxy.add(Rule(Status(status), times=None, reads_only=False))
    outcome = image.reader(uploaded.pages, end=MIB, go_on=True).outcome()
    assert {name for _, name in outcome.errors} == {"EIO"}
    state = image.until(lambda state: state["failed_reads"] >= len(outcome.errors), "what has failed")
    [event] = impatient.tape.until("reads-failed", image=image.id)
    assert (event["facts"]["cause"], event["facts"]["reads"] > 0) == (cause, True)
    assert (state["last_error"]["kind"], state["last_error"]["exit_code"]) == (cause, exit_code)
    assert state["last_error"]["message"] == f"reads failed: {event['facts']['reason']}"
    assert metric(image, "streamd_image_failed_reads_total") == state["failed_reads"]
    assert f"{cause}: reads failed: " in printed(impatient)


def test_reads_that_an_operator_fails_are_told_of_as_his(
    impatient: Daemon, uploaded: "Saved", proxy: FaultProxy
) -> None:
    image = impatient.image(uploaded.url)
    proxy.add(Rule(Hang(), times=None))
    reader = image.reader(uploaded.pages)
    image.until_open(reader)
    until(lambda: proxy.hanging, "a request that hangs")
    assert impatient.client.fail(image.id) == 1
    assert {name for _, name in reader.outcome().errors} == {"EIO"}
    [event] = impatient.tape.until("reads-failed", image=image.id)
    assert event["facts"]["cause"] == "operator"
    assert image.state()["last_error"]["kind"] == "operator"


def test_reads_that_wait_when_their_mount_is_ended_by_force_are_told_of_before_it_is_gone(
    impatient: Daemon, uploaded: "Saved", proxy: FaultProxy
) -> None:
    image = impatient.image(uploaded.url)
    proxy.add(Rule(Hang(), times=None))
    reader = image.reader(uploaded.pages)
    image.until_open(reader)
    until(lambda: proxy.hanging, "a request that hangs")
    impatient.client.release(image.id, force=True)
    impatient.tape.until("image-gone", image=image.id)
    [event] = impatient.tape.of("reads-failed", image=image.id)
    assert event["facts"]["cause"] == "ending"
    assert image.state()["failed_reads"] == event["facts"]["reads"]


def test_an_image_of_a_directory_that_is_not_mounted_waits_for_it_and_says_so(
    impatient: Daemon, image: Path, tmp_path: Path, save: Callable[[Path, Path, str], "Saved"]
) -> None:
    place, elsewhere = tmp_path / "store", tmp_path / "elsewhere"
    saved = save(image, place, "small")
    place.rename(elsewhere)
    place.mkdir()  # the mountpoint
    asked = impatient.request(saved.url)
    state = asked.until(lambda state: state["store_away"], "a status that says so")
    assert state["state"] == "preparing"
    assert f"there is no store at {place}" in state["store_away"]["reason"]
    impatient.tape.until("store-away", image=asked.id)
    place.rmdir()
    elsewhere.rename(place)
    asked.until_served()
    assert saved.is_whole(asked.reader(saved.pages).outcome())
    asked.until(lambda state: state["store_away"] is None, "its end")
