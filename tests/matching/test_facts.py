"""A node's facts are written down and read back; what isn't theirs is refused."""

import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.kube.errors import InvalidObject
from agent.matching.facts import Architecture, Gpus, MachineFacts
from tests.matching.fleet import GPU_NODE

texts = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), max_size=12)
facts = st.builds(
    MachineFacts,
    architecture=st.sampled_from(Architecture),
    machine_type=texts,
    cpu_vendor=texts,
    cpu_model=texts,
    cpu_features=st.frozensets(texts, max_size=4),
    cache_line_bytes=st.sampled_from([0, 64, 128]),
    runsc_version=texts,
    runsc_sha256=st.just("") | st.from_regex(r"[0-9a-f]{64}", fullmatch=True),
    platform=texts,
    network=texts,
    directfs=st.booleans(),
    overlay=texts,
    gpus=st.lists(st.builds(Gpus, texts, st.integers(1, 8), texts, st.booleans()), max_size=2).map(tuple),
    node_version=texts,
)


@given(facts)
def test_what_is_written_is_read_back(written: MachineFacts) -> None:
    mapping = json.loads(json.dumps(written.to_mapping()))
    assert MachineFacts.from_mapping(mapping, where="x") == written


def test_members_of_a_later_version_pass() -> None:
    mapping = GPU_NODE.to_mapping() | {"numa": {"nodes": 2}}
    assert MachineFacts.from_mapping(mapping, where="x") == GPU_NODE


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ("architecture", "riscv64", "architecture: must be amd64 or arm64"),
        ("architecture", None, "architecture: is required"),
        ("runsc", None, "runsc: is required"),
        ("runsc.sha256", "5E" * 32, "runsc.sha256: must be 64 hexadecimal digits"),
        ("runsc.directfs", "yes", "runsc.directfs: must be true or false"),
        ("cpu.features", "fpu", "cpu.features: must be a list"),
        ("cpu.features", ["x"] * 2000, "cpu.features: has 2000 entries"),
        ("cpu.cacheLineBytes", -1, "cpu.cacheLineBytes: must be a whole number"),
        ("gpus", [{"model": "NVIDIA L4", "count": 0, "driver": "x"}], "gpus[0].count: must be a whole number"),
        ("gpus", [{"count": 1, "driver": "x"}], "gpus[0].model: is required"),
    ],
)
def test_what_cannot_be_facts_is_refused_by_name(path: str, value: object, problem: str) -> None:
    mapping = copy.deepcopy(GPU_NODE.to_mapping())
    *parents, last = path.split(".")
    inner = mapping
    for parent in parents:
        inner = inner[parent]  # type: ignore[assignment]
    inner[last] = value
    with pytest.raises(InvalidObject) as caught:
        MachineFacts.from_mapping(mapping, where="x")
    assert caught.value.problems[0].startswith(problem)


def test_architectures_have_the_kernels_names_too() -> None:
    assert Architecture.of_kernel("x86_64") is Architecture.AMD64
    assert Architecture.of_kernel("aarch64") is Architecture.ARM64
    with pytest.raises(ValueError, match="riscv64"):
        Architecture.of_kernel("riscv64")
