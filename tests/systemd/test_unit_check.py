"""What is said of a unit, fact by fact; how facts are seen under a real unit is in test_real_systemd.py."""

import dataclasses

import pytest

from streamd.daemon.service_manager import ManagerEnvironment
from streamd.daemon.unit_check import UnitFacts, check_unit, findings, look, parse_properties, unit_of

_GOOD = UnitFacts(
    has_manager=True,
    unit="streamd.service",
    fd_store_max=2048,
    properties={
        "FileDescriptorStoreMax": "2048",
        "KillMode": "process",
        "ManagedOOMPreference": "omit",
        "NFileDescriptorStore": "4",
        "OOMPolicy": "continue",
        "Restart": "always",
        "RuntimeDirectory": "",
        "RuntimeDirectoryPreserve": "no",
        "StartLimitIntervalUSec": "0",
    },
    is_host_namespace=True,
    kernel="6.18.44",
    capabilities=frozenset({"CAP_SYS_ADMIN", "CAP_SYS_RESOURCE", "CAP_SYS_PTRACE", "CAP_SETUID"}),
)


def _with(**properties: str) -> UnitFacts:
    return dataclasses.replace(_GOOD, properties={**_GOOD.properties, **properties})


def test_a_good_unit_gets_no_word() -> None:
    assert findings(_GOOD) == []


@pytest.mark.parametrize(
    ("facts", "kind", "is_alarm"),
    [
        (dataclasses.replace(_GOOD, has_manager=False), "no-manager", False),
        (dataclasses.replace(_GOOD, fd_store_max=0), "no-fd-store", True),
        (dataclasses.replace(_GOOD, fd_store_max=None), "fd-store-unknown", False),
        (_with(KillMode="control-group"), "kill-mode", True),
        (_with(KillMode="mixed"), "kill-mode", True),
        (_with(KillMode="none"), "kill-mode", True),
        (_with(OOMPolicy="stop"), "oom-policy", True),
        (_with(OOMPolicy="kill"), "oom-policy", True),
        (_with(Restart="on-failure"), "restart", True),
        (_with(StartLimitIntervalUSec="10s"), "start-limit", False),
        (_with(ManagedOOMPreference="none"), "oomd", False),
        (_with(RuntimeDirectory="streamd"), "runtime-directory", True),
        (_with(RuntimeDirectory="streamd", RuntimeDirectoryPreserve="restart"), "runtime-directory", True),
        (dataclasses.replace(_GOOD, is_host_namespace=False), "mount-namespace", True),
        (dataclasses.replace(_GOOD, is_host_namespace=None), "mount-namespace-unknown", False),
        (dataclasses.replace(_GOOD, request_timeout_s=15.0), "request-timeout", True),
        (dataclasses.replace(_GOOD, kernel="6.8.0-45-generic"), "no-resend", True),
        (dataclasses.replace(_GOOD, kernel="5.15.0"), "no-resend", True),
        (dataclasses.replace(_GOOD, capabilities=frozenset()), "no-sys-admin", True),
        (
            dataclasses.replace(_GOOD, capabilities=frozenset({"CAP_SYS_ADMIN", "CAP_SYS_PTRACE", "CAP_SETUID"})),
            "no-sys-resource",
            False,
        ),
        (
            dataclasses.replace(_GOOD, capabilities=frozenset({"CAP_SYS_ADMIN", "CAP_SYS_RESOURCE", "CAP_SETUID"})),
            "no-sys-ptrace",
            False,
        ),
        (
            dataclasses.replace(_GOOD, capabilities=frozenset({"CAP_SYS_ADMIN", "CAP_SYS_RESOURCE", "CAP_SYS_PTRACE"})),
            "no-setuid",
            False,
        ),
        (dataclasses.replace(_GOOD, problems=("odd",)), "environment", True),
    ],
)
def test_each_lack_is_said(facts: UnitFacts, kind: str, is_alarm: bool) -> None:
    found = [(finding.kind, finding.is_alarm) for finding in findings(facts)]
    if kind == "no-sys-admin":
        found = found[:1]
    assert found == [(kind, is_alarm)]
    assert all(str(finding) == finding.message and "\n" not in finding.message for finding in findings(facts))


@pytest.mark.parametrize(
    "facts",
    [
        _with(RuntimeDirectory="streamd", RuntimeDirectoryPreserve="yes"),
        dataclasses.replace(_GOOD, properties={}),  # no systemctl here
        dataclasses.replace(_GOOD, capabilities=None),
        dataclasses.replace(_GOOD, kernel="6.9.0"),
        dataclasses.replace(_GOOD, kernel="10.0"),
        dataclasses.replace(_GOOD, kernel="strange"),
        dataclasses.replace(_GOOD, request_timeout_s=None),
    ],
)
def test_what_is_right_or_not_seen_is_not_held_against_the_unit(facts: UnitFacts) -> None:
    assert findings(facts) == []


def test_without_a_manager_its_settings_play_no_part() -> None:
    facts = dataclasses.replace(_with(KillMode="mixed"), has_manager=False, fd_store_max=None)
    assert [finding.kind for finding in findings(facts)] == ["no-manager"]


def test_alarms_come_first() -> None:
    facts = dataclasses.replace(_with(Restart="no"), is_host_namespace=None)
    assert [finding.is_alarm for finding in findings(facts)] == [True, False]


@pytest.mark.parametrize(
    ("cgroups", "unit"),
    [
        ("0::/system.slice/streamd.service\n", "streamd.service"),
        ("0::/system.slice/streamd.service/supervisor\n", "streamd.service"),
        ("0::/user.slice/user-0.slice/user@0.service/app.slice/s.service\n", "s.service"),
        ("0::/user.slice/user-0.slice/session-3.scope\n", None),
        ("0::/\n", None),
        ("5:memory:/a.service\n1:name=systemd:/system.slice/b.service\n0::/\n", "b.service"),
        ("0::/system.slice/--help.service\n", "--help.service"),
        ("0::/system.slice/a b.service\n", None),
        ("nonsense", None),
        ("", None),
    ],
)
def test_the_unit_is_found_by_the_cgroup(cgroups: str, unit: str | None) -> None:
    assert unit_of(cgroups) == unit


def test_properties_are_read_a_line_each() -> None:
    assert parse_properties("A=1\nB=\nC=x=y\nnonsense\n") == {"A": "1", "B": "", "C": "x=y"}


def test_this_process_is_looked_at_without_a_manager() -> None:
    facts = look(ManagerEnvironment())
    assert not facts.has_manager
    assert facts.properties == {}
    assert facts.kernel
    assert facts.capabilities is not None
    assert "no-manager" in {finding.kind for finding in check_unit(ManagerEnvironment())}
