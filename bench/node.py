"""Many images on one node at once: what the link gives in total, each image's share of it, and what faults wait.

python -m bench.node [--counts 1 4 16] [--mib 512] [--rounds 3] [--fetch-max BYTES] [--output DIR]

For each N: a daemon with an empty cache, asked at once for N images of `mib` / N MiB that can't be compressed, from one
store at the end of a shaped link (800 Mbit/s, 15 ms), each read by 128 threads of its own as runsc reads (`slots.c`) as
soon as it is served. One image more is read page by page at random meanwhile, nothing of it fetched ahead: each of
those reads is a fault, whose wait is compared with that on an idle link. Then all is quiet, and what the daemon's
processes keep in memory is looked at.

Times are from the requests on. `share`: the fastest image's bytes a second over the slowest's. `link_use`: what arrived
over what the link could have carried until the last reader had all. Memory: RssAnon counts pages that forks share in
each of them; `unshared` is PSS, which splits them.
"""

import argparse
import contextlib
import json
import re
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.daemons import Daemon, ServedImage
from bench.images import make_image
from bench.mount_users import Command
from bench.report import anonymous_bytes, description
from bench.serving import build_reader
from bench.shaped_link import ShapedLink, parse_rate
from streamd.save.push import push
from streamd.store.gcs import GoogleStore

MIB = 1 << 20
_SLOTS, _READ_BYTES, _PAGE_BYTES = 128, 256 << 10, 4096
_LATENCY_S = 0.015
_RATE = "800mbit"
# 256 chunks: few of the faults find what another has brought.
_FAULT_MIB, _FAULTS = 64, 60
_LIMIT_S = 600.0
_PREFIX = "node"


@dataclass(frozen=True, slots=True)
class Round:
    """One round. Shares are bytes a second of each image, the memory in bytes, waits in milliseconds."""

    took_s: float
    bytes_per_s: float
    share: float
    link_use: float
    fault_p50_ms: float
    fault_p99_ms: float
    daemon_bytes: int
    spawner_bytes: int
    worker_bytes: int
    worker_unshared_bytes: int


@dataclass(frozen=True, slots=True)
class _Loaded:
    image: ServedImage
    bytes: float
    took_s: float


class Bench:
    """A store that has been filled, its link, and the compiled reader."""

    def __init__(self, link: ShapedLink, directory: Path, *, mib: int, bit_per_s: int, fetch_max: int) -> None:
        self._link = link
        self._settings = f"[daemon]\nfetch_max_bytes_per_s = {fetch_max}"
        self._directory = directory
        self._mib = mib
        self._bit_per_s = bit_per_s
        self._slots = build_reader(directory)

    def fill(self, counts: Sequence[int]) -> None:
        """Push what all rounds read, at full speed."""
        store = GoogleStore(self._link.bucket, _PREFIX, emulator_host=self._link.address)
        with contextlib.closing(store):
            sizes = {f"{count}-{number}": self._mib // count for count in counts for number in range(count)}
            for seed, (snapshot_id, mib) in enumerate({**sizes, "faults": _FAULT_MIB}.items()):
                with tempfile.TemporaryDirectory(dir=self._directory) as image:
                    make_image(Path(image), mib * MIB, seed=seed, zero=0.0, compressible=0.0)
                    push(Path(image), store, snapshot_id=snapshot_id, push_id="p")
        self._link.set_rate(self._bit_per_s)

    def idle_faults(self) -> dict[str, float]:
        """Give what faults wait when nobody else asks for anything."""
        with self._daemon() as daemon:
            return _result(self._faults(self._image(daemon, "faults")))

    def round(self, count: int) -> Round:
        """Load `count` images at once."""
        with self._daemon() as daemon, ThreadPoolExecutor(count) as threads:
            faulty = self._image(daemon, "faults")
            is_loading = threading.Event()
            arrived = self._link.received_bytes()
            began_s = time.monotonic()

            def load(number: int) -> _Loaded:
                try:
                    image = self._image(daemon, f"{count}-{number}")
                finally:
                    is_loading.set()
                reader = daemon.run(self._slots, "sequential", image.pages, str(_SLOTS), str(_READ_BYTES))
                return _Loaded(image, _result(reader)["bytes"], time.monotonic() - began_s)

            loading = threads.map(load, range(count))
            is_loading.wait(_LIMIT_S)
            waits = _result(self._faults(faulty))
            loaded = list(loading)
            took_s = max(one.took_s for one in loaded)
            arrived = self._link.received_bytes() - arrived
            images = [one.image for one in loaded]
            for image in (*images, faulty):
                image.until(lambda state: not state["openers"], "no opener", limit_s=_LIMIT_S)
            speeds = [one.bytes / one.took_s for one in loaded]
            workers = [image.worker_pid() for image in images]
            return Round(
                took_s=took_s,
                bytes_per_s=sum(one.bytes for one in loaded) / took_s,
                share=max(speeds) / min(speeds),
                link_use=arrived * 8 / self._bit_per_s / took_s,
                fault_p50_ms=waits["p50_us"] / 1000,
                fault_p99_ms=waits["p99_us"] / 1000,
                daemon_bytes=anonymous_bytes(daemon.pid),
                spawner_bytes=anonymous_bytes(daemon.spawner_pid()),
                worker_bytes=max(map(anonymous_bytes, workers)),
                worker_unshared_bytes=max(map(_unshared_bytes, workers)),
            )

    @contextlib.contextmanager
    def _daemon(self) -> Iterator[Daemon]:
        with Daemon(self._settings, env={"STORAGE_EMULATOR_HOST": self._link.address}) as daemon:
            yield daemon

    def _image(self, daemon: Daemon, snapshot_id: str) -> ServedImage:
        prefetch = "none" if snapshot_id == "faults" else "all"
        return daemon.image(f"gs://{self._link.bucket}/{_PREFIX}/{snapshot_id}", prefetch=prefetch)

    def _faults(self, image: ServedImage) -> Command:
        return image.daemon.run(self._slots, "random", image.pages, str(_FAULTS), str(_PAGE_BYTES))


def _result(command: Command) -> dict[str, float]:
    """Wait for a reader and give what it printed. Raises: `RuntimeError`."""
    done = command.result(_LIMIT_S)
    if done.returncode:
        raise RuntimeError(f"a reader ended with {done.returncode}: {done.stderr}")
    values: dict[str, float] = json.loads(done.stdout)
    return values


def _unshared_bytes(pid: int) -> int:
    """Give a process's share of anonymous memory, each page divided by those who have it (proc(5): smaps_rollup)."""
    found = re.search(r"^Pss_Anon:\s+(\d+) kB$", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    assert found is not None, "Linux 5.4 and later say it"
    return int(found[1]) << 10


def figures(rounds: Mapping[int, Sequence[Round]]) -> dict[str, dict[str, float]]:
    """Give the medians, by count; of memory and of the faults' p99 the most."""
    found = {}
    for count, chosen in rounds.items():
        columns = {name: [asdict(one)[name] for one in chosen] for name in asdict(chosen[0])}
        found[str(count)] = {
            name: round(max(column) if name.endswith(("_bytes", "p99_ms")) else statistics.median(column), 3)
            for name, column in columns.items()
        }
    return found


def markdown(found: Mapping[str, Mapping[str, float]], idle: Mapping[str, float]) -> str:
    """Give the table."""
    lines = [
        "| images at once | MB/s in all | link | fastest ÷ slowest | fault p50 / p99, ms "
        "| idle daemon / spawner / worker (PSS), MiB |",
        "|---|---|---|---|---|---|",
        f"| none | – | – | – | {idle['p50_us'] / 1000:.1f} / {idle['p99_us'] / 1000:.1f} | – |",
    ]
    for count, row in found.items():
        memory = " / ".join(f"{row[name] / MIB:.0f}" for name in ("daemon_bytes", "spawner_bytes", "worker_bytes"))
        lines.append(
            f"| {count} | {row['bytes_per_s'] / 1e6:.1f} | {row['link_use']:.0%} | {row['share']:.2f} "
            f"| {row['fault_p50_ms']:.1f} / {row['fault_p99_ms']:.1f} "
            f"| {memory} ({row['worker_unshared_bytes'] / MIB:.0f}) |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure all counts in turns, and publish."""
    parser = argparse.ArgumentParser(prog="python -m bench.node", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 4, 16], help="images at once [%(default)s]")
    parser.add_argument("--mib", type=int, default=512, help="of all images of a count together [%(default)s]")
    parser.add_argument("--rounds", type=int, default=3, help="[%(default)s]")
    parser.add_argument("--rate", type=parse_rate, default=_RATE, help="[%(default)s]")
    parser.add_argument(
        "--fetch-max", type=int, default=0, help="daemon.fetch_max_bytes_per_s [0: TCP shares the link]"
    )
    parser.add_argument("--output", type=Path, help="where node.json and node.md go")
    arguments = parser.parse_args()
    rounds: dict[int, list[Round]] = {count: [] for count in arguments.counts}
    with tempfile.TemporaryDirectory(prefix="bench-node-") as place, ShapedLink(latency_s=_LATENCY_S) as link:
        bench = Bench(link, Path(place), mib=arguments.mib, bit_per_s=arguments.rate, fetch_max=arguments.fetch_max)
        bench.fill(arguments.counts)
        idle = bench.idle_faults()
        for number in range(arguments.rounds):
            for count in arguments.counts:
                print(f"round {number + 1}: {count} at once", file=sys.stderr, flush=True)
                rounds[count].append(bench.round(count))
    found = figures(rounds)
    parameters = {
        "counts": arguments.counts,
        "mib": arguments.mib,
        "rounds": arguments.rounds,
        "bit_per_s": arguments.rate,
        "latency_s": _LATENCY_S,
    }
    result = description("node", parameters, {"idle_faults": idle, "images": found})
    print(json.dumps(result, indent=2), flush=True)
    table = markdown(found, idle)
    print(table, file=sys.stderr, flush=True)
    if arguments.output is not None:
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / "node.json").write_text(json.dumps(result, indent=2) + "\n")
        (arguments.output / "node.md").write_text(table)


if __name__ == "__main__":
    main()
