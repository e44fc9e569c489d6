"""gVisor's state encoding (pkg/state/wire/wire.go, pkg/state/{encode,decode}.go), as far as small structures need it.

A stream is: a header (number of objects, with bit 63 set), then types and objects in any order; an object is its id and
its value. The root object has id 1. Every number is a varint (`varints.py`).

Values are given as they are nested; the rest of the graph is behind references, which are not followed.
"""

from dataclasses import dataclass

from streamd.errors import Damaged
from streamd.snapshot.varints import Cursor

_OBJECT_FLAG = 1 << 63
_ROOT = 1
# Far more than a list of a pod's memory files needs; the fields of types and the steps of references count, too. In a
# list of Nil every element but the first takes no byte at all, so the bytes that are there bound nothing.
_MAX_VALUES = 2**18
_MAX_DEPTH = 32


@dataclass(frozen=True, slots=True)
class Type:
    """A struct type: types are numbered from 1 in the order in which they come."""

    name: str
    fields: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Struct:
    """A struct: the values of its type's fields, in order."""

    type_id: int
    values: tuple["Value", ...]


@dataclass(frozen=True, slots=True)
class Slice:
    """A slice: `length` elements of the array that is the object `root`; the array may be longer (its capacity)."""

    length: int
    root: int


@dataclass(frozen=True, slots=True)
class Ref:
    """A pointer or a map: the object `root`, 0 for nil; what lies within that object is passed over."""

    root: int


@dataclass(frozen=True, slots=True)
class Sequence:
    """An array, the fields of a struct, or a map's keys and values in turn."""

    values: tuple["Value", ...]


Value = int | bytes | None | Type | Struct | Slice | Ref | Sequence


@dataclass(frozen=True, slots=True)
class Graph:
    """A whole stream: the types in their order, the objects by id."""

    types: tuple[Type, ...]
    objects: dict[int, Value]

    def root_field(self, type_name: str, field: str) -> Value:
        """Give a field of the root object, which must be of that type. Raises: `Damaged`."""
        root = self.objects.get(_ROOT)
        if not isinstance(root, Struct) or not 1 <= root.type_id <= len(self.types):
            raise Damaged(f"{type_name}: the root object is no struct of a known type")
        found = self.types[root.type_id - 1]
        if found.name != type_name or len(found.fields) != len(root.values) or field not in found.fields:
            raise Damaged(f"{type_name}.{field}: the root object is a {found.name[:80]!r} of {len(root.values)} fields")
        return root.values[found.fields.index(field)]


def read_graph(cursor: Cursor) -> Graph:
    """Take one stream; the cursor is then behind it. Raises: `Damaged`."""
    return _Reader(cursor).graph()


class _Reader:
    def __init__(self, cursor: Cursor) -> None:
        self._cursor = cursor
        self._values_left = _MAX_VALUES

    def graph(self) -> Graph:
        header = self._cursor.uint()
        if not header & _OBJECT_FLAG:
            raise self._damaged("a header that announces no objects")
        count = header & ~_OBJECT_FLAG
        types: list[Type] = []
        objects: dict[int, Value] = {}
        seen = 0
        while seen < count:
            value = self._value(0)
            if isinstance(value, Type):
                types.append(value)
            elif isinstance(value, int):
                seen += 1
                objects[value] = self._value(0)
            else:
                raise self._damaged("neither a type nor an object's id")
        return Graph(tuple(types), objects)

    def _value(self, depth: int, tag: int | None = None) -> Value:
        """Take a value, with its tag in front unless `tag` is given. Tags are numbered as in wire.go."""
        self._count(1)
        if depth > _MAX_DEPTH:
            raise self._damaged(f"more than {_MAX_DEPTH} levels of values")
        uint = self._cursor.uint
        match uint() if tag is None else tag:
            case 0 | 1 | 2 | 3 | 4:  # Bool, Int, Uint, Float32, Float64: all varints, whose meaning nobody needs here
                return uint()
            case 5 | 12:  # Nil, NoObjects
                return None
            case 6:  # Ref
                return self._ref()
            case 7:  # String
                return self._cursor.take(uint())
            case 8:  # Slice: length, capacity, reference
                length, _ = uint(), uint()
                return Slice(length, self._ref().root)
            case 9:  # Array: the first element's tag holds for all
                return self._repeated(uint(), 1, depth)
            case 10:  # Map: the same, for keys and for values
                return self._repeated(uint(), 2, depth)
            case 11:  # Struct: one field bare, none or several wrapped
                type_id = uint()
                fields = self._value(depth + 1, wrapped := uint())
                if wrapped == 13:
                    assert isinstance(fields, Sequence)
                    return Struct(type_id, fields.values)
                return Struct(type_id, () if wrapped == 12 else (fields,))
            case 13:  # MultipleObjects
                return Sequence(tuple(self._value(depth + 1) for _ in range(uint())))
            case 14:  # Interface: a type and a value
                self._pass_type_spec(depth)
                return self._value(depth + 1)
            case 15 | 16:  # Complex64, Complex128
                return Sequence((uint(), uint()))
            case 17:  # Type
                name = self._text()
                self._count(fields := uint())
                return Type(name, tuple(self._text() for _ in range(fields)))
            case unknown:
                raise self._damaged(f"a value of unknown type {unknown}")

    def _repeated(self, count: int, of_each: int, depth: int) -> Sequence:
        tags: list[int] = []
        values: list[Value] = []
        for index in range(count):
            for which in range(of_each):
                if index == 0:
                    tags.append(self._cursor.uint())
                values.append(self._value(depth + 1, tags[which]))
        return Sequence(tuple(values))

    def _ref(self) -> Ref:
        root = self._cursor.uint()
        self._count(dots := self._cursor.uint())
        for _ in range(dots):
            dot = self._cursor.uint()
            if dot & 1:  # a field's name: minus its length, zigzag
                self._cursor.take((dot >> 1) + 1)
        if dots:
            self._pass_type_spec(0)
        return Ref(root)

    def _pass_type_spec(self, depth: int) -> None:
        if depth > _MAX_DEPTH:
            raise self._damaged(f"more than {_MAX_DEPTH} levels of types")
        match self._cursor.uint():
            case 0:  # the id of a type
                self._cursor.uint()
            case 1 | 3:  # pointer, slice
                self._pass_type_spec(depth + 1)
            case 2:  # array
                self._cursor.uint()
                self._pass_type_spec(depth + 1)
            case 4:  # map
                self._pass_type_spec(depth + 1)
                self._pass_type_spec(depth + 1)
            case 5:  # nil
                pass
            case unknown:
                raise self._damaged(f"a type of unknown kind {unknown}")

    def _count(self, values: int) -> None:
        self._values_left -= values
        if self._values_left < 0:
            raise self._damaged(f"more than {_MAX_VALUES} values")

    def _text(self) -> str:
        return self._cursor.take(self._cursor.uint()).decode("utf-8", "replace")

    def _damaged(self, why: str) -> Damaged:
        return Damaged(f"{self._cursor.what}: {why} at byte {self._cursor.at}")
