"""How fast push is, and what memory it takes. Prints JSON.

    python -m bench.push [--mib 512] [--rounds 5] [--directory DIR] [--only file|gs] [--image DIR]

file: push to a `file://` store in DIR, in turns with `zstd -1 -T0` of pages.img into a file beside it. `ratio` is
    push's throughput over zstd's (goal: at least 1), the median of the rounds' own ratios, since the machine's other
    work changes from round to round. zstd neither checksums nor syncs; `ratio_synced` compares with zstd and an
    fsync.
gs:   push to the emulator, in turns with plain uploads of the same bytes by the same client with as many threads:
      `ratio` to the image as it is, `ratio_stored` to the packs that push made of it (it can't be above 1 by much).

Each push is a process of its own; it is timed from the call of `push`, imports done, and `peak_anonymous_mib` is the
most RssAnon that was seen from outside. The synthetic image is that of bench/images.py; `--image` takes a real one.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.emulator import Emulator
from bench.images import make_image
from bench.report import PeakAnonymous, publish
from streamd.save.push import PushOptions, push
from streamd.snapshot.names import IMAGE_FILES
from streamd.store.opening import open_store
from streamd.store.port import Condition, Store

MIB = 1 << 20
_THREADS = PushOptions().uploads
_PIECE_BYTES = PushOptions().pack_bytes


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="where images and stores are made [a temporary directory]")
    parser.add_argument("--image", type=Path)
    parser.add_argument("--only", choices=["file", "gs"])
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measured_push(Path(arguments.child[0]), arguments.child[1])))
        return
    with tempfile.TemporaryDirectory(prefix="bench-push-", dir=arguments.directory) as scratch:
        image = arguments.image
        if image is None:
            image = Path(scratch) / "image"
            make_image(image, arguments.mib * MIB)
        image_mib = round(sum((image / name).stat().st_size for name in IMAGE_FILES) / MIB, 1)
        result: dict[str, Any] = {}
        if arguments.only != "gs":
            result["file"] = to_directory(image, Path(scratch), arguments.rounds)
        if arguments.only != "file":
            result["gs"] = to_emulator(image, arguments.rounds)
    publish("push", {"image_mib": image_mib, "rounds": arguments.rounds}, result)


def measured_push(image: Path, url: str) -> dict[str, float]:
    """Push in this process, once, and give seconds and stored bytes."""
    store = open_store(url)
    # The client's own imports and its first connection are not push's work.
    store.now_s()
    began_s = time.perf_counter()
    pushed = push(image, store, snapshot_id="bench", push_id="bench")
    return {"s": time.perf_counter() - began_s, "stored_bytes": pushed.stored_bytes}


def to_directory(image: Path, scratch: Path, rounds: int) -> dict[str, Any]:
    """Push and zstd in turns."""
    pages = image / "pages.img"
    compressed = scratch / "pages.zst"

    def zstd() -> float:
        compressed.unlink(missing_ok=True)
        return _timed(
            lambda: subprocess.run(["zstd", "-q", "-1", "-T0", str(pages), "-o", str(compressed)], check=True)
        )

    def synced() -> float:
        with compressed.open("rb") as file:
            return _timed(lambda: os.fsync(file.fileno()))

    pages.read_bytes()[:0]  # from the page cache, for both
    pushes, zstds, syncs = [], [], []
    for number in range(rounds):
        store = scratch / f"store-{number}"
        store.mkdir()
        pushes.append(_push_in_child(image, f"file://{store}"))
        shutil.rmtree(store)
        zstds.append(zstd())
        syncs.append(synced())
    compressed.unlink()
    seconds = [one["s"] for one in pushes]
    return _pushed(image, pushes) | {
        "zstd_mb_per_s": round(pages.stat().st_size / 1e6 / statistics.median(zstds)),
        "ratio": _ratio(zstds, seconds),
        "ratio_synced": _ratio([a + b for a, b in zip(zstds, syncs, strict=True)], seconds),
    }


def to_emulator(image: Path, rounds: int) -> dict[str, Any]:
    """Push and plain uploads in turns, each to an emulator of its own (it keeps objects in memory)."""
    pushes, images, packs = [], [], []
    for _ in range(rounds):
        with Emulator() as emulator:
            url = f"gs://{emulator.bucket}/bench"
            os.environ["STORAGE_EMULATOR_HOST"] = emulator.address
            pushes.append(_push_in_child(image, url))
            store = open_store(url)
            infos = list(store.list("bench/packs/"))
            stored = [
                b"".join(store.read(info.key, generation=info.generation, start=0, end=info.size)) for info in infos
            ]
            packs.append(upload(store, "stored", stored))
            store.close()
        with Emulator() as emulator:
            os.environ["STORAGE_EMULATOR_HOST"] = emulator.address
            store = open_store(f"gs://{emulator.bucket}/bench")
            store.now_s()
            images.append(upload(store, "image", [image / name for name in IMAGE_FILES]))
            store.close()
    seconds = [one["s"] for one in pushes]
    return _pushed(image, pushes) | {
        "upload_mb_per_s": round(
            sum((image / name).stat().st_size for name in IMAGE_FILES) / 1e6 / statistics.median(images)
        ),
        "ratio": _ratio(images, seconds),
        "ratio_stored": _ratio(packs, seconds),
    }


def upload(store: Store, prefix: str, sources: Sequence[Path | bytes]) -> float:
    """Upload files, in pieces, and byte strings with as many threads as push; give the seconds."""

    def put(key: str, source: Path | bytes, start: int, end: int) -> None:
        if isinstance(source, Path):
            with source.open("rb") as file:
                data = os.pread(file.fileno(), end - start, start)
        else:
            data = source
        store.put(key, data, condition=Condition.ABSENT)

    with ThreadPoolExecutor(_THREADS) as threads:

        def run() -> None:
            futures = []
            for index, source in enumerate(sources):
                size = source.stat().st_size if isinstance(source, Path) else len(source)
                for start in range(0, size, _PIECE_BYTES):
                    key = f"{prefix}/{index}-{start}"
                    futures.append(threads.submit(put, key, source, start, min(start + _PIECE_BYTES, size)))
            for future in futures:
                future.result()

        return _timed(run)


def _push_in_child(image: Path, url: str) -> dict[str, float]:
    words = [sys.executable, "-m", "bench.push", "--child", str(image), url]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as child, PeakAnonymous(child.pid) as memory:
        out, _ = child.communicate()
    if child.returncode:
        raise RuntimeError(f"push ended with {child.returncode}")
    result: dict[str, float] = json.loads(out)
    return result | {"peak_anonymous_mib": memory.peak_bytes / MIB}


def _pushed(image: Path, pushes: list[dict[str, float]]) -> dict[str, Any]:
    size = sum((image / name).stat().st_size for name in IMAGE_FILES)
    return {
        "push_mb_per_s": round(size / 1e6 / statistics.median(one["s"] for one in pushes)),
        "stored_share": round(pushes[0]["stored_bytes"] / size, 3),
        "peak_anonymous_mib": round(max(one["peak_anonymous_mib"] for one in pushes), 1),
    }


def _ratio(theirs_s: Sequence[float], ours_s: Sequence[float]) -> float:
    return round(statistics.median(a / b for a, b in zip(theirs_s, ours_s, strict=True)), 2)


def _timed(call: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


if __name__ == "__main__":
    main()
