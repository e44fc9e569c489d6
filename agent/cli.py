"""The entry point `snapagent`: which commands there are, and how they end.

As `streamd.cli`: a command's module is imported when it is called; exit codes, messages on stderr, and with `--json`
exactly one object on stdout, `{"error": {"kind", "message", "exit_code"}}` when it failed.
"""

import difflib
import importlib
import json
import sys
from collections.abc import Sequence

import click

from agent.errors import AgentError
from agent.interrupts import Interrupts
from streamd.errors import Exit, StreamdError

# Name → (module, what `snapagent --help` says of it).
COMMANDS = {
    "hash": ("hash", "Print the hash that pods have to share to be restored from each other's snapshots."),
    "explain": ("explain", "Say whether a pod would be restored from a snapshot, and what decides."),
    "preflight": ("preflight", "Say which snapshots a change of manifests orphans, and why."),
    "daemon": ("daemon", "Decide when pods of this node are saved and restored, and do it."),
    "status": ("status", "Show what the agent of this node knows and does."),
    "snapshot": ("snapshot", "Save a pod of this node now."),
    "ls": ("ls", "List the snapshots that the agent keeps, and what has become of each."),
    "rm": ("rm", "Remove a snapshot: its object and its data."),
    "harvest": ("harvest", "Restore a snapshot once, unseen, to learn what its restores wait for."),
}


class _Commands(click.Group):
    """The commands by name, imported on demand."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(f"agent.commands.{COMMANDS[cmd_name][0]}").command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            if near:
                ctx.fail(f"No such command {args[0]!r}: did you mean {near[0]}?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.command(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="podsnap", prog_name="snapagent")
def cli() -> None:
    """Save and restore gVisor sandboxes on this node.

    On a node: daemon (its help has an example from end to end), status, snapshot, ls, rm, harvest. For manifests,
    and in CI: hash, explain, preflight.

    \b
    Exit codes: 0 done, 1 failed, 2 usage, 3 not found, 4 damaged, 5 not permitted,
      6 store unreachable, 7 refused, 130 interrupted (143: by SIGTERM)
    """


def run(arguments: Sequence[str], interrupts: Interrupts) -> Exit:
    """Run one command line."""
    as_json = "--json" in arguments
    try:
        result = cli.main(list(arguments), prog_name="snapagent", standalone_mode=False, obj=interrupts)
    except click.ClickException as error:
        if as_json:
            _print_error("usage", error.format_message(), Exit.USAGE)
        error.show()
        return Exit.USAGE
    except StreamdError as error:
        return _failed(error.kind, str(error), error.exit_code, as_json=as_json)
    except AgentError as error:
        return _failed(error.kind, str(error), error.ends_with, as_json=as_json)
    except (KeyboardInterrupt, click.Abort):
        code = Exit.TERMINATED if interrupts.terminated else Exit.INTERRUPTED
        return _failed("interrupted", "interrupted; nothing is left behind", code, as_json=as_json)
    # click gives the code of `--help` and the like back, a command of ours what it ends with, or nothing.
    return Exit(result) if isinstance(result, int) else Exit.DONE


def _failed(kind: str, message: str, code: Exit, *, as_json: bool) -> Exit:
    if as_json:
        _print_error(kind, message, code)
    # What came from a store, a log or a sandbox must not bring its control sequences to a terminal.
    safe = "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in message)
    click.echo(f"error: {safe}", err=True)
    return code


def _print_error(kind: str, message: str, code: Exit) -> None:
    click.echo(json.dumps({"error": {"kind": kind, "message": message, "exit_code": int(code)}}))


def main() -> None:
    """Run the command line of this process."""
    sys.exit(int(run(sys.argv[1:], Interrupts())))


if __name__ == "__main__":
    main()
