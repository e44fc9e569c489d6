"""Mount, read, unmount, again and again: by commands in the background, and by the daemon. Nothing stays or grows."""

import json
import os
import signal
import subprocess
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench.daemons import Daemon
from bench.event_tape import until
from bench.images import make_image
from bench.mounts import LIMIT_S, Mounts
from bench.report import anonymous_bytes
from streamd.fuse import mountinfo
from streamd.save.push import push
from streamd.store.opening import open_store

if TYPE_CHECKING:
    from tests.stress.conftest import Snapshot


def test_rounds_of_mount_and_umount_leave_nothing(mounts: Mounts, snapshot: "Snapshot", is_full: bool) -> None:
    mountpoint = mounts.mountpoint()
    before = _host_facts(mounts)
    for _ in range(30 if is_full else 2):
        result = mounts.run("mount", snapshot.file_url, mountpoint, "--json")
        assert result.returncode == 0, result.stderr
        facts = json.loads(result.stdout)
        assert Path(facts["log"]).stat().st_mode & 0o777 == 0o600
        compared = subprocess.run(["cmp", mountpoint / "pages.img", snapshot.pages], timeout=LIMIT_S)
        assert compared.returncode == 0
        assert mounts.run("umount", mountpoint).returncode == 0
        assert not _is_running(facts["pid"])
        assert _host_facts(mounts) == before
    assert os.listdir(mountpoint) == []
    # One log for a mountpoint, not for a mount; of records, one a mount.
    assert set(os.listdir(mounts.base / "log")) == {Path(facts["log"]).name, "records"}


def _is_running(pid: int) -> bool:
    """Whether a process runs; one that has ended may wait for PID 1 to notice."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def _host_facts(mounts: Mounts) -> dict[str, object]:
    run = mounts.run_directory / "mounts"
    return {
        "mounts": [entry.mountpoint for entry in mountinfo.read() if entry.mountpoint.startswith(str(mounts.base))],
        "sockets": os.listdir(run) if run.exists() else [],
    }


@dataclass(frozen=True, slots=True)
class _Has:
    """What a process has."""

    descriptors: int
    threads: int
    anonymous_bytes: int


# What may come and go: idle threads, connections; what is kept of the past grows to a bound, in the first rounds.
_SLACK = _Has(8, 8, 4 << 20)


def _what_it_has(pid: int) -> _Has:
    return _Has(len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task")), anonymous_bytes(pid))


def test_rounds_of_the_daemon_leave_nothing_and_grow_by_nothing(tmp_path: Path, is_full: bool) -> None:
    """Each round is another tenant's image; every fifth loses its worker while a file of it is open."""
    rounds = 1000 if is_full else 20
    make_image(tmp_path / "image", 1 << 20, zero=0.1)
    pages = tmp_path / "image" / "pages.img"
    store = open_store(f"file://{tmp_path}/store")
    push(tmp_path / "image", store, snapshot_id="small", push_id="p")
    seen: list[tuple[_Has, _Has]] = []
    with Daemon(cache='max_bytes = "16MiB"\nrecent_s = 0') as daemon:
        for number in range(rounds):
            image = daemon.image(f"{store.url}/small", tenant=f"tenant-{number}")
            if number % 5 == 4:
                holder = image.holder()
                assert holder.open() == "done"
                daemon.send(image.worker_pid(), signal.SIGKILL)
                assert holder.read(0, 4096) == holder.digest(pages, 0, 4096)
                holder.end()
            outcome = image.reader(pages, slots=4).outcome()
            assert outcome.is_clean
            assert outcome.right_bytes == pages.stat().st_size
            image.until(lambda state: not state["openers"], "no opener")
            daemon.client.release(image.id)
            daemon.tape.until("image-gone", image=image.id)
            until(lambda: len(daemon.process_ids()) == 2, "the end of its worker")
            assert image.mounts() == []
            seen.append((_what_it_has(daemon.pid), _what_it_has(daemon.spawner_pid())))
        assert daemon.complaints() == []
        assert daemon.tape.of("image-failed") == []
        assert len(daemon.tape.of("worker-replaced")) == rounds // 5
        assert os.listdir(daemon.run_directory / "images") == []
    early, late = seen[rounds // 4 : rounds // 2], seen[-rounds // 4 :]
    for which, name in enumerate(("supervisor", "spawner")):
        first, last = (
            [max(column) for column in zip(*(astuple(s[which]) for s in part), strict=True)] for part in (early, late)
        )
        print(f"{name}: descriptors, threads, bytes {first} after {rounds // 2} rounds, {last} after {rounds}")
        assert all(b <= a + slack for a, b, slack in zip(first, last, astuple(_SLACK), strict=True)), (name, seen)
