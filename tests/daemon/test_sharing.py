"""What pods of a node share and hold: one image for all who ask, leases, ends that are asked for, and draining."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from bench.daemons import Daemon, ServedImage
from bench.event_tape import until
from bench.fault_proxy import FaultProxy, Hang, Rule
from bench.mount_users import GONE
from bench.slot_reader import SLOTS
from streamd.daemon.relay import RelayedError
from streamd.errors import Exit

if TYPE_CHECKING:
    from tests.daemon.conftest import Saved

Calm = Callable[[Daemon], None]

_CLIENTS = 100
_HOLD_A_LEASE = """
import signal, sys
from pathlib import Path
from streamd.daemon.client import DaemonClient
lease = DaemonClient(Path(sys.argv[1])).take_lease(sys.argv[2], owner="pod/b", purpose="restore")
print(lease.id, flush=True)
signal.pause()
"""


def test_two_pods_that_ask_for_an_image_share_one_mount_and_one_fetch(
    behind_proxy: Daemon, uploaded: "Saved", proxy: FaultProxy, calm: Calm
) -> None:
    first, second = (behind_proxy.image(uploaded.url) for _ in range(2))
    assert first.id == second.id
    readers = [image.reader(uploaded.pages) for image in (first, second)]
    assert all(uploaded.is_whole(reader.outcome()) for reader in readers)
    assert len(first.mounts()) == 1
    assert proxy.read_bytes <= 1.02 * uploaded.stored_bytes
    assert len(behind_proxy.tape.of("image-requested")) == 1
    calm(behind_proxy)


def test_tenants_share_nothing(daemon: Daemon, saved: "Saved") -> None:
    images = [daemon.image(saved.url, tenant=tenant) for tenant in ("", "one", "two")]
    assert len({image.id for image in images}) == 3
    assert len({image.worker_pid() for image in images}) == 3
    assert all(saved.is_whole(image.reader(saved.pages, slots=16).outcome()) for image in images)


def test_a_hundred_clients_at_once_get_one_image(
    behind_proxy: Daemon, uploaded: "Saved", proxy: FaultProxy, calm: Calm
) -> None:
    with ThreadPoolExecutor(_CLIENTS) as threads:
        images = list(threads.map(lambda _: behind_proxy.image(uploaded.url), range(_CLIENTS)))
    assert len({image.id for image in images}) == 1
    assert len(images[0].mounts()) == 1
    assert len(behind_proxy.process_ids()) == 3  # supervisor, spawner, one worker
    assert uploaded.is_whole(images[0].reader(uploaded.pages).outcome())
    assert proxy.read_bytes <= 1.02 * uploaded.stored_bytes
    calm(behind_proxy)


@pytest.fixture
def frugal() -> Iterator[Daemon]:
    """Start a daemon whose workers together are within any machine's memory."""
    with Daemon('memory_max_bytes = "32MiB"') as running:
        yield running


def test_sixteen_images_at_once_are_served_and_go_again(frugal: Daemon, sixteen: list["Saved"], calm: Calm) -> None:
    daemon = frugal
    with ThreadPoolExecutor(len(sixteen)) as threads:
        images = list(threads.map(lambda saved: daemon.image(saved.url), sixteen))
    assert len({image.worker_pid() for image in images}) == len(sixteen)
    readers = [image.reader(saved.pages, slots=8) for image, saved in zip(images, sixteen, strict=True)]
    # A worker that is killed is one image's: the others' are what they were.
    others = [image.worker_pid() for image in images[1:]]
    images[0].until_replaced(images[0].kill_worker())
    for reader, saved in zip(readers, sixteen, strict=True):
        assert saved.is_whole(reader.outcome())
    assert [image.worker_pid() for image in images[1:]] == others
    for image in images:
        image.until(lambda state: not state["openers"], "no opener")
        daemon.client.release(image.id)
    for image in images:
        daemon.tape.until("image-gone", image=image.id)
        assert image.mounts() == []
    until(lambda: set(daemon.process_ids()) == {daemon.pid, daemon.spawner_pid()}, "the end of all workers")
    assert not os.listdir(daemon.run_directory / "images")
    calm(daemon)


def test_an_image_goes_a_while_after_its_last_lease_has_ended(
    hasty: Daemon, saved: "Saved", sixteen: list["Saved"]
) -> None:
    client = hasty.client
    image = hasty.image(saved.url)
    first = client.take_lease(image.id, owner="pod/a", purpose="restore")
    holder = hasty.run(sys.executable, "-c", _HOLD_A_LEASE, hasty.run_directory, image.id)
    image.until(lambda state: len(state["leases"]) == 2, "two leases")
    first.close()
    image.until(lambda state: len(state["leases"]) == 1, "one lease")
    # One that nobody has used goes, and meanwhile this one stays.
    hasty.image(sixteen[0].url).until_unmounted()
    assert len(image.mounts()) == 1
    holder.process.send_signal(signal.SIGKILL)  # a lease dies with its holder
    image.until_unmounted()
    hasty.tape.until("image-gone", image=image.id)
    ended = hasty.tape.of("lease-ended", image=image.id)
    assert len(ended) == 2
    assert hasty.client.image(image.id)["state"] == "gone"


def test_an_open_file_keeps_an_image_without_any_lease(hasty: Daemon, saved: "Saved", sixteen: list["Saved"]) -> None:
    image = hasty.image(saved.url)
    with hasty.client.lease(image.id, owner="pod/a", purpose="restore"):
        holder = image.holder()
        assert holder.open() == "done"
    hasty.image(sixteen[0].url).until_unmounted()
    assert len(image.mounts()) == 1
    image.until_replaced(image.kill_worker())  # also where the worker that saw it opened is gone
    hasty.image(sixteen[0].url).until_unmounted()
    assert len(image.mounts()) == 1
    assert holder.close() == "done"
    image.until_unmounted()


def in_use(daemon: Daemon, image: ServedImage) -> RelayedError:
    """Have a release refused."""
    with pytest.raises(RelayedError) as refused:
        daemon.client.release(image.id)
    assert refused.value.kind == "in-use"
    assert refused.value.exit_code == Exit.REFUSED
    assert refused.value.facts["status"] == 409
    return refused.value


def test_an_image_that_is_read_is_not_released_unless_by_force(
    behind_proxy: Daemon, uploaded: "Saved", proxy: FaultProxy, calm: Calm
) -> None:
    image = behind_proxy.image(uploaded.url)
    proxy.add(Rule(Hang(), times=None))
    reader = image.reader(uploaded.pages)
    image.until_open(reader)
    refused = in_use(behind_proxy, image)
    assert f"(pid {reader.pid}) has pages.img open" in str(refused)
    assert image.state()["state"] == "serving"
    with behind_proxy.client.lease(image.id, owner="pod/a", purpose="restore"):
        assert "pod/a holds a lease (restore)" in str(in_use(behind_proxy, image))
    assert not reader.is_done()
    behind_proxy.client.release(image.id, force=True)
    outcome = reader.outcome()
    assert {name for _, name in outcome.errors} <= GONE
    assert outcome.errors
    assert outcome.wrong == outcome.short == []
    image.until_unmounted()
    behind_proxy.tape.until("image-gone", image=image.id)
    assert image.state()["state"] == "gone"
    calm(behind_proxy)


def test_a_lease_alone_keeps_an_image_from_being_released(daemon: Daemon, saved: "Saved") -> None:
    image = daemon.image(saved.url)
    with daemon.client.lease(image.id, owner="pod/a", purpose="restore"):
        assert "pod/a holds a lease (restore)" in str(in_use(daemon, image))
        assert len(image.mounts()) == 1
    image.until(lambda state: not state["leases"], "no lease")
    daemon.client.release(image.id)
    image.until_unmounted()


def test_the_reads_of_one_handle_can_be_failed_alone(
    behind_proxy: Daemon, uploaded: "Saved", proxy: FaultProxy
) -> None:
    image = behind_proxy.image(uploaded.url)
    hang = proxy.add(Rule(Hang(), times=None))
    doomed, other = (image.reader(uploaded.pages) for _ in range(2))
    image.until_open(doomed, other)
    [handle] = [opener["handle"] for opener in image.state()["openers"] if opener["pid"] == doomed.pid]
    assert behind_proxy.client.fail(image.id, handle=handle) == 1
    outcome = doomed.outcome()
    assert {name for _, name in outcome.errors} == {"EIO"}
    assert len(outcome.errors) == SLOTS
    assert not other.is_done()
    proxy.remove(hang)
    assert uploaded.is_whole(other.outcome())


def test_a_node_that_drains_takes_no_new_images_and_goes_on_with_its_own(
    daemon: Daemon, saved: "Saved", sixteen: list["Saved"]
) -> None:
    image = daemon.image(saved.slow(20))
    reader = image.reader(saved.pages)
    daemon.client.drain()
    with pytest.raises(RelayedError, match="draining") as refused:
        daemon.request(sixteen[0].url)
    assert refused.value.facts["status"] == 503
    assert daemon.request(saved.slow(20)).id == image.id  # it is here
    image.until_replaced(image.kill_worker())
    assert saved.is_whole(reader.outcome())
    daemon.tape.until("draining")


def test_an_image_that_hangs_in_its_preparation_can_be_given_up(
    behind_proxy: Daemon, uploaded: "Saved", proxy: FaultProxy
) -> None:
    proxy.add(Rule(Hang(), times=None, reads_only=False))
    image = behind_proxy.request(uploaded.url)
    until(lambda: proxy.hanging, "a worker that asks the store")
    pid = image.worker_pid()
    behind_proxy.client.release(image.id, force=True)
    image.until(lambda state: state["state"] in ("gone", "failed"), "its end", limit_s=20)
    until(lambda: pid not in behind_proxy.process_ids(), "the worker's end")


@pytest.mark.parametrize("command", [("umount",), ("umount", "--force"), ("fail",)])
def test_commands_for_a_mount_of_its_own_leave_an_image_of_the_daemon_and_name_what_is_for_it(
    daemon: Daemon, saved: "Saved", command: tuple[str, ...]
) -> None:
    image = daemon.image(saved.url)
    with daemon.client.lease(image.id, owner="pod/a", purpose="restore") as lease:
        refused = daemon.streamd(*command, str(image.mountpoint)).result()
        assert refused.returncode == Exit.REFUSED
        assert f"streamd image {'fail' if command == ('fail',) else 'release'} {image.id}" in refused.stderr
        assert lease.is_held()
        assert saved.is_whole(image.reader(saved.pages, slots=16).outcome())
