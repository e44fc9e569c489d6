"""Workers run as a user of their own: what they can do is enough to serve, and no more; root does there as they do.

The user is a number, so that no account is made. What it must reach lies below no directory of pytest's, which are
root's alone; nor need it reach this interpreter, which may be below /root.
"""

import contextlib
import os
import signal
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from bench.daemons import Daemon, ServedImage
from bench.emulator import Emulator
from bench.event_tape import until
from bench.fault_proxy import FaultProxy
from bench.images import make_image
from bench.mounts import Mounts
from streamd.config import CacheConfig, Config, ConfigError, DaemonConfig
from streamd.daemon.worker_user import WorkerUser, as_owner, find_worker_user, prepare_worker_user
from streamd.save.push import push
from streamd.serve.cache_directory import open_cache
from streamd.serve.node_cache import CacheUnusable
from streamd.serve.plan import Layout
from streamd.snapshot.names import PAGES
from streamd.store.catalog import open_snapshot
from streamd.store.opening import open_store

if TYPE_CHECKING:
    from tests.daemon.conftest import Saved

Calm = Callable[[Daemon], None]

UID, GID = 64123, 64124
SETTING = f'[daemon]\nworker_user = "{UID}:{GID}"'
NO_CAPABILITIES = ["0" * 16]
RIGHTS = {
    "Uid": [str(UID)] * 4,
    "Gid": [str(GID)] * 4,
    "Groups": [],
    "CapPrm": NO_CAPABILITIES,
    "CapEff": NO_CAPABILITIES,
    "CapBnd": NO_CAPABILITIES,
    "NoNewPrivs": ["1"],
    "Seccomp": ["2"],
}


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that everybody reaches."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o711)
        yield Path(name)


@pytest.fixture
def node(proxy: FaultProxy) -> Iterator[Daemon]:
    """Start a daemon whose workers are nobody special, and which asks the emulator through the proxy."""
    daemon = Daemon(SETTING, env={"STORAGE_EMULATOR_HOST": proxy.address})
    daemon.base.chmod(0o711)
    with daemon as running:
        yield running


def rights(pid: int) -> dict[str, list[str]]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    facts = {key: value.split() for key, _, value in (line.partition(":") for line in lines)}
    return {name: facts[name] for name in RIGHTS}


def owners(directory: Path) -> set[tuple[int, int]]:
    found = [directory, *directory.rglob("*")]
    return {(info.st_uid, info.st_gid) for info in (path.stat(follow_symlinks=False) for path in found)}


def refused_to_that_user(*command: str) -> bool:
    done = subprocess.run(command, user=UID, group=GID, extra_groups=[], capture_output=True, text=True)
    return done.returncode != 0 and "Permission denied" in done.stderr


# In a daemon


def test_a_worker_has_no_rights_and_serves_through_deaths_and_lives(
    node: Daemon, uploaded: "Saved", proxy: FaultProxy, calm: Calm
) -> None:
    image = node.image(uploaded.url)
    half = uploaded.pages.stat().st_size // 2
    assert image.reader(uploaded.pages, end=half).outcome().is_clean
    image.until_cached(uploaded.resident_bytes(half))
    assert rights(image.worker_pid()) == RIGHTS
    image.until_replaced(image.kill_worker())
    assert uploaded.is_whole(image.reader(uploaded.pages).outcome())
    assert rights(image.worker_pid()) == RIGHTS
    state = image.until(lambda state: state["progress"]["resident_bytes"] == state["progress"]["total_bytes"], "all")
    assert state["cache_problem"] is None
    assert owners(node.cache_directory) == {(UID, GID)}
    listed: Any = node.client.cache()["images"]
    assert [bool(cached["owner"]) for cached in listed] == [True]
    node.client.release(image.id)
    image.until_unmounted()
    records = node.base / "log" / "records"
    until(lambda: list(records.glob("*.record")), "the worker's record")
    assert owners(records) == {(UID, GID)}
    # The next life has the same cache.
    node.stop(signal.SIGTERM)
    node.start()
    again = node.image(uploaded.url)
    assert uploaded.is_whole(again.reader(uploaded.pages).outcome())
    assert proxy.read_bytes <= 1.02 * uploaded.stored_bytes
    calm(node)


def test_root_serves_what_workers_have_cached_and_they_what_root_has(
    node: Daemon, uploaded: "Saved", emulator: Emulator, proxy: FaultProxy
) -> None:
    with Mounts(SETTING) as mounts:
        mounts.base.chmod(0o711)
        mounts.config.write_text(mounts.config.read_text().replace(f"{mounts.base}/log", f"{node.base}/log"))
        options = ["--cache-dir", str(node.cache_directory)]
        env = {"STORAGE_EMULATOR_HOST": proxy.address}
        cache = ("cache", "ls", "--json", *options)

        def used_by_a_mount() -> tuple[str, bool]:
            with mounts.start(uploaded.url, options=options, env=env, prefetch="all") as mount:
                assert uploaded.is_whole(mount.reader(uploaded.pages).outcome())
                if mount.ready["mode"] == "fuse":
                    mount.until(lambda status: status["cached_chunks"] + status["zero_chunks"] == status["chunks"])
                    until(lambda: list(node.cache_directory.glob("images/*/sealed")), "the seal")
                return str(mount.ready["mode"]), '"owner": "the mount' in mounts.run(*cache).stdout

        # Its first half by a worker, the second by root, and then all of it by both.
        image = node.image(uploaded.url)
        half = uploaded.pages.stat().st_size // 2
        assert image.reader(uploaded.pages, end=half).outcome().is_clean
        image.until_cached(uploaded.resident_bytes(half))
        node.client.release(image.id)
        image.until_unmounted()
        until(lambda: image.state()["state"] == "gone", "the worker's end")
        assert used_by_a_mount() == ("fuse", True)
        assert used_by_a_mount() == ("warm", True)
        assert owners(node.cache_directory) == {(UID, GID)}
        again = node.image(uploaded.url)
        assert again.state()["state"] == "warm"
        assert rights(again.worker_pid()) == RIGHTS
        assert uploaded.is_whole(again.reader(uploaded.pages).outcome())
        assert again.state()["cache_problem"] is None
        assert proxy.read_bytes <= 1.02 * uploaded.stored_bytes
        node.client.release(again.id)
        again.until_unmounted()
        until(lambda: again.state()["state"] == "gone", "the worker's end")
        assert mounts.run("cache", "verify", *options).returncode == 0
        assert owners(node.cache_directory) == {(UID, GID)}
        assert mounts.run("cache", "clear", *options).returncode == 0
        assert list((node.cache_directory / "images").iterdir()) == []
        records = node.base / "log" / "records"
        until(lambda: len(list(records.glob("*.record"))) == 4, "records of two workers and of two mounts")
        assert owners(records) == {(UID, GID)}


def test_a_worker_of_the_same_user_can_not_be_looked_into(node: Daemon, uploaded: "Saved") -> None:
    one, other = (node.image(uploaded.url, tenant=tenant).worker_pid() for tenant in ("one", "two"))
    assert one != other
    with subprocess.Popen(["sleep", "60"], user=UID, group=GID, extra_groups=[]) as ordinary:
        assert not refused_to_that_user("cat", f"/proc/{ordinary.pid}/environ"), "else it proves nothing"
        ordinary.kill()
    for name in ("mem", "environ", "maps", "auxv", "io"):
        assert refused_to_that_user("cat", f"/proc/{one}/{name}"), name
    for name in ("fd", "fdinfo", "map_files"):
        assert refused_to_that_user("ls", f"/proc/{one}/{name}"), name


def credentials_of(node: Daemon, uploaded: "Saved", credentials: dict[str, object]) -> ServedImage:
    return ServedImage(node, str(node.client.request_image(uploaded.url, credentials=credentials)["id"]))


def test_a_token_file_of_root_alone_is_read_for_a_worker_that_could_not(
    node: Daemon, uploaded: "Saved", place: Path, calm: Calm
) -> None:
    token = place / "token"
    token.touch(0o600)
    token.write_text("secret-of-a-tenant")
    assert refused_to_that_user("cat", str(token))
    image = credentials_of(node, uploaded, {"token_file": str(token)})
    image.until_served()
    image.until_replaced(image.kill_worker())
    assert uploaded.is_whole(image.reader(uploaded.pages).outcome())
    assert rights(image.worker_pid()) == RIGHTS
    helpers = [pid for pid in node.process_ids() if Path(f"/proc/{pid}/comm").read_text() == "streamd-token\n"]
    until(lambda: len([pid for pid in helpers if pid in node.process_ids()]) == 1, "the end of the first one's")
    image.until(lambda state: not state["openers"], "no opener")
    node.client.release(image.id)
    image.until_unmounted()
    until(lambda: sorted(node.process_ids()) == sorted([node.pid, node.spawner_pid()]), "the end of all others")
    token.chmod(0o644)
    broken = credentials_of(node, uploaded, {"token_file": str(token)})
    until(lambda: broken.state()["state"] == "failed", "a refusal")
    assert broken.state()["last_error"]["kind"] == "credentials"
    assert "chmod 600" in broken.state()["last_error"]["message"]
    assert "secret-of-a-tenant" not in node.log_path.read_text()
    calm(node)


def test_a_token_command_runs_as_root_and_its_worker_may_run_nothing(
    node: Daemon, uploaded: "Saved", place: Path
) -> None:
    program, ran = place / "print-token", place / "ran"
    program.write_text(f"#!/bin/sh\ngrep -E '^(Uid|CapEff|NoNewPrivs|Seccomp):' /proc/self/status >{ran}\necho token\n")
    program.chmod(0o700)
    image = credentials_of(node, uploaded, {"command": [str(program)]})
    image.until_served()
    assert [line.split()[1] for line in ran.read_text().splitlines()] == ["0", NO_CAPABILITIES[0], "1", "2"]
    assert rights(image.worker_pid()) == RIGHTS


def test_a_worker_whose_tokens_can_not_be_fetched_any_more_is_replaced(
    node: Daemon, uploaded: "Saved", place: Path
) -> None:
    token = place / "token"
    token.touch(0o600)
    token.write_text("token")
    image = credentials_of(node, uploaded, {"token_file": str(token)})
    image.until_served()
    pid = image.worker_pid()
    for helper in node.process_ids():
        if Path(f"/proc/{helper}/comm").read_text() == "streamd-token\n":
            node.send(helper, signal.SIGKILL)
    image.until_replaced(pid)
    assert uploaded.is_whole(image.reader(uploaded.pages).outcome())


def test_a_store_in_a_directory_must_be_the_workers_to_read_and_who_asks_is_told(node: Daemon, place: Path) -> None:
    make_image(place / "image", 1 << 20)
    url = f"file://{place}/store"
    push(place / "image", open_store(url), snapshot_id="small", push_id="p")
    image = node.request(url + "/small")
    until(lambda: image.state()["state"] == "failed", "a refusal")
    error = image.state()["last_error"]
    assert (error["kind"], error["exit_code"]) == ("not-permitted", 5)
    assert f"uid {UID}, gid {GID}" in error["message"]
    assert url in error["message"]
    subprocess.run(["chmod", "-R", "a+rX", place / "store"], check=True)
    served = node.image(url + "/small")
    outcome = served.reader(place / "image" / PAGES).outcome()
    assert outcome.is_clean
    assert outcome.right_bytes == 1 << 20


# Whose directories are


def config(place: Path) -> Config:
    return Config(
        cache=CacheConfig(directory=place / "cache"),
        daemon=DaemonConfig(worker_user=f"{UID}:{GID}"),
        log_directory=place / "log",
    )


@pytest.fixture
def begun(place: Path, saved: "Saved") -> Callable[[], Path]:
    """Give what opens, or begins, an image in a cache at `place`, and gives its directory."""
    data = open_snapshot(open_store(saved.url.rpartition("/")[0]), "small").data
    layout = Layout(saved.manifest.table)

    def begin() -> Path:
        with contextlib.closing(
            open_cache(place / "cache", data, layout, source="s", owner="a test", max_bytes=1 << 30)
        ) as cache:
            return cache.path

    return begin


def test_who_workers_run_as() -> None:
    assert find_worker_user(DaemonConfig(worker_user="")) is None
    assert find_worker_user(DaemonConfig(worker_user=f"{UID}:{GID}")) == WorkerUser(UID, GID)
    assert find_worker_user(DaemonConfig(worker_user="nobody")) == WorkerUser(65534, 65534)
    for user in ("root", "0:1", "1:0", "nobody-of-that-name"):
        with pytest.raises(ConfigError):
            find_worker_user(DaemonConfig(worker_user=user))


def test_directories_of_roots_become_the_workers_once(place: Path, begun: Callable[[], Path]) -> None:
    image = begun()
    settings = config(place)
    assert prepare_worker_user(settings) == (WorkerUser(UID, GID), [])
    assert owners(place / "cache") == owners(place / "log" / "records") == {(UID, GID)}
    assert (place / "log").stat().st_uid == 0
    before = (image / "head").stat().st_ctime_ns
    (place / "cache").chmod(0o700)
    os.chown(place / "cache", 0, 0)  # as who sets the machine's directories up again does
    assert prepare_worker_user(settings)[1] == []
    assert (image / "head").stat().st_ctime_ns == before


def test_what_can_not_be_given_is_said(place: Path) -> None:
    settings = config(place)
    (place / "cache").mkdir(0o700)
    os.chown(place / "cache", 65534, 65534)
    place.chmod(0o700)
    _, problems = prepare_worker_user(settings)
    assert len(problems) == 2
    assert all(f"workers (uid {UID}) can't use {place}" in problem for problem in problems)
    assert (place / "cache").stat().st_uid == 65534


def test_a_directory_that_is_not_ours_is_not_opened_to_the_workers(place: Path) -> None:
    settings = config(place / "private")
    (place / "private").mkdir(0o700)
    _, problems = prepare_worker_user(settings)
    assert len(problems) == 2
    assert stat.S_IMODE((place / "private").stat().st_mode) == 0o700
    assert stat.S_IMODE((place / "private" / "log").stat().st_mode) == 0o710


def test_nothing_elsewhere_is_given_away(place: Path) -> None:
    outside = place / "outside"
    outside.write_text("root's")
    (place / "cache" / "images").mkdir(mode=0o700, parents=True)
    (place / "cache").chmod(0o700)
    (place / "cache" / "link").symlink_to(outside)
    (place / "cache" / "name").hardlink_to(outside)
    prepare_worker_user(config(place))
    assert (place / "cache" / "images").stat().st_uid == UID
    assert outside.stat().st_uid == 0


@pytest.mark.parametrize("name", ["promised", "lock", "head", "resident", "."])
def test_a_worker_that_was_broken_into_leads_root_nowhere(place: Path, begun: Callable[[], Path], name: str) -> None:
    image = begun()
    settings = config(place)
    prepare_worker_user(settings)
    outside = place / "outside"
    outside.mkdir(0o700)
    (outside / "secret").write_text("root's")
    if name == ".":
        image.rename(image.with_name("away"))
        image.symlink_to(outside)
    else:
        (image / name).unlink()
        (image / name).symlink_to(outside / "secret")
    with contextlib.suppress(CacheUnusable), as_owner(place / "cache", settings):  # or it begins anew
        begun()
    assert [path.name for path in outside.iterdir()] == ["secret"]
    assert (outside / "secret").read_text() == "root's"
    assert outside.stat().st_uid == (outside / "secret").stat().st_uid == 0
