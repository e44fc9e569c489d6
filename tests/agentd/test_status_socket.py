"""What people ask the agent, over its socket and by its commands; and that no bad question ends it."""

import json
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import trio
from click.testing import CliRunner

from agent.cli import COMMANDS, cli
from agent.node.course import Found
from agent.node.daemon import Agent
from agent.node.events import What
from agent.node.jobs import Job
from agent.node.status_socket import StatusSocket
from streamd.errors import Exit
from streamd.save.push import PushResult
from streamd.store.catalog import BeingRemoved, open_snapshot
from streamd.store.opening import open_store
from tests.agentd.conftest import Node, until


@asynccontextmanager
async def asked(node: Node) -> AsyncIterator[tuple[Agent, Path]]:
    """Run an agent with its socket; give it and its configuration's file."""
    with TemporaryDirectory(prefix="agentd-", dir="/var/tmp") as name:  # a short path: there is a socket in it
        directory = Path(name)
        node.config = replace(node.config, run_directory=directory / "run")
        config = directory / "agent.toml"
        config.write_text(f'run_directory = "{directory}/run"\n')
        async with node.running() as agent, trio.open_nursery() as nursery:
            with StatusSocket(node.config.status_socket) as people:
                nursery.start_soon(people.serve, agent)
                yield agent, config
                nursery.cancel_scope.cancel()


async def run(*arguments: str) -> tuple[int, str]:
    """Run a command; give its exit code, and what it printed: its error where that was all."""
    vector = [sys.executable, "-m", "agent.cli", *arguments]
    done = await trio.run_process(
        vector, stdin=b"", capture_stdout=True, capture_stderr=True, check=False, cwd=Path(__file__).parents[2]
    )
    return done.returncode, (done.stdout or done.stderr).decode()


async def test_status_tells_of_pods_and_why_they_started_cold(node: Node) -> None:
    node.write_policy("workload")
    async with asked(node) as (agent, config):
        await agent.decisions.create(node.create("web"))
        code, text = await run("status", "--json", "--config", str(config))
        assert code == 0
        found = json.loads(text)
        assert found["node"]["name"] == "node-1"
        assert [policy["name"] for policy in found["policies"]] == ["workload"]
        assert [(pod["name"], pod["state"]) for pod in found["pods"]] == [("web", "created")]
        assert "no PodSnapshot" in found["pods"][0]["reason"]
        assert len(found["saves"]) == 1
        assert "args" not in text  # no spec of anybody
        code, text = await run("status", "--config", str(config))
        assert "pod default/web" in text
        assert "cold start [no-snapshot]" in text


async def test_a_pod_is_saved_by_a_command_by_its_name_or_its_container_and_the_trigger_goes_with_it(
    node: Node,
) -> None:
    node.write_policy("manual")
    async with asked(node) as (agent, config):
        named = node.create("container-1", annotations={"podsnapshot.gke.io/pod-name": "web"})
        await agent.decisions.create(named)
        await agent.decisions.start(node.start("container-1"))
        for target in ("web", "container-1"):
            code, text = await run("snapshot", target, "--json", "--config", str(config))
            assert (code, json.loads(text)["state"]) == (0, "Complete")
        assert len(node.snapshots()) == 2
        assert sorted(path.name for path in node.config.objects_directory.iterdir()) == ["policy.yaml"]
        code, text = await run("snapshot", "web", "--stop", "--json", "--config", str(config))
        assert code == 0
        assert node.runtime.pod("container-1").now is Found.GONE


REFUSED = {"no such pod": ("nobody", Exit.NOT_FOUND, "no such pod"), "no policy": ("web", Exit.REFUSED, "no policy")}


@pytest.mark.parametrize("name", REFUSED)
async def test_a_pod_that_can_not_be_saved_is_told_with_the_reason(name: str, node: Node) -> None:
    target, exit_code, said = REFUSED[name]
    node.write_policy("workload")
    async with asked(node) as (agent, config):
        await agent.decisions.create(node.create("web"))
        await agent.decisions.start(node.start("web"))
        code, text = await run("snapshot", target, "--config", str(config))
        assert code == exit_code
        assert said in text


async def test_a_snapshot_is_removed_by_hand_with_its_data_and_not_while_it_is_being_saved(node: Node) -> None:
    snapshot = await node.saved()
    gate = trio.Event()
    uploader = node.uploader

    class Waiting:
        async def push(self, job: Job, image: Path) -> PushResult:
            await gate.wait()
            return await uploader.push(job, image)

    node.uploader = Waiting()
    async with asked(node) as (agent, config):
        code, text = await run("rm", "nothing", "--config", str(config))
        assert (code, "isn't there" in text) == (Exit.NOT_FOUND, True)
        await agent.decisions.create(node.create("other", annotations={"podsnapshot.gke.io/ps-name": "none"}))
        await agent.decisions.start(node.start("other"))
        node.runtime.asked.setdefault("other", trio.Event()).set()
        await until(lambda: len(node.snapshots()) == 2, "the next snapshot")
        (under_way,) = {each.metadata.name for each in node.snapshots()} - {snapshot}
        await until(lambda: agent.known.phase("default", under_way), "its place in the index")
        code, text = await run("rm", under_way, "--json", "--config", str(config))
        assert (code, json.loads(text)["error"]["kind"]) == (Exit.REFUSED, "being-saved")
        code, text = await run("rm", snapshot, "--config", str(config))
        assert (code, "is being removed" in text) == (0, True)
        event = await node.event(What.SNAPSHOT_DELETED)
        assert (event.snapshot, event.reason) == (snapshot, "removed by hand")
        assert [each.metadata.name for each in node.snapshots()] == [under_way]
        with pytest.raises(BeingRemoved):
            open_snapshot(open_store(node.store_url), snapshot)
        gate.set()
        await node.event(What.SNAPSHOT_READY)


async def test_what_the_node_lacks_is_told_at_the_start_and_in_the_status(node: Node) -> None:
    node.images.away = "no streamd daemon at /run"
    node.runtime.lacks = "/usr/local/bin/runsc: No such file or directory"
    async with asked(node) as (_, config):
        assert (await node.event(What.PROBLEM, count=2)).reason == "node"
        code, text = await run("status", "--config", str(config))
        assert code == 0
        assert "problem: no pod is saved or restored without runsc, which [runtime] runsc names: /usr" in text
        assert "problem: pods start cold without streamd (`systemctl start streamd`): no streamd" in text
        assert "no policy: no pod is saved" in text
        node.images.away = node.runtime.lacks = ""
        node.write_policy("manual")
        await node.event(What.READY, count=2)
        text = (await run("status", "--config", str(config)))[1]
        assert "problem: " not in text
        assert "no pod has been seen" in text


async def test_without_an_agent_commands_say_so(tmp_path: Path) -> None:
    config = tmp_path / "agent.toml"
    config.write_text(f'run_directory = "{tmp_path}/run"\n')
    code, text = await run("status", "--config", str(config))
    assert code == Exit.NOT_FOUND
    assert "no agent answers" in text


async def test_metrics_count_what_has_happened(node: Node) -> None:
    async with asked(node) as (agent, _):
        await agent.decisions.create(node.create("web"))
        answer = await trio.to_thread.run_sync(partial(raw, node, b"GET /metrics HTTP/1.1\r\n\r\n"))
        assert b'snapagent_events_total{event="cold start",reason="no-policy"} 1\n' in answer
        assert b'snapagent_pods{state="created"} 1\n' in answer


BAD = {
    "nothing": b"",
    "no HTTP": b"hello\r\n\r\n",
    "a head without end": b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 5000,
    "nothing there": b"GET /v2 HTTP/1.1\r\n\r\n",
    "a body that is too large": b"POST /v1/triggers HTTP/1.1\r\nContent-Length: 999999\r\n\r\n",
    "half a body": b"POST /v1/triggers HTTP/1.1\r\nContent-Length: 9\r\n\r\n{",
    "no JSON": b"POST /v1/triggers HTTP/1.1\r\nContent-Length: 1\r\n\r\n{",
    "another's file": b"DELETE /v1/triggers/default/..%2fpolicy HTTP/1.1\r\n\r\n",
    "a trigger of a person's": b"DELETE /v1/triggers/default/policy HTTP/1.1\r\n\r\n",
}


@pytest.mark.parametrize("name", BAD)
async def test_a_bad_request_is_refused_and_the_next_one_answered(name: str, node: Node) -> None:
    node.write_policy("workload")
    async with asked(node) as (_, config):
        answer = await trio.to_thread.run_sync(partial(raw, node, BAD[name]))
        assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 404 ", b"HTTP/1.1 413 "))
        assert (await run("status", "--json", "--config", str(config)))[0] == 0
        assert (node.config.objects_directory / "policy.yaml").exists()


def raw(node: Node, request: bytes) -> bytes:
    """Send bytes, say that there are no more, and give all that comes."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(os.fspath(node.config.status_socket))
        connection.sendall(request)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        while part := connection.recv(1 << 16):
            answer += part
        return answer


async def test_a_file_that_can_not_be_read_is_told_and_hinders_no_other(node: Node) -> None:
    node.write_policy("workload")
    async with asked(node) as (agent, config):
        node.write(
            "typo.yaml", "apiVersion: podsnapshot.gke.io/v1\nkind: PodSnapshotPolicy\nmetadata: {name: x}\nspek: {}\n"
        )
        await node.event(What.UNREADABLE)
        found = json.loads((await run("status", "--json", "--config", str(config)))[1])
        assert "typo.yaml" in found["unreadable"][0]["where"]
        assert [policy["name"] for policy in found["policies"]] == ["workload"]
        (node.config.objects_directory / "typo.yaml").unlink()
        await until(lambda: not agent.known.unreadable, "its mending")


def test_each_command_explains_itself_with_an_example() -> None:
    for name in COMMANDS:
        done = CliRunner().invoke(cli, [name, "--help"])
        assert done.exit_code == 0
        assert "Example" in done.output
