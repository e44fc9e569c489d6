"""A bucket that namespaces share, each with a token of its own: who has no access gets no byte, and starts cold.

**End to end**: agent, streamd, wrapper and runsc are real; the store is the emulator, behind a proxy that looks at
tokens.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from agent.kube.objects import PodSnapshot
from agent.runtime import bundle
from bench.agent_node import ASKING_SERVER, AgentNode, Running
from bench.emulator import Emulator
from bench.fault_proxy import Delay, FaultProxy, Rule, Status

READY_S = 120.0


@contextmanager
def shared_bucket(tokens: Path) -> Iterator[tuple[AgentNode, FaultProxy]]:
    """Give a node with a bucket that the token of `shop` may use, and nobody else's: not `blog`'s, not the node's."""
    settings = ""
    for namespace in ("shop", "blog"):
        file = tokens / namespace
        file.touch(mode=0o600)
        file.write_text(f"token-of-{namespace}")
        settings += f'[[credentials]]\nnamespace = "{namespace}"\ntoken_file = "{file}"\n'
    with (
        Emulator() as emulator,
        FaultProxy(emulator.port) as proxy,
        AgentNode(gcs=proxy.address, settings=settings) as node,
    ):
        proxy.add(Rule(Delay(0.0), times=None, reads_only=False, token="token-of-shop"))
        proxy.add(Rule(Status(403), times=None, reads_only=False))
        yield node, proxy


def run(node: AgentNode, namespace: str, name: str) -> Running:
    """Run the server as a pod of a namespace."""
    metadata = {"name": name, "namespace": namespace, "labels": {"app": "web"}}
    spec = {"containers": [{"name": "server", "image": "server:1"}]}
    (node.objects / "pods").mkdir(exist_ok=True)
    manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
    (node.objects / "pods" / f"{name}.json").write_text(json.dumps(manifest))
    rootfs = bundle.make_rootfs(node.directory / "rootfs")
    args = (str(bundle.python_interpreter()), "-IS", "-u", "-c", ASKING_SERVER, "16")
    of_pod = {
        bundle.CONTAINER_TYPE: "sandbox",
        bundle.SANDBOX_ID: name,
        bundle.CONTAINER_NAME: "server",
        "io.kubernetes.cri.sandbox-namespace": namespace,
        "io.kubernetes.cri.sandbox-name": name,
        "io.kubernetes.cri.sandbox-uid": f"uid-of-{name}",
    }
    container = bundle.Container(args=args, rootfs=rootfs, annotations=of_pod)
    return node.run(name, bundle.write_bundle(node.directory / f"bundle-{name}", container))


def copy_object(node: AgentNode, snapshot: str, namespace: str) -> None:
    """Let another namespace have an object that names this snapshot's data as its own, as nobody may."""
    objects = node.objects_of_agent()
    found = objects.get(PodSnapshot, snapshot, "shop")
    copy = objects.create(replace(found, metadata=replace(found.metadata, namespace=namespace, resource_version="")))
    objects.update_status(replace(copy, status=found.status))


def test_a_namespace_is_restored_with_its_own_token_and_another_one_gets_no_byte_of_it(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o700)
    with shared_bucket(tmp_path) as (node, proxy):
        node.write_policy("workload", namespaces="shop blog")
        first = run(node, "shop", "web-1")
        first.server.receive(timeout_s=READY_S)
        token = first.server.request("token", timeout_s=READY_S)
        assert first.server.request("save", timeout_s=READY_S) == "resume"
        snapshot = node.until_event("snapshot ready")["snapshot"]
        assert node.snapshot_url(snapshot, "shop").startswith("gs://bucket/")

        node.kill_agent()
        copy_object(node, snapshot, "blog")
        node.start_agent()  # which knows it from its first moment on
        read = proxy.read_bytes
        other = run(node, "blog", "thief")
        assert other.server.receive(timeout_s=READY_S) != f"ready {token}"
        event = node.until_event("fallback to a cold start")
        assert (event["pod"], event["reason"], event["snapshot"]) == ("blog/thief", "ImageUnavailable", snapshot)
        assert "403" in event["message"]
        assert proxy.read_bytes == read
        assert [image["tenant"] for image in node.streamd.client.images() if image["state"] == "serving"] == []

        second = run(node, "shop", "web-2")
        assert second.server.receive(timeout_s=READY_S) == "was restore"
        assert second.server.request("token", timeout_s=READY_S) == token
        node.until_event("restored")
        said = node.log.read_text() + node.streamd.log_path.read_text() + str(node.status())
        assert "token-of-" not in said
