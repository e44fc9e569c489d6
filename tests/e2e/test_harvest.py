"""`snapagent harvest`: a snapshot's order is learned in a sandbox that nobody sees, and nothing of it stays."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.runtime.bundle import write_bundle
from agent.runtime.runsc import Runsc
from bench.commands import Streamd
from bench.pods import Image
from bench.server import server_container, server_rootfs

_LIMIT_S = 180.0
# Some 50 MB are stored: the server is there, and asked, long before they are.
_SLOW = "?latency=5ms&rate=8MB/s"

Images = Callable[..., Image]
Push = Callable[[Image, str], str]


def left_behind() -> set[str]:
    """Name what harvests leave if they leave anything: directories, mounts, processes."""
    found = {str(path) for path in Path("/var/tmp").glob("snapagent-harvest-*")}
    found |= set(re.findall(r"/var/tmp/snapagent-harvest-\S+", Path("/proc/self/mountinfo").read_text()))
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if "/var/tmp/snapagent-harvest-" in command:
                found.add(command)
    return found


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    before = left_behind()
    yield
    assert left_behind() <= before


class Snapagent:
    """Runs `snapagent harvest` as its users do."""

    def __init__(self, streamd: Streamd, runsc: Runsc, directory: Path) -> None:
        self._streamd, self._runsc, self.directory = streamd, runsc, directory

    def bundle(self, image: Image) -> Path:
        """Make the bundle of the image's server; its root is a relative path."""
        rootfs = server_rootfs(self.directory / "bundle" / "rootfs")
        container = server_container(rootfs, image.shape.heaps[0])
        bundle = write_bundle(self.directory / "bundle", container)
        spec = json.loads((bundle / "config.json").read_text())
        spec["root"]["path"] = "rootfs"
        (bundle / "config.json").write_text(json.dumps(spec))
        return bundle

    def start(self, *arguments: str | Path) -> "subprocess.Popen[str]":
        flags = ["--runsc", self._runsc.binary, "--streamd-config", self._streamd.config, "--json"]
        return subprocess.Popen(
            [sys.executable, "-m", "agent.cli", "harvest", *map(str, [*arguments, *flags])],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | dict(self._streamd.env),
        )

    def run(self, *arguments: str | Path) -> tuple[int, Any]:
        process = self.start(*arguments)
        stdout, stderr = process.communicate(timeout=_LIMIT_S)
        assert "Traceback" not in stderr
        return process.returncode, json.loads(stdout)


@pytest.fixture
def snapagent(streamd: Streamd, runsc: Runsc, tmp_path: Path) -> Snapagent:
    return Snapagent(streamd, runsc, tmp_path)


def test_a_harvest_learns_what_its_server_waits_for_and_another_adds_to_it(
    images: Images, push: Push, streamd: Streamd, snapagent: Snapagent
) -> None:
    # So large that most of what is touched lies far beyond runsc's first 128 reads: only that is a fault.
    image = images(1, "ro", 256)
    url = push(image, "file") + "?latency=5ms&rate=16MB/s"
    streamd.run("trace", "drop", url)
    bundle = snapagent.bundle(image)
    before = {path: path.read_bytes() for path in bundle.iterdir() if path.is_file()}
    requests = snapagent.directory / "requests"
    requests.write_text("".join(f"touch {key}\n" for key in range(20)))
    code, harvest = snapagent.run(url, "--bundle", bundle, "--stdin", requests, "--request", "/bin/true")
    assert (code, harvest["learned"], harvest["samples"]) == (0, True, 1)
    assert harvest["loaded_s"] > 1
    assert {path: path.read_bytes() for path in bundle.iterdir() if path.is_file()} == before

    shown = streamd.run("trace", "show", url)
    assert (shown["samples"], len(shown["ranges"]), shown["waited_bytes"]) == (
        1,
        harvest["ranges"],
        harvest["waited_bytes"],
    )
    assert 0 < shown["waited_bytes"] <= shown["pages_bytes"]
    code, again = snapagent.run(url, "--bundle", bundle, "--stdin", requests)
    assert (code, again["samples"]) == (0, 2)


def test_a_request_that_fails_ends_the_harvest_and_is_told(images: Images, push: Push, snapagent: Snapagent) -> None:
    image = images(1, "ro")
    url = push(image, "file")
    code, said = snapagent.run(url, "--bundle", snapagent.bundle(image), "--request", "/bin/ls /nowhere")
    assert code == said["error"]["exit_code"] == 1
    assert "/bin/ls /nowhere ended with exit code 2" in said["error"]["message"]
    assert "No such file" in said["error"]["message"]


def test_a_time_limit_ends_a_harvest_while_it_loads(images: Images, push: Push, snapagent: Snapagent) -> None:
    image = images(1, "ro")
    url = push(image, "file") + "?rate=4MB/s"
    code, harvest = snapagent.run(url, "--bundle", snapagent.bundle(image), "--for", "2s")
    assert (code, harvest["loaded_s"]) == (0, None)


@pytest.mark.parametrize(
    ("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "sigterm"]
)
@pytest.mark.parametrize("step", ["mounting", "restoring", "waiting"])
def test_a_harvest_that_is_interrupted_leaves_nothing(
    number: signal.Signals, exit_code: int, step: str, images: Images, push: Push, snapagent: Snapagent
) -> None:
    image = images(1, "ro")
    url = push(image, "file") + "?rate=4MB/s"
    process = snapagent.start(url, "--bundle", snapagent.bundle(image))
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith(step):
            break
    process.send_signal(number)
    stdout, _ = process.communicate(timeout=_LIMIT_S)
    assert process.returncode == exit_code
    assert json.loads(stdout)["error"]["kind"] == "interrupted"


def test_what_can_not_be_harvested_is_refused_before_anything_is_started(
    images: Images, push: Push, snapagent: Snapagent, tmp_path: Path
) -> None:
    image = images(1, "ro")
    url, bundle = push(image, "file"), snapagent.bundle(image)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert snapagent.run(url, "--bundle", empty)[0] == 3
    (empty / "config.json").write_text("[]")
    assert snapagent.run(url, "--bundle", empty)[0] == 7
    assert snapagent.run(f"{url}-nowhere", "--bundle", bundle)[0] == 3
    spec = json.loads((bundle / "config.json").read_text())
    spec["mounts"].append({"destination": "/data", "type": "bind", "source": str(tmp_path), "options": ["rbind"]})
    (empty / "config.json").write_text(json.dumps(spec))
    code, said = snapagent.run(url, "--bundle", empty)
    assert code == 7
    assert "/data" in said["error"]["message"]


def test_a_bundle_of_something_else_fails_with_what_runsc_says(
    images: Images, push: Push, snapagent: Snapagent
) -> None:
    image = images(1, "ro")
    bundle = snapagent.bundle(image)
    spec = json.loads((bundle / "config.json").read_text())
    spec["process"]["args"] = ["/bin/true"]
    (bundle / "config.json").write_text(json.dumps(spec))
    code, said = snapagent.run(push(image, "file"), "--bundle", bundle)
    assert code == 1
    assert "runsc restore" in said["error"]["message"]
