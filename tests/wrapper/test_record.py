"""A record is a named tuple, and what it saves is saved."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from agent.wrapper.record import Record

_ROOT = Path(__file__).parents[2]


class Ours(Record):
    a: int
    b: str = "b"
    c: Mapping[str, int] = {}


class Theirs(NamedTuple):
    a: int
    b: str = "b"
    c: Mapping[str, int] = {}


class Nothing(Record):
    """It has no members."""


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ((1,), {}),
        ((1, "x"), {}),
        ((1, "x", {"y": 2}), {}),
        ((), {"a": 1}),
        ((), {"c": {"y": 2}, "a": 1}),
        ((1,), {"b": "x"}),
        ((1,), {"c": {"y": 2}}),
        ((), {}),
        ((), {"b": "x"}),
        ((1, "x", {}, 4), {}),
        ((1,), {"a": 1}),
        ((1,), {"d": 1}),
    ],
)
def test_it_is_made_and_refused_as_a_named_tuple_is(values: tuple[object, ...], named: dict[str, object]) -> None:
    try:
        theirs = Theirs(*values, **named)  # type: ignore[arg-type]
    except TypeError:
        with pytest.raises(TypeError, match="Ours has"):
            Ours(*values, **named)  # type: ignore[arg-type]
        return
    ours = Ours(*values, **named)  # type: ignore[arg-type]
    assert tuple(ours) == tuple(theirs)
    assert (ours.a, ours.b, ours.c) == (theirs.a, theirs.b, theirs.c)
    assert ours._asdict() == theirs._asdict()
    assert repr(ours) == repr(theirs).replace("Theirs", "Ours")
    assert tuple(ours._replace(b="y")) == tuple(theirs._replace(b="y"))
    assert type(ours._replace(b="y")) is Ours
    with pytest.raises(TypeError, match="Ours has"):
        ours._replace(d=1)  # type: ignore[call-arg]
    match ours:
        case Ours(a, b):
            assert (a, b) == (theirs.a, theirs.b)
    with pytest.raises(AttributeError):
        ours.a = 2  # type: ignore[misc]


def test_it_may_be_empty_and_two_that_are_equal_are_one_key() -> None:
    assert (Nothing(), tuple(Nothing()), repr(Nothing())) == (Nothing(), (), "Nothing()")
    assert len({Ours(1, "x", ()), Ours(1, "x", ())}) == 1  # type: ignore[arg-type]


def test_the_wrappers_process_imports_nothing_that_is_slow_to_import() -> None:
    program = "import sys; sys.path.insert(0, sys.argv[1]); import agent.wrapper.entry; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-IS", "-c", program, str(_ROOT)], capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.split())
    assert "agent.wrapper.deciding" in loaded
    assert loaded.isdisjoint(
        {"typing", "dataclasses", "socket", "subprocess", "pathlib", "inspect", "trio", "structlog"}
    )
