"""The shipped unit under a real systemd: what its restarts, kills, failures and time-outs leave of the mounts."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bench.images import make_image
from streamd.daemon.fd_store import FD_STORE_MAX, NAME_MAX_CHARACTERS
from streamd.save.push import push
from streamd.store.opening import open_store
from tests.systemd.machine import wait_until

if TYPE_CHECKING:
    from tests.systemd.conftest import Service

_STORED = {"fuse-1": 1, "init-1": 1, "state-1": 1, "bare": 1}


def _restart(service: "Service") -> None:
    service.systemctl("restart")


def _sigkill(service: "Service") -> None:
    service.kill("KILL")


def _sigterm(service: "Service") -> None:
    service.kill("TERM")


def _reload_and_restart(service: "Service") -> None:
    service.machine.systemctl("daemon-reload")
    service.systemctl("restart")


def _reexecute_and_restart(service: "Service") -> None:
    service.machine.systemctl("daemon-reexec")
    service.systemctl("restart")


@pytest.mark.parametrize("end", [_restart, _sigkill, _sigterm, _reload_and_restart, _reexecute_and_restart])
def test_the_mount_its_descriptor_and_its_worker_outlive_the_supervisor(
    service: "Service", end: Callable[["Service"], None]
) -> None:
    first = service.start()
    assert first["names"] == {}
    assert first["flushed"]
    assert service.show("NFileDescriptorStore") == str(first["count"]) == "4"
    end(service)
    second = service.life(2)
    assert second["pid"] != first["pid"]
    assert second["names"] == _STORED
    assert second["connection"] == "EAGAIN"  # mounted, and nobody asks
    assert second["same_init"]
    assert second["worker"] == first["worker"]
    assert second["worker_lives"]
    assert not second["is_inheritable"]
    assert second["left_in_environment"] == []
    assert second["problems"] == []
    end(service)  # what came back stays stored
    assert service.life(3)["names"] == _STORED


def test_another_kill_mode_takes_the_worker_along(service: "Service") -> None:
    service.override("KillMode=mixed")
    assert "kill-mode" in service.start()["findings"]
    service.systemctl("restart")
    assert not service.life(2)["worker_lives"]


def test_a_unit_that_hangs_is_replaced_and_gets_its_descriptors_back(service: "Service") -> None:
    service.override("WatchdogSec=1s", "TimeoutAbortSec=1s")
    service.start()
    service.kill("STOP")
    second = service.life(2)
    assert "Watchdog timeout" in service.machine.log()
    assert second["names"] == _STORED
    assert second["worker_lives"]


def test_a_unit_that_pings_is_left_alone_by_the_watchdog(service: "Service") -> None:
    service.override("WatchdogSec=1s")
    service.start()

    def pinged_s() -> float:
        return int(service.show("WatchdogTimestampMonotonic")) / 1e6

    first_s = pinged_s()
    wait_until(lambda: pinged_s() > first_s + 3, "pings for three times the watchdog's time")
    assert service.show("NRestarts") == "0"


def test_starts_that_fail_again_and_again_keep_the_store(service: "Service") -> None:
    service.override("RestartSec=20ms")
    service.start()
    broken = service.file("broken")
    service.kill("KILL")
    failures = service.machine.place / "failures"
    # More than the five that systemd allows by default.
    wait_until(lambda: failures.exists() and failures.read_text().count("x") > 6, "failed starts")
    broken.unlink()
    second = service.life(2)
    assert second["names"] == _STORED
    assert second["worker_lives"]


def test_a_stop_empties_the_store_and_leaves_the_worker(service: "Service") -> None:
    worker = service.start()["worker"]
    service.systemctl("stop")
    assert service.show("ActiveState") == "inactive"
    assert service.show("NFileDescriptorStore") == "0"
    assert service.machine.run("cat", f"/proc/{worker}/comm") == "sleep"
    service.file("look")
    service.systemctl("start")  # beside it
    assert service.life(2)["names"] == {}


def test_a_full_store_of_the_longest_names_comes_back(service: "Service") -> None:
    service.file("fill")
    first = service.start()
    assert first["full"]
    assert first["count"] == FD_STORE_MAX == int(service.show("NFileDescriptorStore"))
    service.kill("KILL")
    second = service.life(2)
    assert second["names"] == _STORED | {"x" * NAME_MAX_CHARACTERS: FD_STORE_MAX - len(_STORED)}


def test_what_was_removed_does_not_come_back(service: "Service") -> None:
    service.file("remove")
    assert service.start()["count"] == 3
    service.systemctl("restart")
    assert service.life(2)["names"] == {name: 1 for name in _STORED if name != "bare"}


def test_an_open_file_is_stored_once_whatever_its_name(service: "Service") -> None:
    """As `fd_store` says: the manager drops the second without a word."""
    service.start()
    service.file("twice")
    service.systemctl("restart")
    assert service.life(2)["count"] == 5
    service.systemctl("restart")
    assert service.life(3)["names"] == _STORED


def test_a_worker_in_a_cgroup_of_its_own_outlives_the_supervisor_too(service: "Service") -> None:
    service.file("apart")
    first = service.start()
    service.systemctl("restart")
    assert service.life(2)["worker_lives"]
    assert service.machine.run("cat", f"{first['cgroup']}/cgroup.procs") == str(first["worker"])


def test_systemd_takes_the_settings_as_they_are_meant(service: "Service") -> None:
    service.start()
    meant = {"Delegate": "yes", "KillMode": "process", "LimitCORE": "0", "OOMPolicy": "continue", "WatchdogUSec": "30s"}
    assert {name: service.show(name) for name in meant} == meant


def test_the_unit_mounts_where_pid_1_sees_it(service: "Service") -> None:
    service.start()
    service.systemctl("restart")
    second = service.life(2)
    assert second["namespace"] == second["first_namespace"]
    assert second["units_mounts"] == ["/run/streamd-test"]
    assert second["first_mounts"] == 1


def test_the_shipped_unit_lacks_nothing_that_is_its_to_give(service: "Service") -> None:
    host = {"request-timeout", "no-resend", "no-sys-resource"}  # the kernel's and the container's
    assert set(service.start()["findings"]) <= host


def test_a_unit_that_lacks_things_is_told_so(service: "Service") -> None:
    service.file("look")
    service.override(
        "KillMode=control-group",
        "OOMPolicy=stop",
        "FileDescriptorStoreMax=0",
        "Restart=on-failure",
        "ManagedOOMPreference=none",
        "RuntimeDirectory=streamd",
        "PrivateMounts=yes",
        "[Unit]",
        "StartLimitIntervalSec=10s",
    )
    assert set(service.start()["findings"]) >= {
        "kill-mode",
        "oom-policy",
        "no-fd-store",
        "restart",
        "oomd",
        "runtime-directory",
        "mount-namespace",
        "start-limit",
    }


def test_a_unit_that_cannot_look_at_pid_1_is_told_so(service: "Service") -> None:
    service.file("look")
    service.override("CapabilityBoundingSet=~CAP_SYS_PTRACE")
    assert set(service.start()["findings"]) >= {"no-sys-ptrace", "mount-namespace-unknown"}


def test_the_status_is_one_line_of_text(service: "Service") -> None:
    life = service.start()
    assert service.show("StatusText") == f"life of {life['pid']} WATCHDOG=trigger"


def test_a_snapshot_is_served_under_the_units_restrictions(service: "Service", tmp_path: Path) -> None:
    """What a worker does, all of it by the real command, is within the system calls and capabilities of the unit."""
    image, store = tmp_path / "image", tmp_path / "store"
    make_image(image, 8 << 20, zero=0.1)
    push(image, open_store(f"file://{store}"), snapshot_id="small", push_id="p")
    config = service.file(
        "streamd.toml",
        f'log_directory = "{tmp_path}/logs"\n[cache]\ndirectory = "{tmp_path}/cache"\n',
    )
    mountpoint = tmp_path / "mnt"
    mountpoint.mkdir()
    service.file(
        "serve",
        json.dumps({"mountpoint": str(mountpoint), "config": str(config), "url": f"file://{store}/small"}),
    )
    life = service.start()
    _capabilities, no_new_privileges, seccomp = (line.split()[1] for line in life["restrictions"])
    assert (no_new_privileges, seccomp) == ("1", "2")  # they are in force
    assert life.get("mount_failed") is None
    assert life["digest"] == hashlib.sha256((image / "pages.img").read_bytes()).hexdigest()
