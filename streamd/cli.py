"""The entry point `streamd`: which commands there are, and how they end.

A command's module is imported when it is called (Google's client alone costs half a second); this one imports click and
nothing of ours that is heavy. Every way to end is decided here: exit code, message on stderr, and with `--json` exactly
one object on stdout, `{"error": {"kind", "message", "exit_code", …}}` when it failed.
"""

import difflib
import importlib
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import click

from streamd.commands.invocation import Invocation
from streamd.commands.output import print_json_error, printable
from streamd.config import LOG_LEVELS
from streamd.daemon.relay import error_record, single_error
from streamd.errors import Exit, StreamdError
from streamd.lost_interrupts import tell_again

# Name → (module, what `streamd --help` says of it: so that help imports no command).
COMMANDS = {
    "push": ("push", "Save an image directory as a snapshot in a store."),
    "mount": ("mount", "Serve a snapshot as files, fetched when they are read."),
    "umount": ("umount", "Unmount a snapshot."),
    "status": ("status", "Show the mounts and images of this host and how far they are."),
    "report": ("report", "Show what a mount's record says: reads, waits, the link."),
    "fail": ("fail", "Fail the reads that wait on a mount."),
    "pull": ("pull", "Copy a snapshot to a directory, verified."),
    "ls": ("ls", "List the snapshots of a store."),
    "inspect": ("inspect", "Show what a snapshot holds and what it was made on."),
    "verify": ("verify", "Check every chunk of a snapshot in the store."),
    "trace": ("trace", "Show or forget what restores of a snapshot wait for first."),
    "rm": ("rm", "Remove a snapshot."),
    "gc": ("gc", "Remove what interrupted pushes and removals left in a store."),
    "cache": ("cache", "List, clear or check the node's cache."),
    "daemon": ("daemon", "Serve images to the pods of this node."),
    "image": ("image", "Ask the daemon for images, list them and end them."),
    "top": ("top", "Watch the daemon's images as they load."),
    "events": ("events", "Show what happens to the daemon's images."),
    "drain": ("drain", "Let the daemon take no new images, and wait for those in use."),
}


class _Commands(click.Group):
    """The commands by name, imported on demand."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(f"streamd.commands.{COMMANDS[cmd_name][0]}").command
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
@click.version_option(package_name="podsnap", prog_name="streamd")
@click.option("--config", "config_path", type=click.Path(path_type=Path), help="Settings [/etc/streamd/streamd.toml].")
@click.option("--log-level", type=click.Choice(LOG_LEVELS), help="How much is logged [info].")
@click.pass_context
def cli(context: click.Context, config_path: Path | None, log_level: str | None) -> None:
    """Keep snapshots of gVisor sandboxes in an object store, and restore from them while they load.

    \b
    A first round, on one machine:
      runsc checkpoint --leave-running --exclude-committed-zero-pages --image-path IMAGE CONTAINER
      streamd push IMAGE gs://bucket/prefix --id web-1
      streamd mount gs://bucket/prefix/web-1 /mnt/web-1
      runsc restore --background --image-path /mnt/web-1 --bundle BUNDLE CONTAINER
      streamd umount /mnt/web-1

    \b
    Stores: gs://bucket/prefix, file:///dir (for trials: 'file:///dir?latency=15ms&rate=100MB/s')
    Exit codes: 0 done, 1 failed, 2 usage, 3 not found, 4 damaged, 5 not permitted,
      6 store unreachable, 7 refused (exists, in use, mismatch), 130 interrupted (143: by SIGTERM)
    """
    context.obj = Invocation(config_path=config_path, log_level=log_level)
    if config_path is not None:
        context.obj.config()  # a file that was named is right, whether the command needs it or not


_terminated = False


def _terminate(_number: int, frame: FrameType | None) -> None:
    """End on SIGTERM as on Ctrl-C, by whatever handles that now: Trio's handler doesn't interrupt Trio itself."""
    global _terminated
    _terminated = True
    interrupt = signal.getsignal(signal.SIGINT)
    if not callable(interrupt):  # ignored, as in the background of a script
        raise KeyboardInterrupt
    interrupt(signal.SIGINT, frame)


def _interrupted(error: BaseException) -> bool:
    """Tell a Ctrl-C, also one among others in a group."""
    if isinstance(error, BaseExceptionGroup):
        return any(map(_interrupted, error.exceptions))
    return isinstance(error, KeyboardInterrupt | click.Abort)


def _end(error: BaseException, *, as_json: bool) -> Exit | None:
    """Say how a command failed; give its exit code, None for what only a bug can raise."""
    record: dict[str, object] = {"message": str(error), "exit_code": int(Exit.FAILED)}
    match error:
        case click.ClickException():
            record |= {"kind": "usage", "message": error.format_message(), "exit_code": int(Exit.USAGE)}
        case StreamdError():
            record = error_record(error)
        case _ if _interrupted(error):
            record |= {"kind": "interrupted", "message": "interrupted", "exit_code": int(Exit.INTERRUPTED)}
        case _:
            record |= {"kind": "internal", "message": f"{type(error).__name__}: {error}"}
    if _terminated and record["exit_code"] == Exit.INTERRUPTED:
        record["exit_code"] = int(Exit.TERMINATED)
    if as_json:
        print_json_error(record)
    match record["kind"]:
        case "internal":
            return None
        case "usage" if isinstance(error, click.ClickException):
            error.show()
        case _:
            # Line by line: a message may quote a log, and must not bring its control sequences.
            click.echo("error: " + "\n".join(map(printable, str(record["message"]).split("\n"))), err=True)
    return Exit(int(str(record["exit_code"])))


def run(arguments: Sequence[str]) -> Exit:
    """Run one command line."""
    try:
        result = cli.main(list(arguments), prog_name="streamd", standalone_mode=False)
    except (Exception, KeyboardInterrupt, BaseExceptionGroup) as error:
        code = _end(single_error(error), as_json="--json" in arguments)
        if code is None:
            raise
        return code
    # click gives the code of `--help` and the like back; a command of ours gives nothing.
    return Exit(result) if isinstance(result, int) else Exit.DONE


def main() -> None:
    """Run the command line of this process."""
    signal.signal(signal.SIGTERM, _terminate)
    tell_again()
    code = run(sys.argv[1:])
    if code in (Exit.INTERRUPTED, Exit.TERMINATED):
        # Under -m, a Ctrl-C within an import's exec (dataclasses) makes CPython die of SIGINT at its end, though it was
        # handled (pythonrun.c: unhandled_keyboard_interrupt); another exec takes that back.
        exec("")  # noqa: S102
    sys.exit(int(code))


if __name__ == "__main__":
    main()
