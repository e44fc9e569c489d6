"""JSON from outside, read strictly: what it may hold is bounded before it is parsed, and each refusal names the field.

`parse` takes the text, `Fields` takes an object's members one by one with their types and ranges. Members that nobody
asks for are ignored.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import NoReturn

from streamd.errors import Damaged
from streamd.snapshot import Buffer

# Text in names and versions; container names and versions are far shorter. Free metadata may be longer.
MAX_NAME_CHARS = 1024
# What one object may have. The widest there is are a pod's specs and a push's metadata; both have a few dozen.
MAX_MEMBERS = 2**16
_MAX_NUMBER_CHARS = 40


def parse(data: Buffer, what: str, *, max_containers: int) -> "Fields":
    """Parse UTF-8 JSON whose top is an object. It may hold `max_containers` opening brackets at most.

    The parser's own memory is a small multiple of the text's for strings and numbers, but 20 times it for `[],[],…`.

    Raises: `Damaged`: not UTF-8, not JSON, two members of one name, more than `MAX_MEMBERS` in one object, NaN, absurd
        numbers, nested too deep.
    """
    raw = bytes(data)
    if raw.count(b"[") + raw.count(b"{") > max_containers:
        raise Damaged(f"{what}: more than {max_containers} lists and objects")
    try:
        value: object = json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=lambda pairs: _unique(pairs, what),
            parse_constant=lambda text: _refuse_constant(text, what),
            parse_int=lambda text: _integer(text, what),
        )
    except RecursionError:
        raise Damaged(f"{what}: nested too deep") from None
    except ValueError as error:  # UnicodeDecodeError and JSONDecodeError are ones
        raise Damaged(f"{what}: not JSON: {error}") from error
    return Fields(value, what)


def _unique(pairs: list[tuple[str, object]], what: str) -> dict[str, object]:
    if len(pairs) > MAX_MEMBERS:
        raise Damaged(f"{what}: an object of {len(pairs)} members, more than {MAX_MEMBERS}")
    found: dict[str, object] = {}
    for name, value in pairs:
        if name in found:
            raise Damaged(f"{what}: {name[:80]!r} is there twice")
        found[name] = value
    return found


def _refuse_constant(text: str, what: str) -> NoReturn:
    raise Damaged(f"{what}: {text} is not a number")


def _integer(text: str, what: str) -> int:
    if len(text) > _MAX_NUMBER_CHARS:
        raise Damaged(f"{what}: a number of {len(text)} digits")
    return int(text)


class Fields:
    """A JSON object, whose members are asked for by name, type and range. Every method raises `Damaged`."""

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise Damaged(f"{where}: not an object")
        self._members: dict[str, object] = value
        self._where = where

    def names(self) -> Sequence[str]:
        """Give the members' names, in the order of the text, each fit to be printed as by `name`."""
        return tuple(self._checked_name(repr(name[:80]), name) for name in self._members)

    def integer(self, name: str, *, least: int = 0, most: int) -> int:
        """Give a whole number in [least, most]."""
        value = self._value(name)
        if type(value) is not int:
            self.refuse(name, "not a whole number")
        if not least <= value <= most:
            self.refuse(name, f"{value} is not in {least}…{most}")
        return value

    def number(self, name: str, *, least: float, most: float) -> float:
        """Give a number in [least, most] as a float."""
        value = self._value(name)
        if type(value) is not int and type(value) is not float:
            self.refuse(name, "not a number")
        if not least <= value <= most or not math.isfinite(value):
            self.refuse(name, f"{value} is not in {least:g}…{most:g}")
        return float(value)

    def boolean(self, name: str) -> bool:
        """Give true or false."""
        value = self._value(name)
        if type(value) is not bool:
            self.refuse(name, "neither true nor false")
        return value

    def text(self, name: str) -> str:
        """Give a text, whatever is in it."""
        value = self._value(name)
        if not isinstance(value, str):
            self.refuse(name, "not a text")
        return value

    def name(self, name: str, *, default: str | None = None) -> str:
        """Give a text that is fit to be printed: no control characters, `MAX_NAME_CHARS` at most."""
        if default is not None and name not in self._members:
            return default
        return self._checked_name(name, self._value(name))

    def name_list(self, name: str) -> tuple[str, ...]:
        """Give a list of texts as by `name`."""
        return tuple(self._checked_name(f"{name}[{i}]", value) for i, value in enumerate(self._list(name)))

    def hexadecimal(self, name: str, *, size: int) -> bytes:
        """Give `size` bytes that are written as lower-case hexadecimal."""
        text = self._value(name)
        if not isinstance(text, str) or len(text) != 2 * size or not set(text) <= set("0123456789abcdef"):
            self.refuse(name, f"not {2 * size} digits of lower-case hexadecimal")
        return bytes.fromhex(text)

    def texts(self, name: str) -> Mapping[str, str]:
        """Give an object of free texts; they may hold control characters, never NUL or halves of surrogate pairs."""
        found: dict[str, str] = {}
        for key, value in self.member(name)._members.items():
            if not isinstance(value, str):
                self.refuse(f"{name}.{key[:80]!r}", "not a text")
            for text in (key, value):
                if "\0" in text or not _is_unicode(text):
                    self.refuse(f"{name}.{key[:80]!r}", "holds NUL or half a surrogate pair")
            found[key] = value
        return found

    def member(self, name: str) -> "Fields":
        """Give an object."""
        return Fields(self._value(name), self._path(name))

    def members(self, name: str, *, most: int) -> list["Fields"]:
        """Give a list of `most` objects at most."""
        values = self._list(name)
        if len(values) > most:
            self.refuse(name, f"{len(values)} entries, more than {most}")
        return [Fields(value, self._path(f"{name}[{i}]")) for i, value in enumerate(values)]

    def absent(self, name: str) -> bool:
        """Say whether the member is missing or null."""
        return self._members.get(name) is None

    def refuse(self, name: str, why: str) -> NoReturn:
        """Raise `Damaged` about a member."""
        raise Damaged(f"{self._path(name)}: {why}")

    def _path(self, name: str) -> str:
        return f"{self._where}: {name}" if ":" not in self._where else f"{self._where}.{name}"

    def _value(self, name: str) -> object:
        if name not in self._members:
            self.refuse(name, "missing")
        return self._members[name]

    def _list(self, name: str) -> list[object]:
        value = self._value(name)
        if not isinstance(value, list):
            self.refuse(name, "not a list")
        return value

    def _checked_name(self, name: str, value: object) -> str:
        if not isinstance(value, str):
            self.refuse(name, "not a text")
        if len(value) > MAX_NAME_CHARS:
            self.refuse(name, f"{len(value)} characters, more than {MAX_NAME_CHARS}")
        if not value.isprintable():  # False for halves of surrogate pairs, too
            self.refuse(name, "holds control characters")
        return value


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
