"""What differs between two distilled pods, field by field, for people.

The table of what counts says how lists are compared: containers, volumes, mounts and ports by what names them, so that
one that was added, removed, renamed or moved is told as that, and not as a change of all that follow it; other lists by
what remains between a common beginning and a common end. Values are shortened, and what looks like a secret is hidden.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from agent.podspec.counted import POD
from agent.podspec.secrets import Hidden, with_secrets_hidden
from agent.podspec.shapes import Items, Map, Object, Scalar, Shape, Value, Values

MAX_SHOWN_CHARS = 120
# What names an item of a list.
_Key = tuple[Value | None, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """One field that differs: where, and what is there in the old and in the new pod, as text; None: nothing."""

    path: str
    old: str | None
    new: str | None

    def __str__(self) -> str:
        match self.old, self.new:
            case None, new:
                return f"{self.path}: {new} was added"
            case old, None:
                return f"{self.path}: {old} was removed"
            case old, new:
                return f"{self.path}: {old} became {new}"


def differences(old: Mapping[str, Value], new: Mapping[str, Value]) -> tuple[Difference, ...]:
    """Compare two distilled pods; none differ if and only if their hashes are the same."""
    return tuple(_compared(POD, with_secrets_hidden(POD, old), with_secrets_hidden(POD, new), ""))


def _compared(shape: Shape, old: Value | None, new: Value | None, path: str) -> Iterator[Difference]:
    if old == new:
        return
    match shape:
        case Scalar(unset=unset):
            # An absent field with a default has that.
            default = next((f"{_shown(value)} (the default)" for value in unset if value), None)
            yield Difference(path, _shown(old) or default, _shown(new) or default)
        case Object(members=members, is_choice=is_choice):
            if is_choice and (old is None or new is None):
                yield Difference(path, _shown(old), _shown(new))
                return
            one, other = _object(old), _object(new)
            for name, member in members.items():
                yield from _compared(member, one.get(name), other.get(name), f"{path}.{name}" if path else name)
        case Items(of=of, key=()):
            yield from _compared_by_place(of, _list(old), _list(new), path)
        case Items():
            yield from _compared_by_key(shape, _objects(old), _objects(new), path)
        case Map():
            one, other = _object(old), _object(new)
            for name in sorted(one.keys() | other.keys()):
                yield from _compared_single(one.get(name), other.get(name), f"{path}[{json.dumps(name)}]")
        case Values():
            yield from _compared_by_place(None, _list(old), _list(new), path)


def _compared_single(old: Value | None, new: Value | None, path: str) -> Iterator[Difference]:
    if old != new:
        yield Difference(path, _shown(old), _shown(new))


def _compared_by_place(of: Object | None, old: list[Value], new: list[Value], path: str) -> Iterator[Difference]:
    """Compare what is left of two lists behind their common beginning and before their common end."""
    shorter = min(len(old), len(new))
    start = next((index for index in range(shorter) if old[index] != new[index]), shorter)
    end = next((index for index in range(shorter - start) if old[-1 - index] != new[-1 - index]), shorter - start)
    gone, came = old[start : len(old) - end], new[start : len(new) - end]
    if len(gone) != len(came):
        longer = max(len(gone), len(came))
        place = f"{start}" if longer == 1 else f"{start}:{start + longer}"
        yield Difference(f"{path}[{place}]", _shown_run(gone), _shown_run(came))
        return
    for index, (one, other) in enumerate(zip(gone, came, strict=True), start):
        if of is None:
            yield from _compared_single(one, other, f"{path}[{index}]")
        else:
            yield from _compared(of, one, other, f"{path}[{index}]")


def _compared_by_key(
    shape: Items, old: Sequence[dict[str, Value]], new: Sequence[dict[str, Value]], path: str
) -> Iterator[Difference]:
    were, are = _by_key(shape, old), _by_key(shape, new)
    stayed = [key for key in were if key in are]
    if shape.is_ordered and stayed != (places := [key for key in are if key in were]):
        yield Difference(path, f"the order {_names(stayed)}", _names(places))
    renamed = _renamed(shape, were, are) if shape.is_ordered else {}
    found_again = {*are, *renamed.values()}
    for place, (key, item) in enumerate(were.items()):
        if key not in found_again:
            yield Difference(_at(path, shape, place, key), _summary(item), None)
    for place, (key, item) in enumerate(are.items()):
        before = were.get(renamed.get(key, key))
        if before is None:
            yield Difference(_at(path, shape, place, key), None, _summary(item))
        else:
            yield from _compared(shape.of, before, item, _at(path, shape, place, renamed.get(key, key)))


def _by_key(shape: Items, items: Sequence[dict[str, Value]]) -> dict[_Key, dict[str, Value]]:
    """Give the items by key, with a count behind it: the API lets two ports be the same."""
    found: dict[_Key, dict[str, Value]] = {}
    counts: Counter[_Key] = Counter()
    for item in items:
        key = tuple(item.get(name) for name in shape.key)
        found[*key, counts[key]] = item
        counts[key] += 1
    return found


def _renamed(
    shape: Items, were: Mapping[_Key, dict[str, Value]], are: Mapping[_Key, dict[str, Value]]
) -> dict[_Key, _Key]:
    """Give new key → old key of items that differ in nothing but their key, in the same place of the list."""
    others = [name for name in shape.of.members if name not in shape.key]
    return {
        new: old
        for old, new in zip(were, are, strict=False)
        if old not in are and new not in were and all(were[old].get(name) == are[new].get(name) for name in others)
    }


def _at(path: str, shape: Items, place: int, key: _Key) -> str:
    """Write the place of an item as people find it: by its number where the order counts, and by what names it."""
    name = "/".join(_shown(part) or "" for part in key[:-1] if part is not None)
    return f"{path}[{place} {name}]" if shape.is_ordered else f"{path}[{name}]"


def _names(keys: Sequence[_Key]) -> str:
    return _short(", ".join(_shown(key[0]) or "" for key in keys))


def _summary(item: Mapping[str, Value]) -> str:
    """Say in a few words what is in a list: a container with its image, a volume of a kind, a mount, a port."""
    match item:
        case {"containerPort": port}:
            return f"port {port}"
        case {"mountPath": _, "name": volume}:
            return f"a mount of {_shown(volume)}"
        case {"name": _, "image": str(image)}:
            return f"a container of image {_shown(image)}"
        case {"name": _, **sources} if sources and all(isinstance(source, dict) for source in sources.values()):
            return _short(f"a volume: {json.dumps(_text(dict(sources)), ensure_ascii=False)}")
        case _:
            return _shown(dict(item)) or ""


def _shown_run(run: Sequence[Value]) -> str | None:
    return _short(" ".join(_shown(item) or "" for item in run)) if run else None


def _shown(value: Value | None) -> str | None:
    return None if value is None else _short(json.dumps(_text(value), ensure_ascii=False))


def _text(value: Value) -> Value:
    """Put what may be seen in place of what is hidden."""
    match value:
        case Hidden(shown=shown):
            return shown
        case dict():
            return {name: _text(member) for name, member in value.items()}
        case list():
            return [_text(item) for item in value]
        case _:
            return value


def _short(text: str) -> str:
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[: MAX_SHOWN_CHARS - 1]}…"


def _object(value: Value | None) -> dict[str, Value]:
    return value if isinstance(value, dict) else {}


def _list(value: Value | None) -> list[Value]:
    return value if isinstance(value, list) else []


def _objects(value: Value | None) -> list[dict[str, Value]]:
    return [item for item in _list(value) if isinstance(item, dict)]
