"""Manifests as text, read as `kubectl` reads them, and bounded: YAML of several documents, or JSON.

The YAML is that of sigs.k8s.io/yaml: a plain scalar is null, a boolean, a number or else text (no dates, no numbers to
base 60). Refused, with the line: a key that is there twice or isn't text, NaN and infinities, tags other than the plain
ones, and what would be larger or deeper than any manifest; an alias counts as often as it is used.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NoReturn

import yaml

from agent.podspec.shapes import PodSpecError

MAX_CHARS = 4 << 20
MAX_VALUES = 200_000
MAX_DEPTH = 64


def read_manifests(text: str, source: str) -> tuple[Mapping[str, object], ...]:
    """Give the objects of a text; empty documents are none, a `List` is its items. `source` names it in messages.

    Raises: `PodSpecError`.
    """
    if len(text) > MAX_CHARS:
        raise PodSpecError(source, f"{len(text)} characters, more than {MAX_CHARS}")
    objects: list[Mapping[str, object]] = []
    for number, document in enumerate(_documents(text, source), 1):
        if document is None:
            continue
        where = f"{source}, document {number}"
        if not isinstance(document, Mapping):
            more = "; put --- between objects, or the list into a List's items" if isinstance(document, list) else ""
            raise PodSpecError(where, f"not an object{more}")
        items = document.get("items")
        if str(document.get("kind", "")).endswith("List") and isinstance(items, list):
            if not all(isinstance(item, Mapping) for item in items):
                raise PodSpecError(where, "a List of other things than objects")
            objects += items
        else:
            objects.append(document)
    return tuple(objects)


def _documents(text: str, source: str) -> list[object]:
    try:
        # As kubectl does: what is no JSON may be YAML's flow style.
        if text.lstrip().startswith("{"):
            try:
                return [_json(text, source)]
            except json.JSONDecodeError:
                pass
        loader = _Loader(text)
        documents: list[object] = []
        while loader.check_data():  # type: ignore[no-untyped-call]
            documents.append(loader.get_data())
        return documents
    except yaml.MarkedYAMLError as error:
        line = f"{source}, line {error.problem_mark.line + 1}" if error.problem_mark else source
        raise PodSpecError(line, str(error.problem or error.context)) from error
    except yaml.YAMLError as error:
        raise PodSpecError(source, f"can't be read: {error}") from error
    except RecursionError as error:
        raise PodSpecError(source, "nested too deep") from error
    except (ValueError, LookupError, AttributeError) as error:
        raise PodSpecError(source, "a value is not what its form or its tag says") from error


def _json(text: str, source: str) -> object:
    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found: dict[str, object] = {}
        for name, value in pairs:
            if name in found:
                raise PodSpecError(source, f"{name!r} is there twice in one object")
            found[name] = value
        return found

    def refuse(constant: str) -> NoReturn:
        raise PodSpecError(source, f"{constant} is not a number")

    value: object = json.loads(text, object_pairs_hook=unique, parse_constant=refuse)
    return value


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the types that kubectl knows, and with bounds."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  # PyYAML's way to say which plain scalars are what

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._values = 0
        self._depth = 0
        self._anchored: dict[str, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        before = self._values
        if isinstance(event, yaml.AliasEvent):
            name = str(event.anchor)
            if name in self.anchors and name not in self._anchored:
                _refuse(f"the alias {name!r} stands in what it stands for", event)
            self._values += self._anchored.get(name, 0)
        self._values += 1
        self._depth += 1
        if self._values > MAX_VALUES or self._depth > MAX_DEPTH:
            _refuse(f"more than {MAX_VALUES} values, or nested deeper than {MAX_DEPTH}", event)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if isinstance(event, yaml.NodeEvent) and event.anchor and not isinstance(event, yaml.AliasEvent):
            self._anchored[event.anchor] = self._values - before
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    _refuse(f"{key.value!r} is there twice in one object", key)
                seen.add((key.tag, key.value))
        return node

    def construct_yaml_float(self, node: yaml.ScalarNode) -> float:
        value = super().construct_yaml_float(node)
        if not math.isfinite(value):
            _refuse(f"{node.value} is not a number", node)
        return value


def _refuse(why: str, at: Any) -> NoReturn:
    raise yaml.MarkedYAMLError(problem=why, problem_mark=at.start_mark)


_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_yaml_float)
for _tag, _pattern, _first in (
    ("merge", r"<<", "<"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF", list("yYnNtTfFoO")),
    ("int", r"[-+]?(?:0b[01_]+|0[0-7_]*|[1-9][0-9_]*|0x[0-9a-fA-F_]+)", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?"
        r"|\.inf|\.Inf|\.INF)|\.nan|\.NaN|\.NAN",
        list("-+0123456789."),
    ),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), _first)
