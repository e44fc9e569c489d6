"""What looks like a secret in a distilled pod is hidden where a difference is shown.

People put passwords into arguments, into the headers of a handler and into a driver's attributes. Hiding what is named
like one is a courtesy to those whose logs it would reach, and no protection: nothing tells a secret from another text
for certain.
"""

import re
from collections.abc import Mapping

from agent.podspec.shapes import Items, Map, Object, Shape, Value, Values

# Not `tokens` and `tokenizer`, of which servers of language models have many.
_NAME = r"passw(?:or)?d|passphrase|secret|token(?![a-z])|credential|authorization|cookie|(?:api|access|private)[-_]?key"
_NAMED_SO = re.compile(_NAME, re.IGNORECASE)
# In a command line that is one text: the name, what stands between, and the secret.
_IN_TEXT = re.compile(rf"((?:{_NAME})[\w.-]*+[=:\s]++)\S+", re.IGNORECASE)
_MASK = "(hidden)"
# Far more than is shown of a value; only so much of it is searched.
_SEARCHED_CHARS = 1000


class Hidden(str):
    """A text that equals itself, and is shown as `shown`."""

    __slots__ = ("shown",)

    def __new__(cls, text: str, shown: str) -> "Hidden":
        hidden = super().__new__(cls, text)
        hidden.shown = shown
        return hidden

    shown: str


def with_secrets_hidden(shape: Shape, value: Mapping[str, Value]) -> Value:
    """Give the same value, with a `Hidden` in place of each text that is named like a secret."""
    return _hidden(shape, dict(value))


def _hidden(shape: Shape, value: Value) -> Value:
    match shape, value:
        case Object(), {"name": str(name), "value": str(secret)} if _NAMED_SO.search(name):
            return {"name": name, "value": Hidden(secret, _MASK)}
        case Object(members=members), dict():
            return {name: _hidden(members[name], member) for name, member in value.items()}
        case Items(of=of), list():
            return [_hidden(of, item) for item in value]
        case Map(), dict():
            return {
                name: Hidden(member, _MASK) if isinstance(member, str) and _NAMED_SO.search(name) else member
                for name, member in value.items()
            }
        case Values(), list():
            return [_argument(item, value[index - 1] if index else None) for index, item in enumerate(value)]
        case _:
            return value


def _argument(argument: Value, before: Value | None) -> Value:
    """Hide what stands behind `--password` or `password=`."""
    if not isinstance(argument, str):
        return argument
    if isinstance(before, str) and before.startswith("-") and "=" not in before and _NAMED_SO.search(before):
        return Hidden(argument, _MASK)
    searched = argument[:_SEARCHED_CHARS]
    shown = _IN_TEXT.sub(rf"\1{_MASK}", searched)
    return argument if shown == searched else Hidden(argument, shown)
