"""A store at the end of a link of known speed and latency: the emulator in a network namespace of its own.

    with ShapedLink(latency_s=0.015) as link:
        ...                                    # fill the store at link.address, at full speed
        link.set_rate(800_000_000)             # bits per second on the wire, from here on, towards us
        ...; link.wire_bytes()

    python -m bench.shaped_link --rate 800mbit --latency 15ms --snapshot IMAGE_DIR     # until Ctrl-C

             our namespace        |                  the store's namespace
    client ── veth ───────────────┼── veth, tbf ── delay_line ── loopback ── fake-gcs-server

- **Rate**: a token bucket (tc-tbf) on the store's end of a veth pair. Its burst is 128 kB: a larger one hands short
  answers over at the speed of memory and falsifies what comes of them. With it, a kernel timer that is late by more
  than 1.3 ms (at 800 Mbit/s) loses that time for good: on a virtual machine whose CPUs are taken away, the link is
  slower than its rate. Headers count: 800 Mbit/s carry 95.6 MB/s of TCP payload at an MTU of 1500.
- **Latency**: `delay_line.c` holds each request; its CPU costs are a tenth of toxiproxy's. A connection is made without
  delay.
- **Cleaning up**: nothing has a name outside. All processes die with the one that made them (PR_SET_PDEATHSIG, also
  by SIGKILL); with the last of them the namespace goes, and with it both ends of the link.

Needs root, iproute2 and gcc. Must be entered on a thread that outlives the block (prctl(2): the signal comes when the
*thread* that started the child ends).
"""

import argparse
import contextlib
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from bench.commands import Streamd
from bench.emulator import Elsewhere, Emulator
from streamd.config import parse_duration

_DELAY_LINE = Path(__file__).with_name("delay_line.c")
# In a namespace of our own any port is free.
_PORT = 4443
_EMULATOR_PORT = 4444
_BURST = "128kb"
# How long a packet may wait in the bucket: longer than the sockets let it (TCP small queues), so that none is dropped.
_QUEUE = "20ms"
_DIES_WITH_US = ("setpriv", "--pdeathsig", "KILL")
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]?)bit", re.IGNORECASE)


def parse_rate(text: str) -> int:
    """Give the bits per second in a rate as tc(8) writes it: `800mbit`, `2gbit`.

    Raises: ValueError when `text` is not one.
    """
    match = _RATE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"not a rate: {text!r} (such as 800mbit, 2gbit)")
    return int(float(match[1]) * {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}[match[2].lower()])


class ShapedLink:
    """A running store and the link to it; a context manager.

    `address`: `http://IP:PORT`, for `STORAGE_EMULATOR_HOST`. `bucket`: made, empty but for what is in `data`, a
    directory of files BUCKET/OBJECT. Not shaped until `set_rate`.
    """

    def __init__(self, bucket: str = "bucket", *, latency_s: float = 0.015, data: str | None = None) -> None:
        self.bucket = bucket
        self.address = ""
        self._data = data
        self._latency_s = latency_s
        self._stack = contextlib.ExitStack()
        self._inside: tuple[str, ...] = ()
        self._near = ""
        self._delay_line_id = 0
        self._emulator: Emulator | None = None

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            line = stack.enter_context(_delay_line(self._latency_s))
            self._delay_line_id = line.pid
            self._inside = ("nsenter", f"--net=/proc/{line.pid}/ns/net")
            self._near = f"shaped{line.pid}"
            host = self._join(line.pid)
            # Else it goes some time after the namespace.
            stack.callback(subprocess.run, ("ip", "link", "del", self._near), capture_output=True, check=False)
            there = Elsewhere((*_DIES_WITH_US, *self._inside), _EMULATOR_PORT, host, _PORT)
            self._emulator = stack.enter_context(Emulator(self.bucket, data=self._data, elsewhere=there))
            self.address = self._emulator.address
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def set_rate(self, bit_per_s: int | None) -> None:
        """Shape what the store sends from now on, or stop to; `wire_bytes` begins again at 0."""
        subprocess.run([*self._inside, "tc", "qdisc", "del", "dev", "eth0", "root"], capture_output=True, check=False)
        if bit_per_s is not None:
            shape = ("tbf", "rate", f"{bit_per_s}bit", "burst", _BURST, "latency", _QUEUE)
            _run(*self._inside, "tc", "qdisc", "add", "dev", "eth0", "root", *shape)

    def wire_bytes(self) -> int:
        """Give what the store has sent since `set_rate`, with all headers, as the token bucket counts it.

        (The interface's own counters see a packet of up to 64 KiB that the kernel cuts later, so they lack 4 %.)
        """
        found = json.loads(_run(*self._inside, "tc", "-s", "-j", "qdisc", "show", "dev", "eth0"))
        assert found[0]["kind"] == "tbf", "set_rate comes first"
        return int(found[0]["bytes"])

    def received_bytes(self) -> int:
        """Give what has arrived here since the link was made, most headers not counted; it costs the read of a file."""
        return int(Path("/sys/class/net", self._near, "statistics/rx_bytes").read_text())

    def process_ids(self) -> tuple[int, int]:
        """Give the processes that the store is made of, whose CPU time is not the client's: emulator, delay line."""
        assert self._emulator is not None, "not entered"
        return self._emulator.process_id, self._delay_line_id

    def _join(self, process_id: int) -> str:
        """Lay the link between our namespace and that of a process; give the address of its far end."""
        ours, theirs = _free_addresses(process_id)
        _run("ip", "link", "add", self._near, "type", "veth", "peer", "name", "eth0", "netns", str(process_id))
        _run("ip", "address", "add", f"{ours}/30", "dev", self._near)
        _run("ip", "link", "set", self._near, "up")
        for command in ("link set lo up", f"address add {theirs}/30 dev eth0", "link set eth0 up"):
            _run(*self._inside, "ip", *command.split())
        return theirs


@contextlib.contextmanager
def _delay_line(latency_s: float) -> Iterator[subprocess.Popen[bytes]]:
    """Run the delay line in a new network namespace, which lives as long as it."""
    with tempfile.TemporaryDirectory() as directory:
        program = Path(directory, "delay_line")
        _run("gcc", "-O2", "-Wall", "-pthread", "-o", str(program), str(_DELAY_LINE))
        arguments = (str(_PORT), str(_EMULATOR_PORT), str(round(latency_s * 1e6)))
        process = subprocess.Popen(
            [*_DIES_WITH_US, "unshare", "--net", str(program), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        try:
            assert process.stdout is not None
            if process.stdout.readline() != b"ready\n":  # it says so or ends, and so does what leads to it
                raise RuntimeError("the delay line did not start (above)")
        except BaseException:
            _end(process)
            raise
    # The program's file is gone; the process keeps it.
    try:
        yield process
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that holds nothing, and wait until it is gone."""
    process.kill()
    if process.stdout is not None:
        process.stdout.close()
    process.wait()


def _free_addresses(seed: int) -> tuple[str, str]:
    """Choose the two addresses of a /30 in 10.200.0.0/16 that no interface here has, the search beginning at `seed`."""
    taken = {
        found["local"] for link in json.loads(_run("ip", "-j", "-4", "address", "show")) for found in link["addr_info"]
    }
    for attempt in range(1 << 14):
        network = (seed + attempt) % (1 << 14) * 4
        ours, theirs = (f"10.200.{(network + n) >> 8}.{(network + n) & 255}" for n in (1, 2))
        if ours not in taken:
            return ours, theirs
    raise RuntimeError("10.200.0.0/16 is full")


def _run(*command: str) -> str:
    """Run a command that takes no time and give its output.

    Raises: RuntimeError with what it said.
    """
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout


def main() -> int:
    """Hold a store up until Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m bench.shaped_link", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rate", type=parse_rate, default="800mbit", help="[%(default)s]")
    parser.add_argument("--latency", type=parse_duration, default="15ms", help="[%(default)s]")
    parser.add_argument(
        "--snapshot", type=Path, action="append", default=[], help="an image directory to push; any number"
    )
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # leaves by the same door
    with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as stack:
        link = stack.enter_context(ShapedLink(latency_s=arguments.latency))
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        print(f"export STORAGE_EMULATOR_HOST={link.address}", flush=True)
        streamd = Streamd(scratch / "streamd", {"STORAGE_EMULATOR_HOST": link.address})
        for image in arguments.snapshot:
            streamd.run("push", str(image), f"gs://{link.bucket}/snapshots", "--id", image.resolve().name)
            print(f"gs://{link.bucket}/snapshots/{image.resolve().name}", flush=True)
        link.set_rate(arguments.rate)
        print(f"up, {arguments.rate / 1e6:g} Mbit/s, {arguments.latency * 1e3:g} ms; Ctrl-C ends it", file=sys.stderr)
        while True:
            time.sleep(3600)
    return 0


if __name__ == "__main__":
    sys.exit(main())
