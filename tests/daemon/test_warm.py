"""An image that is whole on the node and sealed is bound, not served: by the daemon, whose workers only hold it."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bench.daemons import Daemon, ServedImage
from bench.event_tape import until
from bench.fault_proxy import FaultProxy, Rule, Status
from bench.mount_users import FileHolder
from streamd.daemon.records import latest_record, read_record
from streamd.daemon.relay import RelayedError
from streamd.fuse import mountinfo, mounting
from streamd.report.summary import headlines
from streamd.serve.cache_directory import clear_images, list_images
from streamd.serve.node_cache import FILES, SEALED, SEALED_MODE
from streamd.snapshot.names import IMAGE_FILES

if TYPE_CHECKING:
    from tests.daemon.conftest import Saved

Calm = Callable[[Daemon], None]

MIB = 1 << 20


@pytest.fixture
def small(sixteen: list["Saved"]) -> "Saved":
    """A snapshot of 4 MiB."""
    return sixteen[0]


def cached(daemon: Daemon) -> Path:
    """The one image in the cache."""
    (path,) = (daemon.cache_directory / "images").iterdir()
    return path


def end(image: ServedImage) -> None:
    """Release an image, once those who had it open are seen to have closed it, and wait until it is gone."""
    before = len(image.daemon.tape.of("image-gone", image=image.id))
    image.until(lambda state: not state["openers"], "nobody who has it open")
    image.daemon.client.release(image.id)
    image.daemon.tape.until("image-gone", image=image.id, count=before + 1)


def load(daemon: Daemon, url: str) -> Path:
    """Have a worker bring the whole image into the cache, and seal it; give its place there."""
    image = daemon.image(url, prefetch="all")
    assert image.state()["state"] == "serving"
    assert [entry.filesystem for entry in image.mounts()] == [mounting.FILESYSTEM]
    until(lambda: (cached(daemon) / SEALED).exists(), "the seal")
    end(image)
    return cached(daemon)


def warm(daemon: Daemon, url: str) -> ServedImage:
    """Load an image, and ask for it again."""
    load(daemon, url)
    return again(daemon, url)


def again(daemon: Daemon, url: str) -> ServedImage:
    """Ask for an image that must be warm now."""
    image = daemon.image(url)
    assert image.state()["state"] == "warm", daemon.tail()
    return image


def is_right(image: ServedImage, saved: "Saved") -> bool:
    return saved.is_whole(image.reader(saved.pages, slots=8).outcome())


def read_all(holder: FileHolder, saved: "Saved") -> bool:
    """Whether somebody who has pages.img open gets the right bytes."""
    size = saved.pages.stat().st_size
    return holder.read(0, size) == FileHolder.digest(saved.pages, 0, size)


def test_an_image_that_is_whole_is_bound_for_the_next_who_asks_and_nobody_serves_it(
    daemon: Daemon, small: "Saved", calm: Calm
) -> None:
    image = warm(daemon, small.url)
    [entry] = image.mounts()
    assert entry.filesystem != mounting.FILESYSTEM
    assert entry.options >= {"ro", "nosuid", "nodev", "noexec"}
    assert entry.root.endswith(f"/images/{cached(daemon).name}/{FILES}")
    assert sorted(os.listdir(image.mountpoint)) == sorted(IMAGE_FILES)
    until(lambda: record_modes(daemon).count("warm") == 1, "a record of the first holder")
    daemon.send(image.worker_pid(), signal.SIGSTOP)  # the disk answers
    assert is_right(image, small)
    image.until_replaced(image.worker_pid())
    state = image.until(lambda state: state["progress"]["total_bytes"], "its size")
    assert state["progress"]["resident_bytes"] == state["progress"]["total_bytes"]
    assert state["bytes_by_tier"].get("origin", 0) == 0
    assert [event["facts"]["mode"] for event in daemon.tape.of("image-serving")] == ["fuse", "warm"]
    [shown] = list_images(daemon.cache_directory)
    assert shown.owner is not None
    until(lambda: record_modes(daemon).count("warm") == 2, "a record of each holder")
    record = read_record(latest_record(daemon.base / "log" / "records"))
    assert (record.head.mountpoint, len(record.reads)) == (str(image.mountpoint), 0)
    assert any("reads bypass streamd" in line for line in headlines(record))
    end(image)
    assert not image.mounts()
    assert list_images(daemon.cache_directory)[0].owner is None
    end(again(daemon, small.url))  # it changed nothing
    calm(daemon)


def record_modes(daemon: Daemon) -> list[str]:
    directory = daemon.base / "log" / "records"
    return [read_record(path).head.facts["mode"] for path in directory.glob("*.record")]


def test_a_warm_image_stays_while_there_is_a_lease_or_an_open_file_and_goes_then(
    daemon: Daemon, small: "Saved"
) -> None:
    image = warm(daemon, small.url)
    first = daemon.client.take_lease(image.id, owner="pod/a", purpose="restore")
    second = daemon.client.take_lease(daemon.image(small.url).id, owner="pod/b", purpose="restore")
    assert len(image.mounts()) == 1
    first.close()
    image.until(lambda state: [lease["owner"] for lease in state["leases"]] == ["pod/b"], "one lease")
    with pytest.raises(RelayedError) as refused:
        daemon.client.release(image.id)
    assert refused.value.kind == "in-use"
    holder = image.holder()
    assert holder.open() == "done"
    second.close()
    image.until(lambda state: not state["leases"], "no lease")
    daemon.client.release(image.id)
    image.until(lambda state: state["state"] == "draining", "that it ends")
    assert again(daemon, small.url).id == image.id  # it is wanted after all
    assert read_all(holder, small)
    assert len(image.mounts()) == 1
    daemon.client.release(image.id)
    image.until(lambda state: state["state"] == "draining", "that it ends")
    assert holder.close() == "done"
    image.until_unmounted()
    daemon.tape.until("image-gone", image=image.id, count=2)
    until(lambda: set(daemon.process_ids()) == {daemon.pid, daemon.spawner_pid()}, "the end of its worker")


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_worker_may_die_while_its_image_is_warm_and_readers_notice_nothing(
    daemon: Daemon, small: "Saved", calm: Calm, how: str
) -> None:
    image = warm(daemon, small.url)
    before = image.mounts()
    holder = image.holder()
    assert holder.open() == "done"
    number = signal.SIGSTOP if how == "stopped" else signal.SIGKILL
    for restarts in (1, 2):
        pid = image.kill_worker(number)
        assert is_right(image, small)
        daemon.tape.until("worker-replaced", image=image.id, count=restarts)
        assert image.worker_pid() != pid
    assert image.mounts() == before
    state = image.state()
    assert (state["state"], state["restarts"], state["cache_problem"]) == ("warm", 2, None)
    assert read_all(holder, small)
    [shown] = list_images(daemon.cache_directory)
    assert f"(pid {image.worker_pid()})" in str(shown.owner)  # the next one holds its place in the cache, too
    assert holder.close() == "done"
    end(image)
    calm(daemon)


@pytest.mark.parametrize("is_warm", [True, False], ids=["warm", "served"])
def test_an_image_goes_on_when_its_place_in_the_cache_is_anothers_before_the_next_worker_is_there(
    daemon: Daemon, small: "Saved", calm: Calm, is_warm: bool
) -> None:
    image = warm(daemon, small.url) if is_warm else daemon.image(small.url)
    other = daemon.run("flock", "--no-fork", cached(daemon) / "lock", "sleep", "1000").process
    until(lambda: "lock" in Path(f"/proc/{other.pid}/wchan").read_text(), "who waits for the lock")
    image.until_replaced(image.kill_worker())
    state = image.until(lambda state: state["cache_problem"], "what it says")
    assert state["state"] == ("warm" if is_warm else "serving")
    assert is_right(image, small)
    other.kill()
    other.wait()
    removed, left = clear_images(daemon.cache_directory)
    assert [len(removed), len(left)] == ([0, 1] if is_warm else [1, 0])  # who opens a file next finds it
    end(image)
    calm(daemon)


@pytest.mark.parametrize("is_used", [True, False], ids=["used", "unused"])
def test_a_warm_image_goes_on_when_the_supervisor_is_killed_and_ends_when_nobody_uses_it(
    daemon: Daemon, small: "Saved", is_used: bool
) -> None:
    image = warm(daemon, small.url)
    before, pid = image.mounts(), image.worker_pid()
    holder = image.holder()
    if is_used:
        assert holder.open() == "done"
    daemon.stop(signal.SIGKILL)
    assert image.mounts() == before
    assert pid in daemon.process_ids()
    daemon.start()
    if is_used:
        assert image.mounts() == before
        assert read_all(holder, small)
        assert holder.close() == "done"
        image.until_unmounted()
    else:
        assert not image.mounts()
    until(lambda: pid not in daemon.process_ids(), "the end of its worker")
    assert is_right(again(daemon, small.url), small)


def test_a_bind_whose_daemon_was_killed_with_its_workers_is_cleaned_up_and_no_other(
    daemon: Daemon, small: "Saved", tmp_path: Path
) -> None:
    image = warm(daemon, small.url)
    others = daemon.run_directory / "images" / "others"
    others.mkdir()
    mounted = daemon.run("mount", "--bind", tmp_path, others)
    assert mounted.result().returncode == 0
    try:
        pid = image.worker_pid()
        daemon.stop(signal.SIGKILL)
        daemon.send(pid, signal.SIGKILL)
        assert len(image.mounts()) == 1
        daemon.start()
        image.until_unmounted()
        assert mountinfo.topmost(str(others)) is not None
        assert is_right(again(daemon, small.url), small)
    finally:
        daemon.run("umount", others).result()


def test_a_warm_image_that_is_released_by_force_is_read_on_by_who_has_it_open(
    daemon: Daemon, small: "Saved", calm: Calm
) -> None:
    image = warm(daemon, small.url)
    holder = image.holder()
    assert holder.open() == "done"
    daemon.client.release(image.id, force=True)
    daemon.tape.until("image-gone", image=image.id, count=2)
    assert not image.mounts()
    (removed, _) = clear_images(daemon.cache_directory)
    assert len(removed) == 1
    assert read_all(holder, small)
    assert holder.close() == "done"
    calm(daemon)


def test_a_warm_image_that_somebody_else_unmounts_ends(daemon: Daemon, small: "Saved", calm: Calm) -> None:
    image = warm(daemon, small.url)
    assert daemon.run("umount", image.mountpoint).result().returncode == 0
    daemon.tape.until("image-gone", image=image.id, count=2)
    end(again(daemon, small.url))
    calm(daemon)


def bend_a_byte(image: Path) -> None:
    path = image / FILES / "pages.img"
    last = len(path.read_bytes().rstrip(b"\0")) - 1
    with path.open("r+b") as file:
        file.seek(last)
        bent = file.read(1)[0] ^ 0x80
        file.seek(last)
        file.write(bytes([bent]))


def other_boot(image: Path) -> None:
    record = json.loads((image / SEALED).read_bytes())
    (image / SEALED).write_text(json.dumps(record | {"boot_id": "00000000-0000-0000-0000-000000000000"}))


BREAKS: dict[str, Callable[[Path], object]] = {
    "a file was changed": bend_a_byte,
    "the machine was started anew": other_boot,
    "it is not sealed": lambda image: (image / SEALED).unlink(),
    "a mode was changed": lambda image: (image / FILES / "pages.img").chmod(0o600),
}


@pytest.mark.parametrize("name", BREAKS)
def test_whatever_breaks_the_seal_the_image_is_served_and_right_and_can_be_sealed_again(
    daemon: Daemon, small: "Saved", calm: Calm, name: str
) -> None:
    place = load(daemon, small.url)
    BREAKS[name](place)
    image = daemon.image(small.url)
    assert image.state()["state"] == "serving"
    assert [entry.filesystem for entry in image.mounts()] == [mounting.FILESYSTEM]
    assert is_right(image, small)
    if name == "a file was changed":  # what a read-back finds is mended by who reads it, and sealed by the next one
        until(lambda: "the image was not sealed" in daemon.log_path.read_text(), "the read-back")
        end(image)
        load(daemon, small.url)
        image = again(daemon, small.url)
        assert is_right(image, small)
    else:
        until(lambda: (place / SEALED).exists(), "the seal")
    # Who has them open natively must never read a hole (`NodeCache.evict`).
    assert {(place / FILES / name).stat().st_mode & 0o777 for name in IMAGE_FILES} == {SEALED_MODE}
    end(image)
    end(again(daemon, small.url))
    calm(daemon)


def test_what_can_not_be_bound_is_served(daemon: Daemon, small: "Saved", calm: Calm) -> None:
    """Here because the bind would not be known for one of ours: the files are another mount already."""
    place = load(daemon, small.url)
    elsewhere = daemon.base / "elsewhere"
    (place / FILES).rename(elsewhere)
    (place / FILES).mkdir()
    assert daemon.run("mount", "--bind", elsewhere, place / FILES).result().returncode == 0
    try:
        image = daemon.image(small.url)
        assert (image.state()["state"], image.state()["restarts"]) == ("serving", 0)
        assert [entry.filesystem for entry in image.mounts()] == [mounting.FILESYSTEM]
        assert any("can't be bound" in line.get("event", "") for line in daemon.log())
        assert is_right(image, small)
        end(image)
    finally:
        daemon.run("umount", place / FILES).result()
    calm(daemon)


def test_what_a_worker_has_sealed_its_successor_need_not_read_back(daemon: Daemon, small: "Saved", calm: Calm) -> None:
    image = daemon.image(small.url, prefetch="all")
    seal = cached(daemon) / SEALED
    until(seal.exists, "the seal")
    number = seal.stat().st_ino
    image.until_replaced(image.kill_worker())
    until(lambda: [line for line in daemon.log() if "image sealed" in line.get("event", "")][1:], "its look")
    assert seal.stat().st_ino == number
    assert is_right(image, small)
    end(image)
    end(again(daemon, small.url))
    calm(daemon)


@pytest.fixture
def strict(proxy: FaultProxy) -> Iterator[Daemon]:
    """Start a daemon that asks the emulator through the proxy, and believes a refusal after a second."""
    env = {"STORAGE_EMULATOR_HOST": proxy.address}
    with Daemon(policy='hold_s = "1s"', env=env) as running:
        yield running


def request(daemon: Daemon, url: str, tenant: str, token: Path) -> ServedImage:
    """Ask for an image as a tenant."""
    answer = daemon.client.request_image(url, tenant=tenant, prefetch="all", credentials={"token_file": str(token)})
    return ServedImage(daemon, str(answer["id"]))


def write_token(path: Path, token: str) -> None:
    new = path.with_suffix(".new")
    new.touch(mode=0o600)
    new.write_text(json.dumps({"access_token": token, "expires_in": 3600}))
    new.rename(path)


def warm_for(daemon: Daemon, url: str, tenant: str, token: Path) -> ServedImage:
    """Load an image for a tenant, and ask for it again."""
    image = request(daemon, url, tenant, token)
    image.until_served()
    until(lambda: list((daemon.cache_directory / "images").glob(f"*/{SEALED}")), "the seal")
    end(image)
    image = request(daemon, url, tenant, token)
    image.until_served()
    assert image.state()["state"] == "warm"
    return image


def test_a_tenant_who_may_not_read_a_snapshot_gets_no_warm_image_and_another_tenants_bytes_are_not_its(
    strict: Daemon, uploaded: "Saved", proxy: FaultProxy, calm: Calm
) -> None:
    token = strict.base / "token"
    write_token(token, "one")
    end(warm_for(strict, uploaded.url, "one", token))
    other = request(strict, uploaded.url, "two", token)
    other.until_served()
    assert other.state()["state"] == "serving"
    proxy.add(Rule(Status(403), times=None, reads_only=False))
    refused = request(strict, uploaded.url, "one", token)
    state = refused.until(lambda state: state["state"] != "preparing", "its refusal")
    assert (state["state"], state["last_error"]["exit_code"]) == ("failed", 5)
    assert not refused.mounts()
    calm(strict)


def test_a_warm_image_ends_when_its_tenant_may_not_read_the_snapshot_any_more(
    strict: Daemon, uploaded: "Saved", proxy: FaultProxy, calm: Calm
) -> None:
    token = strict.base / "token"
    write_token(token, "one")
    image = warm_for(strict, uploaded.url, "one", token)
    proxy.add(Rule(Status(403), times=None, reads_only=False))
    write_token(token, "two")
    state = image.until(lambda state: state["state"] == "failed", "its end")
    assert "may not read the snapshot any more" in state["last_error"]["message"]
    assert not image.mounts()
    calm(strict)
