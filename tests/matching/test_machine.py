"""Machine series, and whether one machine's snapshot runs on another."""

from dataclasses import replace

import pytest

from agent.matching.facts import Architecture, MachineFacts
from agent.matching.machine import SERIES, hardware_differences, is_tpu_machine, series_of
from agent.matching.reasons import Reason
from tests.matching.fleet import NODE


@pytest.mark.parametrize(
    ("machine_type", "series"),
    [
        ("n2-standard-8", "n2"),
        ("n2d-highmem-2", "n2d"),
        ("n2-custom-8-16384", "n2"),
        ("n2-custom-8-16384-ext", "n2"),
        ("e2-custom-micro-1024", "e2"),
        ("e2-medium", "e2"),
        ("custom-4-8192", "n1"),
        ("n1-standard-1", "n1"),
        ("f1-micro", "n1"),
        ("g1-small", "n1"),
        ("n1-megamem-96", "m1"),
        ("m1-ultramem-40", "m1"),
        ("c3-standard-192-metal", "c3"),
        ("c3d-standard-8-lssd", "c3d"),
        ("c4a-standard-4", "c4a"),
        ("a3-megagpu-8g", "a3"),
        ("a4x-highgpu-4g", "a4x"),
        ("g2-standard-96", "g2"),
        ("t2a-standard-1", "t2a"),
        ("projects/12345/machineTypes/n4-standard-2", "n4"),
        ("", ""),
        ("n2", ""),
        ("n2-", ""),
        ("N2-standard-8", ""),
        ("m5.large", ""),
        ("Standard_D4s_v5", ""),
        ("c99-standard-4", ""),
    ],
)
def test_a_machine_type_names_its_series(machine_type: str, series: str) -> None:
    assert series_of(machine_type) == series


def test_the_arm_series_are_known() -> None:
    assert {series for series, each in SERIES.items() if each is Architecture.ARM64} == {"c4a", "n4a", "t2a", "a4x"}


@pytest.mark.parametrize(
    "machine_type", ["ct5lp-hightpu-4t", "ct6e-standard-4t", "ct4p-hightpu-4t", "tpu7x-standard-4t"]
)
def test_tpu_machines_are_known_by_their_types(machine_type: str) -> None:
    assert is_tpu_machine(machine_type)
    assert not is_tpu_machine("c4-standard-4")


OTHER = replace(NODE, machine_type="")  # not Google's
CHANGES: dict[str, tuple[MachineFacts, MachineFacts, set[Reason]]] = {
    "the same": (NODE, NODE, set()),
    "more CPUs": (NODE, replace(NODE, machine_type="n2-highmem-96"), set()),
    "a custom type": (NODE, replace(NODE, machine_type="n2-custom-8-16384"), set()),
    "another CPU of the series": (
        NODE,
        replace(NODE, cpu_model="newer", cpu_features=NODE.cpu_features | {"amx_tile"}),
        set(),
    ),
    "an older CPU of the series": (
        NODE,
        replace(NODE, cpu_features=NODE.cpu_features - {"avx512f"}),
        {Reason.CPU_FEATURES},
    ),
    "another series": (NODE, replace(NODE, machine_type="n4-standard-8"), {Reason.MACHINE_SERIES}),
    "a series of the same letter": (NODE, replace(NODE, machine_type="n2d-standard-8"), {Reason.MACHINE_SERIES}),
    "from Google to elsewhere": (NODE, OTHER, {Reason.MACHINE_SERIES}),
    "from elsewhere to Google": (OTHER, NODE, {Reason.MACHINE_SERIES}),
    "a type that is newer than the table": (
        replace(NODE, machine_type="c99-standard-4"),
        replace(NODE, machine_type="c99-standard-8"),
        set(),
    ),
    "another architecture": (
        NODE,
        replace(NODE, architecture=Architecture.ARM64, machine_type="c4a-standard-4"),
        {Reason.ARCHITECTURE},
    ),
    "elsewhere: the same": (OTHER, OTHER, set()),
    "elsewhere: another model with more": (
        OTHER,
        replace(OTHER, cpu_model="newer", cpu_features=OTHER.cpu_features | {"amx_tile"}),
        set(),
    ),
    "elsewhere: a model with less": (OTHER, replace(OTHER, cpu_features=frozenset({"fpu"})), {Reason.CPU_FEATURES}),
    "elsewhere: another vendor": (OTHER, replace(OTHER, cpu_vendor="AuthenticAMD"), {Reason.CPU_VENDOR}),
    "elsewhere: vendors unknown": (
        replace(OTHER, cpu_vendor=""),
        replace(OTHER, cpu_vendor=""),
        {Reason.CPU_VENDOR},
    ),
    "elsewhere: features unknown, one model": (
        replace(OTHER, cpu_features=frozenset()),
        replace(OTHER, cpu_features=frozenset()),
        set(),
    ),
    "elsewhere: features unknown, two models": (
        replace(OTHER, cpu_features=frozenset()),
        replace(OTHER, cpu_model="newer"),
        {Reason.CPU_MODEL},
    ),
    "elsewhere: features unknown here": (OTHER, replace(OTHER, cpu_features=frozenset()), {Reason.CPU_FEATURES}),
    "other cache lines": (NODE, replace(NODE, cache_line_bytes=128), {Reason.CACHE_LINE}),
    "cache lines unknown at save": (replace(NODE, cache_line_bytes=0), NODE, set()),
    "cache lines unknown here": (NODE, replace(NODE, cache_line_bytes=0), {Reason.CACHE_LINE}),
}


@pytest.mark.parametrize(("saved", "here", "reasons"), CHANGES.values(), ids=CHANGES)
def test_hardware_is_compared(saved: MachineFacts, here: MachineFacts, reasons: set[Reason]) -> None:
    assert {refusal.reason for refusal in hardware_differences(saved, here)} == reasons


def test_missing_features_are_named_but_not_all_of_a_hundred() -> None:
    many = replace(NODE, cpu_features=NODE.cpu_features | {f"feature{number:03}" for number in range(100)})
    (refusal,) = hardware_differences(many, NODE)
    assert "100 that this CPU lacks: feature000, feature001" in refusal.message
    assert len(refusal.message) < 300
