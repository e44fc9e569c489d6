"""`make demo-containerd`: pods of a real containerd, saved at their own word and restored, with the timeline.

containerd runs its containers through `streamd-runsc`; `snapagent daemon` and `streamd daemon` run as on a node. The
same image is run three times: the first asks to be saved once it has loaded, the second is restored from that, the
third has one argument more, starts cold, and is told why. The store is a bucket of Google's API, emulated, or with
`--store file` a directory. Prints JSON with `--json`, else a timeline.
"""

import argparse
import json
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

from agent.runtime.bundle import python_interpreter
from bench.agent_node import ASKING_SERVER, LABELS, AgentNode
from bench.containerd import NAMESPACE, Containerd, Task
from bench.emulator import Emulator
from bench.server import Heap

# Loads for some seconds on one core, so that it is worth saving.
HEAP_MIB = 512
_READY_S = 300.0


@dataclass(slots=True)
class Demo:
    """What has happened. Times are seconds since the demo's first run; a start counts until its first answer."""

    began_s: float = field(default_factory=time.monotonic)
    timeline: list[tuple[float, str]] = field(default_factory=list)
    cold_start_s: float = 0.0
    restored_start_s: float = 0.0
    same_memory: bool = False
    cold_reason: str = ""
    snapshot_url: str = ""
    events: list[dict[str, Any]] = field(default_factory=list)

    def tell(self, what: str) -> None:
        """Note what has happened now."""
        self.timeline.append((round(time.monotonic() - self.began_s, 2), what))

    @property
    def is_good(self) -> bool:
        """Whether it has shown what it is to show."""
        return self.same_memory and self.restored_start_s < self.cold_start_s and "--verbose" in self.cold_reason


def run(heap_mib: int = HEAP_MIB, store: str = "gs") -> Demo:
    """Run it, and leave nothing behind. Raises: `AssertionError` with the agent's log when something doesn't come."""
    with ExitStack() as stack:
        gcs = stack.enter_context(Emulator()).address if store == "gs" else ""
        root_below = f"containerd/runsc/{NAMESPACE}"
        node = stack.enter_context(AgentNode(network="sandbox", root_below=root_below, gcs=gcs))
        containerd = stack.enter_context(Containerd(node.directory / "containerd", node.wrapper))
        node.write_policy("workload")
        demo = Demo()

        def started(name: str, *more: str) -> Task:
            args = [str(python_interpreter()), "-IS", "-u", "-c", ASKING_SERVER, str(heap_mib), *more]
            demo.tell(f"ctr run {name}")
            return containerd.run(name, Heap(1, 1), annotations=LABELS, command=args)

        began_s = time.monotonic()
        first = started("web-1")
        first.server.receive(timeout_s=_READY_S)
        token = first.server.request("token", timeout_s=_READY_S)
        demo.cold_start_s = round(time.monotonic() - began_s, 2)
        demo.tell("web-1 answers: it was started cold")
        memory = first.server.request("memory", timeout_s=_READY_S)
        assert first.server.request("save", timeout_s=_READY_S) == "resume"
        demo.tell("web-1 has asked to be saved, and goes on")
        ready = node.until_event("snapshot ready")
        demo.snapshot_url = node.snapshot_url(ready["snapshot"])
        demo.tell(f"snapshot {ready['snapshot']} is in the store: {demo.snapshot_url}")

        began_s = time.monotonic()
        second = started("web-2")
        assert second.server.receive(timeout_s=_READY_S) == "was restore"
        assert second.server.request("token", timeout_s=_READY_S) == token
        demo.restored_start_s = round(time.monotonic() - began_s, 2)
        demo.tell("web-2 answers from the memory of web-1")
        demo.same_memory = second.server.request("memory", timeout_s=_READY_S) == memory
        demo.tell("web-2 has read all of its memory")
        node.until_event("restored")
        demo.tell("all memory of web-2 is loaded and the restore is proven")

        third = started("web-3", "--verbose")
        third.server.receive(timeout_s=_READY_S)
        demo.cold_reason = node.events("cold start")[-1]["message"]
        demo.tell(f"web-3 was started cold: {demo.cold_reason}")
        demo.events = node.status()["events"]
        return demo


def main() -> int:
    """Run it and show it; 1 when it has not shown what it is to show."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.containerd_demo", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--heap", type=int, default=HEAP_MIB, metavar="MIB", help="the server's heap [%(default)s]")
    parser.add_argument("--store", choices=("gs", "file"), default="gs", help="what it is saved in [%(default)s]")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    demo = run(arguments.heap, arguments.store)
    if arguments.json:
        print(json.dumps(asdict(demo) | {"heap_mib": arguments.heap, "is_good": demo.is_good}))
    else:
        for at_s, what in demo.timeline:
            print(f"{at_s:8.2f} s  {what}")
        print(f"first answer: {demo.cold_start_s:.2f} s started cold, {demo.restored_start_s:.2f} s restored")
    return 0 if demo.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
