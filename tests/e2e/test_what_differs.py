"""What differs in a restored pod, and what goes on: a sandbox with a network of its own, saved and restored elsewhere.

The saved pod and its copy have network namespaces of their own, with other addresses; a peer outside is connected with
the first. Each row of `ROWS` is one of the product's promises; the test prints them as a table (`pytest -s`).
"""

import contextlib
import dataclasses
import json
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.runtime import bundle
from agent.runtime.arguments import GlobalOptions
from agent.runtime.runsc import Runsc
from bench.pods import runsc_binary
from bench.server import Server

_READY_S = 60.0
# Real time must pass between save and restore, so that a jump of the clock can be told from none.
_APART_S = 1.5

# Addresses for documentation (RFC 5737): they are nobody's.
PEER, OLD, NEW = "198.51.100.1", "198.51.100.2", "203.0.113.2"
NEW_PEER = "203.0.113.1"
PORT, PEER_PORT = 8080, 7000

APPLICATION = """
import json, os, socket, sys, time

def environment():
    with open("/proc/gvisor/spec_environ", "rb") as file:
        return dict(v.decode().split("=", 1) for v in file.read().split(b"\\0") if b"=" in v)

def talks(one, other):
    try:
        one.sendall(b"x")
        return other.recv(1) == b"x"
    except OSError as error:
        return error.strerror

def accepts(listener, family, address):
    with socket.socket(family) as client:
        client.connect(address)
        return talks(client, listener.accept()[0])

def external_is():
    try:
        outside.sendall(b"x")
        return outside.recv(1).decode() or "closed"
    except TimeoutError:
        return "no answer"
    except OSError:
        return "closed"

def own_address(towards):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((towards, 9))
            return probe.getsockname()[0]
        except OSError as error:
            return error.strerror

listener = socket.create_server(("0.0.0.0", PORT))
loop_client = socket.create_connection(("127.0.0.1", PORT))
loop_server = listener.accept()[0]
unix_listener = socket.socket(socket.AF_UNIX)
unix_listener.bind("/tmp/socket")
unix_listener.listen()
left, right = socket.socketpair(socket.AF_UNIX)
outside = socket.create_connection((PEER, PEER_PORT), timeout=5)
print("ready", flush=True)
for line in sys.stdin:
    print("facts", json.dumps({
        "host name": socket.gethostname(),
        "address": own_address(PEER if line.strip() == "old" else NEW_PEER),
        "process environment": os.environ["POD"],
        "spec_environ": environment()["POD"],
        "wall clock": time.time(),
        "monotonic clock": time.monotonic(),
        "loopback connection": talks(loop_client, loop_server),
        "listening socket": accepts(listener, socket.AF_INET, ("127.0.0.1", PORT)),
        "Unix socket pair": talks(left, right),
        "Unix listening socket": accepts(unix_listener, socket.AF_UNIX, "/tmp/socket"),
        "external connection": external_is(),
    }), flush=True)
"""

ECHO = """
import socket, sys, threading
def echo(connection):
    while data := connection.recv(100):
        connection.sendall(data)
listener = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("listening", flush=True)
while True:
    threading.Thread(target=echo, args=(listener.accept()[0],), daemon=True).start()
"""

Facts = dict[str, Any]


def moved(name: str, before: object, after: object) -> Callable[[Facts, Facts], bool]:
    """Check that a fact had the one value, and has the other."""
    return lambda old, new: (old[name], new[name]) == (before, after)


def jumped(name: str) -> Callable[[Facts, Facts], bool]:
    return lambda old, new: bool(new[name] - old[name] >= _APART_S)


def is_now(old: Facts, new: Facts) -> bool:
    return bool(abs(new["wall clock"] - new["host's clock"]) < 1.0)


# What is promised of a restored pod: the fact, in words, and the check of it.
ROWS: dict[str, tuple[str, str, Callable[[Facts, Facts], bool]]] = {
    "a new host name": ("host name", "new", moved("host name", "web-0", "web-1")),
    "a new address": ("address", "new", moved("address", OLD, NEW)),
    "the old environment in the process": ("process environment", "old", moved("process environment", "old", "old")),
    "the new environment in spec_environ": ("spec_environ", "new", moved("spec_environ", "old", "new")),
    "the wall clock jumps": ("wall clock", "jumps", jumped("wall clock")),
    "the wall clock is now": ("wall clock", "now", is_now),
    "the monotonic clock jumps, too": ("monotonic clock", "jumps", jumped("monotonic clock")),
    "a loopback connection goes on": ("loopback connection", "goes on", moved("loopback connection", True, True)),
    "a listening socket goes on": ("listening socket", "goes on", moved("listening socket", True, True)),
    "a pair of Unix sockets goes on": ("Unix socket pair", "goes on", moved("Unix socket pair", True, True)),
    "a listening Unix socket goes on": ("Unix listening socket", "goes on", moved("Unix listening socket", True, True)),
    "an external connection is closed": ("external connection", "closed", moved("external connection", "x", "closed")),
}


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=60)


@dataclasses.dataclass(frozen=True, slots=True)
class Network:
    """Three network namespaces: the saved pod's, its copy's, and the peer's, which is linked with both."""

    old: str
    new: str
    peer: str


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with contextlib.ExitStack() as stack:
        tag = uuid.uuid4().hex[:6]
        made = Network(f"old-{tag}", f"new-{tag}", f"peer-{tag}")
        for name in (made.peer, made.old, made.new):
            ip("netns", "add", name)
            stack.callback(ip, "netns", "del", name)
            ip("-n", name, "link", "set", "lo", "up")
        for name, its, gateway in ((made.old, OLD, PEER), (made.new, NEW, NEW_PEER)):
            link = f"v{name}"[:15]
            ip("link", "add", link, "netns", made.peer, "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("-n", made.peer, "addr", "add", f"{gateway}/24", "dev", link)
            ip("-n", made.peer, "link", "set", link, "up")
            ip("-n", name, "addr", "add", f"{its}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "route", "add", "default", "via", gateway)
        echo = subprocess.Popen(
            ["ip", "netns", "exec", made.peer, sys.executable, "-IS", "-c", ECHO, PEER, str(PEER_PORT)],
            stdout=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
        )
        stack.callback(end, echo)
        assert echo.stdout is not None
        assert echo.stdout.readline() == b"listening\n"
        yield made


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


@pytest.fixture(scope="module")
def lives(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Facts, Facts]]:
    """Give what the application says before its save, and what its copy says."""
    directory = tmp_path_factory.mktemp("differs")
    log = directory / "log"
    log.mkdir()
    options = GlobalOptions(root=directory / "runsc", network="sandbox", ignore_cgroups=True, debug_log_dir=log)
    runsc = Runsc(runsc_binary(), options)
    rootfs = bundle.make_rootfs(directory / "rootfs")
    values = {"PORT": PORT, "PEER": PEER, "PEER_PORT": PEER_PORT, "NEW_PEER": NEW_PEER}
    source = "\n".join(f"{name} = {value!r}" for name, value in values.items()) + APPLICATION

    def bundle_of(host_name: str, pod: str, namespace: str) -> Path:
        container = bundle.Container(
            args=(str(bundle.python_interpreter()), "-IS", "-c", source),
            rootfs=rootfs,
            env={"PATH": "/usr/bin:/bin", "POD": pod},
            hostname=host_name,
        )
        spec = bundle.container_spec(container)
        for one in spec["linux"]["namespaces"]:
            if one["type"] == "network":
                one["path"] = f"/var/run/netns/{namespace}"
        path = directory / host_name
        path.mkdir()
        (path / "config.json").write_text(json.dumps(spec))
        return path

    with contextlib.ExitStack() as stack:
        stack.callback(runsc.remove_root)
        first, second = (stack.enter_context(Server()) for _ in range(2))
        runsc.run("first", bundle_of("web-0", "old", network.old), first.stdio)
        first.connected()
        assert first.receive(timeout_s=_READY_S) == "ready"
        before = json.loads(first.request("old"))
        runsc.checkpoint("first", directory / "image")
        runsc.delete("first", force=True)
        time.sleep(_APART_S)
        runsc.restore("second", bundle_of("web-1", "new", network.new), directory / "image", second.stdio)
        second.connected()
        after = json.loads(second.request("new"))
        after["host's clock"] = time.time()
        yield before, after


@pytest.mark.parametrize("row", ROWS)
def test_of_a_restored_pod_is_true_that(row: str, lives: tuple[Facts, Facts]) -> None:
    fact, _, check = ROWS[row]
    before, after = lives
    assert check(before, after), f"{fact}: before {before[fact]!r}, after {after[fact]!r}"


def test_the_table_of_what_differs(lives: tuple[Facts, Facts]) -> None:
    before, after = lives
    print("\n| | before the save | in the restored pod | |\n|---|---|---|---|")
    for row, (fact, word, _) in ROWS.items():
        print(f"| {row} | {shown(before[fact])} | {shown(after[fact])} | {word} |")


def shown(value: object) -> str:
    match value:
        case True:
            return "answers"
        case float():
            return f"{value:.1f}"
        case _:
            return str(value)
