"""An image is asked for again in the moment in which it goes: it is served, by the next mount or by the one it has."""

import random
import signal
import subprocess
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from bench.daemons import Daemon, ServedImage
from bench.event_tape import until
from bench.fault_proxy import FaultProxy, Hang, Rule
from bench.mount_users import FileHolder
from streamd.daemon.client import Lease
from streamd.daemon.relay import RelayedError

if TYPE_CHECKING:
    from tests.daemon.conftest import Saved

Calm = Callable[[Daemon], None]

MIB = 1 << 20


def leased(daemon: Daemon, url: str) -> tuple[ServedImage, Lease]:
    """Do as a pod does: ask, wait, hold; and ask again when it went in between."""
    while True:
        image = daemon.image(url)
        try:
            return image, daemon.client.take_lease(image.id, owner="pod/a", purpose="restore")
        except RelayedError as error:
            if "request it again" not in str(error):
                raise


def sit_in(image: ServedImage) -> None:
    """Have a process whose working directory is the mount, which is no open file."""
    sitting = image.daemon.run("sh", "-c", f"cd {image.mountpoint} && echo in && exec sleep 600")
    assert sitting.process.stdout is not None
    assert sitting.process.stdout.readline() == "in\n"


def test_an_image_that_is_unmounted_and_not_gone_is_prepared_anew_for_who_asks(
    hasty: Daemon, saved: "Saved", calm: Calm
) -> None:
    image = hasty.image(saved.url)
    pid = image.kill_worker(signal.SIGSTOP)  # it can't say that its connection has ended
    image.until_unmounted()
    state = image.until(lambda state: state["state"] != "serving", "a word that it goes")
    assert (state["state"], state["mountpoint"]) == ("draining", None)
    with pytest.raises(RelayedError, match="is ending: request it again"):
        hasty.client.take_lease(image.id, owner="pod/a", purpose="restore")
    again = hasty.request(saved.url)
    state = again.state()
    assert (again.id, state["state"], state["mountpoint"]) == (image.id, "preparing", None)
    with hasty.client.lease(again.id, owner="pod/a", purpose="restore"):
        assert again.until_served()["worker_pid"] != pid
        assert saved.is_whole(again.reader(saved.pages).outcome())
        assert len(again.state()["leases"]) == 1
    assert pid not in hasty.process_ids()
    assert len(hasty.tape.until("image-gone", image=image.id)) == 1
    assert hasty.tape.of("image-failed") == hasty.tape.of("worker-lost") == []  # it went as it should
    again.until_unmounted()
    calm(hasty)


def test_who_releases_what_was_asked_for_again_gets_no_next_one(hasty: Daemon, saved: "Saved") -> None:
    image = hasty.image(saved.url)
    image.kill_worker(signal.SIGSTOP)
    image.until_unmounted()
    hasty.request(saved.url)
    hasty.client.release(image.id)
    image.until(lambda state: state["state"] == "gone", "its end")
    until(lambda: set(hasty.process_ids()) == {hasty.pid, hasty.spawner_pid()}, "the end of all workers")
    assert image.mounts() == []


def test_an_image_that_is_ended_by_force_is_served_to_who_asks_at_once(
    behind_proxy: Daemon, uploaded: "Saved", proxy: FaultProxy, calm: Calm
) -> None:
    image = behind_proxy.image(uploaded.url)
    hang = proxy.add(Rule(Hang(), times=None))
    reader = image.reader(uploaded.pages)
    image.until_open(reader)
    behind_proxy.client.release(image.id, force=True)
    again = behind_proxy.request(uploaded.url)
    assert reader.outcome().errors
    proxy.remove(hang)
    again.until_served()
    assert uploaded.is_whole(again.reader(uploaded.pages).outcome())
    behind_proxy.tape.until("image-serving", image=image.id, count=2)
    assert len(behind_proxy.tape.of("image-gone", image=image.id)) == 1
    calm(behind_proxy)


def test_a_preparation_that_was_given_up_begins_anew_for_who_asks_at_once(
    behind_proxy: Daemon, uploaded: "Saved", proxy: FaultProxy
) -> None:
    hang = proxy.add(Rule(Hang(), times=None, reads_only=False))
    image = behind_proxy.request(uploaded.url)
    until(lambda: proxy.hanging, "a worker that asks the store")
    behind_proxy.client.release(image.id, force=True)
    again = behind_proxy.request(uploaded.url)
    proxy.remove(hang)
    again.until_served()
    assert uploaded.is_whole(again.reader(uploaded.pages).outcome())


def test_whenever_an_image_is_asked_for_again_it_is_served(hasty: Daemon, saved: "Saved", calm: Calm) -> None:
    """Around the end of the grace, and of what follows."""
    dice = random.Random(1)
    right = FileHolder.digest(saved.pages, 3 * MIB, MIB)
    for _ in range(12):
        image, lease = leased(hasty, saved.url)
        holder = image.holder()
        assert (holder.open(), holder.read(3 * MIB, MIB), holder.close()) == ("done", right, "done")
        assert lease.is_held()
        lease.close()
        time.sleep(dice.uniform(0.2, 1.2))
    assert hasty.tape.of("image-gone")  # some of them were in time, and some were not
    assert hasty.tape.of("image-failed") == []
    calm(hasty)


def test_what_the_kernel_does_not_unmount_goes_on_whoever_asks(hasty: Daemon, saved: "Saved", calm: Calm) -> None:
    """It is tried again and again, and who asks may come at any moment of it."""
    image = hasty.image(saved.url)
    sit_in(image)
    for _ in range(150):
        again = hasty.image(saved.url)
        assert again.mountpoint == image.mountpoint
        time.sleep(0.01)
    assert saved.is_whole(again.reader(saved.pages).outcome())
    assert hasty.tape.of("image-gone") == []
    calm(hasty)


def test_an_image_whose_mount_somebody_has_detached_is_prepared_anew(hasty: Daemon, saved: "Saved", calm: Calm) -> None:
    image = hasty.image(saved.url)
    sit_in(image)  # so that its connection lives on
    subprocess.run(["umount", "--lazy", image.mountpoint], check=True)
    hasty.tape.until("image-gone", image=image.id)
    again = hasty.image(saved.url)
    assert saved.is_whole(again.reader(saved.pages).outcome())
    assert hasty.tape.of("image-failed") == []
    calm(hasty)


def test_the_leases_of_an_image_that_ends_under_them_end_with_it_and_are_told_of_once(
    hasty: Daemon, saved: "Saved"
) -> None:
    for way in ("detached", "by force"):
        image = hasty.image(saved.url)
        with hasty.client.lease(image.id, owner="pod/a", purpose="restore"):
            before = len(hasty.tape.of("image-gone", image=image.id))
            if way == "detached":
                subprocess.run(["umount", "--lazy", image.mountpoint], check=True)
            else:
                hasty.client.release(image.id, force=True)
            hasty.tape.until("image-gone", image=image.id, count=before + 1)
            assert hasty.client.image(image.id)["leases"] == []
    added, ended = (
        [event["facts"]["lease"] for event in hasty.tape.of(f"lease-{what}")] for what in ("added", "ended")
    )
    assert ended == added
    assert len(added) == 2
