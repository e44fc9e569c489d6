"""Errors that cross a process border: as JSON from the mount process to the command that asked, and to `--json`.

The receiver raises what the sender caught: same kind, same message, same exit code.
"""

from collections.abc import Mapping

from streamd.errors import Exit, StreamdError

_JSON_SCALARS = (str, int, float, bool, type(None))


class RelayedError(StreamdError):
    """An error of another process; `facts` are its attributes."""

    def __init__(self, kind: str, message: str, exit_code: Exit, facts: Mapping[str, object]) -> None:
        super().__init__(message)
        self.kind = kind
        self.exit_code = exit_code
        self.facts = dict(facts)


def single_error(error: BaseException) -> BaseException:
    """Take a lone exception out of the groups that nurseries wrap it in."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _json_value(value: object) -> object:
    """Give what JSON can hold of a fact: scalars, and lists and tables of them; the rest as text."""
    match value:
        case _ if isinstance(value, _JSON_SCALARS):
            return value
        case list() | tuple():
            return [_json_value(item) for item in value]
        case dict():
            return {str(key): _json_value(item) for key, item in value.items()}
        case _:
            return str(value)


def error_record(error: StreamdError) -> dict[str, object]:
    """Describe an error: `kind`, `message`, `exit_code` and its public attributes."""
    facts = error.facts if isinstance(error, RelayedError) else vars(error)
    record = {key: _json_value(value) for key, value in facts.items() if not key.startswith("_")}
    return record | {"kind": error.kind, "message": str(error), "exit_code": int(error.exit_code)}


def relayed(record: object) -> RelayedError:
    """Make the error that a record describes. Whatever is wrong with the record, it is an error still."""
    if not isinstance(record, dict):
        return RelayedError("failed", "the other process reported an error that can't be read", Exit.FAILED, {})
    facts = {str(key): value for key, value in record.items() if key not in ("kind", "message", "exit_code")}
    kind, message, code = record.get("kind"), record.get("message"), record.get("exit_code")
    return RelayedError(
        kind if isinstance(kind, str) else "failed",
        message if isinstance(message, str) else "no message",
        next((exit_code for exit_code in Exit if exit_code == code and exit_code != Exit.DONE), Exit.FAILED),
        facts,
    )
