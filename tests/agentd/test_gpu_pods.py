"""Pods with a GPU through the daemon, where everything but the GPU is real (`gpu_node`)."""

from typing import Any

import pytest

from tests.agentd.gpu_node import REFUSALS, run_in_namespace

STATE, TOGGLE = "--get-state --pid 1", "--toggle --pid 1"


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Give what has come of each case; they are gone through once."""
    return run_in_namespace(tmp_path_factory.mktemp("gpu"))


# By case: the reason, and words of the message, that whoever asked for the snapshot is told.
SAID = {
    "partitioned": ("PreflightFailed", "NVIDIA L4 GPU-0 is partitioned (MIG)"),
    "another driver": ("PreflightFailed", "the NVIDIA driver 999.1 is unknown to this runsc"),
    "no driver any more": ("PreflightFailed", "can't be read: NVIDIA's management library: Driver Not Loaded"),
    "no room": ("PreflightFailed", "a save needs 22.5 GiB of memory (the pod uses 1.0, its GPUs 20.0, and a margin)"),
    "the tool fails each time": ("GPUToolFailed", "told to fail"),
    "the tool hangs": ("GPUToolHung", "cuda-checkpoint did not end in 2 s and was killed"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_pod_that_can_not_be_saved_goes_on_and_who_asked_is_told_why(case: str, told: dict[str, Any]) -> None:
    reason, words = SAID[case]
    found = told["refusals"][case]
    assert f"{reason}: " in found["said"]
    assert words in found["said"]
    assert found["goes_on"]


def test_a_pod_is_saved_with_its_gpus_state_and_its_copy_gets_it_back(told: dict[str, Any]) -> None:
    assert told["saved"]["state"] == "Complete"
    assert told["calls_of_save"] == [STATE, TOGGLE, TOGGLE]  # out, and back
    assert told["calls_of_restore"] == [TOGGLE]
    assert told["same_memory"]
    assert (told["restored"]["reason"], told["restored"]["snapshot"]) == ("proven", told["saved"]["snapshot"])
