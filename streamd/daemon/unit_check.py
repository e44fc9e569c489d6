"""Whether the unit that the daemon runs under lets it do what it promises, in words; looked at once, at start.

A daemon that can't keep its mounts through a restart works all the same until the restart: so it says at start what is
missing, and what that will cost. `look` asks this host, without D-Bus: /proc, sysctls, and `systemctl show` where there
is one, for as long as its time-out. `findings` decides, from what was seen. What can't be seen is not held against
the unit, but for the store, which is said to be unknown.
"""

import os
import re
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from streamd.daemon.fd_store import FD_STORE_MAX
from streamd.daemon.service_manager import ManagerEnvironment
from streamd.fuse.mounting import request_timeout_s

# PID 1 may reload its units meanwhile; the daemon serves only after this.
SYSTEMCTL_WAIT_S = 5.0
_SYSTEMCTL = ("/usr/bin/systemctl", "/bin/systemctl")
_PROPERTIES = (
    "FileDescriptorStoreMax",
    "KillMode",
    "ManagedOOMPreference",
    "NFileDescriptorStore",
    "OOMPolicy",
    "Restart",
    "RuntimeDirectory",
    "RuntimeDirectoryPreserve",
    "StartLimitIntervalUSec",
)
_UNIT = re.compile(r"[A-Za-z0-9:_.@\\-]{1,240}\.service", re.ASCII)
# linux/capability.h
_CAPABILITIES = {7: "CAP_SETUID", 19: "CAP_SYS_PTRACE", 21: "CAP_SYS_ADMIN", 24: "CAP_SYS_RESOURCE"}
# FUSE_NOTIFY_RESEND and FUSE_HAS_RESEND (fs/fuse/dev.c).
_RESEND_SINCE = (6, 9)


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is not as it should be. `is_alarm`: mounts will be lost, or can't be seen."""

    kind: str
    message: str
    is_alarm: bool = False

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True, slots=True)
class UnitFacts:
    """What was seen of the unit and the host; None, or no entry, is what could not be seen.

    `properties` are systemctl's, by name. `is_host_namespace` compares our mount namespace with that of PID 1 (in a
    container: of the container's PID 1).
    """

    has_manager: bool
    unit: str | None = None
    fd_store_max: int | None = None
    properties: Mapping[str, str] = field(default_factory=dict)
    is_host_namespace: bool | None = None
    request_timeout_s: float | None = None
    kernel: str = ""
    capabilities: frozenset[str] | None = None
    problems: tuple[str, ...] = ()


def check_unit(environment: ManagerEnvironment) -> list[Finding]:
    """Look and judge. Waits for `SYSTEMCTL_WAIT_S` at most; call it before the loop runs, or in a thread."""
    return findings(look(environment))


def look(environment: ManagerEnvironment) -> UnitFacts:
    """See what can be seen of the unit this process runs in."""
    unit = unit_of(_read("/proc/self/cgroup"))
    address = environment.notify_socket
    properties = _properties(unit, is_user=address.startswith("/run/user/")) if unit and address else {}
    store_max = environment.fd_store_max
    if store_max is None:
        with suppress(KeyError, ValueError):
            store_max = int(properties["FileDescriptorStoreMax"])
    return UnitFacts(
        has_manager=address is not None,
        unit=unit,
        fd_store_max=store_max,
        properties=properties,
        is_host_namespace=_is_host_namespace(),
        request_timeout_s=request_timeout_s(),
        kernel=os.uname().release,
        capabilities=_capabilities(_read("/proc/self/status")),
        problems=environment.problems,
    )


def unit_of(cgroups: str) -> str | None:
    """Give the service that a process belongs to by its /proc/PID/cgroup; the innermost one, None outside of any.

    With a delegated subgroup the service is not the last part of the path (cgroups(7)).
    """
    for line in cgroups.splitlines():
        _hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers in ("", "name=systemd"):
            for part in reversed(path.split("/")):
                if _UNIT.fullmatch(part):
                    return part
    return None


def parse_properties(text: str) -> dict[str, str]:
    """Read what `systemctl show` prints: a `Name=value` a line."""
    return {name: value for name, sign, value in (line.partition("=") for line in text.splitlines()) if sign}


def findings(facts: UnitFacts) -> list[Finding]:
    """Say what is wrong, worst first."""
    found = [Finding("environment", problem, is_alarm=True) for problem in facts.problems]
    found += _of_the_host(facts)
    if not facts.has_manager:
        found.append(
            Finding(
                "no-manager",
                "not started by a service manager (no NOTIFY_SOCKET): should this process die, its mounts can't be "
                "taken over by the next one; run it as systemd/streamd.service does",
            )
        )
    else:
        found += _of_the_store(facts)
        found += [finding for judge in _JUDGES if (finding := judge(facts.properties)) is not None]
    return sorted(found, key=lambda finding: not finding.is_alarm)


def _of_the_host(facts: UnitFacts) -> list[Finding]:
    found = []
    if facts.is_host_namespace is False:
        found.append(
            Finding(
                "mount-namespace",
                "this process has a mount namespace of its own: what it mounts, no sandbox sees; take settings such as "
                "ProtectSystem=, PrivateTmp= or ReadOnlyPaths= out of the unit",
                is_alarm=True,
            )
        )
    elif facts.is_host_namespace is None:
        found.append(Finding("mount-namespace-unknown", "can't compare this mount namespace with that of PID 1"))
    if facts.request_timeout_s is not None:
        found.append(
            Finding(
                "request-timeout",
                f"the kernel ends a mount whose reads wait for {facts.request_timeout_s:.0f} s, and every sandbox that "
                "loads from it: set fs.fuse.default_request_timeout and fs.fuse.max_request_timeout to 0",
                is_alarm=True,
            )
        )
    if (version := _version(facts.kernel)) is not None and version < _RESEND_SINCE:
        found.append(
            Finding(
                "no-resend",
                f"Linux {facts.kernel} can't send requests again (6.9 can): reads that a worker has taken when it dies "
                "are never answered, and whoever made them hangs until its mount is aborted",
                is_alarm=True,
            )
        )
    if facts.capabilities is not None:
        found += [finding for name, finding in _LACKING.items() if name not in facts.capabilities]
    return found


def _of_the_store(facts: UnitFacts) -> list[Finding]:
    match facts.fd_store_max:
        case None:
            return [
                Finding(
                    "fd-store-unknown",
                    "can't see whether the unit has an fd store (FileDescriptorStoreMax=): without one, a restart "
                    "loses the mounts whose workers die meanwhile",
                )
            ]
        case 0:
            return [
                Finding(
                    "no-fd-store",
                    "the unit has no fd store: a restart loses its mounts; set "
                    f"FileDescriptorStoreMax={FD_STORE_MAX} and NotifyAccess=main",
                    is_alarm=True,
                )
            ]
        case _:
            return []


_LACKING = {
    "CAP_SYS_ADMIN": Finding("no-sys-admin", "no CAP_SYS_ADMIN: nothing can be mounted", is_alarm=True),
    "CAP_SYS_RESOURCE": Finding(
        "no-sys-resource",
        "no CAP_SYS_RESOURCE: workers aren't marked as I/O flushers, nor kept from the OOM killer; short of memory, "
        "they can wait for themselves",
    ),
    "CAP_SETUID": Finding(
        "no-setuid",
        'no CAP_SETUID: workers can\'t run as a user of their own; only daemon.worker_user = "" would serve',
    ),
    "CAP_SYS_PTRACE": Finding(
        "no-sys-ptrace", "no CAP_SYS_PTRACE: an umount that is refused can't always name who has files open"
    ),
}


def _is_off(properties: Mapping[str, str], name: str, right: str) -> bool:
    return name in properties and properties[name] != right


def _kill_mode(properties: Mapping[str, str]) -> Finding | None:
    if not _is_off(properties, "KillMode", "process"):
        return None
    text = f"KillMode={properties['KillMode']}: a restart kills the workers too, or leaves this process; use process"
    return Finding("kill-mode", text, is_alarm=True)


def _restart(properties: Mapping[str, str]) -> Finding | None:
    if not _is_off(properties, "Restart", "always"):
        return None
    text = f"Restart={properties['Restart']}: should this process end, the fd store is emptied; use always"
    return Finding("restart", text, is_alarm=True)


def _start_limit(properties: Mapping[str, str]) -> Finding | None:
    if not _is_off(properties, "StartLimitIntervalUSec", "0"):
        return None
    text = "after some failed starts the unit fails for good, and the fd store is emptied; set StartLimitIntervalSec=0"
    return Finding("start-limit", text)


def _oom_policy(properties: Mapping[str, str]) -> Finding | None:
    if not _is_off(properties, "OOMPolicy", "continue"):
        return None
    text = f"OOMPolicy={properties['OOMPolicy']}: when one worker is killed for memory, all are; use continue"
    return Finding("oom-policy", text, is_alarm=True)


def _oomd(properties: Mapping[str, str]) -> Finding | None:
    if not _is_off(properties, "ManagedOOMPreference", "omit"):
        return None
    text = "systemd-oomd, where it runs, may kill the unit with all workers; set ManagedOOMPreference=omit"
    return Finding("oomd", text)


def _runtime_directory(properties: Mapping[str, str]) -> Finding | None:
    if not properties.get("RuntimeDirectory") or not _is_off(properties, "RuntimeDirectoryPreserve", "yes"):
        return None
    text = "a restart removes the runtime directory, and the sockets of workers in it; set RuntimeDirectoryPreserve=yes"
    return Finding("runtime-directory", text, is_alarm=True)


_JUDGES: tuple[Callable[[Mapping[str, str]], Finding | None], ...] = (
    _kill_mode,
    _restart,
    _start_limit,
    _oom_policy,
    _oomd,
    _runtime_directory,
)


def _version(release: str) -> tuple[int, int] | None:
    match = re.match(r"(\d{1,4})\.(\d{1,4})", release)
    return (int(match[1]), int(match[2])) if match else None


def _capabilities(status: str) -> frozenset[str] | None:
    """Read the effective capabilities that matter here (proc_pid_status(5))."""
    match = re.search(r"^CapEff:\s*([0-9a-f]{1,32})$", status, re.MULTILINE)
    if match is None:
        return None
    bits = int(match[1], 16)
    return frozenset(name for bit, name in _CAPABILITIES.items() if bits >> bit & 1)


def _is_host_namespace() -> bool | None:
    """Compare namespaces by the inode and device that namespaces(7) gives them; that of PID 1 takes privileges."""
    try:
        ours, first = (os.stat(f"/proc/{process}/ns/mnt") for process in ("self", "1"))
    except OSError:
        return None
    return (ours.st_dev, ours.st_ino) == (first.st_dev, first.st_ino)


def _properties(unit: str, *, is_user: bool) -> dict[str, str]:
    """Ask systemctl; nothing when there is none, or when it doesn't answer in time."""
    program = next((path for path in _SYSTEMCTL if os.access(path, os.X_OK)), None)
    if program is None:
        return {}
    scope = ["--user"] if is_user else []
    try:
        answer = subprocess.run(
            [program, *scope, "show", f"--property={','.join(_PROPERTIES)}", "--", unit],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=SYSTEMCTL_WAIT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    return parse_properties(answer.stdout.decode(errors="replace"))


def _read(path: str) -> str:
    with suppress(OSError):
        return Path(path).read_text(errors="replace")
    return ""
