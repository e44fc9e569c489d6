"""Which client reads ranges with the least: google-cloud-storage, obstore, or our own. Prints JSON.

    python -m bench.range_reads [--rate 800mbit] [--seconds 2] [--object-mib 64]

Each row is one client reading ranges of one size from one object with some threads, each thread a range at a time, over
connections that were used before; `mb_per_s` is 10^6 bytes a second, `cpu_s_per_gb` this process's processor time. The
rows `GoogleStore` read as streamd does, in pieces as they arrive. Without `--rate` the emulator is on the same cores,
so that the figures compare clients and say little about a network; with it, it is at the end of such a link
(`shaped_link.py`), where bytes come in small portions, as they do from a real store.
"""

import argparse
import os
import random
import resource
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from bench.emulator import Emulator
from bench.report import publish
from bench.shaped_link import ShapedLink, parse_rate
from streamd.store.gcs import GoogleStore
from streamd.store.port import Condition, ObjectInfo

Reader = Callable[[int, int], int]
Place = Emulator | ShapedLink
KEY = "ranges"


def google_reader(store_at: Place, info: ObjectInfo, threads: int) -> Reader:
    """Read by google-cloud-storage; a client for each thread, as its session isn't meant to be shared."""
    from google.auth.credentials import AnonymousCredentials
    from google.cloud import storage

    local = threading.local()

    def read(start: int, end: int) -> int:
        if not hasattr(local, "bucket"):
            client = storage.Client(
                project="-",
                credentials=AnonymousCredentials(),  # type: ignore[no-untyped-call]
                client_options={"api_endpoint": store_at.address},
            )
            client._bucket_metadata_cache = None
            local.bucket = client.bucket(store_at.bucket)
        blob: Any = local.bucket.blob(KEY, generation=int(info.generation))
        return len(blob.download_as_bytes(start=start, end=end - 1, raw_download=True, checksum=None, retry=None))

    return read


def obstore_reader(store_at: Place, info: ObjectInfo, threads: int) -> Reader:
    """Read by obstore, each body at once."""
    import obstore
    from obstore.store import GCSStore

    store = GCSStore(
        store_at.bucket,
        config={"base_url": store_at.address, "skip_signature": True},
        client_options={"allow_http": True, "timeout": timedelta(seconds=30)},
        retry_config={"max_retries": 0},
    )

    def read(start: int, end: int) -> int:
        return len(obstore.get(store, KEY, options={"version": info.generation, "range": (start, end)}).bytes())

    return read


def streamd_reader(store_at: Place, info: ObjectInfo, threads: int) -> Reader:
    """Read by streamd's store, in pieces as they arrive."""
    store = GoogleStore(store_at.bucket, emulator_host=store_at.address)

    def read(start: int, end: int) -> int:
        return sum(map(len, store.read(KEY, generation=info.generation, start=start, end=end)))

    return read


READERS: dict[str, Callable[[Place, ObjectInfo, int], Reader]] = {
    "google-cloud-storage": google_reader,
    "obstore": obstore_reader,
    "GoogleStore": streamd_reader,
}


def measure(read: Reader, *, size: int, range_bytes: int, threads: int, seconds: float) -> tuple[float, float]:
    """Read random ranges for `seconds`. Gives (10^6 bytes a second, CPU seconds for 10^9 bytes)."""
    end_s = 0.0
    totals = [0] * threads
    ready = threading.Barrier(threads + 1)

    def run(number: int) -> None:
        choice = random.Random(number)
        read(0, range_bytes)  # connects
        ready.wait()
        ready.wait()
        while time.monotonic() < end_s:
            start = choice.randrange(0, size - range_bytes + 1, 4096)
            totals[number] += read(start, start + range_bytes)

    workers = [threading.Thread(target=run, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    ready.wait()
    before, start_s = _cpu_s(), time.monotonic()
    end_s = start_s + seconds
    ready.wait()
    for worker in workers:
        worker.join()
    took_s, cpu_s = time.monotonic() - start_s, _cpu_s() - before
    return sum(totals) / took_s / 1e6, cpu_s / (sum(totals) / 1e9)


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=2.0, help="for each row")
    parser.add_argument("--object-mib", type=int, default=64)
    parser.add_argument("--rate", type=parse_rate, help="of a link to the store, such as 800mbit; needs root")
    arguments = parser.parse_args()
    size = arguments.object_mib << 20
    rows = []
    with ShapedLink() if arguments.rate else Emulator() as store_at:
        store = GoogleStore(store_at.bucket, emulator_host=store_at.address)
        info = store.put(KEY, os.urandom(size), condition=Condition.ABSENT)
        if isinstance(store_at, ShapedLink):
            store_at.set_rate(arguments.rate)
        for range_bytes in (1 << 20, 4 << 20):
            for threads in (1, 2, 4):
                for name, make in READERS.items():
                    read = make(store_at, info, threads)
                    rate, cpu = measure(
                        read, size=size, range_bytes=range_bytes, threads=threads, seconds=arguments.seconds
                    )
                    rows.append(
                        {
                            "client": name,
                            "range_bytes": range_bytes,
                            "threads": threads,
                            "mb_per_s": round(rate),
                            "cpu_s_per_gb": round(cpu, 2),
                        }
                    )
        store.close()
    publish("range_reads", vars(arguments), {"rows": rows})


if __name__ == "__main__":
    main()
