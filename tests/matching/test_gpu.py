"""Each limit of the product's page on GPUs has its reason."""

from dataclasses import replace

import pytest

from agent.matching.facts import Gpus, MachineFacts
from agent.matching.gpu import MACHINE_TYPES, gpu_differences, gpu_limits
from agent.matching.reasons import Reason
from tests.matching.fleet import GPU_NODE, L4, NODE

OLD, NEW = "v1.35.0-gke.1737999", "v1.35.0-gke.1738000"
EIGHT = replace(GPU_NODE, machine_type="g2-standard-96", gpus=(replace(L4, count=8),))
H100 = replace(NODE, machine_type="a3-highgpu-1g", gpus=(Gpus("NVIDIA H100 80GB HBM3", 1, "580.126.09"),))
FOUR_A100 = replace(NODE, machine_type="", gpus=(Gpus("NVIDIA A100-SXM4-40GB", 4, "580.126.09"),))

LIMITS: dict[str, tuple[int, MachineFacts, set[Reason]]] = {
    "no GPU at all": (0, NODE, set()),
    "none of a node's GPUs": (0, replace(EIGHT, gpus=(replace(L4, count=8, is_mig=True),)), set()),
    "one L4": (1, GPU_NODE, set()),
    "one H100": (1, H100, set()),
    "all of eight L4": (8, EIGHT, set()),
    "some of eight L4": (2, replace(EIGHT, node_version=NEW), set()),
    "some of eight L4, before it was possible": (2, replace(EIGHT, node_version=OLD), {Reason.GPU_WHOLE_NODE}),
    "one of eight L4, before it was possible": (1, replace(EIGHT, node_version=OLD), {Reason.GPU_WHOLE_NODE}),
    "all of eight L4, before": (8, replace(EIGHT, node_version=OLD), set()),
    "some of eight, not on GKE": (2, replace(EIGHT, node_version="v1.30.1+k3s1"), set()),
    "more than there are": (2, GPU_NODE, {Reason.GPU_MISSING}),
    "one where there is none": (1, replace(NODE, machine_type=""), {Reason.GPU_MISSING}),
    "a partitioned one": (1, replace(GPU_NODE, gpus=(replace(L4, is_mig=True),)), {Reason.GPU_MIG}),
    "of two models": (
        1,
        replace(GPU_NODE, machine_type="", gpus=(L4, Gpus("Tesla T4", 1, "580.126.09"))),
        {Reason.GPU_MIXED},
    ),
    "one A100 of four, elsewhere": (1, FOUR_A100, set()),
    "two A100, elsewhere": (2, FOUR_A100, {Reason.GPU_SEVERAL}),
    "two L40S, elsewhere": (
        2,
        replace(NODE, machine_type="", gpus=(Gpus("NVIDIA L40S", 2, "580.126.09"),)),
        {Reason.GPU_SEVERAL},
    ),
    "two A100 on Google's": (
        2,
        replace(FOUR_A100, machine_type="a2-highgpu-4g"),
        {Reason.GPU_SEVERAL, Reason.GPU_MACHINE_TYPE},
    ),
    "a machine type of L4 that isn't listed": (
        1,
        replace(GPU_NODE, machine_type="g2-standard-24"),
        {Reason.GPU_MACHINE_TYPE},
    ),
    "a GPU attached to N1": (1, replace(GPU_NODE, machine_type="n1-standard-4"), {Reason.GPU_MACHINE_TYPE}),
}


@pytest.mark.parametrize(("gpus", "here", "reasons"), LIMITS.values(), ids=LIMITS)
def test_a_pod_with_gpus_can_be_saved_where_the_page_says(gpus: int, here: MachineFacts, reasons: set[Reason]) -> None:
    assert {refusal.reason for refusal in gpu_limits(gpus, here)} == reasons


@pytest.mark.parametrize("machine_type", MACHINE_TYPES)
def test_each_machine_type_of_the_page_is_good(machine_type: str) -> None:
    assert not list(gpu_limits(1, replace(GPU_NODE, machine_type=f"projects/1/machineTypes/{machine_type}")))


DIFFERENCES: dict[str, tuple[int, MachineFacts, int, MachineFacts, set[Reason]]] = {
    "the same": (1, GPU_NODE, 1, GPU_NODE, set()),
    "without GPUs, whatever the nodes have": (0, GPU_NODE, 0, NODE, set()),
    "fewer": (2, EIGHT, 1, EIGHT, {Reason.GPU_COUNT}),
    "none": (1, GPU_NODE, 0, GPU_NODE, {Reason.GPU_COUNT}),
    "one, where none was": (0, NODE, 1, GPU_NODE, {Reason.GPU_COUNT}),
    "on a node with more of them": (1, GPU_NODE, 1, EIGHT, set()),
    "another model": (1, GPU_NODE, 1, H100, {Reason.GPU_MODEL}),
    "another driver": (
        1,
        GPU_NODE,
        1,
        replace(GPU_NODE, gpus=(replace(L4, driver="580.159.03"),)),
        {Reason.GPU_DRIVER},
    ),
    "not known at save": (1, NODE, 1, GPU_NODE, {Reason.GPU_MODEL, Reason.GPU_DRIVER}),
}


@pytest.mark.parametrize(("saved_gpus", "saved", "gpus", "here", "reasons"), DIFFERENCES.values(), ids=DIFFERENCES)
def test_gpus_are_compared(
    saved_gpus: int, saved: MachineFacts, gpus: int, here: MachineFacts, reasons: set[Reason]
) -> None:
    assert {refusal.reason for refusal in gpu_differences(saved_gpus, saved, gpus, here)} == reasons
