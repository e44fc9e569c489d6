"""Manifests as text: what kubectl reads is read, and what nobody should read isn't."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.podspec.manifests import MAX_CHARS, MAX_DEPTH, MAX_VALUES, read_manifests
from agent.podspec.shapes import PodSpecError


def test_several_documents_lists_and_empty_documents() -> None:
    text = "a: 1\n---\n---\n# nothing\n---\nkind: List\nitems:\n- {b: 2}\n- {c: 3}\n"
    assert read_manifests(text, "f") == ({"a": 1}, {"b": 2}, {"c": 3})
    assert read_manifests("", "f") == ()
    assert read_manifests('{"kind": "PodList", "items": [{"a": 1}]}', "f") == ({"a": 1},)
    assert read_manifests("{a: b}", "f") == ({"a": "b"},)  # YAML, though it begins as JSON does


def test_plain_scalars_have_the_types_that_kubectl_gives_them() -> None:
    written = {
        "2026-01-31": "2026-01-31",
        "22:22": "22:22",
        "8080:80": "8080:80",
        "yes": True,
        "Off": False,
        "0644": 420,
        "0x1F": 31,
        "-1": -1,
        "1_0": 10,
        "08": "08",
        "1.5": 1.5,
        "1e3": 1000.0,
        "1.5.2": "1.5.2",
        "~": None,
        "": None,
        "null": None,
        "'1'": "1",
        "y": "y",
        "=": "=",
    }
    for text, value in written.items():
        [found] = read_manifests(f"a: {text}\n", "f")
        assert (found, type(found["a"])) == ({"a": value}, type(value)), text


def test_anchors_and_merges_are_as_if_they_were_written_out() -> None:
    text = "base: &base {k: 1, l: 2}\none: *base\nother: {<<: *base, l: 3}\n"
    [found] = read_manifests(text, "f")
    assert found == {"base": {"k": 1, "l": 2}, "one": {"k": 1, "l": 2}, "other": {"k": 1, "l": 3}}


def _laughing() -> str:
    """Give a text whose aliases stand for a billion values."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 20)]
    return "\n".join(lines)


REFUSED = {
    "a key twice": ("spec:\n  a: 1\n  b: 2\n  a: 3\n", "f, line 4: 'a' is there twice"),
    "a key twice, JSON": ('{"a": 1, "a": 2}', "f: 'a' is there twice"),
    "NaN": ("a: .nan\n", "f, line 1: .nan is not a number"),
    "NaN, JSON": ('{"a": NaN}', "f: NaN is not a number"),
    "infinity": ("a: 1\nb: -.inf\n", "f, line 2: -.inf is not a number"),
    "an object of Python": ("a: !!python/object/apply:os.system [x]\n", "could not determine a constructor"),
    "an alias of nothing": ("a: *x\n", "undefined alias"),
    "an alias in itself": ("a: &x [*x]\n", "the alias 'x' stands in what it stands for"),
    "a billion values": (_laughing(), f"more than {MAX_VALUES} values"),
    "depth": ("[" * (MAX_DEPTH + 1), f"deeper than {MAX_DEPTH}"),
    "depth, JSON": ('{"a":' * 100_000, "nested too deep"),
    "not an object": ("- 1\n", "f, document 1: not an object"),
    "a list of texts": ("kind: List\nitems: [x]\n", "f, document 1: a List of other things"),
    "not YAML": ("a: [1\nb: 2\n", "f, line 2"),
    "NUL": ("a: \0\n", "f: can't be read"),
    "a tag that lies": ("a: !!bool maybe\n", "f: a value is not what its form or its tag says"),
    "a number without end": (f"a: {'9' * 5000}\n", "f: a value is not what its form"),
    "a text without end": ("a" * (MAX_CHARS + 1), f"more than {MAX_CHARS}"),
    "a key that is a list": ("? [a]\n: b\n", "unhashable key"),
}


@pytest.mark.parametrize(("text", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_no_manifest_is_is_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(PodSpecError) as caught:
        read_manifests(text, "f")
    assert message in str(caught.value)
    assert len(str(caught.value)) < 300


_JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**53), 2**53), st.text(st.characters(codec="utf-8"))),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=5), inner, max_size=4)),
    max_leaves=10,
)


@settings(max_examples=50)
@given(st.dictionaries(st.text(max_size=5), _JSON, max_size=4))
def test_json_is_read_as_json(value: dict[str, object]) -> None:
    if not str(value.get("kind", "")).endswith("List"):
        assert read_manifests(json.dumps(value), "f") == (value,)


@settings(max_examples=200)
@given(st.text(st.sampled_from("ab:-[]{}&*!<>|?%@`'\"#,\n \t0.~=y\\"), max_size=40))
def test_no_text_does_anything_but_be_read_or_be_refused(text: str) -> None:
    try:
        read_manifests(text, "f")
    except PodSpecError as error:
        assert str(error).startswith("f")  # noqa: PT017  # both ways to end are right
