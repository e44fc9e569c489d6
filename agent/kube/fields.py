"""A mapping that a person, a file or an API server gave, read member by member. Pure.

A problem is noted, with the member's path, and reading goes on with a stand-in, so that all problems of an object are
reported at once. Null means absent, as in the API. What may be long is bounded here: whoever reads an object through
`Fields` looks at no more than these bounds let through, whatever aliases or nesting the mapping has.
"""

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from enum import StrEnum
from typing import TypeVar

MAX_TEXT_CHARS = 4096
MAX_FREE_TEXT_CHARS = 32768  # of a condition's message: apimachinery, meta/v1 `Condition`
MAX_ENTRIES = 256
# Beyond that many, a hostile object is only told that there are more.
MAX_PROBLEMS = 50

E = TypeVar("E", bound=StrEnum)


def shown(value: object) -> str:
    """Show a value in a message, shortened; a list or an object only by its kind, since it may be endless."""
    match value:
        case str() | bool() | int() | float():
            text = repr(value)
            return text if len(text) <= 80 else f"{text[:77]}…"
        case None:
            return "null"
        case Mapping():
            return "an object"
        case list() | tuple():
            return "a list"
        case _:
            return type(value).__name__  # YAML has dates, sets and bytes, too


class Fields:
    """One object; its members are taken one by one, and `done` notes those that nobody took."""

    def __init__(self, value: object, path: str, problems: list[str], *, is_strict: bool) -> None:
        """`path`: of this object, empty for the top; `is_strict`: whether unknown members are problems."""
        self._path = path
        self._problems = problems
        self._is_strict = is_strict
        self._left: dict[str, object] = {}
        self._known: set[str] = set()
        if not isinstance(value, Mapping):
            self._note(path or "document", f"must be an object, not {shown(value)}")
            return
        if len(value) > MAX_ENTRIES:
            self._note(path or "document", f"has {len(value)} members, more than {MAX_ENTRIES}")
            return
        for name, member in value.items():
            if not isinstance(name, str):
                self._note(path or "document", f"has a member {shown(name)}, whose name is no text; quote it")
            elif member is not None:
                self._left[name] = member

    def problem(self, name: str, text: str) -> None:
        """Note what is wrong with a member."""
        self._note(self._at(name), text)

    def has(self, name: str) -> bool:
        """Say whether the member is there, and not taken yet."""
        self._known.add(name)
        return name in self._left

    def take(self, name: str) -> object:
        """Take a member as it is; None when it isn't there."""
        return self._pop(name)

    def ignore(self, names: Iterable[str]) -> None:
        """Take members whose contents don't matter."""
        for name in names:
            self._pop(name)

    def text(self, name: str, *, default: str | None = None, pattern: str = "", what: str = "a text") -> str:
        """Take a text of printable characters that matches `pattern` as a whole; `what` says what that is.

        Without a default it has to be there.
        """
        value = self._pop(name)
        if value is None:
            if default is None:
                self.problem(name, "is required")
            return default or ""
        return self._checked(self._at(name), value, pattern, what)

    def free_text(self, name: str) -> str:
        """Take a text that may have several lines, such as a message; empty when it isn't there."""
        value = self._pop(name)
        if value is None:
            return ""
        if isinstance(value, str) and _is_unicode(value) and len(value) <= MAX_FREE_TEXT_CHARS:
            return value
        self.problem(name, f"must be a text of {MAX_FREE_TEXT_CHARS} characters at most, not {shown(value)}")
        return ""

    def choice(self, name: str, choices: type[E], *, default: E | None = None) -> E:
        """Take one of an enum's values; without a default it has to be there. A stand-in is the enum's first."""
        value = self._pop(name)
        if value is None:
            if default is None:
                self.problem(name, f"is required: {_either(choices)}")
            return default if default is not None else next(iter(choices))
        for choice in choices:
            if isinstance(value, str) and choice.value == value:
                return choice
        self.problem(name, f"must be {_either(choices)}, not {shown(value)}")
        return next(iter(choices))

    def integer(self, name: str, *, default: int | None = None, low: int, high: int) -> int:
        """Take a whole number in [low, high]; without a default it has to be there."""
        value = self._pop(name)
        if value is None:
            if default is None:
                self.problem(name, "is required")
            return low if default is None else default
        if type(value) is int and low <= value <= high:
            return value
        self.problem(name, f"must be a whole number from {low} to {high}, not {shown(value)}")
        return low

    def boolean(self, name: str, *, default: bool) -> bool:
        """Take true or false."""
        value = self._pop(name)
        if isinstance(value, bool):
            return value
        if value is not None:
            self.problem(name, f"must be true or false, not {shown(value)}")
        return default

    def member(self, name: str, *, is_required: bool = False) -> "Fields":
        """Take an object; an absent one is as an empty one, and a problem if it has to be there."""
        value = self._pop(name)
        if value is None:
            if is_required:
                self.problem(name, "is required")
            value = {}
        return Fields(value, self._at(name), self._problems, is_strict=self._is_strict)

    def members(self, name: str, *, most: int = MAX_ENTRIES) -> list["Fields"]:
        """Take a list of objects."""
        values = self._list(name, most)
        return [Fields(v, f"{self._at(name)}[{i}]", self._problems, is_strict=self._is_strict) for i, v in values]

    def texts(self, name: str, *, most: int = MAX_ENTRIES, pattern: str = "", what: str = "a text") -> tuple[str, ...]:
        """Take a list of texts, each as by `text`."""
        values = self._list(name, most)
        return tuple(self._checked(f"{self._at(name)}[{i}]", value, pattern, what) for i, value in values)

    def text_map(self, name: str) -> dict[str, str]:
        """Take an object whose members are texts, such as labels. Values may hold anything but halves of surrogates."""
        inner = self.member(name)
        found: dict[str, str] = {}
        for key, value in inner._left.items():
            if not isinstance(value, str):
                inner.problem(key, f"must be a text, not {shown(value)}; quote it")
            elif not _is_unicode(value) or not key.isprintable():
                inner.problem(key, "isn't Unicode text")
            else:
                found[key] = value
        return found

    def done(self) -> None:
        """Note what is left as unknown, where that is a problem."""
        if self._is_strict:
            for name in self._left:
                near = get_close_matches(name[:80], sorted(self._known), n=1)
                self.problem(name, "is not a known field" + (f"; did you mean {near[0]}?" if near else ""))

    def _pop(self, name: str) -> object:
        self._known.add(name)
        return self._left.pop(name, None)

    def _list(self, name: str, most: int) -> list[tuple[int, object]]:
        value = self._pop(name)
        if value is None:
            return []
        if not isinstance(value, list | tuple):
            self.problem(name, f"must be a list, not {shown(value)}")
            return []
        if len(value) > most:
            self.problem(name, f"has {len(value)} entries, more than {most}")
            return []
        return list(enumerate(value))

    def _checked(self, path: str, value: object, pattern: str, what: str) -> str:
        if not isinstance(value, str):
            self._note(path, f"must be {what}, not {shown(value)}" + ("; quote it" if _is_scalar(value) else ""))
        elif len(value) > MAX_TEXT_CHARS:
            self._note(path, f"has {len(value)} characters, more than {MAX_TEXT_CHARS}")
        elif not value.isprintable():
            self._note(path, "holds control characters")
        elif pattern and not re.fullmatch(pattern, value, re.ASCII):
            self._note(path, f"must be {what}, not {shown(value)}")
        else:
            return value
        return ""

    def _at(self, name: str) -> str:
        plain = name if name.isprintable() and len(name) <= 80 else repr(name[:80])
        return f"{self._path}.{plain}" if self._path else plain

    def _note(self, path: str, text: str) -> None:
        if len(self._problems) < MAX_PROBLEMS:
            self._problems.append(f"{path}: {text}")
        elif len(self._problems) == MAX_PROBLEMS:
            self._problems.append("and more")


def _either(choices: type[StrEnum]) -> str:
    *others, last = [choice.value for choice in choices]
    return f"{', '.join(others)} or {last}" if others else last


def _is_scalar(value: object) -> bool:
    return isinstance(value, bool | int | float)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
