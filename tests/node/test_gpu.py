"""The GPUs of a node: NVIDIA's binding over a library of our own, and the judgement over the values."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agent.node.gpu import (
    MARGIN_BYTES,
    MARGIN_SHARE,
    Gpu,
    GpusUnreadable,
    NodeGpus,
    PodMemory,
    group_memory,
    preflight,
    read_gpus,
)

GIB = 1 << 30
DRIVERS = frozenset({"580.65.06"})
DRIVER_NOT_LOADED = 9


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Give the library, loaded under the name by which the binding finds it."""
    loaded = ctypes.CDLL(os.fspath(build_nvml(tmp_path_factory.mktemp("nvml"))))
    loaded.fake_add.argtypes = (ctypes.c_char_p, ctypes.c_ulonglong, ctypes.c_ulonglong, ctypes.c_int)
    return loaded


def build_nvml(directory: Path) -> Path:
    """Build the library in a directory."""
    built, source = directory / "libnvidia-ml.so.1", Path(__file__).with_name("fake_nvml.c")
    flags = ["-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wl,-soname,libnvidia-ml.so.1"]
    subprocess.run(["cc", *flags, "-o", str(built), str(source)], check=True, timeout=120)
    return built


def test_the_gpus_are_read_as_the_library_gives_them(library: ctypes.CDLL) -> None:
    library.fake_reset(0, b"580.65.06")
    library.fake_add(b"NVIDIA L4", 20 * GIB, 24 * GIB, 2)
    library.fake_add(b"NVIDIA H100 80GB HBM3", 70 * GIB, 80 * GIB, 1)
    assert read_gpus() == NodeGpus(
        "580.65.06",
        (
            Gpu("GPU-0", "NVIDIA L4", 20 * GIB, 24 * GIB, False),
            Gpu("GPU-1", "NVIDIA H100 80GB HBM3", 70 * GIB, 80 * GIB, True),
        ),
    )
    assert library.fake_open_calls() == 0


def test_a_driver_that_is_not_loaded_and_a_gpu_that_is_lost_are_told(library: ctypes.CDLL) -> None:
    library.fake_reset(DRIVER_NOT_LOADED, b"")
    with pytest.raises(GpusUnreadable, match="Driver Not Loaded"):
        read_gpus()
    library.fake_reset(0, b"580.65.06")
    library.fake_add(b"NVIDIA L4", 1, 2, 0)
    library.fake_lose(0)
    with pytest.raises(GpusUnreadable, match="GPU is lost"):
        read_gpus()
    assert library.fake_open_calls() == 0


def test_a_node_without_the_library_says_so_and_imports_nothing_of_it_before() -> None:
    program = (
        "import sys, agent.node.gpu as gpu\n"
        "assert 'pynvml' not in sys.modules\n"
        "try:\n    gpu.read_gpus()\nexcept gpu.GpusUnreadable as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2]
    )
    assert "NVIDIA's management library: NVML Shared Library Not Found" in done.stdout, done.stderr


L4 = Gpu("GPU-0", "NVIDIA L4", 20 * GIB, 24 * GIB, False)
NODE = NodeGpus("580.65.06", (L4, Gpu("GPU-1", "NVIDIA L4", 2 * GIB, 24 * GIB, False)))
NEEDED = 4 * GIB + 20 * GIB + int(20 * GIB * MARGIN_SHARE) + MARGIN_BYTES


@pytest.mark.parametrize(
    ("limit_bytes", "fits"), [(None, True), (NEEDED, True), (NEEDED - 1, False), (24 * GIB, False)]
)
def test_a_pod_whose_limit_has_no_room_for_its_gpu_s_memory_is_refused_with_the_numbers(
    limit_bytes: int | None, fits: bool
) -> None:
    problems = preflight(NODE, ["GPU-0"], PodMemory(4 * GIB, limit_bytes), supported_drivers=DRIVERS)
    if fits:
        assert problems == ()
        return
    (problem,) = problems
    assert all(number in problem for number in ("25.5 GiB", "uses 4.0", "GPUs 20.0", "limit is"))


def test_each_limit_is_a_reason_of_its_own() -> None:
    room = PodMemory(0, None)
    mig = NodeGpus("580.65.06", (Gpu("GPU-0", "NVIDIA H100", 0, 1, True),))
    mixed = NodeGpus("580.65.06", (L4, Gpu("GPU-1", "NVIDIA H100", 0, 1, False)))
    for node, used, word in (
        (NodeGpus("999.1", (L4,)), None, "999.1"),
        (mig, None, "MIG"),
        (mixed, None, "several models"),
        (NODE, ["GPU-0", "GPU-9"], "of the pod's GPUs 1"),
        (NodeGpus("580.65.06", ()), None, "of the pod's GPUs 0"),
    ):
        (problem,) = preflight(node, used, room, supported_drivers=DRIVERS)
        assert word in problem


def test_the_tightest_limit_above_a_pod_counts(tmp_path: Path) -> None:
    top = tmp_path / "cgroups"
    pod = top / "kubepods" / "pod"
    pod.mkdir(parents=True)
    (pod / "memory.current").write_text("4096\n")
    for own, above, expected in (("max", "max", None), ("8192", "max", 8192), ("8192", "5000", 5000)):
        (pod / "memory.max").write_text(f"{own}\n")
        (pod.parent / "memory.max").write_text(f"{above}\n")
        assert group_memory(pod, top=top) == PodMemory(4096, expected)
