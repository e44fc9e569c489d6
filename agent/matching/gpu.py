"""GPUs: which pods with GPUs can be saved and restored at all, and where. Pure.

The limits are those of GKE's product page ("Limits"). They bind on Google's machine types; on a machine that isn't
Google's, those that don't name a machine type do.
"""

import re
from collections.abc import Iterator

from agent.matching.facts import MachineFacts
from agent.matching.machine import series_of
from agent.matching.reasons import Reason, Refusal, differing

# The product page's machine types with GPUs: 1, 4 or 8 L4 (g2), 1 A100 of 40 or 80 GB (a2), 1 H100 of 80 GB (a3).
MACHINE_TYPES = (
    "g2-standard-4",
    "g2-standard-8",
    "g2-standard-12",
    "g2-standard-16",
    "g2-standard-32",
    "g2-standard-48",
    "g2-standard-96",
    "a2-highgpu-1g",
    "a2-ultragpu-1g",
    "a3-highgpu-1g",
)
# From this version of GKE on, a pod needn't use all GPUs of its node.
_PART_OF_NODE = (1, 35, 0, 1738000)
_GKE_VERSION = re.compile(r"v?(\d{1,9})\.(\d{1,9})\.(\d{1,9})-gke\.(\d{1,9})(?:\D.*)?", re.ASCII)


def gpu_limits(gpus: int, here: MachineFacts) -> Iterator[Refusal]:
    """Say what keeps a pod with that many GPUs from being saved, and restored, on a node."""
    if not gpus:
        return
    on_node = sum(each.count for each in here.gpus)
    if on_node < gpus:
        yield Refusal(Reason.GPU_MISSING, f"the pod wants {gpus} GPUs, the node has {on_node}", here=str(on_node))
    if len({each.model for each in here.gpus}) > 1:  # gVisor: "can't remap with heterogeneous GPUs"
        models = ", ".join(sorted({each.model for each in here.gpus}))
        yield Refusal(Reason.GPU_MIXED, f"the node has GPUs of several models: {models}", here=models)
    if any(each.is_mig for each in here.gpus):
        yield Refusal(Reason.GPU_MIG, "a GPU of the node is partitioned (MIG), which can't be saved")
    name = here.machine_type.rpartition("/")[2]
    if series_of(name) and name not in MACHINE_TYPES:
        yield Refusal(
            Reason.GPU_MACHINE_TYPE,
            f"pods with GPUs can't be saved on {name}; on {', '.join(MACHINE_TYPES)} they can",
            here=name,
        )
    if gpus > 1 and not all(_is_l4(each.model) for each in here.gpus):
        models = ", ".join(sorted({each.model for each in here.gpus}))
        yield Refusal(
            Reason.GPU_SEVERAL,
            f"a pod with several GPUs can be saved only where they are L4, not {models}",
            here=models,
        )
    version = _GKE_VERSION.fullmatch(here.node_version)
    if version and tuple(map(int, version.groups())) < _PART_OF_NODE and gpus < on_node:
        yield Refusal(
            Reason.GPU_WHOLE_NODE,
            f"before GKE 1.35.0-gke.1738000 a pod must use all GPUs of its node; it wants {gpus} of {on_node}, and the "
            f"node has {here.node_version}",
            here=str(on_node),
        )


def gpu_differences(saved_gpus: int, saved: MachineFacts, gpus: int, here: MachineFacts) -> Iterator[Refusal]:
    """Say what keeps a snapshot of a pod with `saved_gpus` from being restored as one with `gpus`."""
    if saved_gpus != gpus:
        yield differing(Reason.GPU_COUNT, "number of the pod's GPUs", saved_gpus, gpus)
    if not saved_gpus or not gpus:
        return
    model, model_here = _names({each.model for each in saved.gpus}), _names({each.model for each in here.gpus})
    if model != model_here or not model_here:
        yield differing(Reason.GPU_MODEL, "GPU model", model, model_here)
    driver, driver_here = _names({each.driver for each in saved.gpus}), _names({each.driver for each in here.gpus})
    if driver != driver_here or not driver_here:
        yield differing(Reason.GPU_DRIVER, "GPU driver", driver, driver_here)


def _names(names: set[str]) -> str:
    return ", ".join(sorted(names))


def _is_l4(model: str) -> bool:
    return "L4" in model.split()  # NVML says "NVIDIA L4"
