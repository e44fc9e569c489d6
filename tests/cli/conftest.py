"""What the tests of the commands share: a small image, a store, and a way to run `streamd` as its users do."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

if TYPE_CHECKING:
    from tests.daemon.api.fake_node import Running

PAGE = 4096
# A hang shows as a failure; nothing here takes more than a few seconds.
LIMIT_S = 120


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes(out) + bytes([value])


def _field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def pages_meta(ranges: list[tuple[int, int, int]]) -> bytes:
    """Write a pages_meta.img with one memory file whose committed ranges are (start, end, kind), as gVisor does."""
    proto = _field(1, 1)
    for start, end, kind in ranges:
        proto += _field(3, _field(1, start) + _field(2, end) + _field(3, kind) + _field(5, 1))
    name = b"pkg/sentry/kernel.privateMemoryFileMetadata"
    graph = _varint(1 << 63 | 1) + bytes([17, len(name)]) + name + bytes([1, 6]) + b"owners" + bytes([2, 1, 11, 1, 5])
    return len(proto).to_bytes(8, "little") + proto + graph


def write_image(directory: Path, *, pages: int, seed: int = 1) -> None:
    """Write an image directory like those of `runsc checkpoint`: a third zero pages, the rest half compressible."""
    directory.mkdir()
    metadata = {
        "compression": "none",
        "container_count": "1",
        "container_specs": json.dumps({"web": {"process": {"env": ["SECRET=1"]}}}),
        "network": "none",
        "runsc_version": "test-1",
    }
    head = json.dumps(metadata).encode()
    (directory / "checkpoint.img").write_bytes(b"gVisorSF" + len(head).to_bytes(8, "big") + head + b"graph" * 1000)
    (directory / "pages_meta.img").write_bytes(pages_meta([(0, pages * PAGE, 1)]))
    data = np.random.default_rng(seed).integers(0, 256, size=(pages, PAGE), dtype=np.uint8)
    data[:, PAGE // 2 :] = 7
    data[pages // 3 : 2 * pages // 3] = 0
    (directory / "pages.img").write_bytes(data.tobytes())


@dataclass(frozen=True, slots=True)
class Streamd:
    """Runs `streamd` in processes of its own, with directories of its own."""

    base: Path

    @property
    def config(self) -> Path:
        return self.base / "streamd.toml"

    def arguments(self, *arguments: str | Path) -> list[str]:
        return [sys.executable, "-m", "streamd.cli", "--config", str(self.config), *map(str, arguments)]

    def run(self, *arguments: str | Path, env: dict[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            self.arguments(*arguments),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            env=os.environ | (env or {}),
            cwd=self.base,
        )

    def ok(self, *arguments: str | Path) -> Any:
        """Run with `--json`, expect success, give the object."""
        result = self.run(*arguments, "--json")
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)

    def refused(self, *arguments: str | Path) -> Any:
        """Run with `--json`, expect failure, give the error; its exit code is the process's."""
        result = self.run(*arguments, "--json")
        error = json.loads(result.stdout)["error"]
        assert result.returncode == error["exit_code"] != 0
        assert error["message"] in result.stderr
        return error


@pytest.fixture
def streamd() -> Iterator[Streamd]:
    # Not tmp_path: a control socket's path must be short.
    base = Path(tempfile.mkdtemp(prefix="streamd-cli-"))
    program = Streamd(base)
    program.config.write_text(
        f'run_directory = "{base}/run"\nlog_directory = "{base}/log"\n[cache]\ndirectory = "{base}/cache"\n'
        '[policy]\numount_wait_s = "1s"\n'
    )
    yield program
    for mount in [line.split(" ")[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]:
        if mount.startswith(f"{base}/"):
            program.run("umount", mount, "--force")
    shutil.rmtree(base)


@pytest.fixture
def daemon(streamd: Streamd) -> Iterator["Running"]:
    """Run the control API of a node in memory, where `streamd` looks for the daemon's."""
    from streamd.daemon.api.limits import Limits
    from streamd.daemon.api.server import Allowed
    from tests.daemon.api.fake_node import Running

    with Running(streamd.base / "run", Limits(), Allowed()).started() as running:
        yield running


@pytest.fixture(scope="session")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("image") / "image"
    write_image(directory, pages=600)
    return directory


@pytest.fixture
def snapshot(streamd: Streamd, image: Path) -> str:
    """Give the address of a snapshot of `image`, in a store of this test's own."""
    return str(streamd.ok("push", image, f"file://{streamd.base}/store", "--id", "web-1")["url"])
