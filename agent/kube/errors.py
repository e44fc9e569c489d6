"""What can go wrong with an API object; the first three are an API server's answers 404, 409 and 409."""

from agent.errors import AgentError
from streamd.errors import Exit


class ObjectError(AgentError):
    """Something about one object; `where` says which, as `PodSnapshotPolicy default/web` or a file's name does."""

    def __init__(self, where: str, message: str) -> None:
        super().__init__(f"{where}: {message}")
        self.where = where


class NotFound(ObjectError):
    """There is no such object."""

    ends_with, kind = Exit.NOT_FOUND, "not-found"


class AlreadyExists(ObjectError):
    """An object of that name is there already."""

    ends_with, kind = Exit.REFUSED, "already-exists"


class Conflict(ObjectError):
    """The object was changed since it was read: read it again, and decide again."""

    ends_with, kind = Exit.REFUSED, "conflict"


class InvalidObject(ObjectError):
    """It can't be used; `problems` says everything that is wrong with it, one line each, with the field's path."""

    ends_with, kind = Exit.USAGE, "invalid-object"

    def __init__(self, where: str, problems: tuple[str, ...]) -> None:
        super().__init__(where, "; ".join(problems))
        self.problems = problems


class ReadOnly(ObjectError):
    """It belongs to the user, who keeps it in a file; the agent writes only its status."""

    ends_with, kind = Exit.REFUSED, "read-only"


class Unavailable(ObjectError):
    """What keeps the objects can't be used right now."""

    kind = "objects-unavailable"
