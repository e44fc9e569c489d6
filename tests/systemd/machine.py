"""A machine of its own, as far as systemd can tell: a real systemd as PID 1 of a container, made by unshare(1).

It shares the kernel, the network and the files with us, which it sees read-only, but for one directory. It has its own
mounts, processes, /run and cgroups; nothing that it does is seen outside. (A `systemd --user` beside us would be less
of a machine: it has no User=, and it moves every process of the cgroup it is started in.) All its processes die with
PID 1, which dies with the process that made the machine (PR_SET_PDEATHSIG), however that ends. What a SIGKILL leaves
behind is an empty cgroup, which the next machine removes. One machine at a time in a process.

It runs no unit but those that a test writes: the targets that every service wants are empty here.
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

_SYSTEMD = next((path for path in ("/usr/lib/systemd/systemd", "/lib/systemd/systemd") if Path(path).exists()), "")
_TARGETS = ("ready", "basic", "local-fs", "multi-user", "network", "shutdown", "sysinit")
_CGROUP = "streamd-test-"
_WAIT_S = 30.0

# As PID 1 of the new process namespace. The cgroup namespace comes first: in the initial one, mounting cgroup2 without
# options would change the options of the host's.
# A mount of another test would live as long as our copy of it.
_STAGE_1 = f"""
umount --all --lazy --types fuse.streamd || :
mount -t cgroup2 cgroup2 /sys/fs/cgroup
for stale in /sys/fs/cgroup/{_CGROUP}*; do
    [ -e "/proc/${{stale##*-}}" ] || find "$stale" -depth -type d -exec rmdir {{}} + 2>/dev/null || :
done
mkdir -p "/sys/fs/cgroup/{_CGROUP}$2"
echo 0 >"/sys/fs/cgroup/{_CGROUP}$2/cgroup.procs"
exec unshare --cgroup sh -ec "$3" sh "$1" "$4"
"""
# sysctls and devices are the host's: systemd would change some at boot.
_STAGE_2 = """
umount /sys/fs/cgroup
mount -o remount,bind,ro /sys
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -t proc proc /proc
mount --bind /proc/sys /proc/sys
mount -o remount,bind,ro /proc/sys
mount -t tmpfs -o mode=755 tmpfs /run
mount --bind "$1" "$1"
mount --rbind /dev /dev
mount -o remount,bind,ro /dev
mount -o remount,bind,ro /
mount --bind "$1/log" /dev/kmsg
mount --bind /dev/null /dev/console
exec env -i container=other PATH=/usr/sbin:/usr/bin:/sbin:/bin SYSTEMD_UNIT_PATH="$1/units" \
    "$2" --system --unit=ready.target --log-target=kmsg --show-status=no
"""
_CLEAN_UP = f"""
mount -t cgroup2 cgroup2 /sys/fs/cgroup
find "/sys/fs/cgroup/{_CGROUP}$1" -depth -type d -exec rmdir {{}} + || :
"""


def wait_until(condition: Callable[[], bool], what: str, wait_s: float = _WAIT_S) -> None:
    """Ask until it is so; fail when it isn't in time, which is far longer than it takes."""
    until_s = time.monotonic() + wait_s
    while not condition():
        assert time.monotonic() < until_s, f"not in time: {what}"
        time.sleep(0.02)


class Machine:
    """A running systemd; `place` is the one directory that its services can write to, `place/units` has its units."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.units = place / "units"
        self._process: subprocess.Popen[bytes] | None = None
        self._first = 0

    def __enter__(self) -> "Machine":
        assert _SYSTEMD, "systemd is not installed: ./setup.sh installs it"
        self.units.mkdir()
        (self.place / "log").touch()
        for target in _TARGETS:
            self.write(f"{target}.target", f"[Unit]\nDescription={target}\nDefaultDependencies=no\n")
        namespaces = ("--mount", "--propagation", "slave", "--pid", "--cgroup", "--uts", "--ipc")
        with (self.place / "boot").open("wb") as boot:
            self._process = subprocess.Popen(
                [
                    *("setpriv", "--pdeathsig", "KILL", "unshare", *namespaces, "--fork", "--kill-child=KILL"),
                    *("sh", "-ec", _STAGE_1, "sh", str(self.place), str(os.getpid()), _STAGE_2, _SYSTEMD),
                ],
                stdin=subprocess.DEVNULL,
                stdout=boot,
                stderr=boot,
            )
        try:
            wait_until(self._is_up, f"start of systemd; {(self.place / 'boot').read_text()}")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def write(self, name: str, text: str) -> None:
        """Write a unit, or a drop-in of one (`NAME.service.d/x.conf`); `reload` makes it known."""
        path = self.units / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)

    def copy(self, unit: Path) -> None:
        """Install a unit as it is."""
        shutil.copy(unit, self.units)

    def systemctl(self, *arguments: str, check: bool = True) -> str:
        """Ask this machine's systemd; the answer, stripped."""
        return self.run("systemctl", *arguments, check=check)

    def run(self, *command: str, check: bool = True) -> str:
        """Run something in the machine, outside of any unit."""
        inside = ("nsenter", "--target", str(self._first), "--mount", "--pid", "--")
        done = subprocess.run(
            [*inside, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_WAIT_S,
            check=False,
            text=True,
        )
        assert not check or done.returncode == 0, f"{command}: {done.stdout}\n{self.log()}"
        return done.stdout.strip()

    def show(self, unit: str, name: str) -> str:
        """Give a property of a unit."""
        return self.systemctl("show", "--value", f"--property={name}", unit)

    def log(self) -> str:
        """Give what systemd has said so far."""
        return (self.place / "log").read_text(errors="replace")

    def _is_up(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, f"systemd did not start: {(self.place / 'boot').read_text()}"
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        if not children or Path(f"/proc/{children[0]}/comm").read_text() != "systemd\n":
            return False
        self._first = int(children[0])
        return self.systemctl("is-active", "ready.target", check=False) == "active"

    def _end(self) -> None:
        """Kill PID 1, and with it every process; remove the cgroups."""
        assert self._process is not None
        if self._first:
            # What waits for it ends after it: by then the kernel has ended all others of its namespace.
            with suppress(ProcessLookupError):
                os.kill(self._first, signal.SIGKILL)
        else:
            self._process.kill()
        self._process.wait()
        namespaces = ("--mount", "--propagation", "slave", "--cgroup")
        command = ["unshare", *namespaces, "sh", "-ec", _CLEAN_UP, "sh", str(os.getpid())]
        subprocess.run(command, stdin=subprocess.DEVNULL, timeout=_WAIT_S, check=True)
