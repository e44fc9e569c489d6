"""runsc's command line, as its callers write it (pure).

`runsc GLOBAL… VERB FLAG… ID`, in the spelling of Go's `flag` package: `-name` or `--name`, a value after `=` or, unless
the flag is boolean, as the next argument. A flag that is in neither table and has no `=` could be either, so the line
is in doubt. containerd's runc shim writes `--root DIR --log FILE --log-format json create --bundle DIR --pid-file FILE
ID` (go-runc, runc.go), its runsc shim the same with `=` for the global ones (gVisor, pkg/shim/v1/runsccmd), Docker like
the runc shim.
"""

from collections.abc import Sequence

from agent.errors import AgentError
from agent.wrapper.record import Record

# Of runsc's flags those that callers are known to write with the value as an argument of its own …
_WITH_VALUE = frozenset(
    {
        *("root", "log", "log-fd", "log-format", "debug-log", "debug-log-fd", "debug-log-format", "panic-log"),
        *("network", "platform", "overlay2", "file-access", "host-uds", "watchdog-action"),
        *("bundle", "console-socket", "pid-file", "user-log", "image-path", "fs-restore-image-path"),
        *("process", "internal-pid-file", "resources"),
    }
)
# … and those that are written without any.
_BOOLEAN = frozenset(
    {
        *("debug", "systemd-cgroup", "rootless", "ignore-cgroups", "directfs", "nvproxy", "alsologtostderr", "strace"),
        *("force", "all", "detach", "background", "fs-restore-direct"),
    }
)


class UnclearArguments(AgentError):
    """A command line that can't be told apart with certainty."""


class CommandLine(Record):
    """One call of runsc. `flags`: the last value of each flag that has one; `prefix`: all that precedes the verb."""

    prefix: tuple[str, ...]
    verb: str
    flags: dict[str, str]
    arguments: tuple[str, ...]

    @property
    def container_id(self) -> str:
        """The one argument of `create`, `start` and their like. Raises: `UnclearArguments`."""
        if not self.arguments or not self.arguments[0]:
            raise UnclearArguments(f"`{self.verb}` without a container id")
        return self.arguments[0]

    @property
    def root(self) -> str:
        """runsc's root directory; empty when it is left to runsc."""
        return self.flags.get("root", "")

    def replaced_by(self, runsc: str, verb: str, *flags: str, log: str | None = None) -> tuple[str, ...]:
        """Give the vector that calls `verb` for the same container, with the same global flags, or another log."""
        other_log = () if log is None else (f"--log={log}",)  # of two flags the later one counts
        return (runsc, *self.prefix, *other_log, verb, *flags, self.container_id)


def parse(arguments: Sequence[str]) -> CommandLine:
    """Take apart what follows the program's name. Raises: `UnclearArguments`."""
    flags: dict[str, str] = {}
    at = _parse_flags(arguments, 0, flags)
    if at == len(arguments):
        raise UnclearArguments("no verb")
    rest = _parse_flags(arguments, at + 1, flags)
    return CommandLine(tuple(arguments[:at]), arguments[at], flags, tuple(arguments[rest:]))


def _parse_flags(arguments: Sequence[str], at: int, flags: dict[str, str]) -> int:
    """Read flags into `flags`; give where the first argument that is none stands."""
    while at < len(arguments):
        argument = arguments[at]
        if not argument.startswith("-") or argument == "-":
            return at
        if argument == "--":
            return at + 1
        name, has_value, value = argument.removeprefix("-").removeprefix("-").partition("=")
        if not has_value and name in _WITH_VALUE:
            at += 1
            if at == len(arguments):
                raise UnclearArguments(f"--{name} without its value")
            value = arguments[at]
        elif not has_value and name not in _BOOLEAN:
            raise UnclearArguments(f"--{name} is not known to this wrapper: write it as --{name}=VALUE")
        flags[name] = value
        at += 1
    return at
