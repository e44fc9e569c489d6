"""What `streamd-runsc` costs over runsc: paired runs of the same command, with and without it, one JSON object.

A `state` passes through. `create` and `start` are decided: with nobody at the agent's socket, and with an agent that
answers at once. runsc's own `create` and `start` aren't run (they make a sandbox, which takes ten times as long and
varies by more than what is looked for): behind the wrapper they are runsc's `--version`, so the differences are the
wrapper's alone.
"""

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from agent.wrapper.building import build
from bench.pods import runsc_binary
from bench.report import paired, publish, spread

_PLAIN = json.dumps({"version": 1, "answer": "plain", "annotations": {"dev.gvisor.internal.checkpoint.enable": "true"}})


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.wrapper", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20, help="pairs of runs of each kind [20]")
    rounds = parser.parse_args().rounds
    runsc = runsc_binary().resolve()
    with tempfile.TemporaryDirectory(prefix="wrapper-", dir="/var/tmp") as name:
        directory = Path(name)
        # A script would add a shell's start to both; runsc prints its version whatever follows.
        config = directory / "runsc.toml"
        config.write_text(
            f'runsc = "{runsc}"\nagent_socket = "{directory}/agent.sock"\nrun_directory = "{directory}/run"\n'
        )
        wrapper = build(directory / "streamd-runsc", config=config)
        bundle = directory / "bundle"
        bundle.mkdir()
        spec = {"ociVersion": "1.0.2", "annotations": {}, "process": {"env": ["A=" + "x" * 100] * 100}}
        (bundle / "config.json").write_text(json.dumps(spec))
        commands = {
            "state": ["--version", "--root", "/run/x", "state", "abc"],
            "create": ["--version=true", "--root", "/run/x", "create", "--bundle", str(bundle), "abc"],
            "start": ["--version=true", "--root", "/run/x", "start", "abc"],
        }
        figures = {}
        figures["state"] = _compared(wrapper, runsc, commands["state"], rounds)
        for verb in ("create", "start"):
            figures[f"{verb}, no agent"] = _compared(wrapper, runsc, commands[verb], rounds)
        with _agent(directory / "agent.sock"):
            for verb in ("create", "start"):
                figures[f"{verb}, an agent"] = _compared(wrapper, runsc, commands[verb], rounds)
    publish("wrapper", {"rounds": rounds, "runsc": "--version"}, figures)


def _compared(wrapper: Path, runsc: Path, arguments: Sequence[str], rounds: int) -> dict[str, object]:
    def taking(program: Path) -> float:
        began_s = time.perf_counter()
        subprocess.run([program, *arguments], stdin=subprocess.DEVNULL, capture_output=True, check=True)
        return (time.perf_counter() - began_s) * 1e3

    taking(runsc), taking(wrapper)
    alone, through = paired(lambda: taking(runsc), lambda: taking(wrapper), rounds)
    over = [after - before for before, after in zip(alone, through, strict=True)]
    return {
        "runsc_ms": spread(alone),
        "wrapped_ms": spread(through),
        "over_ms": {
            "median": round(statistics.median(over), 2),
            "min": round(min(over), 2),
            "max": round(max(over), 2),
        },
    }


@contextlib.contextmanager
def _agent(path: Path) -> Iterator[None]:
    """Answer every question with an annotation, from a thread."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(os.fspath(path))
        listener.listen()

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        connection.makefile("rb").readline()
                        connection.sendall(_PLAIN.encode() + b"\n")

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


if __name__ == "__main__":
    main()
