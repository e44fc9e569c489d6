"""Run the benchmarks, one after another, and keep what each prints: `python -m bench [NAME …]`, or `make bench`.

Each is a process of its own that prints JSON; it goes to `bench/results/NAME.json`. `python -m bench.NAME --help` says
what one takes.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

BENCHMARKS = ("push", "serving", "range_reads", "chunk_size", "node", "matching", "wrapper", "race")
RESULTS = Path(__file__).parent / "results"


def main() -> int:
    """Run what was asked for; 1 when one failed."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)} [all]")
    names = parser.parse_args().names or BENCHMARKS
    unknown = sorted(set(names) - set(BENCHMARKS))
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}")
    failed = []
    RESULTS.mkdir(exist_ok=True)
    for name in names:
        began_s = time.monotonic()
        print(f"bench.{name} …", file=sys.stderr, flush=True)
        done = subprocess.run([sys.executable, "-m", f"bench.{name}"], stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            failed.append(name)
            continue
        json.loads(done.stdout)
        (RESULTS / f"{name}.json").write_text(done.stdout)
        print(done.stdout, end="", flush=True)
        print(f"bench.{name}: {time.monotonic() - began_s:.0f} s", file=sys.stderr, flush=True)
    for name in failed:
        print(f"bench.{name} failed", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
