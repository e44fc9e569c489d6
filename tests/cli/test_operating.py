"""The operators' page and the dashboard say what is true: commands, metrics, events and settings are looked up."""

import ast
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import click
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from streamd.cli import cli
from streamd.commands.image_facts import STORE_TIER
from streamd.config import Config
from streamd.daemon.admission import TABLES_FREE_BYTES
from streamd.daemon.api.events import KEPT, LOST
from streamd.daemon.api.limits import Limits
from streamd.daemon.api.models import ImageStateName
from streamd.daemon.fd_store import FD_STORE_MAX
from streamd.daemon.images import DEATHS_MAX, DEATHS_WITHIN_S
from streamd.daemon.life import HANG_S
from tests.daemon.api.fake_node import InProcess

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "operating.md").read_text()
DASHBOARD = json.loads((ROOT / "docs" / "grafana-dashboard.json").read_text())
# Labels that Prometheus adds.
TARGET_LABELS = {"instance", "job"}


# Command lines


def command_lines(text: str) -> Iterator[list[str]]:
    """Give every `streamd …` of a page, in blocks and in sentences, as words."""
    blocks = re.findall(r"^```\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    sentences = re.sub(r"^```\n.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for line in [*lines, *re.findall(r"`([^`]+)`", sentences)]:
        if line.startswith("streamd "):
            words = shlex.split(line, comments=True)
            ends = [words.index(word) for word in ("&&", "|", "||", "&") if word in words]
            yield words[: min(ends, default=len(words))]


def parse(words: list[str]) -> None:
    """Read a command line as `streamd` does, and do nothing. Raises: `click.ClickException`, `LookupError`."""
    command: click.Command = cli
    name, *rest = words
    while isinstance(command, click.Group):
        name, *rest = rest
        found = command.get_command(click.Context(command), name)
        if found is None:
            raise LookupError(f"no command {name}")
        command = found
    command.make_context(name, rest)


def test_every_command_line_of_the_page_can_be_given() -> None:
    lines = list(command_lines(PAGE))
    assert len(lines) > 30
    for words in lines:
        try:
            parse(words)
        except (click.ClickException, LookupError, ValueError) as error:
            pytest.fail(f"{shlex.join(words)}: {error}")


@pytest.mark.parametrize("line", ["streamd image", "streamd image gone", "streamd status --yaml", "streamd image show"])
def test_a_command_line_that_can_not_be_given_is_found(line: str) -> None:
    with pytest.raises((click.ClickException, LookupError, ValueError)):
        parse(line.split())


def test_every_command_for_operators_is_on_the_page() -> None:
    named = {tuple(words[1:2]) for words in command_lines(PAGE)}
    assert {("status",), ("top",), ("events",), ("drain",), ("image",), ("cache",), ("report",), ("umount",)} <= named
    group = cli.get_command(click.Context(cli), "image")
    assert isinstance(group, click.Group)
    assert set(group.commands) <= {words[2] for words in command_lines(PAGE) if words[1] == "image"}


# Tables


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


def words_in(cell: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", cell))


@pytest.fixture
async def metrics() -> dict[str, Metric]:
    """Scrape a node that has something of everything."""
    api = InProcess()
    api.node.add(state=ImageStateName.SERVING, bytes_by_tier={STORE_TIER: 1})
    for _ in range(2):  # the second one tells of the first
        answer = await api.ask("GET", "/metrics")
    return {family.name: family for family in text_string_to_metric_families(answer.body.decode())}


def names_of(family: Metric) -> str:
    return f"{family.name}_total" if family.type == "counter" else family.name


async def test_the_table_of_metrics_is_what_is_scraped(metrics: dict[str, Metric]) -> None:
    documented = {
        next(iter(words_in(name))): (kind, words_in(labels), meaning)
        for name, kind, labels, _, _, meaning in table("metric")
    }
    scraped = {
        names_of(family): (family.type, {label for s in family.samples for label in s.labels}, family.documentation)
        for family in metrics.values()
    }
    assert documented == scraped


def test_units_and_stability_are_told_of_every_metric() -> None:
    for name, _, _, unit, stability, _ in table("metric"):
        bare = next(iter(words_in(name))).removesuffix("_total")
        suffix = bare.rpartition("_")[2]
        assert unit == (suffix if suffix in ("bytes", "seconds") else ""), name
        assert stability in ("stable", "may change"), name


async def test_every_metric_that_the_page_names_exists(metrics: dict[str, Metric]) -> None:
    assert set(re.findall(r"\bstreamd_[a-z0-9_]+", PAGE)) <= set(map(names_of, metrics.values()))


def published_kinds() -> set[str]:
    """Find the kinds of events in the daemon's source: the first argument of what publishes."""
    kinds = set()
    for path in (ROOT / "streamd" / "daemon").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and node.args and getattr(node.func, "attr", "") in ("publish", "_tell"):
                said = (part.value for part in ast.walk(node.args[0]) if isinstance(part, ast.Constant))
                kinds |= {kind for kind in said if isinstance(kind, str)}
    return kinds


def test_the_table_of_events_is_what_is_published() -> None:
    kinds = [next(iter(words_in(row[0]))) for row in table("kind")]
    assert sorted(kinds) == sorted(published_kinds() | {LOST})


def test_limits_and_settings_are_those_of_the_code() -> None:
    for section, key in set(re.findall(r"`(cache|daemon|fetch|policy)\.([a-z_]+)`", PAGE)):
        settings = getattr(Config(), section)
        assert is_dataclass(settings)
        assert hasattr(settings, key), f"{section}.{key}"
    text = " ".join(PAGE.split())
    limits = Limits()
    assert f"| leases and followers of events | {limits.streams} |" in text
    assert f"| connections to the API | {limits.connections}, of one process {limits.connections_a_process} |" in text
    request = f"{limits.body_bytes >> 10} KiB and {limits.body_wait_s:g} s"
    assert limits.idle_s == limits.body_wait_s
    assert f"| a request to the API | head and body {request} each |" in text
    assert f"what is beyond {TABLES_FREE_BYTES >> 20} MiB counts" in text
    assert f"| descriptors in systemd's fd store | {FD_STORE_MAX}, five an image and one |" in text
    assert f"(more than {DEATHS_MAX} in {DEATHS_WITHIN_S:g} s)" in text
    assert f"one that hangs is killed after {HANG_S:g})" in text
    assert f"the last {KEPT} since the daemon was started" in text


# The dashboard


def expressions(panel: dict[str, Any]) -> list[str]:
    return [target["expr"] for target in panel.get("targets", [])]


def test_the_dashboards_panels_are_told_apart_and_overlap_nowhere() -> None:
    panels = DASHBOARD["panels"]
    ids = [panel["id"] for panel in panels]
    titles = [panel["title"] for panel in panels]
    assert len(set(ids)) == len(ids)
    assert len(set(titles)) == len(titles)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
        assert panel["type"] == "row" or expressions(panel)


async def test_the_dashboard_asks_for_metrics_and_labels_that_exist(metrics: dict[str, Metric]) -> None:
    labels = {
        names_of(family): {label for s in family.samples for label in s.labels} | TARGET_LABELS
        for family in metrics.values()
    }
    queries = [variable["definition"] for variable in DASHBOARD["templating"]["list"] if variable["type"] == "query"]
    asked: set[str] = set()
    for text in [*(expr for panel in DASHBOARD["panels"] for expr in expressions(panel)), *queries]:
        assert text.count("(") == text.count(")"), text
        names = set(re.findall(r"\bstreamd_[a-z0-9_]+", text))
        assert names <= labels.keys(), text
        asked |= names
        possible = set.intersection(*(labels[name] for name in names))
        used = set(re.findall(r'([a-z_]+)=~?"', text))
        used |= {label.strip() for by in re.findall(r"\bby \(([^)]*)\)", text) for label in by.split(",")}
        used |= set(re.findall(r"label_values\(.*, (\w+)\)", text))
        assert used <= possible, text
    assert asked == labels.keys(), "a metric that nobody looks at"


async def test_the_dashboards_legends_and_variables_are_there(metrics: dict[str, Metric]) -> None:
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]} | {"__rate_interval", "__all"}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD))) <= variables
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", []):
            shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            by = re.findall(r"\bby \(([^)]*)\)", target["expr"])
            kept = (
                {label.strip() for labels in by for label in labels.split(",")} if by else {"instance", "snapshot_url"}
            )
            assert shown <= kept, target["expr"]


def test_the_dashboard_tells_the_stores_bytes_as_the_commands_do() -> None:
    tiers = {
        tier
        for panel in DASHBOARD["panels"]
        for text in expressions(panel)
        for tier in re.findall(r'tier="(\w+)"', text)
    }
    assert tiers == {STORE_TIER}
