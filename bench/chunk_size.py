"""What the chunk size costs and brings: stored bytes, a fault's wait on a slow link, loading time, CPU, table size.

    python -m bench.chunk_size [--image DIR] [--sizes 64 256 1024] [--rounds 3]

A small chunk makes a fault's answer small, and compresses worse; each one costs a row, a hop and a hash. The link is a
directory store with 15 ms and 100 MB/s.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.images import make_image
from bench.mounts import Mounts
from bench.report import cpu_s, publish, spread
from bench.serving import Reader, build_reader
from streamd.save.push import PushOptions, push
from streamd.store.opening import open_store

KIB, MIB = 1 << 10, 1 << 20
_LINK = "latency=15ms&rate=100MB/s"
_FAULTS = 150


def measure(image: Path, store: Path, chunk_kib: int, reader: Reader, rounds: int) -> dict[str, object]:
    """Push with that chunk size, then read single pages of a cold mount, then load a cold mount whole."""
    snapshot_id = f"chunk-{chunk_kib}"
    options = PushOptions(chunk_bytes=chunk_kib * KIB)
    pushed = push(image, open_store(f"file://{store}"), snapshot_id=snapshot_id, push_id="bench", options=options)
    url = f"file://{store}/{snapshot_id}?{_LINK}"
    faults, loads, cpus = [], [], []
    for _ in range(rounds):
        with Mounts() as mounts, mounts.start(url, options=["--no-cache"]) as mount:
            faults.append(reader.latency(mount.pages, reads=_FAULTS)["p50_us"] / 1000)
        with Mounts() as mounts, mounts.start(url, options=["--no-cache"], prefetch="all") as mount:
            began_s = cpu_s(mount.pid)
            size = mount.pages.stat().st_size
            loads.append(size / reader.sequential(mount.pages))
            cpus.append((cpu_s(mount.pid) - began_s) / (size / 1e9))
    return {
        "stored_share": round(pushed.stored_bytes / pushed.image_bytes, 4),
        "chunks": pushed.chunks,
        "single_page_ms": spread(faults),
        "load_s": spread(loads),
        "cpu_s_per_gb": spread(cpus),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--image", type=Path, help="an image directory [a synthetic one of 256 MiB]")
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 128, 256, 512, 1024, 2048], help="KiB")
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="streamd-bench-") as name:
        place = Path(name)
        image = chosen.image or place / "image"
        if chosen.image is None:
            make_image(image, 256 * MIB, zero=0.1, compressible=0.5)
        reader = Reader(build_reader(place))
        figures = {f"{kib} KiB": measure(image, place / "store", kib, reader, chosen.rounds) for kib in chosen.sizes}
        size = sum(file.stat().st_size for file in image.iterdir())
    publish("chunk_size", {"image_bytes": size, "link": _LINK, "rounds": chosen.rounds}, figures)


if __name__ == "__main__":
    main()
