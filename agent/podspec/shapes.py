"""The shapes that a counted field may have, and reading a value by one: checked, and in canonical form.

Canonical means that what the API server can't tell apart is one value, and that is the shortest: a field that is
absent, null, empty or at its default is left out. What counts as "empty" follows the Go types of k8s.io/api/core/v1: a
plain string or number with `omitempty` is absent when it is zero; behind a pointer, zero is a value (`runAsUser: 0`).

An object without members is left out as well, except where its being there is a choice (`emptyDir: {}`). Order is kept,
except in lists that the API declares to be maps (`+listType=map`): these are sorted. Unknown members are not looked at.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Context, Decimal
from enum import Enum, auto
from typing import NoReturn, TypeAlias

from agent.errors import AgentError
from streamd.errors import Exit

Value: TypeAlias = str | int | bool | list["Value"] | dict[str, "Value"]

# A pod may have a few hundred of anything; etcd takes 1.5 MiB an object.
MAX_LIST_ITEMS = 10_000


class PodSpecError(AgentError):
    """A pod can't be read: `path` names the field, `why` says what is wrong with it."""

    ends_with, kind = Exit.DAMAGED, "pod-spec"

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path}: {why}" if path else why)
        self.path = path
        self.why = why


class Kind(Enum):
    """What a single value may be."""

    TEXT = auto()
    FLAG = auto()
    WHOLE = auto()
    PORT = auto()  # IntOrString: 80 and "80" are two values
    QUANTITY = auto()  # "1Gi"; equal by amount


@dataclass(frozen=True, slots=True)
class Scalar:
    """A single value; one that is among `unset` says no more than an absent one."""

    kind: Kind
    unset: tuple[str | int | bool, ...] = ()


@dataclass(frozen=True, slots=True)
class Values:
    """A list of single values, in their order."""

    kind: Kind


@dataclass(frozen=True, slots=True)
class Map:
    """Values by free names, all of one kind."""

    kind: Kind = Kind.TEXT


@dataclass(frozen=True, slots=True)
class Object:
    """Members by name; `is_choice`: it counts when empty, too."""

    members: Mapping[str, "Shape"]
    is_choice: bool = False


@dataclass(frozen=True, slots=True)
class Items:
    """A list of objects. `key` names the members that tell them apart, if any do.

    `must_be_named`: the key is there, and no two have the same. `is_ordered` is false where the API says that the list
    is a map.
    """

    of: Object
    key: tuple[str, ...] = ()
    is_ordered: bool = True
    must_be_named: bool = False


Shape: TypeAlias = Scalar | Values | Map | Object | Items

FLAG = Scalar(Kind.FLAG, (False,))
WHOLE = Scalar(Kind.WHOLE, (0,))
TEXT = Scalar(Kind.TEXT, ("",))
# Behind a pointer: zero is a value.
POINTED_FLAG = Scalar(Kind.FLAG)
POINTED_WHOLE = Scalar(Kind.WHOLE)
POINTED_TEXT = Scalar(Kind.TEXT)
PORT = Scalar(Kind.PORT)
TEXTS = Values(Kind.TEXT)
NUMBERS = Values(Kind.WHOLE)


def text(*, default: str) -> Scalar:
    """Give the shape of a string that the API server sets when it is empty."""
    return Scalar(Kind.TEXT, ("", default))


def read(shape: Shape, value: object, path: str) -> Value | None:
    """Give a value in canonical form, None when it says no more than an absent field.

    Raises: `PodSpecError`: another type than the shape's, a list that is absurdly long, a key that isn't text, text
        that is not Unicode, a name that is missing or there twice.
    """
    if value is None:
        return None
    match shape:
        case Scalar():
            single = _scalar(shape.kind, value, path)
            return None if single in shape.unset else single
        case Values():
            items = enumerate(_list(value, path))
            return [_scalar(shape.kind, _zero(shape.kind, item), f"{path}[{index}]") for index, item in items] or None
        case Map():
            members = sorted(mapping(value, path).items())
            return {
                _text(name, path): _scalar(shape.kind, _zero(shape.kind, item), f"{path}[{name!r}]")
                for name, item in members
            } or None
        case Object():
            return read_object(shape, value, path)
        case Items():
            return [*read_items(shape, value, path)] or None


def read_object(shape: Object, value: object, path: str) -> dict[str, Value] | None:
    """Read an object, as by `read`."""
    given = mapping(value, path)
    found: dict[str, Value] = {}
    for name, member in shape.members.items():
        if (member_value := read(member, given.get(name), f"{path}.{name}" if path else name)) is not None:
            found[name] = member_value
    return found if found or shape.is_choice else None


def read_items(shape: Items, value: object, path: str) -> list[dict[str, Value]]:
    """Read a list of objects, as by `read`; an absent one is empty."""
    given = [] if value is None else _list(value, path)
    items = [read_object(shape.of, item, f"{path}[{index}]") or {} for index, item in enumerate(given)]
    if shape.must_be_named:
        seen: set[object] = set()
        for index, item in enumerate(items):
            name = item.get(shape.key[0])
            if name is None:
                _refuse(f"{path}[{index}].{shape.key[0]}", "missing")
            if name in seen:
                _refuse(f"{path}[{index}].{shape.key[0]}", f"{name!r} is there twice")
            seen.add(name)
    return items if shape.is_ordered else sorted(items, key=lambda item: _sort_key(shape, item))


def _sort_key(shape: Items, item: Mapping[str, Value]) -> tuple[object, ...]:
    # By the key first, for people; then by everything, so that items that share a key have one order. `repr` of what
    # the shape reads is one text for one value: members come in the shape's order.
    return (*(repr(item.get(name)) for name in shape.key), repr(item))


def mapping(value: object, path: str) -> Mapping[str, object]:
    """Give a mapping whose keys are all text, an empty one for null. Raises: `PodSpecError`."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        _refuse(path, f"must be an object, not {_what(value)}")
    for name in value:
        if not isinstance(name, str):
            _refuse(path, f"a key must be text, not {_what(name)}")
    return value


def _list(value: object, path: str) -> Sequence[object]:
    if not isinstance(value, list | tuple):
        _refuse(path, f"must be a list, not {_what(value)}")
    if len(value) > MAX_LIST_ITEMS:
        _refuse(path, f"{len(value)} items, more than {MAX_LIST_ITEMS}")
    return value


def _zero(kind: Kind, value: object) -> object:
    """Give what Go's decoder makes of a null among strings: an empty one."""
    return "" if value is None and kind is Kind.TEXT else value


def _scalar(kind: Kind, value: object, path: str) -> str | int | bool:
    match kind:
        case Kind.TEXT:
            return _text(value, path)
        case Kind.FLAG:
            if not isinstance(value, bool):
                _refuse(path, f"must be true or false, not {_what(value)}")
            return value
        case Kind.WHOLE:
            return _whole(value, path)
        case Kind.PORT:
            return _text(value, path) if isinstance(value, str) else _whole(value, path)
        case Kind.QUANTITY:
            return _quantity(value, path)


def _text(value: object, path: str) -> str:
    if not isinstance(value, str):
        _refuse(path, f"must be text, not {_what(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        _refuse(path, "holds half of a surrogate pair")
    return value


def _whole(value: object, path: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        _refuse(path, f"must be a whole number, not {_what(value)}")
    if not -(2**63) <= value < 2**63:
        _refuse(path, "does not fit 64 bits")
    return value


# k8s.io/apimachinery/pkg/api/resource: a number, then a binary or a decimal suffix or an exponent. Its exponents are
# bounded here: no amount of bytes needs more.
_QUANTITY = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))([KMGTPE]i|[numkMGTPE]|[eE][+-]?\d{1,2})?", re.ASCII)
_MAX_QUANTITY_CHARS = 64
_BINARY = {f"{letter}i": 1024**power for power, letter in enumerate("KMGTPE", 1)}
_DECIMAL = {"n": -9, "u": -6, "m": -3, "": 0} | {letter: 3 * power for power, letter in enumerate("kMGTPE", 1)}
# Digits that the longest text with the largest exponent needs, so that nothing is rounded.
_EXACT = Context(prec=400)


def _quantity(value: object, path: str) -> str:
    """Give an amount as a plain decimal number: two that are equal are written alike."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        _refuse(path, f"must be a quantity, not {_what(value)}")
    written = str(value)
    parts = _QUANTITY.fullmatch(written) if len(written) <= _MAX_QUANTITY_CHARS else None
    if parts is None:
        _refuse(path, f"{written[:_MAX_QUANTITY_CHARS]!r} is not a quantity such as 512Mi")
    number, suffix = Decimal(parts[1]), parts[2] or ""
    if suffix in _BINARY:
        amount = _EXACT.multiply(number, Decimal(_BINARY[suffix]))
    else:
        amount = number.scaleb(_DECIMAL[suffix] if suffix in _DECIMAL else int(suffix[1:]), _EXACT)
    plain = f"{amount.normalize(_EXACT) if amount else 0:f}"
    if len(plain) > _MAX_QUANTITY_CHARS:
        _refuse(path, f"{written!r} is no sensible quantity")
    return plain


def _what(value: object) -> str:
    """Name a value's type as YAML and JSON do."""
    match value:
        case None:
            return "null"
        case bool():
            return f"the boolean {str(value).lower()} (quote it to make it text)"
        case int() | float():
            return "a number (quote it to make it text)"
        case str():
            return "text"
        case Mapping():
            return "an object"
        case list() | tuple():
            return "a list"
        case _:
            return f"a {type(value).__name__}"


def _refuse(path: str, why: str) -> NoReturn:
    raise PodSpecError(path, why)
