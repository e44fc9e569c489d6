"""gVisor's state encoding: whatever it holds, the cursor ends up behind it."""

from contextlib import suppress

from hypothesis import given
from hypothesis import strategies as st

from streamd.errors import Damaged
from streamd.snapshot.state_wire import Ref, Sequence, Slice, Struct, Type, Value, read_graph
from streamd.snapshot.varints import Cursor

numbers = st.integers(0, 2**64 - 1)


def uint(value: int) -> bytes:
    """Write a varint."""
    low, high = value & 0x7F, value >> 7
    return bytes([low | 0x80]) + uint(high) if high else bytes([low])


def text(value: bytes) -> bytes:
    """Write a string without its tag."""
    return uint(len(value)) + value


type_specs = st.recursive(
    st.just(uint(5)) | numbers.map(lambda n: uint(0) + uint(n)),
    lambda inner: st.one_of(
        inner.map(lambda spec: uint(1) + spec),
        st.tuples(numbers, inner).map(lambda t: uint(2) + uint(t[0]) + t[1]),
        inner.map(lambda spec: uint(3) + spec),
        st.tuples(inner, inner).map(lambda t: uint(4) + t[0] + t[1]),
    ),
    max_leaves=4,
)


@st.composite
def refs(draw: st.DrawFn) -> tuple[int, bytes]:
    """Make a reference: its root, and it as written, with a path of fields and indices into the object or without."""
    root = draw(numbers)
    dots = draw(st.lists(st.integers(0, 2**31) | st.binary(min_size=1, max_size=9), max_size=3))
    written = uint(root) + uint(len(dots))
    for dot in dots:
        written += uint(dot << 1) if isinstance(dot, int) else uint((len(dot) << 1) - 1) + dot
    return root, written + (draw(type_specs) if dots else b"")


# A value as it must be read, its tag, and it as written behind the tag.
Written = tuple[Value, int, bytes]
leaves: st.SearchStrategy[Written] = st.one_of(
    st.tuples(numbers, st.integers(0, 4)).map(lambda t: (t[0], t[1], uint(t[0]))),
    st.sampled_from((5, 12)).map(lambda tag: (None, tag, b"")),
    refs().map(lambda ref: (Ref(ref[0]), 6, ref[1])),
    st.binary(max_size=9).map(lambda value: (value, 7, text(value))),
    st.tuples(numbers, numbers, refs()).map(lambda t: (Slice(t[0], t[2][0]), 8, uint(t[0]) + uint(t[1]) + t[2][1])),
    st.tuples(numbers, numbers).map(lambda t: (Sequence(t), 15, uint(t[0]) + uint(t[1]))),
)


def composed(inner: st.SearchStrategy[Written]) -> st.SearchStrategy[Written]:
    """Make values that hold others."""
    several = st.lists(inner, max_size=3)
    # The elements of an array have one type, so the same element again and again is what is tried.
    arrays = st.tuples(st.integers(0, 3), inner)
    return st.one_of(
        several.map(
            lambda xs: (Sequence(tuple(x[0] for x in xs)), 13, uint(len(xs)) + b"".join(tagged(x) for x in xs))
        ),
        arrays.map(
            lambda t: (Sequence((t[1][0],) * t[0]), 9, uint(t[0]) + (uint(t[1][1]) + t[1][2] * t[0] if t[0] else b""))
        ),
        st.tuples(st.integers(0, 3), inner, inner).map(
            lambda t: (
                Sequence((t[1][0], t[2][0]) * t[0]),
                10,
                uint(t[0]) + ((tagged(t[1]) + tagged(t[2]) + (t[1][2] + t[2][2]) * (t[0] - 1)) if t[0] else b""),
            )
        ),
        st.tuples(numbers, several).map(
            lambda t: (Struct(t[0], tuple(x[0] for x in t[1])), 11, uint(t[0]) + fields(t[1]))
        ),
        st.tuples(type_specs, inner).map(lambda t: (t[1][0], 14, t[0] + tagged(t[1]))),
    )


def tagged(value: Written) -> bytes:
    """Write a value with its tag."""
    return uint(value[1]) + value[2]


def fields(values: list[Written]) -> bytes:
    """Write a struct's fields as Struct.Alloc arranges them: none, one bare, several wrapped."""
    if not values:
        return uint(12)
    if len(values) == 1 and values[0][1] not in (12, 13):
        return tagged(values[0])
    return uint(13) + uint(len(values)) + b"".join(tagged(value) for value in values)


values = st.recursive(leaves, composed, max_leaves=8)


@given(objects=st.lists(st.tuples(numbers, values), max_size=4, unique_by=lambda t: t[0]), after=st.binary(max_size=5))
def test_what_is_written_is_read_and_nothing_behind_it(objects: list[tuple[int, Written]], after: bytes) -> None:
    stream = uint(1 << 63 | len(objects))
    for index, (number, value) in enumerate(objects):
        stream += uint(17) + text(b"type%d" % index) + uint(2) + text(b"a") + text(b"b")
        stream += uint(2) + uint(number) + tagged(value)
    cursor = Cursor(stream + after, "stream")
    graph = read_graph(cursor)
    assert cursor.left == len(after)
    assert graph.objects == {number: value[0] for number, value in objects}
    assert graph.types == tuple(Type(f"type{index}", ("a", "b")) for index in range(len(objects)))


@given(data=st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    for stream in (data, uint(1 << 63 | 3) + data, uint(1 << 63 | 1) + uint(2) + uint(1) + data):
        with suppress(Damaged):
            read_graph(Cursor(stream, "stream"))
