"""Hashes that must never change: snapshots that were made by them would be orphaned.

Whoever means to change them raises `HASH_VERSION`, and takes the new ones from what the test prints.
"""

import json
from pathlib import Path

import pytest

from agent.podspec.distil import distil
from agent.podspec.identity import pod_hash
from agent.podspec.manifests import read_manifests
from agent.podspec.workloads import workload_of

_HERE = Path(__file__).parent
GOLDEN: dict[str, dict[str, str]] = json.loads((_HERE / "golden.json").read_text())


@pytest.mark.parametrize("file", sorted((_HERE / "manifests").iterdir()), ids=lambda file: file.name)
def test_the_hash_of_a_real_manifest_is_what_it_was(file: Path) -> None:
    found = [workload_of(manifest, file.name) for manifest in read_manifests(file.read_text(), file.name)]
    [workload] = [each for each in found if each is not None]
    hashes = pod_hash(distil(workload.pod()))
    got = {"version": f"v{hashes.version}", "xxh3_128": hashes.xxh3_128, "sha256": hashes.sha256}
    assert got == GOLDEN.get(file.name), json.dumps({file.name: got}, indent=2)


def test_no_golden_hash_is_of_a_manifest_that_is_gone() -> None:
    assert set(GOLDEN) == {file.name for file in (_HERE / "manifests").iterdir()}
