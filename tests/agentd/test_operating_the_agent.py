"""The page for operators of the agent says what is true: commands, events, reasons, conditions, metrics, settings."""

import ast
import re
import shlex
import tomllib
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

import click
import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from agent.cli import COMMANDS, cli
from agent.config import Config, parse
from agent.kube import conditions, user_files
from agent.kube.codec import MAX_GROUP_LABELS
from agent.kube.codec import parse as parse_object
from agent.matching import reasons
from agent.node import course, restore_check
from agent.node.checkpoint import MAX_ATTEMPTS
from agent.node.daemon import Agent
from agent.node.events import MAX_EVENTS, WARNINGS, What
from agent.node.keeping import BY_HAND, TOO_MANY, UNUSED
from agent.node.pods_here import State
from agent.node.saving import PUSHES_MAX, SAVES_MAX
from agent.podspec.manifests import read_manifests
from agent.runtime.failures import FailureKind
from tests.agentd.conftest import Node

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "agent.md").read_text()
BLOCKS = re.findall(r"^```\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def command_lines() -> Iterator[list[str]]:
    """Give every `snapagent …` of the page, in blocks and in sentences, as words."""
    sentences = re.sub(r"^```\n.*?^```", "", PAGE, flags=re.MULTILINE | re.DOTALL)
    for line in [*(line for block in BLOCKS for line in block.splitlines()), *re.findall(r"`([^`]+)`", sentences)]:
        if line.startswith("snapagent "):
            words = shlex.split(line, comments=True)
            ends = [number for number, word in enumerate(words) if word in ("|", "&&") or word.startswith(">")]
            yield words[1 : min(ends, default=len(words))]


def test_every_command_line_of_the_page_can_be_given_and_every_command_is_on_it() -> None:
    lines = list(command_lines())
    assert {words[0] for words in lines} == COMMANDS.keys()
    for name, *rest in lines:
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        if rest:
            command.make_context(name, rest)


def table(header: str) -> list[list[str]]:
    """Give the rows of the table whose first line begins so."""
    lines = PAGE.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"| {header} |"))
    found = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        found.append([cell.strip() for cell in line.strip("|").split("|")])
    return found


def section(heading: str) -> str:
    """Give a section's text, to the next heading."""
    return re.split(r"\n##+ ", PAGE.partition(f"{heading}\n")[2])[0]


def words_in(cell: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", cell))


def reasons_in(heading: str) -> list[str]:
    """Give what stands in the first cells of a section's table, each as often as it stands there."""
    rows = [line for line in section(heading).splitlines() if line.startswith("| `")]
    return [word for row in rows for word in re.findall(r"`([^`]+)`", row.strip("|").split("|")[0])]


def values(*enums: type[StrEnum]) -> list[str]:
    return sorted({each.value for enum in enums for each in enum})


def literals(call: str, place: int) -> set[str]:
    """Find the texts that the agent's source gives to a call at a place."""
    found = set()
    for path in (ROOT / "agent" / "node").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == call:
                value = node.args[place] if len(node.args) > place else None
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    found.add(value.value)
    return found


def test_the_tables_of_reasons_are_those_of_the_code() -> None:
    cold = [*values(reasons.Reason, restore_check.Why), *literals("ColdStart", 0), "PodUnknown", "PodSpecError"]
    assert sorted(reasons_in("### Why a pod starts cold")) == sorted(set(cold))
    assert sorted(reasons_in("### Why a save fails")) == values(course.Reason)
    assert sorted(reasons_in("### Why a restore fails after it has begun")) == sorted(
        [*values(FailureKind), "RuntimeError"]
    )


def test_the_table_of_conditions_is_that_of_the_code() -> None:
    rows = table("kind")
    assert {word for row in rows for word in words_in(row[1])} == set(conditions.ConditionType)
    assert {word for row in rows for word in words_in(row[2])} == set(conditions.Reason)
    assert all(row[3] for row in rows)


def test_the_table_of_events_is_that_of_the_code() -> None:
    rows = table("event")
    assert sorted((row[0].strip("`"), row[1] == "yes") for row in rows) == sorted(
        (what.value, what in WARNINGS) for what in What
    )
    told = {word for row in rows for word in words_in(row[2])}
    problems = words_in(section("## Events").partition("Reasons of `problem`")[2])
    assert literals("tell", 1) <= told | problems | set(course.Reason)
    assert {UNUSED, TOO_MANY, BY_HAND} <= told


async def test_the_table_of_metrics_is_what_is_scraped(node: Node) -> None:
    async with node.running() as agent:
        agent.events.tell(What.PROBLEM, "node", "so that there is a sample")
        families = {each.name: each for each in text_string_to_metric_families(agent.metrics())}
    documented = {next(iter(words_in(row[0]))): (row[1], words_in(row[2]), row[3]) for row in table("metric")}
    assert documented == {
        f"{each.name}_total" if each.type == "counter" else each.name: (
            each.type,
            {label for sample in each.samples for label in sample.labels},
            each.documentation,
        )
        for each in families.values()
    }
    states = re.search(r"^States of pods: (.*)$", PAGE, re.MULTILINE)
    assert states is not None
    assert words_in(states[1]) == set(State)


async def test_the_members_of_the_status_are_those_of_the_page(node: Node) -> None:
    node.write_policy("workload")
    async with node.running() as agent:
        found = await full_status(node, agent)
    documented: dict[str, set[str]] = {}
    for cell, said in table("member"):
        for name in words_in(cell):
            documented[name] = words_in(said)
    assert documented.keys() == found.keys()
    for name in ("policies", "storageConfigs", "without_policy", "unreadable", "pods", "saves", "events", "counts"):
        entries = found[name]
        assert isinstance(entries, list)
        assert entries, name
        assert set(entries[0]) == documented[name], name


async def full_status(node: Node, agent: Agent) -> dict[str, object]:
    """Give the status of an agent that has something of everything."""
    await agent.decisions.create(node.create("web"))
    await agent.decisions.start(node.start("web"))
    node.runtime.asked.setdefault("web", trio.Event()).set()
    await node.event(What.SNAPSHOT_READY)
    await agent.decisions.create(node.create("other", process={**node.spec["process"], "args": ["another"]}))
    node.write("bad.yaml", "kind: [")
    await node.event(What.UNREADABLE)
    before = await agent.status()
    (node.config.objects_directory / "policy.yaml").unlink()
    await node.event(What.POLICY_GONE)
    return {**before, "without_policy": (await agent.status())["without_policy"]}


def test_settings_and_limits_are_those_of_the_code() -> None:
    (settings,) = [block for block in BLOCKS if block.startswith("[runtime]")]
    found = parse(tomllib.loads(settings), source="the page")
    assert found.runtime.roots == Config().runtime.roots[:1]
    known = (ROOT / "agent" / "config.py").read_text()
    for line in re.findall(r"`\[(\w+)\] (\w+)`", PAGE):
        assert re.search(rf"^    \[{line[0]}\]\n(?:    \S.*\n)*?    {line[1]} = ", known, re.MULTILINE), line
    for name in ("objects_directory", "state_directory", "run_directory"):
        assert f"`{name}` (`{getattr(Config(), name)}`)" in PAGE
    assert f"| {user_files.MAX_FILES}; {user_files.MAX_OBJECTS}; {user_files.MAX_FILE_BYTES >> 10} KiB |" in PAGE
    assert f"| {SAVES_MAX}; {PUSHES_MAX} |" in PAGE
    assert f"| labels that a policy groups by | {MAX_GROUP_LABELS} |" in PAGE
    assert f"| events kept | {MAX_EVENTS} |" in PAGE
    assert f"| attempts of a save | {MAX_ATTEMPTS} |" in PAGE
    wrapper = set(re.findall(r'\{"(\w+)", settings\.', (ROOT / "agent" / "wrapper" / "front.c").read_text()))
    assert all(f"`{name}`" in section("### containerd") for name in wrapper)


def test_the_objects_of_the_page_are_read_as_they_stand() -> None:
    (text,) = [block for block in BLOCKS if block.startswith("apiVersion")]
    found = [parse_object(each, where="the page", is_from_person=True) for each in read_manifests(text, "the page")]
    assert [each.kind for each in found] == ["PodSnapshotStorageConfig", "PodSnapshotPolicy"]


@pytest.mark.parametrize("name", ["README.md", "docs/operating.md", "docs/agent.md"])
def test_links_between_the_pages_lead_somewhere(name: str) -> None:
    place = ROOT / name
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", place.read_text()):
        file, _, anchor = target.partition("#")
        page = (place.parent / file).resolve() if file else place
        page = page / "README.md" if page.is_dir() else page
        assert page.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}, target
