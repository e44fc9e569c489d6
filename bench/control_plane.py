"""A Kubernetes control plane of one's own: a real etcd, kube-apiserver, and at wish controller-manager and scheduler.

    with ControlPlane() as plane:
        plane.apply(Path("deploy/base"))                       # with kubectl, as a person would
        plane.request("GET", "/api/v1/namespaces")             # as the administrator
        plane.kubeconfig_for(plane.service_account_token("podsnapshot-system", "podsnapshot-agent"))

The four programs are one binary, built once from `bench/kubetest` (Go 1.26 or newer; 8 to 15 minutes on two cores),
then kept in ~/.cache/podsnap by the hash of what it is made of. Everything listens on the loopback interface, keeps its
data in one directory below /tmp and is killed in the end. There is no kubelet: whoever needs one plays its part.

`stop_server` and `start_server` are an outage; a server that was started again answers 410 to watches from before.
"""

import base64
import contextlib
import hashlib
import http.client
import json
import os
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import sysconfig
import tempfile
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import trustme
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

VERSION = "v1.36.3"
_SOURCE = Path(__file__).with_name("kubetest")
_SOURCES = ("go.mod", "go.sum", "main.go")
_CACHE = Path("~/.cache/podsnap").expanduser()
ADMIN = "admin"
# Who is known by a static token, and their groups.
USERS: Mapping[str, Sequence[str]] = {ADMIN: ("system:masters",), "system:node:node-1": ("system:nodes",)}
_START_S = 120.0
_CALL_S = 60.0
_DAY_S = 86400
# The loops of the controller-manager that need a cloud or change nodes are off.
_CONTROLLERS = (
    "*,-nodeipam,-node-route,-cloud-node-lifecycle,-service-lb-controller,-node-lifecycle,-pod-garbage-collector"
)

Json = dict[str, Any]


class ControlPlaneError(RuntimeError):
    """It could not be built or started, or said no; the message has what it said."""


class Refused(ControlPlaneError):
    """The API server has answered with an error. `status`: HTTP's; `answer`: the `Status` object, or text."""

    def __init__(self, status: int, answer: Any) -> None:
        message = answer.get("message", "") if isinstance(answer, dict) else str(answer)
        super().__init__(f"{status}: {message}")
        self.status = status
        self.answer = answer


def binary() -> Path:
    """Give the program, built when it isn't there yet. Raises: `ControlPlaneError`."""
    key = hashlib.sha256(b"".join((_SOURCE / name).read_bytes() for name in _SOURCES)).hexdigest()[:16]
    target = _CACHE / f"kubetest-{key}"
    if target.exists():
        return target
    go = shutil.which("go") or shutil.which("go", path="/usr/local/go/bin")
    if go is None:
        raise ControlPlaneError("tests of the control plane need Go 1.26 or newer, once, to build it (golang.org)")
    _CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_CACHE) as scratch:
        for name in _SOURCES:
            shutil.copy(_SOURCE / name, scratch)
        flags = f"-s -w -X k8s.io/component-base/version.gitVersion={VERSION}"
        vector = ["nice", "-n", "19", go, "build", "-trimpath", "-ldflags", flags, "-o", "kubetest", "."]
        env = os.environ | {"CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly"}
        done = subprocess.run(vector, cwd=scratch, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            raise ControlPlaneError(f"the control plane could not be built: {done.stderr[-2000:]}")
        Path(scratch, "kubetest").replace(target)
    return target


def kubectl_binary() -> str:
    """Find the kubectl that the environment carries, else the machine's."""
    own = Path(sysconfig.get_path("scripts"), "kubectl")
    found = str(own) if own.exists() else shutil.which("kubectl")
    if found is None:
        raise ControlPlaneError("no kubectl (requirements/dev.txt has it)")
    return found


class ControlPlane:
    """See the module's text. `controllers`: controller-manager and scheduler, too; `users`: name → groups, by token."""

    def __init__(self, *, controllers: bool = False, users: Mapping[str, Sequence[str]] = USERS) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="kube-plane-"))
        self.kubeconfig = self.directory / "admin.kubeconfig"
        self.ca = self.directory / "ca.crt"
        self.server = ""
        self._users = dict(users)
        self._tokens = {user: secrets.token_hex(16) for user in users}
        self._controllers = controllers
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._serial = 0
        self._etcd_port = self._port = 0
        self._binary = Path()

    def __enter__(self) -> Self:
        try:
            self._prepare()
            self._start_etcd()
            self.start_server()
            if self._controllers:
                self._start_controllers()
            else:
                # Pods want one, and who makes it isn't here.
                self.make_service_account("default", "default")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End everything."""
        for name in reversed(list(self._processes)):
            self._kill(name)
        shutil.rmtree(self.directory, ignore_errors=True)

    # Outages

    def start_server(self) -> None:
        """Start the API server (again), and wait until it is ready."""
        directory = self.directory
        self._run(
            "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{self._etcd_port}",
            f"--secure-port={self._port}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            "--endpoint-reconciler-type=none",
            f"--cert-dir={directory}/certificates",
            f"--tls-cert-file={directory}/server.crt",
            f"--tls-private-key-file={directory}/server.key",
            f"--client-ca-file={self.ca}",
            "--service-cluster-ip-range=10.0.0.0/24",
            "--allow-privileged=true",
            "--authorization-mode=Node,RBAC",
            f"--token-auth-file={directory}/tokens.csv",
            f"--service-account-issuer={self.server}",
            f"--service-account-key-file={directory}/sa.pub",
            f"--service-account-signing-key-file={directory}/sa.key",
            "--enable-priority-and-fairness=false",
            "--enable-admission-plugins=NodeRestriction",
            "--profiling=false",
        )
        self._until_ready()

    def stop_server(self) -> None:
        """End the API server as if its machine had lost its power."""
        self._kill("kube-apiserver")

    def pause_server(self, is_paused: bool) -> None:
        """Have the API server hang, with its connections open, or go on."""
        self._processes["kube-apiserver"].send_signal(signal.SIGSTOP if is_paused else signal.SIGCONT)

    def compact(self) -> None:
        """Forget all revisions of etcd but the newest, so that old ones are answered with 410."""
        revision = self._etcd("kv/range", {"key": base64.b64encode(b"\0").decode(), "limit": "1"})["header"]["revision"]
        self._etcd("kv/compaction", {"revision": revision, "physical": True})

    def memory_bytes(self, program: str = "kube-apiserver") -> int:
        """Give how much memory one of the programs takes (VmRSS)."""
        for line in Path(f"/proc/{self._processes[program].pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) << 10
        raise ControlPlaneError(f"{program} has ended")

    # Who one is

    def token(self, user: str = ADMIN) -> str:
        """Give the token of one of `users`."""
        return self._tokens[user]

    def make_service_account(self, namespace: str, name: str) -> None:
        """Make a service account; it may be there."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts"
        with contextlib.suppress(Refused):
            self.request("POST", path, {"metadata": {"name": name}})

    def service_account_token(
        self, namespace: str, name: str, *, audiences: Sequence[str] = (), expires_s: int = 3600
    ) -> str:
        """Have a token made for a service account, which must be there."""
        spec = {"audiences": [*audiences], "expirationSeconds": expires_s}
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token"
        return str(self.request("POST", path, {"spec": spec})["status"]["token"])

    def kubeconfig_for(self, token: str, *, server: str = "") -> Path:
        """Write a kubeconfig for who has that token."""
        self._serial += 1
        path = self.directory / f"{self._serial}.kubeconfig"
        self._write_kubeconfig(path, token, server or self.server)
        return path

    # What is asked of it

    def request(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        token: str = "",
        as_user: str = "",
        as_groups: Sequence[str] = (),
        content_type: str = "application/json",
        timeout_s: float = _CALL_S,
    ) -> Json:
        """Send one request and give the answer, as the administrator or as who is named. Raises: `Refused`, OSError."""
        address = urllib.parse.urlsplit(self.server)
        context = ssl.create_default_context(cafile=str(self.ca))
        assert address.hostname is not None
        connection = http.client.HTTPSConnection(address.hostname, address.port, timeout=timeout_s, context=context)
        headers = {"Authorization": f"Bearer {token or self.token()}", "Content-Type": content_type}
        if as_user:
            headers["Impersonate-User"] = as_user
        try:
            connection.putrequest(method, path)
            for name, value in headers.items():
                connection.putheader(name, value)
            for group in as_groups:
                connection.putheader("Impersonate-Group", group)
            data = b"" if body is None else json.dumps(body).encode()
            connection.putheader("Content-Length", str(len(data)))
            connection.endheaders(data)
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        found: Any = text.decode(errors="replace")
        with contextlib.suppress(ValueError):
            found = json.loads(text)
        if answer.status >= 300:
            raise Refused(answer.status, found)
        return found if isinstance(found, dict) else {"text": found}

    def kubectl(self, *arguments: str | Path, stdin: str = "", kubeconfig: Path | None = None) -> str:
        """Call kubectl and give what it prints. Raises: `ControlPlaneError` with what it says."""
        vector = [kubectl_binary(), f"--kubeconfig={kubeconfig or self.kubeconfig}", *map(str, arguments)]
        env = os.environ | {"KUBECACHEDIR": str(self.directory / "kubectl-cache")}
        done = subprocess.run(
            vector, input=stdin, capture_output=True, text=True, timeout=_CALL_S * 3, check=False, env=env
        )
        if done.returncode:
            raise ControlPlaneError(f"kubectl {' '.join(map(str, arguments))}: {done.stderr.strip()}")
        return done.stdout

    def apply(self, kustomization: Path) -> None:
        """Apply a kustomize directory, and wait until its kinds are served."""
        self.kubectl("apply", "--server-side", "-k", kustomization)
        self.kubectl("wait", "--for=condition=Established", "--timeout=60s", "crd", "--all")

    # How it is done

    def _prepare(self) -> None:
        self._binary = binary()
        directory = self.directory
        authority = trustme.CA()
        authority.cert_pem.write_to_path(self.ca)
        certificate = authority.issue_cert("127.0.0.1", "localhost")
        certificate.private_key_pem.write_to_path(directory / "server.key")
        for number, pem in enumerate(certificate.cert_chain_pems):
            pem.write_to_path(directory / "server.crt", append=number > 0)
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        (directory / "sa.key").write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        (directory / "sa.pub").write_bytes(
            key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        )
        lines = [
            f'{self._tokens[user]},{user},{number},"{",".join(groups)}"\n'
            for number, (user, groups) in enumerate(self._users.items())
        ]
        (directory / "tokens.csv").write_text("".join(lines))
        self._port, self._etcd_port = _free_port(), _free_port()
        self.server = f"https://127.0.0.1:{self._port}"
        self._write_kubeconfig(self.kubeconfig, self.token(), self.server)

    def _write_kubeconfig(self, path: Path, token: str, server: str) -> None:
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "plane", "cluster": {"server": server, "certificate-authority": str(self.ca)}}],
            "users": [{"name": "user", "user": {"token": token}}],
            "contexts": [{"name": "plane", "context": {"cluster": "plane", "user": "user"}}],
            "current-context": "plane",
        }
        path.touch(mode=0o600)
        path.write_text(json.dumps(content))  # JSON is YAML

    def _start_etcd(self) -> None:
        peer = f"http://127.0.0.1:{_free_port()}"
        address = f"http://127.0.0.1:{self._etcd_port}"
        self._run(
            "etcd",
            f"--data-dir={self.directory}/etcd",
            f"--listen-client-urls={address}",
            f"--advertise-client-urls={address}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--unsafe-no-fsync",
            "--quota-backend-bytes=8589934592",
            "--log-level=warn",
        )

    def _start_controllers(self) -> None:
        common = [
            f"--kubeconfig={self.kubeconfig}",
            f"--authentication-kubeconfig={self.kubeconfig}",
            f"--authorization-kubeconfig={self.kubeconfig}",
            "--leader-elect=false",
            "--bind-address=127.0.0.1",
            f"--cert-dir={self.directory}/certificates",
        ]
        self._run(
            "kube-controller-manager",
            *common,
            f"--secure-port={_free_port()}",
            "--use-service-account-credentials=true",
            f"--service-account-private-key-file={self.directory}/sa.key",
            f"--root-ca-file={self.ca}",
            f"--controllers={_CONTROLLERS}",
        )
        self._run("kube-scheduler", *common, f"--secure-port={_free_port()}")
        until_s = time.monotonic() + _START_S
        while True:
            with contextlib.suppress(Refused):
                self.request("GET", "/api/v1/namespaces/default/serviceaccounts/default")
                return
            if time.monotonic() > until_s:
                raise ControlPlaneError(f"no default service account: {self._tail('kube-controller-manager')}")
            time.sleep(0.1)

    def _run(self, program: str, *flags: str) -> None:
        with open(self.directory / f"{program}.log", "ab") as log:
            self._processes[program] = subprocess.Popen(
                [self._binary, program, *flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.directory,
                process_group=0,
            )

    def _kill(self, program: str) -> None:
        process = self._processes.pop(program)
        process.kill()
        process.wait()

    def _until_ready(self) -> None:
        until_s = time.monotonic() + _START_S
        while True:
            with contextlib.suppress(OSError, http.client.HTTPException, Refused):
                self.request("GET", "/readyz", timeout_s=5.0)
                return
            if self._processes["kube-apiserver"].poll() is not None or time.monotonic() > until_s:
                raise ControlPlaneError(f"the API server isn't ready: {self._tail('kube-apiserver')}")
            time.sleep(0.1)

    def _etcd(self, what: str, body: Json) -> Json:
        connection = http.client.HTTPConnection("127.0.0.1", self._etcd_port, timeout=_CALL_S)
        try:
            connection.request("POST", f"/v3/{what}", json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        if answer.status != 200:
            raise ControlPlaneError(f"etcd: {text.decode(errors='replace')}")
        found: Json = json.loads(text)
        return found

    def _tail(self, program: str) -> str:
        return "\n".join((self.directory / f"{program}.log").read_text(errors="replace").splitlines()[-15:])


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
