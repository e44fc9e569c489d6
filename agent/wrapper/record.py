"""Named tuples for a process that lives 30 ms: `typing` and its NamedTuple cost it a quarter of them."""

from operator import itemgetter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any
    from typing import NamedTuple as Record

    JsonObject = dict[str, Any]
else:
    JsonObject = dict

    class Record(tuple):
        """What `typing.NamedTuple` is, as far as it is used here; checkers of types see that one."""

        __slots__ = ()
        __match_args__ = ()

        def __init_subclass__(cls) -> None:
            members = vars(cls)
            cls.__match_args__ = tuple(members.get("__annotations__", ()))
            cls._defaults = {name: members[name] for name in cls.__match_args__ if name in members}
            for index, name in enumerate(cls.__match_args__):
                setattr(cls, name, property(itemgetter(index)))

        def __new__(cls, *values: object, **named: object) -> "Record":
            left = cls.__match_args__[len(values) :]
            given = cls._defaults | named
            if len(values) + len(left) > len(cls.__match_args__) or not named.keys() <= set(left) <= given.keys():
                raise TypeError(f"{cls.__name__} has {cls.__match_args__}; not given as {values} and {named}")
            return tuple.__new__(cls, values + tuple(given[name] for name in left))

        def __repr__(self) -> str:
            members = ", ".join(f"{name}={value!r}" for name, value in self._asdict().items())
            return f"{type(self).__name__}({members})"

        def _asdict(self) -> dict[str, object]:
            return dict(zip(self.__match_args__, self, strict=True))

        def _replace(self, **named: object) -> "Record":
            return type(self)(**(self._asdict() | named))


__all__ = ["TYPE_CHECKING", "JsonObject", "Record"]
