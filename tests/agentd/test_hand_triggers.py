"""Triggers that a command has made: they go with what the command has promised, and say why they wait."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import trio

from agent.kube.errors import Unavailable
from agent.kube.objects import PodSnapshot
from agent.kube.port import Objects
from agent.node.course import Found
from agent.node.events import What
from agent.node.jobs import Job
from streamd.errors import Exit
from streamd.save.push import PushResult
from tests.agentd.conftest import Node, until
from tests.agentd.test_status_socket import asked, run


class Objecting:
    """Objects that keep no new snapshot while they are told so: the call waits, or says why."""

    def __init__(self, inner: Objects, said: str = "") -> None:
        self._inner = inner
        self.said = said
        self.may = trio.Event()
        self.asked = trio.Event()
        self.tries = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def create(self, snapshot: PodSnapshot) -> PodSnapshot:
        self.asked.set()
        self.tries += 1
        if self.said:
            raise Unavailable("/state/snapshots/default/x.json", self.said)
        await self.may.wait()
        return await self._inner.create(snapshot)


async def started(node: Node) -> None:
    """Start a pod that the policy `manual` selects."""
    assert node.agent is not None
    node.write_policy("manual")
    await until(lambda: node.agent and node.agent.known.policies, "the policy")
    await node.agent.decisions.create(node.create("web"))
    await node.agent.decisions.start(node.start("web"))


def files(node: Node) -> list[str]:
    """Give what is in the objects directory, but for the policy."""
    found = sorted(path.name for path in node.config.objects_directory.iterdir())
    return [name for name in found if name != "policy.yaml"]


@pytest.mark.parametrize("is_fresh", [False, True])
async def test_what_nothing_was_begun_for_is_taken_back_by_the_next_life_and_saves_no_pod(
    node: Node, is_fresh: bool
) -> None:
    objects = Objecting(node.objects())
    node.wrap = lambda _: objects
    async with node.running() as agent:
        await started(node)
        await agent.trigger("web", "default", stop=True)
        await objects.asked.wait()
    node.wrap = lambda inner: inner
    assert len(files(node)) == 1
    half = node.config.objects_directory / ".by-hand-half.json.new"
    half.touch()
    node.write_trigger("of-a-person", "nobody")
    if is_fresh:
        shutil.rmtree(node.config.state_directory)
    async with node.running():
        await until(lambda: files(node) == ["of-a-person.yaml"], "the end of what a command had asked for")
        event = await node.event(What.TRIGGER_FAILED)
        assert "ended before anything was begun" in event.message
        assert event.pod == "default/web"
        await until(lambda: node.triggered("of-a-person")[0] == "False", "the other trigger's end")
        assert node.runtime.pod("web").now is Found.RUNNING
        assert [each.phase.value for each in node.snapshots() if each.phase.value != "Failed"] == []


async def test_what_was_begun_is_finished_by_the_next_life_and_its_trigger_goes_with_the_one_after(node: Node) -> None:
    pushing, uploader = trio.Event(), node.uploader

    class Waiting:
        async def push(self, job: Job, image: Path) -> PushResult:
            pushing.set()
            await trio.sleep_forever()
            raise AssertionError

    node.uploader = Waiting()
    async with node.running() as agent:
        await started(node)
        made = await agent.trigger("web", "default", stop=False)
        await pushing.wait()
    node.uploader = uploader
    name = str(made["name"])
    async with node.running():
        await until(lambda: node.triggered(name)[1] == "Complete", "the trigger's end")
        assert len(node.snapshots()) == 1
        assert files(node) == [f"{name}.json"]
    async with node.running():
        await until(lambda: files(node) == [], "the end of the trigger")
        assert node.events(What.TRIGGER_FAILED) == []


async def test_a_trigger_that_a_full_disk_keeps_waiting_says_so_everywhere_and_is_tried_again(node: Node) -> None:
    objects = Objecting(node.objects(), said="No space left on device")
    objects.may.set()
    node.wrap = lambda _: objects
    async with asked(node) as (agent, config):
        await started(node)
        code, text = await run("snapshot", "web", "--timeout", "1s", "--config", str(config))
        assert code == Exit.FAILED
        assert "waiting for the agent, which tries again: /state/snapshots/default/x.json: No space left" in text
        (event,) = node.events(What.PROBLEM)[-1:]
        assert (event.reason, event.pod) == ("trigger", "default/web")
        code, text = await run("status", "--json", "--config", str(config))
        assert any("No space left on device" in problem for problem in json.loads(text)["problems"])
        await until(lambda: objects.tries >= 2, "another try")
        assert agent.triggers.problems
        objects.said = ""
        await node.event(What.SNAPSHOT_READY)
        await until(lambda: not agent.triggers.problems, "the end of the problem")
        assert len(node.snapshots()) == 1
        assert len([event for event in node.events(What.PROBLEM) if event.reason == "trigger"]) == 1


async def test_a_command_whose_agent_goes_away_says_what_may_still_happen(node: Node) -> None:
    objects = Objecting(node.objects())
    node.wrap = lambda _: objects
    ended: list[tuple[int, str]] = []
    async with trio.open_nursery() as nursery, asked(node):
        await started(node)
        config = node.directory / "agent.toml"  # which stays when the agent goes
        config.write_text(f'run_directory = "{node.config.run_directory}"\n')

        async def ask() -> None:
            ended.append(await run("snapshot", "web", "--config", str(config)))

        nursery.start_soon(ask)
        await objects.asked.wait()
    ((code, text),) = ended
    assert code == Exit.NOT_FOUND
    assert "finished or undone by the agent's next life (`snapagent ls`)" in text
