"""Every field of a v1 Pod, from the API's own types (lightkube-models is made from the API's OpenAPI document)."""

import dataclasses
import importlib
import importlib.metadata
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import Enum, auto
from typing import Any


class Leaf(Enum):
    """What the value of a field is."""

    TEXT = auto()
    WHOLE = auto()
    FLAG = auto()
    QUANTITY = auto()
    PORT = auto()
    TIME = auto()
    MAP = auto()


@dataclass(frozen=True, slots=True)
class FieldOfPod:
    """A field that holds a value: the members on the way to it, `[]` for "in each item of this list"."""

    path: tuple[str, ...]
    leaf: Leaf

    def __str__(self) -> str:
        return ".".join(self.path).replace(".[]", "[]")


def pod_type() -> type:
    """Give the class of a Pod. The models want the client that they belong to, which isn't here (or isn't wanted)."""
    package = types.ModuleType("lightkube")
    package.__path__ = [str(importlib.metadata.distribution("lightkube-models").locate_file("lightkube"))]
    core, schema = types.ModuleType("lightkube.core"), types.ModuleType("lightkube.core.schema")
    vars(schema).update(DictMixin=object, dataclass=dataclasses.dataclass, field=dataclasses.field)
    sys.modules |= {module.__name__: module for module in (package, core, schema)}
    pod = importlib.import_module("lightkube.models.core_v1").Pod
    assert isinstance(pod, type)
    return pod


def fields_of_pod() -> tuple[FieldOfPod, ...]:
    """Walk a Pod's type; a type that holds itself would be refused (there is none in a Pod)."""
    return tuple(_walk(pod_type(), "", (), ()))


def count_fields(of: Any = None) -> int:
    """Count the fields in another way: add up the fields of each class, over its members."""
    of = of or pod_type()
    if not dataclasses.is_dataclass(of):
        return 1
    hints = typing.get_type_hints(of)
    return sum(count_fields(_item_type(hints[member.name])) for member in dataclasses.fields(of))


def _item_type(hint: Any) -> Any:
    arguments = [each for each in typing.get_args(hint) if each is not type(None)]
    if typing.get_origin(hint) in (typing.Union, types.UnionType, list) and len(arguments) == 1:
        return _item_type(arguments[0])
    return hint


def _walk(hint: Any, written: str, path: tuple[str, ...], inside: tuple[type, ...]) -> Iterator[FieldOfPod]:
    arguments = [each for each in typing.get_args(hint) if each is not type(None)]
    origin = typing.get_origin(hint)
    if origin is list:
        yield from _walk(arguments[0], written, (*path, "[]"), inside)
    elif origin in (typing.Union, types.UnionType) and len(arguments) == 1:
        yield from _walk(arguments[0], written, path, inside)
    elif dataclasses.is_dataclass(hint):
        assert hint not in inside, f"{path}: {hint} holds itself"
        assert isinstance(hint, type)
        hints = typing.get_type_hints(hint)
        for member in dataclasses.fields(hint):
            # `exec_` and the like: words of Python.
            name = member.name.rstrip("_")
            yield from _walk(hints[member.name], str(member.type), (*path, name), (*inside, hint))
    else:
        yield FieldOfPod(path, _leaf(hint, set(arguments), written))


def _leaf(hint: Any, arguments: set[Any], written: str) -> Leaf:
    if hint is dict or typing.get_origin(hint) is dict or written.endswith("FieldsV1]"):
        return Leaf.MAP
    if "Quantity" in written:
        return Leaf.QUANTITY
    if arguments == {int, str}:
        return Leaf.PORT
    return {str: Leaf.TEXT, int: Leaf.WHOLE, bool: Leaf.FLAG, datetime: Leaf.TIME}[hint]


# Two values for each kind; none of them is a default anywhere, nor zero.
_VALUES: Mapping[Leaf, tuple[object, object]] = {
    Leaf.TEXT: ("one", "two"),
    Leaf.WHOLE: (7, 8),
    Leaf.FLAG: (True, False),
    Leaf.QUANTITY: ("3Mi", "4Mi"),
    Leaf.PORT: (7, "seven"),
    Leaf.TIME: ("2026-01-31T12:00:00Z", "2026-01-31T12:00:01Z"),
    Leaf.MAP: ({"dev.gvisor.key": "1"}, {"dev.gvisor.key": "2"}),
}


def value_of(field: FieldOfPod, *, other: bool = False) -> object:
    """Give a value for a field, or another one."""
    return _VALUES[field.leaf][other]


def put(pod: dict[str, Any], field: FieldOfPod, value: object) -> None:
    """Set a field, in the one item of each list on the way; makes what is missing on the way."""
    _put(pod, field.path, value)


def _put(here: dict[str, Any], path: tuple[str, ...], value: object) -> None:
    name, rest = path[0], path[1:]
    match rest:
        case ():
            here[name] = value
        case ("[]",):
            here[name] = [value]
        case ("[]", *_):
            _put(here.setdefault(name, [{}])[0], rest[1:], value)
        case _:
            _put(here.setdefault(name, {}), rest, value)


def drop(pod: dict[str, Any], field: FieldOfPod) -> None:
    """Take a field away; what it was in stays, empty or not."""
    here: Any = pod
    *way, last = [name for name in field.path if name != "[]"]
    for name in way:
        here = here[name][0] if isinstance(here[name], list) else here[name]
    del here[last]
