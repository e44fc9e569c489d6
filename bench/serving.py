"""A mount under a reader like runsc's: warm throughput and latency against the plain file, CPU and memory.

python -m bench.serving [--sizes 512 4096] [--rounds 5]
"""

import argparse
import json
import statistics
import subprocess
import tempfile
from pathlib import Path

from bench.images import make_image
from bench.mounts import LiveMount, Mounts
from bench.report import PeakAnonymous, anonymous_bytes, cpu_s, paired, publish, spread

MIB = 1 << 20
_SOURCE = Path(__file__).with_name("slots.c")
_SLOTS, _READ_BYTES = 128, 256 << 10
_LOAD_LIMIT_S = 300.0
_SETTLE_LIMIT_S = 60.0


def build_reader(directory: Path) -> Path:
    """Compile slots.c."""
    binary = directory / "slots"
    subprocess.run(["cc", "-O2", "-pthread", "-o", binary, _SOURCE], check=True)
    return binary


class Reader:
    """Runs the compiled reader on a file."""

    def __init__(self, binary: Path) -> None:
        self._binary = binary

    def sequential(self, file: Path) -> float:
        """Read it all as runsc would; give bytes a second."""
        result = self._run("sequential", file, _SLOTS, _READ_BYTES)
        return result["bytes"] / result["seconds"]

    def latency(self, file: Path, reads: int = 4000) -> dict[str, float]:
        """Read 4 KiB at a time at random places, one after another; give percentiles in microseconds."""
        return self._run("random", file, reads, 4096)

    def _run(self, mode: str, file: Path, count: int, read_bytes: int) -> dict[str, float]:
        words = [str(self._binary), mode, str(file), str(count), str(read_bytes)]
        values: dict[str, float] = json.loads(
            subprocess.run(words, check=True, capture_output=True, text=True, timeout=_LOAD_LIMIT_S).stdout
        )
        return values


def measure(image: Path, url: str, reader: Reader, rounds: int) -> dict[str, object]:
    """Mount a snapshot with an empty cache, load it, then read it warm."""
    with Mounts() as mounts, mounts.start(url, prefetch="all") as mount:
        with PeakAnonymous(mount.pid) as loading:
            cold = reader.sequential(mount.pages)
            _settle(mount)
        reader.sequential(mount.pages)
        reader.sequential(image / "pages.img")
        began_s = cpu_s(mount.pid)
        with PeakAnonymous(mount.pid) as warm:
            mounted, plain = paired(
                lambda: reader.sequential(mount.pages), lambda: reader.sequential(image / "pages.img"), rounds
            )
        served_gb = rounds * (image / "pages.img").stat().st_size / 1e9
        used_s = cpu_s(mount.pid) - began_s
        ratios = [m / p for m, p in zip(mounted, plain, strict=True)]
        latency, plain_latency = reader.latency(mount.pages), reader.latency(image / "pages.img")
        return {
            "cold_gb_s": round(cold / 1e9, 3),
            "warm_gb_s": spread([value / 1e9 for value in mounted]),
            "plain_file_gb_s": spread([value / 1e9 for value in plain]),
            "warm_to_plain_file": spread(ratios),
            "cpu_s_per_gb": round(used_s / served_gb, 3),
            "read_4kib_us": {"p50": latency["p50_us"], "p99": latency["p99_us"]},
            "plain_read_4kib_us": {"p50": plain_latency["p50_us"], "p99": plain_latency["p99_us"]},
            "mount_peak_anonymous_mib": round(loading.peak_bytes / MIB, 1),
            "mount_warm_peak_anonymous_mib": round(warm.peak_bytes / MIB, 1),
            "mount_idle_anonymous_mib": round(anonymous_bytes(mount.pid) / MIB, 1),
        }


def _settle(mount: LiveMount) -> None:
    """Wait until all stored chunks are in the cache file. Raises: `TimeoutError`."""
    stored = mount.ready["chunks"] - mount.ready["zero_chunks"]
    mount.until(
        lambda status: status["cached_chunks"] + status["cache_dropped_chunks"] >= stored, limit_s=_SETTLE_LIMIT_S
    )


def push(image: Path, store: Path, snapshot_id: str) -> float:
    """Push by the command and give its peak of anonymous memory, in bytes."""
    with Mounts() as mounts:
        words = mounts.command("push", image, f"file://{store}", "--id", snapshot_id, "--json")
        with (
            subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process,
            PeakAnonymous(process.pid) as memory,
        ):
            code = process.wait(_LOAD_LIMIT_S)
    if code:
        raise RuntimeError(f"push ended with {code}")
    return memory.peak_bytes


def main() -> None:
    """Measure every size and publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[512, 4096], help="image sizes in MiB")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    figures: dict[str, object] = {}
    with tempfile.TemporaryDirectory(prefix="streamd-bench-") as name:
        place = Path(name)
        reader = Reader(build_reader(place))
        for size_mib in arguments.sizes:
            image = place / "image"
            make_image(image, size_mib * MIB, zero=0.1, compressible=0.5)
            peak_bytes = push(image, place / "store", f"size-{size_mib}")
            found = measure(image, f"file://{place}/store/size-{size_mib}", reader, arguments.rounds)
            figures[f"{size_mib}MiB"] = {"push_peak_anonymous_mib": round(peak_bytes / MIB, 1), **found}
            (image / "pages.img").unlink()
    ratios = [value["warm_to_plain_file"]["median"] for value in figures.values() if isinstance(value, dict)]
    figures["warm_to_plain_file"] = round(statistics.median(ratios), 4)
    publish("serving", {"slots": _SLOTS, "read_bytes": _READ_BYTES, "rounds": arguments.rounds}, figures)


if __name__ == "__main__":
    main()
